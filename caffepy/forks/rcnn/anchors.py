"""Anchors of MS-CNN and Cascade R-CNN: offsets of boxes in pixels, maps of scores and offsets, and scores in training.

MS-CNN has one anchor at each position, with scores and offsets in one bottom; Cascade R-CNN has groups of anchors. The
maps come with their labels. DetectionAccuracy, DetectionGroupAccuracy and BboxAccuracy are the scores in training.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.boxes import EXACT, WHOLE, Boxes, Rows, overlaps
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, Layer, register_layer

_f32 = np.float32


@dataclass(frozen=True)
class Normalisation:
    """Mean and standard deviation (4,) of the offsets x, y, width and height."""

    mean: Rows
    std: Rows

    def apply(self, offsets: Rows) -> Rows:
        """Return offsets (n, 4) in units of the standard deviation."""
        return (offsets - self.mean) / self.std

    def undo(self, predictions: Rows) -> Rows:
        """Return the offsets of predictions (n, 4)."""
        return predictions * self.std + self.mean


def read_normalisation(layer: Layer) -> Normalisation:
    """Return the values of bbox_reg_param; mean 0 and deviation 1 if one of them is not given.

    Raises:
        ConfigError: there are not four values, or a deviation is not above 0.
    """
    param = layer.param.bbox_reg_param
    mean, std = list(param.bbox_mean), list(param.bbox_std)
    if not mean or not std:
        return Normalisation(np.zeros(4, _f32), np.ones(4, _f32))
    if len(mean) != 4 or len(std) != 4 or not min(std) > 0:
        raise layer.error("bbox_reg_param needs four bbox_mean and four bbox_std, of x, y, width, height, std above 0")
    return Normalisation(np.array(mean, _f32), np.array(std, _f32))


@dataclass(frozen=True)
class Limits:
    """The limits of offsets: position as a fraction of the anchor's size, and the logarithm of the size's factor."""

    place: float
    size: float


def read_limits(layer: Layer, place: float, size: float) -> Limits:
    """Return the limits of the fields field_xyr and field_whr.

    Raises:
        ConfigError: field_xyr is not above 0, or field_whr is below 1.
    """
    if not place > 0 or not size >= 1:
        raise layer.error(f"field_xyr is {place:g} and field_whr {size:g}; they must be above 0 and at least 1")
    return Limits(1 / place, float(np.log(_f32(size))))


@dataclass(frozen=True)
class Anchors:
    """The anchors of a map: width and height of each kind, and the pixels from one position to the next."""

    widths: Rows
    heights: Rows
    stride: int

    def centers(self, rows: int, columns: int) -> tuple[Rows, Rows]:
        """Return the x (columns,) and y (rows, 1) of the positions' centers."""
        x, y = ((np.arange(count, dtype=_f32) + _f32(0.5)) * _f32(self.stride) for count in (columns, rows))
        return x, y[:, None]

    def decode(self, predictions: Rows, normalisation: Normalisation, limits: Limits) -> Rows:
        """Return the boxes (..., K, 4, H, W) of predictions of this shape: x, y, width, height; K kinds of anchors."""
        shape = (4, 1, 1)
        offsets = predictions * normalisation.std.reshape(shape) + normalisation.mean.reshape(shape)
        places = np.clip(offsets[..., :2, :, :], -_f32(limits.place), _f32(limits.place))
        sizes = np.exp(np.clip(offsets[..., 2:, :, :], -_f32(limits.size), _f32(limits.size)))
        x, y = self.centers(*predictions.shape[-2:])
        width, height = self.widths[:, None, None], self.heights[:, None, None]
        sides = [width * sizes[..., 0, :, :], height * sizes[..., 1, :, :]]
        left = places[..., 0, :, :] * width + x - sides[0] / _f32(2)
        top = places[..., 1, :, :] * height + y - sides[1] / _f32(2)
        return np.stack([left, top, *sides], -3)

    def encode(self, boxes: Rows, normalisation: Normalisation) -> Rows:
        """Return the predictions (..., K, 4, H, W) for boxes of this shape: x and y of the center, width, height."""
        shape = (4, 1, 1)
        x, y = self.centers(*boxes.shape[-2:])
        width, height = self.widths[:, None, None], self.heights[:, None, None]
        offsets = [
            (boxes[..., 0, :, :] - x) / width,
            (boxes[..., 1, :, :] - y) / height,
            np.log(np.maximum(boxes[..., 2, :, :], _f32(2)) / width),
            np.log(np.maximum(boxes[..., 3, :, :], _f32(2)) / height),
        ]
        return (np.stack(offsets, -3) - normalisation.mean.reshape(shape)) / normalisation.std.reshape(shape)


def read_anchors(layer: Layer, widths: object, heights: object, stride: int, name: str) -> Anchors:
    """Return the anchors of a map.

    Args:
        layer: for messages.
        widths: values of field_w.
        heights: values of field_h.
        stride: the value of the field `name`.
        name: downsample_rate or stride.

    Raises:
        ConfigError: a value is missing or 0.
    """
    sizes = [np.atleast_1d(np.asarray(values, _f32)) for values in (widths, heights)]
    if len(sizes[0]) != len(sizes[1]) or not len(sizes[0]) or not min(sizes[0].min(), sizes[1].min(), stride) > 0:
        raise layer.error(f"needs as many field_w as field_h, and {name}, all above 0")
    return Anchors(sizes[0], sizes[1], stride)


def decode_regions(predictions: Rows, regions: Rows, normalisation: Normalisation) -> Rows:
    """Return the corners (R, C, 4) of the boxes that predictions (R, C, 4) encode relative to regions (R, 4).

    The regions are first and last pixels (DecodeBBoxesWithPrior).
    """
    sides = regions[:, None, 2:] - regions[:, None, :2] + _f32(1)
    centers = (regions[:, None, 2:] + regions[:, None, :2]) * _f32(0.5)
    offsets = normalisation.undo(predictions)
    new_sides = sides * np.exp(offsets[..., 2:])
    first = offsets[..., :2] * sides + centers - (new_sides - _f32(1)) / _f32(2)
    return np.concatenate([first, first + new_sides - _f32(1)], -1)


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


def check_maps(layer: Layer, settings: Settings, kinds: int, bottom: Blobs) -> None:
    """Check the shapes of maps of K kinds of anchors and their labels.

    MS-CNN has scores and offsets (N, C + 4, H, W) in one bottom, and labels (N, 6, H, W). Cascade R-CNN has scores
    (N K, C, H, W), offsets (N K, 4, H, W) and labels (N K, 6, H, W).

    Raises:
        ShapeError: they are others.
    """
    shape, classes = bottom[0].shape, settings.cls_num
    channels = (classes + BOX, 6) if len(bottom) == 2 else (classes, BOX, 6)
    wanted = [(shape[0], count, *shape[2:]) for count in channels] if len(shape) == 4 else []
    if [blob.shape for blob in bottom] == wanted and not (len(bottom) == 3 and shape[0] % kinds):
        return
    if len(bottom) == 2:
        raise layer.shape_error(f"needs maps (N, {channels[0]}, H, W) and labels (N, 6, H, W)", *bottom)
    raise layer.shape_error(
        f"needs scores (N * {kinds}, {classes}, H, W), offsets (N * {kinds}, 4, H, W) and labels (N * {kinds}, "
        "6, H, W)",
        *bottom,
    )


def read_maps(layer: Layer, settings: Settings, kinds: int, values: Sequence[Rows]) -> AnchorMaps:
    """Return the maps in the values of bottoms that `check_maps` checks.

    Raises:
        DataError: a label is outside the classes.
    """
    if len(values) == 2:
        maps, classes = values[0][:, None], settings.cls_num
        return _with_labels(layer, settings, maps[:, :, :classes], maps[:, :, classes:], values[1][:, None])
    return _with_labels(layer, settings, *(part.reshape(-1, kinds, *part.shape[1:]) for part in values))


def _with_labels(layer: Layer, settings: Settings, scores: Rows, predictions: Rows, labels: Rows) -> AnchorMaps:
    """Return the maps with labels (N, K, 6, H, W) of the last bottom."""
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


# -- scores in training --------------------------------------------------------------------------------

_NONE = -1.0
"""The result if nothing was counted."""
_GIVEN_OVERLAP = np.float32(0.975)
"""Overlap from which a region is the object itself and BboxAccuracy leaves it out."""


class AnchorAccuracyLayer(HostLayer):
    """The hits and overlaps of predictions of anchors, on the host."""

    tops = (1, 2)
    has_backward = False
    kind = EXACT
    blocker = "it compares boxes on the host"

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

    def hits(self, scores: Rows, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Return which positions' labels (N, K, H, W) are found by scores (N, K, C, H, W)."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_maps(self, self.settings, len(self._anchors.widths), bottom)
        for blob, count in zip(top, (2, 1), strict=False):
            blob.reshape((1, 1, 1, count))

    def compute(self, *values: Rows) -> list[Rows]:
        maps = read_maps(self, self.settings, len(self._anchors.widths), values)
        return [np.array([[[found]]], np.float32) for found in (self._accuracies(maps), [self._overlap(maps)])]

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
        a, b = (Boxes.from_sizes(np.moveaxis(part, 2, -1)[counted], self.kind) for part in (found, truth))
        return float(overlaps(a, b).mean(dtype=np.float64))


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

    def hits(self, scores: Rows, labels: NDArray[np.int64]) -> NDArray[np.bool_]:
        found: NDArray[np.bool_] = scores.argmax(2) == labels
        return found


@register_layer("BboxAccuracy")
class BboxAccuracyLayer(HostLayer):
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
    blocker = "it compares boxes on the host"

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._normalisation = read_normalisation(self)
        self._aware = self.param.bbox_reg_param.cls_aware

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        rows = [blob.shape[0] if blob.shape else 0 for blob in bottom]
        columns = [blob.count // max(count, 1) for blob, count in zip(bottom, rows, strict=True)]
        valid = columns[0] == 8 if not self._aware else columns[0] % BOX == 0
        if len(set(rows)) != 1 or not valid or (rows[0] and columns[1:] != [5, 6]):
            raise self.shape_error("needs predictions (R, 4 C), regions (R, 5) and objects (R, 6)", *bottom)
        for blob in top:
            blob.reshape((1, 1, 1, 1))

    def compute(self, *values: Rows) -> list[Rows]:
        rows = [part.reshape(len(part), -1) for part in values]
        return [np.full((1, 1, 1, 1), value, np.float32) for value in self._overlaps(*rows)]

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
        truth, before = (with_sizes(part) for part in (objects[rows, 1:5], regions[rows, 1:5]))
        sides = before[:, 2:] * np.exp(offsets[:, 2:])
        centers = before[:, :2] + np.float32(0.5) * before[:, 2:] + offsets[:, :2] * before[:, 2:]
        after = np.concatenate([centers - sides / np.float32(2), sides], 1)
        kind = EXACT if self._aware else WHOLE
        first, second, wanted = (Boxes.from_sizes(part, kind) for part in (after, before, truth))
        means = [float(overlaps(part, wanted).mean(dtype=np.float64)) for part in (first, second)]
        return means[0], means[1]


def with_sizes(corners: Rows) -> Rows:
    """Return x, y, width, height of boxes of first and last pixels."""
    return np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2] + np.float32(1)], 1)
