"""How batches get from the host into a data layer's tops: a ring of slots on the device, and what is made of a slot.

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
"""Passes are brought together until they have this many bytes: that spares small batches the cost of a copy each."""
_MOST_PASSES = 64
_FEWEST_BLOCKS = 4


def passes_together(slot: ImageSlot) -> int:
    """How many passes make a block: a power of two."""
    return 1 << min(max(_BLOCK_BYTES // slot.size, 1), _MOST_PASSES).bit_length() - 1


def blocks_for(passes_ahead: int, block: int) -> int:
    """How many blocks a ring needs if so many passes are fed before the first of them runs: a power of two.

    What one iteration reads and what the next one needs have room at once.
    """
    blocks = max(_FEWEST_BLOCKS, -(-2 * passes_ahead // block) + (block > 1))
    return 1 << (blocks - 1).bit_length()


def expected_bytes(shapes: Sequence[tuple[int, ...]], as_bytes: bool, passes_ahead: int) -> int:
    """Device memory of a ring for tops of these shapes, before the first batch has come.

    Args:
        shapes: of the tops.
        as_bytes: whether images come as bytes.
        passes_ahead: passes that are fed before the first of them runs.
    """
    if as_bytes and len(shapes[0]) == 4:
        slot = ImageSlot(*shapes[0])
        block = passes_together(slot)
        return slot.size * block * blocks_for(passes_ahead, block)
    return sum(aligned_size(4 * math.prod(shape)) for shape in shapes) * blocks_for(passes_ahead, 1)


class HostToDeviceTransfer(ABC):
    """A way from batches to tops.

    Args:
        ring: the slots.
        shapes: of the tops.
    """

    def __init__(self, ring: InputRing, shapes: list[tuple[int, ...]]) -> None:
        self.ring = ring
        self.shapes = shapes

    @abstractmethod
    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        """Bring a batch to its slots."""

    @abstractmethod
    def take(self, counter: Counter, tops: Blobs) -> None:
        """Make the tops of the pass that `counter` names."""


class ByteTransfer(HostToDeviceTransfer):
    """Images that come as bytes and are transformed on the device.

    Args:
        backend: the device.
        images: how they come, and what becomes of them.
        tops: how many there are: images, and perhaps labels.
        passes_ahead: passes that are fed before the first of them runs.
    """

    def __init__(self, backend: Backend, images: ByteImages, tops: int, passes_ahead: int) -> None:
        slot = images.slot
        block = passes_together(slot)
        ring = backend.input_ring(slot.size, block, blocks_for(passes_ahead, block))
        super().__init__(ring, [slot.shape, (slot.count,)][:tops])
        self._backend = backend
        self._images = images
        self._mean = backend.zeros(images.mean.shape)
        backend.from_host(images.mean, self._mean)

    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        filled = batch.bytes[: batch.passes * self._images.slot.size]
        self.ring.put(batch.number, batch.passes, [(0, filled)], done)

    def take(self, counter: Counter, tops: Blobs) -> None:
        labels = tops[1].data if len(tops) > 1 else None
        images = self._images
        self._backend.take_images(self.ring, counter, images.slot, self._mean, images.scale, tops[0].data, labels)


class FloatTransfer(HostToDeviceTransfer):
    """Batches that come as floats, in the tops' own order in memory; one after the other in a slot.

    Args:
        backend: the device.
        shapes: of the tops.
        passes_ahead: passes that are fed before the first of them runs.
        ring: another form's, which is used if its slots are large enough.
    """

    def __init__(
        self, backend: Backend, shapes: list[tuple[int, ...]], passes_ahead: int, ring: InputRing | None = None
    ) -> None:
        sizes = [aligned_size(4 * int(np.prod(shape, dtype=np.int64))) for shape in shapes]
        if ring is None or ring.slot_size < sum(sizes) or ring.block > 1:
            ring = backend.input_ring(sum(sizes), 1, blocks_for(passes_ahead, 1))
        super().__init__(ring, shapes)
        self._backend = backend
        self._offsets = [sum(sizes[:i]) for i in range(len(sizes))]

    def put(self, batch: Batch, done: Callable[[], None]) -> None:
        flats = [self._flat(array).view(np.uint8) for array in batch.arrays]
        self.ring.put(batch.number, 1, list(zip(self._offsets, flats, strict=True)), done)

    def _flat(self, array: Array) -> Array:
        return memory_order(array).reshape(-1)

    def take(self, counter: Counter, tops: Blobs) -> None:
        for offset, top in zip(self._offsets, tops, strict=True):
            self._backend.take_values(self.ring, counter, offset, top.data)
