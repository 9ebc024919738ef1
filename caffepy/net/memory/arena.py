"""Offsets of arrays in one arena, given the steps in which each is live.

Owns the heuristics. The smallest arena is as hard to find as the best packing of bins; greedy placement, largest arrays
first, is known to come near (Pisarchyk and Lee 2020, "Efficient Memory Management for Deep Neural Net Inference"). Here
several orders are tried; for the nets in models/ the best is within 0.5 % of the bound.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from caffepy.backend.layout import aligned_bytes


@dataclass(frozen=True)
class Lifetime:
    """The steps in which an array is live.

    Args:
        size: its bytes.
        first: the first step that uses it.
        last: the last one.
    """

    size: int
    first: int
    last: int

    def overlaps(self, other: Lifetime) -> bool:
        """Whether both are live in some step."""
        return self.first <= other.last and other.first <= self.last


def assign_offsets(lifetimes: Sequence[Lifetime]) -> tuple[list[int], int]:
    """An offset for each array, so that no two that meet overlap, and the bytes of the arena."""
    live = live_bytes(lifetimes)
    best: tuple[list[int], int] | None = None
    for order in _orders(lifetimes, live):
        placement = _place(lifetimes, order)
        if best is None or placement[1] < best[1]:
            best = placement
        if best[1] == max(live, default=0):
            break
    assert best is not None
    return best


def live_bytes(lifetimes: Sequence[Lifetime]) -> list[int]:
    """For each step the bytes of all live arrays; the largest is a lower bound of any arena."""
    changes = [0] * (max((life.last for life in lifetimes), default=-1) + 2)
    for life in lifetimes:
        changes[life.first] += aligned_bytes(life.size)
        changes[life.last + 1] -= aligned_bytes(life.size)
    return list(accumulate(changes[:-1]))


def widest_gaps(lifetimes: Sequence[Lifetime], offsets: Sequence[int], arena: int, steps: int) -> list[tuple[int, int]]:
    """For each step the widest range of the arena, (begin, end), without a live array."""
    order = sorted(range(len(lifetimes)), key=lambda index: offsets[index])
    gaps = []
    for step in range(steps):
        widest, reached = (0, 0), 0
        for index in order:
            life, begin = lifetimes[index], offsets[index]
            if life.size and life.first <= step <= life.last:
                widest = max(widest, (reached, begin), key=_width)
                reached = max(reached, begin + aligned_bytes(life.size))
        gaps.append(max(widest, (reached, arena), key=_width))
    return gaps


def _width(gap: tuple[int, int]) -> int:
    return gap[1] - gap[0]


def _orders(lifetimes: Sequence[Lifetime], live: Sequence[int]) -> Iterator[Sequence[int]]:
    """Orders in which the arrays may be placed."""
    fullest = sorted(range(len(live)), key=lambda step: (-live[step], step))
    rank = {step: i for i, step in enumerate(fullest)}
    keys: list[Callable[[Lifetime], tuple[int, int]]] = [
        lambda life: (-life.size, life.first),
        lambda life: (min(rank[step] for step in range(life.first, life.last + 1)), -life.size),
        lambda life: (-life.size * (life.last - life.first + 1), life.first),
        lambda life: (life.first - life.last, -life.size),
        lambda life: (life.first, -life.size),
    ]
    for key in keys:
        yield sorted(range(len(lifetimes)), key=lambda index: key(lifetimes[index]))


def _place(lifetimes: Sequence[Lifetime], order: Sequence[int]) -> tuple[list[int], int]:
    """Each array in its turn into the smallest gap that holds it, else behind all that it meets."""
    offsets = [0] * len(lifetimes)
    placed: list[tuple[int, int, Lifetime]] = []
    for index in order:
        life = lifetimes[index]
        size = aligned_bytes(life.size)
        offsets[index] = _best_gap([(begin, end) for begin, end, other in placed if life.overlaps(other)], size)
        insort(placed, (offsets[index], offsets[index] + size, life), key=lambda entry: entry[0])
    return offsets, max((end for _, end, _ in placed), default=0)


def _best_gap(ranges: Sequence[tuple[int, int]], size: int) -> int:
    """The beginning of the smallest gap between ranges, sorted by their beginnings, that holds `size` bytes."""
    best, smallest, reached = -1, 0, 0
    for begin, end in ranges:
        gap = begin - reached
        if gap >= size and (best < 0 or gap < smallest):
            best, smallest = reached, gap
        reached = max(reached, end)
    return reached if best < 0 else best
