"""Activations: layers that map each element by itself (Caffe's `neuron_layer.hpp`)."""

from __future__ import annotations

from caffepy.backend import Each, Scalar, expression
from caffepy.layers.base import Blobs, Layer, register_layer


class ActivationLayer(Layer):
    """A layer whose top has its bottom's shape and may be its bottom (in place)."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The top takes the bottom's shape."""
        top[0].reshape(bottom[0].shape)


@expression
def relu(x: Each, slope: Scalar) -> Each:
    return x if x > 0 else slope * x


@expression
def relu_gradient(y: Each, dy: Each, slope: Scalar) -> Each:
    return dy if y > 0 else slope * dy


@register_layer("ReLU")
class ReLULayer(ActivationLayer):
    """y = max(x, 0) + negative_slope * min(x, 0) (Caffe's `relu_layer.cpp`).

    The gradient is taken from the sign of the top, which equals the bottom's for slopes >= 0, so it holds in place.
    """

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Apply the formula."""
        slope = self.param.relu_param.negative_slope
        self.backend.apply(relu, (bottom[0].data, slope), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """dx = dy where y > 0, negative_slope * dy elsewhere."""
        if propagate_down[0]:
            slope = self.param.relu_param.negative_slope
            self.backend.apply(relu_gradient, (top[0].data, top[0].diff, slope), (bottom[0].diff,))
