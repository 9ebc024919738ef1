"""Clip."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, register_layer


@expression
def clip(x: Each, low: Scalar, high: Scalar) -> Each:
    return low if x < low else (high if x > high else x)


@expression
def clip_gradient(x: Each, dy: Each, low: Scalar, high: Scalar) -> Each:
    return dy if x >= low and x <= high else 0.0


@register_layer("Clip")
class ClipLayer(ActivationLayer):
    """y = min(max(x, `min`), `max`). dx = dy where `min` <= x <= `max`, else 0 (Caffe's `clip_layer.cpp`).

    Raises:
        ConfigError: `min` is above `max`.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.clip_param
        if param.min > param.max:
            raise self.error(f"clip_param has min {param.min:g} above max {param.max:g}")
        self._bounds = (param.min, param.max)

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(clip, (x, *self._bounds), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(clip_gradient, (source, dy, *self._bounds), (dx,))
