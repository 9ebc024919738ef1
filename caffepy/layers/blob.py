"""The blob: an N-dimensional array of values and, beside it, of derivatives (Caffe's `blob.hpp`)."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from caffepy.backend.types import view
from caffepy.errors import ShapeError

if TYPE_CHECKING:
    from caffepy.backend.interface import Backend
    from caffepy.backend.types import Array
from caffepy.formats.blobs import check_shape, format_shape


class FourAxes:
    """`num`, `channels`, `height` and `width` derived from `shape`, as in Caffe's Blob."""

    @property
    def shape(self) -> tuple[int, ...]:
        raise NotImplementedError

    @property
    def num(self) -> int:
        """Size of the first of at most four axes; missing ones are 1."""
        return self._legacy(0)

    @property
    def channels(self) -> int:
        """Size of the second of at most four axes."""
        return self._legacy(1)

    @property
    def height(self) -> int:
        """Size of the third of at most four axes."""
        return self._legacy(2)

    @property
    def width(self) -> int:
        """Size of the last of at most four axes."""
        return self._legacy(3)

    def _legacy(self, axis: int) -> int:
        shape = self.shape
        if len(shape) > 4:
            raise AttributeError(f"a blob with {len(shape)} axes has no num, channels, height and width; use shape")
        return shape[axis] if axis < len(shape) else 1


class Blob:
    """Values and derivatives of one shape on one backend.

    `data` and `diff` are views in Caffe's logical order (N, C, H, W). The backend chooses the order in memory, so they
    need not be contiguous. Both are allocated at first use. A reshape to the same shape keeps them; any other reshape
    drops them. The next use of `data` moves offloaded values back to the device.

    An array that `data` or `diff` returned stays the blob's memory until the shape changes or `bind`, `drop_data` or
    `follow` is called. `data`, `diff` and `load` are thread-safe; all other methods are for one thread.

    Args:
        backend: where the arrays live.
        shape: the dimensions; `()` is a scalar.
        name: for messages.
        dtype: of values and derivatives, one of `caffepy.backend.types.DTYPES`.
    """

    def __init__(self, backend: Backend, shape: tuple[int, ...] = (), name: str = "", dtype: str = "float32") -> None:
        self.backend = backend
        self.name = name
        self.title = name
        """The name in the prototxt, for messages: that of the blob before a Split or Cast layer which the net added."""
        self.dtype = dtype
        self.copies: dict[str, Array] = {}
        """A parameter's values in other dtypes, refreshed by the net's ParameterBuffer."""
        self._shape: tuple[int, ...] = ()
        self._data: Array | None = None
        self._diff: Array | None = None
        self._lock = threading.RLock()
        """Held while memory is allocated, filled, moved to the host or brought back."""
        self._initial: Callable[[], Any] | None = None
        """Returns the initial values; called at the first use of `data`. None once they are in `_data`."""
        self._offloaded: Any = None
        """The offloaded values: a NumPy array in the backend's memory order."""
        self._source: Blob | None = None
        """The blob that holds the values; see `follow`."""
        self.borrowed = False
        """Whether another net owns the memory of the values; see `share_data`."""
        self.gradient_started = False
        """Whether `diff` already holds a part of this iteration's parameter gradient."""
        self.reshape(shape)

    @property
    def shape(self) -> tuple[int, ...]:
        return self._shape

    @property
    def gradient_owner(self) -> Blob:
        """The blob that holds the gradient: another one where a parameter is shared across shapes."""
        return self

    @property
    def count(self) -> int:
        return math.prod(self._shape)

    def reshape(self, shape: tuple[int, ...]) -> None:
        """Change the shape; drops the arrays if it differs."""
        shape = tuple(int(d) for d in shape)
        if shape == self._shape:
            return
        check_shape(shape, f"blob '{self.name}'")
        self._shape = shape
        self.drop_data()
        self._diff = None

    @property
    def data(self) -> Array:
        """The values: those of `fill_with`, else zeros until written."""
        if self._initial is not None:
            self.fill()
        data = self._data
        if data is None:
            data = self._allocate() if self._source is None else self.in_own_shape(self._source.data)
        return data

    def _allocate(self) -> Array:
        """Allocate the values: zeros, or the offloaded values."""
        with self._lock:
            if self._data is None:
                array = self.backend.zeros(self._shape, self.dtype)
                if self._offloaded is not None:
                    self._upload(self._offloaded, array)
                self._data, self._offloaded = array, None
            return self._data

    def _upload(self, host: Any, array: Array) -> None:
        with self.backend.activate():  # the stream on which `zeros` allocates
            self.backend.from_host(host, array)
            self.backend.synchronize()  # the caller may read on another stream

    @property
    def diff(self) -> Array:
        """The derivatives of the loss by the values, zero until written."""
        diff = self._diff
        if diff is None:
            with self._lock:
                if self._diff is None:
                    self._diff = self.backend.zeros(self._shape, self.dtype)
                diff = self._diff
        return diff

    def fill_with(self, values: Callable[[], Any]) -> None:
        """Set a function that returns the initial values, a host array of the blob's shape; called at first use."""
        self.drop_data()
        self._initial = values

    def move(self, memory: Array) -> None:
        """Use `memory` for the values; existing values are copied there.

        Call it before `data` is handed out: arrays that `data` returned earlier are detached from the blob.
        """
        with self._lock:
            if self._data is not None:
                self.backend.copy(self.data, memory)
            self._data = memory

    def load(self, values: Any) -> None:
        """Copy all values from a host array of the blob's shape; the function of `fill_with` is not called."""
        if self._source is not None:
            self._source.load(values.reshape(self._source.shape))
            return
        with self._lock:
            self._upload(values, self._allocate())
            self._initial = None

    def fill(self) -> None:
        """Call the function of `fill_with` now, if it has not been called."""
        if self._source is not None:
            self._source.fill()
        elif self._initial is not None:
            with self._lock:
                if self._initial is not None:
                    self.load(self._initial())

    def bind(self, data: Array | None = None, diff: Array | None = None) -> None:
        """Use `data` or `diff` from another owner: views of a flat buffer, or another blob's arrays."""
        for array in (data, diff):
            assert array is None or tuple(array.shape) == self._shape, (array.shape, self._shape)
        if data is not None:
            self.drop_data()
            self._data = data
        if diff is not None:
            self._diff = diff

    def drop_data(self) -> None:
        """Release the values; the next use of `data` allocates zeros."""
        self._data = self._initial = self._offloaded = self._source = None
        self.borrowed = False

    def follow(self, other: Blob) -> None:
        """Use the values of another blob with the same count, also after that blob's memory changes.

        Shapes may differ where the memory order of both is the logical order.
        """
        assert other.count == self.count, (other.shape, self._shape)
        self.drop_data()
        self._source, self.copies = other.source, other.copies

    def share_data(self, other: Blob) -> None:
        """Use the current memory of another net's blob of the same shape (Caffe's `Blob::ShareData`)."""
        if other is not self:
            self.bind(data=other.data)
            self.borrowed = True

    def share_data_and_copies(self, other: Blob) -> None:
        """`share_data`, and the copies in other dtypes that the other blob's net refreshes."""
        self.share_data(other)
        self.copies = other.copies

    def in_own_shape(self, array: Array) -> Array:
        """View an array with the same number of elements in this blob's shape."""
        if tuple(array.shape) == self._shape:
            return array
        return self.backend.view(self.backend.flat(array), self._shape)

    @property
    def source(self) -> Blob:
        """The blob that holds the values: this one, or the one that it follows."""
        return self if self._source is None else self._source.source

    @property
    def is_offloaded(self) -> bool:
        """Whether the values are in host memory only."""
        return self.source._offloaded is not None

    def offload_to_host(self) -> None:
        """Move the values to host memory until the next use of `data`, and free their device memory.

        Does nothing where another object references the array, or where it is a view of a larger buffer.
        """
        with self._lock:
            array = self._data
            if array is None or self._initial is not None or not self.backend.holds_values:
                return
            owner = array if array.base is None else array.base
            if owner is not array and (owner.ndim, owner.size, owner.dtype) != (1, array.size, array.dtype):
                return
            self._offloaded, self._data = view(self.backend.to_host(self.backend.flat(array)), self._shape), None
            memory = weakref.ref(owner)
            del array, owner
            held = memory()
            if held is not None:
                self._data = held if tuple(held.shape) == self._shape else self.backend.view(held, self._shape)
                self._offloaded = None

    def allocated(self, part: str) -> Array | None:
        """`data` or `diff` by name; None if it is not allocated or is offloaded."""
        self.fill()
        if part == "diff":
            return self._diff
        data = self.source._data
        return None if data is None else self.in_own_shape(data)

    def values_as(self, dtype: str) -> Array:
        """A parameter's values in `dtype`, as of the last refresh of the copies."""
        return self.data if dtype == self.dtype else self.in_own_shape(self.source.copies[dtype])

    def axis(self, index: int, where: str = "") -> int:
        """An axis number from 0, given one that may count from the end, as prototxts do.

        Raises:
            ShapeError: the blob has no such axis.
        """
        axes = len(self._shape)
        if not -axes <= index < axes:
            raise ShapeError(
                f"{where or 'blob ' + repr(self.name)}: axis {index} does not exist in shape "
                f"{format_shape(self._shape)}"
            )
        return index % axes

    def __repr__(self) -> str:
        return f"Blob({self.name!r}, {format_shape(self._shape)}, {self.backend.name})"

    def host_data(self) -> Any:
        """The values as a C-contiguous NumPy array in logical order (a copy)."""
        offloaded = self.source._offloaded
        if offloaded is not None:
            return offloaded.reshape(self._shape).copy(order="C")
        return self.backend.to_host(self.data)

    def host_diff(self) -> Any:
        """The derivatives as a C-contiguous NumPy array in logical order (a copy)."""
        return self.backend.to_host(self.diff)
