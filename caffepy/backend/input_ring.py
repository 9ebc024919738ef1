"""How a net's input comes to a device: batches go through a ring of slots, and a primitive makes blobs of them.

Owns the layout of a batch of images as bytes, the contract of the ring, and its plain implementation in host memory,
which backends without memory of their own use and others are compared with.
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
    """A batch of images as bytes: where its parts lie in a slot.

    From byte 0 on float32 (N,), the labels; then int32 (N, 3), for each image whether it is mirrored and the row and
    column of the whole image at which it begins; then uint8 (N, C, H, W), the pixels.

    Args:
        count: N.
        channels: C.
        height: H of what is cut out of each image.
        width: W of it.
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
        """Byte offset of the mirrors and crop offsets."""
        return aligned_size(4 * self.count)

    @property
    def pixels_at(self) -> int:
        """The byte at which the pixels begin."""
        return self.crops_at + aligned_size(12 * self.count)

    @property
    def size(self) -> int:
        """Bytes of the slot."""
        return self.pixels_at + aligned_size(math.prod(self.shape))

    def parts(self, memory: Any) -> tuple[Any, Any, Any]:
        """Labels, crops and pixels as views of a slot's bytes (a NumPy array)."""
        n, size = self.count, math.prod(self.shape)
        return (
            memory[: 4 * n].view("float32"),
            memory[self.crops_at : self.crops_at + 12 * n].view("int32").reshape(n, 3),
            memory[self.pixels_at : self.pixels_at + size].reshape(self.shape),
        )


@dataclass(frozen=True)
class ByteImages:
    """What becomes of images that come as bytes.

    Args:
        slot: how a batch of them lies in memory.
        mean: what is subtracted, float32 (NumPy), (C, H, W) of whole images or (C, 1, 1).
        scale: what they are multiplied by then.
    """

    slot: ImageSlot
    mean: Any
    scale: float


class InputRing(ABC):
    """Slots on the device, which forward passes use in turn: pass p has slot p % slots.

    Consecutive passes are brought together in blocks, the first of which begins at pass 0. Every call is made by the
    solver's thread.

    Args:
        slot_size: bytes of a slot, a multiple of SLOT_ALIGNMENT.
        block: passes that are brought together at most, a power of two.
        blocks: how many blocks the ring holds, a power of two.
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
        """Whether one more `put` fits in the ring now; does not wait for the device."""

    @abstractmethod
    def put(self, number: int, passes: int, parts: Sequence[tuple[int, Any]], done: Callable[[], None]) -> None:
        """Bring the data of some passes of one block to their slots.

        What the backend is asked for afterwards finds them there.

        Args:
            number: the first pass.
            passes: how many there are.
            parts: byte offsets in its slot and the bytes to copy there (NumPy, uint8, 1-D); the following passes' bytes
                follow directly.
            done: called when the bytes may be written again.
        """

    @abstractmethod
    def consumed(self, number: int) -> None:
        """All that reads the data of pass `number` has been asked of the backend."""

    @abstractmethod
    def restart(self) -> None:
        """Forget the passes that were put and not consumed: the next `put` may be of any pass."""

    @abstractmethod
    def close(self, timeout: float = 10.0) -> None:
        """Give the memory back once nothing is on the way any more. Callable twice."""


class HostRing(InputRing):
    """Slots that are the very memory in which batches were made: nothing is copied."""

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
        """`size` bytes of the slot of pass `number`, from `offset` on."""
        for first, stop, parts, _ in self._held:
            if first <= number < stop:
                position = (number - first) * self.slot_size + offset
                begin, memory = next(part for part in reversed(parts) if part[0] <= position)
                return memory[position - begin : position - begin + size]
        raise AssertionError(f"pass {number} was not put")
