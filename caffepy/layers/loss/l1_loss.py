"""L1Loss and SmoothL1Loss."""

from __future__ import annotations

from math import fabs

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import product
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import ElementLossLayer


@expression
def difference(a: Each, b: Each) -> Each:
    return a - b


@expression
def magnitude(d: Each, factor: Scalar) -> Each:
    return fabs(d) * factor


@expression
def direction(d: Each, factor: Scalar) -> Each:
    return factor if d > 0 else (-factor if d < 0 else 0.0)


@expression
def smooth(d: Each, factor: Scalar, sharpness: Scalar) -> Each:
    size = fabs(d)
    return factor * (0.5 * sharpness * d * d if size * sharpness < 1 else size - 0.5 / sharpness)


@expression
def weighted_smooth(d: Each, weight: Each, factor: Scalar, sharpness: Scalar) -> Each:
    size = fabs(d)
    return weight * factor * (0.5 * sharpness * d * d if size * sharpness < 1 else size - 0.5 / sharpness)


@expression
def smooth_slope(d: Each, factor: Scalar, sharpness: Scalar) -> Each:
    slope = sharpness * d if fabs(d) * sharpness < 1 else (1.0 if d > 0 else -1.0)
    return slope * factor


@register_layer("L1Loss")
class L1LossLayer(ElementLossLayer):
    """loss = sum of |a - b| / N. da = sign(a - b) / N, db = -da (NVIDIA's `l1_loss_layer.cpp`). Shapes: (N, …)."""

    no_gradient_bottoms = frozenset()

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._difference = self.scratch("difference", bottom[0].shape)

    def _factor(self) -> float:
        return 1 / max(self._difference.shape[0], 1)

    def _subtract(self, bottom: Blobs) -> Array:
        d = self._difference.array
        self.backend.apply(difference, (bottom[0].data, self._targets.load(bottom[1].data)), (d,))
        return d

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.reduce(magnitude, (self._subtract(bottom), self._factor()), (top[0].data,))

    def slope(self, dx: Array, factor: float) -> None:
        """dx = factor * derivative of the loss by a."""
        self.backend.apply(direction, (self._difference.array, factor), (dx,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        factor = self.weight() * self._factor()
        if propagate_down[0]:
            self.slope(bottom[0].diff, factor)
            self.apply_top_gradient(top, bottom[0].diff)
        if propagate_down[1]:
            db = self._target_diffs.target(bottom[1].diff)
            self.slope(db, -factor)
            self.apply_top_gradient(top, db)
            self._target_diffs.store(bottom[1].diff)


@register_layer("SmoothL1Loss")
class SmoothL1LossLayer(L1LossLayer):
    """loss = sum of v f(w (a - b)) / N, where f(d) = sigma^2 d^2 / 2 if |d| < 1 / sigma^2, else |d| - 1 / (2 sigma^2).

    a and b are (N, …). The optional third bottom is w, the optional fourth v; they have a's count and default to 1.
    `sigma` is a field of `smooth_l1_loss_param` (Girshick 2015; NVIDIA's `smooth_L1_loss_layer.cpp` has two bottoms and
    sigma 1).

    Raises:
        ConfigError: sigma is not above 0.
        ShapeError: the counts differ.
    """

    bottoms = (2, 4)
    no_gradient_bottoms = frozenset({2, 3})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        sigma = self.param.smooth_l1_loss_param.sigma
        if sigma <= 0:
            raise self.error(f"smooth_l1_loss_param.sigma is {sigma:g}; it must be above 0")
        self._sharpness = sigma * sigma

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        for blob in bottom[2:]:
            if blob.count != bottom[0].count:
                raise self.shape_error("weights must have the first bottom's count", blob, bottom[0])
        self._weights = [LayoutAdapter(self.backend, blob.shape, bottom[0].shape) for blob in bottom[2:]]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        weights = [adapter.load(blob.data) for adapter, blob in zip(self._weights, bottom[2:], strict=True)]
        d = self._subtract(bottom)
        if weights:
            self.backend.apply(product, (weights[0], d), (d,))
        if len(weights) > 1:
            inputs = (d, weights[1], self._factor(), self._sharpness)
            self.backend.reduce(weighted_smooth, inputs, (top[0].data,))
        else:
            self.backend.reduce(smooth, (d, self._factor(), self._sharpness), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._loaded_weights = [
            adapter.load(blob.data) for adapter, blob in zip(self._weights, bottom[2:], strict=True)
        ]
        super().backward(top, propagate_down, bottom)

    def slope(self, dx: Array, factor: float) -> None:
        self.backend.apply(smooth_slope, (self._difference.array, factor, self._sharpness), (dx,))
        for weight in self._loaded_weights:
            self.backend.apply(product, (dx, weight), (dx,))
