"""The number of the present pass on the device, for settings that change from pass to pass."""

from __future__ import annotations

from caffepy.backend import Array
from caffepy.layers.core.base import Layer


class PassNumber:
    """A device number that each forward pass sets, captured ones included.

    Args:
        layer: of the net whose passes are counted.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._number = layer.backend.zeros((1,))

    def load(self) -> Array:
        """Return the number of the present pass, float32 of shape (), from 0. Snapshots restore it."""
        backend, counter = self._layer.backend, self._layer.counter()
        if isinstance(counter, tuple):
            backend.fill(self._number, counter[0])
        else:
            backend.copy(counter[:1], self._number)
        return backend.view(self._number, ())
