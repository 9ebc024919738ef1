"""InnerDistance: distances of samples from rows of weights."""

from __future__ import annotations

import math
from math import fabs

from caffepy.backend import Array, Channel, Each, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import identity, product, product_with_channel, scaled
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.core.unit_weights import UnitWeights

DISTANCES = ("L1", "L2")


@expression
def squared(x: Each) -> Each:
    return x * x


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
