"""Arrays in GPU memory (memory layout: `backend/types.py`), and workspaces that persist between calls."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np

from caffepy.backend import types
from caffepy.backend.cuda.compiler import defines, launch, library_kernel
from caffepy.backend.cuda.device import GIBIBYTE, cupy, device_memory, device_properties
from caffepy.backend.interface import MemoryPrimitives
from caffepy.backend.types import DTYPES, Array, aligned_bytes, element_dtype, gpu_workspace, memory_order, view
from caffepy.errors import DeviceError

TICKETS = 1024
"""Growth step of the tickets of `Scratch`."""

DLPACK_CUDA = 2
"""kDLCUDA of DLPack's device types."""

WORDS = {1: "unsigned char", 2: "unsigned short", 4: "unsigned int"}
"""Type with which kernels/fill.cu sets elements, by element size."""

LARGE = 2**20
"""Minimum bytes of a `Scratch` buffer to be taken from leased memory."""


def allocate(shape: tuple[int, ...], dtype: str = "float32") -> Array:
    """Return an uninitialised array in the backend's memory order for `shape`.

    Raises:
        DeviceError: out of memory.
    """
    size, kind = math.prod(shape), np.dtype(element_dtype(dtype))
    with device_memory(f"an array of shape {shape} ({size * kind.itemsize} bytes)"):
        return view(cupy.empty(size, kind), shape)


def is_array(value: Any) -> bool:
    """Return whether a primitive's argument is an array rather than a number."""
    return isinstance(value, cupy.ndarray)


def is_dense(array: Array) -> bool:
    """Return whether the array is contiguous in the backend's memory order, so that `flat` is a view."""
    return types.is_dense(array.shape, array.strides, array.itemsize)


def raw(array: Array) -> Array:
    """Return the array as a kernel argument; slices are not allowed."""
    assert types.is_dense(array.shape, array.strides, array.itemsize), f"{array.shape} is a slice: {array.strides}"
    return array


def flat(array: Array) -> Array:
    """Return the elements as a 1-D view in memory order."""
    return memory_order(raw(array)).reshape(-1)


def download(array: Array, stream: Any) -> Any:
    """Return a C-contiguous NumPy copy in logical order, with halves as float32. Waits for the stream."""
    host = array.get(stream=stream, order="C")
    if host.dtype == np.float16:
        return host.astype(np.float32)
    if host.dtype == np.uint16:
        return (host.astype(np.uint32) << 16).view(np.float32)
    return host


def adopt(array: Any, device: int) -> Array | None:
    """See `InputPrimitives.adopt`; uses DLPack."""
    if isinstance(array, cupy.ndarray):
        found = array
    elif getattr(array, "__dlpack_device__", None) and array.__dlpack_device__()[0] == DLPACK_CUDA:
        found = cupy.from_dlpack(array)
    else:
        return None
    if found.device.id != device:
        raise DeviceError(f"the array is on GPU {found.device.id}, the net on GPU {device}; move one of them")
    cupy.cuda.runtime.deviceSynchronize()
    return cupy.ascontiguousarray(found) if any(stride < 0 for stride in found.strides) else found


def fill(array: Array, value: float) -> None:
    """Set all elements to a number."""
    dense = is_dense(array)
    if dense and value == 0:
        array.data.memset_async(0, array.nbytes, cupy.cuda.get_current_stream())
        return
    bits = _bits(array, value)
    if dense and array.itemsize in WORDS:
        kernel = library_kernel("fill", "fill", defines(Element=WORDS[array.itemsize]))
        launch(kernel, array.size, (array, bits, np.uint64(array.size)))
    else:
        array.fill(bits.view(array.dtype))


def _bits(array: Array, value: float) -> Any:
    """Return a number's bit pattern as the unsigned integer that stores an element of an array."""
    word = np.dtype(f"u{array.itemsize}").type
    return word(_bfloat16(value)) if array.dtype == np.uint16 else np.array(value, array.dtype).view(word)[()]


def _bfloat16(value: float) -> int:
    """Return the upper half of a number's float32, rounded to nearest even."""
    if value != value:
        return 0x7FFF
    bits = int(np.float32(value).view(np.uint32))
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


class Scratch:
    """Workspaces of primitives, valid within one call and reused by later calls.

    All calls of a backend run on one stream, so one buffer per purpose suffices for all layers. Buffers only grow, and
    growing discards the content. A buffer used by a captured graph is kept until the end, even if a later call needs a
    larger one. Large buffers are taken from leased memory while it suffices.
    """

    def __init__(self) -> None:
        self._free: Array | None = None
        self._leased: dict[str, Array] = {}
        self._buffers: dict[str, Array] = {}
        self._views: dict[tuple[str, int, str], Array] = {}
        self._captured: set[str] = set()
        self._outgrown: list[Array] = []

    def get(self, purpose: str, count: int, dtype: str = "float32") -> Array:
        """Return an uninitialised 1-D array of `count` elements, valid until the next call with this purpose.

        Raises:
            DeviceError: out of memory.
        """
        if self._free is not None and (size := count * np.dtype(dtype).itemsize) >= LARGE:
            leased = self._from_lease(purpose, size)
            if leased is not None:
                return leased[:size].view(dtype)
        return self._kept(purpose, count, dtype)

    def lease(self, buffer: Array | None) -> None:
        """Take large workspaces from `buffer`, 1-D uint8, until the next lease; None: allocate them."""
        self._free = buffer
        self._leased.clear()

    def _from_lease(self, purpose: str, size: int) -> Array | None:
        """Return a workspace in leased memory, or None if it does not fit. A growing workspace moves to the end."""
        assert self._free is not None
        workspace = self._leased.get(purpose)
        if workspace is None or workspace.size < size:
            if self._free.size < size:
                return None
            workspace = self._leased[purpose] = self._free[:size]
            self._free = self._free[aligned_bytes(size) :]
        return workspace

    def _kept(self, purpose: str, count: int, dtype: str) -> Array:
        """Return the allocated workspace of a purpose."""
        workspace = self._views.get((purpose, count, dtype))
        if workspace is None:
            workspace = self._make(purpose, count, dtype)
        if purpose not in self._captured and is_capturing():
            self._captured.add(purpose)
        return workspace

    def tickets(self, count: int) -> Array:
        """Return `count` uint32 zeros with which a kernel's blocks count themselves; the kernel resets them to zero."""
        before = self._buffers.get("tickets")
        tickets = self._kept("tickets", -(-count // TICKETS) * TICKETS, "uint32")
        if self._buffers["tickets"] is not before:
            tickets.fill(0)
        return tickets

    def _make(self, purpose: str, count: int, dtype: str) -> Array:
        size = max(count, 1) * np.dtype(dtype).itemsize
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.size < size:
            self._drop(purpose)
            with device_memory(f"{purpose} ({size} bytes)"):
                buffer = self._buffers[purpose] = cupy.empty(size, "uint8")
        view = self._views[purpose, count, dtype] = buffer[:size].view(dtype)[:count]
        return view

    def _drop(self, purpose: str) -> None:
        self._views = {key: view for key, view in self._views.items() if key[0] != purpose}
        buffer = self._buffers.pop(purpose, None)
        if purpose in self._captured and buffer is not None:
            self._captured.discard(purpose)
            self._outgrown.append(buffer)

    def clear(self) -> None:
        self._views.clear()
        self._buffers.clear()
        self._captured.clear()
        self._outgrown.clear()


def is_capturing() -> bool:
    """Return whether the current stream is capturing."""
    return bool(cupy.cuda.runtime.streamIsCapturing(cupy.cuda.get_current_stream().ptr))


class CudaMemory(MemoryPrimitives):
    """Arrays in GPU memory, with the stream and workspaces that the GPU's primitives share.

    Memory is allocated, filled, copied and moved on the backend's stream, regardless of the current stream, because
    nets are also built outside `activate`.
    """

    dtypes = DTYPES
    stream: Any
    device: int
    _device: Any
    _scratch: Scratch

    @contextmanager
    def activate(self) -> Iterator[None]:
        with self._device, self.stream:
            yield

    def device_description(self) -> str:
        properties = device_properties(self.device)
        return f"{properties.name} (device {self.device}, {properties.memory / GIBIBYTE:.1f} GiB)"

    def _on_stream(self) -> AbstractContextManager[None]:
        """Make the backend's stream current within a `with` block, unless it is current already.

        Work on two streams is unordered: a fill on the caller's stream could run before the zeros of the same array on
        the backend's stream. CuPy also pools freed memory per stream: memory allocated on the caller's stream could
        still be written by unfinished work of another stream.
        """
        return nullcontext() if cupy.cuda.get_current_stream() is self.stream else self.activate()

    def workspace(self, own: int) -> int:
        return gpu_workspace(own)

    def arena(self, size: int) -> Array:
        # Return freed blocks to the device; an arena needs contiguous memory.
        cupy.get_default_memory_pool().free_all_blocks(stream=self.stream)
        return super().arena(size)

    @contextmanager
    def workspace_lease(self, buffer: Array | None) -> Iterator[None]:
        self._scratch.lease(buffer)
        try:
            yield
        finally:
            self._scratch.lease(None)

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        with self._on_stream():
            array = allocate(shape, dtype)
            array.data.memset_async(0, array.nbytes, self.stream)
        return array

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        return view(flat, shape)

    def flat(self, array: Array) -> Array:
        return flat(array)
