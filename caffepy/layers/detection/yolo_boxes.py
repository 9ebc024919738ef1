"""Boxes of YOLO: center x, center y, width and height as fractions of the image; their overlaps and suppression."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, Words, exact_function, kernel
from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.sorting import sort_like_cpp

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


def softmax(x: Rows, axis: int) -> Rows:
    """Return e^x / sum of e^x along an axis."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def read_anchors(layer: Layer, biases: Sequence[float], at_least: int) -> Rows:
    """Return the anchors (A, 2), width and height of each.

    Raises:
        ConfigError: there are fewer than `at_least` anchors, or the number of biases is odd.
    """
    if len(biases) % 2 or len(biases) < 2 * at_least:
        raise layer.error(f"{len(biases)} biases; give the width and height of each anchor, {2 * at_least} or more")
    return np.array(biases, np.float32).reshape(-1, 2)


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


def center_overlaps(a: Rows, b: Rows) -> Rows:
    """Return the intersection over union of boxes (..., 4), which broadcast; as darknet's box_iou."""
    one, other = edges(a), edges(b)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    shared = np.where((sides < 0).any(-1), _f32(0), sides[..., 0] * sides[..., 1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return shared / (a[..., 2] * a[..., 3] + b[..., 2] * b[..., 3] - shared)


@exact_function
def _overlap(a: Floats, i: Int, b: Floats, j: Int) -> Float:
    """Return the intersection over union of box i of `a` and box j of `b`; as `center_overlaps`."""
    half = np.float32(0.5)
    left = max(a[4 * i] - a[4 * i + 2] * half, b[4 * j] - b[4 * j + 2] * half)
    right = min(a[4 * i] + a[4 * i + 2] * half, b[4 * j] + b[4 * j + 2] * half)
    top = max(a[4 * i + 1] - a[4 * i + 3] * half, b[4 * j + 1] - b[4 * j + 3] * half)
    bottom = min(a[4 * i + 1] + a[4 * i + 3] * half, b[4 * j + 1] + b[4 * j + 3] * half)
    width, height = right - left, bottom - top
    shared = np.float32(0) if width < 0 or height < 0 else width * height
    return shared / (a[4 * i + 2] * a[4 * i + 3] + b[4 * j + 2] * b[4 * j + 3] - shared)


@kernel
def _best_overlaps(
    begin: Int, end: Int, boxes: Floats, cells: Int, objects: Floats, begins: Words, best: Floats
) -> None:
    for item in range(begin, end):
        image = item // cells
        largest = np.float32(0)
        for i in range(begins[image], begins[image + 1]):
            value = _overlap(boxes, item, objects, i)
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
    boxes, objects = np.ascontiguousarray(boxes), np.ascontiguousarray(objects)
    _best_overlaps.run(threads, count * cells, _BOXES_PER_THREAD, boxes, cells, objects, begins, best)
    return best


# -- suppression ---------------------------------------------------------------------------------------


@kernel
def _suppress(begin: Int, end: Int, boxes: Floats, order: Ints, begins: Words, counts: Words, threshold: Float) -> None:
    """Compact each list order[begins[l]: begins[l + 1]] to the kept boxes, and write their number."""
    for item in range(begin, end):
        first, last = begins[item], begins[item + 1]
        kept = first
        while kept < last:
            rest = kept + 1
            for i in range(kept + 1, last):
                if not _overlap(boxes, order[kept], boxes, order[i]) >= threshold:
                    order[rest] = order[i]
                    rest += 1
            last = rest
            kept += 1
        counts[item] = last - first


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
    counts = np.zeros(count, np.int64)
    _suppress.run(threads, count, 1, np.ascontiguousarray(boxes, np.float32), order, begins, counts, threshold)
    return np.concatenate([order[first : first + kept] for first, kept in zip(begins[:-1], counts, strict=True)])
