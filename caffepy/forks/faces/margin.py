"""Fully connected layers for faces: MarginInnerProduct, LargeMarginInnerProduct and InnerDistance."""

from __future__ import annotations

import math
from math import fabs, sqrt
from typing import ClassVar

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.formulas import identity, product, product_with_channel, scaled
from caffepy.layers.inner_product import UnitWeights
from caffepy.layers.labels import IndexCheck
from caffepy.layers.layer import Blobs, Layer, LayerContext, PassNumber, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter

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


@expression
def plus_pull(total: Each, pulled: Each, dy: Channel) -> Each:
    return total + pulled * dy


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
                self, f"label {{}} of '{bottom[-1].title}' is outside 0 to {outputs - 1}; correct the data, or enlarge "
                "num_output"
            )  # fmt: skip
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
            backend.apply(plus_pull, (dx, pulls, column), (dx,), 0)

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
