"""GPU input: pinned memory, a copy stream beside the backend's stream, and kernels that convert slots to blobs.

Owns the copy stream and the events between the two streams. The host only queries the events and never waits for them.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caffepy.backend.cuda import memory as cuda_memory
from caffepy.backend.cuda.compiler import (
    RESIDENT_BLOCKS,
    THREADS,
    aligned,
    c_type,
    defines,
    divider,
    launch,
    launch_blocks,
    library_kernel,
)
from caffepy.backend.cuda.copy import Staging
from caffepy.backend.cuda.device import GIBIBYTE, cupy
from caffepy.backend.cuda.memory import CudaMemory
from caffepy.backend.input_ring import ImageSlot, InputRing
from caffepy.backend.interface import InputPrimitives
from caffepy.backend.types import Array, Counter
from caffepy.errors import DeviceError

logger = logging.getLogger(__name__)

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
        self._copies = cupy.cuda.Stream(non_blocking=True)
        self.memory = cuda_memory.allocate((self.slots * self.slot_size,), "uint8")
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
        self._copies.wait_event(self._free[position])
        begin = self.memory.data.ptr + number % self.slots * self.slot_size
        for offset, host in parts:
            cupy.cuda.runtime.memcpyAsync(
                begin + offset, host.ctypes.data, host.nbytes, cupy.cuda.runtime.memcpyHostToDevice, self._copies.ptr
            )
        arrived = self._arrived[position]
        arrived.record(self._copies)
        self._stream.wait_event(arrived)
        self._in_flight.append((arrived, done))

    def consumed(self, number: int) -> None:
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
        return cuda_memory.adopt(array, self.device)

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
        self, ring: InputRing, counter: Counter, slot: ImageSlot, mean: Array, scale: float, images: Array,
        labels: Array | None,
    ) -> None:  # fmt: skip
        whole = mean.shape[1:] != (1, 1)
        plane = slot.height * slot.width
        pixels = _pixels_per_thread(slot.count * plane, slot.channels * images.itemsize)
        tile = pixels * THREADS * slot.channels if pixels and aligned(images) else 0
        channels = slot.channels if slot.channels <= 4 else 0
        constants = defines(
            ELEMENT=c_type(images), WHOLE_MEAN=int(whole), CHANNELS=channels, PIXELS=max(pixels, 1), TILE=tile, WIDTH=1
        )
        arguments = (
            *_slot_arguments(ring, counter), np.uint64(slot.crops_at), np.uint64(slot.pixels_at), slot.count,
            slot.channels, slot.width, plane, mean.shape[2], mean.shape[1] * mean.shape[2], divider(plane),
            divider(slot.width), float(scale), cuda_memory.raw(mean), cuda_memory.raw(images),
            np.uint64(0) if labels is None else cuda_memory.raw(labels),
        )  # fmt: skip
        blocks = -(-slot.count * plane // (max(pixels, 1) * THREADS))
        launch_blocks(library_kernel("input", "images", constants), (blocks,), (THREADS,), arguments)

    def take_values(self, ring: InputRing, counter: Counter, offset: int, values: Array) -> None:
        width = 16 // values.itemsize if aligned(values) else 1
        constants = defines(ELEMENT=c_type(values), WHOLE_MEAN=0, CHANNELS=0, PIXELS=1, TILE=0, WIDTH=width)
        arguments = (*_slot_arguments(ring, counter), np.uint64(offset), values.size, cuda_memory.raw(values))
        launch(library_kernel("input", "values", constants), -(-values.size // width), arguments)


def _pixels_per_thread(pixels: int, pixel_size: int) -> int:
    """Return the pixels per thread: enough to hide memory latency while all multiprocessors have work.

    Return 0 if the tile cannot hold one pixel per thread.
    """
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
