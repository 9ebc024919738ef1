"""Class labels: which layout they need, and what happens to those that name no class."""

from __future__ import annotations

import math

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.errors import DataError
from caffepy.layers.core.base import Layer
from caffepy.layers.core.order import LayoutAdapter


class Labels:
    """The labels of a layer that scores classes along one axis, and the device's flag for bad ones.

    Args:
        layer: the layer, for messages.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._backend = layer.backend
        self.bad = self._backend.zeros((1,), "int32")
        """Index in the batch of a label outside the classes, -1 if there was none."""
        self._backend.fill(self.bad, -1)
        self._pulls = 0
        self._first = 0
        """The first pass since the last check; replayed CUDA graphs do not update it."""

    def reshape(self, scores: Blob, labels: Blob, axis: int) -> None:
        """Check the shapes.

        Raises:
            ShapeError: there is not one label for each position of the scores.
        """
        self.classes = scores.shape[axis]
        self.outer = math.prod(scores.shape[:axis])
        self.size = self.outer * math.prod(scores.shape[axis + 1 :])
        if labels.count != self.size:
            raise self._layer.shape_error(
                f"needs one label for each position: {self.size} for classes along axis {axis}, not {labels.count}",
                scores, labels,
            )  # fmt: skip
        self._blob = labels
        self._row = LayoutAdapter(self._backend, labels.shape, (self.size,))

    def load(self) -> Array:
        """The labels of this pass, shape (size,), in the logical order of the scores without their axis."""
        if self._pulls == 0:
            self._first = self._layer.context.passes.number
        self._pulls += 1
        return self._row.load(self._blob.data)

    def kept(self) -> Array:
        """The labels as the last `load` gave them."""
        return self._row.target(self._blob.data)

    def raise_device_errors(self) -> None:
        """Raise if a label since the last check was outside the classes; waits for the device.

        Raises:
            DataError: naming the record, exactly so if there was one pass since.
        """
        now = self._layer.context.passes.number
        first, exact = self._first, self._pulls == 1 and now - self._first <= 1
        self._pulls, self._first = 0, now
        index = int(self._backend.to_host(self.bad)[0])
        if index < 0:
            return
        self._backend.fill(self.bad, -1)
        row = index * self._blob.shape[0] // self.size if self._blob.shape else 0
        if exact:
            value = self._blob.host_data().reshape(-1)[index]
            what = f"the label of {self._record(first, row)} is {value:g},"
        else:
            what = f"a label of the samples from {self._sample(first)} on, number {row} of its batch, is"
        raise DataError(
            f"layer '{self._layer.name}' ({self._layer.type}): {what} outside the {self.classes} classes, 0 to "
            f"{self.classes - 1}; correct the data, or give the blob '{self._layer.param.bottom[0]}' more classes"
        )

    def _sample(self, number: int) -> int:
        """The global number of this device's first sample in a pass."""
        context = self._layer.context
        return context.first_sample(number) if context.first_sample else 0

    def _record(self, number: int, row: int) -> str:
        """What a pass had in this row of its batch."""
        sample = f"sample {self._sample(number) + row}"
        describe = self._layer.context.describe_sample
        return f"{describe(number, row)} ({sample})" if describe else sample
