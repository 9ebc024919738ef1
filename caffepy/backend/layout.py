"""Memory layout of arrays: axis order and alignment.

Images, (N, C, H, W) or (N, C, D, H, W), are channels last in memory: (N, H, W, C) or (N, D, H, W, C).
Arrays with any other number of axes are C-contiguous.
"""

from __future__ import annotations

import math
from functools import lru_cache

from caffepy.backend.types import Array

CHANNELS_LAST = {4: (0, 2, 3, 1), 5: (0, 2, 3, 4, 1)}
"""Memory order of an image's axes, by number of axes."""

CHANNELS_FIRST = {4: (0, 3, 1, 2), 5: (0, 4, 1, 2, 3)}
"""The inverse permutation: from memory order to N, C, (D,) H, W."""

ARENA_ALIGNMENT = 512
"""Alignment in bytes of arrays in an arena, as of CUDA's allocations."""

SLOT_ALIGNMENT = 256
"""Alignment in bytes of an input ring's slots and their parts."""

WIDE_LOAD = 16
"""Bytes of a GPU thread's widest load; the address must be a multiple of it."""


def round_up(number: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `number`."""
    return -(-number // multiple) * multiple


def aligned_bytes(size: int) -> int:
    """Return `size` rounded up to ARENA_ALIGNMENT."""
    return round_up(size, ARENA_ALIGNMENT)


def address(array: Array) -> int:
    """Return the device address of an array's first element."""
    interface = getattr(array, "__cuda_array_interface__", None) or array.__array_interface__
    return int(interface["data"][0])


def memory_axes(ndim: int) -> tuple[int, ...]:
    """Return the logical axes in memory order, outermost first."""
    return CHANNELS_LAST.get(ndim) or tuple(range(ndim))


def memory_order(array: Array) -> Array:
    """Return a view of the array with its axes in memory order."""
    return array.transpose(CHANNELS_LAST[array.ndim]) if array.ndim in CHANNELS_LAST else array


def view(flat: Array, shape: tuple[int, ...]) -> Array:
    """Return a 1-D array in memory order as a view of a logical shape."""
    if len(shape) not in CHANNELS_LAST:
        return flat.reshape(shape)
    return flat.reshape([shape[axis] for axis in CHANNELS_LAST[len(shape)]]).transpose(CHANNELS_FIRST[len(shape)])


def is_plain(shape: tuple[int, ...]) -> bool:
    """Return whether memory order equals logical (C) order for a shape."""
    return len(shape) not in CHANNELS_LAST or shape[1] == 1 or math.prod(shape[2:]) == 1


def channels_and_pixels(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return (C, pixels) of one sample of an image; in other arrays each element is a channel."""
    return (shape[1], math.prod(shape[2:])) if len(shape) in CHANNELS_LAST else (math.prod(shape[1:]), 1)


@lru_cache(maxsize=4096)
def is_dense(shape: tuple[int, ...], strides: tuple[int, ...], itemsize: int) -> bool:
    """Return whether an array with these strides (bytes) is contiguous in memory order; a slice is not."""
    step = itemsize
    for axis in reversed(memory_axes(len(shape))):
        if shape[axis] != 1 and strides[axis] != step and 0 not in shape:
            return False
        step *= shape[axis]
    return True
