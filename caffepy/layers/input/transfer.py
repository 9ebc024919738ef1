"""Copies of batches from the host to a data layer's tops, through a ring of slots on the device.

Owns the layout of float batches and the sizes of rings.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

import numpy as np

from caffepy.backend.input_ring import ByteImages, ImageSlot, InputRing, aligned_size
from caffepy.backend.interface import Backend
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Array, Counter
from caffepy.data.prefetch import Batch
from caffepy.layers.core.base import Blobs

_BLOCK_BYTES = 1 << 21
"""Passes are copied in blocks of about this many bytes, since the cost of starting a copy dominates small batches."""
_MAX_PASSES = 64
_MIN_BLOCKS = 4


def passes_per_block(slot: ImageSlot) -> int:
    """How many passes are copied at once; a power of two."""
    return 1 << min(max(_BLOCK_BYTES // slot.size, 1), _MAX_PASSES).bit_length() - 1


def blocks_needed(passes_ahead: int, block: int) -> int:
    """How many blocks a ring needs if `passes_ahead` passes are prefetched before the first runs; a power of two.

    The ring holds the batches of one iteration and those of the next at the same time.
    """
    blocks = max(_MIN_BLOCKS, -(-2 * passes_ahead // block) + (block > 1))
    return 1 << (blocks - 1).bit_length()


def expected_bytes(shapes: Sequence[tuple[int, ...]], as_bytes: bool, passes_ahead: int) -> int:
    """Estimated bytes of a ring for tops of these shapes, before the first batch is known.

    Args:
        shapes: of the tops.
        as_bytes: whether images are copied as uint8 and transformed on the device.
        passes_ahead: passes that are prefetched before the first of them runs.
    """
    if as_bytes and len(shapes[0]) == 4:
        slot = ImageSlot(*shapes[0])
        block = passes_per_block(slot)
        return slot.size * block * blocks_needed(passes_ahead, block)
    return sum(aligned_size(4 * math.prod(shape)) for shape in shapes) * blocks_needed(passes_ahead, 1)


class HostToDeviceTransfer(ABC):
    """Copies batches of one layout to the device and fills the tops from there.

    Args:
        ring: the slots.
        shapes: of the tops.
    """

    def __init__(self, ring: InputRing, shapes: list[tuple[int, ...]]) -> None:
        self.ring = ring
        self.shapes = shapes

    @abstractmethod
    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        """Start copying a batch to its slots; `done` is called when its host memory may be reused."""

    @abstractmethod
    def fill_tops(self, counter: Counter, tops: Blobs) -> None:
        """Fill the tops with the batch of the pass that `counter` names."""


class ByteTransfer(HostToDeviceTransfer):
    """Images copied as uint8 and transformed on the device.

    Args:
        backend: the device.
        images: their layout, mean and scale.
        tops: how many there are: images, and perhaps labels.
        passes_ahead: passes that are prefetched before the first of them runs.
    """

    def __init__(self, backend: Backend, images: ByteImages, tops: int, passes_ahead: int) -> None:
        slot = images.slot
        block = passes_per_block(slot)
        ring = backend.input_ring(slot.size, block, blocks_needed(passes_ahead, block))
        super().__init__(ring, [slot.shape, (slot.count,)][:tops])
        self._backend = backend
        self._images = images
        self.slot = images.slot
        self._mean = backend.zeros(images.mean.shape)
        backend.from_host(images.mean, self._mean)

    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        filled = batch.bytes[: batch.passes * self._images.slot.size]
        self.ring.put(batch.number, batch.passes, [(0, filled)], done)

    def fill_tops(self, counter: Counter, tops: Blobs) -> None:
        labels = tops[1].data if len(tops) > 1 else None
        images = self._images
        self._backend.take_images(self.ring, counter, images.slot, self._mean, images.scale, tops[0].data, labels)


class FloatTransfer(HostToDeviceTransfer):
    """Batches that come as floats, in the tops' own order in memory; one after the other in a slot.

    Args:
        backend: the device.
        shapes: of the tops.
        passes_ahead: passes that are prefetched before the first of them runs.
        ring: another form's, which is used if its slots are large enough.
    """

    def __init__(
        self, backend: Backend, shapes: list[tuple[int, ...]], passes_ahead: int, ring: InputRing | None = None
    ) -> None:
        sizes = [aligned_size(4 * int(np.prod(shape, dtype=np.int64))) for shape in shapes]
        if ring is None or ring.slot_size < sum(sizes) or ring.block > 1:
            ring = backend.input_ring(sum(sizes), 1, blocks_needed(passes_ahead, 1))
        super().__init__(ring, shapes)
        self._backend = backend
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]

    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        flats = [self._flat(array).view(np.uint8) for array in batch.arrays]
        self.ring.put(batch.number, 1, list(zip(self._offsets, flats, strict=True)), done)

    def _flat(self, array: Array) -> Array:
        return memory_order(array).reshape(-1)

    def fill_tops(self, counter: Counter, tops: Blobs) -> None:
        for offset, top in zip(self._offsets, tops, strict=True):
            self._backend.take_values(self.ring, counter, offset, top.data)
