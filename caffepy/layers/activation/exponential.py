"""Exp and Log."""

from __future__ import annotations

import math
from math import exp, log

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, register_layer

LARGEST_EXPONENT = 700.0
"""e^700 is near the largest double-precision number."""


def _natural_log(layer: ActivationLayer, base: float) -> float:
    """Return log(base) for Exp and Log; a base of -1 stands for e."""
    if base == -1:
        return 1.0
    if not 0 < base < math.inf or base == 1:
        raise layer.error(f"base is {base:g}, but must be positive and not 1, or -1 for e")
    return math.log(base)


@expression
def exponential(x: Each, inner: Scalar, outer: Scalar) -> Each:
    return outer * exp(inner * x)


@expression
def exponential_gradient(y: Each, dy: Each, inner: Scalar) -> Each:
    return dy * y * inner


@register_layer("Exp")
class ExpLayer(ActivationLayer):
    """y = base^(shift + scale * x); a base of -1 stands for e (Caffe's `exp_layer.cpp`).

    Raises:
        ConfigError: the base is 0, negative or infinite, or the result overflows for x = 0.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.exp_param
        log_base = 0.0 if param.base == 1 else _natural_log(self, param.base)
        self._inner, exponent = log_base * param.scale, log_base * param.shift
        if not (math.isfinite(self._inner) and abs(exponent) <= LARGEST_EXPONENT):
            raise self.error(
                f"base {param.base:g}, scale {param.scale:g} and shift {param.shift:g} overflow double precision"
            )
        self._outer = math.exp(exponent)

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(exponential, (x, self._inner, self._outer), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(exponential_gradient, (source, dy, self._inner), (dx,))


@expression
def logarithm(x: Each, factor: Scalar, scale: Scalar, shift: Scalar) -> Each:
    return factor * log(scale * x + shift)


@expression
def logarithm_gradient(x: Each, dy: Each, factor: Scalar, scale: Scalar, shift: Scalar) -> Each:
    return dy * factor * scale / (scale * x + shift)


@register_layer("Log")
class LogLayer(ActivationLayer):
    """y = log_base(shift + scale * x); a base of -1 stands for e (Caffe's `log_layer.cpp`).

    Raises:
        ConfigError: the base is 0, 1, negative or infinite.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.log_param
        self._settings = (1 / _natural_log(self, param.base), param.scale, param.shift)

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(logarithm, (x, *self._settings), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(logarithm_gradient, (source, dy, *self._settings), (dx,))
