"""AbsVal."""

from __future__ import annotations

from math import fabs

from caffepy.backend import Array, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def absolute(x: Each) -> Each:
    return fabs(x)


@expression
def absolute_gradient(x: Each, dy: Each) -> Each:
    return dy if x > 0 else (-dy if x < 0 else 0.0)


@register_layer("AbsVal")
class AbsValLayer(ActivationLayer):
    """y = |x|. dx = sign(x) * dy, 0 at x = 0 (Caffe's `absval_layer.cpp`)."""

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(absolute, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(absolute_gradient, (source, dy), (dx,))
