"""The CUDA backend's own code, run for the kernels that it asks for: arrays without memory, launches of nothing.

Owns whether the calling thread does so. What it runs then has the shapes, strides, dtypes and alignments of the arrays
that it will have later, so that it chooses the same kernels.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from caffepy.backend.cuda.compilation.target import Target

_NOWHERE = np.empty(16, np.uint8)
"""Memory at which NumPy's views that stand for arrays begin; no element of them is ever read."""

_RESHAPES_WITHOUT_COPY = np.lib.NumpyVersion(np.__version__) >= "2.1.0"
"""Later releases deprecate what earlier ones need."""

_addresses = itertools.count(1 << 40, 1 << 38)
"""Made-up addresses, one for each array, so far apart that no two arrays overlap."""


class _State(threading.local):
    target: Target | None = None


_state = _State()


def foreseen_target() -> Target | None:
    """What this thread has kernels compiled for without running them; None in a thread that runs them."""
    return _state.target


@contextmanager
def foreseeing(target: Target) -> Iterator[None]:
    """Within a `with` block, this thread allocates no device memory and launches no kernel of caffepy's."""
    _state.target = target
    try:
        yield
    finally:
        _state.target = None


class ForeseenKernel:
    """Stands for a compiled kernel; a launch does nothing."""

    max_dynamic_shared_size_bytes = 0

    def __call__(self, *_: Any, **__: Any) -> None:
        """Launches nothing."""


class ForeseenPointer:
    """What `ndarray.data` is in CuPy: an address, and copies, which here do nothing.

    Args:
        address: of the first byte; nothing is there.
    """

    def __init__(self, address: int) -> None:
        self.ptr = address

    def memset_async(self, *_: Any) -> None:
        """Sets nothing."""

    copy_from_device_async = copy_from_host_async = copy_to_host_async = memset_async

    def __add__(self, offset: int) -> ForeseenPointer:
        return ForeseenPointer(self.ptr + offset)


class ForeseenArray:
    """What the backend asks of CuPy's arrays, without memory.

    Args:
        form: a NumPy view with the shape, strides and dtype, which works out those of parts and of other shapes.
        address: of the first element.
    """

    def __init__(self, form: Any, address: int) -> None:
        self._form = form
        self.data = ForeseenPointer(address)
        self.shape: tuple[int, ...] = form.shape
        self.strides: tuple[int, ...] = form.strides
        self.dtype: np.dtype[Any] = form.dtype
        self.ndim, self.size, self.itemsize, self.nbytes = form.ndim, form.size, form.itemsize, form.nbytes
        self.flags = form.flags

    @classmethod
    def flat(cls, size: int, dtype: Any) -> ForeseenArray:
        """A 1-D array at an address of its own."""
        kind = np.dtype(dtype)
        return cls(as_strided(_NOWHERE[: kind.itemsize].view(kind), (size,), (kind.itemsize,)), next(_addresses))

    def _part(self, form: Any) -> ForeseenArray:
        offset = form.__array_interface__["data"][0] - self._form.__array_interface__["data"][0]
        return ForeseenArray(form, self.data.ptr + offset)

    def reshape(self, *shape: Any) -> ForeseenArray:
        """As CuPy's: a view where the strides allow it, else another array."""
        sizes = list(shape[0]) if len(shape) == 1 and not isinstance(shape[0], int) else list(shape)
        if -1 in sizes:
            known = -int(np.prod(sizes))
            sizes[sizes.index(-1)] = self.size // max(known, 1)
        form = _viewed(self._form, tuple(sizes))
        return ForeseenArray.flat(self.size, self.dtype).reshape(*sizes) if form is None else self._part(form)

    def transpose(self, *axes: Any) -> ForeseenArray:
        """As CuPy's."""
        return self._part(self._form.transpose(*axes))

    @property
    def T(self) -> ForeseenArray:  # noqa: N802 -- CuPy's name
        return self.transpose()

    def view(self, dtype: Any) -> ForeseenArray:
        """As CuPy's."""
        return self._part(self._form.view(dtype))

    def __getitem__(self, key: Any) -> ForeseenArray:
        keys = key if isinstance(key, tuple) else (key,)
        index = (*keys, ...)  # with the last, NumPy never gives an element
        return self._part(self._form[index])

    def copy(self) -> ForeseenArray:
        """Another array of this shape."""
        return ForeseenArray.flat(self.size, self.dtype).reshape(*self.shape)

    def fill(self, value: Any) -> None:
        """Sets nothing."""

    def get(self, *_: Any, **__: Any) -> Any:
        """Zeros of the array's shape, whatever was asked: no number is known."""
        return np.zeros(self.shape, self.dtype)


def _viewed(form: Any, shape: tuple[int, ...]) -> Any:
    """The form in another shape; None where that takes a copy, for which there are no elements."""
    if _RESHAPES_WITHOUT_COPY:
        try:
            return np.reshape(form, shape, copy=False)
        except ValueError:
            return None
    view = form.view()
    try:
        view.shape = shape
    except AttributeError:
        return None
    return view
