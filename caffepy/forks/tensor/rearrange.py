"""Layers that move elements without arithmetic: from Transpose, Reverse and Flip to ShuffleChannel, Gather and Scatter.

CropCenter cuts both ends of axes. Reorg and PixelShuffle exchange channels and pixels. Gather and Scatter take elements
of an axis, or join and divide a batch among devices.
"""

from __future__ import annotations

import math
from typing import ClassVar

from caffepy.backend import Array
from caffepy.layers.layer import Blobs, LayoutAdapter, register_layer
from caffepy.layers.tensor import IMAGE_AXES, CropLayer, RearrangingLayer, consecutive_parts, transpose_channels


@register_layer("Transpose")
class TransposeLayer(RearrangingLayer):
    """Axis i of the top is axis dim[i] of the bottom (CTPN's `transpose_layer.cpp`).

    Raises:
        ConfigError: `dim` does not name each axis of the bottom once.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._order, shape = tuple(self.param.transpose_param.dim), bottom[0].shape
        if sorted(self._order) != list(range(len(shape))):
            raise self.error(
                f"transpose_param has the dims {list(self._order)}; give each of the bottom's {len(shape)} axes once"
            )
        top[0].reshape(tuple(shape[axis] for axis in self._order))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(bottom[0].data.transpose(*self._order), top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(top[0].diff, bottom[0].diff.transpose(*self._order))


@register_layer("Reverse")
class ReverseLayer(RearrangingLayer):
    """The elements in reverse order along `axis`, as for an LSTM that reads backwards (CTPN's `reverse_layer.cpp`)."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        axis = bottom[0].axis(self.param.reverse_param.axis, self.where)
        self._part = (*(slice(None),) * axis, slice(None, None, -1))
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(bottom[0].data[self._part], top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(top[0].diff[self._part], bottom[0].diff)


@register_layer("AutoCrop")
class AutoCropLayer(CropLayer):
    """Crops the first bottom to the second's height and width (`auto_crop_layer.cpp` of HED, RCF and FCN's old Caffe).

    The net sets the offset: both bottoms come from a common blob by their layers' first bottoms; kernels, strides,
    pads and dilations on the two ways give the offset of one over the other. Layers of other types keep positions.

    Raises:
        ConfigError: there is no common blob, the scales differ, or the offset is negative or fractional.
        ShapeError: the crop exceeds the first bottom.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if any(len(blob.shape) != 4 for blob in bottom):
            raise self.shape_error("both bottoms must have four axes, (N, C, H, W)", bottom[0], bottom[1])
        super().reshape(bottom, top)


@register_layer("CropCenter")
class CropCenterLayer(RearrangingLayer):
    """Cuts `crop_size` elements off both ends of each axis (`crop_center_layer.cpp` of waifu2x's Caffe).

    Raises:
        ConfigError: the number of sizes is not that of the bottom's axes.
        ShapeError: nothing is left of an axis.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        sizes, shape = list(self.param.crop_center_param.crop_size), bottom[0].shape
        if len(sizes) != len(shape):
            raise self.error(f"crop_center_param has {len(sizes)} crop_size; give one for each of {len(shape)} axes")
        if any(2 * size >= axis for size, axis in zip(sizes, shape, strict=True)):
            raise self.shape_error(f"crop_size {sizes} leaves nothing", bottom[0])
        self._part = tuple(slice(size, axis - size) for size, axis in zip(sizes, shape, strict=True))
        top[0].reshape(tuple(axis - 2 * size for size, axis in zip(sizes, shape, strict=True)))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(bottom[0].data[self._part], top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.fill(bottom[0].diff, 0)
            self.backend.copy(top[0].diff, bottom[0].diff[self._part])


@register_layer("Flip")
class FlipLayer(RearrangingLayer):
    """Mirrors the last axis with `flip_width`, the last but one with `flip_height` (`flip_layer.cpp` of caffe-windows).

    Raises:
        ShapeError: the bottom does not have four axes, (N, C, H, W).
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != IMAGE_AXES:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        top[0].reshape(bottom[0].shape)

    def _flipped(self, array: Array) -> Array:
        param, same, back = self.param.flip_param, slice(None), slice(None, None, -1)
        return array[:, :, back if param.flip_height else same, back if param.flip_width else same]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(self._flipped(bottom[0].data), top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(self._flipped(top[0].diff), bottom[0].diff)


@register_layer("ShuffleChannel")
class ShuffleChannelLayer(RearrangingLayer):
    """Transposes the channels from (group, C / group) to (C / group, group) (ShuffleNet; Zhang et al. 2017).

    x and y are (N, C, …).

    Raises:
        ShapeError: `group` does not divide C.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, group = bottom[0].shape, self.param.shuffle_channel_param.group
        if len(shape) < 2 or group < 1 or shape[1] % group:
            raise self.shape_error(f"shuffle_channel_param.group is {group}; it must divide the channels", bottom[0])
        top[0].reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        transpose_channels(self.backend, bottom[0].data, top[0].data, self.param.shuffle_channel_param.group)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            group = self.param.shuffle_channel_param.group
            transpose_channels(self.backend, top[0].diff, bottom[0].diff, bottom[0].shape[1] // group)


@register_layer("Reorg")
class ReorgLayer(RearrangingLayer):
    """Moves blocks of stride * stride pixels to channels, as darknet (`reorg_layer.cpp` of MobileNet-YOLO and Intel).

    Let s be the stride, and (N, C, H, W) the shape of x. The elements of x, in this order, are read as (N, C / s^2, H,
    s, W, s), the axes are permuted to (N, s, s, C / s^2, H, W), and the elements in this order are y, (N, C s^2, H / s,
    W / s). With `reverse` the axes (N, s, s, C / s^2, H, W) become (N, C / s^2, H, s, W, s), and y is (N, C / s^2, H s,
    W s).

    Raises:
        ConfigError: the stride is 0.
        ShapeError: stride^2 does not divide C, or without `reverse` the stride does not divide H and W.
    """

    recordable = False  # NumPy copies its six axes on the CPU
    to_pixels: ClassVar[tuple[int, ...]] = (0, 3, 4, 1, 5, 2)
    """The axis of an array of blocks for each axis of an array of pixels."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if not self.param.reorg_param.stride:
            raise self.error("reorg_param.stride is 0; it is the width and height of a block, in pixels")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        stride, reverse, shape = self.param.reorg_param.stride, self.param.reorg_param.reverse, bottom[0].shape
        fits = len(shape) == 4 and not shape[1] % stride**2
        if not fits or (not reverse and (shape[2] % stride or shape[3] % stride)):
            raise self.shape_error(
                f"stride {stride} needs N C H W with C divided by {stride**2}"
                + ("" if reverse else f", and H and W by {stride}"),
                bottom[0],
            )
        images, channels, height, width = shape
        self._pixels: tuple[int, ...] = (images, channels // stride**2, height, stride, width, stride)
        self._blocks: tuple[int, ...] = (images, stride, stride, channels // stride**2, height, width)
        if reverse:
            top[0].reshape((images, channels // stride**2, height * stride, width * stride))
        else:
            top[0].reshape((images, channels * stride**2, height // stride, width // stride))

    def _move(self, source: Array, destination: Array, to_pixels: bool) -> None:
        # Arrays of six axes have their elements in logical order, images have not.
        pixels, blocks = (
            self.scratch(*each, self.dtype).array for each in (("pixels", self._pixels), ("blocks", self._blocks))
        )
        to_blocks = tuple(self.to_pixels.index(axis) for axis in range(len(self.to_pixels)))
        first, second, order = (blocks, pixels, self.to_pixels) if to_pixels else (pixels, blocks, to_blocks)
        self.backend.copy(source, first.reshape(source.shape))
        self.backend.copy(first.transpose(*order), second)
        self.backend.copy(second.reshape(destination.shape), destination)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._move(bottom[0].data, top[0].data, self.param.reorg_param.reverse)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._move(top[0].diff, bottom[0].diff, not self.param.reorg_param.reverse)


@register_layer("PixelShuffle")
class PixelShuffleLayer(ReorgLayer):
    """Moves channels to pixels (Shi et al. 2016; `reshape_layer.cpp` of caffe_srgan).

    Let s be the factor, and x (N, C, H, W). Pixel (h s + i, w s + j) of channel c of y is pixel (h, w) of channel
    c s^2 + i s + j of x; y is (N, C / s^2, H s, W s). The factor is `pixelshuffler` of `reshape_param`: caffe_srgan
    calls the layer Reshape, and reading such a net gives it this type.

    Raises:
        ConfigError: the factor is below 1.
        ShapeError: s^2 does not divide C.
    """

    to_pixels = (0, 1, 4, 2, 5, 3)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        RearrangingLayer.setup(self, bottom, top)
        if self.param.reshape_param.pixelshuffler < 1:
            raise self.error("pixelshuffler of reshape_param must be at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        factor, shape = self.param.reshape_param.pixelshuffler, bottom[0].shape
        if len(shape) != IMAGE_AXES or shape[1] % factor**2:
            raise self.shape_error(f"pixelshuffler {factor} needs N C H W with C divided by {factor**2}", bottom[0])
        images, channels, height, width = shape
        self._pixels = (images, channels // factor**2, height, factor, width, factor)
        self._blocks = (images, channels // factor**2, factor, factor, height, width)
        top[0].reshape((images, channels // factor**2, height * factor, width * factor))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._move(bottom[0].data, top[0].data, True)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._move(top[0].diff, bottom[0].diff, False)


# -- Gather and Scatter --------------------------------------------------------------------------------


class PartOfBatchLayer(RearrangingLayer):
    """A layer whose tops are its bottoms: each device goes on with its own part of the batch."""

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True
    independent_pairs = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for source, target in zip(bottom, top, strict=True):
            target.reshape(source.shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for source, target in zip(bottom, top, strict=True):
            self.backend.copy(source.data, target.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for source, target, needs_gradient in zip(top, bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.copy(source.diff, target.diff)


@register_layer("Gather")
class GatherLayer(PartOfBatchLayer):
    """y has the elements of `axis` with these `indices`, in their order (`gather_layer.cpp` of synopsys-caffe).

    `shape` gives the axes that take the axis's place; without it there is one, and a single 0 means none, for a single
    index. dx sums the gradients of an element (the fork has no backward pass).

    Without `gather_param` it is the layer of TSN's Caffe (its `gather_layer.cpp`), which collects the batches of all
    MPI processes. Here each top is its bottom: each device trains on its own part of the batch, and the average of the
    devices' gradients is that of the whole batch.

    Raises:
        ConfigError: there are no indices, shape has another count, or an index is outside the axis.
    """

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._selects = self.param.HasField("gather_param")
        if not self._selects:
            return
        if len(bottom) > 1:
            raise self.error(f"has {len(bottom)} bottoms; with gather_param give it one")
        param = self.param.gather_param
        self._indices = list(param.indices)
        self._axes = [] if list(param.shape) == [0] else list(param.shape) or [len(self._indices)]
        if not self._indices or math.prod(self._axes) != len(self._indices):
            raise self.error(f"gather_param has {len(self._indices)} indices for the shape {self._axes}; give as many")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not self._selects:
            super().reshape(bottom, top)
            return
        shape = bottom[0].shape
        axis = bottom[0].axis(self.param.gather_param.axis, self.where)
        if max(self._indices) >= shape[axis]:
            raise self.error(f"index {max(self._indices)} is outside axis {axis}, 0 to {shape[axis] - 1}")
        top[0].reshape((*shape[:axis], *self._axes, *shape[axis + 1 :]))
        gathered = (*shape[:axis], len(self._indices), *shape[axis + 1 :])
        if shape != self._shape:
            self._shape = shape
            self._y, self._dy = (LayoutAdapter(self.backend, top[0].shape, gathered, self.dtype) for _ in range(2))
            self._parts = consecutive_parts(self._indices, axis)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self._selects:
            super().forward(bottom, top)
            return
        y = self._y.target(top[0].data)
        for source, destination in self._parts:
            self.backend.copy(bottom[0].data[source], y[destination])
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not self._selects:
            super().backward(top, propagate_down, bottom)
            return
        if not propagate_down[0]:
            return
        dy = self._dy.load(top[0].diff)
        self.backend.fill(bottom[0].diff, 0)
        for source, destination in self._parts:
            self.backend.add(dy[destination], bottom[0].diff[source])


@register_layer("Scatter")
class ScatterLayer(PartOfBatchLayer):
    """y = x for each pair of bottom and top (yjxiong's `scatter_layer.cpp`): the inverse of Gather."""
