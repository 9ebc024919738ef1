"""The labels of maps of anchors (ImageGtData, DetectionData) beside the maps that predict them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import Rows


@dataclass(frozen=True)
class AnchorMaps:
    """Predictions and labels of N images and K anchors at each position.

    Args:
        scores: (N, K, C, H, W).
        predictions: normalised offsets (N, K, 4, H, W).
        labels: class of the object (N, K, H, W); 0: background.
        boxes: x and y of the object's center, width, height, in pixels (N, K, 4, H, W).
        overlaps: of anchor and object (N, K, H, W).
    """

    scores: Rows
    predictions: Rows
    labels: NDArray[np.int64]
    boxes: Rows
    overlaps: Rows

    @classmethod
    def empty(cls) -> AnchorMaps:
        """Return maps without images."""
        zeros = np.zeros((0, 1, 4, 1, 1), np.float32)
        return cls(zeros, zeros, np.zeros((0, 1, 1, 1), np.int64), zeros, zeros[:, :, 0])

    def classes(self, objectness: bool) -> NDArray[np.int64]:
        """Return the labels; with `objectness` 1 for all objects."""
        return np.minimum(self.labels, 1) if objectness else self.labels


def read_labels(
    layer: Layer, blob: str, scores: Rows, predictions: Rows, labels: Rows, classes: int, objectness: bool
) -> AnchorMaps:
    """Return the maps with labels (N, K, 6, H, W) of the blob `blob`.

    Raises:
        DataError: a label is outside the classes, and is not loss_param's ignore_label.
    """
    param = layer.param.loss_param
    ignored = param.ignore_label if param.HasField("ignore_label") else None
    with np.errstate(invalid="ignore"):
        numbers = labels[:, :, 0].astype(np.int64)
    valid = (labels[:, :, 0] >= 0) & ((numbers < classes) | objectness)
    if ignored is not None:
        valid |= numbers == ignored
    if not valid.all():
        at = tuple(np.argwhere(~valid)[0])
        raise layer.data_error(
            f"'{blob}' has the label {labels[:, :, 0][at]:g} in image {at[0]} of the batch at ({at[2]}, {at[3]}), but "
            f"there are {classes} classes, 0 to {classes - 1}; correct the labels or cls_num"
        )
    return AnchorMaps(scores, predictions, numbers, labels[:, :, 1:5], labels[:, :, 5])


def softmax(scores: Rows) -> Rows:
    """Return the softmax of scores (N, K, C, H, W) over the classes."""
    values = np.exp(scores - scores.max(2, keepdims=True))
    result: Rows = values / values.sum(2, keepdims=True)
    return result
