"""Threshold."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.activation.base import ActivationLayer
from caffepy.layers.core.base import register_layer


@expression
def above(x: Each, threshold: Scalar) -> Each:
    return 1.0 if x > threshold else 0.0


@register_layer("Threshold")
class ThresholdLayer(ActivationLayer):
    """y = 1 where x > threshold, else 0. It has no gradient (Caffe's `threshold_layer.cpp`)."""

    has_backward = False

    def activate(self, x: Array, y: Array) -> None:
        self.backend.apply(above, (x, self.param.threshold_param.threshold), (y,))
