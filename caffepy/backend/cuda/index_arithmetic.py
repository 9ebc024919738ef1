"""Index arithmetic of kernels: the axes of a strided copy, the width of packs, and the largest index."""

from __future__ import annotations

from dataclasses import dataclass

from caffepy.backend.types import WIDE_LOAD, Array


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
