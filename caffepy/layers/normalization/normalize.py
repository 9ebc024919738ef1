"""Normalize: L2 normalisation over channels, as in SSD."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import product, product_with_channel, scaled
from caffepy.layers.core.layout_adapter import LayoutAdapter, flatten_pixels, flatten_samples
from caffepy.proto import caffe_pb2

FLT_MIN = 1.1754943508222875e-38
"""The smallest eps."""


@expression
def squared(x: Each) -> Each:
    return x * x


@expression
def length(total: Each, eps: Scalar) -> Each:
    return sqrt(total + eps)


@expression
def over(x: Each, norm: Channel) -> Each:
    return x / norm


@expression
def unit_gradient(unit: Each, dy: Each, inner: Channel, norm: Channel) -> Each:
    return (dy - unit * inner) / norm


@register_layer("Normalize")
class NormalizeLayer(Layer):
    """y = x / norm * scale, norm = sqrt(sum of x^2 + eps) (SSD's `normalize_layer.cpp`).

    x and y are (N, C), (N, C, H) or (N, C, H, W). The sum is over a whole image with `across_spatial`, else over the
    channels of each pixel. The learned scale is () with `channel_shared`, else (C,), initially 1.
    With u = x / norm, dscale = sum of u * dy and dx = scale * (dy - u * sum of u * dy) / norm. As in SSD's Caffe, the
    inner sum leaves out the scale: dx is the derivative only if all channels have the same scale.

    Raises:
        ShapeError: the bottom has fewer than two or more than four axes, or C differs from the scale's size.
    """

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._check_axes(bottom)
        param = self.param.norm_param
        shape = () if param.channel_shared else (bottom[0].shape[1],)
        default = caffe_pb2.FillerParameter(type="constant", value=1)
        self.add_parameter(shape, param.scale_filler if param.HasField("scale_filler") else default)

    def _check_axes(self, bottom: Blobs) -> None:
        if not 2 <= len(bottom[0].shape) <= 4:
            raise self.shape_error("the bottom must have two to four axes, (N, C, H, W)", bottom[0])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._check_axes(bottom)
        shape = bottom[0].shape
        if not self.param.norm_param.channel_shared and shape[1] != self.blobs[0].shape[0]:
            raise self.shape_error("the scale belongs to another number of channels", bottom[0], self.blobs[0])
        top[0].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            self._image = shape + (1,) * (4 - len(shape))
            self._x, self._y, self._dy, self._dx = (LayoutAdapter(self.backend, shape, self._image) for _ in range(4))
        channels, pixels = shape[1], top[0].count // max(shape[0] * shape[1], 1)
        self._rows = (shape[0], channels * pixels)
        if not self.param.norm_param.across_spatial:
            self._rows = (shape[0] * pixels, channels)
        self._unit, self._product = (self.scratch(name, self._image) for name in ("unit", "product"))
        self._norm, self._inner = (self.scratch(name, self._rows[:1]) for name in ("norm", "inner"))

    def _by_rows(self, image: Array) -> Array:
        """Return `image` as (rows, elements of one norm)."""
        flatten = flatten_samples if self.param.norm_param.across_spatial else flatten_pixels
        return flatten(self.backend, image)

    def _apply_scale(self, source: Array, destination: Array) -> None:
        formula = scaled if self.param.norm_param.channel_shared else product_with_channel
        self.backend.apply(formula, (source, self.blobs[0].data), (destination,), 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, norm, unit = self.backend, self._norm.array, self._unit.array
        x = self._by_rows(self._x.load(bottom[0].data))
        backend.reduce(squared, (x,), (norm,), 0)
        backend.apply(length, (norm, max(self.param.norm_param.eps, FLT_MIN)), (norm,))
        backend.apply(over, (x, norm), (self._by_rows(unit),), 0)
        self._apply_scale(unit, self._y.target(top[0].data))
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, unit, dy = self.backend, self._unit.array, self._dy.load(top[0].diff)
        if self.propagate_to_params[0]:
            backend.reduce(product, (unit, dy), (self.blobs[0].diff,), 1, self.accumulate(0))
        if not propagate_down[0]:
            return
        inner, rows, dx = self._inner.array, self._by_rows(dy), self._dx.target(bottom[0].diff)
        backend.reduce(product, (self._by_rows(unit), rows), (inner,), 0)
        backend.apply(unit_gradient, (self._by_rows(unit), rows, inner, self._norm.array), (self._by_rows(dx),), 0)
        self._apply_scale(dx, dx)
        self._dx.store(bottom[0].diff)
