"""How arrays lie in memory: which order their axes have there, and what they are aligned to.

A 4-D array (N, C, H, W) is channels last: it lies in memory as (N, H, W, C). All others are C-contiguous.
"""

from __future__ import annotations

from functools import lru_cache

from caffepy.backend.types import Array

CHANNELS_LAST = (0, 2, 3, 1)
"""Axes of an (N, C, H, W) array in the order in which they lie in memory."""

CHANNELS_FIRST = (0, 3, 1, 2)
"""Axes of an (N, H, W, C) array in the order N, C, H, W."""

ARENA_ALIGNMENT = 512
"""Arrays that share an arena begin at multiples of so many bytes, as those that CUDA allocates."""

SLOT_ALIGNMENT = 256
"""Slots of an input ring and their parts begin at multiples of so many bytes."""

WIDE_LOAD = 16
"""Bytes that one thread of a GPU loads at once at most; the address must be a multiple of them."""


def round_up(number: int, multiple: int) -> int:
    """The least multiple that is not below `number`."""
    return -(-number // multiple) * multiple


def aligned_bytes(size: int) -> int:
    """`size` rounded up to ARENA_ALIGNMENT."""
    return round_up(size, ARENA_ALIGNMENT)


def memory_axes(ndim: int) -> tuple[int, ...]:
    """Logical axes in the order in which they lie in memory, outermost first."""
    return CHANNELS_LAST if ndim == 4 else tuple(range(ndim))


def memory_order(array: Array) -> Array:
    """The array with its axes in the order in which they lie in memory; a view."""
    return array.transpose(CHANNELS_LAST) if array.ndim == 4 else array


def view(flat: Array, shape: tuple[int, ...]) -> Array:
    """The elements of a 1-D array in memory order as an array of a logical shape."""
    if len(shape) != 4:
        return flat.reshape(shape)
    n, c, h, w = shape
    return flat.reshape(n, h, w, c).transpose(CHANNELS_FIRST)


def is_plain(shape: tuple[int, ...]) -> bool:
    """Whether memory order and logical (C) order are the same for a shape."""
    return len(shape) != 4 or shape[1] == 1 or shape[2] * shape[3] == 1


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether an array with these strides (in bytes) fills its memory in the order above; a slice does not."""
    step = itemsize
    for axis in reversed(memory_axes(len(shape))):
        if shape[axis] != 1 and strides[axis] != step and 0 not in shape:
            return False
        step *= shape[axis]
    return True
