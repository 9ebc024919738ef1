"""Arrays on the CPU: memory, shared workspaces, fills and copies, and images from bytes.

Available memory is checked before large allocations, because Linux grants every request. The C library keeps freed
memory until it is told to return it.

Copies have kernels for images in other memory orders and for slices. For images from bytes one kernel subtracts the
mean, scales, mirrors and converts to channels last.
"""

from __future__ import annotations

import ctypes
import math
import resource
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.backend import types
from caffepy.backend.cpu.jit.kernel import CURRENT, Bytes, Float, Floats, Int, Ints, kernel, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.interface import CopyPrimitives, InputPrimitives, MemoryPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, Counter, HostRing, ImageSlot, InputRing, is_plain, memory_order
from caffepy.errors import OutOfMemoryError

ALIGNMENT = 64
"""Bytes in a cache line."""


def aligned(size: int) -> Any:
    """Return an uninitialised float32 array aligned to a cache line."""
    raw = np.empty(4 * size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + 4 * size].view(np.float32)


def aligned_zeros(shape: tuple[int, ...], dtype: str) -> Any:
    """Return a zeroed C-contiguous array aligned to a cache line, so that vector loads do not straddle two lines."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class Workspace:
    """One growing buffer per purpose, valid until the next `take` for that purpose."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def take(self, purpose: str, size: int) -> Any:
        """Return at least `size` uninitialised float32 elements."""
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.size < size:
            # The old buffer is freed first, so that the two do not add up.
            self._buffers.pop(purpose, None)
            buffer = self._buffers[purpose] = aligned(size)
        return buffer

    def clear(self) -> None:
        """Free the buffers."""
        self._buffers.clear()


_GROUP = Path("/sys/fs/cgroup")


def give_back_memory() -> None:
    """Return freed memory from glibc to the system (malloc_trim); takes about a millisecond."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def available_memory(system: Path = Path("/proc"), group: Path = _GROUP) -> int | None:
    """Return the bytes available without swapping or an OOM kill; None if the system does not report it.

    It is the least of the machine's free memory and the remainders of the control group's limit and RLIMIT_AS.
    """
    found = [*_machine(system), *_group(group), *_limit(system)]
    return max(min(found), 0) if found else None


def _machine(system: Path) -> Iterator[int]:
    try:
        lines = (system / "meminfo").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        if line.startswith("MemAvailable:"):
            yield int(line.split()[1]) * 1024


def _group(group: Path) -> Iterator[int]:
    """Yield the remainder of the control group's (v2) limit; its page cache counts as free."""
    try:
        limit, used = ((group / name).read_text().strip() for name in ("memory.max", "memory.current"))
        kept = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        if limit != "max":
            yield int(limit) - int(used) + int(kept.get("inactive_file", 0)) + int(kept.get("active_file", 0))
    except (OSError, ValueError):
        return


def _limit(system: Path) -> Iterator[int]:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    try:
        pages = int((system / "self/statm").read_text().split()[0])
    except (OSError, ValueError):
        pages = 0
    yield limit - pages * resource.getpagesize()


LARGE = 2**28
"""Minimum bytes of an array for checking available memory first."""


class CpuMemory(MemoryPrimitives):
    """Host memory arrays, and the state shared by the CPU's primitives."""

    threads: int
    _workspace: Workspace

    def device_description(self) -> str:
        return f"CPU, {self.threads} thread{'s' if self.threads > 1 else ''}"

    def available_memory(self) -> int | None:
        return available_memory()

    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        size = math.prod(shape) * np.dtype(dtype).itemsize
        try:
            # Linux overcommits: it would grant memory that it lacks and kill the process on use.
            if size > LARGE and size > (self.available_memory() or size):
                raise MemoryError
            return types.view(aligned_zeros((math.prod(shape),), dtype), shape)
        except MemoryError:
            raise OutOfMemoryError(
                f"{self.device_description()}: out of memory: {size / 2**30:.2f} GiB for an array of shape {shape} "
                "cannot be allocated",
                "use a smaller batch_size",
            ) from None

    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        return types.view(flat, shape)

    def flat(self, array: Array) -> Array:
        in_memory = memory_order(array)
        assert in_memory.flags.c_contiguous, (
            f"shape {array.shape}, strides {array.strides}: not contiguous in memory order"
        )
        return in_memory.reshape(-1)

    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        if tuple(array.shape) == tuple(shape):
            return array
        if array.flags.c_contiguous and is_plain(shape):
            return self.view(array.reshape(-1), shape)
        note_host_work()
        result = self.zeros(shape, array.dtype.name)
        if len(shape) in CHANNELS_LAST:
            result[...] = array.reshape(shape)
        else:
            result.reshape(array.shape)[...] = array
        return result

    def _check_dense(self, *arrays: Array) -> None:
        for array in arrays:
            assert self._dense(array), f"shape {array.shape}, strides {array.strides}: not contiguous in memory order"

    def _dense(self, array: Array) -> bool:
        return bool(memory_order(array).flags.c_contiguous)


@kernel
def copy_rows(
    begin: Int,
    end: Int,
    source: Floats,
    source_n: Int,
    source_c: Int,
    source_h: Int,
    source_w: Int,
    target: Floats,
    target_n: Int,
    target_c: Int,
    target_h: Int,
    target_w: Int,
    channels: Int,
    height: Int,
    width: Int,
) -> None:
    """Items are rows (n, h); axis steps are in elements."""
    for item in range(begin, end):
        n, h = item // height, item % height
        at, to = n * source_n + h * source_h, n * target_n + h * target_h
        # With channels last on both sides the copy is contiguous. Otherwise the loop over pixels is the inner one:
        # images from channels first are then read in memory order.
        if source_c == 1 and target_c == 1:
            for w in range(width):
                first, start = at + w * source_w, to + w * target_w
                for c in range(channels):
                    target[start + c] = source[first + c]
        else:
            for c in range(channels):
                first, start = at + c * source_c, to + c * target_c
                for w in range(width):
                    target[start + w * target_w] = source[first + w * source_w]


@kernel
def copy_lines(
    begin: Int,
    end: Int,
    source: Floats,
    source_step: Int,
    target: Floats,
    target_step: Int,
    length: Int,
    part: Int,
    parts: Int,
) -> None:
    """Items are (line, part of the line); line steps are in elements."""
    for item in range(begin, end):
        line, first = item // parts, item % parts * part
        at, to = line * source_step + first, line * target_step + first
        for i in range(min(part, length - first)):
            target[to + i] = source[at + i]


@kernel
def copy_numbers(begin: Int, end: Int, source: Ints, target: Floats) -> None:
    """Items are elements."""
    for i in range(begin, end):
        target[i] = source[i]


def is_whole(array: Any, dtype: str) -> bool:
    """Return whether kernels may read the array as contiguous elements in memory order."""
    return type(array) is np.ndarray and array.dtype == dtype and bool(memory_order(array).flags.c_contiguous)


def are_whole_numbers(source: Any, target: Any) -> bool:
    """Return whether `copy_whole_numbers` applies: int32 to float32, both contiguous in the same order."""
    return source.shape == target.shape and is_whole(source, "int32") and is_whole(target, "float32")


def copy_whole_numbers(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, if `are_whole_numbers`."""
    copy_numbers.run(threads, source.size, GRAIN, source, target)


def is_images(source: Any, target: Any) -> bool:
    """Return whether `copy_images` applies: disjoint float32 (N, C, H, W) or (N, C, D, H, W) of one shape."""
    return are_plain(source, target) and source.ndim in (4, 5)


def are_plain(source: Any, target: Any) -> bool:
    """Return whether both are disjoint float32 arrays of one shape."""
    return (
        type(source) is np.ndarray
        and source.shape == target.shape
        and source.dtype == target.dtype == np.float32
        and target.flags.writeable
        and source.flags.aligned
        and not np.may_share_memory(source, target)
    )


def copy_images(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, if `is_images`; volumes one by one, each as D images."""
    if source.ndim == 5:
        for volume, copied in zip(source, target, strict=True):
            copy_images(threads, volume.swapaxes(0, 1), copied.swapaxes(0, 1))
        return
    n, channels, height, width = source.shape
    steps, others = _steps(source), _steps(target)
    grain = max(1, GRAIN // max(1, channels * width))
    if steps[1] == others[1] == 1 and steps[3] == others[3] == channels:  # contiguous rows
        channels, width = channels * width, 1
    copy_rows.run(threads, n * height, grain, source, *steps, target, *others, channels, height, width)


def are_lines(source: Any, target: Any) -> bool:
    """Return whether `copy_as_lines` applies: one array is sliced along an axis, the other likewise or contiguous."""
    if not (are_plain(source, target) and source.size):
        return False
    lines = _lines(source), _lines(target)
    if lines[0] is None or lines[1] is None:
        return False
    lengths = {lines[0][0], lines[1][0]}
    return len(lengths) == 1 or max(lengths) == source.size


def copy_as_lines(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, if `are_lines`."""
    (first, step), (second, other) = (_lines(array) or (0, 0) for array in (source, target))
    length = min(first, second)  # if the lengths differ, the longer array is a single line
    steps = (step if first == length else length, other if second == length else length)
    part = min(length, GRAIN)
    parts = -(-length // part)
    copy_lines.run(
        threads,
        source.size // length * parts,
        max(1, GRAIN // part),
        source,
        steps[0],
        target,
        steps[1],
        length,
        part,
        parts,
    )


def _lines(array: Any) -> tuple[int, int] | None:
    """Return (length, step) of the array as equidistant contiguous lines, or None."""
    axes = [(size, stride // array.itemsize) for size, stride in zip(array.shape, array.strides, strict=True)]
    axes = [axis for axis in axes if axis[0] != 1]
    length = 1
    while axes and axes[-1][1] == length:
        length *= axes.pop()[0]
    if not axes:
        return length, length
    step = axes[-1][1]
    evenly = all(outer[1] == size * inner for outer, (size, inner) in pairwise(axes))
    return (length, step) if evenly else None


def _steps(images: Any) -> tuple[int, ...]:
    """Return strides in elements; axes of size one count as contiguous."""
    n, c, h, w = (stride // images.itemsize for stride in images.strides)
    _, channels, _, width = images.shape
    return n, 1 if channels == 1 else c, h, channels if width == 1 else w


@kernel
def _add(begin: Int, end: Int, source: Floats, destination: Floats) -> None:
    for i in range(begin, end):
        destination[i] += source[i]


class CpuCopy(CopyPrimitives, CpuMemory):
    """`CopyPrimitives` of the CPU."""

    def fill(self, array: Array, value: float) -> None:
        note_host_work()
        array[...] = value

    def copy(self, source: Array, destination: Array) -> None:
        if is_images(source, destination):
            copy_images(self.threads, source, destination)
        elif CURRENT.calls is not None and are_lines(source, destination):  # otherwise NumPy is as fast
            copy_as_lines(self.threads, source, destination)
        elif are_whole_numbers(source, destination):
            copy_whole_numbers(self.threads, source, destination)
        else:
            note_host_work()
            destination[...] = source

    def add(self, source: Array, destination: Array) -> None:
        if self._dense(source) and self._dense(destination) and source.dtype == np.float32:
            _add.run(self.threads, source.size, GRAIN, source, destination)
        else:
            note_host_work()
            destination += source

    def from_host(self, host: Any, destination: Array) -> None:
        assert np.shape(host) == destination.shape, (np.shape(host), destination.shape)
        self.copy(host, destination)

    def to_host(self, array: Array) -> Any:
        note_host_work()
        return np.array(array, order="C", copy=True)


# -- images from bytes ---------------------------------------------------------------------------------

_COMPILING = 40_000_000
"""Elements that NumPy processes in the kernel's compile time, about 0.5 s."""


@kernel
def image_rows(
    begin: Int,
    end: Int,
    pixels: Bytes,
    crops: Ints,
    means: Floats,
    out: Floats,
    channels: Int,
    height: Int,
    width: Int,
    mean_height: Int,
    mean_width: Int,
    moves: Int,
    scale: Float,
) -> None:
    """Items are rows (n, h); out[n, h, w, c] = (pixels[n, c, h, w'] - means[c, top + h, left + w']) * scale.

    Without `moves` the means start at the crop's corner. Indices of right-to-left loops are unsigned: signed indices
    may wrap, which prevents vectorisation by LLVM.
    """
    plane = height * width
    mean_plane = mean_height * mean_width
    last = np.uintp(width - 1)
    for row in range(begin, end):
        n = row // height
        h = row - n * height
        mirrored = crops[3 * n] != 0
        v = np.uintp((n * channels * height + h) * width)
        m = np.uintp((moves * crops[3 * n + 1] + h) * mean_width + moves * crops[3 * n + 2])
        o = np.uintp(row * width * channels)
        # All three planes in one loop: each pixel of the output is written once, in memory order, instead of every
        # third element in three passes.
        if channels == 3:
            v1 = v + np.uintp(plane)
            v2 = v1 + np.uintp(plane)
            m1 = m + np.uintp(mean_plane)
            m2 = m1 + np.uintp(mean_plane)
            if mirrored:
                for x in range(np.uintp(width)):
                    s = last - x
                    to = o + np.uintp(3) * x
                    out[to] = (np.float32(pixels[v + s]) - means[m + s]) * scale
                    out[to + np.uintp(1)] = (np.float32(pixels[v1 + s]) - means[m1 + s]) * scale
                    out[to + np.uintp(2)] = (np.float32(pixels[v2 + s]) - means[m2 + s]) * scale
            else:
                for x in range(np.uintp(width)):
                    to = o + np.uintp(3) * x
                    out[to] = (np.float32(pixels[v + x]) - means[m + x]) * scale
                    out[to + np.uintp(1)] = (np.float32(pixels[v1 + x]) - means[m1 + x]) * scale
                    out[to + np.uintp(2)] = (np.float32(pixels[v2 + x]) - means[m2 + x]) * scale
            continue
        step = np.uintp(channels)
        for c in range(channels):
            to = o + np.uintp(c)
            if mirrored:
                for x in range(np.uintp(width)):
                    s = last - x
                    out[to + step * x] = (np.float32(pixels[v + s]) - means[m + s]) * scale
            # The same loop with a step that the compiler knows: contiguous stores.
            elif channels == 1:
                for x in range(np.uintp(width)):
                    out[to + x] = (np.float32(pixels[v + x]) - means[m + x]) * scale
            else:
                for x in range(np.uintp(width)):
                    out[to + step * x] = (np.float32(pixels[v + x]) - means[m + x]) * scale
            v += np.uintp(plane)
            m += np.uintp(mean_plane)


class CpuInput(InputPrimitives, CpuMemory):
    """`InputPrimitives` of the CPU."""

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
        if not image_rows.should_compile(images.size, _COMPILING):
            super().take_images(ring, counter, slot, mean, scale, images, labels)
            return
        assert isinstance(ring, HostRing)
        label_values, crops, pixels = slot.parts(ring.bytes_of(counter[0], 0, slot.size))
        height, width = slot.height, slot.width
        moves = mean.shape[1:] != (1, 1)
        means: Any = mean if moves else np.ascontiguousarray(np.broadcast_to(mean, (slot.channels, height, width)))
        if not moves and not crops[:, 0].any():
            height, width = 1, height * width  # whole images: one long row each
            means = means.reshape(slot.channels, 1, width)
        image_rows.run(
            self.threads,
            slot.count * height,
            max(1, 65536 // (slot.channels * width)),
            pixels,
            crops,
            means,
            images,
            slot.channels,
            height,
            width,
            means.shape[1],
            means.shape[2],
            int(moves),
            float(np.float32(scale)),
        )
        if labels is not None:
            labels[...] = label_values
