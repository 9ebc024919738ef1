"""Index arithmetic: map an element's offset in one array to its offset in another.

Implements `axis`: Channel arguments, reductions and classes treat a large array in memory as (outer, size, inner) and
index the small one by (index / inner) % size, in channels-last memory with a part of the small one for each image. Also
determines the axes of a strided copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from caffepy.backend.types import WIDE_LOAD, Array, memory_axes


@dataclass(frozen=True)
class Period:
    """The large array in memory order as (images, outer, size, inner); (images, size) indexes the small array."""

    outer: int
    size: int
    inner: int
    images: int = 1


@lru_cache(maxsize=4096)
def find_period(shape: tuple[int, ...], small: tuple[int, ...], axis: int) -> Period | None:
    """Return how a small array of the axes from `axis` on repeats in a large one; None if not with one period.

    Both are in the backend's memory order. A small array of one element has size 1.
    """
    if math.prod(small) == 1:
        return Period(math.prod(shape), 1, 1)
    if tuple(small) == tuple(shape):
        return Period(1, math.prod(shape), 1)
    kept = [axis + i for i in memory_axes(len(small)) if small[i] != 1]
    assert all(shape[axis + i] == d for i, d in enumerate(small) if d != 1), (shape, small, axis)
    order = [a for a in memory_axes(len(shape)) if shape[a] != 1]
    first = order.index(kept[0])
    if order[first : first + len(kept)] != kept:
        # An axis of the large array lies between those of the small one. In an image it may be a period.
        return Period(math.prod(shape[2:]), shape[1], 1, shape[0]) if kept == [0, 1] and order[-1] == 1 else None
    outer = math.prod(shape[a] for a in order[:first])
    inner = math.prod(shape[a] for a in order[first + len(kept) :])
    return Period(outer, math.prod(small), inner)


@dataclass(frozen=True)
class StridedAxis:
    """One axis of a strided copy; steps are counted in elements."""

    size: int
    source: int
    destination: int


def collapse(shape: tuple[int, ...], source: tuple[int, ...], destination: tuple[int, ...]) -> list[StridedAxis]:
    """Return the collapsed axes of two arrays of one shape and given steps, in the destination's order, outermost
    first.

    Axes that are contiguous in both arrays are merged. At least one axis remains.
    """
    axes = [StridedAxis(*numbers) for numbers in zip(shape, source, destination, strict=True) if numbers[0] != 1]
    # In the destination's order, because scattered writes cost more than scattered reads, which the caches share.
    axes.sort(key=lambda axis: -axis.destination)
    joined: list[StridedAxis] = []
    for axis in axes:
        last = joined[-1] if joined else None
        steps = (axis.size * axis.source, axis.size * axis.destination)
        if last is not None and (last.source, last.destination) == steps:
            joined[-1] = StridedAxis(last.size * axis.size, axis.source, axis.destination)
        else:
            joined.append(axis)
    return joined or [StridedAxis(1, 1, 1)]


def widest(numbers: list[int], limit: int) -> int:
    """Return the largest power of two up to `limit` (a power of two) that divides all numbers."""
    while any(number % limit for number in numbers):
        limit //= 2
    return limit


MAX_INDEX = 2**31 - 1
"""Maximum number of items for kernels with 32-bit indices."""


def vector_width(channels: int, arrays: tuple[Array, ...]) -> int:
    """Return how many contiguous channels a thread loads at once from channels-last arrays."""
    width = widest([channels], WIDE_LOAD // max(arrays[0].itemsize, 1))
    while any(int(a.data.ptr) % min(WIDE_LOAD, width * a.itemsize) for a in arrays):
        width //= 2
    return width
