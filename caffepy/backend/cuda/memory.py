"""Arrays in GPU memory: persistent workspaces, copies and additions, transfers from and to the host, and input.

The memory layout is that of `backend/types.py`. A copy between arrays of any dtype and strides is a memcpy, a pack of
contiguous elements (casts, Concat, Slice) or a tiled transposition (between channels last and C order); the kernels are
in kernels/copy.cu.

Input passes through pinned memory and a copy stream beside the backend's stream, and kernels convert slots to blobs.
`CudaRing` owns the copy stream and the events between the two streams. The host only queries the events and never waits
for them.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend import types
from caffepy.backend.cuda.compiler import (
    C_TYPES,
    MAX_GRID,
    RESIDENT_BLOCKS,
    THREADS,
    Launch,
    aligned,
    c_type,
    defines,
    device_number,
    divider,
    launch,
    launch_blocks,
    library_kernel,
)
from caffepy.backend.cuda.device import GIBIBYTE, cupy, device_memory, device_properties
from caffepy.backend.cuda.index_arithmetic import StridedAxis, collapse, widest
from caffepy.backend.interface import CopyPrimitives, InputPrimitives, MemoryPrimitives
from caffepy.backend.types import (
    DTYPES,
    Array,
    Counter,
    ImageSlot,
    InputRing,
    aligned_bytes,
    element_dtype,
    gpu_workspace,
    is_plain,
    memory_order,
    view,
)
from caffepy.errors import DeviceError

logger = logging.getLogger(__name__)

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
    # The array's owner may still write to it on a stream that is not known here.
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
        # The graph keeps the address: this buffer must stay where it is, also when a later call outgrows it.
        if purpose not in self._captured and is_capturing():
            self._captured.add(purpose)
        return workspace

    def tickets(self, count: int) -> Array:
        """Return `count` uint32 zeros with which a kernel's blocks count themselves; the kernel resets them to zero."""
        before = self._buffers.get("tickets")
        tickets = self._kept("tickets", -(-count // TICKETS) * TICKETS, "uint32")
        # Zeroed once; kernels leave their tickets at zero, so that a captured launch needs no memset before it.
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
        """Make the backend's stream current within a `with` block, unless it is current already."""
        # Work on two streams is unordered: a fill on the caller's stream could run before the zeros of the same array
        # on the backend's stream. CuPy also pools freed memory per stream: memory allocated on the caller's stream
        # could still be written by unfinished work of another stream.
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


# -- copies --------------------------------------------------------------------------------------------

AXES = 4
"""Axes that a kernel supports; arrays with more axes are copied slice by slice."""

EACH = 4
"""Packs per thread."""

TILE = 32
"""Rows and columns of a transposed tile."""

MAX_PACKS = 2**31 - 1
FLOATS = ("f", "e", "H")
"""dtype characters that values can be rounded to."""


SLOTS = 3
"""Pinned upload buffers of a `Staging`."""

PART = 2**19
"""Elements per chunk of a pipelined upload through pinned memory."""

MAX_THREADS = 4
"""Threads that copy into pinned memory; a single thread is slower than the bus."""


class Ends(NamedTuple):
    """The properties of source and destination that determine the kernel."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    alignments: tuple[int, int]
    add: bool
    device: int


def copy(source: Array, destination: Array) -> None:
    """See `Backend.copy`."""
    if destination.size == 0:
        return
    same = source.dtype == destination.dtype and source.shape == destination.shape
    if same and is_dense(source) and is_dense(destination):
        stream = cupy.cuda.get_current_stream()
        destination.data.copy_from_device_async(source.data, source.nbytes, stream)
    elif destination.dtype.char in FLOATS and source.dtype.char in C_TYPES or same:
        _move(source, destination, add=False)
    else:
        cupy.copyto(destination, source, casting="unsafe")


def add(source: Array, destination: Array) -> None:
    """See `Backend.add`."""
    if destination.size:
        _move(source, destination, add=True)


def upload(host: Any, destination: Array, scratch: Scratch) -> None:
    """Copy a NumPy array to the device and convert it to the destination's memory order and dtype."""
    kind = np.dtype(np.float32) if destination.dtype.char in FLOATS else destination.dtype
    host = np.asarray(host, dtype=kind)
    assert tuple(host.shape) == tuple(destination.shape), (host.shape, destination.shape)
    if host.size == 0:
        return
    stream = cupy.cuda.get_current_stream()
    ordered = memory_order(host)
    if kind == destination.dtype and is_dense(destination) and ordered.flags.c_contiguous:
        destination.data.copy_from_host_async(ordered.ctypes.data, ordered.nbytes, stream)
        return
    contiguous = np.ascontiguousarray(host)
    staged = scratch.get("upload", host.size, kind.name).reshape(host.shape)
    staged.data.copy_from_host_async(contiguous.ctypes.data, contiguous.nbytes, stream)
    copy(staged, destination)


class Staging:
    """Pinned staging buffers for full-speed transfers between host arrays and the device.

    Args:
        stream: the backend's stream.
        scratch: the backend's workspaces.
    """

    def __init__(self, stream: Any, scratch: Scratch) -> None:
        self._stream = stream
        self._scratch = scratch
        self._slots = [np.empty(0, np.float32)] * SLOTS
        self._copied: list[Any] = [None] * SLOTS
        """Event of each slot's last transfer."""
        self._slot_index = 0
        self._results = np.empty(0, np.float32)
        self._threads: ThreadPoolExecutor | None = None

    def upload(self, host: Any, destination: Array) -> None:
        """See `InputPrimitives.upload`."""
        assert tuple(host.shape) == tuple(destination.shape), (host.shape, destination.shape)
        if host.size == 0:
            return
        direct = destination.dtype == np.float32 and destination.flags.c_contiguous
        staged = destination if direct else self._scratch.get("upload", host.size).reshape(host.shape)
        self._slot_index = (self._slot_index + 1) % SLOTS
        # The slot's last transfer must be over. With several slots that is nearly always so.
        if self._copied[self._slot_index] is not None:
            self._copied[self._slot_index].synchronize()
        slot = self._slots[self._slot_index] = _grown(self._slots[self._slot_index], host.size)
        self._send(host, slot[: host.size], staged)
        event = self._copied[self._slot_index] = cupy.cuda.Event(disable_timing=True)
        event.record(self._stream)
        if not direct:
            copy(staged, destination)

    def _send(self, host: Any, pinned: Any, staged: Array) -> None:
        """Copy the elements chunk by chunk, so that transfers overlap with the copies into pinned memory."""
        if not host.flags.c_contiguous or host.size <= 2 * PART:
            np.copyto(pinned.reshape(host.shape), host, casting="unsafe")
            self._send_part(pinned, staged, slice(0, host.size))
            return
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(MAX_THREADS, len(os.sched_getaffinity(0))), "staging")
        flat = host.reshape(-1)
        parts = [slice(begin, min(begin + PART, host.size)) for begin in range(0, host.size, PART)]
        copies = [self._threads.submit(np.copyto, pinned[part], flat[part], "unsafe") for part in parts]
        for part, copied in zip(parts, copies, strict=True):
            # In order: the transfer of a part runs while threads copy the next ones.
            copied.result()
            self._send_part(pinned, staged, part)

    def _send_part(self, pinned: Any, staged: Array, part: slice) -> None:
        source = pinned[part]
        target = staged.data + part.start * source.itemsize
        target.copy_from_host_async(source.ctypes.data, source.nbytes, self._stream)

    def download(self, arrays: Sequence[Array]) -> list[Any]:
        """See `InputPrimitives.download`."""
        self._results = pinned = _grown(self._results, sum(array.size for array in arrays))
        begin, views = 0, []
        for array in arrays:
            view = pinned[begin : begin + array.size]
            if array.size:
                ordered = self._as_float32(array)
                ordered.data.copy_to_host_async(view.ctypes.data, view.nbytes, self._stream)
            views.append(view.reshape(array.shape))
            begin += array.size
        self._stream.synchronize()
        # The pinned buffer is used again by the next call.
        return [view.copy() for view in views]

    def _as_float32(self, array: Array) -> Array:
        """Return the elements as float32 in C order. A copy is valid until the next call."""
        if array.dtype == np.float32 and array.flags.c_contiguous:
            return array
        staged = self._scratch.get("download", array.size).reshape(array.shape)
        copy(array, staged)
        return staged

    def close(self) -> None:
        """Stop the copy threads."""
        if self._threads is not None:
            self._threads.shutdown()


def _grown(pinned: Any, count: int) -> Any:
    """Return pinned memory for at least `count` float32 elements: the given buffer or a larger one."""
    if pinned.size >= count:
        return pinned
    return np.frombuffer(cupy.cuda.alloc_pinned_memory(4 * count), np.float32, count)


def in_c_order(array: Array, scratch: Scratch, purpose: str) -> Array:
    """Return the elements in logical order, C-contiguous: the array itself or a copy in scratch memory."""
    if array.flags.c_contiguous:
        return array
    result = scratch.get(purpose, array.size, array.dtype.name).reshape(array.shape)
    _move(array, result, add=False)
    return result


def _move(source: Array, destination: Array, add: bool) -> None:
    assert tuple(source.shape) == tuple(destination.shape), (source.shape, destination.shape)
    alignments = (math.gcd(int(source.data.ptr), 16), math.gcd(int(destination.data.ptr), 16))
    ends = Ends(
        tuple(source.shape),
        (source.strides, destination.strides),
        (source.dtype.char, destination.dtype.char),
        alignments,
        add,
        device_number(),
    )
    plan = _plan(ends)
    if plan is not None:
        plan.kernel(plan.grid, plan.block, (source, destination, *plan.arguments))
        return
    # The outermost axis of the destination: its slices are the largest contiguous pieces.
    axis = max(range(source.ndim), key=lambda a: abs(destination.strides[a]) * (source.shape[a] > 1))
    for i in range(source.shape[axis]):
        index = (slice(None),) * axis + (i,)
        _move(source[index], destination[index], add)


@lru_cache(maxsize=4096)
def _plan(ends: Ends) -> Launch | None:
    """Return the launch for these arrays, or None if they exceed a launch's axes or elements."""
    items = [np.dtype(char).itemsize for char in ends.dtypes]
    steps = [tuple(s // item for s in strides) for strides, item in zip(ends.strides, items, strict=True)]
    axes = collapse(ends.shape, steps[0], steps[1])
    if len(axes) > AXES:
        return None
    if _is_transposition(axes):
        return _plan_transposition(ends, axes)
    width = _width(ends, axes, items)
    inner = StridedAxis(axes[-1].size // width, axes[-1].source * width, axes[-1].destination * width)
    packs = math.prod(ends.shape) // width
    if packs > MAX_PACKS:
        return None
    kernel = _kernel("move", ends, width, len(axes))
    arguments = [argument for axis in _filled([inner, *axes[-2::-1]]) for argument in _axis_arguments(axis)]
    return Launch(kernel, (-(-packs // (THREADS * EACH)),), (THREADS,), (*arguments, np.uint32(packs)))


def _kernel(name: str, ends: Ends, width: int, dims: int) -> Any:
    source, target = (C_TYPES[char] for char in ends.dtypes)
    text = defines(SOURCE=source, STORED=target, WIDTH=width, DIMS=dims, ADD=int(ends.add))
    return library_kernel("copy", name, text)


def _axis_arguments(axis: StridedAxis) -> tuple[Any, ...]:
    return np.uint32(axis.size), divider(axis.size), np.int64(axis.source), np.int64(axis.destination)


def _filled(axes: list[StridedAxis]) -> list[StridedAxis]:
    return axes + [StridedAxis(1, 0, 0)] * (AXES - len(axes))


def _width(ends: Ends, axes: list[StridedAxis], items: list[int]) -> int:
    """Return how many contiguous elements a thread can move at once."""
    inner = axes[-1]
    if (inner.source, inner.destination) != (1, 1):
        return 1
    numbers = [inner.size, *(step for axis in axes[:-1] for step in (axis.source, axis.destination))]
    width = widest(numbers, 16 // max(items))
    # Both ends must be aligned to the load: a wide load from another address is an error of the device.
    while any(alignment % (width * item) for alignment, item in zip(ends.alignments, items, strict=True)):
        width //= 2
    return width


def _is_transposition(axes: list[StridedAxis]) -> bool:
    """Return whether source and destination have different innermost axes, as in a transposition."""
    rows = [axis for axis in axes if axis.source == 1]
    columns = axes[-1]
    wide = len(rows) == 1 and rows[0] is not columns and min(rows[0].size, columns.size) >= TILE // 2
    return wide and columns.destination == 1 and columns.size < TILE * MAX_GRID


def _plan_transposition(ends: Ends, axes: list[StridedAxis]) -> Launch:
    columns, rows = axes[-1], next(axis for axis in axes if axis.source == 1)
    outer = [axis for axis in axes if axis is not rows and axis is not columns]
    inner, last = [*outer[::-1], StridedAxis(1, 0, 0), StridedAxis(1, 0, 0)][:2]
    batches = inner.size * last.size
    grid = (-(-rows.size // TILE), -(-columns.size // TILE), min(batches, MAX_GRID))
    arguments = (
        np.uint32(rows.size),
        np.uint32(columns.size),
        np.int64(columns.source),
        np.int64(rows.destination),
        *_axis_arguments(inner),
        np.int64(last.source),
        np.int64(last.destination),
        np.uint32(batches),
    )
    return Launch(_kernel("turn", ends, 1, 1), grid, (TILE, TILE // EACH), arguments)


class CudaCopy(CopyPrimitives, CudaMemory):
    """`CopyPrimitives` of the GPU."""

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        if tuple(array.shape) == tuple(shape) and is_dense(array):
            return array
        with self._on_stream():
            if not array.flags.c_contiguous:
                ordered = allocate((array.size,), array.dtype.name).reshape(array.shape)
                copy(array, ordered)
                array = ordered
            if is_plain(shape):
                return view(array.reshape(-1), shape)
            result = allocate(shape, array.dtype.name)
            copy(array.reshape(shape), result)
            return result

    def fill(self, array: Array, value: float) -> None:
        with self._on_stream():
            fill(array, value)

    def copy(self, source: Array, destination: Array) -> None:
        with self._on_stream():
            copy(source, destination)

    def add(self, source: Array, destination: Array) -> None:
        with self._on_stream():
            add(source, destination)

    def from_host(self, host: Any, destination: Array) -> None:
        with self._on_stream():
            upload(host, destination, self._scratch)

    def to_host(self, array: Array) -> Any:
        with self._on_stream():
            return download(array, self.stream)


# -- input ---------------------------------------------------------------------------------------------


_TILE_BYTES = 24576
"""Shared memory of a block; eight such blocks fit a multiprocessor."""
_MAX_PIXELS = 2
"""Pixels per thread. A float16 CaffeNet batch on an H200 takes 51 us with 2, 72 with 1, 61 with 4 and 75 with 8."""

_leaked: list[Any] = []
"""Memory that a timed-out copy may still use; never freed."""


class CudaRing(InputRing):
    """Slots in device memory, filled on a separate copy stream.

    Args:
        stream: the backend's stream.
        others: as `InputRing`.

    Raises:
        DeviceError: out of memory.
    """

    def __init__(self, stream: Any, *others: int) -> None:
        super().__init__(*others)
        self._stream = stream
        # Beside the backend's stream, so that the next batch arrives while this one is computed.
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self.memory = allocate((self.slots * self.slot_size,), "uint8")
        self._arrived = [cupy.cuda.Event(disable_timing=True) for _ in range(self.blocks)]
        self._free = [cupy.cuda.Event(disable_timing=True) for _ in range(self.blocks)]
        self._stored_blocks = [-1] * self.blocks
        """Block stored in each part of the ring."""
        self._consumed_blocks = [-1] * self.blocks
        """Last consumed block of each part of the ring."""
        self._in_flight: deque[tuple[Any, Callable[[], None]]] = deque()
        self._closed = False
        self.restart()

    def ready(self) -> bool:
        while self._in_flight and self._in_flight[0][0].done:
            self._in_flight.popleft()[1]()
        return len(self._in_flight) < self.blocks

    def put(self, number: int, passes: int, parts: Sequence[tuple[int, Any]], done: Callable[[], None]) -> None:
        block = number // self.block
        position = block % self.blocks
        assert len(self._in_flight) < self.blocks, "the ring is full"
        assert (
            self._consumed_blocks[position] == self._stored_blocks[position] or self._stored_blocks[position] == block
        ), f"pass {number} overwrites a slot that is not consumed"
        self._stored_blocks[position] = block
        # The slot is overwritten only when the kernels that read it have run. The events wait on the device; the host
        # goes on.
        self._copies.wait_event(self._free[position])
        begin = self.memory.data.ptr + number % self.slots * self.slot_size
        for offset, host in parts:
            cupy.cuda.runtime.memcpyAsync(
                begin + offset, host.ctypes.data, host.nbytes, cupy.cuda.runtime.memcpyHostToDevice, self._copies.ptr
            )
        arrived = self._arrived[position]
        arrived.record(self._copies)
        # What the backend queues from now on may read the slot.
        self._stream.wait_event(arrived)
        self._in_flight.append((arrived, done))

    def consumed(self, number: int) -> None:
        # One event for a block of passes: an event for each would cost the host time in each iteration.
        if (number + 1) % self.block == 0:
            position = number // self.block % self.blocks
            self._free[position].record(self._stream)
            self._consumed_blocks[position] = number // self.block

    def restart(self) -> None:
        for event in self._free:
            event.record(self._stream)
        self._consumed_blocks = list(self._stored_blocks)

    def close(self, timeout: float = 10.0) -> None:
        if self._closed:
            return
        self._closed = True
        deadline = time.monotonic() + timeout
        while self._in_flight and time.monotonic() < deadline:
            self.ready()
            time.sleep(0.0005)
        if self._in_flight:
            logger.warning("input transfer to the GPU is not complete after %.0f s; its memory is not freed", timeout)
            # Memory that is freed while a transfer writes to it would corrupt the next array there.
            _leaked.append((self.memory, self._copies, list(self._in_flight)))
        self._in_flight.clear()
        self.memory = None


class CudaInput(InputPrimitives, CudaMemory):
    """`InputPrimitives` of the GPU."""

    _staging: Staging

    def upload(self, host: Any, destination: Array) -> None:
        with self._on_stream():
            self._staging.upload(host, destination)

    def download(self, arrays: Sequence[Array]) -> list[Any]:
        with self._on_stream():
            return self._staging.download(arrays)

    def adopt(self, array: Any) -> Array | None:
        return adopt(array, self.device)

    def host_memory(self, size: int) -> Any:
        with self._device:
            try:
                return np.frombuffer(cupy.cuda.alloc_pinned_memory(max(size, 1)), np.uint8, size)
            except (cupy.cuda.runtime.CUDARuntimeError, MemoryError) as error:
                raise DeviceError(
                    f"{size / GIBIBYTE:.2f} GiB of pinned host memory for input cannot be allocated ({error}): "
                    "use a smaller batch_size or prefetch"
                ) from error

    def input_ring(self, slot_size: int, block: int, blocks: int) -> InputRing:
        with self._device, self.stream:
            return CudaRing(self.stream, slot_size, block, blocks)

    def take_images(
        self,
        ring: InputRing,
        counter: Counter,
        slot: ImageSlot,
        mean: Array,
        scale: float,
        images: Array,
        labels: Array | None,
    ) -> None:
        whole = mean.shape[1:] != (1, 1)
        plane = slot.height * slot.width
        pixels = _pixels_per_thread(slot.count * plane, slot.channels * images.itemsize)
        tile = pixels * THREADS * slot.channels if pixels and aligned(images) else 0
        channels = slot.channels if slot.channels <= 4 else 0
        constants = defines(
            ELEMENT=c_type(images), WHOLE_MEAN=int(whole), CHANNELS=channels, PIXELS=max(pixels, 1), TILE=tile, WIDTH=1
        )
        arguments = (
            *_slot_arguments(ring, counter),
            np.uint64(slot.crops_at),
            np.uint64(slot.pixels_at),
            slot.count,
            slot.channels,
            slot.width,
            plane,
            mean.shape[2],
            mean.shape[1] * mean.shape[2],
            divider(plane),
            divider(slot.width),
            float(scale),
            raw(mean),
            raw(images),
            np.uint64(0) if labels is None else raw(labels),
        )
        blocks = -(-slot.count * plane // (max(pixels, 1) * THREADS))
        launch_blocks(library_kernel("input", "images", constants), (blocks,), (THREADS,), arguments)

    def take_values(self, ring: InputRing, counter: Counter, offset: int, values: Array) -> None:
        width = 16 // values.itemsize if aligned(values) else 1
        constants = defines(ELEMENT=c_type(values), WHOLE_MEAN=0, CHANNELS=0, PIXELS=1, TILE=0, WIDTH=width)
        arguments = (*_slot_arguments(ring, counter), np.uint64(offset), values.size, raw(values))
        launch(library_kernel("input", "values", constants), -(-values.size // width), arguments)


def _pixels_per_thread(pixels: int, pixel_size: int) -> int:
    """Return the pixels per thread: enough to hide memory latency while all multiprocessors have work."""
    # Return 0 if the tile cannot hold one pixel per thread.
    most = min(_TILE_BYTES // (THREADS * pixel_size), pixels // (THREADS * RESIDENT_BLOCKS), _MAX_PIXELS)
    return max(most, 1 if THREADS * pixel_size <= _TILE_BYTES else 0)


def _slot_arguments(ring: InputRing, counter: Counter) -> tuple[Any, ...]:
    """Return the arguments that locate the slot for a kernel."""
    assert isinstance(ring, CudaRing)
    eager = isinstance(counter, tuple)
    return (
        ring.memory,
        np.uint64(0) if eager else counter,
        np.uint64(counter[0] if eager else 0),
        ring.slots - 1,
        np.uint64(ring.slot_size),
    )
