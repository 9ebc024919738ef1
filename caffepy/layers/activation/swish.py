"""Swish."""

from __future__ import annotations

from math import exp

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def swish(x: Each, beta: Scalar) -> Each:
    return x / (1 + exp(-beta * x))


@expression
def swish_gradient(x: Each, dy: Each, beta: Scalar) -> Each:
    gate = 1 / (1 + exp(-beta * x))
    return dy * gate * (1 + beta * x * (1 - gate))


@register_layer("Swish")
class SwishLayer(ActivationLayer):
    """y = x / (1 + e^(-beta x)) (Ramachandran, Zoph and Le 2017)."""

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(swish, (x, self.param.swish_param.beta), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(swish_gradient, (source, dy, self.param.swish_param.beta), (dx,))
