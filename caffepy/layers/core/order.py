"""Elements of an array under another shape, in logical order, whatever the order in memory.

The only module where layers depend on images being channels last: Flatten, Reshape, InnerProduct, convolutions
whose channels are not axis 1, and losses whose bottoms have different shapes of one count.
"""

from __future__ import annotations

import math
from functools import cached_property

from caffepy.backend import Array, Backend
from caffepy.backend.layout import is_plain


def by_samples(backend: Backend, array: Array) -> Array:
    """(N, …) as (N, elements), a view; the order within a sample is that of memory."""
    return backend.flat(array).reshape(array.shape[0], math.prod(array.shape[1:]))


def by_pixels(backend: Backend, array: Array) -> Array:
    """(N, C, H, W) as (N * H * W, C), a view."""
    n, c, h, w = array.shape
    return backend.flat(array).reshape(n * h * w, c)


class LayoutAdapter:
    """Arrays of `shape` seen as arrays of `other`: views where memory order allows, else copies in one buffer.

    Args:
        backend: where the arrays live.
        shape: what arrays given to `load`, `target` and `store` have.
        other: what they are seen as, of the same count.
        dtype: of their elements.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], other: tuple[int, ...], dtype: str = "float32"
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._other = other
        self.is_view = shape == other or (is_plain(shape) and is_plain(other))

    def load(self, array: Array) -> Array:
        """The elements of `array` under the other shape; where it is a copy, the next load overwrites it."""
        if not self.is_view:
            self.transfer(array, self._buffer)
        return self.target(array)

    def target(self, array: Array) -> Array:
        """The array to write `array`'s elements to, under the other shape; call `store` afterwards."""
        if self.is_view:
            return self._backend.view(self._backend.flat(array), self._other)
        return self._buffer

    def store(self, array: Array) -> None:
        """Copy from `target(array)` to `array`, unless it is a view of it."""
        if not self.is_view:
            self.transfer(self._buffer, array)

    def transfer(self, source: Array, destination: Array) -> None:
        """Copy between arrays of the two shapes, either way."""
        backend = self._backend
        if is_plain(source.shape):
            backend.copy(backend.flat(source).reshape(destination.shape), destination)
        elif is_plain(destination.shape):
            backend.copy(source, backend.flat(destination).reshape(source.shape))
        else:
            backend.copy(source, self._row.reshape(source.shape))
            backend.copy(self._row.reshape(destination.shape), destination)

    @cached_property
    def _buffer(self) -> Array:
        return self._backend.zeros(self._other, self._dtype)

    @cached_property
    def _row(self) -> Array:
        return self._backend.zeros((math.prod(self._other),), self._dtype)


class Extended:
    """Arrays of `shape` seen as larger ones, with zeros behind the elements along some axes.

    Args:
        backend: where the arrays live.
        shape: what arrays given to `load`, `target` and `store` have.
        larger: what they are seen as, no shorter along any axis.
        dtype: of their elements.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], larger: tuple[int, ...], dtype: str = "float32"
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._shape, self._larger = shape, larger
        self._is_same = shape == larger

    def load(self, array: Array) -> Array:
        """The elements of `array` and the zeros; where it is a copy, the next load overwrites it."""
        if not self._is_same:
            self._backend.copy(array, self._own)
        return self.target(array)

    def target(self, array: Array) -> Array:
        """The larger array to write `array`'s elements to; the rest is dropped. Call `store` afterwards.

        What was written behind the elements stays there: such an object cannot serve `load` as well.
        """
        return array if self._is_same else self._buffer

    def store(self, array: Array) -> None:
        """Copy from `target(array)` to `array`, unless it is a view of it."""
        if not self._is_same:
            self._backend.copy(self._own, array)

    @property
    def _own(self) -> Array:
        """The part of the buffer that the elements take."""
        return self._buffer[tuple(slice(0, size) for size in self._shape)]

    @cached_property
    def _buffer(self) -> Array:
        return self._backend.zeros(self._larger, self._dtype)
