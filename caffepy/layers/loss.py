"""Softmax, losses of values and of labels, checks of labels, and the class on which all losses are built.

The base class is Caffe's `loss_layer.hpp`. The layers are ContrastiveLoss, EuclideanLoss, HingeLoss,
MultinomialLogisticLoss, InfogainLoss, SigmoidCrossEntropyLoss, SoftmaxWithLoss, and NVIDIA's L1Loss and SmoothL1Loss.
`PixelLoss` sums over the channels of each pixel, as FlowNet 2's losses do.

`Labels` puts class labels into the order of the scores. It and `IndexCheck` find labels and indices outside their
range: a kernel records an index that is out of range; the host raises the error later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from math import exp, fabs, floor, log, log1p, sqrt
from typing import Any

import numpy as np

from caffepy.backend import Array, Backend, Channel, Each, Expression, Scalar, expression
from caffepy.backend.formulas import (
    difference,
    identity,
    negated,
    pair_gradient,
    product,
    product_with_channel,
    scaled,
    scaled_magnitude,
    squared_difference,
)
from caffepy.data.mean import read_blob
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, flatten_pixels, register_layer

# -- labels and indices --------------------------------------------------------------------------------


class Labels:
    """The labels of a layer that scores classes along one axis, and the device flag for labels outside the classes.

    Args:
        layer: the layer, for messages.
    """

    def __init__(self, layer: Layer) -> None:
        self._layer = layer
        self._backend = layer.backend
        self.bad_index = self._backend.zeros((1,), "int32")
        """Index in the batch of a label outside the classes, int32 of shape (1,); -1: none."""
        self._backend.fill(self.bad_index, -1)
        self._loads = 0
        self._first_pass = 0
        """The first pass since the last check. Replayed CUDA graphs do not update it."""

    def reshape(self, scores: Blob, labels: Blob, axis: int) -> None:
        """Check that there is one label for each position of the scores.

        Raises:
            ShapeError: there are more or fewer labels.
        """
        self.classes = scores.shape[axis]
        self.outer = math.prod(scores.shape[:axis])
        self.size = self.outer * math.prod(scores.shape[axis + 1 :])
        if labels.count != self.size:
            raise self._layer.shape_error(
                f"needs one label for each position: {self.size} for classes along axis {axis}, not {labels.count}",
                scores,
                labels,
            )
        self._blob = labels
        self._adapter = LayoutAdapter(self._backend, labels.shape, (self.size,))

    def load(self) -> Array:
        """Return the labels of this pass, shape (size,), in the logical order of the scores without the class axis."""
        if self._loads == 0:
            self._first_pass = self._layer.context.passes.number
        self._loads += 1
        return self._adapter.load(self._blob.data)

    def loaded(self) -> Array:
        """Return the labels of the last `load`."""
        return self._adapter.target(self._blob.data)

    def raise_device_errors(self) -> None:
        """Raise if a label was outside the classes since the last check. Waits for the device.

        Raises:
            DataError: names the record after a single pass, else the first sample of the passes.
        """
        now = self._layer.context.passes.number
        first, exact = self._first_pass, self._loads == 1 and now - self._first_pass <= 1
        self._loads, self._first_pass = 0, now
        index = int(self._backend.to_host(self.bad_index)[0])
        if index < 0:
            return
        self._backend.fill(self.bad_index, -1)
        row = index * self._blob.shape[0] // self.size if self._blob.shape else 0
        if exact:
            value = self._blob.host_data().reshape(-1)[index]
            what = f"the label of {self._record(first, row)} is {value:g},"
        else:
            what = f"a label of the samples from {self._sample(first)} on, number {row} of its batch, is"
        raise DataError(
            f"{self._layer.where}: {what} outside the {self.classes} classes, 0 to "
            f"{self.classes - 1}; correct the data, or give the blob '{self._layer.bottom_names[0]}' more classes"
        )

    def _sample(self, number: int) -> int:
        """Return the global number of this device's first sample in a pass."""
        context = self._layer.context
        return context.first_sample(number) if context.first_sample else 0

    def _record(self, number: int, row: int) -> str:
        """Return the name of the record in row `row` of the batch of pass `number`."""
        sample = f"sample {self._sample(number) + row}"
        describe = self._layer.context.describe_sample
        return f"{describe(number, row)} ({sample})" if describe else sample


class IndexCheck:
    """A device flag that kernels set for an index out of range.

    Args:
        layer: the layer, for messages.
        problem: the message, with advice; `{}` stands for the position of the index.
    """

    def __init__(self, layer: Layer, problem: str) -> None:
        self._layer = layer
        self._problem = problem
        self.bad_index = layer.backend.zeros((1,), "int32")
        """Position of an index out of range, int32 of shape (1,); -1: none."""
        layer.backend.fill(self.bad_index, -1)

    def raise_device_errors(self) -> None:
        """Raise if an index was out of range since the last check. Waits for the device.

        Raises:
            DataError: with the position of one such index.
        """
        position = int(self._layer.backend.to_host(self.bad_index)[0])
        if position < 0:
            return
        self._layer.backend.fill(self.bad_index, -1)
        raise DataError(f"{self._layer.where}: {self._problem.format(position)}")


# -- base classes --------------------------------------------------------------------------------------

_Parameter = caffe_pb2.LossParameter

LOG_THRESHOLD = 1e-20
"""The smallest probability whose logarithm is computed: Caffe's kLOG_THRESHOLD."""

NO_IGNORED_LABEL = -1e30
"""Stands for a missing `ignore_label` in formulas: no label has this value."""


@expression
def divided_by_count(total: Each, count: Each, devices: Scalar) -> Each:
    return total * devices / max(count, 1.0)


class LossLayer(Layer):
    """A layer that compares bottoms 0 and 1, (N, …) each, and computes a scalar loss of shape ().

    Training averages losses and gradients over devices. Each device scales its own such that the average equals the
    result of one device with the whole batch.

    Raises:
        ShapeError: the bottoms differ in N.
    """

    bottoms = (2, 2)
    is_loss = True
    auto_tops = True
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    _divisor: float | None = 1.0
    """The result of `divisor` for the current shapes."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom[:2]:
            if not blob.shape:
                raise self.shape_error("both bottoms need a first axis, N", bottom[0], bottom[1])
        if bottom[0].shape[0] != bottom[1].shape[0]:
            raise self.shape_error("both bottoms must have the same first axis, N", bottom[0], bottom[1])
        top[0].reshape(())

    @property
    def _starts_gradient(self) -> bool:
        """Whether backpropagation starts at the first top: it has a loss weight and no later layer writes its diff."""
        # If a later layer writes the gradient, the default weight 1 counts in the reported loss but not in the
        # gradient, as in Caffe.
        return bool(self.loss_weights and self.loss_weights[0]) and not self.reader_propagates

    @property
    def _gradient_is_weight(self) -> bool:
        """Whether the first top's gradient is its loss weight, so that it is known without reading the device."""
        return self._starts_gradient and not self.program_writes_diff

    def weight(self) -> float:
        """Return the first top's gradient if it is known on the host; else 1, and `apply_top_gradient` multiplies."""
        return self.loss_weights[0] if self._gradient_is_weight else 1.0

    def apply_top_gradient(self, top: Blobs, dx: Array) -> None:
        """Multiply a bottom's diff by the first top's diff unless `weight` did, and by the loss scale.

        A gradient that a later layer wrote contains the loss scale already.
        """
        if not self._gradient_is_weight:
            self.backend.apply(product_with_channel, (dx, top[0].diff), (dx,), 0)
        if self._starts_gradient and self.context.loss_scale is not None:
            self.backend.apply(scaled, (dx, self.context.loss_scale), (dx,))

    def load_gradient(self, gradient: Any, top: Blobs, dx: Array) -> None:
        """Set a bottom's diff to the host's gradient, times the weight and the first top's diff; None: to 0."""
        if gradient is not None:
            self.backend.from_host(gradient, dx)
        else:
            self.backend.fill(dx, 0)
        self.backend.apply(scaled, (dx, self.weight()), (dx,))
        self.apply_top_gradient(top, dx)

    def normalization(self, default: int) -> int:
        """Return the mode of the field `normalization` or of the old `normalize`; `default` if neither is set."""
        param = self.param.loss_param
        if param.HasField("normalize") and not param.HasField("normalization"):
            return _Parameter.VALID if param.normalize else _Parameter.BATCH_SIZE
        return param.normalization if param.HasField("normalization") else default

    def divisor(self, default: int, labels: int, batch: int) -> float | None:
        """Return the divisor of the sum of losses; None: the number of valid labels, counted on the device.

        For the mode NONE it is 1 / devices, because training averages over the devices. PRE_FIXED is not divided, as in
        R-FCN's Caffe: each device divides its own sum by `pre_fixed_normalizer`.

        Args:
            default: the mode if the prototxt has neither `normalization` nor the old `normalize`.
            labels: number of labels, ignored ones included.
            batch: number of samples.
        """
        mode = self.normalization(default)
        if mode == _Parameter.VALID and self.param.loss_param.HasField("ignore_label"):
            return None
        if mode == _Parameter.PRE_FIXED:
            return float(max(self.param.loss_param.pre_fixed_normalizer, 1))
        counts = {_Parameter.FULL: labels, _Parameter.VALID: labels, _Parameter.BATCH_SIZE: batch}
        if mode not in counts:
            return 1 / self.context.shard.parts if self.context.phase == caffe_pb2.TRAIN else 1.0
        return float(max(counts[mode], 1))  # type: ignore[index]

    def communicates(self) -> bool:
        return self._divisor is None and self.context.all_reduce_sum is not None

    def capture_blocker(self) -> str | None:
        if not self.communicates() or self.context.all_reduce_capturable:
            return None
        return "it counts labels over all devices through the host"

    @property
    def _label_devices(self) -> int:
        """Number of devices whose labels the count includes."""
        return self.context.shard.world_size if self.communicates() else 1

    def scale(self) -> float:
        """Return the factor of the gradient, without a divisor that is counted on the device."""
        return self.weight() * self._label_devices if self._divisor is None else self.weight() / self._divisor

    def write_loss(self, total: Array, count: Array, divisor: float | None, loss: Array) -> None:
        """loss = total / divisor. Without a divisor loss = total / count, after an all-reduce of `count`."""
        if divisor is None:
            if self.communicates():
                assert self.context.all_reduce_sum is not None
                self.context.all_reduce_sum(count.reshape(1))
            self.backend.apply(divided_by_count, (total, count, float(self._label_devices)), (loss,))
        else:
            self.backend.apply(scaled, (total, 1 / divisor), (loss,))

    @property
    def ignored(self) -> int | None:
        """The label that the loss ignores, or None."""
        param = self.param.loss_param
        return param.ignore_label if param.HasField("ignore_label") else None


class ElementLossLayer(LossLayer):
    """An elementwise loss. The second bottom has the first one's count and may have another shape.

    Raises:
        ShapeError: the counts differ.
    """

    _shapes: tuple[tuple[int, ...], ...] | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if bottom[0].count != bottom[1].count:
            raise self.shape_error("both bottoms must have the same count", bottom[0], bottom[1])
        shapes = (bottom[0].shape, bottom[1].shape)
        if shapes != self._shapes:
            self._shapes = shapes
            self._targets = LayoutAdapter(self.backend, bottom[1].shape, bottom[0].shape)
            self._target_diffs = LayoutAdapter(self.backend, bottom[1].shape, bottom[0].shape)


# -- losses of distances -------------------------------------------------------------------------------

MIN_DISTANCE = 1e-4
"""Added to a distance before a division by it, as in Caffe."""


@expression
def pair_loss(square: Each, similar: Each, margin: Scalar, factor: Scalar) -> Each:
    rest = max(margin - sqrt(square), 0.0)
    return factor * (square if fabs(similar) >= 1 else rest * rest)


@expression
def legacy_pair_loss(square: Each, similar: Each, margin: Scalar, factor: Scalar) -> Each:
    return factor * (square if fabs(similar) >= 1 else max(margin - square, 0.0))


@expression
def pair_slope(square: Each, similar: Each, margin: Scalar) -> Each:
    distance = sqrt(square)
    rest = max(margin - distance, 0.0)
    return 1.0 if fabs(similar) >= 1 else -rest / (distance + MIN_DISTANCE)


@expression
def legacy_pair_slope(square: Each, similar: Each, margin: Scalar) -> Each:
    return 1.0 if fabs(similar) >= 1 else (-1.0 if square < margin else 0.0)


@register_layer("ContrastiveLoss")
class ContrastiveLossLayer(LossLayer):
    """loss = sum of (similar ? d^2 : max(margin - d, 0)^2) / (2 N), d = |a - b| (Hadsell, Chopra and LeCun 2006).

    Shapes: a and b (N, C), similar (N,): 1, or 0 for dissimilar pairs. With `legacy_version` dissimilar pairs have the
    loss max(margin - d^2, 0). The gradient divides by d + 1e-4 (Caffe's `contrastive_loss_layer.cpp`).

    Raises:
        ShapeError: the bottoms are not (N, C), (N, C) and (N,).
    """

    bottoms = (3, 3)
    no_gradient_bottoms = frozenset({2})

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        a, b, similar = bottom
        if a.count != b.count or len(a.shape) < 2 or a.count != a.shape[0] * a.shape[1]:
            raise self.shape_error("the first two bottoms must both be (N, C)", a, b)
        if similar.count != a.shape[0]:
            raise self.shape_error("the third bottom must have one number for each pair", similar, a)
        self._squares = self.scratch("squares", (a.shape[0],))
        self._slopes = self.scratch("slopes", (a.shape[0],))

    def _inputs(self, bottom: Blobs) -> tuple[Array, Array, Array]:
        """Return a and b as (N, C), similar as (N,)."""
        samples, width = bottom[0].shape[:2]
        a, b = (self.backend.flat(blob.data).reshape(samples, width) for blob in bottom[:2])
        return a, b, self.backend.flat(bottom[2].data).reshape(samples)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.contrastive_loss_param
        a, b, similar = self._inputs(bottom)
        squares = self._squares.array
        self.backend.reduce(squared_difference, (a, b), (squares,), 0)
        formula = legacy_pair_loss if param.legacy_version else pair_loss
        self.backend.reduce(formula, (squares, similar, param.margin, 0.5 / max(bottom[0].shape[0], 1)), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not any(propagate_down[:2]):
            return
        param = self.param.contrastive_loss_param
        a, b, similar = self._inputs(bottom)
        formula = legacy_pair_slope if param.legacy_version else pair_slope
        self.backend.apply(formula, (self._squares.array, similar, param.margin), (self._slopes.array,))
        for blob, needs_gradient, sign in zip(bottom, propagate_down[:2], (1, -1), strict=False):
            if needs_gradient:
                dx = self.backend.flat(blob.diff).reshape(a.shape)
                factor = sign * self.weight() / max(bottom[0].shape[0], 1)
                self.backend.apply(pair_gradient, (a, b, self._slopes.array, factor), (dx,), 0)
                self.apply_top_gradient(top, dx)


@expression
def scaled_squared_difference(a: Each, b: Each, factor: Scalar) -> Each:
    return (a - b) * (a - b) * factor


@expression
def scaled_difference(a: Each, b: Each, factor: Scalar) -> Each:
    return (a - b) * factor


@register_layer("EuclideanLoss")
class EuclideanLossLayer(ElementLossLayer):
    """loss = sum of (a - b)^2 / (2 N) (Caffe's `euclidean_loss_layer.cpp`).

    da = (a - b) * loss weight / N, db = -da.
    """

    no_gradient_bottoms = frozenset()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, b = bottom[0].data, self._targets.load(bottom[1].data)
        factor = 0.5 / max(bottom[0].shape[0], 1)
        self.backend.reduce(scaled_squared_difference, (a, b, factor), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        a, b = bottom[0].data, self._targets.target(bottom[1].data)
        factor = self.weight() / max(bottom[0].shape[0], 1)
        if propagate_down[0]:
            self.backend.apply(scaled_difference, (a, b, factor), (bottom[0].diff,))
            self.apply_top_gradient(top, bottom[0].diff)
        if propagate_down[1]:
            db = self._target_diffs.target(bottom[1].diff)
            self.backend.apply(scaled_difference, (a, b, -factor), (db,))
            self.apply_top_gradient(top, db)
            self._target_diffs.store(bottom[1].diff)


# -- losses of labels ----------------------------------------------------------------------------------

_Norm = caffe_pb2.HingeLossParameter


@expression
def hinge(x: Each, hot: Each, factor: Scalar) -> Each:
    return max(1 + x - 2 * x * hot, 0.0) * factor


@expression
def squared_hinge(x: Each, hot: Each, factor: Scalar) -> Each:
    margin = max(1 + x - 2 * x * hot, 0.0)
    return margin * margin * factor


@expression
def hinge_gradient(x: Each, hot: Each, factor: Scalar) -> Each:
    margin = max(1 + x - 2 * x * hot, 0.0)
    return (factor - 2 * factor * hot) if margin > 0 else 0.0


@expression
def squared_hinge_gradient(x: Each, hot: Each, factor: Scalar) -> Each:
    return 2 * max(1 + x - 2 * x * hot, 0.0) * (1 - 2 * hot) * factor


@expression
def negative_log(x: Each, hot: Each, factor: Scalar) -> Each:
    return -log(max(x, LOG_THRESHOLD)) * factor if hot > 0 else 0.0


@expression
def negative_log_gradient(x: Each, hot: Each, factor: Scalar) -> Each:
    return -factor / max(x, LOG_THRESHOLD) if hot > 0 else 0.0


class SampleLabelLoss(LossLayer):
    """loss = sum of formula(x, one-hot label) / N. Subclasses define `formulas`.

    Shapes: x (N, …), labels (N,), which index the elements of a sample.

    Raises:
        DataError: a label is outside the elements of a sample.
    """

    _shape: tuple[int, ...] | None = None

    def formulas(self) -> tuple[Expression, Expression]:
        """Return the formulas of the loss and of its gradient, with arguments (x, one-hot label, factor)."""
        raise NotImplementedError

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._labels = Labels(self)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        rows = (shape[0], math.prod(shape[1:]))
        self._labels.reshape(Blob(self.backend, rows, bottom[0].name), bottom[1], 1)
        if shape != self._shape:
            self._shape = shape
            self._x, self._dx = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        self._hot = self.scratch("one-hot", rows)

    def _factor(self) -> float:
        return 1 / max(self._hot.shape[0], 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        hot: Array = self._hot.array
        self.backend.one_hot(self._labels.load(), hot, self._labels.bad_index)
        self.backend.reduce(self.formulas()[0], (self._x.load(bottom[0].data), hot, self._factor()), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        inputs = (self._x.load(bottom[0].data), self._hot.array, self.weight() * self._factor())
        dx = self._dx.target(bottom[0].diff)
        self.backend.apply(self.formulas()[1], inputs, (dx,))
        self.apply_top_gradient(top, dx)
        self._dx.store(bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


@register_layer("HingeLoss")
class HingeLossLayer(SampleLabelLoss):
    """loss = sum of max(0, 1 - t x)^p / N, t = 1 for the label's element, else -1 (Caffe's `hinge_loss_layer.cpp`).

    p is 1 with `norm: L1` and 2 with `norm: L2`. Shapes: x (N, …), labels (N,).
    """

    def formulas(self) -> tuple[Expression, Expression]:
        if self.param.hinge_loss_param.norm == _Norm.L2:
            return squared_hinge, squared_hinge_gradient
        return hinge, hinge_gradient


@register_layer("MultinomialLogisticLoss")
class MultinomialLogisticLossLayer(SampleLabelLoss):
    """loss = sum of -log max(x[label], 1e-20) / N for probabilities x (Caffe's `multinomial_logistic_loss_layer.cpp`).

    Shapes: x (N, …), labels (N,).
    """

    def formulas(self) -> tuple[Expression, Expression]:
        return negative_log, negative_log_gradient


@expression
def valid_labels(label: Each, ignored: Scalar) -> tuple[Each, Each]:
    return (0.0 if label == ignored else label), (0.0 if label == ignored else 1.0)


@expression
def infogain(p: Each, gain: Each, valid: Channel) -> Each:
    return -gain * log(max(p, LOG_THRESHOLD)) * valid


@expression
def score_gradient(p: Each, gain: Each, total: Channel, valid: Channel, factor: Scalar, count: Scalar) -> Each:
    return (p * total - gain) * valid * factor / max(count, 1.0)


@expression
def probability_gradient(p: Each, gain: Each, valid: Channel, factor: Scalar, count: Scalar) -> Each:
    return -gain / max(p, LOG_THRESHOLD) * valid * factor / max(count, 1.0)


@register_layer("InfogainLoss")
class InfogainLossLayer(LossLayer):
    """loss = -sum over positions and classes k of H[label, k] * log max(p[k], 1e-20) / divisor.

    Shapes: x (N, …) with K classes along `infogain_loss_param.axis`, one label for each position, H of K * K elements.
    H is the third bottom, or a BlobProto in the file `source`. The divisor is the number of labels that are not ignored
    (VALID, the default), of all labels (FULL), of samples (BATCH_SIZE), or 1 (NONE). Both Caffes:
    `infogain_loss_layer.cpp`.

    In BVLC's dialect p = softmax(x), which is also the optional second top, and
    dx = (p * sum of H[label] - H[label]) / divisor. In NVIDIA's dialect x holds the probabilities,
    dx = -H[label] / x / divisor, and the default divisor is N.

    Raises:
        ConfigError: `normalize` is set, H is missing or not square, or there is a second top in NVIDIA's dialect.
        ShapeError: H does not have K * K elements.
        DataError: a label is outside the classes.
    """

    bottoms = (2, 3)
    tops = (1, 2)
    no_gradient_bottoms = frozenset({1, 2})
    no_gradient_tops = frozenset({1})

    _shape: tuple[int, ...] | None = None
    _matrix: Array | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if self.param.loss_param.HasField("normalize"):
            raise self.error("loss_param.normalize is not for this layer; use normalization")
        if self.context.nvidia and len(top) > 1:
            raise self.error("has no second top in NVIDIA's dialect, where its first bottom holds the probabilities")
        source = self.param.infogain_loss_param.source
        if len(bottom) < 3 and not source:
            raise self.error("needs the matrix: a third bottom, or a file named by infogain_loss_param.source")
        if len(bottom) < 3:
            values = read_blob(self.context.resolve(source), f"{self.where}: source")
            size = round(values.size**0.5)
            if size * size != values.size:
                raise self.error(f"the matrix in '{source}' has {values.size} elements, which make no square")
            self._matrix = self.backend.zeros((size, size))
            self.backend.from_host(values.reshape(size, size), self._matrix)
        self._labels = Labels(self)
        self._total, self._count = self.backend.zeros(()), self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        self._axis = bottom[0].axis(self.param.infogain_loss_param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._check_matrix(bottom)
        mode = _Parameter.BATCH_SIZE if self.context.nvidia else _Parameter.VALID
        self._divisor = self.divisor(mode, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            self._rows, self._gradients = (ClassRows(self.backend, shape, self._axis) for _ in range(2))
        size, classes = self._labels.size, self._labels.classes
        self._gains = self.scratch("gains", (size, classes))
        self._safe, self._valid, self._sums = (self.scratch(name, (size,)) for name in ("labels", "valid", "sums"))

    def _check_matrix(self, bottom: Blobs) -> None:
        classes = self._labels.classes
        count = bottom[2].count if len(bottom) > 2 else self._matrix.size if self._matrix is not None else 0
        if count != classes * classes:
            raise self.shape_error(f"the matrix has {count} elements instead of {classes} * {classes}", bottom[0])
        if len(bottom) > 2:
            self._square = LayoutAdapter(self.backend, bottom[2].shape, (classes, classes))

    def _probabilities(self, bottom: Blobs, top: Blobs) -> Array:
        """Return the probabilities as (positions, classes)."""
        if self.context.nvidia:
            return self._rows.load(bottom[0].data)
        probabilities = self.scratch("probabilities", bottom[0].shape).array
        self.backend.softmax_forward(bottom[0].data, probabilities, self._axis)
        if len(top) > 1:
            self.backend.copy(probabilities, top[1].data)
        return self._rows.load(probabilities)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, gains, valid = self.backend, self._gains.array, self._valid.array
        ignored = NO_IGNORED_LABEL if self.ignored is None else float(self.ignored)
        rows = self._probabilities(bottom, top)
        matrix = self._matrix if len(bottom) < 3 else self._square.load(bottom[2].data)
        backend.apply(valid_labels, (self._labels.load(), ignored), (self._safe.array, valid))
        backend.gather_rows(matrix, self._safe.array, gains, self._labels.bad_index)
        backend.reduce(infogain, (rows, gains, valid), (self._total,), 0)
        backend.reduce(identity, (valid,), (self._count,))
        self.write_loss(self._total, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        backend, gains, valid = self.backend, self._gains.array, self._valid.array
        count = self._count if self._divisor is None else 1.0
        source = bottom[0].data if self.context.nvidia else self.scratch("probabilities", bottom[0].shape).array
        rows, dx = self._rows.load(source), self._gradients.rows
        if self.context.nvidia:
            backend.apply(probability_gradient, (rows, gains, valid, self.scale(), count), (dx,), 0)
        else:
            backend.reduce(identity, (gains,), (self._sums.array,), 0)
            backend.apply(score_gradient, (rows, gains, self._sums.array, valid, self.scale(), count), (dx,), 0)
        self._gradients.store(bottom[0].diff)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


class ClassRows:
    """Presents arrays of `shape` as (positions, classes), with the positions in logical order.

    Args:
        backend: of the arrays.
        shape: of the arrays.
        axis: of the classes.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...], axis: int) -> None:
        self._backend = backend
        self._order = (*(a for a in range(len(shape)) if a != axis), axis)
        self._ordered = tuple(shape[a] for a in self._order)
        self.classes = shape[axis]
        self.positions = 1
        for size in self._ordered[:-1]:
            self.positions *= size

    @cached_property
    def rows(self) -> Array:
        """The buffer (positions, classes)."""
        return self._backend.zeros((self.positions, self.classes))

    def load(self, array: Array) -> Array:
        """Return an array as (positions, classes). A later `load` overwrites it."""
        self._backend.copy(array.transpose(*self._order), self.rows.reshape(self._ordered))
        return self.rows

    def store(self, array: Array) -> None:
        """Copy `rows` to an array of the original shape."""
        self._backend.copy(self.rows.reshape(self._ordered), array.transpose(*self._order))


# -- SigmoidCrossEntropyLoss ---------------------------------------------------------------------------


@expression
def cross_entropy(x: Each, target: Each, factor: Scalar) -> Each:
    return (max(x, 0.0) - x * target + log1p(exp(-fabs(x)))) * factor


@expression
def cross_entropy_ignoring(x: Each, target: Each, ignored: Scalar) -> tuple[Each, Each]:
    whole = floor(target) if target >= 0 else -floor(-target)
    counts = 0.0 if whole == ignored else 1.0
    return 0.0 if whole == ignored else max(x, 0.0) - x * target + log1p(exp(-fabs(x))), counts


@expression
def cross_entropy_gradient(x: Each, target: Each, scale: Scalar) -> Each:
    return (1 / (1 + exp(-x)) - target) * scale


@expression
def cross_entropy_gradient_ignoring(x: Each, target: Each, scale: Scalar, ignored: Scalar) -> Each:
    whole = floor(target) if target >= 0 else -floor(-target)
    return 0.0 if whole == ignored else (1 / (1 + exp(-x)) - target) * scale


@expression
def divided_by_channel_count(x: Each, count: Channel) -> Each:
    return x / max(count, 1.0)


@expression
def weighted_cross_entropy(x: Each, target: Each, weight: Each) -> tuple[Each, Each]:
    return weight * (max(x, 0.0) - x * target + log1p(exp(-fabs(x)))), weight


@expression
def weighted_cross_entropy_gradient(x: Each, target: Each, weight: Each, scale: Scalar) -> Each:
    return weight * (1 / (1 + exp(-x)) - target) * scale


@expression
def mean_of_weights(total: Each, weight: Each, devices: Scalar) -> Each:
    return total * devices / weight if weight > 0 else 0.0


@expression
def over_weight(x: Each, weight: Channel) -> Each:
    return x / weight if weight > 0 else 0.0


@register_layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLossLayer(ElementLossLayer):
    """loss = sum of -(t log p + (1 - t) log(1 - p)) / divisor, p = 1 / (1 + e^-x).

    x and the targets t are (N, …); t is in [0, 1]. Targets whose integer part equals `ignore_label` are ignored. The
    default divisor is N; `normalization` and `normalize` select another. dx = (p - t) * loss weight / divisor (Caffe's
    `sigmoid_cross_entropy_loss_layer.cpp`).

    An optional third bottom with x's count holds a weight of each element. The loss is then the weighted mean, 0 if the
    weights' sum is not above 0, and dx is weighted alike (MNC's `sigmoid_cross_entropy_loss_layer.cpp`).

    Raises:
        ConfigError: ignore_label or a divisor is given with three bottoms.
        ShapeError: the counts differ.
    """

    bottoms = (2, 3)
    exact_bottoms = frozenset({2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.loss_param
        if len(bottom) > 2 and any(param.HasField(name) for name in ("ignore_label", "normalization", "normalize")):
            raise self.error("with weights the sum is divided by their sum; remove ignore_label and normalization")
        self._sum, self._count = self.backend.zeros(()), self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._divisor = self.divisor(_Parameter.BATCH_SIZE, bottom[0].count, bottom[0].shape[0])
        if len(bottom) > 2:
            if bottom[2].count != bottom[0].count:
                raise self.shape_error("weights must have the first bottom's count", bottom[2], bottom[0])
            self._divisor = None
            self._weights = LayoutAdapter(self.backend, bottom[2].shape, bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, t = bottom[0].data, self._targets.load(bottom[1].data)
        if len(bottom) > 2:
            weights = self._weights.load(bottom[2].data)
            self.backend.reduce(weighted_cross_entropy, (x, t, weights), (self._sum, self._count))
            if self.communicates():
                assert self.context.all_reduce_sum is not None
                self.context.all_reduce_sum(self._count.reshape(1))
            inputs = (self._sum, self._count, float(self._label_devices))
            self.backend.apply(mean_of_weights, inputs, (top[0].data,))
            return
        if self.ignored is None:  # the divisor is known on the host
            assert self._divisor is not None
            self.backend.reduce(cross_entropy, (x, t, 1 / self._divisor), (top[0].data,))
            return
        self.backend.reduce(cross_entropy_ignoring, (x, t, float(self.ignored)), (self._sum, self._count))
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if any(propagate_down[2:]):
            self.backend.fill(bottom[2].diff, 0)
        if not propagate_down[0]:
            return
        x, t, dx = bottom[0].data, self._targets.target(bottom[1].data), bottom[0].diff
        scale = self.scale()
        if len(bottom) > 2:
            weights = self._weights.target(bottom[2].data)
            self.backend.apply(weighted_cross_entropy_gradient, (x, t, weights, scale), (dx,))
            self.backend.apply(over_weight, (dx, self._count), (dx,), 0)
            self.apply_top_gradient(top, dx)
            return
        if self.ignored is None:
            self.backend.apply(cross_entropy_gradient, (x, t, scale), (dx,))
        else:
            self.backend.apply(cross_entropy_gradient_ignoring, (x, t, scale, float(self.ignored)), (dx,))
        if self._divisor is None:
            self.backend.apply(divided_by_channel_count, (dx, self._count), (dx,), 0)
        self.apply_top_gradient(top, dx)


# -- losses by pixel, L1Loss and SmoothL1Loss ----------------------------------------------------------


@expression
def counted(d: Each, factor: Scalar) -> Each:
    return factor if d == d else 0.0


@expression
def term(d: Each, weight: Scalar, power: Scalar, shift: Scalar, plateau: Scalar) -> Any:
    size = fabs(d) if d == d else 0.0
    return weight * ((0.0 if size < plateau else size) + shift) ** power


@expression
def value(total: Each, power: Scalar, shift: Scalar, plateau: Scalar) -> Any:
    return ((0.0 if total < plateau else total) + shift) ** power


@expression
def value_slope(total: Each, factor: Scalar, power: Scalar, shift: Scalar, plateau: Scalar) -> Each:
    return 0.0 if total < plateau else factor * power * (total + shift) ** (power - 1)


@expression
def term_slope(d: Each, slope: Channel, weight: Scalar, power: Scalar, shift: Scalar, plateau: Scalar) -> Each:
    size = fabs(d) if d == d else 0.0
    steep = 0.0 if size == 0 or size < plateau else slope * weight * power * (size + shift) ** (power - 1)
    return steep if d > 0 else -steep


@expression
def divided(dx: Each, count: Scalar) -> Each:
    return dx / max(count, 1.0)


@dataclass(frozen=True)
class Formula:
    """The settings of loss = sum over pixels of (s + q_shift)^q, s = weight * sum over channels of (|d| + p_shift)^p.

    Args:
        p, p_shift: see above.
        q, q_shift: see above.
        mean: whether the weight is 1 / channels, else 1.
        plateau: |d| below it counts 0.
        sum_plateau: s below it counts 0.
    """

    p: float
    p_shift: float
    q: float
    q_shift: float
    mean: bool = False
    plateau: float = 0.0
    sum_plateau: float = 0.0


class PixelLoss:
    """A loss over the pixels of d = a - b, or of d = a with one bottom, each (N, C, H, W). NaN in d counts 0.

    Args:
        layer: the loss layer, which calls the methods of the same names.
        counts_pixels: whether the sum is divided by the number of pixels that are not NaN, else by N.
    """

    def __init__(self, layer: LossLayer, counts_pixels: bool) -> None:
        self._layer = layer
        self._counts_pixels = counts_pixels
        self.divisor: float | None = None
        """The divisor of the sum, None if it is counted on the device. Valid after `reshape`."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Set the top's shape.

        Raises:
            ShapeError: the bottoms do not have the same four axes.
        """
        layer, shape = self._layer, bottom[0].shape
        if len(shape) != 4 or min(shape) < 1 or any(blob.shape != shape for blob in bottom):
            raise layer.shape_error("the bottoms must have the same four axes, (N, C, H, W)", *bottom)
        top[0].reshape(())
        self.divisor = None if self._counts_pixels else float(shape[0])
        pixels = shape[0] * shape[2] * shape[3]
        self._difference = layer.scratch("pixel difference", shape)
        self._sums, self._values = (layer.scratch(name, (pixels,)) for name in ("sums", "values"))
        self._total, self._count = (layer.scratch(name, ()) for name in ("total", "count"))

    def forward(self, f: Formula, bottom: Blobs, top: Blobs) -> None:
        """Compute the loss."""
        backend, d = self._layer.backend, self._difference.array
        channels = bottom[0].shape[1]
        if len(bottom) > 1:
            backend.apply(difference, (bottom[0].data, bottom[1].data), (d,))
        else:
            backend.copy(bottom[0].data, d)
        weight = 1 / channels if f.mean else 1.0
        sums, values = self._sums.array, self._values.array
        backend.reduce(term, (flatten_pixels(backend, d), weight, f.p, f.p_shift, f.plateau), (sums,), 0)
        backend.apply(value, (sums, f.q, f.q_shift, f.sum_plateau), (values,))
        backend.reduce(identity, (values,), (self._total.array,))
        if self.divisor is None:
            backend.reduce(counted, (d, 1 / channels), (self._count.array,))
        self._layer.write_loss(self._total.array, self._count.array, self.divisor, top[0].data)

    def backward(self, f: Formula, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Compute the gradients."""
        if not any(propagate_down):
            return
        first = propagate_down.index(True)
        layer, backend, dx = self._layer, self._layer.backend, bottom[first].diff
        weight = 1 / bottom[0].shape[1] if f.mean else 1.0
        slopes, sign = self._values.array, 1.0 if first == 0 else -1.0
        backend.apply(value_slope, (self._sums.array, sign * layer.scale(), f.q, f.q_shift, f.sum_plateau), (slopes,))
        d = flatten_pixels(backend, self._difference.array)
        backend.apply(term_slope, (d, slopes, weight, f.p, f.p_shift, f.plateau), (flatten_pixels(backend, dx),), 0)
        if self.divisor is None:
            backend.apply(divided, (dx, self._count.array), (dx,))
        layer.apply_top_gradient(top, dx)
        if len(propagate_down) > 1 and all(propagate_down):
            backend.apply(negated, (dx,), (bottom[1].diff,))


@expression
def direction(d: Each, factor: Scalar) -> Each:
    return factor if d > 0 else (-factor if d < 0 else 0.0)


@expression
def smooth(d: Each, factor: Scalar, sharpness: Scalar) -> Each:
    size = fabs(d)
    return factor * (0.5 * sharpness * d * d if size * sharpness < 1 else size - 0.5 / sharpness)


@expression
def weighted_smooth(d: Each, weight: Each, factor: Scalar, sharpness: Scalar) -> Each:
    size = fabs(d)
    return weight * factor * (0.5 * sharpness * d * d if size * sharpness < 1 else size - 0.5 / sharpness)


@expression
def smooth_slope(d: Each, factor: Scalar, sharpness: Scalar) -> Each:
    slope = sharpness * d if fabs(d) * sharpness < 1 else (1.0 if d > 0 else -1.0)
    return slope * factor


@register_layer("L1Loss")
class L1LossLayer(ElementLossLayer):
    """loss = sum of |a - b| / N. da = sign(a - b) / N, db = -da (NVIDIA's `l1_loss_layer.cpp`). Shapes: (N, …).

    With `l1_loss_param`, or with one bottom, which is then the difference d, it is the loss of FlowNet 2's
    `l1loss_layer.cu` over (N, C, H, W). NaN in d = a - b counts 0 and has no gradient. With `l2_per_location` the loss
    is the sum over pixels of (sum over channels of d^2 + `epsilon`)^`power` / N. `l2_prescale_by_channels` makes a mean
    of the sum over channels. Differences, or with l2_per_location lengths, below `plateau` count 0.
    `normalize_by_num_entries` divides by the number of pixels that are not NaN instead of N.

    Raises:
        ShapeError: the bottoms' shapes do not fit.
    """

    bottoms = (1, 2)
    no_gradient_bottoms = frozenset()

    _pixels: PixelLoss | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.HasField("l1_loss_param") or len(bottom) == 1:
            self._pixels = PixelLoss(self, self.param.l1_loss_param.normalize_by_num_entries)

    def _formula(self) -> Formula:
        param = self.param.l1_loss_param
        if not param.l2_per_location:
            return Formula(1, 0, 1, 0, plateau=param.plateau)
        plateau, mean = param.plateau * param.plateau, param.l2_prescale_by_channels
        return Formula(2, 0, param.power, param.epsilon, mean, sum_plateau=plateau)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self._pixels is not None:
            self._pixels.reshape(bottom, top)
            self._divisor = self._pixels.divisor
            return
        super().reshape(bottom, top)
        self._difference = self.scratch("difference", bottom[0].shape)

    def _factor(self) -> float:
        return 1 / max(self._difference.shape[0], 1)

    def _subtract(self, bottom: Blobs) -> Array:
        d = self._difference.array
        self.backend.apply(difference, (bottom[0].data, self._targets.load(bottom[1].data)), (d,))
        return d

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._pixels is not None:
            self._pixels.forward(self._formula(), bottom, top)
            return
        self.backend.reduce(scaled_magnitude, (self._subtract(bottom), self._factor()), (top[0].data,))

    def slope(self, dx: Array, factor: float) -> None:
        """dx = factor * derivative of the loss by a."""
        self.backend.apply(direction, (self._difference.array, factor), (dx,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if self._pixels is not None:
            self._pixels.backward(self._formula(), top, propagate_down, bottom)
            return
        factor = self.weight() * self._factor()
        if propagate_down[0]:
            self.slope(bottom[0].diff, factor)
            self.apply_top_gradient(top, bottom[0].diff)
        if propagate_down[1]:
            db = self._target_diffs.target(bottom[1].diff)
            self.slope(db, -factor)
            self.apply_top_gradient(top, db)
            self._target_diffs.store(bottom[1].diff)


@register_layer("SmoothL1Loss")
class SmoothL1LossLayer(L1LossLayer):
    """loss = sum of v f(w (a - b)) / N, where f(d) = sigma^2 d^2 / 2 if |d| < 1 / sigma^2, else |d| - 1 / (2 sigma^2).

    a and b are (N, …). The optional third bottom is w, the optional fourth v; they have a's count, default to 1, and
    get a gradient of 0. `sigma` is a field of `smooth_l1_loss_param` (Girshick 2015; NVIDIA's
    `smooth_L1_loss_layer.cpp` has two bottoms and sigma 1).

    Raises:
        ConfigError: sigma is not above 0.
        ShapeError: the counts differ.

    R-FCN's fork of `smooth_L1_loss_layer.cpp` is decided by what the prototxt gives: with `loss_param.normalization`
    PRE_FIXED the sum is divided by `pre_fixed_normalizer`, at least 1, in place of N. An optional second top
    (N, 1, H, W) holds the loss of each position, summed over the channels and not divided.
    """

    bottoms = (2, 4)
    tops = (1, 2)
    exact_bottoms = frozenset({2, 3})
    no_gradient_tops = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        sigma = self.param.smooth_l1_loss_param.sigma
        if sigma <= 0:
            raise self.error(f"smooth_l1_loss_param.sigma is {sigma:g}; it must be above 0")
        self._sharpness = sigma * sigma

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        for blob in bottom[2:]:
            if blob.count != bottom[0].count:
                raise self.shape_error("weights must have the first bottom's count", blob, bottom[0])
        self._weights = [LayoutAdapter(self.backend, blob.shape, bottom[0].shape) for blob in bottom[2:]]
        self._set_divisor(bottom)
        if len(top) > 1:
            shape = bottom[0].shape + (1,) * (4 - len(bottom[0].shape))
            if len(shape) != 4:
                raise self.shape_error("the second top needs a first bottom of at most four axes", bottom[0])
            top[1].reshape((shape[0], 1, *shape[2:]))
            self._planes = LayoutAdapter(self.backend, bottom[0].shape, (shape[0], shape[1], math.prod(shape[2:])))
            self._each = LayoutAdapter(self.backend, top[1].shape, (shape[0], 1, math.prod(shape[2:])))
            self._ones = self.scratch("ones", (1, shape[1]))

    def _set_divisor(self, bottom: Blobs) -> None:
        """Set the divisor of the sum for the current shapes."""
        batch = bottom[0].shape[0]
        if self.param.loss_param.normalization == _Parameter.PRE_FIXED:
            self._divisor = self.divisor(_Parameter.BATCH_SIZE, batch, batch)
        else:
            self._divisor = float(max(batch, 1))

    def _factor(self) -> float:
        assert self._divisor is not None
        return 1 / self._divisor

    def _write_each(self, d: Array, weight: Array | None, losses: Array) -> None:
        """Write the loss of each position."""
        terms = self.scratch("terms", tuple(d.shape)).array
        if weight is None:
            self.backend.apply(smooth, (d, 1.0, self._sharpness), (terms,))
        else:
            self.backend.apply(weighted_smooth, (d, weight, 1.0, self._sharpness), (terms,))
        planes, each = self._planes.load(terms), self._each.target(losses)
        self.backend.fill(self._ones.array, 1)
        if planes.shape[2] == 1:
            rows = self.backend.reshaped(planes, planes.shape[:2])
            self.backend.reduce(identity, (rows,), (self.backend.flat(each),), 0)
        else:
            for plane, row in zip(planes, each, strict=True):
                self.backend.gemm(self._ones.array, plane, row)
        self._each.store(losses)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        weights = [adapter.load(blob.data) for adapter, blob in zip(self._weights, bottom[2:], strict=True)]
        d = self._subtract(bottom)
        if weights:
            self.backend.apply(product, (weights[0], d), (d,))
        if len(weights) > 1:
            inputs = (d, weights[1], self._factor(), self._sharpness)
            self.backend.reduce(weighted_smooth, inputs, (top[0].data,))
        else:
            self.backend.reduce(smooth, (d, self._factor(), self._sharpness), (top[0].data,))
        if len(top) > 1:
            self._write_each(d, weights[1] if len(weights) > 1 else None, top[1].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._loaded_weights = [
            adapter.load(blob.data) for adapter, blob in zip(self._weights, bottom[2:], strict=True)
        ]
        super().backward(top, propagate_down, bottom)
        for blob, wanted in zip(bottom[2:], propagate_down[2:], strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)

    def slope(self, dx: Array, factor: float) -> None:
        self.backend.apply(smooth_slope, (self._difference.array, factor, self._sharpness), (dx,))
        for weight in self._loaded_weights:
            self.backend.apply(product, (dx, weight), (dx,))


# -- Softmax and SoftmaxWithLoss -----------------------------------------------------------------------


@register_layer("Softmax")
class SoftmaxLayer(Layer):
    """y = exp(x - max x) / sum of exp(x - max x) along `axis` (Caffe's `softmax_layer.cpp`)."""

    recordable = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.softmax_forward(bottom[0].data, top[0].data, self._axis)
        self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.softmax_backward(self.saved_top(top), top[0].diff, bottom[0].diff, self._axis)


LEAST_PROBABILITY = 1.1754943508222875e-38
"""FLT_MIN."""


@expression
def weighted_loss(p: Each, target: Each, weight: Channel) -> Each:
    return -target * log(max(p, LEAST_PROBABILITY)) * weight


@expression
def label_term(probability: Each, slope: Each) -> Each:
    """-log(probability) of the label, 0 of other classes and ignored labels: only the label's slope is below 0."""
    return -log(max(probability, LEAST_PROBABILITY)) if slope < 0 else 0.0


@register_layer("SoftmaxWithLoss")
class SoftmaxWithLossLayer(LossLayer):
    """loss = sum of -log softmax(x)[label] / divisor (Caffe's `softmax_loss_layer.cpp`).

    Shapes: x (N, C, ...) with classes along `softmax_param.axis`, one label for each position. The divisor is the
    number of labels that are not ignored (VALID, the default), of all labels (FULL), of samples (BATCH_SIZE), 1 (NONE)
    or `pre_fixed_normalizer`, at least 1 (PRE_FIXED). An optional second top holds softmax(x). dx = (softmax(x) -
    onehot(label)) * loss weight / divisor. With `label_smoothing` s the target of loss and gradient is
    (1 - s) onehot(label) + s / C (Szegedy et al. 2015).

    An optional third top has the labels' shape and holds -log softmax(x)[label] of each position, 0 where the label is
    ignored (R-FCN's `softmax_loss_layer.cpp`). BoxAnnotatorOHEM reads it.

    With SegNet's and ENet's `weight_by_label_freqs` each position's loss and gradient are multiplied by
    class_weighting[label]; the divisor stays (`softmax_loss_layer.cpp` of caffe-segnet).

    Raises:
        ConfigError: label_smoothing is outside [0, 1], or is given with weight_by_label_freqs; either is given with
            three tops; or softmax_param has a normalize_type other than "Softmax".
        ShapeError: the number of labels is not the number of positions, or class_weighting does not have one weight
            for each class.
        DataError: a label is outside the classes.
    """

    tops = (1, 3)
    no_gradient_tops = frozenset({1, 2})
    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._smoothing = self.param.loss_param.label_smoothing
        if not 0 <= self._smoothing <= 1:
            raise self.error(f"loss_param's label_smoothing is {self._smoothing:g}; it must be from 0 to 1")
        kind = self.param.softmax_param.normalize_type
        if kind != "Softmax":
            raise self.error(f"softmax_param's normalize_type is '{kind}'; caffepy has Softmax only")
        param = self.param.loss_param
        if len(top) > 2 and (self._smoothing or param.weight_by_label_freqs):
            name = "label_smoothing" if self._smoothing else "weight_by_label_freqs"
            raise self.error(f"the third top has no definition with {name}; remove one of them")
        self._weighting: Array | None = None
        if param.weight_by_label_freqs:
            if self._smoothing:
                raise self.error("loss_param has both label_smoothing and weight_by_label_freqs; keep one of them")
            self._weighting = self.backend.zeros((len(param.class_weighting), 1))
            self.backend.from_host(np.array(param.class_weighting, np.float32)[:, None], self._weighting)
        self._labels = Labels(self)
        self._totals = self.backend.zeros((2,))
        self._sum, self._count = (self.backend.view(self._totals[i : i + 1], ()) for i in range(2))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._divisor = self.divisor(_Parameter.VALID, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(bottom[0].shape)
        if len(top) > 2:
            top[2].reshape(bottom[1].shape)
            classes, inner = self._labels.classes, math.prod(bottom[0].shape[self._axis + 1 :])
            self._planes = LayoutAdapter(self.backend, bottom[0].shape, (self._labels.outer, classes, inner))
            self._each = LayoutAdapter(self.backend, bottom[1].shape, (self._labels.size,))
            self._ones = self.scratch("ones", (1, classes))
        if self._weighting is not None:
            self._reshape_weights(bottom[0].shape, self._weighting.shape[0])

    def _reshape_weights(self, shape: tuple[int, ...], weights: int) -> None:
        if weights != self._labels.classes:
            raise self.shape_error(f"class_weighting has {weights} weights for {self._labels.classes} classes")
        if shape != self._shape:
            self._shape = shape
            self._rows = ClassRows(self.backend, shape, self._axis)
        self._weights, self._valid, self._safe = (
            self.scratch(name, (self._labels.size,)) for name in ("weights", "valid", "labels")
        )
        self._one_hot = self.scratch("one hot", (self._labels.size, weights))

    def _probabilities(self, bottom: Blobs, top: Blobs) -> Array:
        """Return the array for the probabilities, which `backward` reads."""
        if len(top) > 1 and not self.tops_overwritten:
            return top[1].data
        return self.scratch("probabilities", bottom[0].shape).array

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        probabilities = self._probabilities(bottom, top)
        self.backend.softmax_loss_forward(
            bottom[0].data,
            self._labels.load(),
            probabilities,
            self._totals,
            self._labels.bad_index,
            self._axis,
            self.ignored,
        )
        if self._smoothing:
            labels = self._labels.loaded()
            self.backend.smooth_loss_forward(
                probabilities, labels, self._totals, self._axis, self.ignored, self._smoothing
            )
        if self._weighting is not None:
            self._weight_loss(probabilities, self._weighting)
        if len(top) > 1 and self.tops_overwritten:
            self.backend.copy(probabilities, top[1].data)
        if len(top) > 2:
            self._write_each(probabilities, top[2].data)
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def _write_each(self, probabilities: Array, losses: Array) -> None:
        """Write the loss of each position."""
        terms = self.scratch("terms", tuple(probabilities.shape)).array
        labels = self._labels.loaded()
        self.backend.softmax_loss_backward(probabilities, labels, terms, None, self._axis, self.ignored, 1.0)
        self.backend.apply(label_term, (probabilities, terms), (terms,))
        planes, each = self._planes.load(terms), self._each.target(losses)
        outer, classes, inner = planes.shape
        if inner == 1:
            self.backend.reduce(identity, (self.backend.reshaped(planes, (outer, classes)),), (each,), 0)
        else:
            self.backend.fill(self._ones.array, 1)
            for plane, row in zip(planes, each.reshape(outer, 1, inner), strict=True):
                self.backend.gemm(self._ones.array, plane, row)
        self._each.store(losses)

    def _weight_loss(self, probabilities: Array, weighting: Array) -> None:
        """Compute each position's weight, and the weighted sum of losses."""
        backend, weights, safe = self.backend, self._weights.array, self._safe.array
        ignored = NO_IGNORED_LABEL if self.ignored is None else float(self.ignored)
        backend.apply(valid_labels, (self._labels.loaded(), ignored), (safe, self._valid.array))
        backend.gather_rows(weighting, safe, weights.reshape(-1, 1), self._labels.bad_index)
        backend.apply(product, (weights, self._valid.array), (weights,))
        backend.one_hot(safe, self._one_hot.array, self._labels.bad_index)
        inputs = (self._rows.load(probabilities), self._one_hot.array, weights)
        backend.reduce(weighted_loss, inputs, (self._sum,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        totals = self._totals if self._divisor is None else None
        labels, scale = self._labels.loaded(), self.scale()
        self.backend.softmax_loss_backward(
            self._probabilities(bottom, top), labels, bottom[0].diff, totals, self._axis, self.ignored, scale
        )
        if self._smoothing:
            smoothed = scale * self._smoothing
            self.backend.smooth_loss_backward(labels, bottom[0].diff, totals, self._axis, self.ignored, smoothed)
        if self._weighting is not None:
            rows = self._rows.load(bottom[0].diff)
            self.backend.apply(product_with_channel, (rows, self._weights.array), (rows,), 0)
            self._rows.store(bottom[0].diff)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()
