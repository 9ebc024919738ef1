"""Which problems the depthwise kernels suit, and the tiles of results that their threads compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.indexing import MAX_INDEX

MOST_WEIGHTS = 72
"""Weights of a window, and sums of weight gradients that a thread keeps in registers."""

MOST_TILES = 2
"""Tiles that are tried."""


@dataclass(frozen=True)
class Tile:
    """The results that a thread computes at once.

    Args:
        channels: neighbouring ones, 1, 2, 4 or 8.
        rows: of results.
        columns: of results.
    """

    channels: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"depthwise {self.channels}x{self.rows}x{self.columns}"


def suits_depthwise(task: Task) -> bool:
    """Whether the kernels can do a task."""
    problem, g = task.problem, task.problem.geometry
    if len(problem.x) != 4 or not g.group == problem.x[1] == problem.weights[0]:
        return False
    if max(math.prod(problem.x), math.prod(problem.y)) > MAX_INDEX:
        return False
    return 1 < math.prod(g.kernel) <= MOST_WEIGHTS and max(g.stride) <= 4


def tiles(task: Task) -> list[Tile]:
    """Those worth trying, the likely fastest first."""
    channels, g = task.problem.x[1], task.problem.geometry
    found = [Tile(*shape) for shape in _shapes(task)]
    if task.direction is Direction.DATA:
        found = [Tile(t.channels, _multiple(t.rows, g.stride[0]), _multiple(t.columns, g.stride[1])) for t in found]
    if task.direction is Direction.WEIGHTS:
        found = [t for t in found if t.channels * math.prod(g.kernel) <= MOST_WEIGHTS]
    return list(dict.fromkeys(t for t in found if channels % t.channels == 0))[:MOST_TILES]


def _shapes(task: Task) -> tuple[tuple[int, int, int], ...]:
    """Tiles that were fast at MobileNet's shapes (H200, 128 images), then some for fewer channels or larger windows."""
    if task.direction is Direction.WEIGHTS:
        return (4, 4, 2), (4, 2, 2), (2, 2, 4), (1, 2, 4)
    strided = max(task.problem.geometry.stride) > 1
    if strided and task.direction is Direction.DATA:
        return (4, 2, 4), (4, 4, 4), (2, 2, 4), (1, 4, 4)
    if strided:
        return (4, 1, 4), (4, 1, 2), (2, 2, 4), (1, 2, 4)
    if task.problem.dtype == "float32":
        return (2, 4, 4), (4, 2, 4), (1, 4, 4)
    return (8, 1, 4), (8, 2, 2), (4, 2, 4), (2, 2, 4), (1, 4, 4)


def _multiple(number: int, of: int) -> int:
    return -(-number // of) * of
