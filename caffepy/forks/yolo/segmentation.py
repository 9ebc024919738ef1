"""YoloSeg, a loss of masks."""

from __future__ import annotations

from math import exp

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.formulas import identity
from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.loss import ElementLossLayer


@expression
def mask_difference(x: Each, target: Each, factor: Scalar) -> Each:
    return factor * (1 / (1 + exp(-x)) - target)


@expression
def weighted_mask_difference(x: Each, target: Each, sums: Channel, pixels: Scalar, factor: Scalar) -> Each:
    return factor * (2 - sums / (pixels - sums) if target > 0.5 else 1.0) * (1 / (1 + exp(-x)) - target)


@expression
def squared_share(difference: Each, factor: Scalar) -> Each:
    return difference * difference * factor


@register_layer("YoloSeg")
class YoloSegLayer(ElementLossLayer):
    """The gradient of a mask is d / N with d = object_scale (s - t), s = 1 / (1 + e^-x).

    As `yolo_seg.cpp` of MobileNet-YOLO. Shapes: x and t (N, C, H, W). The reported loss is the sum of d^2 / N, of which
    d / N is not the derivative. A third bottom (N, C) holds the number of a class's pixels w; d of pixels with t > 0.5
    is multiplied by 2 - w / (P - w), where w and the number of pixels P are sums over the batch.

    Raises:
        ShapeError: the counts differ.
    """

    bottoms = (2, 3)
    no_gradient_bottoms = frozenset({1, 2})

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(bottom[0].shape) < 2:
            raise self.shape_error("needs masks N C ...", bottom[0])
        if len(bottom) > 2 and bottom[2].count != bottom[0].shape[0] * bottom[0].shape[1]:
            raise self.shape_error("needs one number for each mask, N C", bottom[0], bottom[2])

    def _difference(self, bottom: Blobs, target: Array, factor: float, out: Array) -> None:
        """out = factor * d."""
        factor *= self.param.yolo_seg_param.object_scale
        if len(bottom) == 2:
            self.backend.apply(mask_difference, (bottom[0].data, target, factor), (out,))
            return
        images, channels = bottom[0].shape[:2]
        sums = self.scratch("sums", (channels,)).array
        self.backend.reduce(identity, (self.backend.reshaped(bottom[2].data, (images, channels)),), (sums,))
        pixels = bottom[0].count / max(channels, 1)
        self.backend.apply(weighted_mask_difference, (bottom[0].data, target, sums, pixels, factor), (out,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        difference = self.scratch("difference", bottom[0].shape).array
        self._difference(bottom, self._targets.load(bottom[1].data), 1.0, difference)
        self.backend.reduce(squared_share, (difference, 1 / max(bottom[0].shape[0], 1)), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            factor = self.weight() / max(bottom[0].shape[0], 1)
            self._difference(bottom, self._targets.target(bottom[1].data), factor, bottom[0].diff)
            self.apply_top_gradient(top, bottom[0].diff)
