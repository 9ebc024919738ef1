"""Class labels in the order of the scores, and checks of labels and indices outside their range.

A kernel records an index that is out of range; the host raises the error later.
"""

from __future__ import annotations

import math

from caffepy.backend import Array
from caffepy.errors import DataError
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Layer
from caffepy.layers.layout_adapter import LayoutAdapter


class Labels:
    """The labels of a layer that scores classes along one axis, and the device flag for labels outside the classes.

    Args:
        layer: the layer, for messages.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._backend = layer.backend
        self.bad_index = self._backend.zeros((1,), "int32")
        """Index in the batch of a label outside the classes, int32 of shape (1,); -1: none."""
        self._backend.fill(self.bad_index, -1)
        self._loads = 0
        self._first_pass = 0
        """The first pass since the last check. Replayed CUDA graphs do not update it."""

    def reshape(self, scores: Blob, labels: Blob, axis: int) -> None:
        """Check that there is one label for each position of the scores.

        Raises:
            ShapeError: there are more or fewer labels.
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
        self._adapter = LayoutAdapter(self._backend, labels.shape, (self.size,))

    def load(self) -> Array:
        """Return the labels of this pass, shape (size,), in the logical order of the scores without the class axis."""
        if self._loads == 0:
            self._first_pass = self._layer.context.passes.number
        self._loads += 1
        return self._adapter.load(self._blob.data)

    def loaded(self) -> Array:
        """Return the labels of the last `load`."""
        return self._adapter.target(self._blob.data)

    def raise_device_errors(self) -> None:
        """Raise if a label was outside the classes since the last check. Waits for the device.

        Raises:
            DataError: names the record after a single pass, else the first sample of the passes.
        """
        now = self._layer.context.passes.number
        first, exact = self._first_pass, self._loads == 1 and now - self._first_pass <= 1
        self._loads, self._first_pass = 0, now
        index = int(self._backend.to_host(self.bad_index)[0])
        if index < 0:
            return
        self._backend.fill(self.bad_index, -1)
        row = index * self._blob.shape[0] // self.size if self._blob.shape else 0
        if exact:
            value = self._blob.host_data().reshape(-1)[index]
            what = f"the label of {self._record(first, row)} is {value:g},"
        else:
            what = f"a label of the samples from {self._sample(first)} on, number {row} of its batch, is"
        raise DataError(
            f"{self._layer.where}: {what} outside the {self.classes} classes, 0 to "
            f"{self.classes - 1}; correct the data, or give the blob '{self._layer.bottom_names[0]}' more classes"
        )

    def _sample(self, number: int) -> int:
        """Return the global number of this device's first sample in a pass."""
        context = self._layer.context
        return context.first_sample(number) if context.first_sample else 0

    def _record(self, number: int, row: int) -> str:
        """Return the name of the record in row `row` of the batch of pass `number`."""
        sample = f"sample {self._sample(number) + row}"
        describe = self._layer.context.describe_sample
        return f"{describe(number, row)} ({sample})" if describe else sample


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
