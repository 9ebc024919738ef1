"""Elementary functions of each element: Power, Exp, Log, AbsVal, BNLL, Clip, Swish, Threshold."""

from __future__ import annotations

import math
from math import exp, fabs, log, log1p

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.activation import ActivationLayer
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
    """base^exponent as C's pow: NaN and infinity instead of complex numbers and errors."""
    if exponent == 0:
        return 1.0
    if base == 0 and exponent < 0:
        return math.inf
    result = base**exponent
    return math.nan if isinstance(result, complex) else result


def _natural_log(layer: ActivationLayer, base: float) -> float:
    """log(base) for Exp and Log, where -1 stands for e."""
    if base == -1:
        return 1.0
    if base <= 0 or base == 1:
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
    """y = base^(shift + scale * x), base e if -1 (Caffe's `exp_layer.cpp`)."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.exp_param
        log_base = 0.0 if param.base == 1 else _natural_log(self, param.base)
        self._inner, self._outer = log_base * param.scale, math.exp(log_base * param.shift)

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
    """y = log_base(shift + scale * x), base e if -1 (Caffe's `log_layer.cpp`)."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.log_param
        self._settings = (1 / _natural_log(self, param.base), param.scale, param.shift)

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(logarithm, (x, *self._settings), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(logarithm_gradient, (source, dy, *self._settings), (dx,))


@expression
def absolute(x: Each) -> Each:
    return fabs(x)


@expression
def absolute_gradient(x: Each, dy: Each) -> Each:
    return dy if x > 0 else (-dy if x < 0 else 0.0)


@register_layer("AbsVal")
class AbsValLayer(ActivationLayer):
    """y = |x|; the gradient at 0 is 0."""

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(absolute, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(absolute_gradient, (source, dy), (dx,))


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


@expression
def clip(x: Each, low: Scalar, high: Scalar) -> Each:
    return low if x < low else (high if x > high else x)


@expression
def clip_gradient(x: Each, dy: Each, low: Scalar, high: Scalar) -> Each:
    return dy if x >= low and x <= high else 0.0


@register_layer("Clip")
class ClipLayer(ActivationLayer):
    """y = x held within [min, max]; the gradient passes where min <= x <= max."""

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


@expression
def above(x: Each, threshold: Scalar) -> Each:
    return 1.0 if x > threshold else 0.0


@register_layer("Threshold")
class ThresholdLayer(ActivationLayer):
    """y = 1 where x > threshold, 0 elsewhere; it has no gradient."""

    has_backward = False

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(above, (x, self.param.threshold_param.threshold), (y,))
