"""ReLU."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import Blobs, register_layer


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

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._slope = self.param.relu_param.negative_slope

    def reads_bottom(self) -> bool:
        return self._slope < 0

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(relu, (x, self._slope), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(relu_gradient, (source, dy, self._slope), (dx,))
