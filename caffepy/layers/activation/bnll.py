"""BNLL."""

from __future__ import annotations

from math import exp, fabs, log1p

from caffepy.backend import Array, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def softplus(x: Each) -> Each:
    return max(x, 0.0) + log1p(exp(-fabs(x)))


@expression
def softplus_gradient(x: Each, dy: Each) -> Each:
    return dy / (1 + exp(-x))


@register_layer("BNLL")
class BNLLLayer(ActivationLayer):
    """y = log(1 + e^x), the binomial normal log likelihood (Caffe's `bnll_layer.cpp`)."""

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(softplus, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(softplus_gradient, (source, dy), (dx,))
