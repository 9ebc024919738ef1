"""Layers that move, select and reduce values: Concat, Slice, Split, Flatten, Reshape, Permute, Crop, Tile, Filter.

Also BatchReindex, Parameter, Silence, Reduction, ArgMax, and Cast, which the net inserts between layers of different
dtypes. Of these only Reduction does arithmetic.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Sequence
from itertools import accumulate

import numpy as np

from caffepy.backend import Array, Backend, Channel, Each, Scalar, expression
from caffepy.backend.formulas import scaled, scaled_magnitude, scaled_square
from caffepy.backend.types import address
from caffepy.formats.blobs import check_shape
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.blob import Blob
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, register_layer
from caffepy.layers.loss import IndexCheck


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


class ReshapingLayer(Layer):
    """A layer whose top has the bottom's elements in the same logical order and another shape.

    The top shares the bottom's memory where the layout allows. Subclasses define `top_shape`.
    """

    supports_half = True
    keeps_labels = True
    inherits_dtype = True
    recordable = True

    _shapes: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    _copied: tuple[int, weakref.ref[Array]] | None = None
    """The bottom's address and the top's array in the last pass, if the top could not share the bottom's memory."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def top_shape(self, bottom: Blobs) -> tuple[int, ...]:
        """Return the top's shape, which has the bottom's count."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = (bottom[0].shape, self.top_shape(bottom))
        top[0].reshape(shapes[1])
        if shapes != self._shapes:
            self._shapes = shapes
            self._down = LayoutAdapter(self.backend, *shapes, self.dtype)
            self._up = LayoutAdapter(self.backend, *shapes[::-1], self.dtype)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._down.is_view and not self.tops_overwritten:
            top[0].bind(data=self._down.target(bottom[0].data))
            self._copied = None
        else:
            self._down.transfer(bottom[0].data, top[0].data)
            if self.backend.holds_values and not self.tops_overwritten:
                self._copied = (address(bottom[0].data), weakref.ref(top[0].data))

    def copied(self, bottom: Blobs, top: Blobs) -> tuple[Array, Array] | None:
        source, target = bottom[0].allocated("data"), top[0].allocated("data")
        if self._copied is None or source is None or target is None:
            return None
        return (source, target) if target is self._copied[1]() and address(source) == self._copied[0] else None

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        if self._up.is_view:
            bottom[0].bind(diff=self._up.target(top[0].diff))
        else:
            self._down.transfer(top[0].diff, bottom[0].diff)


@register_layer("Flatten")
class FlattenLayer(ReshapingLayer):
    """Flattens the axes from `axis` to `end_axis` into one (Caffe's `flatten_layer.cpp`).

    Raises:
        ShapeError: `axis` comes after `end_axis`.
    """

    def top_shape(self, bottom: Blobs) -> tuple[int, ...]:
        param = self.param.flatten_param
        begin, end = bottom[0].axis(param.axis, self.where), bottom[0].axis(param.end_axis, self.where) + 1
        if begin >= end:
            raise self.shape_error(f"axis {param.axis} comes after end_axis {param.end_axis}", bottom[0])
        shape = bottom[0].shape
        return (*shape[:begin], math.prod(shape[begin:end]), *shape[end:])


@register_layer("Reshape")
class ReshapeLayer(ReshapingLayer):
    """Replaces `num_axes` axes from `axis` on by `shape` (Caffe's `reshape_layer.cpp`).

    A 0 in `shape` copies the size of the bottom's axis, -1 is inferred from the count. A negative `axis` counts from
    the end: -1 appends axes.

    Raises:
        ConfigError: `shape` has more than one -1 or another negative number.
        ShapeError: the axes do not exist, or the count changes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        dims = list(self.param.reshape_param.shape.dim)
        if dims.count(-1) > 1 or any(d < -1 for d in dims):
            raise self.error(f"shape {_text(dims)} may hold one -1 and no other negative number")

    def shares_at_setup(self) -> bool:
        return True

    def top_shape(self, bottom: Blobs) -> tuple[int, ...]:
        param = self.param.reshape_param
        shape = bottom[0].shape
        begin = param.axis if param.axis >= 0 else len(shape) + param.axis + 1
        end = len(shape) if param.num_axes == -1 else begin + param.num_axes
        if not 0 <= begin <= end <= len(shape) or param.num_axes < -1:
            raise self.shape_error(
                f"axis {param.axis} and num_axes {param.num_axes} go past the bottom's axes", bottom[0]
            )
        dims = list(param.shape.dim)
        for i, dim in enumerate(param.shape.dim):
            if dim == 0:
                if begin + i >= len(shape):
                    raise self.shape_error(
                        f"shape {_text(param.shape.dim)} copies axis {begin + i}, which does not exist", bottom[0]
                    )
                dims[i] = shape[begin + i]
        return self._complete((*shape[:begin], *dims, *shape[end:]), bottom)

    def _complete(self, shape: tuple[int, ...], bottom: Blobs) -> tuple[int, ...]:
        """Replace -1 and check the count."""
        count = bottom[0].count
        known = math.prod(d for d in shape if d != -1)
        if -1 in shape and known and count % known == 0:
            shape = tuple(count // known if d == -1 else d for d in shape)
        if -1 in shape or math.prod(shape) != count:
            raise self.shape_error(f"{count} elements cannot take the shape {_text(shape)}", bottom[0])
        return shape


def _text(dims: Iterable[int]) -> str:
    return " ".join(map(str, dims))


@register_layer("Split")
class SplitLayer(Layer):
    """Copies one blob to several readers: the tops share its data, and its diff is the sum of their diffs.

    The net inserts this layer where a blob has more than one reader (Caffe's `split_layer.cpp`).
    """

    supports_half = True
    keeps_labels = True
    inherits_dtype = True
    recordable = True

    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in top:
            blob.reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for blob in top:
            if self.tops_overwritten:
                self.backend.copy(bottom[0].data, blob.data)
            else:
                blob.bind(data=bottom[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        dx = bottom[0].diff
        if len(top) == 1:
            self.backend.copy(top[0].diff, dx)
            return
        self.backend.add_n([blob.diff for blob in top], dx)


@register_layer("Silence")
class SilenceLayer(Layer):
    """Consumes blobs, so that they are not outputs of the net (Caffe's `silence_layer.cpp`). Their gradient is 0."""

    supports_half = True
    inherits_dtype = True

    bottoms = (1, None)
    tops = (0, 0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: there are no tops."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: there are no tops."""

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, needs_gradient in zip(bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.fill(blob.diff, 0)


IMAGE_AXES = 4


class RearrangingLayer(Layer):
    """A layer that copies elements of its first bottom to other positions."""

    supports_half = True
    keeps_labels = True
    inherits_dtype = True
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)


@register_layer("Permute")
class PermuteLayer(RearrangingLayer):
    """Axis i of the top is axis order[i] of the bottom; axes missing in `order` follow (SSD's `permute_layer.cpp`).

    The top shares the bottom's data if no axis moves.

    Raises:
        ConfigError: `order` has an axis twice, or one that the bottom lacks.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        order, axes = list(self.param.permute_param.order), len(bottom[0].shape)
        if any(axis >= axes for axis in order) or len(set(order)) < len(order):
            raise self.error(f"permute_param.order is {order}; it must name axes below {axes}, each once")
        self.order = (*order, *(axis for axis in range(axes) if axis not in order))
        """The bottom's axes in the order of the top."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[0].shape) != len(self.order):
            raise self.shape_error(f"the bottom must keep its {len(self.order)} axes", bottom[0])
        top[0].reshape(tuple(bottom[0].shape[axis] for axis in self.order))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.order == tuple(range(len(self.order))) and not self.tops_overwritten:
            top[0].bind(data=bottom[0].data)
        else:
            self.backend.copy(bottom[0].data.transpose(*self.order), top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(top[0].diff, bottom[0].diff.transpose(*self.order))


@register_layer("Crop")
class CropLayer(RearrangingLayer):
    """Crops the first bottom to the second bottom's sizes from `axis` on (Caffe's `crop_layer.cpp`).

    The crop starts at `offset`: one number for all these axes, or one for each axis; by default 0.

    Raises:
        ConfigError: the number of offsets does not match the axes.
        ShapeError: the numbers of axes differ, or the crop exceeds the first bottom.
    """

    bottoms = (2, 2)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        offsets = list(self.param.crop_param.offset)
        axis, axes = bottom[0].axis(self.param.crop_param.axis, self.where), len(bottom[0].shape)
        if len(offsets) > 1 and len(offsets) != axes - axis:
            raise self.error(f"crop_param has {len(offsets)} offsets; give one, or one for each of {axes - axis} axes")
        if len(bottom[1].shape) != axes:
            raise self.shape_error("both bottoms must have as many axes", bottom[0], bottom[1])
        offsets = offsets if len(offsets) > 1 else (offsets or [0]) * (axes - axis)
        part = [slice(0, size) for size in bottom[0].shape[:axis]]
        for i, begin in enumerate(offsets, axis):
            if begin + bottom[1].shape[i] > bottom[0].shape[i]:
                raise self.shape_error(
                    f"axis {i}: a crop of {bottom[1].shape[i]} elements from offset {begin} exceeds the first bottom",
                    bottom[0],
                    bottom[1],
                )
            part.append(slice(begin, begin + bottom[1].shape[i]))
        self._part = tuple(part)
        top[0].reshape(tuple(index.stop - index.start for index in part))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(bottom[0].data[self._part], top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, needs_gradient in zip(bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.fill(blob.diff, 0)
        if propagate_down[0]:
            self.backend.copy(top[0].diff, bottom[0].diff[self._part])


@register_layer("Tile")
class TileLayer(RearrangingLayer):
    """Repeats the bottom `tiles` times along `axis` (Caffe's `tile_layer.cpp`).

    Raises:
        ConfigError: `tiles` is below 1.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.tile_param.tiles < 1:
            raise self.error(
                f"tile_param.tiles is {self.param.tile_param.tiles}; give the number of copies, at least 1"
            )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, axis = bottom[0].shape, bottom[0].axis(self.param.tile_param.axis, self.where)
        size, tiles = shape[axis], self.param.tile_param.tiles
        top[0].reshape((*shape[:axis], size * tiles, *shape[axis + 1 :]))
        self._parts = [(slice(None),) * axis + (slice(i * size, (i + 1) * size),) for i in range(tiles)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for part in self._parts:
            self.backend.copy(bottom[0].data, top[0].data[part])

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        dx = bottom[0].diff if self.dtype == "float32" else self.scratch("sum", bottom[0].shape).array
        self.backend.copy(top[0].diff[self._parts[0]], dx)
        for part in self._parts[1:]:
            self.backend.add(top[0].diff[part], dx)
        if dx is not bottom[0].diff:
            self.backend.copy(dx, bottom[0].diff)


def transpose_channels(backend: Backend, source: Array, destination: Array, outer: int) -> None:
    """Copy `source` with its channels transposed from (outer, inner) to (inner, outer)."""
    samples, channels, *rest = source.shape
    parts = source.reshape(samples, outer, channels // outer, *rest)
    transposed = parts.transpose(0, 2, 1, *range(3, len(parts.shape)))
    backend.copy(transposed, destination.reshape(samples, channels // outer, outer, *rest))


@register_layer("BatchReindex")
class BatchReindexLayer(Layer):
    """y[i] = x[index[i]] (Caffe's `batch_reindex_layer.cpp`).

    Shapes: x (N, …), index (M,), y (M, …). dx[n] = sum of dy[i] over all i with index[i] = n, in ascending order of i.

    Raises:
        ShapeError: the index does not have one axis, or x has none.
        DataError: an index is outside 0 to N - 1.
    """

    bottoms = (2, 2)
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check = IndexCheck(
            self,
            f"entry {{}} of '{bottom[1].title}' is not the index of a sample of '{bottom[0].title}', from 0",
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom[1].shape) != 1:
            raise self.shape_error("the second bottom must have one axis, an index for each sample", bottom[1])
        if not bottom[0].shape:
            raise self.shape_error("the first bottom needs a first axis, N", bottom[0])
        top[0].reshape((bottom[1].shape[0], *bottom[0].shape[1:]))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.gather_rows(bottom[0].data, bottom[1].data, top[0].data, self._check.bad_index)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.fill(bottom[0].diff, 0)
            self.backend.scatter_add_rows(top[0].diff, bottom[1].data, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


@register_layer("Filter")
class FilterLayer(Layer):
    """The samples of each bottom whose entry in the last bottom, the selector, is not 0 (Caffe's `filter_layer.cpp`).

    Shapes: bottoms (N, …), selector (N, 1, …), tops (M, …), where M changes from pass to pass. The gradient of a sample
    that is not selected is 0.

    With `filter_param` it is the layer of channel-pruning's Caffe (its `filter_layer.cpp`; He, Zhang and Sun 2017): the
    selector is parameter 0, one number for each element of `axis`, initially 1. Each top has the first `num_output`
    elements whose number is not 0.

    Raises:
        ConfigError: the number of tops does not fit, or num_output is not from 1 to the size of the axis.
        ShapeError: a bottom has another number of samples than the selector.
        DataError: the parameter selects fewer than num_output elements.
    """

    bottoms = (1, None)
    tops = (1, None)
    changes_shapes = True
    may_keep_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._own = self.param.HasField("filter_param")
        if self._own:
            self._add_selector(bottom, top)
            return
        if len(top) != len(bottom) - 1 or len(bottom) == 1:
            raise self.error(f"needs a top for each bottom but the last, the selector: {len(bottom) - 1}")
        self._check = IndexCheck(self, "sample {} does not exist")

    def _add_selector(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.filter_param
        if len(top) != len(bottom):
            raise self.error(f"needs a top for each bottom: {len(bottom)}")
        size = bottom[0].shape[bottom[0].axis(param.axis, self.where)]
        if not 1 <= param.num_output <= size:
            raise self.error(f"filter_param's num_output is {param.num_output}; it must be from 1 to {size}")
        self.add_parameter((size,), caffe_pb2.FillerParameter(type="constant", value=1))
        while len(self.param.param) < 1:
            self.param.param.add()
        self.param.param[0].lr_mult = self.param.param[0].decay_mult = 0

    def _reshape_axis(self, bottom: Blobs, top: Blobs) -> None:
        param, size = self.param.filter_param, self.blobs[0].shape[0]
        for blob, target in zip(bottom, top, strict=True):
            axis = blob.axis(param.axis, self.where)
            if blob.shape[axis] != size:
                raise self.shape_error(f"axis {axis} of every bottom must have {size} elements", blob)
            target.reshape((*blob.shape[:axis], param.num_output, *blob.shape[axis + 1 :]))

    def _parts(self, blob: Blob) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
        """Return the selected slices of a bottom, and where its top has them."""
        param = self.param.filter_param
        selected = np.flatnonzero(self._selector)[: param.num_output]
        return consecutive_parts(selected, blob.axis(param.axis, self.where))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if self._own:
            self._reshape_axis(bottom, top)
            return
        selector = bottom[-1]
        if not selector.shape or selector.count != selector.shape[0]:
            raise self.shape_error("the last bottom, the selector, must have one number for each sample", selector)
        for blob, target in zip(bottom[:-1], top, strict=True):
            if not blob.shape or blob.shape[0] != selector.shape[0]:
                raise self.shape_error("every bottom must have as many samples as the selector", blob, selector)
            target.reshape(blob.shape)
        self._row = LayoutAdapter(self.backend, selector.shape, (selector.count,))

    def _forward_own(self, bottom: Blobs, top: Blobs) -> None:
        selector, wanted = self.backend.to_host(self.blobs[0].data), self.param.filter_param.num_output
        self._selector = selector if self.backend.holds_values else np.ones(selector.shape)
        found = np.count_nonzero(self._selector)
        if found < wanted:
            raise self.data_error(f"its parameter selects {found} elements, and num_output is {wanted}; correct either")
        for blob, target in zip(bottom, top, strict=True):
            for source, destination in self._parts(blob):
                self.backend.copy(blob.data[source], target.data[destination])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._own:
            self._forward_own(bottom, top)
            return
        selector = self.backend.to_host(self._row.load(bottom[-1].data))
        # The meta backend has no values: selecting all samples gives the upper bound of the memory.
        selected = np.flatnonzero(selector.astype(np.int64)) if self.backend.holds_values else np.arange(selector.size)
        self._index = self.backend.zeros((len(selected),))
        self.backend.from_host(selected, self._index)
        for blob, target in zip(bottom[:-1], top, strict=True):
            target.reshape((len(selected), *blob.shape[1:]))
            self.backend.gather_rows(blob.data, self._index, target.data, self._check.bad_index)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)
        if self._own:
            for blob, target, wanted in zip(bottom, top, propagate_down, strict=True):
                for part, place in self._parts(blob) if wanted else ():
                    self.backend.copy(target.diff[place], blob.diff[part])
            return
        for blob, source, wanted in zip(bottom[:-1], top, propagate_down[:-1], strict=True):
            if wanted:
                self.backend.scatter_add_rows(source.diff, self._index, blob.diff)

    def capture_blocker(self) -> str | None:
        return "only the host knows the number of samples that it selects"

    def raise_device_errors(self) -> None:
        if not self._own:
            self._check.raise_device_errors()


def consecutive_parts(
    indices: Sequence[int] | np.ndarray, axis: int
) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Return slices of a source and of a destination that hold elements of an axis in the order of `indices`.

    Runs of consecutive indices share a slice.
    """
    parts, begin, before = [], 0, (slice(None),) * axis
    for end in range(1, len(indices) + 1):
        if end == len(indices) or indices[end] != indices[end - 1] + 1:
            first = int(indices[begin])
            source = slice(first, first + end - begin)
            parts.append(((*before, source), (*before, slice(begin, end))))
            begin = end
    return parts


@register_layer("Parameter")
class ParameterLayer(Layer):
    """y = a learned parameter of shape `parameter_param.shape` (Caffe's `parameter_layer.hpp`).

    It is initially 0, or as `filler` (`parameter_layer.hpp` of OpenVINO's training toolbox) or `blob_filler` says.
    The top shares the parameter's data: what a program writes there after a pass changes the parameter.
    """

    bottoms = (0, 0)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        shape = tuple(self.param.parameter_param.shape.dim)
        check_shape(shape, self.where)
        param = self.param.parameter_param
        self.add_parameter(shape, param.filler if param.HasField("filler") else param.blob_filler)
        top[0].reshape(shape)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The top keeps its shape."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self.tops_overwritten:
            self.backend.copy(self.blobs[0].data, top[0].data)
        else:
            top[0].bind(data=self.blobs[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not self.propagate_to_params[0]:
            return
        if self.accumulate(0):
            self.backend.add(top[0].diff, self.blobs[0].diff)
        else:
            self.backend.copy(top[0].diff, self.blobs[0].diff)


@register_layer("Cast")
class CastLayer(Layer):
    """y = x, rounded to the top's dtype. dx = dy, rounded to the bottom's dtype."""

    supports_half = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


# -- Reduction and ArgMax ------------------------------------------------------------------------------

_Parameter = caffe_pb2.ReductionParameter


@expression
def spread(dy: Channel, factor: Scalar) -> Each:
    return dy * factor


@expression
def signed(x: Each, dy: Channel, factor: Scalar) -> Each:
    return dy * factor if x > 0 else (-dy * factor if x < 0 else 0.0)


@expression
def twice(x: Each, dy: Channel, factor: Scalar) -> Each:
    return 2 * x * dy * factor


_FORWARD = {
    _Parameter.SUM: scaled,
    _Parameter.MEAN: scaled,
    _Parameter.ASUM: scaled_magnitude,
    _Parameter.SUMSQ: scaled_square,
}


@register_layer("Reduction")
class ReductionLayer(Layer):
    """y = coeff * sum of x (SUM), |x| (ASUM) or x^2 (SUMSQ), or coeff * mean of x (MEAN), over the axes from `axis` on.

    The top has the axes before `axis`; it is a scalar for axis 0 (Caffe's `reduction_layer.cpp`).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.reduction_param
        axis = bottom[0].axis(param.axis, self.where)
        top[0].reshape(bottom[0].shape[:axis])
        self._factor = param.coeff
        if param.operation == _Parameter.MEAN:
            self._factor /= max(bottom[0].count // max(top[0].count, 1), 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        formula = _FORWARD[self.param.reduction_param.operation]
        self.backend.reduce(formula, (bottom[0].data, self._factor), (top[0].data,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        operation, x, dy, dx = self.param.reduction_param.operation, bottom[0].data, top[0].diff, bottom[0].diff
        if operation in (_Parameter.SUM, _Parameter.MEAN):
            self.backend.apply(spread, (dy, self._factor), (dx,), 0)
        else:
            formula = signed if operation == _Parameter.ASUM else twice
            self.backend.apply(formula, (x, dy, self._factor), (dx,), 0)


@register_layer("ArgMax")
class ArgMaxLayer(Layer):
    """Indices or values of the `top_k` largest elements in descending order (Caffe's `argmax_layer.cpp`).

    Without `axis` each sample is one row. The top (N, 1, top_k) holds the indices; with `out_max_val` the top
    (N, 2, top_k) holds indices and values. With `axis` the top has the bottom's shape with top_k along that axis, and
    holds the values with `out_max_val`, else the indices. Of equal elements the larger index comes first.

    Raises:
        ConfigError: top_k is 0.
        ShapeError: top_k is larger than the number of elements.
    """

    has_backward = False

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        if self.param.argmax_param.top_k < 1:
            raise self.error("argmax_param.top_k is 0; give at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.argmax_param, bottom[0].shape
        if not shape:
            raise self.shape_error("the bottom needs a first axis, N", bottom[0])
        self._axis = 1
        rows: tuple[int, ...] = (shape[0], math.prod(shape[1:]))
        if param.HasField("axis"):
            self._axis = bottom[0].axis(param.axis, self.where)
            rows = shape
        if param.top_k > rows[self._axis]:
            raise self.shape_error(f"top_k is {param.top_k}, but there are only {rows[self._axis]} elements", bottom[0])
        result = (*rows[: self._axis], param.top_k, *rows[self._axis + 1 :])
        if param.HasField("axis"):
            top[0].reshape(result)
        else:
            top[0].reshape((shape[0], 2 if param.out_max_val else 1, param.top_k) + (1,) * (len(shape) - 3))
        if shape != self._shape:
            self._shape = shape
            self._rows = LayoutAdapter(self.backend, shape, rows)
            self._results = [self.backend.zeros(result) for _ in range(2)]

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (indices, values) = self.param.argmax_param, self._results
        self.backend.largest(self._rows.load(bottom[0].data), self._axis, indices, values)
        if param.HasField("axis"):
            self.backend.copy(values if param.out_max_val else indices, top[0].data)
            return
        self.backend.copy(indices, self._part(top[0].data, 0))
        if param.out_max_val:
            self.backend.copy(values, self._part(top[0].data, 1))

    def _part(self, data: Array, number: int) -> Array:
        """Return the indices (0) or values (1) of the top, (N, top_k)."""
        return data[(slice(None), number, slice(None)) + (0,) * (len(data.shape) - 3)]
