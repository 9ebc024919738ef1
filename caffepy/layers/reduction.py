"""Reduction and ArgMax."""

from __future__ import annotations

import math
from math import fabs

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.formulas import scaled
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter

_Parameter = caffe_pb2.ReductionParameter


@expression
def magnitude(x: Each, factor: Scalar) -> Each:
    return fabs(x) * factor


@expression
def square(x: Each, factor: Scalar) -> Each:
    return x * x * factor


@expression
def spread(dy: Channel, factor: Scalar) -> Each:
    return dy * factor


@expression
def signed(x: Each, dy: Channel, factor: Scalar) -> Each:
    return dy * factor if x > 0 else (-dy * factor if x < 0 else 0.0)


@expression
def twice(x: Each, dy: Channel, factor: Scalar) -> Each:
    return 2 * x * dy * factor


_FORWARD = {_Parameter.SUM: scaled, _Parameter.MEAN: scaled, _Parameter.ASUM: magnitude, _Parameter.SUMSQ: square}


@register_layer("Reduction")
class ReductionLayer(Layer):
    """y = coeff * sum of x (SUM), |x| (ASUM) or x^2 (SUMSQ), or coeff * mean of x (MEAN), over the axes from `axis` on.

    The top has the axes before `axis`; it is a scalar for axis 0 (Caffe's `reduction_layer.cpp`).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.reduction_param
        axis = bottom[0].axis(param.axis, self.where)
        top[0].reshape(bottom[0].shape[:axis])
        self._factor = param.coeff
        if param.operation == _Parameter.MEAN:
            self._factor /= max(bottom[0].count // max(top[0].count, 1), 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        formula = _FORWARD[self.param.reduction_param.operation]
        self.backend.reduce(formula, (bottom[0].data, self._factor), (top[0].data,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        operation, x, dy, dx = self.param.reduction_param.operation, bottom[0].data, top[0].diff, bottom[0].diff
        if operation in (_Parameter.SUM, _Parameter.MEAN):
            self.backend.apply(spread, (dy, self._factor), (dx,), 0)
        else:
            formula = signed if operation == _Parameter.ASUM else twice
            self.backend.apply(formula, (x, dy, self._factor), (dx,), 0)


@register_layer("ArgMax")
class ArgMaxLayer(Layer):
    """Indices or values of the `top_k` largest elements in descending order (Caffe's `argmax_layer.cpp`).

    Without `axis` each sample is one row. The top (N, 1, top_k) holds the indices; with `out_max_val` the top
    (N, 2, top_k) holds indices and values. With `axis` the top has the bottom's shape with top_k along that axis, and
    holds the values with `out_max_val`, else the indices. Of equal elements the larger index comes first.

    Raises:
        ConfigError: top_k is 0.
        ShapeError: top_k is larger than the number of elements.
    """

    has_backward = False

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if self.param.argmax_param.top_k < 1:
            raise self.error("argmax_param.top_k is 0; give at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.argmax_param, bottom[0].shape
        if not shape:
            raise self.shape_error("the bottom needs a first axis, N", bottom[0])
        self._axis = 1
        rows: tuple[int, ...] = (shape[0], math.prod(shape[1:]))
        if param.HasField("axis"):
            self._axis = bottom[0].axis(param.axis, self.where)
            rows = shape
        if param.top_k > rows[self._axis]:
            raise self.shape_error(f"top_k is {param.top_k}, but there are only {rows[self._axis]} elements", bottom[0])
        result = (*rows[: self._axis], param.top_k, *rows[self._axis + 1 :])
        if param.HasField("axis"):
            top[0].reshape(result)
        else:
            top[0].reshape((shape[0], 2 if param.out_max_val else 1, param.top_k) + (1,) * (len(shape) - 3))
        if shape != self._shape:
            self._shape = shape
            self._rows = LayoutAdapter(self.backend, shape, rows)
            self._results = [self.backend.zeros(result) for _ in range(2)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (indices, values) = self.param.argmax_param, self._results
        self.backend.largest(self._rows.load(bottom[0].data), self._axis, indices, values)
        if param.HasField("axis"):
            self.backend.copy(values if param.out_max_val else indices, top[0].data)
            return
        self.backend.copy(indices, self._part(top[0].data, 0))
        if param.out_max_val:
            self.backend.copy(values, self._part(top[0].data, 1))

    def _part(self, data: Array, number: int) -> Array:
        """Return the indices (0) or values (1) of the top, (N, top_k)."""
        return data[(slice(None), number, slice(None)) + (0,) * (len(data.shape) - 3)]
