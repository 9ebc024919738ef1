"""DetectionAccuracy, DetectionGroupAccuracy and BboxAccuracy: scores of MS-CNN and Cascade R-CNN in training."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.transforms.pixel_boxes import EXACT, WHOLE, PixelBoxes, paired_overlaps
from caffepy.forks.rcnn.anchors import (
    BOX,
    AnchorMaps,
    Anchors,
    check_classes,
    check_group,
    check_map,
    ignored_label,
    read_anchors,
    read_group,
    read_limits,
    read_map,
    read_normalisation,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.layer import Blobs, Layer, register_layer

_NONE = -1.0
"""The result if nothing was counted."""
_GIVEN_OVERLAP = np.float32(0.975)
"""Overlap from which a region is the object itself and BboxAccuracy leaves it out."""


class AnchorAccuracyLayer(Layer):
    """The hits and overlaps of predictions of anchors, on the host."""

    tops = (1, 2)
    has_backward = False
    kind = EXACT

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings
        check_classes(self, param)
        self._normalisation = read_normalisation(self)
        self._limits = read_limits(self, param.field_xyr, param.field_whr)
        self._anchors = self.read_anchors()

    @property
    def settings(self) -> caffe_pb2.DetectionAccuracyParameter | caffe_pb2.DetectionGroupAccuracyParameter:
        """The layer's parameter."""
        raise NotImplementedError

    def read_anchors(self) -> Anchors:
        """Return the anchors of the prototxt."""
        raise NotImplementedError

    def maps(self, bottom: Blobs) -> AnchorMaps:
        """Return the bottoms' values."""
        raise NotImplementedError

    def hits(self, scores: Rows, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which positions' labels (N, K, H, W) are found by scores (N, K, C, H, W)."""
        raise NotImplementedError

    def capture_blocker(self) -> str:
        return "it compares boxes on the host"

    def shape_tops(self, top: Blobs) -> None:
        """Set the tops' shapes."""
        for blob, count in zip(top, (2, 1), strict=False):
            blob.reshape((1, 1, 1, count))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        maps = self.maps(bottom)
        with np.errstate(all="ignore"):
            scores = np.array([*self._accuracies(maps), self._overlap(maps)], np.float32)
        self.backend.from_host(scores[:2].reshape(1, 1, 1, 2), top[0].data)
        if len(top) > 1:
            self.backend.from_host(scores[2:].reshape(1, 1, 1, 1), top[1].data)

    def _ignored(self, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        ignored = ignored_label(self.param.loss_param)
        return np.zeros(labels.shape, bool) if ignored is None else labels == ignored

    def _accuracies(self, maps: AnchorMaps) -> tuple[float, float]:
        """Return the fraction of hits of all positions that count, and of objects."""
        labels = maps.classes(self.settings.objectness)
        near = (labels == 0) & (maps.overlaps >= np.float32(self.settings.bg_threshold))
        counted = ~near & ~self._ignored(labels)
        found = self.hits(maps.scores, labels) & counted
        objects = counted & (labels != 0)
        return _mean(found, counted), _mean(found & objects, objects)

    def _overlap(self, maps: AnchorMaps) -> float:
        """Return the mean overlap of predicted boxes with objects."""
        counted = (maps.labels != 0) & ~self._ignored(maps.labels)
        if not counted.any():
            return _NONE
        found = self._anchors.decode(maps.predictions, self._normalisation, self._limits)
        boxes = maps.boxes
        truth = np.concatenate([boxes[:, :, :2] - boxes[:, :, 2:] / np.float32(2), boxes[:, :, 2:]], 2)
        pairs = [PixelBoxes.from_sizes(np.moveaxis(part, 2, -1)[counted], self.kind) for part in (found, truth)]
        return float(paired_overlaps(*pairs).mean(dtype=np.float64))


def _mean(hits: NDArray[np.bool_], counted: NDArray[np.bool_]) -> float:
    total = int(counted.sum())
    return float(hits.sum()) / total if total else _NONE


@register_layer("DetectionAccuracy")
class DetectionAccuracyLayer(AnchorAccuracyLayer):
    """The hits and overlaps of the predictions that DetectionLoss learns (MS-CNN's `detection_accuracy_layer.cpp`).

    Shapes: scores and offsets (N, C + 4, H, W), labels (N, 6, H, W) of ImageGtData. The first top (1, 1, 1, 2) is the
    fraction of positions whose label is among the `top_k` highest scores (of equal ones the higher class), and the same
    of objects only. Background positions with an overlap of `bg_threshold` or more do not count. The second top
    (1, 1, 1, 1) is the mean overlap of predicted boxes and objects. A value is -1 if nothing counts. Computed on the
    host.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms have other shapes.
        DataError: a label is outside the classes.
    """

    bottoms = (2, 2)
    no_gradient_bottoms = frozenset({1})

    @property
    def settings(self) -> caffe_pb2.DetectionAccuracyParameter:
        return self.param.detection_accuracy_param

    def read_anchors(self) -> Anchors:
        param = self.settings
        if param.coord_num != BOX or not 0 < param.top_k <= param.cls_num:
            raise self.error(f"coord_num is {param.coord_num}, not 4, or top_k {param.top_k} is not from 1 to cls_num")
        return read_anchors(self, param.field_w, param.field_h, param.downsample_rate, "downsample_rate")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_map(self, self.settings, bottom)
        self.shape_tops(top)

    def maps(self, bottom: Blobs) -> AnchorMaps:
        return read_map(self, self.settings, bottom)

    def hits(self, scores: Rows, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        own = np.take_along_axis(scores, np.clip(labels, 0, scores.shape[2] - 1)[:, :, None], 2)
        numbers = np.arange(scores.shape[2]).reshape(-1, 1, 1)
        before = (scores > own) | ((scores == own) & (numbers > labels[:, :, None]))
        found: NDArray[np.bool_] = before.sum(2) < self.settings.top_k
        return found


@register_layer("DetectionGroupAccuracy")
class DetectionGroupAccuracyLayer(AnchorAccuracyLayer):
    """The hits and overlaps that DetectionGroupLoss learns (Cascade R-CNN's `detection_group_accuracy_layer.cpp`).

    Shapes: scores (N G, C, H, W), offsets (N G, 4, H, W), labels (N G, 6, H, W), G the number of `field_w`; the tops
    are those of DetectionAccuracy with top_k 1. Of equal scores the lower class is the prediction. Computed on the
    host.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms have other shapes.
        DataError: a label is outside the classes.
    """

    bottoms = (3, 3)
    no_gradient_bottoms = frozenset({2})
    kind = WHOLE

    @property
    def settings(self) -> caffe_pb2.DetectionGroupAccuracyParameter:
        return self.param.detection_group_accuracy_param

    def read_anchors(self) -> Anchors:
        return read_anchors(
            self, list(self.settings.field_w), list(self.settings.field_h), self.settings.stride, "stride"
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_group(self, self.settings, len(self._anchors.widths), bottom)
        self.shape_tops(top)

    def maps(self, bottom: Blobs) -> AnchorMaps:
        return read_group(self, self.settings, len(self._anchors.widths), bottom)

    def hits(self, scores: Rows, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = scores.argmax(2) == labels
        return found


@register_layer("BboxAccuracy")
class BboxAccuracyLayer(Layer):
    """The mean overlap of regions with their objects, after and before regression (`bbox_accuracy_layer.cpp`).

    Shapes: predictions (R, 4 C), or (R, 8) if `bbox_reg_param.cls_aware` is false, regions (R, 5) and objects (R, 6) of
    ProposalTarget; both tops are (1, 1, 1, 1). Background regions, and regions that overlap their object by more than
    0.975, do not count. The value is -1 if there are no others. With `cls_aware: false` an intersection narrower than
    one pixel counts as none, as in Cascade R-CNN. Computed on the host.

    Raises:
        ShapeError: the bottoms have other shapes.
        DataError: an object has a class without predictions.
    """

    bottoms = (3, 3)
    tops = (1, 2)
    has_backward = False
    exact_bottoms = frozenset({1})
    no_gradient_bottoms = frozenset({2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._normalisation = read_normalisation(self)
        self._aware = self.param.bbox_reg_param.cls_aware

    def capture_blocker(self) -> str:
        return "it compares boxes on the host"

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        rows = [blob.shape[0] if blob.shape else 0 for blob in bottom]
        columns = [blob.count // max(count, 1) for blob, count in zip(bottom, rows, strict=True)]
        valid = columns[0] == 8 if not self._aware else columns[0] % BOX == 0
        if len(set(rows)) != 1 or not valid or (rows[0] and columns[1:] != [5, 6]):
            raise self.shape_error("needs predictions (R, 4 C), regions (R, 5) and objects (R, 6)", *bottom)
        for blob in top:
            blob.reshape((1, 1, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        count = bottom[0].shape[0]
        predictions, regions, objects = (self.backend.to_host(blob.data).reshape(count, -1) for blob in bottom)
        with np.errstate(all="ignore"):
            results = self._overlaps(predictions, regions, objects)
        for blob, value in zip(top, results, strict=False):
            self.backend.from_host(np.full((1, 1, 1, 1), value, np.float32), blob.data)

    def _overlaps(self, predictions: Rows, regions: Rows, objects: Rows) -> tuple[float, float]:
        """Return the mean overlaps after and before regression."""
        rows = np.flatnonzero((objects[:, 0] >= 1) & ~(objects[:, 5] > _GIVEN_OVERLAP))
        if not len(rows):
            return _NONE, _NONE
        labels = objects[rows, 0].astype(np.int64)
        columns = BOX * (labels if self._aware else np.minimum(labels, 1))[:, None] + np.arange(BOX)
        if columns.max() >= predictions.shape[1]:
            raise self.data_error(f"'{self.bottom_names[2]}' has the class {labels.max()}, which has no prediction")
        offsets = self._normalisation.undo(predictions[rows[:, None], columns])
        truth, before = (_with_sizes(part) for part in (objects[rows, 1:5], regions[rows, 1:5]))
        sides = before[:, 2:] * np.exp(offsets[:, 2:])
        centers = before[:, :2] + np.float32(0.5) * before[:, 2:] + offsets[:, :2] * before[:, 2:]
        after = np.concatenate([centers - sides / np.float32(2), sides], 1)
        kind = EXACT if self._aware else WHOLE
        first, second, wanted = (PixelBoxes.from_sizes(part, kind) for part in (after, before, truth))
        means = [float(paired_overlaps(part, wanted).mean(dtype=np.float64)) for part in (first, second)]
        return means[0], means[1]


def _with_sizes(corners: Rows) -> Rows:
    """Return x, y, width, height of boxes of first and last pixels."""
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2] + np.float32(1)], 1)
