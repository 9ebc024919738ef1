"""Normalize: normalisation over channels, as in SSD or as in caffe-windows."""

from __future__ import annotations

from math import fabs, sqrt

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import product, product_with_channel, scaled
from caffepy.layers.core.layout_adapter import LayoutAdapter, flatten_pixels, flatten_samples
from caffepy.proto import caffe_pb2

FLT_MIN = 1.1754943508222875e-38
"""The smallest eps."""
FEATURE_EPS = {"L2": 1e-12, "L1": 1e-6}
"""What caffe-windows adds to the sum, on GPUs."""


@expression
def squared(x: Each) -> Each:
    return x * x


@expression
def absolute(x: Each) -> Each:
    return fabs(x)


@expression
def length(total: Each, eps: Scalar) -> Each:
    return sqrt(total + eps)


@expression
def plus_eps(total: Each, eps: Scalar) -> Each:
    return total + eps


@expression
def over(x: Each, norm: Channel) -> Each:
    return x / norm


@expression
def unit_gradient(unit: Each, dy: Each, inner: Channel, norm: Channel) -> Each:
    return (dy - unit * inner) / norm


@expression
def feature_gradient(
    unit: Each, dy: Each, inner: Channel, norm: Channel, dnorm: Channel, absolute: Scalar, undivided: Scalar
) -> Each:
    sign = 1.0 if unit > 0 else (-1.0 if unit < 0 else 0.0)
    way = sign if absolute > 0 else unit
    gradient = dy - way * inner
    return (gradient if undivided > 0 else gradient / norm) + way * dnorm


@register_layer("Normalize")
class NormalizeLayer(Layer):
    """y = x / norm * scale, norm = sqrt(sum of x^2 + eps) (SSD's `normalize_layer.cpp`).

    x and y are (N, C), (N, C, H) or (N, C, H, W). The sum is over a whole image with `across_spatial`, else over the
    channels of each pixel. The learned scale is () with `channel_shared`, else (C,), initially 1.
    With u = x / norm, dscale = sum of u * dy and dx = scale * (dy - u * sum of u * dy) / norm. As in SSD's Caffe, the
    inner sum leaves out the scale: dx is the derivative only if all channels have the same scale.

    With `normalize_param` or a second top it is the layer of caffe-windows (its `normalize_layer.cu`; Wang, Xiang,
    Cheng and Yuille 2017). y = x / norm has no scale; norm = sqrt(sum of x^2 + 1e-12) over the channels of each pixel,
    or with `normalize_type: "L1"` sum of |x| + 1e-6. The second top (N, 1, H, W) holds the norm.
    dx = (dy - v * sum of y * dy) / norm, where v is y, or sign(x) for L1; `fix_gradient` leaves out the division. With
    `bp_norm`, v * dnorm is added, where dnorm is the second top's gradient. In a net with other layers of
    caffe-windows, a Normalize without settings is this one too.

    Raises:
        ConfigError: normalize_type is unknown.
        ShapeError: the bottom has fewer than two or more than four axes, or C differs from the scale's size.
    """

    tops = (1, 2)

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._check_axes(bottom)
        self._feature = self.param.HasField("normalize_param") or len(top) > 1
        if self._feature:
            self._kind = self.param.normalize_param.normalize_type
            if self._kind not in FEATURE_EPS:
                raise self.error(f"normalize_type is '{self._kind}'; it must be L2 or L1")
            return
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
        if not self._feature and not self.param.norm_param.channel_shared and shape[1] != self.blobs[0].shape[0]:
            raise self.shape_error("the scale belongs to another number of channels", bottom[0], self.blobs[0])
        top[0].reshape(shape)
        if shape != self._shape:
            self._shape = shape
            self._image = shape + (1,) * (4 - len(shape))
            self._x, self._y, self._dy, self._dx = (LayoutAdapter(self.backend, shape, self._image) for _ in range(4))
        channels, pixels = shape[1], top[0].count // max(shape[0] * shape[1], 1)
        self._rows = (shape[0], channels * pixels)
        if self._by_pixel:
            self._rows = (shape[0] * pixels, channels)
        if len(top) > 1:
            top[1].reshape((shape[0], 1, *self._image[2:]))
            self._norms, self._dnorms = (LayoutAdapter(self.backend, top[1].shape, self._rows[:1]) for _ in range(2))
        self._unit, self._product = (self.scratch(name, self._image) for name in ("unit", "product"))
        self._norm, self._inner = (self.scratch(name, self._rows[:1]) for name in ("norm", "inner"))

    @property
    def _by_pixel(self) -> bool:
        """Whether each pixel has its own norm."""
        return self._feature or not self.param.norm_param.across_spatial

    def _by_rows(self, image: Array) -> Array:
        """Return `image` as (rows, elements of one norm)."""
        return (flatten_pixels if self._by_pixel else flatten_samples)(self.backend, image)

    def _apply_scale(self, source: Array, destination: Array) -> None:
        formula = scaled if self.param.norm_param.channel_shared else product_with_channel
        self.backend.apply(formula, (source, self.blobs[0].data), (destination,), 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, norm, unit = self.backend, self._norm.array, self._unit.array
        x = self._by_rows(self._x.load(bottom[0].data))
        if self._feature:
            self._forward_feature(x, top)
            return
        backend.reduce(squared, (x,), (norm,), 0)
        backend.apply(length, (norm, max(self.param.norm_param.eps, FLT_MIN)), (norm,))
        backend.apply(over, (x, norm), (self._by_rows(unit),), 0)
        self._apply_scale(unit, self._y.target(top[0].data))
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, unit, dy = self.backend, self._unit.array, self._dy.load(top[0].diff)
        if self._feature:
            if propagate_down[0]:
                self._backward_feature(self._by_rows(dy), top, bottom)
            return
        if self.propagate_to_params[0]:
            backend.reduce(product, (unit, dy), (self.blobs[0].diff,), 1, self.accumulate(0))
        if not propagate_down[0]:
            return
        inner, rows, dx = self._inner.array, self._by_rows(dy), self._dx.target(bottom[0].diff)
        backend.reduce(product, (self._by_rows(unit), rows), (inner,), 0)
        backend.apply(unit_gradient, (self._by_rows(unit), rows, inner, self._norm.array), (self._by_rows(dx),), 0)
        self._apply_scale(dx, dx)
        self._dx.store(bottom[0].diff)

    def _forward_feature(self, x: Array, top: Blobs) -> None:
        backend, norm, unit = self.backend, self._norm.array, self._by_rows(self._unit.array)
        backend.reduce(absolute if self._kind == "L1" else squared, (x,), (norm,), 0)
        backend.apply(plus_eps if self._kind == "L1" else length, (norm, FEATURE_EPS[self._kind]), (norm,))
        backend.apply(over, (x, norm), (unit,), 0)
        backend.copy(unit, self._by_rows(self._y.target(top[0].data)))
        self._y.store(top[0].data)
        if len(top) > 1:
            backend.copy(norm, self._norms.target(top[1].data))
            self._norms.store(top[1].data)

    def _backward_feature(self, dy: Array, top: Blobs, bottom: Blobs) -> None:
        backend, inner, unit = self.backend, self._inner.array, self._by_rows(self._unit.array)
        param, dx = self.param.normalize_param, self._dx.target(bottom[0].diff)
        backend.reduce(product, (unit, dy), (inner,), 0)
        if param.bp_norm and len(top) > 1:
            dnorm = self._dnorms.load(top[1].diff)
        else:
            dnorm = self.scratch("no gradient", self._rows[:1]).array
            backend.fill(dnorm, 0)
        inputs = (unit, dy, inner, self._norm.array, dnorm, float(self._kind == "L1"), float(param.fix_gradient))
        backend.apply(feature_gradient, inputs, (self._by_rows(dx),), 0)
        self._dx.store(bottom[0].diff)
