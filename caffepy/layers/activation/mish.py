"""Mish."""

from __future__ import annotations

from math import exp, log1p, tanh

from caffepy.backend import Array, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def mish(x: Each) -> Each:
    return x * tanh(log1p(exp(x)))


@expression
def mish_gradient(x: Each, dy: Each) -> Each:
    return dy * (tanh(log1p(exp(x))) + x * (1 - tanh(log1p(exp(x))) * tanh(log1p(exp(x)))) / (1 + exp(-x)))


@register_layer("Mish")
class MishLayer(ActivationLayer):
    """y = x * t with t = tanh(log(1 + e^x)) (`mish_layer.cpp` of Synopsys Caffe; Misra 2019).

    dx = dy * (t + x * (1 - t^2) / (1 + e^-x)).
    """

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(mish, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(mish_gradient, (source, dy), (dx,))
