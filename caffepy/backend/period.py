"""Where the elements of a small array, such as one value per channel, lie beside those of a large one in memory.

Implements `axis` of `apply` and `reduce`: Channel arguments, reductions and classes treat a large array in memory as
(outer, size, inner) and index the small one by (index / inner) % size, in channels-last memory with a part of the small
one for each image.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from caffepy.backend.types import memory_axes


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

    Both are in the backends' memory order. A small array repeats along its axes of size 1. One of a single element has
    size 1.
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
