"""Input transfer to a device: batches pass through a ring of slots, and a primitive converts them to blobs.

Defines the byte layout of an image batch, the ring's interface, and its reference implementation in host memory.
Backends without device memory use the reference implementation; tests compare the others with it.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from caffepy.backend.layout import SLOT_ALIGNMENT, round_up


def aligned_size(size: int) -> int:
    """The next multiple of SLOT_ALIGNMENT."""
    return round_up(size, SLOT_ALIGNMENT)


@dataclass(frozen=True)
class ImageSlot:
    """Byte layout of an image batch in a slot.

    Labels, float32 (N,), from byte 0; then crops, int32 (N, 3): mirror flag, row and column of the crop in the full
    image; then pixels, uint8 (N, C, H, W).

    Args:
        count: N.
        channels: C.
        height: H of the crop.
        width: W of the crop.
    """

    count: int
    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """(N, C, H, W)."""
        return self.count, self.channels, self.height, self.width

    @property
    def crops_at(self) -> int:
        """Byte offset of the crops."""
        return aligned_size(4 * self.count)

    @property
    def pixels_at(self) -> int:
        """Byte offset of the pixels."""
        return self.crops_at + aligned_size(12 * self.count)

    @property
    def size(self) -> int:
        """Bytes of the slot."""
        return self.pixels_at + aligned_size(math.prod(self.shape))

    def parts(self, memory: Any) -> tuple[Any, Any, Any]:
        """Return labels, crops and pixels as views of a slot's bytes (a NumPy array)."""
        n, size = self.count, math.prod(self.shape)
        return (
            memory[: 4 * n].view("float32"),
            memory[self.crops_at : self.crops_at + 12 * n].view("int32").reshape(n, 3),
            memory[self.pixels_at : self.pixels_at + size].reshape(self.shape),
        )


@dataclass(frozen=True)
class ByteImages:
    """Preprocessing of images that arrive as bytes.

    Args:
        slot: byte layout of a batch.
        mean: subtracted from the pixels; float32 (NumPy), (C, H, W) of full images or (C, 1, 1).
        scale: factor after the subtraction.
    """

    slot: ImageSlot
    mean: Any
    scale: float


class InputRing(ABC):
    """Input slots on the device, used in turn: pass p reads slot p % slots.

    Consecutive passes are transferred together in blocks; the first block begins at pass 0. Only the solver's thread
    calls the methods.

    Args:
        slot_size: bytes of a slot, a multiple of SLOT_ALIGNMENT.
        block: maximum passes per transfer, a power of two.
        blocks: blocks in the ring, a power of two.
    """

    def __init__(self, slot_size: int, block: int, blocks: int) -> None:
        assert slot_size % SLOT_ALIGNMENT == 0, slot_size
        assert block & (block - 1) == 0, block
        assert blocks & (blocks - 1) == 0, blocks
        self.slot_size = slot_size
        self.block = block
        self.blocks = blocks
        self.slots = block * blocks

    @abstractmethod
    def ready(self) -> bool:
        """Return whether another `put` fits in the ring now; does not wait for the device."""

    @abstractmethod
    def put(self, number: int, passes: int, parts: Sequence[tuple[int, Any]], done: Callable[[], None]) -> None:
        """Copy the data of passes of one block to their slots. Work queued afterwards sees the data.

        Args:
            number: the first pass.
            passes: number of passes.
            parts: pairs of a byte offset in the first slot and the bytes to copy there (NumPy, uint8, 1-D). The bytes
                of later passes follow without a gap.
            done: called when the source bytes may be overwritten.
        """

    @abstractmethod
    def consumed(self, number: int) -> None:
        """Mark pass `number` as consumed: all work that reads its data is queued."""

    @abstractmethod
    def restart(self) -> None:
        """Discard the passes that are not consumed; the next `put` may start at any pass."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Free the memory once all transfers have finished. Idempotent."""


class HostRing(InputRing):
    """A ring whose slots are the source buffers themselves, without a copy."""

    def __init__(self, slot_size: int, block: int, blocks: int) -> None:
        super().__init__(slot_size, block, blocks)
        self._held: deque[tuple[int, int, Sequence[tuple[int, Any]], Callable[[], None]]] = deque()

    def ready(self) -> bool:
        return len(self._held) < self.blocks

    def put(self, number: int, passes: int, parts: Sequence[tuple[int, Any]], done: Callable[[], None]) -> None:
        self._held.append((number, number + passes, parts, done))

    def consumed(self, number: int) -> None:
        while self._held and number + 1 >= self._held[0][1]:
            self._held.popleft()[3]()

    def restart(self) -> None:
        while self._held:
            self._held.popleft()[3]()

    def close(self, timeout: float = 10.0) -> None:
        self.restart()

    def bytes_of(self, number: int, offset: int, size: int) -> Any:
        """Return `size` bytes at `offset` of the slot of pass `number`."""
        for first, stop, parts, _ in self._held:
            if first <= number < stop:
                position = (number - first) * self.slot_size + offset
                begin, memory = next(part for part in reversed(parts) if part[0] <= position)
                return memory[position - begin : position - begin + size]
        raise AssertionError(f"pass {number} was not put")
