"""Sigmoid and TanH."""

from __future__ import annotations

from math import exp, tanh

from caffepy.backend import Array, Channel, Each, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer
from caffepy.layers.core.formulas import hyperbolic_tangent, tanh_gradient


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

    forward_with_bias = sigmoid_with_channel
    gradient_from_top = sigmoid_gradient

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(sigmoid, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(sigmoid_gradient, (source, dy), (dx,))


@expression
def tanh_with_channel(x: Each, bias: Channel) -> Each:
    return tanh(x + bias)


@register_layer("TanH")
class TanHLayer(ActivationLayer):
    """y = tanh(x). dx = dy * (1 - y^2) (Caffe's `tanh_layer.cpp`)."""

    forward_with_bias = tanh_with_channel
    gradient_from_top = tanh_gradient

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(hyperbolic_tangent, (x,), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(tanh_gradient, (source, dy), (dx,))
