"""ContrastiveLoss."""

from __future__ import annotations

from math import fabs, sqrt

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.loss.base import LossLayer

MIN_DISTANCE = 1e-4
"""Added to a distance before a division by it, as in Caffe."""


@expression
def squared_difference(a: Each, b: Each) -> Each:
    return (a - b) * (a - b)


@expression
def pair_loss(square: Each, similar: Each, margin: Scalar, factor: Scalar) -> Each:
    rest = max(margin - sqrt(square), 0.0)
    return factor * (square if fabs(similar) >= 1 else rest * rest)


@expression
def legacy_pair_loss(square: Each, similar: Each, margin: Scalar, factor: Scalar) -> Each:
    return factor * (square if fabs(similar) >= 1 else max(margin - square, 0.0))


@expression
def pair_slope(square: Each, similar: Each, margin: Scalar) -> Each:
    distance = sqrt(square)
    rest = max(margin - distance, 0.0)
    return 1.0 if fabs(similar) >= 1 else -rest / (distance + MIN_DISTANCE)


@expression
def legacy_pair_slope(square: Each, similar: Each, margin: Scalar) -> Each:
    return 1.0 if fabs(similar) >= 1 else (-1.0 if square < margin else 0.0)


@expression
def pair_gradient(a: Each, b: Each, slope: Channel, factor: Scalar) -> Each:
    return (a - b) * slope * factor


@register_layer("ContrastiveLoss")
class ContrastiveLossLayer(LossLayer):
    """loss = sum of (similar ? d^2 : max(margin - d, 0)^2) / (2 N), d = |a - b| (Hadsell, Chopra and LeCun 2006).

    Shapes: a and b (N, C), similar (N,): 1, or 0 for dissimilar pairs. With `legacy_version` dissimilar pairs have the
    loss max(margin - d^2, 0). The gradient divides by d + 1e-4 (Caffe's `contrastive_loss_layer.cpp`).

    Raises:
        ShapeError: the bottoms are not (N, C), (N, C) and (N,).
    """

    bottoms = (3, 3)
    no_gradient_bottoms = frozenset({2})

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        a, b, similar = bottom
        if a.count != b.count or len(a.shape) < 2 or a.count != a.shape[0] * a.shape[1]:
            raise self.shape_error("the first two bottoms must both be (N, C)", a, b)
        if similar.count != a.shape[0]:
            raise self.shape_error("the third bottom must have one number for each pair", similar, a)
        self._squares = self.scratch("squares", (a.shape[0],))
        self._slopes = self.scratch("slopes", (a.shape[0],))

    def _inputs(self, bottom: Blobs) -> tuple[Array, Array, Array]:
        """Return a and b as (N, C), similar as (N,)."""
        samples, width = bottom[0].shape[:2]
        a, b = (self.backend.flat(blob.data).reshape(samples, width) for blob in bottom[:2])
        return a, b, self.backend.flat(bottom[2].data).reshape(samples)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.contrastive_loss_param
        a, b, similar = self._inputs(bottom)
        squares = self._squares.array
        self.backend.reduce(squared_difference, (a, b), (squares,), 0)
        formula = legacy_pair_loss if param.legacy_version else pair_loss
        self.backend.reduce(formula, (squares, similar, param.margin, 0.5 / max(bottom[0].shape[0], 1)), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not any(propagate_down[:2]):
            return
        param = self.param.contrastive_loss_param
        a, b, similar = self._inputs(bottom)
        formula = legacy_pair_slope if param.legacy_version else pair_slope
        self.backend.apply(formula, (self._squares.array, similar, param.margin), (self._slopes.array,))
        for blob, needs_gradient, sign in zip(bottom, propagate_down[:2], (1, -1), strict=False):
            if needs_gradient:
                dx = self.backend.flat(blob.diff).reshape(a.shape)
                factor = sign * self.weight() / max(bottom[0].shape[0], 1)
                self.backend.apply(pair_gradient, (a, b, self._slopes.array, factor), (dx,), 0)
                self.apply_top_gradient(top, dx)
