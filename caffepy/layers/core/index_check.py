"""Check of indices: a kernel records one that is out of range, the host raises later."""

from __future__ import annotations

from caffepy.errors import DataError
from caffepy.layers.core.base import Layer


class IndexCheck:
    """A device flag that kernels set for an index out of range.

    Args:
        layer: the layer, for messages.
        problem: the message, with advice; `{}` stands for the position of the index.
    """

    def __init__(self, layer: Layer, problem: str) -> None:
        self._layer = layer
        self._problem = problem
        self.bad_index = layer.backend.zeros((1,), "int32")
        """Position of an index out of range, int32 of shape (1,); -1: none."""
        layer.backend.fill(self.bad_index, -1)

    def raise_device_errors(self) -> None:
        """Raise if an index was out of range since the last check. Waits for the device.

        Raises:
            DataError: with the position of one such index.
        """
        position = int(self._layer.backend.to_host(self.bad_index)[0])
        if position < 0:
            return
        self._layer.backend.fill(self.bad_index, -1)
        raise DataError(f"{self._layer.where}: {self._problem.format(position)}")
