"""SeLU and its dropout."""

from __future__ import annotations

from math import exp

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.proto import caffe_pb2


@expression
def selu(x: Each, alpha: Scalar, scale: Scalar) -> Each:
    return scale * x if x > 0 else scale * alpha * (exp(x) - 1)


@expression
def selu_gradient(x: Each, dy: Each, alpha: Scalar, scale: Scalar) -> Each:
    return dy * (scale if x > 0 else scale * alpha * exp(x))


@expression
def replace(x: Each, chance: Each, ratio: Scalar, alpha: Scalar, factor: Scalar, term: Scalar) -> Each:
    return factor * (x if chance >= ratio else alpha) + term


@expression
def keep(dy: Each, chance: Each, ratio: Scalar, factor: Scalar) -> Each:
    return dy * factor if chance >= ratio else 0.0


@register_layer("SeLU")
@register_layer("SeLu")
class SeLULayer(ActivationLayer):
    """y = lambda * x where x > 0, lambda * alpha * (e^x - 1) elsewhere (`selu_layer.cpp` of synopsys-caffe).

    lambda and alpha of `selu_param` are by default those that keep mean 0 and variance 1 (Klambauer, Unterthiner, Mayr
    and Hochreiter 2017). dx is the derivative times dy.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.selu_param
        self._alpha, self._scale = param.alpha, getattr(param, "lambda")

    def reads_bottom(self) -> bool:
        return True

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(selu, (x, self._alpha, self._scale), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(selu_gradient, (source, dy, self._alpha, self._scale), (dx,))


@register_layer("SeLUDropout")
@register_layer("SeLuDropout")
class SeLUDropoutLayer(Layer):
    """In TRAIN y = a * x + b with probability q = 1 - dropout_ratio, else a * alpha + b. In TEST y = x.

    a = (q + alpha^2 q (1 - q))^-1/2 and b = -a (1 - q) alpha keep mean 0 and variance 1. dx = a * dy where x was kept,
    else 0. The random numbers are drawn as for Dropout (`selu_dropout_layer.cpp` of synopsys-caffe; Klambauer et al.
    2017).

    Raises:
        ConfigError: dropout_ratio is outside [0, 1).
    """

    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.selu_dropout_param
        if not 0 <= param.dropout_ratio < 1:
            raise self.error(f"dropout_ratio is {param.dropout_ratio:g}, but must be at least 0 and below 1")
        kept = 1 - param.dropout_ratio
        self._factor = (kept * (1 + param.alpha**2 * (1 - kept))) ** -0.5
        self._term = -self._factor * (1 - kept) * param.alpha
        self._training = self.context.phase == caffe_pb2.TRAIN

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)
        if self._training:
            self._chances = self.scratch("chances", bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, backend = self.param.selu_dropout_param, self.backend
        if self._training:
            backend.random_uniform(self._chances.array, self.random_stream(), self.counter())
            inputs = (self._chances.array, param.dropout_ratio, param.alpha, self._factor, self._term)
            backend.apply(replace, (bottom[0].data, *inputs), (top[0].data,))
        elif bottom[0] is not top[0]:
            backend.copy(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if self._training:
            inputs = (top[0].diff, self._chances.array, self.param.selu_dropout_param.dropout_ratio, self._factor)
            self.backend.apply(keep, inputs, (bottom[0].diff,))
        elif bottom[0] is not top[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)
