"""ChannelNorm and ExpMax: operations over the channels of each pixel."""

from __future__ import annotations

import math
from math import exp, sqrt

from caffepy.backend import Channel, Each, Geometry, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import identity
from caffepy.layers.core.layout_adapter import flatten_pixels

TINY = 1e-9
"""Added to the norm where it divides."""


@expression
def squared(x: Each) -> Each:
    return x * x


@expression
def root(total: Each) -> Each:
    return sqrt(total)


@expression
def norm_gradient(x: Each, norm: Channel, dy: Channel, tiny: Scalar) -> Each:
    return dy * x / (norm + tiny)


@expression
def scaled_power(x: Each, largest: Channel, inner: Scalar, outer: Scalar) -> Each:
    return outer * exp(inner * (x - largest))


@expression
def scaled_product(y: Each, dy: Each, inner: Scalar) -> Each:
    return inner * y * dy


@expression
def minus(dx: Each, other: Each) -> Each:
    return dx - other


class PixelLayer(Layer):
    """A layer over the channels of each pixel of x (N, C, H, W).

    Raises:
        ShapeError: the bottom does not have four axes.
    """

    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4 or shape[1] < 1:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W), and a channel", bottom[0])
        self._rows = shape[0] * shape[2] * shape[3]


@register_layer("ChannelNorm")
class ChannelNormLayer(PixelLayer):
    """y (N, 1, H, W) = sqrt(sum over the channels of x^2) (FlowNet 2's `channel_norm_layer.cpp`).

    dx = dy * x / (y + 1e-9).

    Raises:
        ShapeError: the bottom does not have four axes.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        top[0].reshape((bottom[0].shape[0], 1, *bottom[0].shape[2:]))
        self._norm = self.scratch("norm", (self._rows,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, norm = self.backend, self._norm.array
        backend.reduce(squared, (flatten_pixels(backend, bottom[0].data),), (norm,), 0)
        backend.apply(root, (norm,), (norm,))
        backend.copy(norm, backend.flat(top[0].data))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            backend = self.backend
            x, dx = (flatten_pixels(backend, array) for array in (bottom[0].data, bottom[0].diff))
            dy = backend.flat(top[0].diff)
            backend.apply(norm_gradient, (x, self._norm.array, dy, TINY), (dx,), 0)


@register_layer("ExpMax")
class ExpMaxLayer(PixelLayer):
    """y = base ^ (shift + scale * (x - m)), where m is the largest channel of each pixel.

    Source: LiteFlowNet's `expmax_layer.cu`. The base -1 stands for e. As in LiteFlowNet, `shift` and `scale` are those
    of Exp. dx = scale * log(base) * y * dy, at the largest channel minus the sum of this over the channels; LiteFlowNet
    leaves out that sum. It also uses the first sample's maxima for all samples.

    Raises:
        ConfigError: the base is 0, negative other than -1, or not finite.
        ShapeError: the bottom does not have four axes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.expmax_param
        if param.base != -1 and not 0 < param.base < math.inf:
            raise self.error(f"expmax_param.base is {param.base:g}; it must be above 0, or -1 for e")
        logarithm = 1.0 if param.base == -1 else math.log(param.base)
        self._inner = logarithm * param.scale
        self._outer = math.exp(logarithm * param.shift)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        top[0].reshape(shape)
        self._lines = (self._rows, 1, 1, shape[1])
        self._window = Geometry((1, shape[1]), (1, 1), (0, 0), (1, 1))
        self._largest = self.scratch("largest", (self._rows, 1, 1, 1))
        self._mask = self.scratch("mask", (self._rows, 1, 1, 1), "int32")
        self._sum = self.scratch("sum", (self._rows, 1, 1, 1))
        self._share = self.scratch("share", self._lines)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, largest = self.backend, self._largest.array
        lines = backend.view(backend.flat(bottom[0].data), self._lines)
        backend.pool_max_forward(lines, largest, self._mask.array, self._window)
        x, y = (flatten_pixels(backend, array) for array in (bottom[0].data, top[0].data))
        backend.apply(scaled_power, (x, backend.flat(largest), self._inner, self._outer), (y,), 0)
        self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        backend, share, sums = self.backend, self._share.array, self._sum.array
        y, dx = self.saved_top(top), bottom[0].diff
        backend.apply(scaled_product, (y, top[0].diff, self._inner), (dx,))
        rows = flatten_pixels(backend, dx)
        backend.reduce(identity, (rows,), (backend.flat(sums),), 0)
        backend.pool_max_backward(sums, self._mask.array, share, self._window)
        backend.apply(minus, (backend.flat(dx), backend.flat(share)), (backend.flat(dx),))
