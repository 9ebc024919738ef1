"""Layers of nets for phones: activations, which other forks have too, and convolutions of each channel by itself.

The activations are HardSwish, Mish, NegSquare, ReLU6, SeLU and its dropout. DepthwiseConvolution and
ConvolutionDepthwise are the convolutions.
"""

from __future__ import annotations

from math import exp, log1p, tanh

from caffepy.backend import Each, Scalar, expression
from caffepy.backend.formulas import drop, elu, elu_gradient_from_bottom
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.activation import ActivationLayer
from caffepy.layers.convolution import ConvolutionLayer
from caffepy.layers.layer import Blobs, Layer, register_layer


@expression
def hard_swish(x: Each) -> Each:
    return 0.0 if x < -3 else (x if x > 3 else x * (x + 3) / 6)


@expression
def hard_swish_gradient(x: Each, dy: Each) -> Each:
    return 0.0 if x < -3 else (dy if x > 3 else dy * (2 * x + 3) / 6)


@register_layer("HardSwish")
class HardSwishLayer(ActivationLayer):
    """y = x * min(max(x + 3, 0), 6) / 6 (Howard et al. 2019, MobileNetV3)."""

    formula, gradient, from_bottom = hard_swish, hard_swish_gradient, True


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

    formula, gradient, from_bottom = mish, mish_gradient, True


@expression
def negative_square(x: Each) -> Each:
    return -x * x


@expression
def negative_square_gradient(x: Each, dy: Each) -> Each:
    return -2 * x * dy


@register_layer("NegSquare")
class NegSquareLayer(ActivationLayer):
    """y = -x^2, dx = -2 x dy (LiteFlowNet's `negsquare_layer.cpp`, whose gradient is wrong)."""

    formula, gradient, from_bottom = negative_square, negative_square_gradient, True


@expression
def relu6(x: Each, slope: Scalar) -> Each:
    return slope * x if x < 0 else (6.0 if x > 6 else x)


@expression
def relu6_gradient(source: Each, dy: Each, slope: Scalar) -> Each:
    return slope * dy if source <= 0 else (0.0 if source >= 6 else dy)


@register_layer("ReLU6")
class ReLU6Layer(ActivationLayer):
    """y = min(max(x, 0), 6) + negative_slope * min(x, 0) (MobileNet's forks of Caffe); the slope is in `relu_param`.

    dx = dy where 0 < x < 6, negative_slope * dy where x <= 0, else 0. For slopes >= 0 the gradient needs only the top.
    """

    formula, gradient = relu6, relu6_gradient

    def numbers(self) -> tuple[float, ...]:
        return (self.param.relu_param.negative_slope,)

    def reads_bottom(self) -> bool:
        return self.param.relu_param.negative_slope < 0


@expression
def replace(x: Each, chance: Each, ratio: Scalar, alpha: Scalar, factor: Scalar, term: Scalar) -> Each:
    return factor * (x if chance >= ratio else alpha) + term


@register_layer("SeLU")
@register_layer("SeLu")
class SeLULayer(ActivationLayer):
    """y = lambda * x where x > 0, lambda * alpha * (e^x - 1) elsewhere (`selu_layer.cpp` of synopsys-caffe).

    The defaults of lambda and alpha in `selu_param` keep mean 0 and variance 1 (Klambauer, Unterthiner, Mayr and
    Hochreiter 2017). dx is the derivative times dy.
    """

    formula, gradient, from_bottom = elu, elu_gradient_from_bottom, True

    def numbers(self) -> tuple[float, ...]:
        return self.param.selu_param.alpha, getattr(self.param.selu_param, "lambda")


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
            self.backend.apply(drop, inputs, (bottom[0].diff,))
        elif bottom[0] is not top[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


# -- depthwise convolutions ----------------------------------------------------------------------------


@register_layer("DepthwiseConvolution")
class DepthwiseConvolutionLayer(ConvolutionLayer):
    """Convolution with `group` of the prototxt, under the name that MobileNet's forks of Caffe use."""


@register_layer("ConvolutionDepthwise")
class ConvolutionDepthwiseLayer(ConvolutionLayer):
    """Convolution with one group for each channel; the field `group` is ignored.

    Shapes: x and y (N, C, …), weights (C, 1, kernel…), bias (C,).

    Raises:
        ShapeError: num_output is not the number of channels.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.convolution_param
        channels = bottom[0].shape[bottom[0].axis(param.axis, self.where)]
        if param.num_output and param.num_output != channels:
            raise self.shape_error(
                f"num_output is {param.num_output}; a depthwise convolution has as many outputs as channels, "
                f"{channels}: leave it out or use Convolution with group",
                bottom[0],
            )
        depthwise = caffe_pb2.LayerParameter()
        depthwise.CopyFrom(self.param)
        depthwise.convolution_param.group = depthwise.convolution_param.num_output = channels
        self.param = depthwise
        super().setup(bottom, top)
