"""Transpose, Reverse, AutoCrop, Flip, ShuffleChannel and Reorg, which move elements without arithmetic."""

from __future__ import annotations

from caffepy.backend import Array
from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.tensor import IMAGE_AXES, CropLayer, RearrangingLayer, transpose_channels


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
        ConfigError: the stride is missing.
        ShapeError: stride^2 does not divide C, or without `reverse` the stride does not divide H and W.
    """

    recordable = False  # NumPy copies its six axes on the CPU

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if not self.param.reorg_param.stride:
            raise self.error("reorg_param.stride is needed: the width and height of a block, in pixels")

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
        first, second, order = (
            (blocks, pixels, (0, 3, 4, 1, 5, 2)) if to_pixels else (pixels, blocks, (0, 3, 5, 1, 2, 4))
        )
        self.backend.copy(source, first.reshape(source.shape))
        self.backend.copy(first.transpose(*order), second)
        self.backend.copy(second.reshape(destination.shape), destination)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._move(bottom[0].data, top[0].data, self.param.reorg_param.reverse)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._move(top[0].diff, bottom[0].diff, not self.param.reorg_param.reverse)
