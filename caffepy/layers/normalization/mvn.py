"""MVN: mean-variance normalisation."""

from __future__ import annotations

from math import sqrt

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import product, scaled
from caffepy.layers.core.layout_adapter import LayoutAdapter, flatten_samples


@expression
def centred(x: Each, mean: Channel) -> Each:
    return x - mean


@expression
def squared_deviation(x: Each, mean: Channel, factor: Scalar) -> Each:
    return (x - mean) * (x - mean) * factor


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
            backend.apply(centred, (x, mean), (y,), 0)
            return
        variance, divisor = statistics["variance"].array, statistics["deviation"].array
        backend.reduce(squared_deviation, (x, mean, self._factor), (variance,), 0)
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
