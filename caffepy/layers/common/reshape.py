"""Flatten and Reshape."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable

from caffepy.backend import Array
from caffepy.backend.layout import address
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.layout_adapter import LayoutAdapter


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
