"""Reduction."""

from __future__ import annotations

from math import fabs

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import scaled
from caffepy.proto import caffe_pb2

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
