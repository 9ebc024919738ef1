"""Concat and its inverse Slice."""

from __future__ import annotations

import math
from itertools import accumulate

from caffepy.backend import Array
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.layout_adapter import LayoutAdapter


class AxisLayer(Layer):
    """A layer whose blobs have the same shape except along one axis."""

    supports_half = True
    recordable = True
    keeps_labels = True

    _axis: int
    _bounds: list[tuple[int, int]]
    """Begin and end of each part along the axis."""

    def _part(self, whole: Array, number: int) -> Array:
        begin, end = self._bounds[number]
        return whole[(slice(None),) * self._axis + (slice(begin, end),)]

    def _set_bounds(self, sizes: list[int]) -> None:
        ends = list(accumulate(sizes))
        self._bounds = [(end - size, end) for end, size in zip(ends, sizes, strict=True)]

    def _read_axis(self, blob: Blob, axis: int, old_axis: int | None) -> int:
        """Return the axis, given as `axis` or as the old field `concat_dim` or `slice_dim`."""
        return blob.axis(axis if old_axis is None else old_axis, self.where)


@register_layer("Concat")
class ConcatLayer(AxisLayer):
    """Concatenates the bottoms along `axis` (Caffe's `concat_layer.cpp`).

    Intel Caffe's `per_fla_fuse` flattens each bottom (N, ...) to (N, elements) first; the top is (N, elements, 1, ...)
    with the bottoms' number of axes (`mkldnn_concat_layer.cpp`).

    Raises:
        ConfigError: both `axis` and `concat_dim` are set, or `per_fla_fuse` with another axis than 1.
        ShapeError: the bottoms' shapes differ in another axis.
    """

    bottoms = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.concat_param
        if param.HasField("axis") and param.HasField("concat_dim"):
            raise self.error("give either axis or concat_dim, not both")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.concat_param
        old_axis = param.concat_dim if param.HasField("concat_dim") else None
        self._axis = axis = self._read_axis(bottom[0], param.axis, old_axis)
        shape = bottom[0].shape
        if param.per_fla_fuse:
            self._reshape_flattened(bottom, top)
            return
        for other in bottom[1:]:
            if len(other.shape) != len(shape) or _without(other.shape, axis) != _without(shape, axis):
                raise self.shape_error(f"all bottoms must agree in every axis but {axis}", bottom[0], other)
        self._set_bounds([blob.shape[axis] for blob in bottom])
        top[0].reshape((*shape[:axis], self._bounds[-1][1], *shape[axis + 1 :]))

    def _reshape_flattened(self, bottom: Blobs, top: Blobs) -> None:
        if self._axis != 1:
            raise self.error(f"per_fla_fuse is for axis 1, not {self._axis}")
        shape = bottom[0].shape
        for other in bottom[1:]:
            if len(other.shape) != len(shape) or other.shape[0] != shape[0]:
                raise self.shape_error("all bottoms must agree in their first axis and have as many", bottom[0], other)
        sizes = [math.prod(blob.shape[1:]) for blob in bottom]
        self._set_bounds(sizes)
        behind = (1,) * (len(shape) - 2)
        top[0].reshape((shape[0], sum(sizes), *behind))
        flat = [(shape[0], size, *behind) for size in sizes]
        pairs = zip(bottom, flat, strict=True)
        self._flat = [LayoutAdapter(self.backend, blob.shape, target, self.dtype) for blob, target in pairs]

    def shares_at_setup(self) -> bool:
        return len(self.param.bottom) == 1 and not self.param.concat_param.per_fla_fuse

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.param.concat_param.per_fla_fuse:
            for number, (blob, flat) in enumerate(zip(bottom, self._flat, strict=True)):
                self.backend.copy(flat.load(blob.data), self._part(top[0].data, number))
            return
        if len(bottom) == 1 and not self.tops_overwritten:
            top[0].bind(data=bottom[0].data)
            return
        for number, blob in enumerate(bottom):
            self.backend.copy(blob.data, self._part(top[0].data, number))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if self.param.concat_param.per_fla_fuse:
            for number, (blob, flat) in enumerate(zip(bottom, self._flat, strict=True)):
                if propagate_down[number]:
                    self.backend.copy(self._part(top[0].diff, number), flat.target(blob.diff))
                    flat.store(blob.diff)
            return
        if len(bottom) == 1:
            if propagate_down[0]:
                bottom[0].bind(diff=top[0].diff)
            return
        for number, blob in enumerate(bottom):
            if propagate_down[number]:
                self.backend.copy(self._part(top[0].diff, number), blob.diff)


@register_layer("Slice")
class SliceLayer(AxisLayer):
    """Splits the bottom along `axis`, at `slice_point` or evenly (Caffe's `slice_layer.cpp`).

    Raises:
        ConfigError: both `axis` and `slice_dim` are set, or the number of slice points does not match the tops.
        ShapeError: the axis does not divide evenly, or the slice points do not ascend within the axis.
    """

    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.slice_param
        if param.HasField("axis") and param.HasField("slice_dim"):
            raise self.error("give either axis or slice_dim, not both")
        if param.slice_point and len(param.slice_point) != len(top) - 1:
            raise self.error(
                f"{len(top)} tops need {len(top) - 1} slice points, but there are {len(param.slice_point)}"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.slice_param
        old_axis = param.slice_dim if param.HasField("slice_dim") else None
        self._axis = axis = self._read_axis(bottom[0], param.axis, old_axis)
        shape = bottom[0].shape
        self._set_bounds(self._sizes(bottom[0], len(top)))
        for blob, (begin, end) in zip(top, self._bounds, strict=True):
            blob.reshape((*shape[:axis], end - begin, *shape[axis + 1 :]))

    def _sizes(self, bottom: Blob, count: int) -> list[int]:
        points = list(self.param.slice_param.slice_point)
        size = bottom.shape[self._axis]
        if not points:
            if size % count:
                raise self.shape_error(f"{count} tops do not divide axis {self._axis} evenly; give slice_point", bottom)
            return [size // count] * count
        sizes = [end - begin for begin, end in zip([0, *points], [*points, size], strict=True)]
        if min(sizes) < 1:
            raise self.shape_error(f"slice points {points} must rise within axis {self._axis}, above 0", bottom)
        return sizes

    def shares_at_setup(self) -> bool:
        return len(self.param.top) == 1

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if len(top) == 1 and not self.tops_overwritten:
            top[0].bind(data=bottom[0].data)
            return
        for number, blob in enumerate(top):
            self.backend.copy(self._part(bottom[0].data, number), blob.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if len(top) == 1:
            bottom[0].bind(diff=top[0].diff)
        else:
            for number, blob in enumerate(top):
                self.backend.copy(blob.diff, self._part(bottom[0].diff, number))


def _without(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return shape[:axis] + shape[axis + 1 :]
