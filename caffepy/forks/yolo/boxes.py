"""Boxes of YOLO, their overlaps and suppression, and the base class of its losses, which the host computes.

A box is center x, center y, width and height as fractions of the image.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Floats, Int, Words, kernel
from caffepy.backend.formulas import scaled, total
from caffepy.data.boxes import DARKNET, Boxes, Rows, overlap, overlaps
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.detection.suppression import sort_like_cpp, suppress
from caffepy.layers.layer import Blobs, Layer
from caffepy.layers.loss import LossLayer

COORDINATES = 4
CONFIDENCE = 4
"""Index of the confidence among the values of a box."""
_BOXES_PER_THREAD = 1024
"""Minimum number of boxes for each thread."""
_f32 = np.float32


def sigmoid(x: Rows) -> Rows:
    """Return 1 / (1 + e^-x)."""
    with np.errstate(over="ignore"):
        return _f32(1) / (_f32(1) + np.exp(-x))


def read_anchors(layer: Layer, biases: Sequence[float], at_least: int) -> Rows:
    """Return the anchors (A, 2), width and height of each.

    Raises:
        ConfigError: there are fewer than `at_least` anchors, or the number of biases is odd.
    """
    if len(biases) % 2 or len(biases) < 2 * at_least:
        raise layer.error(f"{len(biases)} biases; give the width and height of each anchor, {2 * at_least} or more")
    return np.array(biases, np.float32).reshape(-1, 2)


def check_predictions(layer: Layer, predictions: Blob, num: int, classes: int) -> None:
    """Refuse predictions that do not have 4 + 1 + `classes` channels for each of `num` boxes of a cell."""
    channels = num * (COORDINATES + 1 + classes)
    if len(predictions.shape) != 4 or predictions.shape[1] != channels:
        raise layer.shape_error(
            f"num {num} and num_class {classes} need predictions of {channels} channels", predictions
        )


def grid_boxes(values: Rows, anchors: Rows, relative: bool = True) -> Rows:
    """Return the predicted boxes of a grid (..., A, H, W, 4).

    Args:
        values: (..., A, 4, H, W): x and y within the cell, and the logarithms of width and height in anchors.
        anchors: (A, 2), in cells, or as fractions of the image.
        relative: whether anchors are in cells.
    """
    height, width = values.shape[-2:]
    boxes = np.empty((*values.shape[:-3], height, width, 4), np.float32)
    boxes[..., 0] = (values[..., 0, :, :] + np.arange(width, dtype=np.float32)) / _f32(width)
    boxes[..., 1] = (values[..., 1, :, :] + np.arange(height, dtype=np.float32)[:, None]) / _f32(height)
    with np.errstate(over="ignore"):
        for axis, size in ((0, width), (1, height)):
            sides = np.exp(values[..., 2 + axis, :, :]) * anchors[:, axis, None, None]
            boxes[..., 2 + axis] = sides / _f32(size) if relative else sides
    return boxes


def edges(boxes: Rows) -> Rows:
    """Return xmin, ymin, xmax, ymax of boxes (..., 4)."""
    half = boxes[..., 2:] / _f32(2)
    return np.concatenate((boxes[..., :2] - half, boxes[..., :2] + half), -1)


def center_boxes(boxes: Rows) -> Boxes:
    """Return boxes (..., 4) of center and size."""
    return Boxes(edges(boxes), boxes[..., 2] * boxes[..., 3], DARKNET)


def center_overlaps(a: Rows, b: Rows) -> Rows:
    """Return the intersection over union of boxes (..., 4), which broadcast; as darknet's box_iou."""
    return overlaps(center_boxes(a), center_boxes(b))


@kernel
def _best_overlaps(
    begin: Int,
    end: Int,
    corners: Floats,
    areas: Floats,
    cells: Int,
    objects: Floats,
    object_areas: Floats,
    begins: Words,
    best: Floats,
) -> None:
    for item in range(begin, end):
        image = item // cells
        largest = np.float32(0)
        for i in range(begins[image], begins[image + 1]):
            value = overlap(corners, areas, item, objects, object_areas, i, DARKNET, 0)
            largest = value if value > largest else largest
        best[item] = largest


def best_overlaps(threads: int, boxes: Rows, objects: Rows, images: NDArray[np.int64]) -> Rows:
    """Return the largest overlap of each box (N, ..., 4) with an object of its image, 0 without one.

    Args:
        threads: number of threads.
        boxes: of N images.
        objects: (n, 4), ordered by image.
        images: (n,) index of each object's image.
    """
    count, cells = len(boxes), boxes[0, ..., 0].size
    begins = np.searchsorted(images, np.arange(count + 1)).astype(np.int64)
    best = np.empty(boxes.shape[:-1], np.float32)
    a, b = center_boxes(boxes), center_boxes(objects)
    arrays = (a.corners, a.areas, cells, b.corners, b.areas, begins, best)
    _best_overlaps.run(threads, count * cells, _BOXES_PER_THREAD, *arrays)
    return best


# -- suppression ---------------------------------------------------------------------------------------


def suppress_all(
    threads: int, boxes: Rows, scores: Rows, images: NDArray[np.int64], count: int, threshold: float
) -> NDArray[np.int32]:
    """Return the indices of the boxes that remain, by image and then in descending order of scores.

    Classes do not matter: a box is suppressed if it overlaps any box with a higher score by at least `threshold`.

    Args:
        threads: number of threads.
        boxes: (n, 4).
        scores: (n,).
        images: (n,), ascending.
        count: number of images.
        threshold: of the overlap; below 0: no suppression.
    """
    begins = np.searchsorted(images, np.arange(count + 1)).astype(np.int64)
    order = np.arange(len(boxes), dtype=np.int32)
    keys = np.where(np.isnan(scores), _f32(-math.inf), scores).astype(np.float32)
    for first, last in zip(begins[:-1], begins[1:], strict=True):
        part = np.ascontiguousarray(order[first:last])
        sort_like_cpp(np.ascontiguousarray(keys[first:last]), part)
        order[first:last] = part
    if threshold < 0:
        return order
    least = np.nextafter(_f32(threshold), _f32(-math.inf))  # an overlap of `threshold` suppresses
    return order[suppress(center_boxes(boxes[order]), float(least), begins=begins, threads=threads)]


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

    _gradient: Rows | None = None
    """Of the last forward pass; None where the backend holds no values."""
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
        if propagate_down[0]:
            self.load_gradient(self._gradient, top, bottom[0].diff)

    @property
    def training_devices(self) -> int:
        """Number of devices over whose losses the training averages."""
        return self.context.shard.parts if self.context.phase == caffe_pb2.TRAIN else 1


# -- objects -------------------------------------------------------------------------------------------

LABEL_ROWS = 7
"""Numbers of a cell in a label of BoxData: difficult, object, class, and the box."""


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


class GridLabels:
    """The labels of BoxData for images of one grid.

    Args:
        values: (N, 7 cells).
        cells: number of cells.
    """

    def __init__(self, values: Rows, cells: int) -> None:
        self.difficult = values[:, :cells] == 1
        self.present = values[:, cells : 2 * cells] != 0
        self.classes = np.nan_to_num(values[:, 2 * cells : 3 * cells], nan=-1.0).astype(np.int64)
        self.boxes = values[:, 3 * cells :].reshape(len(values), cells, COORDINATES)


YOLO_COLUMNS, CORNER_COLUMNS = 5, 8
ROWS, CORNERS, CELLS = range(3)
"""Forms of objects."""


class GridObjectsReader:
    """Reads the objects in the second bottom of a loss of YOLO.

    `form` is ROWS: 5 numbers each are class from 0, center x, center y, width, height (MobileNet-YOLO); the list of an
    image ends at a width of 0. Or CORNERS: rows of 8 of AnnotatedData, whose labels begin at 1. Or CELLS: labels
    (N, 7 H W) of BoxData, with the predictions' H and W.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer

    def reshape(self, bottom: Blobs) -> None:
        """Check the second bottom's shape.

        Raises:
            ShapeError: it holds no lists of objects.
        """
        shape, (images, _, height, width) = bottom[1].shape, bottom[0].shape
        self._images, self.form = images, ROWS
        if len(shape) == 4 and shape[0] == 1 and shape[-1] == CORNER_COLUMNS:
            self.form = CORNERS
        elif shape == (images, LABEL_ROWS * height * width):
            self.form = CELLS
        elif not shape or shape[0] != images or bottom[1].count % (max(images, 1) * YOLO_COLUMNS):
            raise self._layer.shape_error(
                "needs objects N 1 T 5 (class, center x, center y, width, height), 1 1 G 8 of AnnotatedData, or "
                "N 7*H*W of BoxData with the predictions' H and W",
                bottom[0],
                bottom[1],
            )

    def read(self, labels: Rows, classes: int) -> GridObjects:
        """Return the objects.

        Raises:
            DataError: a class or an image is out of range, or a box is not finite.
        """
        if self.form == CELLS:
            grid = GridLabels(labels, labels.shape[1] // LABEL_ROWS)
            images, cells = np.nonzero(grid.present)
            boxes, labels_read = grid.boxes[images, cells], grid.classes[images, cells]
        elif self.form == CORNERS:
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
