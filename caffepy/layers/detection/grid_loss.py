"""The base class of the losses of YOLO, which are computed on the host."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.formulas import scaled, total
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.loss.base import LossLayer
from caffepy.proto import caffe_pb2


@dataclass(frozen=True)
class GridLoss:
    """The result of one batch.

    Args:
        gradient: of the first bottom, without the loss weight.
        total: part of the loss that is a sum over samples, divided by their number.
        sums: further parts, each of which is divided by one of `counts`.
        counts: the divisors, on this device.
    """

    gradient: Rows
    total: float
    sums: tuple[float, ...] = ()
    counts: tuple[float, ...] = ()


class GridLossLayer(LossLayer):
    """A loss whose gradient the forward pass computes on the host: `compute` returns both.

    The gradient is not the derivative of the reported loss: darknet reports the sum of the squares of the gradient.
    """

    counted = 0
    """Number of parts that are divided by a count over all devices, such as the number of objects."""

    def compute(self, values: Rows, labels: Rows) -> GridLoss:
        """Return gradient and loss for the bottoms' values."""
        raise NotImplementedError

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._totals = self.backend.zeros((2 * self.counted + 1,))
        self._entries = [self.backend.view(self._totals[i : i + 1], ()) for i in range(2 * self.counted + 1)]
        self._part = self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not bottom[0].shape:
            raise self.shape_error("the predictions need a first axis, N", bottom[0])
        top[0].reshape(())
        self._divisor = None if self.counted else 1.0

    def capture_blocker(self) -> str | None:
        return "it compares boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        values, labels = (self.backend.to_host(blob.data) for blob in bottom[:2])
        totals = np.zeros(2 * self.counted + 1, np.float32)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):  # the solver handles a loss that is not finite
                result = self.compute(values, labels)
            self._gradient = result.gradient.reshape(bottom[0].shape)
            totals[:] = (result.total, *result.sums, *result.counts)
        self.backend.from_host(totals, self._totals)
        self.backend.apply(scaled, (self._entries[0], 1.0), (top[0].data,))
        for i in range(1, self.counted + 1):
            self.write_loss(self._entries[i], self._entries[self.counted + i], None, self._part)
            self.backend.apply(total, (top[0].data, self._part), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if self.backend.holds_values:
            self.backend.from_host(self._gradient, bottom[0].diff)
        else:
            self.backend.fill(bottom[0].diff, 0)
        self.backend.apply(scaled, (bottom[0].diff, self.weight()), (bottom[0].diff,))
        self.apply_top_gradient(top, bottom[0].diff)

    @property
    def training_devices(self) -> int:
        """Number of devices over whose losses the training averages."""
        return self.context.shard.parts if self.context.phase == caffe_pb2.TRAIN else 1


# -- lists of objects ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class GridObjects:
    """The objects of a batch, ordered by image.

    Args:
        images: (n,) index of the image.
        classes: (n,) class from 0.
        boxes: (n, 4) center x, center y, width, height.
    """

    images: Rows
    classes: Rows
    boxes: Rows

    def cells(self, height: int, width: int) -> tuple[Rows, Rows]:
        """Return row and column of the cell of each object's center; outside of the image the nearest cell."""
        columns = (self.boxes[:, 0] * np.float32(width)).astype(np.int64)
        rows = (self.boxes[:, 1] * np.float32(height)).astype(np.int64)
        return np.clip(rows, 0, height - 1), np.clip(columns, 0, width - 1)


YOLO_COLUMNS, CORNER_COLUMNS = 5, 8


class GridObjectsReader:
    """Reads the objects in the second bottom of a loss of YOLO.

    Rows of 5 are class from 0, center x, center y, width, height (MobileNet-YOLO); the list of an image ends at a
    width of 0. Rows of 8 are those of AnnotatedData, whose labels begin at 1.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def reshape(self, bottom: Blobs) -> None:
        """Check the second bottom's shape.

        Raises:
            ShapeError: it holds no lists of objects.
        """
        shape, images = bottom[1].shape, bottom[0].shape[0]
        self._images = images
        self.corners = len(shape) == 4 and shape[0] == 1 and shape[-1] == CORNER_COLUMNS
        if self.corners:
            return
        if not shape or shape[0] != images or bottom[1].count % (max(images, 1) * YOLO_COLUMNS):
            raise self._layer.shape_error(
                "needs objects N 1 T 5 (class, center x, center y, width, height) or 1 1 G 8 of AnnotatedData",
                bottom[0], bottom[1],
            )  # fmt: skip

    def read(self, labels: Rows, classes: int) -> GridObjects:
        """Return the objects.

        Raises:
            DataError: a class or an image is out of range, or a box is not finite.
        """
        if self.corners:
            rows = labels.reshape(-1, CORNER_COLUMNS)
            rows = rows[rows[:, 0] != -1]
            rows = rows[np.argsort(rows[:, 0], kind="stable")]
            low, high = rows[:, 3:5], rows[:, 5:7]
            boxes = np.concatenate(((low + high) / np.float32(2), high - low), 1)
            images, labels_read = rows[:, 0], rows[:, 1] - 1
        else:
            table = labels.reshape(self._images, -1, YOLO_COLUMNS)
            present = np.logical_and.accumulate(table[:, :, 3] != 0, axis=1)
            images, rows = np.nonzero(present)[0], table[present]
            boxes, labels_read = rows[:, 1:], rows[:, 0]
        bad = ~((labels_read > -1) & (labels_read < classes) & (images >= 0) & (images < self._images))
        bad |= ~np.isfinite(boxes).all(1)
        if bad.any():
            index = int(np.flatnonzero(bad)[0])
            raise self._layer.data_error(
                f"'{self._layer.bottom_names[1]}' has an object of class {labels_read[index]:g} in image "
                f"{images[index]:g} of the batch with the box {', '.join(f'{v:g}' for v in boxes[index])}; there are "
                f"{classes} classes and {self._images} images"
            )
        return GridObjects(images.astype(np.int64), labels_read.astype(np.int64), np.asarray(boxes, np.float32))
