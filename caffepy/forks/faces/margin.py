"""Layers with margins for faces: fully connected layers, and margins on the label's score before a softmax loss.

The fully connected layers are MarginInnerProduct, LargeMarginInnerProduct and InnerDistance. LabelSpecificAdd,
LabelSpecificRescale and GlobalLSEMargin change the label's score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from math import exp, fabs, log, sqrt
from typing import ClassVar

import numpy as np

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.backend.formulas import difference, identity, product, product_with_channel, root, scaled, squared
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.inner_product import UnitWeights
from caffepy.layers.layer import Blobs, Layer, LayerContext, LayoutAdapter, PassNumber, register_layer
from caffepy.layers.loss import IndexCheck

# -- fully connected layers with angular margins -------------------------------------------------------

LEAST_LENGTH = 1e-9
"""Added to lengths of LargeMarginInnerProduct before a division, as in its fork."""


@expression
def annealed(number: Each, start: Scalar, base: Scalar, gamma: Scalar, power: Scalar, least: Scalar) -> Each:
    share = base * (1 + gamma * (start + number + 1)) ** -power
    return share if share > least else least


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
    learns = True
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


# -- InnerDistance -------------------------------------------------------------------------------------

DISTANCES = ("L1", "L2")


@expression
def from_squares(dot: Each, other: Each, square: Channel) -> Each:
    return max(square + other - 2 * dot, 0.0)


@expression
def absolute_distance(x: Each, weight: Channel) -> Each:
    return fabs(x - weight)


@expression
def pull(x: Each, weight: Channel) -> Each:
    return 1.0 if x > weight else (-1.0 if x < weight else 0.0)


@expression
def pull_gradient(x: Each, products: Each, total: Channel, before: Each) -> Each:
    return before + 2 * (x * total - products)


@register_layer("InnerDistance")
class InnerDistanceLayer(Layer):
    """y_ij = |x_i - w_j|^2, or with `distance_type: "L1"` the sum of |x_i - w_j|.

    It is defined by `inner_distance_layer.cu` of caffe-windows.

    Shapes: x (d0, ..., d_axis-1, ...) with the axes from `axis` on flattened, weights (num_output, K), y (d0, ...,
    num_output). A second bottom takes the place of the weights. With `normalize` each row of the weights is divided by
    its length before use; in TRAIN the parameter keeps the quotient. With `update_center_only` the last bottom holds
    labels, and only the label's row of the weights has a gradient from each sample.

    Raises:
        ConfigError: num_output is missing, distance_type is unknown, or the number of bottoms does not fit.
        ShapeError: the samples have another size than the weights.
        DataError: a label is outside the rows.
    """

    bottoms = (1, 3)
    learns = True
    exact_bottoms = frozenset({2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.inner_distance_param
        if param.distance_type not in DISTANCES:
            raise self.error(f"distance_type is '{param.distance_type}'; it must be L1 or L2")
        given = len(bottom) - (2 if param.update_center_only else 1)
        if given not in (0, 1):
            what = "x, optional weights, and labels" if param.update_center_only else "x and optional weights"
            raise self.error(f"has {len(bottom)} bottoms; give it {what}")
        self._own = given == 0
        axis = bottom[0].axis(param.axis, self.where)
        self._inputs = math.prod(bottom[0].shape[axis:])
        if self._own:
            if param.num_output < 1:
                raise self.error("inner_distance_param needs num_output")
            self.add_parameter((param.num_output, self._inputs), param.weight_filler)
        self._unit_weights = UnitWeights(self) if param.normalize and self._own else None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape, backend = self.param.inner_distance_param, bottom[0].shape, self.backend
        axis = bottom[0].axis(param.axis, self.where)
        rows = math.prod(shape[:axis])
        outputs = param.num_output if self._own else (bottom[1].shape or (1,))[0]
        if math.prod(shape[axis:]) != self._inputs:
            raise self.shape_error(f"the axes from {axis} on must have {self._inputs} elements", bottom[0])
        if not self._own and bottom[1].count != outputs * self._inputs:
            raise self.shape_error(f"each row of the weights must have {self._inputs} elements", bottom[0], bottom[1])
        top[0].reshape((*shape[:axis], outputs))
        self._x, self._dx = (LayoutAdapter(backend, shape, (rows, self._inputs)) for _ in range(2))
        self._y, self._dy = (LayoutAdapter(backend, top[0].shape, (rows, outputs)) for _ in range(2))
        if not self._own:
            self._w, self._dw = (LayoutAdapter(backend, bottom[1].shape, (outputs, self._inputs)) for _ in range(2))
        if param.update_center_only:
            if bottom[-1].count != rows:
                raise self.shape_error(f"needs one label for each of {rows} samples", bottom[0], bottom[-1])
            self._labels = LayoutAdapter(backend, bottom[-1].shape, (rows,))
            self._hot = self.scratch("one hot", (rows, outputs))
            self._check = IndexCheck(
                self,
                f"label {{}} of '{bottom[-1].title}' is outside 0 to {outputs - 1}; correct the data, or enlarge "
                "num_output",
            )
        names = {"pulls": (rows, self._inputs), "dots": (rows, outputs), "squares": (rows,), "column": (rows,)}
        names |= {"products": (outputs, self._inputs), "weight squares": (outputs,), "row": (self._inputs,)}
        self._buffers = {name: self.scratch(name, size) for name, size in names.items()}

    def _buffer(self, name: str) -> Array:
        return self._buffers[name].array

    def _weights(self, bottom: Blobs) -> Array:
        """Return the weights of the last forward pass."""
        if not self._own:
            return self._w.target(bottom[1].data)
        return self.weights() if self._unit_weights is None else self._unit_weights.loaded()

    @property
    def _absolute(self) -> bool:
        return self.param.inner_distance_param.distance_type == "L1"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = self._x.load(bottom[0].data), self._y.target(top[0].data)
        if self._unit_weights is not None:
            self._unit_weights.load()
        if not self._own:
            self._w.load(bottom[1].data)
        (self._add_up if self._absolute else self._multiply)(x, self._weights(bottom), y)
        if self.param.inner_distance_param.update_center_only:
            self.backend.one_hot(self._labels.load(bottom[-1].data), self._hot.array, self._check.bad_index)
        self._y.store(top[0].data)

    def _multiply(self, x: Array, weights: Array, y: Array) -> None:
        """y = |x|^2 + |w|^2 - 2 x w."""
        backend, squares, others = self.backend, self._buffer("squares"), self._buffer("weight squares")
        backend.reduce(squared, (x,), (squares,), 0)
        backend.reduce(squared, (weights,), (others,), 0)
        backend.fill(self._buffer("dots"), 1)
        backend.apply(product_with_channel, (self._buffer("dots"), others), (self._buffer("dots"),), 1)
        backend.gemm(x, weights, y, transpose_b=True)
        backend.apply(from_squares, (y, self._buffer("dots"), squares), (y,), 0)

    def _add_up(self, x: Array, weights: Array, y: Array) -> None:
        backend, column = self.backend, self._buffer("column")
        for j, weight in enumerate(self._rows_of(weights)):
            backend.apply(absolute_distance, (x, weight), (self._buffer("pulls"),), 1)
            backend.reduce(identity, (self._buffer("pulls"),), (column,), 0)
            backend.copy(column, y[:, j])

    def _rows_of(self, weights: Array) -> list[Array]:
        flat, width = self.backend.flat(weights), self._inputs
        return [flat[j * width : (j + 1) * width] for j in range(weights.shape[0])]

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, x, weights = self.backend, self._x.target(bottom[0].data), self._weights(bottom)
        dy = self._dy.load(top[0].diff)
        if propagate_down[0]:
            dx = self._dx.target(bottom[0].diff)
            backend.fill(dx, 0)
            if self._absolute:
                self._pull_bottom(dy, x, weights, dx)
            else:
                backend.reduce(identity, (dy,), (self._buffer("squares"),), 0)
                backend.gemm(dy, weights, self._buffer("pulls"))
                backend.apply(pull_gradient, (x, self._buffer("pulls"), self._buffer("squares"), dx), (dx,), 0)
            self._dx.store(bottom[0].diff)
        if self.param.inner_distance_param.update_center_only:
            backend.apply(product, (dy, self._hot.array), (self._buffer("dots"),))
            dy = self._buffer("dots")
        if self._own and self.propagate_to_params[0]:
            if not self.accumulate(0):
                backend.fill(self.blobs[0].diff, 0)
            self._pull_weights(dy, x, weights, self.blobs[0].diff)
        elif not self._own and propagate_down[1]:
            dw = self._dw.target(bottom[1].diff)
            backend.fill(dw, 0)
            self._pull_weights(dy, x, weights, dw)
            self._dw.store(bottom[1].diff)

    def _pull_bottom(self, dy: Array, x: Array, weights: Array, dx: Array) -> None:
        """dx = sum over the rows of weights of dy * sign(x - w)."""
        backend, pulls, column = self.backend, self._buffer("pulls"), self._buffer("column")
        for j, weight in enumerate(self._rows_of(weights)):
            backend.copy(dy[:, j], column)
            backend.apply(pull, (x, weight), (pulls,), 1)
            backend.apply(plus_scaled_rows, (dx, pulls, column), (dx,), 0)

    def _pull_weights(self, dy: Array, x: Array, weights: Array, dw: Array) -> None:
        """Add the gradient of the weights to `dw`."""
        backend, pulls, column, row = (self.backend, *(self._buffer(name) for name in ("pulls", "column", "row")))
        if not self._absolute:
            backend.reduce(identity, (dy,), (self._buffer("weight squares"),), 1)
            backend.gemm(dy, x, self._buffer("products"), transpose_a=True)
            inputs = (weights, self._buffer("products"), self._buffer("weight squares"), dw)
            backend.apply(pull_gradient, inputs, (dw,), 0)
            return
        for j, (weight, target) in enumerate(zip(self._rows_of(weights), self._rows_of(dw), strict=True)):
            backend.copy(dy[:, j], column)
            backend.apply(pull, (x, weight), (pulls,), 1)
            backend.apply(product_with_channel, (pulls, column), (pulls,), 0)
            backend.reduce(identity, (pulls,), (row,), 1)
            backend.apply(scaled, (row, -1.0), (row,))
            backend.add(row, target)

    def raise_device_errors(self) -> None:
        if self.param.inner_distance_param.update_center_only:
            self._check.raise_device_errors()


# -- margins on the label's score ----------------------------------------------------------------------

WINDOW = 0.1
"""Half the width of the mean shift's window."""
FIRST_STEPS, STEPS = 20, 1
"""Most steps of the mean shift in the first pass and in later ones."""
CONVERGED = 0.001
"""Step of the mean shift below which it ends."""
FIRST_SCALE = 30.0
"""Of GlobalLSEMargin without a filler."""
STATISTICS = 5
"""Numbers in the second top of GlobalLSEMargin."""


@expression
def annealed_bias(
    number: Each, start: Scalar, base: Scalar, gamma: Scalar, power: Scalar, least: Scalar, most: Scalar
) -> Each:
    bias = base + (1 + gamma * (start + number)) ** power - 1
    return most if bias > most else (bias if bias > least else least)


@expression
def with_bias(x: Each, hot: Each, bias: Scalar) -> Each:
    return x + bias if hot > 0 and x > -bias else x


@expression
def rescaled(
    x: Each, hot: Each, positive: Scalar, negative: Scalar, above: Scalar, power: Scalar, fix: Scalar
) -> tuple[Each, Each]:
    changes = hot > 0 and (x > 0 or above == 0)
    raised = fabs(x) ** positive if power > 0 else x * positive + fix * (1 - positive)
    value = -raised if power > 0 and x < 0 else raised
    slope = positive * fabs(x) ** (positive - 1) if power > 0 else positive
    factor = 1.0 if hot > 0 else negative
    return (value if changes else x * factor), (slope if changes else factor)


@expression
def other_score(x: Each, hot: Each) -> Each:
    return -1.0 if hot > 0 else max(x, -1.0)


@expression
def other_power(x: Each, hot: Each, most: Channel, scale: Channel) -> Each:
    return 0.0 if hot > 0 else exp(scale * (x - most))


@expression
def soft_maximum(total: Each, most: Each, scale: Each) -> Each:
    return log(total) / scale + most


@expression
def limited(x: Each, least: Scalar, most: Scalar) -> Each:
    return min(max(x, least), most)


@expression
def with_margin(x: Each, hot: Each, scale: Channel, margin: Scalar) -> Each:
    return scale * (x - margin if hot > 0 and margin > 0 else x)


@expression
def ratio_gradient(dy: Each, y: Each, scale: Channel) -> Each:
    return dy * y / scale


LARGEST = float(np.finfo(np.float32).max)


class LabelScoresLayer(Layer):
    """A layer that changes each sample's score of its label."""

    bottoms = (2, 2)
    tops = (1, 2)
    no_gradient_bottoms = frozenset({1})
    no_gradient_tops = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if not shape or bottom[1].count != shape[0]:
            raise self.shape_error("needs scores (N, ...) and one label for each sample", bottom[0], bottom[1])
        rows = (shape[0], bottom[0].count // max(shape[0], 1))
        top[0].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            self._x, self._dx = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
            self._y, self._dy = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        self._labels = LayoutAdapter(self.backend, bottom[1].shape, rows[:1])
        self._hot = self.scratch("one hot", rows)
        self._check = IndexCheck(
            self,
            f"label {{}} of '{bottom[1].title}' is outside 0 to {rows[1] - 1}; correct the data, or give "
            f"'{bottom[0].title}' more classes",
        )

    def mark_labels(self, bottom: Blobs) -> Array:
        """Return a buffer (N, classes) with 1 at the labels and 0 elsewhere."""
        self.backend.one_hot(self._labels.load(bottom[1].data), self._hot.array, self._check.bad_index)
        return self._hot.array

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


@register_layer("LabelSpecificAdd")
class LabelSpecificAddLayer(LabelScoresLayer):
    """In TRAIN y = x, and for the label x + bias where x > -bias. In TEST y = x.

    Shapes: x and y (N, ...), one label for each sample. With `bias_base` the bias is bias_base + (1 + bias_gamma *
    n)^bias_power - 1, between bias_min and bias_max, in pass n, counted from `iteration`. A second top (1,) holds the
    bias, 0 in TEST. dx = dy. A negative bias is the margin of AM-Softmax (`label_specific_add.cpp` of caffe-windows;
    Wang, Cheng, Liu and Liu 2018).

    Raises:
        ShapeError: there is not one label for each sample.
        DataError: a label is outside the classes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._training = self.context.phase == caffe_pb2.TRAIN
        self._number = PassNumber(self)
        self._bias = self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(top) > 1:
            top[1].reshape((1,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend = self.backend
        if self._training:
            self._set_bias()
            x, hot = self._x.load(bottom[0].data), self.mark_labels(bottom)
            backend.apply(with_bias, (x, hot, self._bias), (self._y.target(top[0].data),))
            self._y.store(top[0].data)
        elif top[0] is not bottom[0]:
            backend.copy(bottom[0].data, top[0].data)
        if len(top) > 1:
            backend.copy(self._bias.reshape(1), top[1].data)

    def _set_bias(self) -> None:
        param = self.param.label_specific_add_param
        if not param.HasField("bias_base"):
            self.backend.fill(self._bias, param.bias)
            return
        settings = (param.bias_base, param.bias_gamma, param.bias_power, param.bias_min, param.bias_max)
        inputs = (self._number.load(), float(param.iteration), *settings)
        self.backend.apply(annealed_bias, inputs, (self._bias,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0] and top[0] is not bottom[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


@register_layer("LabelSpecificRescale")
class LabelSpecificRescaleLayer(LabelScoresLayer):
    """In TRAIN, and with `rescale_test` in TEST, y = w x for the label, y = negative_weight * x for the others.

    Shapes: x and y (N, ...), one label for each sample. w is `positive_weight`. In TRAIN with `positive_weight_base` it
    is positive_weight_base * (1 + gamma * n)^-power, not below positive_weight_min nor above positive_weight_max where
    they are given, in pass n, counted from `iteration` + 1. For the label, `bias_fix` gives w x + 1 - w, and
    `power_on_positive` sign(x) |x|^w. With `for_ip` a label's x of 0 or less stays. A second top (1,) holds w. dx is
    dy times the derivative (`label_specific_rescale_layer.cpp` of caffe-windows).

    Raises:
        ShapeError: there is not one label for each sample.
        DataError: a label is outside the classes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.label_specific_rescale_param
        training = self.context.phase == caffe_pb2.TRAIN
        self._changes = training or param.rescale_test
        self._follows_pass = training and param.HasField("positive_weight_base")
        self._number = PassNumber(self)
        self._weight = self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._slopes = self.scratch("slopes", self._hot.shape)
        if len(top) > 1:
            top[1].reshape((1,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, param = self.backend, self.param.label_specific_rescale_param
        self._set_weight()
        if self._changes:
            x, hot = self._x.load(bottom[0].data), self.mark_labels(bottom)
            switches = (float(param.for_ip), float(param.power_on_positive), float(param.bias_fix))
            inputs = (x, hot, self._weight, param.negative_weight, *switches)
            backend.apply(rescaled, inputs, (self._y.target(top[0].data), self._slopes.array))
            self._y.store(top[0].data)
        elif top[0] is not bottom[0]:
            backend.copy(bottom[0].data, top[0].data)
        if len(top) > 1:
            backend.copy(self._weight.reshape(1), top[1].data)

    def _set_weight(self) -> None:
        """Compute w of this pass."""
        param = self.param.label_specific_rescale_param
        if not self._follows_pass:
            self.backend.fill(self._weight, param.positive_weight)
            return
        least = param.positive_weight_min if param.HasField("positive_weight_min") else -LARGEST
        most = param.positive_weight_max if param.HasField("positive_weight_max") else LARGEST
        settings = (float(param.iteration), param.positive_weight_base, param.gamma, param.power, least)
        self.backend.apply(annealed, (self._number.load(), *settings), (self._weight,))
        self.backend.apply(limited, (self._weight, least, most), (self._weight,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if self._changes:
            dy = self._dy.load(top[0].diff)
            self.backend.apply(product, (dy, self._slopes.array), (self._dx.target(bottom[0].diff),))
            self._dx.store(bottom[0].diff)
        elif top[0] is not bottom[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


@register_layer("GlobalLSEMargin")
class GlobalLSEMarginLayer(LabelScoresLayer):
    """y = s * x, and for the label s * (x - m) where m > 0, with a margin m that follows the scores.

    Shapes: x and y (N, ...) of cosines, one label for each sample. s is parameter 0 of shape (1,), by default 30, kept
    between `scale_param`'s min_value and max_value; a third bottom (N, ...) with one number for each sample takes its
    place. Parameter 1 of shape (1,) is m. In TRAIN the margins x_label - log(sum over other classes of e^(s x)) / s of
    the batch are averaged by a mean shift with a window of 0.1; m becomes this mean, or 0.9 m + 0.1 mean if m is not 0.
    A second top (5,) holds the mean of s, of the labels' x, of the other classes' soft maximum and maximum, and m.

    dx = s * dy, ds = sum of dy * y / s. m has no gradient, and is averaged over devices before tests and snapshots
    (`global_lse_margin_layer.cu` of caffe-windows, which also changes m in TEST).

    Raises:
        ShapeError: there is not one label and, in a third bottom, one number for each sample.
        DataError: a label is outside the classes.
    """

    bottoms = (2, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.scale_param
        default = caffe_pb2.FillerParameter(type="constant", value=FIRST_SCALE)
        self.add_parameter((1,), param.filler if param.HasField("filler") else default)
        self.add_parameter((1,), caffe_pb2.FillerParameter(type="constant", value=0))
        self._limits = (param.min_value, param.max_value if param.HasField("max_value") else 3e38)
        self._own_scale = len(bottom) == 2
        specs = self.param.param
        if not specs:
            specs.add(lr_mult=float(self._own_scale), decay_mult=0)
        if len(specs) == 1:
            specs.add()
        specs[1].lr_mult = specs[1].decay_mult = 0
        self._training = self.context.phase == caffe_pb2.TRAIN
        self._margin = 0.0

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        samples, classes = self._hot.shape
        if classes < 2:
            raise self.shape_error("needs at least two classes", bottom[0])
        if len(bottom) > 2:
            if bottom[2].count != samples:
                raise self.shape_error("the third bottom must have one number for each sample", bottom[2], bottom[0])
            self._norms, self._dnorms = (LayoutAdapter(self.backend, bottom[2].shape, (samples,)) for _ in range(2))
        if len(top) > 1:
            top[1].reshape((STATISTICS,))
        self._others = self.scratch("others", (samples, classes))
        self._index, self._most = (self.scratch(name, (samples, 1)) for name in ("index", "most"))
        names = ("target", "soft", "margins", "scale")
        self._rows = {name: self.scratch(name, (samples,)) for name in names}

    def running_statistics(self) -> Sequence[int]:
        return (1,) if self._training else ()

    def local_statistics(self) -> Sequence[int]:
        return self.running_statistics()

    def capture_blocker(self) -> str | None:
        return "the host averages the margins"

    def _load_scale(self, bottom: Blobs) -> Array:
        """Return each sample's factor, (N,)."""
        backend, scale = self.backend, self._rows["scale"].array
        if self._own_scale:
            own = self.blobs[0].data
            backend.apply(limited, (own, *self._limits), (own,))
            backend.fill(scale, 1)
            backend.apply(scaled, (scale, backend.view(own, ())), (scale,))
        else:
            backend.copy(self._norms.load(bottom[2].data), scale)
        return scale

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, rows, most = self.backend, self._rows, self._most.array
        x, hot, scale = self._x.load(bottom[0].data), self.mark_labels(bottom), self._load_scale(bottom)
        target, soft, margins = (rows[name].array for name in ("target", "soft", "margins"))
        backend.reduce(product, (x, hot), (target,), 0)
        backend.apply(other_score, (x, hot), (self._others.array,))
        backend.largest(self._others.array, 1, self._index.array, most)
        backend.reduce(other_power, (x, hot, most.reshape(-1), scale), (soft,), 0)
        backend.apply(soft_maximum, (soft, most.reshape(-1), scale), (soft,))
        backend.apply(difference, (target, soft), (margins,))
        self._margin = float(backend.to_host(self.blobs[1].data)[0])
        if self._training and backend.holds_values:
            self._margin = next_margin(self._margin, backend.to_host(margins))
            backend.fill(self.blobs[1].data, self._margin)
        y = self._y.target(top[0].data)
        backend.apply(with_margin, (x, hot, scale, self._margin), (y,), 0)
        self._y.store(top[0].data)
        self.save_top(top)
        if len(top) > 1:
            columns = [backend.to_host(array).mean() for array in (scale, target, soft, most)]
            backend.from_host(np.array([*columns, self._margin], np.float32), top[1].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, scale, dy = self.backend, self._rows["scale"].array, self._dy.load(top[0].diff)
        y = self._y.load(self.saved_top(top))
        if self._own_scale and self.propagate_to_params[0]:
            backend.apply(ratio_gradient, (dy, y, scale), (self._others.array,), 0)
            diff = backend.view(self.blobs[0].diff, ())
            backend.reduce(identity, (self._others.array,), (diff,), 0, self.accumulate(0))
        if len(bottom) > 2 and propagate_down[2]:
            backend.reduce(ratio_gradient, (dy, y, scale), (self._dnorms.target(bottom[2].diff),), 0)
            self._dnorms.store(bottom[2].diff)
        if propagate_down[0]:
            backend.apply(product_with_channel, (dy, scale), (self._dx.target(bottom[0].diff),), 0)
            self._dx.store(bottom[0].diff)


def next_margin(margin: float, margins: np.ndarray) -> float:
    """Return the margin after a batch with these `margins` of its samples."""
    if not np.isfinite(margins).all():
        return margin
    first = margin == 0
    found = mean_shift(margins, float(margins.mean()) if first else margin, FIRST_STEPS if first else STEPS)
    return found if first else 0.9 * margin + 0.1 * found


def mean_shift(values: np.ndarray, mean: float, steps: int) -> float:
    """Return the mean of the values near the mean, starting from `mean`; from the mean of all if none is near."""
    while steps > 0:
        near = values[np.abs(values - mean) < WINDOW]
        before, mean = mean, float(values.mean() if near.size == 0 else near.mean())
        if abs(before - mean) < CONVERGED:
            break
        steps -= near.size > 0
    return mean
