"""Activations: layers that compute each value of the top from one value of the bottom (Caffe's `neuron_layer.hpp`).

Most are one formula and its gradient; PReLU has parameters, and Dropout draws a mask.
"""

from __future__ import annotations

import math
from math import exp, fabs, log, log1p, tanh

from caffepy.backend import Array, Channel, Each, Expression, RandomStream, Scalar, expression
from caffepy.backend.formulas import absolute, elu, elu_gradient_from_bottom, hyperbolic_tangent, scaled, tanh_gradient
from caffepy.backend.types import Counter
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, LayerContext, ScratchBuffer, register_layer


class ActivationLayer(Layer):
    """An elementwise layer. The top has the bottom's shape and may be the bottom (in place).

    Subclasses say `formula` and `gradient`, or define `activate` and `differentiate`. In place, a buffer saves the
    bottom if the gradient needs it.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    formula: Expression
    """y from x and the `numbers`."""
    gradient: Expression
    """dx from x or y, dy and the `numbers`."""
    from_bottom = False
    """Whether `gradient` takes x; if not, it takes y."""

    forward_with_bias: Expression | None = None
    """Formula of y from a product and the bias of its channel. InnerProduct applies it as the epilogue of the product;
    None: no fusion."""

    gradient_from_top: Expression | None = None
    """Formula of dx from y and dy, for a layer with `forward_with_bias`."""

    _saved_bottom: ScratchBuffer | None = None

    def numbers(self) -> tuple[float, ...]:
        """The settings that the formulas take."""
        return ()

    def reads_bottom(self) -> bool:
        """Whether the gradient is computed from the bottom's data; if not, from the top's."""
        return self.from_bottom

    def activate(self, x: Array, y: Array) -> None:
        """Compute y from x, which may be the same array."""
        self.backend.apply(self.formula, (x, *self.numbers()), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        """Compute dx from dy, which may be the same array.

        `source` is the bottom's data if `reads_bottom()`, else the top's.
        """
        self.backend.apply(self.gradient, (source, dy, *self.numbers()), (dx,))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)
        save = bottom[0] is top[0] and self.reads_bottom()
        self._saved_bottom = self.scratch("saved bottom", bottom[0].shape, self.dtype) if save else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._saved_bottom is not None and not self.context.forward_only:
            self.backend.copy(bottom[0].data, self._saved_bottom.array)
        self.activate(bottom[0].data, top[0].data)
        if not self.reads_bottom():
            self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.differentiate(self.source(top, bottom), top[0].diff, bottom[0].diff)

    def source(self, top: Blobs, bottom: Blobs) -> Array:
        """Return the data for `differentiate`: the bottom's if `reads_bottom()`, else the top's."""
        if not self.reads_bottom():
            return self.saved_top(top)
        return bottom[0].data if self._saved_bottom is None else self._saved_bottom.array


@expression
def absolute_gradient(x: Each, dy: Each) -> Each:
    return dy if x > 0 else (-dy if x < 0 else 0.0)


@register_layer("AbsVal")
class AbsValLayer(ActivationLayer):
    """y = |x|. dx = sign(x) * dy, 0 at x = 0 (Caffe's `absval_layer.cpp`)."""

    formula, gradient, from_bottom = absolute, absolute_gradient, True


@expression
def softplus(x: Each) -> Each:
    return max(x, 0.0) + log1p(exp(-fabs(x)))


@expression
def softplus_gradient(x: Each, dy: Each) -> Each:
    return dy / (1 + exp(-x))


@register_layer("BNLL")
class BNLLLayer(ActivationLayer):
    """y = log(1 + e^x), the binomial normal log likelihood (Caffe's `bnll_layer.cpp`)."""

    formula, gradient, from_bottom = softplus, softplus_gradient, True


@expression
def clip(x: Each, low: Scalar, high: Scalar) -> Each:
    return low if x < low else (high if x > high else x)


@expression
def clip_gradient(x: Each, dy: Each, low: Scalar, high: Scalar) -> Each:
    return dy if x >= low and x <= high else 0.0


@register_layer("Clip")
class ClipLayer(ActivationLayer):
    """y = min(max(x, `min`), `max`). dx = dy where `min` <= x <= `max`, else 0 (Caffe's `clip_layer.cpp`).

    Raises:
        ConfigError: `min` is above `max`.
    """

    formula, gradient, from_bottom = clip, clip_gradient, True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        low, high = self.numbers()
        if low > high:
            raise self.error(f"clip_param has min {low:g} above max {high:g}")

    def numbers(self) -> tuple[float, ...]:
        return self.param.clip_param.min, self.param.clip_param.max


@expression
def elu_gradient(y: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if y > 0 else y + scale * alpha)


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

    formula = elu

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.elu_param
        self._alpha, self._scale = param.alpha, getattr(param, "lambda")

    def numbers(self) -> tuple[float, ...]:
        return self._alpha, self._scale

    def reads_bottom(self) -> bool:
        return self._alpha < 0 or self._scale <= 0

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        from_bottom, from_top = elu_gradient_from_bottom, elu_gradient
        if self.context.nvidia:
            from_bottom, from_top = nvidia_gradient_from_bottom, nvidia_gradient
        formula = from_bottom if self.reads_bottom() else from_top
        self.backend.apply(formula, (source, dy, *self.numbers()), (dx,))


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

    formula, gradient, from_bottom = logarithm, logarithm_gradient, True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.log_param
        self._numbers = (1 / _natural_log(self, param.base), param.scale, param.shift)

    def numbers(self) -> tuple[float, ...]:
        return self._numbers


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


@expression
def prelu(x: Each, slope: Channel) -> Each:
    return x if x > 0 else slope * x


@expression
def prelu_gradient(x: Each, dy: Each, slope: Channel) -> Each:
    return dy if x > 0 else slope * dy


@expression
def prelu_slope_gradient(x: Each, dy: Each) -> Each:
    return 0.0 if x > 0 else x * dy


@register_layer("PReLU")
class PReLULayer(ActivationLayer):
    """y = max(x, 0) + slope_c * min(x, 0) with learned slopes (He, Zhang, Ren and Sun 2015).

    x is (N, C, ...). The parameter has shape (C,), or () with `channel_shared`. `filler` initialises it, by default to
    0.25. dslope = sum of x * dy where x <= 0 (Caffe's `prelu_layer.cpp`).

    Raises:
        ShapeError: the bottom has fewer than two axes, or C differs from the number of slopes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._check(bottom)
        param = self.param.prelu_param
        default = caffe_pb2.FillerParameter(type="constant", value=0.25)
        shape = () if param.channel_shared else (bottom[0].shape[1],)
        self.add_parameter(shape, param.filler if param.HasField("filler") else default)

    def _check(self, bottom: Blobs) -> None:
        if len(bottom[0].shape) < 2:
            raise self.shape_error("the bottom needs at least two axes, (N, C, ...)", bottom[0])

    def reads_bottom(self) -> bool:
        return True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._check(bottom)
        slopes = self.blobs[0]
        if slopes.shape not in ((), bottom[0].shape[1:2]):
            raise self.shape_error("the bottom needs one channel for each slope", bottom[0], slopes)
        super().reshape(bottom, top)

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(prelu, (x, self.blobs[0].data), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(prelu_gradient, (source, dy, self.blobs[0].data), (dx,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        # The slopes' gradient comes first: in place, the bottom's diff overwrites the top's.
        if self.propagate_to_params[0]:
            inputs = (self.source(top, bottom), top[0].diff)
            output = self.blobs[0].diff
            self.backend.reduce(prelu_slope_gradient, inputs, (output,), accumulate=self.accumulate(0))
        super().backward(top, propagate_down, bottom)


@expression
def relu(x: Each, slope: Scalar) -> Each:
    return x if x > 0 else slope * x


@expression
def relu_gradient(source: Each, dy: Each, slope: Scalar) -> Each:
    return dy if source > 0 else slope * dy


@register_layer("ReLU")
class ReLULayer(ActivationLayer):
    """y = max(x, 0) + negative_slope * min(x, 0) (Caffe's `relu_layer.cpp`).

    dx = dy where x > 0, else negative_slope * dy. For slopes >= 0 the top has the bottom's sign, so that the gradient
    needs only the top.
    """

    formula, gradient = relu, relu_gradient

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._slope = self.param.relu_param.negative_slope

    def numbers(self) -> tuple[float, ...]:
        return (self._slope,)

    def reads_bottom(self) -> bool:
        return self._slope < 0


@expression
def sigmoid(x: Each) -> Each:
    return 1 / (1 + exp(-x))


@expression
def sigmoid_with_channel(x: Each, bias: Channel) -> Each:
    return 1 / (1 + exp(-(x + bias)))


@expression
def sigmoid_gradient(y: Each, dy: Each) -> Each:
    return dy * y * (1 - y)


@register_layer("Sigmoid")
class SigmoidLayer(ActivationLayer):
    """y = 1 / (1 + e^-x). dx = dy * y * (1 - y) (Caffe's `sigmoid_layer.cpp`)."""

    formula, gradient = sigmoid, sigmoid_gradient
    forward_with_bias, gradient_from_top = sigmoid_with_channel, sigmoid_gradient


@expression
def tanh_with_channel(x: Each, bias: Channel) -> Each:
    return tanh(x + bias)


@register_layer("TanH")
class TanHLayer(ActivationLayer):
    """y = tanh(x). dx = dy * (1 - y^2) (Caffe's `tanh_layer.cpp`)."""

    formula, gradient = hyperbolic_tangent, tanh_gradient
    forward_with_bias, gradient_from_top = tanh_with_channel, tanh_gradient


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

    formula, gradient, from_bottom = swish, swish_gradient, True

    def numbers(self) -> tuple[float, ...]:
        return (self.param.swish_param.beta,)


@expression
def above(x: Each, threshold: Scalar) -> Each:
    return 1.0 if x > threshold else 0.0


@register_layer("Threshold")
class ThresholdLayer(ActivationLayer):
    """y = 1 where x > threshold, else 0. It has no gradient (Caffe's `threshold_layer.cpp`)."""

    formula, has_backward = above, False

    def numbers(self) -> tuple[float, ...]:
        return (self.param.threshold_param.threshold,)


@register_layer("Dropout")
class DropoutLayer(Layer):
    """In TRAIN y = x / (1 - dropout_ratio) with probability 1 - dropout_ratio, else 0. In TEST y = x.

    With `scale_train: false` y = x or 0 in TRAIN and y = (1 - dropout_ratio) x in TEST (Fast R-CNN's
    `dropout_layer.cpp`). With Bayesian SegNet's `sample_weights_test` TEST drops values as TRAIN does
    (`dropout_layer.cpp` of caffe-segnet).

    The mask depends on the seed, the layer's name, the pass and the global number of the sample. It does not depend on
    the number of devices. Srivastava et al. 2014; scaled in training as Caffe's `dropout_layer.cpp`.

    Raises:
        ConfigError: dropout_ratio is outside [0, 1).
    """

    supports_half = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.dropout_param
        if not 0 <= param.dropout_ratio < 1:
            raise self.error(f"dropout_ratio is {param.dropout_ratio:g}, but must be at least 0 and below 1")
        self._ratio = param.dropout_ratio
        self._kept = 1.0 if param.scale_train else 1 - param.dropout_ratio
        self._training = self.context.phase == caffe_pb2.TRAIN or param.sample_weights_test
        if param.sample_weights_test:
            self.recordable = False  # type: ignore[misc] # each pass draws other numbers
        self._counter: Counter = (0, 0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._training:
            self._counter = self.counter()
        self._drop(bottom[0].data, top[0].data)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In a TEST that draws numbers: these follow the number of passes, which is another on each device."""
        return context.phase == caffe_pb2.TEST and param.dropout_param.sample_weights_test

    def _stream(self) -> RandomStream:
        """Return the random stream. Called in each pass: restoring a snapshot may change the seed."""
        stream, seed = self.random_stream(), self.param.dropout_param.random_seed
        return RandomStream(seed, stream.stream) if seed >= 0 else stream

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """dx = dy / (1 - dropout_ratio) where the mask kept the element, else 0; without the divisor as `forward`."""
        if propagate_down[0]:
            self._drop(top[0].diff, bottom[0].diff)

    def _drop(self, source: Array, destination: Array) -> None:
        if self._training:
            self.backend.dropout(source, destination, self._ratio, self._stream(), self._counter)
            source = destination
        if self._kept != 1:
            self.backend.apply(scaled, (source, self._kept), (destination,))
        elif source is not destination:
            self.backend.copy(source, destination)
