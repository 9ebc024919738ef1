"""Applicability of the depthwise kernels, and the results that each thread computes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX

MAX_WEIGHTS = 72
"""Maximum weights of a window, and weight gradient sums that a thread keeps in registers."""

MAX_SHARED_WEIGHTS = 9
"""Maximum weights of a window for walking, which keeps its rows (for gradients its weights' sums) in registers."""

MAX_DILATION = 8
"""Maximum dilation of a row for walking: the columns are bits of a mask."""

MAX_TILES = 2
"""Maximum tiles to be tried."""


@dataclass(frozen=True)
class Tile:
    """The results that a thread computes at once.

    Args:
        channels: contiguous channels, 1, 2, 4 or 8.
        rows: rows of results.
        columns: columns of results.
    """

    channels: int
    rows: int
    columns: int

    @property
    def name(self) -> str:
        return f"depthwise {self.channels}x{self.rows}x{self.columns}"


@dataclass(frozen=True)
class Walk:
    """Parameters of a column walk.

    Args:
        tile: the results of a step.
        ahead: prefetch distance in steps.
        threads: threads per block.
        resident: resident blocks per multiprocessor, which limits registers.
    """

    tile: Tile
    ahead: int
    threads: int
    resident: int

    @property
    def name(self) -> str:
        return f"{self.tile.name} walk"


START_STEPS = 3
"""Latency of a thread's first loads, in steps."""


def strip_rows(height: int, step: int, others: int, at_once: int) -> int:
    """Return the rows of a strip, a multiple of a step's rows, that minimise the device's time.

    Args:
        height: height of an image.
        step: rows of a step.
        others: strips side by side, over all images.
        at_once: strips that are resident on the device.
    """

    def steps(strips: int) -> int:
        return -(-height // (strips * step))

    def time(strips: int) -> int:
        down = -(-height // (steps(strips) * step))
        return -(-others * down // at_once) * (steps(strips) + START_STEPS)

    return step * steps(min(range(1, -(-height // step) + 1), key=time))


def always_within(begins: Iterable[int], columns: int, width: int) -> int:
    """Return a bit per column: whether it is within the width for all of `begins`."""
    rows = list(begins)
    return sum(1 << q for q in range(columns) if all(0 <= begin + q < width for begin in rows))


def source_columns(task: Task, columns: int) -> tuple[int, int]:
    """Return a tile's first source column, relative to the tile's, and the number of source columns."""
    g, data = task.problem.geometry, task.direction is Direction.DATA
    last, stride, pad = (g.kernel[1] - 1) * g.dilation[1], g.stride[1], g.pad[1]
    if data:
        first = -((last - pad) // stride)
        return first, (columns - 1 + pad) // stride - first + 1
    return -pad, (columns - 1) * stride + last + 1


def suits_depthwise(task: Task) -> bool:
    """Return whether the kernels support a task."""
    problem, g = task.problem, task.problem.geometry
    if len(problem.x) != 4 or not g.group == problem.x[1] == problem.weights[0]:
        return False
    if max(math.prod(problem.x), math.prod(problem.y)) > MAX_INDEX:
        return False
    return 1 < math.prod(g.kernel) <= MAX_WEIGHTS and max(g.stride) <= 4


def tiles(task: Task) -> list[Tile]:
    """Return the tiles to try, the likely fastest first."""
    channels, g = task.problem.x[1], task.problem.geometry
    found = [Tile(*shape) for shape in _shapes(task)]
    if task.direction is Direction.DATA:
        found = [Tile(t.channels, _multiple(t.rows, g.stride[0]), _multiple(t.columns, g.stride[1])) for t in found]
    if task.direction is Direction.WEIGHTS:
        found = [t for t in found if t.channels * math.prod(g.kernel) <= MAX_WEIGHTS]
    return list(dict.fromkeys(t for t in found if channels % t.channels == 0))[:MAX_TILES]


def walk_of(task: Task) -> Walk | None:
    """Return the walk of a data task, also for both gradients at once. None if windows are too large.

    At MobileNet's shapes (H200, 128 images, microseconds of all layers) this choice is the fastest of seven, or within
    5 % of it, at nearly every layer. Both gradients take 834, instead of 1187 with one tile per thread, which loads
    most rows of dy three times. Forward passes after a normalisation take 586, instead of 1220 with the first of
    `tiles`. Memory traffic alone takes 479 and 297. In float32 the times are 1293 instead of 1533, and 912 instead of
    1260. Fewer columns or a longer prefetch distance cost more registers than they save.
    """
    g, channels = task.problem.geometry, task.problem.x[1]
    if not suits_depthwise(task) or math.prod(g.kernel) > MAX_SHARED_WEIGHTS or g.dilation[1] > MAX_DILATION:
        return None
    strided, single, width = max(g.stride) > 1, task.problem.dtype == "float32", 1 if channels % 2 else 2
    if task.direction is Direction.DATA:
        rows, columns = _multiple(1, g.stride[0]), _multiple(2 if single and strided else 4, g.stride[1])
        return Walk(Tile(width, rows, columns), 1, *((128, 3) if single else (256, 2)))
    if strided:
        return Walk(Tile(1 if single else width, 1, 2), 1, 128, 5)
    if single:
        return Walk(Tile(width, 1, 4), 1, 128, 3)
    seven = task.problem.y[3] in (7, 14)
    return Walk(Tile(width, 1, 7), 1, 128, 3) if seven else Walk(Tile(width, 1, 4), 1, 256, 2)


def _shapes(task: Task) -> tuple[tuple[int, int, int], ...]:
    """Return tiles fast at MobileNet's shapes (H200, 128 images), then some for fewer channels or larger windows."""
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
