"""Normalisation of one sample: LRN, MVN, and Normalize of SSD and caffe-windows.

LRN: Krizhevsky, Sutskever and Hinton 2012; Caffe's `lrn_layer.cpp`, `mvn_layer.cpp`.
"""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Array, Channel, Each, Geometry, LrnWindow, Scalar, expression
from caffepy.backend.formulas import (
    absolute,
    minus_channel,
    product,
    product_with_channel,
    scaled,
    squared,
    squared_distance,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import (
    Blobs,
    Layer,
    LayoutAdapter,
    ScratchBuffer,
    flatten_samples,
    register_layer,
)

LARGEST_SIZE = 2**14
"""Largest local_size, which is far above that of real nets."""


@expression
def normalised(x: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    return x * (1 + alpha * average) ** (-beta)


@expression
def average_gradient(x: Each, dy: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    return -alpha * beta * dy * x * (1 + alpha * average) ** (-beta - 1)


@expression
def within_gradient(x: Each, dy: Each, average: Each, dsquare: Each, alpha: Scalar, beta: Scalar) -> Each:
    return dy * (1 + alpha * average) ** (-beta) + 2 * x * dsquare


@expression
def normalised_by_roots(x: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    root = sqrt(1 + alpha * average)
    return x / (root * sqrt(root))


@expression
def average_gradient_by_roots(x: Each, dy: Each, average: Each, alpha: Scalar, beta: Scalar) -> Each:
    base = 1 + alpha * average
    root = sqrt(base)
    return -alpha * beta * dy * x / (base * (root * sqrt(root)))


@expression
def within_gradient_by_roots(x: Each, dy: Each, average: Each, dsquare: Each, alpha: Scalar, beta: Scalar) -> Each:
    root = sqrt(1 + alpha * average)
    return dy / (root * sqrt(root)) + 2 * x * dsquare


GENERAL = normalised, average_gradient, within_gradient
BY_ROOTS = normalised_by_roots, average_gradient_by_roots, within_gradient_by_roots
"""For beta = 0.75, the value of nearly all nets: two square roots are several times faster than a power."""


@register_layer("LRN")
class LRNLayer(Layer):
    """Normalises each value by the squares of its neighbours. x and y are (N, C, H, W), n is `local_size`.

    ACROSS_CHANNELS: y = x * (k + alpha / n * sum of x^2 over n neighbouring channels)^-beta.
    WITHIN_CHANNEL: y = x * (1 + alpha * average of x^2 over n x n neighbouring pixels)^-beta. As in Caffe, `k` is
    ignored there, and the average is that of a padded pooling layer.

    Raises:
        ConfigError: local_size is even or above 2^14.
        ShapeError: the bottom does not have four axes.
    """

    supports_half = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.lrn_param
        if param.local_size % 2 == 0:
            raise self.error(f"local_size is {param.local_size}, but must be odd")
        if param.local_size > LARGEST_SIZE:
            raise self.error(f"local_size is {param.local_size}; at most {LARGEST_SIZE} is possible")
        self._across = param.norm_region == caffe_pb2.LRNParameter.ACROSS_CHANNELS
        half = (param.local_size - 1) // 2
        self._formulas = BY_ROOTS if param.beta == 0.75 else GENERAL
        self._geometry = Geometry((param.local_size,) * 2, (1, 1), (half, half), (1, 1))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        top[0].reshape(shape)
        needs_scale = not self._across or self.backend.keeps_lrn_scale
        self._scale: ScratchBuffer | None = self.scratch("scale", shape) if needs_scale else None
        """The base of the power (across), or the average of squares (within)."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.lrn_param
        x, y = bottom[0].data, top[0].data
        scale = None if self._scale is None else self._scale.array
        if self._across:
            self.backend.lrn_across_forward(x, y, scale, self._window())
            if scale is not None:
                self.save_top(top)
            return
        squares = self.scratch("squares", x.shape).array
        self.backend.apply(product, (x, x), (squares,))
        self.backend.pool_average_forward(squares, scale, self._geometry)
        self.backend.apply(self._formulas[0], (x, scale, param.alpha, param.beta), (y,))

    def _window(self) -> LrnWindow:
        param = self.param.lrn_param
        return LrnWindow(param.local_size, param.alpha, param.beta, param.k)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        param = self.param.lrn_param
        x, dy, dx = bottom[0].data, top[0].diff, bottom[0].diff
        scale = None if self._scale is None else self._scale.array
        if self._across:
            y = None if scale is None else self.saved_top(top)
            self.backend.lrn_across_backward(x, y, scale, dy, dx, self._window())
            return
        # Pooling does not change the dtype, and these products may underflow in half precision.
        part = dx if bottom[0].dtype == "float32" else self.scratch("part", x.shape).array
        self.backend.apply(self._formulas[1], (x, dy, scale, param.alpha, param.beta), (part,))
        squares = self.scratch("squares", x.shape).array
        self.backend.pool_average_backward(part, squares, self._geometry)
        inputs = (x, dy, scale, squares, param.alpha, param.beta)
        self.backend.apply(self._formulas[2], inputs, (dx,))


@expression
def deviation(variance: Each, eps: Scalar) -> Each:
    return sqrt(variance) + eps


@expression
def standardised(x: Each, mean: Channel, deviation: Channel) -> Each:
    return (x - mean) / deviation


@expression
def centred_gradient(dy: Each, mean: Channel, factor: Scalar) -> Each:
    return dy - mean * factor


@expression
def standardised_gradient(
    y: Each, dy: Each, sum_dy: Channel, sum_y_dy: Channel, deviation: Channel, factor: Scalar
) -> Each:
    return (dy - (sum_dy + y * sum_y_dy) * factor) / deviation


@register_layer("MVN")
class MVNLayer(Layer):
    """y = (x - mean) / (standard deviation + eps) over each channel of each image (Caffe's `mvn_layer.cpp`).

    x is (N, C, H, W) or has fewer axes; y has four axes. With `across_channels` mean and deviation are over all
    channels of an image. Without `normalize_variance` y = x - mean.
    dx = (dy - mean(dy) - y * mean(y * dy)) / (standard deviation + eps), or dy - mean(dy).

    Raises:
        ConfigError: the layer works in place on fewer than four axes.
        ShapeError: the bottom has more than four axes.
    """

    _shape: tuple[int, ...] | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) > 4:
            raise self.shape_error("the bottom may have at most four axes, (N, C, H, W)", bottom[0])
        shape += (1,) * (4 - len(shape))
        if len(bottom[0].shape) < 4 and top[0] is bottom[0]:
            raise self.error("works in place on four axes only; give the top another name than the bottom's")
        top[0].reshape(shape)
        axes = 1 if self.param.mvn_param.across_channels else 2
        self._statistics_shape = shape[:axes]
        if bottom[0].shape != self._shape:
            self._shape = bottom[0].shape
            self._x, self._dx = (LayoutAdapter(self.backend, self._shape, shape) for _ in range(2))
        self._factor = 1 / max(top[0].count // max(shape[0] * (shape[1] if axes == 2 else 1), 1), 1)
        names = ("mean", "variance", "deviation", "sum_dy", "sum_y_dy")
        self._statistics = {name: self.scratch(name, self._statistics_shape) for name in names}

    def _rows(self, image: Array) -> Array:
        """Return `image` as (N, elements) if statistics are per image, else as (N, C, H, W)."""
        return flatten_samples(self.backend, image) if len(self._statistics_shape) == 1 else image

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, statistics = self.backend, self._statistics
        x, y = self._rows(self._x.load(bottom[0].data)), self._rows(top[0].data)
        mean = statistics["mean"].array
        backend.reduce(scaled, (x, self._factor), (mean,), 0)
        if not self.param.mvn_param.normalize_variance:
            backend.apply(minus_channel, (x, mean), (y,), 0)
            return
        variance, divisor = statistics["variance"].array, statistics["deviation"].array
        backend.reduce(squared_distance, (x, mean, self._factor), (variance,), 0)
        backend.apply(deviation, (variance, self.param.mvn_param.eps), (divisor,))
        backend.apply(standardised, (x, mean, divisor), (y,), 0)
        self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        backend, statistics = self.backend, self._statistics
        dy, dx = self._rows(top[0].diff), self._rows(self._dx.target(bottom[0].diff))
        total = statistics["sum_dy"].array
        backend.reduce(scaled, (dy, 1.0), (total,), 0)
        if not self.param.mvn_param.normalize_variance:
            backend.apply(centred_gradient, (dy, total, self._factor), (dx,), 0)
            self._dx.store(bottom[0].diff)
            return
        y, products = self._rows(self.saved_top(top)), statistics["sum_y_dy"].array
        backend.reduce(product, (y, dy), (products,), 0)
        inputs = (y, dy, total, products, statistics["deviation"].array, self._factor)
        backend.apply(standardised_gradient, inputs, (dx,), 0)
        self._dx.store(bottom[0].diff)


FLT_MIN = 1.1754943508222875e-38
"""The smallest eps."""
FEATURE_EPS = {"L2": 1e-12, "L1": 1e-6}
"""What caffe-windows adds to the sum, on GPUs."""


@expression
def inverse_length(total: Each, eps: Scalar) -> Each:
    return 1 / sqrt(total + eps)


@expression
def inverse_sum(total: Each, eps: Scalar) -> Each:
    return 1 / (total + eps)


@expression
def reciprocal(x: Each) -> Each:
    return 1 / x


@expression
def scaled_unit(x: Each, inverse: Channel, scale: Channel) -> Each:
    return x * inverse * scale


@expression
def scale_gradient(x: Each, dy: Each, inverse: Channel) -> Each:
    return x * inverse * dy


@expression
def unit_gradient(x: Each, dy: Each, inner: Channel, inverse: Channel, scale: Channel) -> Each:
    return (dy - x * inverse * (inner * inverse)) * inverse * scale


@expression
def feature_gradient(
    x: Each, dy: Each, inner: Channel, inverse: Channel, dnorm: Channel, is_l1: Scalar, undivided: Scalar
) -> Each:
    sign = 1.0 if x > 0 else (-1.0 if x < 0 else 0.0)
    way = sign if is_l1 > 0 else x * inverse
    gradient = dy - way * (inner * inverse)
    return (gradient if undivided > 0 else gradient * inverse) + way * dnorm


@register_layer("Normalize")
class NormalizeLayer(Layer):
    """y = x / norm * scale, norm = sqrt(sum of x^2 + eps) (SSD's `normalize_layer.cpp`).

    x and y are (N, C), (N, C, H) or (N, C, H, W). The sum is over a whole image with `across_spatial`, else over the
    channels of each pixel. The learned scale is () with `channel_shared`, else (C,), initially 1.
    With u = x / norm, dscale = sum of u * dy and dx = scale * (dy - u * sum of u * dy) / norm. As in SSD's Caffe, the
    inner sum leaves out the scale: dx is the derivative only if all channels have the same scale.

    With `normalize_param` or a second top it is the layer of caffe-windows (its `normalize_layer.cu`; Wang, Xiang,
    Cheng and Yuille 2017). y = x / norm has no scale; norm = sqrt(sum of x^2 + 1e-12) over the channels of each pixel,
    or with `normalize_type: "L1"` sum of |x| + 1e-6. The second top (N, 1, H, W) holds the norm and stays float32.
    dx = (dy - v * sum of y * dy) / norm, where v is y, or sign(x) for L1; `fix_gradient` leaves out the division. With
    `bp_norm`, v * dnorm is added, where dnorm is the second top's gradient. In a net with other layers of
    caffe-windows, a Normalize without settings is this one too.

    Raises:
        ConfigError: normalize_type is unknown.
        ShapeError: the bottom has fewer than two or more than four axes, or C differs from the scale's size.
    """

    tops = (1, 2)
    supports_half = True
    float32_tops_from = 1

    eps: float
    """Added to each sum."""
    _is_l1 = False
    _by_pixel = True
    """Whether each pixel has its own norm."""
    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._check_axes(bottom)
        if self.param.HasField("normalize_param") or len(top) > 1:
            kind = self.param.normalize_param.normalize_type
            if kind not in FEATURE_EPS:
                raise self.error(f"normalize_type is '{kind}'; it must be L2 or L1")
            self._is_l1, self.eps = kind == "L1", FEATURE_EPS[kind]
            return
        param = self.param.norm_param
        self._by_pixel, self.eps = not param.across_spatial, max(param.eps, FLT_MIN)
        shape = () if param.channel_shared else (bottom[0].shape[1],)
        default = caffe_pb2.FillerParameter(type="constant", value=1)
        self.add_parameter(shape, param.scale_filler if param.HasField("scale_filler") else default)

    def _check_axes(self, bottom: Blobs) -> None:
        if not 2 <= len(bottom[0].shape) <= 4:
            raise self.shape_error("the bottom must have two to four axes, (N, C, H, W)", bottom[0])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._check_axes(bottom)
        shape = bottom[0].shape
        if self.blobs and self.blobs[0].shape not in ((), shape[1:2]):
            raise self.shape_error("the scale belongs to another number of channels", bottom[0], self.blobs[0])
        top[0].reshape(shape)
        image = shape + (1,) * (4 - len(shape))
        if shape != self._shape:
            self._shape = shape
            self._x, self._y, self._dy, self._dx = (
                LayoutAdapter(self.backend, shape, image, self.dtype) for _ in range(4)
            )
        norms = (shape[0], 1, *(image[2:] if self._by_pixel else (1, 1)))
        if len(top) > 1:
            top[1].reshape(norms)
        self._inverse, self._inner = (self.scratch(name, norms) for name in ("inverse", "inner"))
        self._saved_x = self.scratch("x", image, self.dtype) if top[0] is bottom[0] else None

    def _for_channels(self, array: Array) -> Array:
        """Return the scale or its gradient as (1, C, 1, 1) or (1, 1, 1, 1)."""
        return self.backend.view(self.backend.flat(array), (1, array.size, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, inverse, y = self.backend, self._inverse.array, self._y.target(top[0].data)
        x = self._x.load(bottom[0].data)
        if self._saved_x is not None and not self.context.forward_only:
            backend.copy(x, self._saved_x.array)
        backend.reduce(absolute if self._is_l1 else squared, (x,), (inverse,), 0)
        backend.apply(inverse_sum if self._is_l1 else inverse_length, (inverse, self.eps), (inverse,))
        if self.blobs:
            backend.apply(scaled_unit, (x, inverse, self._for_channels(self.blobs[0].data)), (y,), 0)
        else:
            backend.apply(product_with_channel, (x, inverse), (y,), 0)
        self._y.store(top[0].data)
        if len(top) > 1:
            backend.apply(reciprocal, (inverse,), (top[1].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, inverse, dy = self.backend, self._inverse.array, self._dy.load(top[0].diff)
        x = self._x.load(bottom[0].data) if self._saved_x is None else self._saved_x.array
        if self.blobs and self.propagate_to_params[0]:
            dscale = self._for_channels(self.blobs[0].diff)
            backend.reduce(scale_gradient, (x, dy, inverse), (dscale,), 0, self.accumulate(0))
        if not propagate_down[0]:
            return
        inner, dx = self._inner.array, self._dx.target(bottom[0].diff)
        backend.reduce(product, (x, dy), (inner,), 0)
        if self.blobs:
            scale = self._for_channels(self.blobs[0].data)
            backend.apply(unit_gradient, (x, dy, inner, inverse, scale), (dx,), 0)
        else:
            self._apply_feature_gradient((x, dy, inner, inverse), dx, top)
        self._dx.store(bottom[0].diff)

    def _apply_feature_gradient(self, known: tuple[Array, ...], dx: Array, top: Blobs) -> None:
        """Set dx as caffe-windows does, from the first arguments of `feature_gradient`."""
        param = self.param.normalize_param
        if param.bp_norm and len(top) > 1:
            dnorm = top[1].diff
        else:
            dnorm = self.scratch("no gradient", (1, 1, 1, 1)).array
            self.backend.fill(dnorm, 0)
        inputs = (*known, dnorm, float(self._is_l1), float(param.fix_gradient))
        self.backend.apply(feature_gradient, inputs, (dx,), 0)
