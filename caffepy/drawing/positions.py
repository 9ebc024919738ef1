"""Positions of nodes within their ranks, after Brandes and Koepf, "Fast and Simple Horizontal Coordinate Assignment"
(2001): every node stands in line with its median neighbour where it can, long edges are straight, and four layouts,
which begin at each end of the ranks and of the nodes in them, are averaged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass
class Grid:
    """Boxes first, then the points of long edges, as numbered nodes."""

    rank: list[int]
    size: list[float]
    before: list[list[int]]
    after: list[list[int]]
    ways: list[list[int]]
    boxes: int

    def rows(self) -> list[list[int]]:
        """The nodes of each rank, in the order of their numbers."""
        rows: list[list[int]] = [[] for _ in range(max(self.rank, default=-1) + 1)]
        for node, rank in enumerate(self.rank):
            rows[rank].append(node)
        return rows

    def gap(self, left: int, right: int, spacing: float) -> float:
        """Between the centres of two neighbours; points of edges may come closer than boxes."""
        space = spacing if min(left, right) < self.boxes else spacing / 2
        return (self.size[left] + self.size[right]) / 2 + space


def place(grid: Grid, rows: Sequence[Sequence[int]], spacing: float) -> list[float]:
    """The breadth of every node's centre.

    Args:
        grid: the nodes.
        rows: the nodes of each rank in their order.
        spacing: between neighbours of a rank.
    """
    forbidden = _conflicts(grid, rows)
    layouts = []
    for neighbours, ranks in ((grid.before, list(rows)), (grid.after, list(reversed(rows)))):
        for mirrored in (False, True):
            ordered = [list(reversed(row)) if mirrored else list(row) for row in ranks]
            roots = _align(ordered, neighbours, forbidden)
            centre = _compact(grid, ordered, roots, spacing)
            layouts.append([-c for c in centre] if mirrored else centre)
    return _average(grid, layouts)


def _conflicts(grid: Grid, rows: Sequence[Sequence[int]]) -> set[tuple[int, int]]:
    """Edges, as pairs of nodes, that cross a piece of a long edge between two of its points, which stays straight."""
    position = {node: index for row in rows for index, node in enumerate(row)}
    found = set()
    for row in rows:
        inner = _inner_sources(grid, row, position)
        begin, left = 0, -1
        for index in range(len(row)):
            if index not in inner and index < len(row) - 1:
                continue
            right = inner.get(index, len(position))
            for node in row[begin : index + 1]:
                found |= {(source, node) for source in grid.before[node] if not left <= position[source] <= right}
            begin, left = index + 1, right
    return found


def _inner_sources(grid: Grid, row: Sequence[int], position: dict[int, int]) -> dict[int, int]:
    """Where the pieces between two points that end in a rank come from: position here, position there."""
    return {
        index: position[grid.before[node][0]]
        for index, node in enumerate(row)
        if node >= grid.boxes and grid.before[node][0] >= grid.boxes
    }


def _align(rows: list[list[int]], neighbours: list[list[int]], forbidden: set[tuple[int, int]]) -> list[int]:
    """Blocks of nodes in line, each known by its root: a node joins the block of a median neighbour of the rank before
    if none before it in its own rank has joined one farther on."""
    position = {node: index for row in rows for index, node in enumerate(row)}
    root = list(range(len(position)))
    taken: set[int] = set()
    for row in rows:
        last = -1
        for node in row:
            for other in _medians(sorted(neighbours[node], key=position.__getitem__)):
                free = other not in taken and position[other] > last
                if free and (other, node) not in forbidden and (node, other) not in forbidden:
                    taken.add(other)
                    root[node], last = root[other], position[other]
                    break
    return root


def _medians(ordered: list[int]) -> list[int]:
    middle = len(ordered) - 1
    return list(dict.fromkeys(ordered[index] for index in (middle // 2, (middle + 1) // 2))) if ordered else []


def _compact(grid: Grid, rows: list[list[int]], root: list[int], spacing: float) -> list[float]:
    """Every block as far to the left as those on its left let it, and then as near to its right as it can."""
    left: dict[int, dict[int, float]] = {block: {} for block in root}
    right: dict[int, dict[int, float]] = {block: {} for block in root}
    for row in rows:
        for one, two in zip(row, row[1:], strict=False):
            gap = max(grid.gap(one, two, spacing), left[root[two]].get(root[one], 0.0))
            left[root[two]][root[one]] = right[root[one]][root[two]] = gap
    order = _sorted_blocks(left, right)
    place: dict[int, float] = {}
    for block in order:
        place[block] = max((place[other] + gap for other, gap in left[block].items()), default=0.0)
    for block in reversed(order):
        if right[block]:
            place[block] = max(place[block], min(place[other] - gap for other, gap in right[block].items()))
    return [place[block] for block in root]


def _sorted_blocks(left: dict[int, dict[int, float]], right: dict[int, dict[int, float]]) -> list[int]:
    """The blocks, each after all on its left."""
    missing = {block: len(others) for block, others in left.items()}
    order = [block for block, count in missing.items() if not count]
    for block in order:  # grows
        for other in right[block]:
            missing[other] -= 1
            if not missing[other]:
                order.append(other)
    return order


def _average(grid: Grid, layouts: list[list[float]]) -> list[float]:
    """The mean of the two middle ones of four positions, the layouts being moved to one side of the narrowest."""
    if not grid.rank:
        return []
    lows = [min(c - s / 2 for c, s in zip(centre, grid.size, strict=True)) for centre in layouts]
    highs = [max(c + s / 2 for c, s in zip(centre, grid.size, strict=True)) for centre in layouts]
    narrowest = min(range(len(layouts)), key=lambda index: highs[index] - lows[index])
    moves = [
        highs[narrowest] - highs[index] if index % 2 else lows[narrowest] - lows[index] for index in range(len(layouts))
    ]
    moved = [[c + move for c in centre] for centre, move in zip(layouts, moves, strict=True)]
    return [sum(sorted(four)[1:3]) / 2 for four in zip(*moved, strict=True)]
