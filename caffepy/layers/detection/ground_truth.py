"""The ground-truth objects of a batch, as rows of AnnotatedData.

The columns are image, label, instance, xmin, ymin, xmax, ymax, difficult.
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
    """Objects, ordered by image and row."""

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    boxes: Rows
    sizes: Rows
    difficult: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.images)

    def begins(self, images: int) -> NDArray[np.int64]:
        """Return the index of each image's first object, and the number of objects at the end (images + 1,)."""
        return np.searchsorted(self.images, np.arange(images + 1))


def bad_object(layer: Layer, blob: str, number: int, row: Rows) -> DataError:
    """Return the error that row `number` of a blob has an image or a label that is not a number."""
    return layer.data_error(
        f"row {number} of '{blob}' has the image {row[0]:g} and the label {row[1]:g}; both must be whole numbers"
    )


def bad_class(layer: Layer, blob: str, image: int, label: int) -> DataError:
    """Return the error that an object of a blob has a label outside the classes of a MultiBoxLoss."""
    classes = layer.param.multibox_loss_param.num_classes
    return layer.data_error(
        f"'{blob}' has an object of class {label} in image {image} of the batch, but there are {classes} classes, 0 to "
        f"{classes - 1}; correct the labels or num_classes"
    )


def _rounded(values: Rows) -> NDArray[np.int64]:
    """Round halves away from 0, as C's round."""
    rounded: NDArray[np.int64] = np.trunc(values + np.copysign(np.float32(0.5), values)).astype(np.int64)
    return rounded


def read_ground_truth(
    layer: Layer, values: Rows, blob: str, background: int, stop_at_padding: bool = False, difficult: bool = True
) -> GroundTruth:
    """Return the objects in the rows of a blob (GetGroundTruth in `bbox_util.cpp`).

    Rows of image -1 are padding. Objects whose label is not above the background's are dropped.

    Args:
        layer: for messages.
        values: of the blob, 8 for each row.
        blob: name of the blob.
        background: label of the background.
        stop_at_padding: whether to ignore the rows after the first padding row.
        difficult: whether to include objects marked difficult.

    Raises:
        DataError: an image or a label is not finite.
    """
    rows = np.asarray(values, np.float32).reshape(-1, COLUMNS)
    if not np.isfinite(rows[:, :2]).all():
        number = int(np.flatnonzero(~np.isfinite(rows[:, :2]).all(1))[0])
        raise bad_object(layer, blob, number, rows[number])
    images = rows[:, 0].astype(np.int64)
    if stop_at_padding and (images == -1).any():
        end = int(np.argmax(images == -1))
        rows, images = rows[:end], images[:end]
    labels, hard = _rounded(rows[:, 1]), rows[:, 7] != 0
    included = np.flatnonzero((images != -1) & (labels > background) & (difficult | ~hard))
    order = included[np.argsort(images[included], kind="stable")]
    boxes = np.ascontiguousarray(rows[order, 3:7])
    return GroundTruth(images[order], labels[order], boxes, box_sizes(boxes), hard[order])
