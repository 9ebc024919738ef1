"""EuclideanLoss."""

from __future__ import annotations

from caffepy.backend import Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.loss.base import ElementLossLayer


@expression
def squared_difference(a: Each, b: Each, factor: Scalar) -> Each:
    return (a - b) * (a - b) * factor


@expression
def difference(a: Each, b: Each, factor: Scalar) -> Each:
    return (a - b) * factor


@register_layer("EuclideanLoss")
class EuclideanLossLayer(ElementLossLayer):
    """loss = sum of (a - b)^2 / (2 N) (Caffe's `euclidean_loss_layer.cpp`).

    da = (a - b) * loss weight / N, db = -da.
    """

    no_gradient_bottoms = frozenset()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, b = bottom[0].data, self._targets.load(bottom[1].data)
        factor = 0.5 / max(bottom[0].shape[0], 1)
        self.backend.reduce(squared_difference, (a, b, factor), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        a, b = bottom[0].data, self._targets.target(bottom[1].data)
        factor = self.weight() / max(bottom[0].shape[0], 1)
        if propagate_down[0]:
            self.backend.apply(difference, (a, b, factor), (bottom[0].diff,))
            self.apply_top_gradient(top, bottom[0].diff)
        if propagate_down[1]:
            db = self._target_diffs.target(bottom[1].diff)
            self.backend.apply(difference, (a, b, -factor), (db,))
            self.apply_top_gradient(top, db)
            self._target_diffs.store(bottom[1].diff)
