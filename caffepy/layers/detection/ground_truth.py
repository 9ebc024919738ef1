"""The objects of a batch as AnnotatedData gives them.

Rows are (image, label, instance, xmin, ymin, xmax, ymax, difficult).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.errors import DataError
from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import Rows, box_sizes

COLUMNS = 8


@dataclass(frozen=True)
class GroundTruth:
    """Objects in the order of their images; within an image in the order of their rows."""

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    boxes: Rows
    sizes: Rows
    difficult: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.images)

    def begins(self, images: int) -> NDArray[np.int64]:
        """Where the objects of each image begin, and the end of the last one's (images + 1,)."""
        return np.searchsorted(self.images, np.arange(images + 1))


def bad_object(layer: Layer, blob: str, number: int, row: Rows) -> DataError:
    """The error that row `number` of a blob has an image or a label that is no number."""
    return layer.data_error(
        f"row {number} of '{blob}' has the image {row[0]:g} and the label {row[1]:g}; both must be whole numbers"
    )


def bad_class(layer: Layer, blob: str, image: int, label: int) -> DataError:
    """The error that an object of a blob has a label that names no class of a MultiBoxLoss."""
    classes = layer.param.multibox_loss_param.num_classes
    return layer.data_error(
        f"'{blob}' has an object of class {label} in image {image} of the batch, but there are {classes} classes, 0 to "
        f"{classes - 1}; correct the labels or num_classes"
    )


def _rounded(values: Rows) -> NDArray[np.int64]:
    """As C's round: halves away from 0."""
    rounded: NDArray[np.int64] = np.trunc(values + np.copysign(np.float32(0.5), values)).astype(np.int64)
    return rounded


def read_ground_truth(
    layer: Layer, values: Rows, blob: str, background: int, ends_at_mark: bool = False, difficult: bool = True
) -> GroundTruth:
    """The objects in the rows of a blob (GetGroundTruth in `bbox_util.cpp`).

    Rows of image -1 are no objects; objects with the background's label or a smaller one are left out.

    Args:
        layer: for messages.
        values: the blob's, 8 for each row.
        blob: its name.
        background: label of the background.
        ends_at_mark: whether the first row of image -1 ends the objects.
        difficult: whether to take objects marked difficult.

    Raises:
        DataError: an image's number or a label is no number.
    """
    rows = np.asarray(values, np.float32).reshape(-1, COLUMNS)
    if not np.isfinite(rows[:, :2]).all():
        number = int(np.flatnonzero(~np.isfinite(rows[:, :2]).all(1))[0])
        raise bad_object(layer, blob, number, rows[number])
    images = rows[:, 0].astype(np.int64)
    if ends_at_mark and (images == -1).any():
        end = int(np.argmax(images == -1))
        rows, images = rows[:end], images[:end]
    labels, hard = _rounded(rows[:, 1]), rows[:, 7] != 0
    wanted = np.flatnonzero((images != -1) & (labels > background) & (difficult | ~hard))
    order = wanted[np.argsort(images[wanted], kind="stable")]
    boxes = np.ascontiguousarray(rows[order, 3:7])
    return GroundTruth(images[order], labels[order], boxes, box_sizes(boxes), hard[order])
