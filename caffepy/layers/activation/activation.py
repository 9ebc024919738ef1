"""Activations: layers that map each element by itself (Caffe's `neuron_layer.hpp`)."""

from __future__ import annotations

from math import exp, tanh

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.buffer import Temporary
from caffepy.proto import caffe_pb2


class ActivationLayer(Layer):
    """A layer whose top has its bottom's shape and may be its bottom (in place).

    Subclasses write `activate` and `differentiate`. Where the gradient needs the bottom and the layer works in place,
    the bottom is kept in a buffer.
    """

    half = True
    keeps_labels = True

    _kept: Temporary | None = None

    def reads_bottom(self) -> bool:
        """Whether the gradient needs the bottom's data; if not, the top's are enough."""
        return False

    def activate(self, x: Array, y: Array) -> None:
        """Compute y from x; they may be one array."""
        raise NotImplementedError

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        """Compute dx from dy, maybe in place; `source` is the bottom's data if `reads_bottom`, else the top's."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)
        keep = bottom[0] is top[0] and self.reads_bottom()
        self._kept = self.temporary("kept", bottom[0].shape, self.dtype) if keep else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._kept is not None:
            self.backend.copy(bottom[0].data, self._kept.array)
        self.activate(bottom[0].data, top[0].data)
        if not self.reads_bottom():
            self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.differentiate(self.source(top, bottom), top[0].diff, bottom[0].diff)

    def source(self, top: Blobs, bottom: Blobs) -> Array:
        """What the gradient is computed from: the bottom's data, or the top's if they are enough."""
        if not self.reads_bottom():
            return self.saved_top(top)
        return bottom[0].data if self._kept is None else self._kept.array


@expression
def relu(x: Each, slope: Scalar) -> Each:
    return x if x > 0 else slope * x


@expression
def relu_gradient(source: Each, dy: Each, slope: Scalar) -> Each:
    return dy if source > 0 else slope * dy


@register_layer("ReLU")
class ReLULayer(ActivationLayer):
    """y = max(x, 0) + negative_slope * min(x, 0) (Caffe's `relu_layer.cpp`).

    For slopes >= 0 the top's sign is the bottom's, so the gradient needs the top alone. dx = dy where x > 0,
    negative_slope * dy elsewhere.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._slope = self.param.relu_param.negative_slope

    def reads_bottom(self) -> bool:
        return self._slope < 0

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(relu, (x, self._slope), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(relu_gradient, (source, dy, self._slope), (dx,))


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

    The parameter has shape (C,), or () if channel_shared; it starts at 0.25 unless `filler` says otherwise
    (Caffe's `prelu_layer.cpp`). dslope = sum of x * dy where x <= 0.
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
        # The slopes come first: in place, the bottom's diff overwrites the top's.
        if self.propagate_to_params[0]:
            inputs = (self.source(top, bottom), top[0].diff)
            output = self.blobs[0].diff
            self.backend.reduce(prelu_slope_gradient, inputs, (output,), accumulate=self.accumulate(0))
        super().backward(top, propagate_down, bottom)


@expression
def elu(x: Each, alpha: Scalar, scale: Scalar) -> Each:
    return scale * x if x > 0 else scale * alpha * (exp(x) - 1)


@expression
def elu_gradient(y: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if y > 0 else y + scale * alpha)


@expression
def elu_gradient_from_bottom(x: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if x > 0 else scale * alpha * exp(x))


@register_layer("ELU")
class ELULayer(ActivationLayer):
    """y = lambda * x where x > 0, lambda * alpha * (e^x - 1) elsewhere (Clevert, Unterthiner and Hochreiter 2015).

    `lambda` is NVIDIA Caffe's (1 in BVLC's). NVIDIA's gradient is off where it is not 1; this one is the derivative.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.elu_param
        self._alpha, self._scale = param.alpha, getattr(param, "lambda")

    def reads_bottom(self) -> bool:
        return self._alpha < 0 or self._scale <= 0

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(elu, (x, self._alpha, self._scale), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        formula = elu_gradient_from_bottom if self.reads_bottom() else elu_gradient
        self.backend.apply(formula, (source, dy, self._alpha, self._scale), (dx,))


@expression
def sigmoid(x: Each) -> Each:
    return 1 / (1 + exp(-x))


@expression
def sigmoid_gradient(y: Each, dy: Each) -> Each:
    return dy * y * (1 - y)


@register_layer("Sigmoid")
class SigmoidLayer(ActivationLayer):
    """y = 1 / (1 + e^-x); dx = dy * y * (1 - y)."""

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(sigmoid, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(sigmoid_gradient, (source, dy), (dx,))


@expression
def hyperbolic_tangent(x: Each) -> Each:
    return tanh(x)


@expression
def tanh_gradient(y: Each, dy: Each) -> Each:
    return dy * (1 - y * y)


@register_layer("TanH")
class TanHLayer(ActivationLayer):
    """y = tanh(x); dx = dy * (1 - y^2)."""

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(hyperbolic_tangent, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(tanh_gradient, (source, dy), (dx,))
