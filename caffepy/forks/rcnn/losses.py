"""Losses of regions and anchors: FocalLoss, those with online mining of R-FCN, and those of MS-CNN and Cascade R-CNN.

SmoothL1LossOHEM, SoftmaxWithLossOHEM and BoxAnnotatorOHEM are R-FCN's online hard example mining. DetectionLoss of
MS-CNN and DetectionGroupLoss of Cascade R-CNN are losses of maps of anchors, with mining.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from math import log
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.backend.formulas import scaled, scaled_over_count
from caffepy.data.boxes import Rows
from caffepy.data.random import SampleRng
from caffepy.forks.rcnn.anchors import (
    BOX,
    AnchorMaps,
    Anchors,
    Normalisation,
    check_classes,
    check_maps,
    read_anchors,
    read_limits,
    read_maps,
    read_normalisation,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import softmax
from caffepy.layers.detection.suppression import descending, sort_like_cpp
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.loss import (
    Labels,
    LossLayer,
    SmoothL1LossLayer,
    SoftmaxWithLossLayer,
    _Parameter,
)

# -- FocalLoss -----------------------------------------------------------------------------------------

_SMALLEST = 1.1754944e-38
"""The smallest probability whose logarithm is computed: FLT_MIN."""
_NEAREST = 1e-10
"""The smallest 1 - p by which the gradient divides."""


@expression
def missing(difference: Each) -> Each:
    return -difference if difference < 0 else 0.0


@expression
def probability(difference: Each, p: Each) -> Each:
    return p if difference < 0 else 0.0


@expression
def focal(miss: Each, p: Each, alpha: Scalar, gamma: Scalar, smallest: Scalar) -> Each:
    return 0.0 if miss <= 0 else -alpha * miss**gamma * log(max(p, smallest))


@expression
def focal_gradient(
    difference: Each, miss: Channel, p: Channel, alpha: Scalar, gamma: Scalar, smallest: Scalar, nearest: Scalar
) -> Each:
    return difference * alpha * miss**gamma * (1 - gamma * p / max(miss, nearest) * log(max(p, smallest)))  # type: ignore[no-any-return]


@register_layer("FocalLoss")
class FocalLossLayer(LossLayer):
    """loss = sum of -alpha (1 - p)^gamma log p / divisor with p = softmax(x)[label] (Lin et al. 2017).

    As `focal_loss_layer.cpp` of zimenglan-sysu-512. Shapes: x (N, C, ...) with classes along `softmax_param.axis`, one
    label for each position. The divisor is the number of labels that are not ignored (VALID, the default), of all
    labels (FULL), of samples (BATCH_SIZE), or 1 (NONE). An optional second top holds softmax(x). dx = alpha (1 -
    p)^gamma (1 - gamma p log p / (1 - p)) (softmax(x) - onehot(label)) * loss weight / divisor.

    Raises:
        ConfigError: alpha is not above 0, or gamma is below 0.
        ShapeError: the number of labels is not the number of positions.
        DataError: a label is outside the classes.
    """

    tops = (1, 2)
    no_gradient_tops = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.focal_loss_param
        if not param.alpha > 0 or not param.gamma >= 0:
            raise self.error(f"alpha is {param.alpha:g} and gamma {param.gamma:g}; give alpha > 0 and gamma >= 0")
        self._labels = Labels(self)
        self._totals = self.backend.zeros((2,))
        self._count = self.backend.view(self._totals[1:], ())
        self._sum = self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._divisor = self.divisor(caffe_pb2.LossParameter.VALID, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(bottom[0].shape)

    def _rows(self, array: Array) -> Array:
        """Return a view of an array of x's shape, with the classes last."""
        axes = range(len(array.shape))
        return array.transpose(*(axis for axis in axes if axis != self._axis), self._axis)

    def _scratch(self, name: str) -> Array:
        return self.scratch(name, (self._labels.size, self._labels.classes)).array

    def _positions(self, name: str) -> Array:
        return self.scratch(name, (self._labels.size,)).array

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, param, labels = self.backend, self.param.focal_loss_param, self._labels.load()
        x, p, difference = self._scratch("x"), self._scratch("p"), self._scratch("difference")
        rows = self._rows(bottom[0].data)
        backend.copy(rows, x.reshape(*rows.shape))
        backend.softmax_loss_forward(x, labels, p, self._totals, self._labels.bad_index, 1, self.ignored)
        backend.softmax_loss_backward(p, labels, difference, None, 1, self.ignored, 1.0)
        miss, hit = self._positions("miss"), self._positions("hit")
        backend.reduce(missing, (difference,), (miss,), 0)
        backend.reduce(probability, (difference, p), (hit,), 0)
        backend.reduce(focal, (miss, hit, param.alpha, param.gamma, _SMALLEST), (self._sum,))
        if len(top) > 1:
            backend.copy(p.reshape(*rows.shape), self._rows(top[1].data))
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        param, x = self.param.focal_loss_param, self._scratch("x")
        arguments = (
            self._scratch("difference"),
            self._positions("miss"),
            self._positions("hit"),
            param.alpha,
            param.gamma,
            _SMALLEST,
            _NEAREST,
        )
        self.backend.apply(focal_gradient, arguments, (x,), 0)
        if self._divisor is None:
            self.backend.apply(scaled_over_count, (x, self._count, self.scale()), (x,), 0)
        else:
            self.backend.apply(scaled, (x, self.scale()), (x,))
        rows = self._rows(bottom[0].diff)
        self.backend.copy(x.reshape(*rows.shape), rows)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


# -- online hard example mining ------------------------------------------------------------------------


@register_layer("SmoothL1LossOHEM")
class SmoothL1LossOHEMLayer(SmoothL1LossLayer):
    """SmoothL1Loss with the divisors of `loss_param` (`smooth_L1_loss_ohem_layer.cpp` of R-FCN and Intel Caffe).

    loss = sum of f(w (a - b)) / divisor, where f(d) = d^2 / 2 if |d| < 1, else |d| - 1 / 2. a, b and the optional third
    bottom w are (N, C, H, W). The divisor is N H W (VALID, the default, and FULL), N (BATCH_SIZE), 1 (NONE) or
    `pre_fixed_normalizer`, at least 1 (PRE_FIXED). An optional second top (N, 1, H, W) holds the loss of each position,
    summed over the channels and not divided. `smooth_l1_loss_param.sigma`, which the forks do not read, is as in
    SmoothL1Loss.
    """

    bottoms = (2, 3)

    def _set_divisor(self, bottom: Blobs) -> None:
        batch = bottom[0].shape[0]
        positions = batch * math.prod(bottom[0].shape[2:])
        divisor = self.divisor(_Parameter.VALID, positions, batch)
        # R-FCN's forks count no valid labels here, also where ignore_label is given.
        self._divisor = float(max(positions, 1)) if divisor is None else divisor


@register_layer("SoftmaxWithLossOHEM")
class SoftmaxWithLossOHEMLayer(SoftmaxWithLossLayer):
    """SoftmaxWithLoss with up to three tops, under the name of `softmax_loss_ohem_layer.cpp` (R-FCN, Intel Caffe)."""


_REGIONS, _LOSS, _LABELS, _WEIGHTS = range(4)


@register_layer("BoxAnnotatorOHEM")
class BoxAnnotatorOHEMLayer(HostLayer):
    """Keeps the labels of the `roi_per_img` regions of each image that have the largest loss (Shrivastava et al. 2016).

    Bottoms: regions (R, 5, H, W), whose first channel names the image, losses (R, 1, H, W), labels (R, 1, H, W) and the
    weights of the box regression (R, B, H, W); axes of size 1 may be missing. Tops: the labels, `ignore_label` in place
    of labels that are not kept, and the weights, 0 there. Equal losses stay in the order of `std::sort`. The bottoms'
    gradient is 0. Computed on the host (`box_annotator_ohem_layer.cpp` of R-FCN and Intel Caffe).

    Raises:
        ConfigError: roi_per_img is 0.
        ShapeError: the bottoms do not match.
        DataError: a loss is NaN, or a region names an image below 0.
    """

    bottoms = (4, 4)
    tops = (2, 2)
    exact_bottoms = frozenset({0, 1, 2, 3})
    float32_tops_from = 0
    blocker = "it sorts losses on the host"

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if self.param.box_annotator_ohem_param.roi_per_img < 1:
            raise self.error("box_annotator_ohem_param needs roi_per_img, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = []
        for blob in bottom:
            shape = blob.shape + (1,) * (4 - len(blob.shape))
            if len(shape) != 4:
                raise self.shape_error("needs bottoms of at most four axes", *bottom)
            shapes.append(shape)
        number, _, high, wide = shapes[_LOSS]
        wanted = {_REGIONS: 5, _LOSS: 1, _LABELS: 1}
        for index, shape in enumerate(shapes):
            if shape != (number, wanted.get(index, shape[1]), high, wide):
                raise self.shape_error("needs regions R 5 H W, losses and labels R 1 H W, weights R B H W", *bottom)
        self._shapes = shapes
        top[0].reshape((number, 1, high, wide))
        top[1].reshape(shapes[_WEIGHTS])

    def compute(self, *values: Any) -> list[Any]:
        regions, losses, labels, weights = (
            value.reshape(shape) for value, shape in zip(values, self._shapes, strict=True)
        )
        keep = self._kept(regions[:, 0], losses[:, 0]).reshape(losses.shape)
        ignored = np.float32(self.param.box_annotator_ohem_param.ignore_label)
        return [np.where(keep, labels, ignored), np.where(keep, weights, np.float32(0))]

    def _kept(self, images: Any, losses: Any) -> Any:
        """Return whether each position is kept, (positions,)."""
        keys = np.array(losses, np.float32).reshape(-1)
        if not (images >= 0).all():
            raise self.data_error(f"'{self.bottom_names[_REGIONS]}' names an image below 0")
        if np.isnan(keys).any():
            raise self.data_error(f"'{self.bottom_names[_LOSS]}' contains NaN; the net's losses diverged")
        order = np.arange(len(keys), dtype=np.int32)
        sort_like_cpp(keys, order)
        named = images.reshape(-1)[order].astype(np.int64)
        keep = np.zeros(math.prod(losses.shape), bool)
        for image in np.unique(named):
            keep[order[named == image][: self.param.box_annotator_ohem_param.roi_per_img]] = True
        return keep


# -- losses of maps of anchors -------------------------------------------------------------------------

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

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        check_maps(self, self.settings, len(self._anchors.widths), bottom)
        top[0].reshape((1, 1, 1, 2))

    def capture_blocker(self) -> str:
        return "it mines positions on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.counter()
        losses, values = np.zeros(2, _f32), [self.backend.to_host(blob.data) for blob in bottom]
        if self.backend.holds_values:
            with np.errstate(all="ignore"):  # the solver handles a loss that is not finite
                losses[:] = self._compute(read_maps(self, self.settings, len(self._anchors.widths), values))
        self.backend.from_host(losses.reshape(top[0].shape), top[0].data)

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
        totals = self._summed(
            [
                counted.classes.sum(),
                BOX * counted.boxes.sum(),
                *self._weight_totals(maps, counted),
            ]
        )
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
        kept = np.stack(
            [
                self.mine(maps, image, SampleRng(stream.seed, stream.stream, first + image))
                for image in range(len(maps.labels))
            ]
        )
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
