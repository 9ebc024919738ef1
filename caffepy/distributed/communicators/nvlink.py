"""The average of gradients on the GPUs of one process, by a kernel that loads and stores over NVLink.

In NCCL's ring each number passes the memory of each GPU twice as often, and takes that from the backward pass that runs
meanwhile. NCCL carries all else.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from itertools import permutations

import numpy as np

from caffepy.backend.cuda.compiler import defines, device_number, launch_blocks, library_kernel
from caffepy.backend.cuda.device import cupy
from caffepy.backend.types import Array
from caffepy.distributed.communicators.local import LocalCommunicator

_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED: links over PCI have none."""
_ALREADY_ENABLED = 704
"""cudaErrorPeerAccessAlreadyEnabled."""
_THREADS = 512
_BLOCKS = 16
"""At most. They reach NVLink's rate on an H200; more take multiprocessors from the backward pass."""
_PACKS_OF_A_BLOCK = 1024
"""Packs of four numbers for which another block is worth its meeting with the other GPUs."""


class NvlinkAverage:
    """Gradient memory of each GPU, and the average over all of them.

    Made by all threads together. They call `average` for the same parts in the same order, and never for two at a time.

    Args:
        host: connects the threads.
        count: numbers of the memory, a multiple of 4.
    """

    def __init__(self, host: LocalCommunicator, count: int) -> None:
        self._rank, self._size = host.rank, host.size
        # By cudaMalloc: another GPU may not use the memory of an asynchronous pool that a script may have chosen.
        with cupy.cuda.using_allocator(None):
            self.memory: Array = cupy.zeros(count, "float32")
            self._turns = cupy.zeros(_BLOCKS * host.size, "uint32")
        self._stopped = np.frombuffer(cupy.cuda.alloc_pinned_memory(4), np.int32, 1)
        self._stopped[0] = 0
        addresses = self.memory.data.ptr, self._turns.data.ptr
        devices, *tables = _gather(host, [device_number(), *addresses])
        for device in devices:
            _open(int(device))
        self._tables = [cupy.asarray(np.array(table, np.uint64)) for table in tables]
        self._kernel = library_kernel("all_reduce", "all_reduce", defines(SIZE=host.size))
        # The first launch loads the kernel, which may wait for GPUs that wait for this one: it does not meet them.
        self.average(self.memory[:0])
        cupy.cuda.get_current_stream().synchronize()
        host.barrier()

    def holds(self, array: Array) -> bool:
        """Whether an array lies in `memory`."""
        begin = self.memory.data.ptr
        return bool(begin <= array.data.ptr < begin + self.memory.nbytes)

    def average(self, part: Array) -> None:
        """part = the mean over all GPUs, on the current stream; may be captured in a graph.

        Args:
            part: (4 P,), a part of `memory` that begins at a multiple of 4.
        """
        packs = part.size // 4
        offset = (part.data.ptr - self.memory.data.ptr) // 16
        blocks = max(1, min(_BLOCKS, packs // (_PACKS_OF_A_BLOCK * self._size)))
        place = np.int64(offset), np.int64(packs), np.int32(self._rank), np.uint64(self._stopped.ctypes.data)
        launch_blocks(self._kernel, (blocks,), (_THREADS,), (*self._tables, *place))

    def stop(self) -> None:
        """End all waits on the GPU; callable from any thread."""
        self._stopped[0] = 1


def all_linked(host: LocalCommunicator) -> bool:
    """Whether NVLink connects each two GPUs of these threads; called by all of them.

    NCCL's variable NCCL_P2P_DISABLE is obeyed.
    """
    if os.environ.get("NCCL_P2P_DISABLE", "0") != "0":
        return False
    (devices,) = _gather(host, [device_number()])
    return all(_linked(int(first), int(second)) for first, second in permutations(devices, 2))


def _gather(host: LocalCommunicator, numbers: list[int]) -> np.ndarray:
    """Numbers below 2^53 of all threads, a column for each."""
    columns = np.zeros((len(numbers), host.size))
    columns[:, host.rank] = numbers
    return np.asarray(host.sum(columns))


def _linked(first: int, second: int) -> bool:
    value = ctypes.c_int()
    with suppress(OSError, AttributeError):
        function = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute
        return function(ctypes.byref(value), _NATIVE_ATOMICS, first, second) == 0 and value.value == 1
    return False


def _open(device: int) -> None:
    """Let the current GPU use another's memory."""
    if device == device_number():
        return
    try:
        cupy.cuda.runtime.deviceEnablePeerAccess(device)
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status != _ALREADY_ENABLED:
            raise
