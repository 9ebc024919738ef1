"""DetectionLoss of MS-CNN and DetectionGroupLoss of Cascade R-CNN: losses of maps of anchors, with mining."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.random import SampleRng
from caffepy.forks.rcnn.anchors import (
    BOX,
    AnchorMaps,
    Anchors,
    Normalisation,
    check_classes,
    check_group,
    check_map,
    read_anchors,
    read_group,
    read_limits,
    read_map,
    read_normalisation,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import Rows, softmax
from caffepy.layers.detection.suppression import descending
from caffepy.layers.formulas import scaled
from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.loss import LossLayer

_f32 = np.float32
_FLT_MIN = np.finfo(_f32).tiny
_RANDOM, _HARD, _MIXTURE = "random", "bootstrap", "mixture"
_LEAST = 4
"""Least background positions for each class that DetectionLoss looks for in an image."""


@dataclass(frozen=True)
class Counted:
    """What counts, by position (N, K, H, W): mined positions, classes, weights of classes (float32), and boxes.

    Positions with the ignored label are mined, and neither their classes nor their boxes count.
    """

    mined: NDArray[np.bool_]
    classes: NDArray[np.bool_]
    weights: Rows
    boxes: NDArray[np.bool_]


class AnchorLossLayer(LossLayer):
    """A loss of classes and offsets of anchors.

    The counts of positions are summed over the devices, so that training on several gives the result of one.
    """

    _divisor = None
    _squared = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._normalisation = read_normalisation(self)
        self._totals = self.backend.zeros((6,))
        self._anchors, self._limit = self.read_settings()
        self._gradients: tuple[Rows, Rows] | None = None

    def read_settings(self) -> tuple[Anchors, Rows | None]:
        """Read the settings; return the anchors, and the limits of predictions (4,) or None."""
        raise NotImplementedError

    def maps(self, bottom: Blobs) -> AnchorMaps:
        """Return the bottoms' values."""
        raise NotImplementedError

    def mine(self, maps: AnchorMaps, image: int, rng: SampleRng) -> NDArray[np.bool_]:
        """Return the positions (K, H, W) of an image's classes that count."""
        raise NotImplementedError

    def split_gradient(self, classes: Rows, boxes: Rows, index: int) -> Rows:
        """Return a bottom's gradient of those of the classes (N, K, C, H, W) and boxes (N, K, 4, H, W)."""
        raise NotImplementedError

    @property
    def settings(self) -> caffe_pb2.DetectionLossParameter | caffe_pb2.DetectionGroupLossParameter:
        """The fields that both losses have."""
        raise NotImplementedError

    def capture_blocker(self) -> str:
        return "it mines positions on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.counter()
        values = np.zeros(2, _f32)
        maps = self.maps(bottom)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):  # the solver handles a loss that is not finite
                values[:] = self._compute(maps)
        self.backend.from_host(values.reshape(top[0].shape), top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        factor = self.weight()
        if not self._gradient_is_weight:
            factor = float(self.backend.to_host(top[0].diff).reshape(-1)[0])
        for index, wanted in enumerate(propagate_down):
            if not wanted:
                continue
            dx = bottom[index].diff
            if self._gradients is None:
                self.backend.fill(dx, 0)
                continue
            gradient = self.split_gradient(*self._gradients, index).reshape(bottom[index].shape)
            self.backend.from_host(np.ascontiguousarray(gradient * _f32(factor)), dx)
            if self._starts_gradient and self.context.loss_scale is not None:
                self.backend.apply(scaled, (dx, self.context.loss_scale), (dx,))

    # -- on the host ---------------------------------------------------------------------------------

    def _compute(self, maps: AnchorMaps) -> tuple[float, float]:
        """Return both losses and store the gradients."""
        counted = self._count(maps)
        devices = self.context.shard.world_size if self.communicates() else 1
        totals = self._summed([
            counted.classes.sum(), BOX * counted.boxes.sum(),
            *self._weight_totals(maps, counted),
        ])  # fmt: skip
        weights = self._balanced(maps, counted, totals[2:])
        class_loss, classes = self._compare_classes(maps, counted.classes, weights)
        box_loss, boxes = self._compare_boxes(maps, counted.boxes)
        by_class, by_box = (devices / max(total, 1) for total in totals[:2])
        by_box *= float(getattr(self.settings, "lambda"))  # a word of Python's
        self._gradients = (classes * _f32(by_class), boxes * _f32(by_box))
        return class_loss * by_class + box_loss * by_box, box_loss * by_box

    def _summed(self, values: list[float]) -> Rows:
        """Return values after summation over the devices."""
        found = np.array(values, _f32)
        if self.communicates():
            assert self.context.all_reduce_sum is not None
            self.backend.from_host(found, self._totals)
            self.context.all_reduce_sum(self._totals)
            found = self.backend.to_host(self._totals)
        return found.astype(np.float64)

    def _count(self, maps: AnchorMaps) -> Counted:
        stream, first = self.random_stream(), self.first_sample()
        kept = np.stack([
            self.mine(maps, image, SampleRng(stream.seed, stream.stream, first + image))
            for image in range(len(maps.labels))
        ])  # fmt: skip
        objects = maps.labels != 0
        counted = ~self._is_ignored(maps)
        weights = np.ones(maps.labels.shape, _f32)
        if isinstance(self.settings, caffe_pb2.DetectionLossParameter) and self.settings.iou_weighted:
            weights = np.where(objects, maps.overlaps, _f32(1))
        return Counted(kept, kept & counted, weights, kept & counted & objects)

    def _is_ignored(self, maps: AnchorMaps) -> NDArray[np.bool_]:
        if self.ignored is None:
            return np.zeros(maps.labels.shape, bool)
        found: NDArray[np.bool_] = maps.classes(self.settings.objectness) == self.ignored
        return found

    def _weight_totals(self, maps: AnchorMaps, counted: Counted) -> list[float]:
        """Return the numbers of mined objects and background positions, and the sums of their weights."""
        objects = maps.labels != 0
        parts = [counted.mined & objects, counted.mined & ~objects]
        return [*(part.sum() for part in parts), *(counted.weights[part].sum(dtype=np.float64) for part in parts)]

    def _balanced(self, maps: AnchorMaps, counted: Counted, totals: Rows) -> Rows:
        """Return the weights after scaling: with pos_neg_weighted their sums have the ratio 1 to bg_multiple."""
        if not self.settings.pos_neg_weighted:
            return counted.weights
        share, count = 1 / (1 + self.settings.bg_multiple), totals[0] + totals[1]
        parts = ((share, totals[2]), (1 - share, totals[3]))
        factors = [fraction * count / total if total else 1 for fraction, total in parts]
        return counted.weights * np.where(maps.labels != 0, _f32(factors[0]), _f32(factors[1]))

    def _compare_classes(self, maps: AnchorMaps, counted: NDArray[np.bool_], weights: Rows) -> tuple[float, Rows]:
        """Return the sum of weighted -log softmax(scores)[label], and its gradient."""
        probabilities = softmax(maps.scores, 2)
        labels = np.where(counted, maps.classes(self.settings.objectness), 0)[:, :, None]
        weights = np.where(counted, weights, _f32(0))
        chosen = np.take_along_axis(probabilities, labels, 2)[:, :, 0]
        loss = -(np.log(np.maximum(chosen, _FLT_MIN)) * weights).sum(dtype=np.float64)
        np.put_along_axis(probabilities, labels, chosen[:, :, None] - _f32(1), 2)
        return float(loss), probabilities * weights[:, :, None]

    def _compare_boxes(self, maps: AnchorMaps, counted: NDArray[np.bool_]) -> tuple[float, Rows]:
        """Return the loss of the offsets of positions that count, and its gradient."""
        predictions = maps.predictions
        if self._limit is not None:
            limit = self._limit.reshape(2, 4, 1, 1)
            predictions = np.clip(predictions, limit[0], limit[1])
        difference = predictions - self._anchors.encode(maps.boxes, self._normalisation)
        difference = np.where(counted[:, :, None], difference, _f32(0))
        size = np.abs(difference)
        squares = difference * difference / _f32(2)
        if self._squared:
            return float(squares.sum(dtype=np.float64)), difference
        loss = np.where(size < 1, squares, size - _f32(0.5))
        return float(loss.sum(dtype=np.float64)), np.clip(difference, _f32(-1), _f32(1))


def prediction_limits(layer: LossLayer, normalisation: Normalisation, place: float, size: float) -> NDArray[np.float32]:
    """Return the lowest and highest prediction (2, 4) of the fields field_xyr and field_whr.

    The limits of x and y, and of width and height, have the mean of both bbox_mean and the geometric mean of both
    bbox_std, as in the forks.
    """
    limits = read_limits(layer, place, size)
    parts = []
    for which, limit in ((slice(0, 2), limits.place), (slice(2, 4), limits.size)):
        mean, std = normalisation.mean[which].mean(), np.sqrt(normalisation.std[which].prod())
        parts += [[(-limit - mean) / std, (limit - mean) / std]] * 2
    found: NDArray[np.float32] = np.array(parts, _f32).T
    return found


class MscnnLossLayer(AnchorLossLayer):
    """The loss of one anchor at each position of a map, with mining: that of MS-CNN which DetectionLoss describes."""

    @property
    def settings(self) -> caffe_pb2.DetectionLossParameter:
        return self.param.detection_loss_param

    def read_settings(self) -> tuple[Anchors, Rows]:
        param = self.settings
        if param.coord_num != BOX:
            raise self.error(f"coord_num is {param.coord_num}; boxes have 4 numbers")
        check_classes(self, param)
        self._squared = not param.bb_smooth
        limit = prediction_limits(self, self._normalisation, param.field_xyr, param.field_whr)
        return read_anchors(self, param.field_w, param.field_h, param.downsample_rate, "downsample_rate"), limit

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_map(self, self.settings, bottom)
        top[0].reshape((1, 1, 1, 2))

    def maps(self, bottom: Blobs) -> AnchorMaps:
        return read_map(self, self.settings, bottom)

    def mine(self, maps: AnchorMaps, image: int, rng: SampleRng) -> NDArray[np.bool_]:
        param, labels = self.settings, maps.labels[image].ravel()
        background = (labels == 0) & (maps.overlaps[image].ravel() < _f32(param.bg_threshold))
        ratio = param.bg_multiple * (0.5 if param.sample_mode == _MIXTURE else 1)
        kept = np.zeros(labels.shape, bool)
        if param.sample_mode in (_RANDOM, _MIXTURE):
            count = max(int((labels != 0).sum() * ratio), _LEAST * (param.cls_num - 1))
            drawn = rng.integers(len(labels), count)
            kept[drawn] = background[drawn]
        if param.sample_mode in (_HARD, _MIXTURE):
            rows = np.flatnonzero(background)
            classes = np.minimum(labels, 1) if param.objectness else labels
            for number in range(1, param.cls_num):
                scores = maps.scores[image, 0, number].ravel()[rows]
                count = max(int((classes == number).sum() * ratio), _LEAST)
                kept[rows[descending(scores)[:count]]] = True
        if param.sample_mode not in (_RANDOM, _HARD, _MIXTURE):
            kept = background
        found: NDArray[np.bool_] = (kept | (labels != 0)).reshape(maps.labels[image].shape)
        return found

    def split_gradient(self, classes: Rows, boxes: Rows, index: int) -> Rows:
        return np.concatenate([classes, boxes], 2)


@register_layer("DetectionGroupLoss")
class DetectionGroupLossLayer(AnchorLossLayer):
    """The loss of G anchors at each position, with mining (Cascade R-CNN's `detection_group_loss_layer.cpp`).

    Shapes: scores (N G, C, H, W), offsets (N G, 4, H, W), labels (N G, 6, H, W) as DetectionLoss's, G the number of
    `field_w`; the top is (1, 1, 1, 2): the loss and its part of the boxes, as DetectionLoss's. With batch_size -1 all
    objects of an image count, and bg_multiple background positions for each, at least min_num_neg. Otherwise batch_size
    positions of an image count, at most round(batch_size / (1 + bg_multiple)) of them objects at random. Background
    positions are chosen by `neg_mining_type`: random, bootstrap (those with the highest loss, or by `neg_ranking_type`
    conf_prob the lowest probability of the background) or mixture (half of each). Predictions are limited if both
    `field_xyr` and `field_whr` are given. Computed on the host.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms have other shapes.
        DataError: a label is outside the classes.
    """

    bottoms = (3, 3)
    no_gradient_bottoms = frozenset({2})

    @property
    def settings(self) -> caffe_pb2.DetectionGroupLossParameter:
        return self.param.detection_group_loss_param

    def read_settings(self) -> tuple[Anchors, Rows | None]:
        param = self.settings
        check_classes(self, param)
        if param.batch_size < 1 and param.batch_size != -1:
            raise self.error(f"batch_size is {param.batch_size}; it must be above 0, or -1 for all objects")
        for name, values in (
            ("neg_mining_type", (_RANDOM, _HARD, _MIXTURE)),
            ("neg_ranking_type", ("conf_loss", "conf_prob")),
            ("bbox_loss_type", ("Smooth_L1", "Euclidean_L2")),
        ):
            if getattr(param, name) not in values:
                raise self.error(f"{name} is '{getattr(param, name)}'; it must be one of {', '.join(values)}")
        self._squared = param.bbox_loss_type == "Euclidean_L2"
        bounded = param.HasField("field_xyr") and param.HasField("field_whr")
        limit = prediction_limits(self, self._normalisation, param.field_xyr, param.field_whr) if bounded else None
        return read_anchors(self, list(param.field_w), list(param.field_h), param.stride, "stride"), limit

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_group(self, self.settings, len(self._anchors.widths), bottom)
        top[0].reshape((1, 1, 1, 2))

    def maps(self, bottom: Blobs) -> AnchorMaps:
        return read_group(self, self.settings, len(self._anchors.widths), bottom)

    def mine(self, maps: AnchorMaps, image: int, rng: SampleRng) -> NDArray[np.bool_]:
        param, labels = self.settings, maps.labels[image].ravel()
        objects = np.flatnonzero(labels > 0)
        background = np.flatnonzero((labels == 0) & (maps.overlaps[image].ravel() < _f32(param.bg_threshold)))
        if param.batch_size == -1:
            count = max(len(objects) * param.bg_multiple, param.min_num_neg)
        else:
            limit = int(np.floor(_f32(param.batch_size) / _f32(1 + param.bg_multiple) + _f32(0.5)))
            objects = rng.some(objects, limit)
            count = param.batch_size - len(objects)
        kept = np.zeros(labels.shape, bool)
        kept[objects] = True
        kept[self._mined(maps, image, background, count, rng)] = True
        found: NDArray[np.bool_] = kept.reshape(maps.labels[image].shape)
        return found

    def _mined(
        self, maps: AnchorMaps, image: int, background: NDArray[np.intp], count: int, rng: SampleRng
    ) -> NDArray[np.intp]:
        """Return `count` of the background positions."""
        kind = self.settings.neg_mining_type
        if len(background) <= count or kind == _RANDOM:
            return rng.some(background, count)
        probability = softmax(maps.scores[image : image + 1], 2)[0, :, 0].ravel()[background]
        rank = 1 - probability
        if self.settings.neg_ranking_type == "conf_loss":
            rank = -np.log(np.maximum(probability, _FLT_MIN))
        order = background[descending(rank)]
        hard = count if kind == _HARD else (count + 1) // 2
        return np.concatenate([order[:hard], rng.some(order[hard:], count - hard)])

    def split_gradient(self, classes: Rows, boxes: Rows, index: int) -> Rows:
        return boxes if index else classes
