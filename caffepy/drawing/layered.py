"""Positions of boxes in layers, and the ways of edges between them, after Sugiyama, Tagawa and Toda (1981).

A box stands one rank behind the last of those that it reads from. An edge over several ranks is cut into pieces by a
point in each rank between. Points and boxes of a rank are ordered by the mean position of their neighbours, sweep by
sweep, and the order with the fewest crossings is kept. `caffepy.drawing.positions` then gives them positions.

Distances along the ranks are called depth and those across breadth: in a picture from left to right x and y.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

from caffepy.drawing.positions import Grid, place
from caffepy.errors import ConfigError

SWEEPS = 12
MAX_POINTS = 300_000
"""Points at which edges cross ranks that are laid out; larger nets would take minutes and fill no screen."""


@dataclass(frozen=True)
class Layout:
    """Where everything stands.

    Args:
        rank: of each box.
        centre: breadth of each box's centre.
        ways: for each edge the breadths at which it crosses the ranks between its ends.
        breadth: of the whole picture.
    """

    rank: list[int]
    centre: list[float]
    ways: list[list[float]]
    breadth: float


def lay_out(sizes: Sequence[float], edges: Sequence[tuple[int, int]], spacing: float) -> Layout:
    """Lay boxes out.

    Args:
        sizes: the breadth of each box.
        edges: pairs of boxes; the second has the higher index.
        spacing: between neighbours of a rank.

    Raises:
        ConfigError: there are too many.
    """
    grid = _make_grid(sizes, edges)
    rows = _order(grid)
    centre = place(grid, rows, spacing)
    lowest = min((c - s / 2 for c, s in zip(centre, grid.size, strict=True)), default=0.0)
    highest = max((c + s / 2 for c, s in zip(centre, grid.size, strict=True)), default=0.0)
    moved = [c - lowest for c in centre]
    boxes = len(sizes)
    return Layout(grid.rank[:boxes], moved[:boxes], [[moved[p] for p in way] for way in grid.ways], highest - lowest)


def _make_grid(sizes: Sequence[float], edges: Sequence[tuple[int, int]]) -> Grid:
    rank = _ranks(len(sizes), edges)
    points = sum(rank[target] - rank[source] for source, target in edges)
    if len(sizes) + points > MAX_POINTS:
        raise ConfigError(
            f"the net has {len(sizes)} boxes and edges over {points} ranks, more than are laid out "
            f"({MAX_POINTS}); write a .dot file instead"
        )
    grid = Grid(rank, list(sizes), [[] for _ in sizes], [[] for _ in sizes], [], len(sizes))
    for source, target in edges:
        way = []
        last = source
        for between in range(rank[source] + 1, rank[target]):
            point = len(grid.rank)
            grid.rank.append(between)
            grid.size.append(0.0)
            grid.before.append([last])
            grid.after.append([])
            grid.after[last].append(point)
            way.append(point)
            last = point
        grid.after[last].append(target)
        grid.before[target].append(last)
        grid.ways.append(way)
    return grid


def _ranks(boxes: int, edges: Sequence[tuple[int, int]]) -> list[int]:
    """The longest path to each box; a box that reads nothing moves up to the first that reads it."""
    rank = [0] * boxes
    into: list[list[int]] = [[] for _ in range(boxes)]
    out: list[list[int]] = [[] for _ in range(boxes)]
    for source, target in edges:
        into[target].append(source)
        out[source].append(target)
    for box in range(boxes):
        rank[box] = max((rank[source] + 1 for source in into[box]), default=0)
    for box in range(boxes):
        if not into[box] and out[box]:
            rank[box] = min(rank[target] for target in out[box]) - 1
    return rank


# -- order ------------------------------------------------------------------------------------------------


def _order(grid: Grid) -> list[list[int]]:
    """The nodes of each rank in the order with the fewest crossings that was met."""
    rows = grid.rows()
    best, fewest = [list(row) for row in rows], _crossings(grid, rows)
    for sweep in range(SWEEPS):
        if not fewest:
            break
        downwards = sweep % 2 == 0
        neighbours = grid.before if downwards else grid.after
        position = _positions(rows)
        for row in rows if downwards else reversed(rows):
            _sort_by_means(row, neighbours, position)
        if (found := _crossings(grid, rows)) < fewest:
            best, fewest = [list(row) for row in rows], found
    return best


def _positions(rows: list[list[int]]) -> dict[int, int]:
    return {node: index for row in rows for index, node in enumerate(row)}


def _sort_by_means(row: list[int], neighbours: list[list[int]], position: dict[int, int]) -> None:
    """Sort by the mean position of the neighbours, a node without any keeping its own, and note the new positions."""

    def mean(node: int) -> float:
        places = [position[other] for other in neighbours[node]] or [position[node]]
        return sum(places) / len(places)

    row.sort(key=mean)
    position.update((node, index) for index, node in enumerate(row))


def _crossings(grid: Grid, rows: list[list[int]]) -> int:
    """Pairs of edges between neighbouring ranks that cross: inversions of their ends."""
    position = _positions(rows)
    count = 0
    for row in rows:
        seen: list[int] = []
        for node in row:
            ends = sorted(position[other] for other in grid.after[node])
            count += sum(len(seen) - bisect_left(seen, end + 1) for end in ends)
            for end in ends:
                insort(seen, end)
    return count
