"""What becomes of indices that name nothing: the device notes one, the host raises."""

from __future__ import annotations

from caffepy.errors import DataError
from caffepy.layers.core.base import Layer


class IndexCheck:
    """The device's flag for indices that name nothing.

    Args:
        layer: the layer, for messages.
        problem: what is said of an index that names nothing, and what to do; `{}` stands for its position.
    """

    def __init__(self, layer: Layer, problem: str) -> None:
        self._layer = layer
        self._problem = problem
        self.bad = layer.backend.zeros((1,), "int32")
        """Position of an index that names nothing, -1 if there was none."""
        layer.backend.fill(self.bad, -1)

    def raise_device_errors(self) -> None:
        """Raise if there was such an index since the last check; waits for the device.

        Raises:
            DataError: with the position of one of them.
        """
        position = int(self._layer.backend.to_host(self.bad)[0])
        if position < 0:
            return
        self._layer.backend.fill(self.bad, -1)
        raise DataError(f"layer '{self._layer.name}' ({self._layer.type}): {self._problem.format(position)}")
