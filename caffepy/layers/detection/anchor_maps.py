"""Maps of anchors: their scores and offsets in the bottoms of losses and accuracies, with the labels of data layers.

MS-CNN has one anchor at each position, with scores and offsets in one bottom; Cascade R-CNN has groups of anchors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.detection.boxes import Rows
from caffepy.proto import caffe_pb2

BOX = 4
Settings = (
    caffe_pb2.DetectionLossParameter
    | caffe_pb2.DetectionGroupLossParameter
    | caffe_pb2.DetectionAccuracyParameter
    | caffe_pb2.DetectionGroupAccuracyParameter
)
"""The messages that have cls_num and objectness."""


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


def check_classes(layer: Layer, settings: Settings) -> None:
    """Check cls_num.

    Raises:
        ConfigError: there are fewer than 2 classes, or not 2 with objectness.
    """
    if settings.cls_num < 2 or (settings.objectness and settings.cls_num != 2):
        raise layer.error("needs cls_num, at least 2, and 2 with objectness")


def ignored_label(param: caffe_pb2.LossParameter) -> int | None:
    """Return ignore_label, None if it is not given."""
    return param.ignore_label if param.HasField("ignore_label") else None


# -- one anchor at each position -----------------------------------------------------------------------


def check_map(layer: Layer, settings: Settings, bottom: Blobs) -> None:
    """Check the shapes of scores and offsets (N, C + 4, H, W) and labels (N, 6, H, W).

    Raises:
        ShapeError: they are others.
    """
    shape, channels = bottom[0].shape, settings.cls_num + BOX
    if len(shape) != 4 or shape[1] != channels or bottom[1].shape != (shape[0], 6, *shape[2:]):
        raise layer.shape_error(f"needs maps (N, {channels}, H, W) and labels (N, 6, H, W)", *bottom)


def read_map(layer: Layer, settings: Settings, bottom: Blobs) -> AnchorMaps:
    """Return the values of the bottoms that `check_map` checks; without images if the backend holds no values.

    Raises:
        DataError: a label is outside the classes.
    """
    values, labels = (layer.backend.to_host(blob.data) for blob in bottom)
    if not layer.backend.holds_values:
        return AnchorMaps.empty()
    classes = settings.cls_num
    return _with_labels(layer, settings, values[:, None, :classes], values[:, None, classes:], labels[:, None])


# -- groups of anchors ---------------------------------------------------------------------------------


def check_group(layer: Layer, settings: Settings, kinds: int, bottom: Blobs) -> None:
    """Check the shapes of scores (N K, C, H, W), offsets (N K, 4, H, W) and labels (N K, 6, H, W); K kinds of anchors.

    Raises:
        ShapeError: they are others.
    """
    shape, classes = bottom[0].shape, settings.cls_num
    wanted = [(shape[0], channels, *shape[2:]) for channels in (classes, BOX, 6)] if len(shape) == 4 else []
    if [blob.shape for blob in bottom] != wanted or shape[0] % kinds:
        raise layer.shape_error(
            f"needs scores (N * {kinds}, {classes}, H, W), offsets (N * {kinds}, 4, H, W) and labels "
            f"(N * {kinds}, 6, H, W)", *bottom,
        )  # fmt: skip


def read_group(layer: Layer, settings: Settings, kinds: int, bottom: Blobs) -> AnchorMaps:
    """Return the values of the bottoms that `check_group` checks; without images if the backend holds no values.

    Raises:
        DataError: a label is outside the classes.
    """
    values = [layer.backend.to_host(blob.data) for blob in bottom]
    if not layer.backend.holds_values:
        return AnchorMaps.empty()
    return _with_labels(layer, settings, *(part.reshape(-1, kinds, *part.shape[1:]) for part in values))


def _with_labels(layer: Layer, settings: Settings, scores: Rows, predictions: Rows, labels: Rows) -> AnchorMaps:
    """Return the maps with labels (N, K, 6, H, W) of the last bottom.

    Raises:
        DataError: a label is outside the classes, and is not loss_param's ignore_label.
    """
    classes, ignored = settings.cls_num, ignored_label(layer.param.loss_param)
    with np.errstate(invalid="ignore"):
        numbers = labels[:, :, 0].astype(np.int64)
    valid = (labels[:, :, 0] >= 0) & ((numbers < classes) | settings.objectness)
    if ignored is not None:
        valid |= numbers == ignored
    if not valid.all():
        at = tuple(np.argwhere(~valid)[0])
        blob = layer.bottom_names[-1]
        raise layer.data_error(
            f"'{blob}' has the label {labels[:, :, 0][at]:g} in image {at[0]} of the batch at ({at[2]}, {at[3]}), but "
            f"there are {classes} classes, 0 to {classes - 1}; correct the labels or cls_num"
        )
    return AnchorMaps(scores, predictions, numbers, labels[:, :, 1:5], labels[:, :, 5])
