"""Interp, Upsample and Unpooling: bilinear resizing, max unpooling, and nearest-neighbour upsampling."""

from __future__ import annotations

import math
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from caffepy.formats.proto.caffe_pb2 import UnpoolingParameter
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.loss import IndexCheck
from caffepy.layers.spatial_map import SpatialMap

Weights = tuple[NDArray[np.int64], NDArray[np.float32]]
"""For each element of the top along an axis the two elements of the bottom, (size, 2), and their weights."""


@register_layer("Interp")
class InterpLayer(Layer):
    """Bilinear resizing of x (N, C, H, W) with aligned corners (DeepLab's `interp_layer.cpp`).

    The top's size is `height` and `width`, or computed from the bottom's size: first (size - 1) / `shrink_factor` + 1,
    then size + (size - 1) * (`zoom_factor` - 1). Before that, negative `pad_beg` and `pad_end` crop rows and columns.
    With a second bottom, as in soeaver's caffe-model with `use_blob_size`, the top has that bottom's height and width.

    Raises:
        ConfigError: the size is missing or given twice, a factor is below 1, or a pad is above 0.
        ShapeError: a bottom does not have four axes, or cropping leaves no pixel.
    """

    bottoms = (1, 2)
    no_gradient_bottoms = frozenset({1})
    supports_half = True
    recordable = True

    _shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.interp_param
        if param.pad_beg > 0 or param.pad_end > 0:
            raise self.error("pad_beg and pad_end of interp_param may not be above 0: they crop rows and columns")
        sized, factors = ([param.HasField(f) for f in pair] for pair in (("height", "width"), _FACTORS))
        if any(sized) and not all(sized):
            raise self.error("height and width of interp_param are needed together")
        if param.use_blob_size and len(bottom) < 2:
            raise self.error("use_blob_size of interp_param needs a second bottom")
        if len(bottom) > 1:
            if any(sized) or any(factors):
                raise self.error("interp_param gives the size, and so does the second bottom; keep one of them")
            return
        if any(sized) == any(factors):
            raise self.error("give interp_param either height and width, or zoom_factor, shrink_factor or both")
        if min(param.zoom_factor, param.shrink_factor) < 1 or (any(sized) and min(param.height, param.width) < 1):
            raise self.error("sizes and factors of interp_param must be at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.interp_param, bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        cropped = tuple(size + param.pad_beg + param.pad_end for size in shape[2:])
        if min(cropped) < 1:
            raise self.shape_error("pad_beg and pad_end of interp_param leave nothing of the image", bottom[0])
        sizes: tuple[int, ...] = tuple(map(self._resized, cropped))
        if param.HasField("height"):
            sizes = (param.height, param.width)
        if len(bottom) > 1:
            if len(bottom[1].shape) != 4:
                raise self.shape_error("the second bottom must have four axes, (N, C, H, W)", bottom[1])
            sizes = bottom[1].shape[2:]
        top[0].reshape((*shape[:2], *sizes))
        if (shape, sizes) != self._shapes:
            self._shapes = shape, sizes
            self._map = self._make_map((shape[2], shape[3]), cropped, sizes)

    def _resized(self, size: int) -> int:
        param = self.param.interp_param
        size = (size - 1) // param.shrink_factor + 1
        return size + (size - 1) * (param.zoom_factor - 1)

    def _make_map(self, image: tuple[int, int], cropped: tuple[int, ...], sizes: tuple[int, ...]) -> SpatialMap:
        begin = -self.param.interp_param.pad_beg
        (rows, row_weights), (columns, column_weights) = map(_interpolation_weights, cropped, sizes)
        pixels = (rows + begin)[:, None, :, None] * image[1] + (columns + begin)[None, :, None, :]
        weights = row_weights[:, None, :, None] * column_weights[None, :, None, :]
        targets = np.broadcast_to(np.arange(sizes[0] * sizes[1]).reshape(*sizes, 1, 1), pixels.shape)
        used = weights != 0
        shape = (sizes[0] * sizes[1], image[0] * image[1])
        return SpatialMap(self.backend, shape, targets[used], pixels[used], weights[used])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._map.forward(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._map.backward(top[0].diff, bottom[0].diff)


_FACTORS = ("zoom_factor", "shrink_factor")


def _interpolation_weights(size: int, target: int) -> Weights:
    """Return the two neighbours of each target position along one axis and their weights, in float32 as DeepLab."""
    ratio = np.float32(size - 1) / np.float32(target - 1) if target > 1 else np.float32(0)
    position = ratio * np.arange(target, dtype=np.float32)
    first = np.minimum(position.astype(np.int64), size - 1)
    fraction = (position - first.astype(np.float32)).astype(np.float32)
    neighbours = np.stack([first, np.minimum(first + 1, size - 1)], 1)
    weights = np.stack([1 - fraction, fraction], 1)
    if size == target:
        weights = np.tile(np.array([1, 0], np.float32), (size, 1))
        neighbours[:, 0] = np.arange(size)
    return neighbours, weights


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

    size_settings: ClassVar[str] = "scale, pad_out_h, pad_out_w, upsample_h and upsample_w"
    """The settings or bottom that set the size of the top, for messages."""
    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check_settings(len(bottom) > 1)
        if len(bottom) > 1:
            self._check = IndexCheck(
                self,
                f"element {{}} of the mask '{bottom[1].title}' is outside of the top; set the pooled image's "
                f"size by {self.size_settings}",
            )

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


@register_layer("Unpooling")
class UnpoolingLayer(UpsampleLayer):
    """The inverse of pooling (DeconvNet's `unpooling_layer.cpp`; Noh et al. 2015).

    x is (N, C, H, W). With a second bottom, the mask that MAX pooling writes to its second top, y[n, c, mask] = x as in
    Upsample. Without it, pixel (h, w) of x goes to the window of `kernel_size` at (h, w) * `stride`: MAX sets the
    window's first pixel, AVE all of them to x / (their number in the window), TILE all of them to x. Where windows
    overlap, their values add up. The size of y is `unpool_size`, or max((H - 1) * stride + kernel_size, H * stride + 1)
    and the same with W. Pixels outside y are left out. (The fork divides TILE's gradient by the window's size; here it
    is the derivative.)

    Raises:
        ConfigError: a size is missing or given twice, pad is not 0, or a mask is given without MAX.
        ShapeError: the bottom does not have four axes, the mask has another shape, or a window begins outside y.
        DataError: an element of the mask is outside the top.
    """

    size_settings = "unpool_size"

    def _check_settings(self, masked: bool) -> None:
        param = self.param.unpooling_param
        self._kernel = self._pair("kernel_size", "kernel_h", "kernel_w")
        self._stride = self._pair("stride", "stride_h", "stride_w")
        sized = any(param.HasField(name) for name in ("unpool_size", "unpool_h", "unpool_w"))
        self._unpooled = self._pair("unpool_size", "unpool_h", "unpool_w") if sized else None
        if any((param.pad, param.pad_h, param.pad_w)):
            raise self.error("pad of unpooling_param must be 0, as in DeconvNet's Caffe; leave it out")
        if masked and param.unpool != UnpoolingParameter.MAX:
            raise self.error("only unpool: MAX reads a mask; leave out the second bottom")

    def _pair(self, both: str, height: str, width: str) -> tuple[int, int]:
        """A size of unpooling_param, rows first."""
        param = self.param.unpooling_param
        split = [param.HasField(height), param.HasField(width)]
        if any(split) and (not all(split) or param.HasField(both)):
            raise self.error(f"give unpooling_param either {both}, or {height} and {width}")
        names = (height, width) if any(split) else (both, both)
        found = (getattr(param, names[0]), getattr(param, names[1]))
        if min(found) < 1:
            raise self.error(f"{both} of unpooling_param must be at least 1")
        return found

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        if len(bottom) > 1 and bottom[1].shape != shape:
            raise self.shape_error("the mask must have the first bottom's shape", bottom[0], bottom[1])
        needed = [
            max((size - 1) * stride + kernel, size * stride + 1)
            for size, stride, kernel in zip(shape[2:], self._stride, self._kernel, strict=True)
        ]
        height, width = self._unpooled or needed
        if len(bottom) == 1 and (
            (shape[2] - 1) * self._stride[0] >= height or (shape[3] - 1) * self._stride[1] >= width
        ):
            raise self.shape_error(f"unpool_size {height} x {width} is too small for the windows", bottom[0])
        top[0].reshape((*shape[:2], height, width))
        self.check_top_memory(top)
        if len(bottom) == 1 and shape != self._shape:
            self._shape = shape
            self._map = self._window_map((shape[2], shape[3]), (height, width))

    def _window_map(self, image: tuple[int, int], sizes: tuple[int, int]) -> SpatialMap:
        """Pixels of the top in each pixel's window, with their weights."""
        method = self.param.unpooling_param.unpool
        kernel = (1, 1) if method == UnpoolingParameter.MAX else tuple(map(min, self._kernel, sizes))
        self.check_memory(64 * math.prod((*image, *kernel)), "the pixels of its windows")
        places = [
            np.arange(size)[:, None] * stride + np.arange(window)
            for size, stride, window in zip(image, self._stride, kernel, strict=True)
        ]
        inside = [place < size for place, size in zip(places, sizes, strict=True)]
        targets = places[0][:, None, :, None] * sizes[1] + places[1][None, :, None, :]
        used = inside[0][:, None, :, None] & inside[1][None, :, None, :]
        counts = used.sum(axis=(2, 3), keepdims=True) if method == UnpoolingParameter.AVE else np.ones((1, 1, 1, 1))
        sources = np.broadcast_to(np.arange(image[0] * image[1]).reshape(*image, 1, 1), used.shape)
        weights = np.broadcast_to(1 / np.maximum(counts, 1), used.shape)
        shape = (sizes[0] * sizes[1], image[0] * image[1])
        return SpatialMap(self.backend, shape, targets[used], sources[used], weights[used])
