"""CPU memory: arrays, shared workspaces, and the memory available to the process.

Available memory is checked before large allocations, because Linux grants every request. The C library keeps freed
memory until it is told to return it.
"""

from __future__ import annotations

import ctypes
import math
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from caffepy.backend import types
from caffepy.backend.cpu.jit.kernel import note_host_work
from caffepy.backend.interface import MemoryPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, is_plain, memory_order
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
