"""SegmentationEvaluate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import opencv
from caffepy.layers.core.base import Blobs, Layer, register_layer

_BYTE = 255


@register_layer("SegmentationEvaluate")
class SegmentationEvaluateLayer(Layer):
    """Overlaps of the masks of a batch's first image (`segmentation_evaluate_layer.cpp` of MobileNet-YOLO).

    Shapes: predictions (N, C, H, W) and masks (N, C, H', W') with values from 0 to 1, top (1, 1, 1, C) with
    intersection over union. A pixel belongs to a mask if its value exceeds `threshold`. Predictions of another size are
    resized as bytes with OpenCV's bilinear interpolation; a class without pixels in the mask then has -1, unless
    predictions match. Computed on the host.

    Raises:
        ShapeError: the bottoms differ in C.
    """

    bottoms = (2, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [blob.shape for blob in bottom]
        if any(len(shape) != 4 or not shape[0] for shape in shapes) or shapes[0][1] != shapes[1][1]:
            raise self.shape_error("needs predictions N C H W and masks of as many channels", *bottom)
        top[0].reshape((1, 1, 1, shapes[1][1]))

    def capture_blocker(self) -> str:
        return "it compares masks on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        predictions, masks = (self.backend.to_host(blob.data) for blob in bottom)
        result = np.zeros(top[0].shape, np.float32)
        if self.backend.holds_values:
            for channel, (predicted, mask) in enumerate(zip(predictions[0], masks[0], strict=True)):
                result[0, 0, 0, channel] = self._overlap(predicted, mask)
        self.backend.from_host(result, top[0].data)

    def _overlap(self, predicted: NDArray[np.float32], mask: NDArray[np.float32]) -> float:
        threshold = self.param.segmentation_evaluate_param.threshold
        resized = predicted.shape != mask.shape
        if resized:
            image = np.nan_to_num(predicted * np.float32(_BYTE)).astype(np.int64).astype(np.uint8)
            found = opencv().resize(image, mask.shape[::-1]) > int(threshold * _BYTE)
        else:
            found = predicted > np.float32(threshold)
        wanted = mask > np.float32(threshold)
        shared = int((found & wanted).sum())
        if shared:
            return shared / (int(found.sum()) + int(wanted.sum()) - shared)
        return -1.0 if resized and not wanted.any() else 0.0
