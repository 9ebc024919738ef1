"""Upsample: max unpooling, or nearest-neighbour upsampling."""

from __future__ import annotations

import numpy as np

from caffepy.layers.labels import IndexCheck
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.spatial_map import SpatialMap


@register_layer("Upsample")
class UpsampleLayer(Layer):
    """Max unpooling with a mask (SegNet's `upsample_layer.cpp`), or repetition of pixels (YOLO's forks of Caffe).

    x is (N, C, H, W). With a second bottom, the mask that MAX pooling writes to its second top, y[n, c, mask] = x and
    the other pixels are 0; of two values for one pixel the later one wins. The size of y is `upsample_h` and
    `upsample_w`, or H * `scale_h` - pad_out_h and W * `scale_w` - pad_out_w; `scale`, by default 2, sets both factors.
    As in SegNet, `upsample_h` and `upsample_w` hold where `scale` is given too.
    Without a mask, each pixel becomes `scale` x `scale` pixels.

    Raises:
        ConfigError: the size is given twice or in part, a factor is below 1, or a setting needs a mask.
        ShapeError: the bottom does not have four axes, or the mask has another shape.
        DataError: an element of the mask is outside the top.
    """

    recordable = True
    bottoms = (1, 2)
    exact_bottoms = frozenset({1})

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check_settings(len(bottom) > 1)
        if len(bottom) > 1:
            self._check = IndexCheck(
                self, f"element {{}} of the mask '{bottom[1].title}' is outside of the top; set the pooled image's "
                "size by scale, pad_out_h, pad_out_w, upsample_h and upsample_w"
            )  # fmt: skip

    def _check_settings(self, masked: bool) -> None:
        param = self.param.upsample_param
        for pair in (("scale_h", "scale_w"), ("upsample_h", "upsample_w")):
            if param.HasField(pair[0]) != param.HasField(pair[1]):
                raise self.error(f"{pair[0]} and {pair[1]} of upsample_param are needed together")
        sizes = [name for name in ("scale", "scale_h", "upsample_h") if param.HasField(name)]
        if len(sizes) > 1 and sizes != ["scale", "upsample_h"]:
            raise self.error(f"upsample_param has both {sizes[0]} and {sizes[1]}; keep one of them")
        if not masked and (param.pad_out_h or param.pad_out_w or param.HasField("upsample_h")):
            raise self.error("pad_out_h, pad_out_w, upsample_h and upsample_w of upsample_param need a mask")
        if any(getattr(param, name) < 1 for name in ("scale", "scale_h", "scale_w") if param.HasField(name)):
            raise self.error("factors of upsample_param must be at least 1")

    def _factors(self, masked: bool) -> tuple[int, int]:
        param = self.param.upsample_param
        if param.HasField("scale_h"):
            return param.scale_h, param.scale_w
        both = param.scale if param.HasField("scale") else (2 if masked else 1)
        return both, both

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.upsample_param, bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        if len(bottom) > 1 and bottom[1].shape != shape:
            raise self.shape_error("the mask must have the first bottom's shape", bottom[0], bottom[1])
        factors = self._factors(len(bottom) > 1)
        sizes = (shape[2] * factors[0] - param.pad_out_h, shape[3] * factors[1] - param.pad_out_w)
        if param.HasField("upsample_h"):
            sizes = (param.upsample_h, param.upsample_w)
        top[0].reshape((*shape[:2], *sizes))
        if len(bottom) == 1 and shape != self._shape:
            self._shape = shape
            rows, columns = np.indices(sizes)
            pixels = rows // factors[0] * shape[3] + columns // factors[1]
            count = sizes[0] * sizes[1]
            self._map = SpatialMap(self.backend, (count, shape[2] * shape[3]), np.arange(count), pixels)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom) > 1:
            self.backend.unpool_forward(bottom[0].data, bottom[1].data, top[0].data, self._check.bad_index)
        else:
            self._map.forward(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[-1] and len(bottom) > 1:
            self.backend.fill(bottom[1].diff, 0)
        if not propagate_down[0]:
            return
        if len(bottom) > 1:
            self.backend.unpool_backward(top[0].diff, bottom[1].data, bottom[0].diff)
        else:
            self._map.backward(top[0].diff, bottom[0].diff)

    def raise_device_errors(self) -> None:
        if len(self.param.bottom) > 1:
            self._check.raise_device_errors()
