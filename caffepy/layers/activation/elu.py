"""ELU."""

from __future__ import annotations

from math import exp

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, register_layer


@expression
def elu(x: Each, alpha: Scalar, scale: Scalar) -> Each:
    return scale * x if x > 0 else scale * alpha * (exp(x) - 1)


@expression
def elu_gradient(y: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if y > 0 else y + scale * alpha)


@expression
def elu_gradient_from_bottom(x: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if x > 0 else scale * alpha * exp(x))


@expression
def nvidia_gradient(y: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return scale * dy * (1.0 if y > 0 else alpha + y)


@expression
def nvidia_gradient_from_bottom(x: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return scale * dy * (1.0 if x > 0 else alpha + scale * alpha * (exp(x) - 1))


@register_layer("ELU")
class ELULayer(ActivationLayer):
    """y = lambda * x where x > 0, lambda * alpha * (e^x - 1) elsewhere (Clevert, Unterthiner and Hochreiter 2015).

    BVLC Caffe has no `lambda` (1). In BVLC's dialect dx is the derivative times dy. In NVIDIA's dialect
    dx = lambda * dy * (alpha + y) where x <= 0 (`elu_layer.cpp`), which is the derivative for lambda 1 only.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.elu_param
        self._alpha, self._scale = param.alpha, getattr(param, "lambda")

    def reads_bottom(self) -> bool:
        return self._alpha < 0 or self._scale <= 0

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(elu, (x, self._alpha, self._scale), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        from_bottom, from_top = elu_gradient_from_bottom, elu_gradient
        if self.context.nvidia:
            from_bottom, from_top = nvidia_gradient_from_bottom, nvidia_gradient
        formula = from_bottom if self.reads_bottom() else from_top
        self.backend.apply(formula, (source, dy, self._alpha, self._scale), (dx,))
