"""NegSquare."""

from __future__ import annotations

from caffepy.backend import Array, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def negative_square(x: Each) -> Each:
    return -x * x


@expression
def negative_square_gradient(x: Each, dy: Each) -> Each:
    return -2 * x * dy


@register_layer("NegSquare")
class NegSquareLayer(ActivationLayer):
    """y = -x^2, dx = -2 x dy (LiteFlowNet's `negsquare_layer.cpp`, whose gradient is wrong)."""

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(negative_square, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(negative_square_gradient, (source, dy), (dx,))
