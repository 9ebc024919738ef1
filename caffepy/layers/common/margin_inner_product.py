"""MarginInnerProduct and LargeMarginInnerProduct: fully connected layers with an angular margin for the label."""

from __future__ import annotations

import math
from math import fabs, sqrt
from typing import ClassVar

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, LayerContext, register_layer
from caffepy.layers.core.formulas import identity, product, product_with_channel
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.core.pass_number import PassNumber
from caffepy.layers.core.unit_weights import UnitWeights
from caffepy.proto import caffe_pb2

LEAST_LENGTH = 1e-9
"""Added to lengths of LargeMarginInnerProduct before a division, as in its fork."""


@expression
def annealed(number: Each, start: Scalar, base: Scalar, gamma: Scalar, power: Scalar, least: Scalar) -> Each:
    share = base * (1 + gamma * (start + number + 1)) ** -power
    return share if share > least else least


@expression
def squared(x: Each) -> Each:
    return x * x


@expression
def root(x: Each) -> Each:
    return sqrt(x)


@expression
def angular(dot: Each, lengths: Each, times: Scalar) -> tuple[Each, Each, Each]:
    cosine = dot / lengths if lengths > 0 else 0.0
    square = cosine * cosine
    sign = 1.0 if cosine > 0 else (-1.0 if cosine < 0 else 0.0)
    half = 1.0 if fabs(cosine) > 0.5 else (-1.0 if fabs(cosine) < 0.5 else 0.0)
    quarter = sign * (1.0 if square > 0.5 else (-1.0 if square < 0.5 else 0.0))
    double = 2 * sign * square - 1
    triple = half * (4 * square - 3) * cosine + sign * (1 + half) - 2
    quadruple = quarter * (8 * square * square - 8 * square + 1) + 2 * sign + quarter - 3
    value = double if times == 2 else (triple if times == 3 else quadruple)
    slope_of_more = half * (12 * square - 3) if times == 3 else quarter * (32 * square - 16) * cosine
    slope = 4 * sign * cosine if times == 2 else slope_of_more
    return value, slope, value - cosine * slope


@expression
def blended(dot: Each, lengths: Each, value: Each, share: Scalar) -> Each:
    return (lengths * value + share * dot) / (1 + share)


@expression
def product_and_least(x: Each, y: Each, least: Scalar) -> Each:
    return x * y + least


@expression
def with_target(y: Each, hot: Each, target: Channel) -> Each:
    return target if hot > 0 else y


@expression
def with_factor(dy: Each, hot: Each, factor: Channel) -> Each:
    return dy * factor if hot > 0 else dy


@expression
def unit_factors(slope: Each, rest: Each, length: Each, share: Scalar) -> tuple[Each, Each]:
    along = rest / length if length > 0 else 0.0
    size = sqrt(slope * slope + along * along)
    inverse = 1 / size if size > 0 else 0.0
    return (slope * inverse + share) / (1 + share), along * inverse / (1 + share)


@expression
def exact_factors(
    slope: Each, rest: Each, length: Each, weight: Each, share: Scalar, least: Scalar
) -> tuple[Each, Each, Each]:
    from_x = rest * (weight + least) / length if length > 0 else 0.0
    from_weight = rest * length / (weight + least)
    return (slope + share) / (1 + share), from_x / (1 + share), from_weight / (1 + share)


@expression
def plus_rows(total: Each, x: Each, dy: Channel, factor: Channel) -> Each:
    return total + x * dy * factor


@expression
def plus_scaled_rows(total: Each, x: Each, factor: Channel) -> Each:
    return total + x * factor


class AngularMarginLayer(Layer):
    """The parts that both layers share: parameters, lambda, the label's score and the weights' product."""

    bottoms = (2, 2)
    tops = (1, 2)
    no_gradient_bottoms = frozenset({1})
    no_gradient_tops = frozenset({1})

    field: ClassVar[str]
    """The field of the layer's message."""
    _shape: tuple[int, ...] | None = None

    @property
    def settings(self) -> caffe_pb2.MarginInnerProductParameter | caffe_pb2.LargeMarginInnerProductParameter:
        """The layer's message."""
        return getattr(self.param, self.field)  # type: ignore[no-any-return]

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.settings
        if param.num_output < 1:
            raise self.error("needs num_output, the number of classes")
        axis = bottom[0].axis(param.axis, self.where)
        self._inputs = math.prod(bottom[0].shape[axis:])
        self._times = float(param.type + 1)
        self.add_parameter((param.num_output, self._inputs), param.weight_filler)
        self._number = PassNumber(self)
        self._share = self.backend.zeros(())
        last = param.num_output - 1
        self._check = IndexCheck(
            self, f"label {{}} of '{bottom[1].title}' is outside 0 to {last}; correct the data, or enlarge num_output"
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, classes = bottom[0].shape, self.settings.num_output
        axis = bottom[0].axis(self.settings.axis, self.where)
        rows = math.prod(shape[:axis])
        if math.prod(shape[axis:]) != self._inputs:
            raise self.shape_error(f"the axes from {axis} on must have {self._inputs} elements", bottom[0])
        if bottom[1].count != rows:
            raise self.shape_error(f"needs one label for each of {rows} samples", bottom[0], bottom[1])
        top[0].reshape((*shape[:axis], classes))
        if len(top) > 1:
            top[1].reshape((1,))
        if shape != self._shape:
            self._shape = shape
            self._x, self._dx = (LayoutAdapter(self.backend, shape, (rows, self._inputs)) for _ in range(2))
            self._y, self._dy = (LayoutAdapter(self.backend, top[0].shape, (rows, classes)) for _ in range(2))
        self._labels = LayoutAdapter(self.backend, bottom[1].shape, (rows,))
        self._hot, self._scaled = (self.scratch(name, (rows, classes)) for name in ("one hot", "scaled"))
        names = (
            "dot",
            "length",
            "lengths",
            "value",
            "slope",
            "rest",
            "target",
            "dy",
            "factor",
            "along",
            "label weight",
        )
        self._rows = {name: self.scratch(name, (rows,)) for name in names}

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST where lambda follows the number of passes, which is another on each device."""
        given = getattr(param, cls.field)
        read = given.type != 0 or len(param.top) > 1
        return context.phase == caffe_pb2.TEST and given.gamma != 0 and read

    def row(self, name: str) -> Array:
        """Return a buffer with one number for each sample."""
        return self._rows[name].array

    def used_weights(self) -> Array:
        """Return the weights of the last forward pass."""
        return self.weights()

    def load_weights(self) -> Array:
        """Prepare and return the weights of this pass."""
        return self.weights()

    def compute_lengths(self, labels: Array) -> None:
        """Set the row buffer `lengths`: the length of x times that of the label's weights."""
        raise NotImplementedError

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, param = self.backend, self.settings
        settings = (float(param.iteration), param.base, param.gamma, param.power, param.lambda_min)
        backend.apply(annealed, (self._number.load(), *settings), (self._share,))
        if len(top) > 1:
            backend.copy(self._share.reshape(1), top[1].data)
        x, y = self._x.load(bottom[0].data), self._y.target(top[0].data)
        backend.gemm(x, self.load_weights(), y, transpose_b=True)
        if self._times > 1:
            labels = self._labels.load(bottom[1].data)
            self._add_margin(x, labels, y)
        self._y.store(top[0].data)

    def _add_margin(self, x: Array, labels: Array, y: Array) -> None:
        backend, hot, row = self.backend, self._hot.array, self.row
        backend.one_hot(labels, hot, self._check.bad_index)
        backend.reduce(product, (y, hot), (row("dot"),), 0)
        backend.reduce(squared, (x,), (row("length"),), 0)
        backend.apply(root, (row("length"),), (row("length"),))
        self.compute_lengths(labels)
        angles = (row("value"), row("slope"), row("rest"))
        backend.apply(angular, (row("dot"), row("lengths"), self._times), angles)
        backend.apply(blended, (row("dot"), row("lengths"), row("value"), self._share), (row("target"),))
        backend.apply(with_target, (y, hot, row("target")), (y,), 0)

    def scaled_gradient(self, dy: Array) -> Array:
        """Return dy with the labels' entries multiplied by the row buffer `factor`; `dy` receives these entries."""
        backend, hot, row = self.backend, self._hot.array, self.row
        backend.reduce(product, (dy, hot), (row("dy"),), 0)
        backend.apply(with_factor, (dy, hot, row("factor")), (self._scaled.array,), 0)
        return self._scaled.array

    def propagate_to_weights(self, dy: Array, bottom: Blob) -> None:
        """Add dy^T x to the gradient of the weights."""
        x = self._x.target(bottom.data)
        self.backend.gemm(dy, x, self.blobs[0].diff, transpose_a=True, accumulate=self.accumulate(0))

    def propagate_to_bottom(self, dy: Array, bottom: Blob) -> None:
        """Compute the bottom's gradient from dy and, with a margin, the row buffers `dy` and `along`."""
        dx = self._dx.target(bottom.diff)
        self.backend.gemm(dy, self.used_weights(), dx)
        if self._times > 1:
            inputs = (dx, self._x.target(bottom.data), self.row("dy"), self.row("along"))
            self.backend.apply(plus_rows, inputs, (dx,), 0)
        self._dx.store(bottom.diff)

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


@register_layer("MarginInnerProduct")
class MarginInnerProductLayer(AngularMarginLayer):
    """A-Softmax: y_j = |x| cos(t_j), and for the label (|x| psi(t) + lambda |x| cos(t)) / (1 + lambda).

    t_j is the angle between x and the weights of class j, which are divided by their length before use; in TRAIN the
    parameter keeps the quotient. psi(t) = (-1)^k cos(m t) - 2 k for t from k pi / m to (k + 1) pi / m, with m = 1 to 4
    by `type`. lambda = max(base * (1 + gamma * n)^-power, lambda_min) in pass n, counted from `iteration` + 1.

    Shapes: x (d0, ..., d_axis-1, ...), one label for each sample, weights (num_output, K), y (d0, ..., num_output). A
    second top (1,) holds lambda. With `type: SINGLE` there is no margin.

    As in the fork, the gradients are not the derivatives. That of the weights is dy^T x. In that of x the label's part
    psi'(t) w + a x, with a = (psi - cos(t) psi') / |x|, is divided by sqrt(psi'^2 + a^2)
    (`margin_inner_product_layer.cpp` of SphereFace; Liu, Wen, Yu, Li, Raj and Song 2017).

    Raises:
        ConfigError: num_output is missing.
        ShapeError: the samples have another size than the weights, or there is not one label for each.
        DataError: a label is outside the classes.
    """

    field = "margin_inner_product_param"

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._unit_weights = UnitWeights(self)

    def load_weights(self) -> Array:
        return self._unit_weights.load()

    def used_weights(self) -> Array:
        return self._unit_weights.loaded()

    def compute_lengths(self, labels: Array) -> None:
        self.backend.copy(self.row("length"), self.row("lengths"))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = self._dy.load(top[0].diff)
        if self.propagate_to_params[0]:
            self.propagate_to_weights(dy, bottom[0])
        if not propagate_down[0]:
            return
        if self._times > 1:
            inputs = (self.row("slope"), self.row("rest"), self.row("length"), self._share)
            self.backend.apply(unit_factors, inputs, (self.row("factor"), self.row("along")))
            dy = self.scaled_gradient(dy)
        self.propagate_to_bottom(dy, bottom[0])


@register_layer("LargeMarginInnerProduct")
class LargeMarginInnerProductLayer(AngularMarginLayer):
    """L-Softmax: y_j = |w_j| |x| cos(t_j), and for the label |w| |x| (psi(t) + lambda cos(t)) / (1 + lambda).

    psi, lambda, shapes and the second top are those of MarginInnerProduct; the weights keep their length. The gradients
    are the derivatives (`largemargin_inner_product_layer.cpp` of L-Softmax; Liu, Wen, Yu and Yang 2016).

    Raises:
        ConfigError: num_output is missing.
        ShapeError: the samples have another size than the weights, or there is not one label for each.
        DataError: a label is outside the classes.
    """

    field = "largemargin_inner_product_param"

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._weight_lengths, self._weight_factors = (
            self.scratch(name, (self.settings.num_output,)) for name in ("weight lengths", "weight factors")
        )
        self._spread = self.scratch("spread", self._hot.shape)

    def compute_lengths(self, labels: Array) -> None:
        backend, lengths, label = self.backend, self._weight_lengths.array, self.row("label weight")
        backend.reduce(squared, (self.weights(),), (lengths,), 0)
        backend.apply(root, (lengths,), (lengths,))
        backend.gather_rows(lengths.reshape(-1, 1), labels, label.reshape(-1, 1), self._check.bad_index)
        backend.apply(product_and_least, (self.row("length"), label, LEAST_LENGTH), (self.row("lengths"),))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = self._dy.load(top[0].diff)
        if self._times > 1:
            names = ("slope", "rest", "length", "label weight")
            inputs = (*(self.row(name) for name in names), self._share, LEAST_LENGTH)
            outputs = (self.row("factor"), self.row("along"), self.row("target"))
            self.backend.apply(exact_factors, inputs, outputs)
            dy = self.scaled_gradient(dy)
        if self.propagate_to_params[0]:
            self.propagate_to_weights(dy, bottom[0])
            if self._times > 1:
                self._add_weights_part()
        if propagate_down[0]:
            self.propagate_to_bottom(dy, bottom[0])

    def _add_weights_part(self) -> None:
        """Add the gradient of the label's part by the length of its weights, which is along the weights."""
        backend, factors, diff = self.backend, self._weight_factors.array, self.blobs[0].diff
        backend.apply(product, (self.row("target"), self.row("dy")), (self.row("value"),))
        backend.apply(product_with_channel, (self._hot.array, self.row("value")), (self._spread.array,), 0)
        backend.reduce(identity, (self._spread.array,), (factors,), 1)
        backend.apply(plus_scaled_rows, (diff, self.weights(), factors), (diff,), 0)
