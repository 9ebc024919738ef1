"""ReLU6."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


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

    def reads_bottom(self) -> bool:
        return self.param.relu_param.negative_slope < 0

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(relu6, (x, self.param.relu_param.negative_slope), (y,))

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        self.backend.apply(relu6_gradient, (source, dy, self.param.relu_param.negative_slope), (dx,))
