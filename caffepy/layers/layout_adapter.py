"""Arrays under another shape, in logical (N, C, H, W) order, independent of the memory layout.

Images are channels last in memory, which no other module of layers depends on. Flatten, Reshape, InnerProduct,
convolutions whose channels are not axis 1, and losses whose bottoms differ in shape use it.
"""

from __future__ import annotations

import math
from functools import cached_property

from caffepy.backend import Array, Backend
from caffepy.backend.layout import is_plain


def flatten_samples(backend: Backend, array: Array) -> Array:
    """Return a view of (N, …) as (N, elements), in memory order within a sample."""
    return backend.flat(array).reshape(array.shape[0], math.prod(array.shape[1:]))


def flatten_pixels(backend: Backend, array: Array) -> Array:
    """Return a view of (N, C, H, W) as (N * H * W, C)."""
    n, c, h, w = array.shape
    return backend.flat(array).reshape(n * h * w, c)


class LayoutAdapter:
    """Presents arrays of `shape` as arrays of `target_shape`: as views where the layout allows, else through a buffer.

    Args:
        backend: of the arrays.
        shape: of the arrays given to `load`, `target` and `store`.
        target_shape: of the result, with as many elements.
        dtype: of the elements.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], target_shape: tuple[int, ...], dtype: str = "float32"
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._target_shape = target_shape
        self.is_view = shape == target_shape or (is_plain(shape) and is_plain(target_shape))

    def load(self, array: Array) -> Array:
        """Return the elements of `array` under `target_shape`. A later `load` overwrites the buffer."""
        if not self.is_view:
            self.transfer(array, self._buffer)
        return self.target(array)

    def target(self, array: Array) -> Array:
        """Return the array of `target_shape` to write to: a view of `array`, or the buffer. Call `store` afterwards."""
        if self.is_view:
            return self._backend.view(self._backend.flat(array), self._target_shape)
        return self._buffer

    def store(self, array: Array) -> None:
        """Copy the buffer to `array`. Does nothing if `target` returns a view."""
        if not self.is_view:
            self.transfer(self._buffer, array)

    def transfer(self, source: Array, destination: Array) -> None:
        """Copy between an array of `shape` and one of `target_shape`, in either direction."""
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
        return self._backend.zeros(self._target_shape, self._dtype)

    @cached_property
    def _row(self) -> Array:
        return self._backend.zeros((math.prod(self._target_shape),), self._dtype)


class ZeroPadded:
    """Presents arrays of `shape` as arrays of `padded_shape`, with zeros at the end of some axes.

    Args:
        backend: of the arrays.
        shape: of the arrays given to `load`, `target` and `store`.
        padded_shape: of the result, no shorter along any axis.
        dtype: of the elements.
    """

    def __init__(
        self, backend: Backend, shape: tuple[int, ...], padded_shape: tuple[int, ...], dtype: str = "float32"
    ) -> None:
        self._backend = backend
        self._dtype = dtype
        self._shape, self._padded_shape = shape, padded_shape
        self._is_same = shape == padded_shape

    def load(self, array: Array) -> Array:
        """Return the elements of `array` with the zeros. A later `load` overwrites the buffer."""
        if not self._is_same:
            self._backend.copy(array, self._unpadded)
        return self.target(array)

    def target(self, array: Array) -> Array:
        """Return the padded array to write to. Call `store` afterwards, which drops the padding.

        Writing to the padding destroys its zeros: do not use `load` of the same object afterwards.
        """
        return array if self._is_same else self._buffer

    def store(self, array: Array) -> None:
        """Copy the elements of `target(array)` to `array`. Does nothing if the shapes are the same."""
        if not self._is_same:
            self._backend.copy(self._unpadded, array)

    @property
    def _unpadded(self) -> Array:
        """The buffer without the padding."""
        return self._buffer[tuple(slice(0, size) for size in self._shape)]

    @cached_property
    def _buffer(self) -> Array:
        return self._backend.zeros(self._padded_shape, self._dtype)
