"""Power."""

from __future__ import annotations

import math

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import scaled


@expression
def linear(x: Each, scale: Scalar, shift: Scalar) -> Each:
    return scale * x + shift


@expression
def square(x: Each, scale: Scalar, shift: Scalar) -> Each:
    base = scale * x + shift
    return base * base


@expression
def square_gradient(x: Each, dy: Each, factor: Scalar, scale: Scalar, shift: Scalar) -> Each:
    return factor * dy * (scale * x + shift)


@expression
def power(x: Each, exponent: Scalar, scale: Scalar, shift: Scalar) -> Each:
    return (scale * x + shift) ** exponent


@expression
def power_gradient(x: Each, dy: Each, factor: Scalar, exponent: Scalar, scale: Scalar, shift: Scalar) -> Each:
    return factor * dy * (scale * x + shift) ** (exponent - 1)


@register_layer("Power")
class PowerLayer(ActivationLayer):
    """y = (shift + scale * x)^power (Caffe's `power_layer.cpp`)."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.power_param
        self._power, self._scale, self._shift = param.power, param.scale, param.shift

    def reads_bottom(self) -> bool:
        return self._power not in (0, 1) and self._scale != 0

    def activate(self, x: Array, y: Array) -> None:
        if self._power == 0 or self._scale == 0:
            self.backend.fill(y, _real_power(self._shift, self._power))
        elif self._power in (1, 2):
            self.backend.apply(linear if self._power == 1 else square, (x, self._scale, self._shift), (y,))
        else:
            self.backend.apply(power, (x, self._power, self._scale, self._shift), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        factor = self._power * self._scale
        if factor == 0:
            self.backend.fill(dx, 0)
        elif self._power == 1:
            self.backend.apply(scaled, (dy, factor), (dx,))
        elif self._power == 2:
            self.backend.apply(square_gradient, (source, dy, factor, self._scale, self._shift), (dx,))
        else:
            inputs = (source, dy, factor, self._power, self._scale, self._shift)
            self.backend.apply(power_gradient, inputs, (dx,))


def _real_power(base: float, exponent: float) -> float:
    """Return base^exponent as C's pow does: NaN or infinity in place of complex numbers and exceptions."""
    if exponent == 0:
        return 1.0
    if base == 0 and exponent < 0:
        return math.inf
    try:
        result = base**exponent
    except OverflowError:
        return math.inf if base > 0 or exponent % 2 == 0 else -math.inf
    return math.nan if isinstance(result, complex) else result
