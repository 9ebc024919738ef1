"""How arrays lie in memory: which order their axes have there, and what they are aligned to.

Images, (N, C, H, W) or (N, C, D, H, W), are channels last: they lie in memory as (N, H, W, C) or (N, D, H, W, C).
Arrays of other numbers of axes are C-contiguous.
"""

from __future__ import annotations

import math
from functools import lru_cache

from caffepy.backend.types import Array

CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""For each number of axes of an image their order in memory."""

CHANNELS_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
"""Axes of the same with the channels last, in the order N, C, D, H, W."""

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


def address(array: Array) -> int:
    """The address of an array's first element in the device's memory."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def memory_axes(ndim: int) -> tuple[int, ...]:
    """Logical axes in the order in which they lie in memory, outermost first."""
    return CHANNELS_LAST.get(ndim) or tuple(range(ndim))


def memory_order(array: Array) -> Array:
    """The array with its axes in the order in which they lie in memory; a view."""
    return array.transpose(CHANNELS_LAST[array.ndim]) if array.ndim in CHANNELS_LAST else array


def view(flat: Array, shape: tuple[int, ...]) -> Array:
    """The elements of a 1-D array in memory order as an array of a logical shape."""
    if len(shape) not in CHANNELS_LAST:
        return flat.reshape(shape)
    return flat.reshape([shape[axis] for axis in CHANNELS_LAST[len(shape)]]).transpose(CHANNELS_FIRST[len(shape)])


def is_plain(shape: tuple[int, ...]) -> bool:
    """Whether memory order and logical (C) order are the same for a shape."""
    return len(shape) not in CHANNELS_LAST or shape[1] == 1 or math.prod(shape[2:]) == 1


def channels_and_pixels(shape: tuple[int, ...]) -> tuple[int, int]:
    """(C, pixels) of an image's samples; of other arrays each element is a channel."""
    return (shape[1], math.prod(shape[2:])) if len(shape) in CHANNELS_LAST else (math.prod(shape[1:]), 1)


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Whether an array with these strides (in bytes) fills its memory in the order above; a slice does not."""
    step = itemsize
    for axis in reversed(memory_axes(len(shape))):
        if shape[axis] != 1 and strides[axis] != step and 0 not in shape:
            return False
        step *= shape[axis]
    return True
