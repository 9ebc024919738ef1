"""Class labels: which layout they need, and what happens to those that name no class."""

from __future__ import annotations

import math

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.errors import DataError
from caffepy.layers.base import Layer
from caffepy.layers.order import Reordered


class Labels:
    """The labels of a layer that scores classes along one axis, and the device's flag for bad ones.

    Args:
        layer: the layer, for messages.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._backend = layer.backend
        self.bad = self._backend.zeros((1,), "int32")
        """Place of a label outside the classes in its batch, -1 if there was none."""
        self._backend.fill(self.bad, -1)
        self._passes = 0

    def reshape(self, scores: Blob, labels: Blob, axis: int) -> None:
        """Check the shapes.

        Raises:
            ShapeError: there is not one label for each place.
        """
        self.classes = scores.shape[axis]
        self.outer = math.prod(scores.shape[:axis])
        self.places = self.outer * math.prod(scores.shape[axis + 1 :])
        if labels.count != self.places:
            raise self._layer.shape_error(
                f"needs one label for each place: {self.places} for classes along axis {axis}, not {labels.count}",
                scores, labels,
            )  # fmt: skip
        self._blob = labels
        self._row = Reordered(self._backend, labels.shape, (self.places,))

    def pull(self) -> Array:
        """The labels of this pass, shape (places,), in the logical order of the scores without their axis."""
        if self._passes == 0:
            self._first_pass = self._layer.context.passes.number
            self._first_sample = self._layer.first_sample()
        self._passes += 1
        return self._row.pull(self._blob.data)

    def kept(self) -> Array:
        """The labels as the last `pull` gave them."""
        return self._row.target(self._blob.data)

    def check(self) -> None:
        """Raise if a label since the last check was outside the classes; waits for the device.

        Raises:
            DataError: naming the record, exactly so if there was one pass since.
        """
        passes, self._passes = self._passes, 0
        place = int(self._backend.to_host(self.bad)[0]) if passes else -1
        if place < 0:
            return
        self._backend.fill(self.bad, -1)
        row = place * self._blob.shape[0] // self.places if self._blob.shape else 0
        if passes == 1:
            value = self._blob.host_data().reshape(-1)[place]
            found = f"the label of {self._record(row)} is {value:g},"
        else:
            found = f"a label of the samples from {self._first_sample} on, number {row} of its batch, is"
        raise DataError(
            f"layer '{self._layer.name}' ({self._layer.type}): {found} outside the {self.classes} classes, 0 to "
            f"{self.classes - 1}; correct the data, or give the blob '{self._layer.param.bottom[0]}' more classes"
        )

    def _record(self, row: int) -> str:
        """What the first pass since the last check had in this row of its batch."""
        number = f"sample {self._first_sample + row}"
        describe = self._layer.context.describe_sample
        return f"{describe(self._first_pass, row)} ({number})" if describe else number
