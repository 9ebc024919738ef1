"""HardSwish."""

from __future__ import annotations

from caffepy.backend import Array, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def hard_swish(x: Each) -> Each:
    return 0.0 if x < -3 else (x if x > 3 else x * (x + 3) / 6)


@expression
def hard_swish_gradient(x: Each, dy: Each) -> Each:
    return 0.0 if x < -3 else (dy if x > 3 else dy * (2 * x + 3) / 6)


@register_layer("HardSwish")
class HardSwishLayer(ActivationLayer):
    """y = x * min(max(x + 3, 0), 6) / 6 (Howard et al. 2019, MobileNetV3)."""

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(hard_swish, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(hard_swish_gradient, (source, dy), (dx,))
