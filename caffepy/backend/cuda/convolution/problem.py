"""Convolution tasks on the GPU: shapes, direction and epilogue, as correlations along axes, and in depthwise tiles.

A convolution or gradient is a correlation along each axis: a sum over equidistant taps. A data gradient with a stride
is one correlation per residue: results residue, residue + stride, and so on.

The tiles say to which tasks the depthwise kernels apply, and which results each thread computes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.types import Geometry, element_dtype, round_up, spatial_output

# -- tasks ---------------------------------------------------------------------------------------------


class Direction(Enum):
    """Result of a convolution task, and the two arrays that it is computed from."""

    FORWARD = "forward"  # x, weights -> y
    DATA = "backward to data"  # dy, weights -> dx
    WEIGHTS = "backward to weights"  # x, dy -> dweights


@dataclass(frozen=True)
class Problem:
    """A convolution's shapes.

    Args:
        x: (N, C, spatial...).
        weights: (num_output, C / group, kernel...).
        geometry: window geometry.
        dtype: of x, y and the weights.
    """

    x: tuple[int, ...]
    weights: tuple[int, ...]
    geometry: Geometry
    dtype: str = "float32"

    @cached_property
    def y(self) -> tuple[int, ...]:
        """(N, num_output, spatial...)."""
        g = self.geometry
        windows = zip(self.x[2:], g.kernel, g.stride, g.pad, g.dilation, strict=True)
        return (self.x[0], self.weights[0], *(spatial_output(*window) for window in windows))

    @property
    def array_dtype(self) -> str:
        """dtype of the device's arrays; uint16 stores bfloat16."""
        return element_dtype(self.dtype)

    @property
    def multiplications(self) -> int:
        """Multiplications in each direction, including those with padding."""
        return math.prod(self.y) * math.prod(self.weights[1:])

    def arrays(self, direction: Direction) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the two inputs and of the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


@dataclass(frozen=True)
class Task:
    """One direction of a problem, and the epilogue of the forward pass."""

    problem: Problem
    direction: Direction
    bias: bool = False
    relu: bool = False
    sums: bool = False
    residual: bool = False

    @property
    def plain(self) -> Task:
        """The task without its epilogue."""
        return Task(self.problem, self.direction)


def is_pointwise(geometry: Geometry) -> bool:
    """Return whether the convolution is 1x1 with stride 1 and no padding: a matrix product without im2col."""
    g = geometry
    return all(k == 1 and s == 1 and p == 0 for k, s, p in zip(g.kernel, g.stride, g.pad, strict=True))


def is_whole_image(problem: Problem) -> bool:
    """Return whether each image has a single window, the image itself, in one group: an inner product."""
    g = problem.geometry
    return g.kernel == problem.x[2:] and g.group == 1 and not any(g.pad) and all(d == 1 for d in g.dilation)


def is_product(problem: Problem) -> bool:
    """Return whether the convolution is a matrix product of its arrays without im2col."""
    return is_pointwise(problem.geometry) or is_whole_image(problem)


# -- correlations along axes ---------------------------------------------------------------------------


class Residue(NamedTuple):
    """The results of one residue along an axis: first factor, pixel offset, and number of factors."""

    first: int
    offset: int
    taps: int


@dataclass(frozen=True)
class CorrelationAxis:
    """A correlation along one axis: result r of a residue sums factors k times pixels origin + offset + r * a + k * b.

    Args:
        results: number of results of each residue.
        a: pixel distance of neighbouring results.
        b: pixel distance of neighbouring factors.
        factors: number of factors.
        step: factor index step, negative if the factors are reversed.
        origin: pixel of the first result.
        residues: residues of the results.
    """

    results: int
    a: int
    b: int
    factors: int
    step: int
    origin: int
    residues: tuple[Residue, ...]

    @property
    def taps(self) -> int:
        """Maximum factors per result."""
        return max(residue.taps for residue in self.residues)

    def pixels(self, results: int, factors: int | None = None) -> int:
        """Return the pixels read by `results` neighbouring results, with `factors` factors (default: all)."""
        if factors is not None:
            return (results - 1) * self.a + (factors - 1) * self.b + 1
        return (results - 1) * self.a + max(p.offset + (p.taps - 1) * self.b for p in self.residues if p.taps) + 1


def axis_of(problem: Problem, direction: Direction, number: int) -> CorrelationAxis:
    """Return a task's correlation along axis 0 or 1."""
    g = problem.geometry
    kernel, stride, pad, dilation = g.kernel[number], g.stride[number], g.pad[number], g.dilation[number]
    if direction is Direction.FORWARD:
        return CorrelationAxis(problem.y[2 + number], stride, dilation, kernel, 1, -pad, (Residue(0, 0, kernel),))
    if direction is Direction.WEIGHTS:
        out = problem.y[2 + number]
        return CorrelationAxis(kernel, dilation, stride, out, 1, -pad, (Residue(0, 0, out),))
    common = math.gcd(stride, dilation)
    step, b = stride // common, dilation // common
    residues = [_residue(kernel, stride, pad, dilation, residue) for residue in range(stride)]
    # Offsets count from the lowest pixel that any residue reads, where a block's part of the source begins.
    lowest = min(residue.offset for residue in residues if residue.taps)
    moved = tuple(p._replace(offset=p.offset - lowest) if p.taps else p for p in residues)
    return CorrelationAxis(-(-problem.x[2 + number] // stride), 1, b, kernel, -step, lowest, moved)


def _residue(kernel: int, stride: int, pad: int, dilation: int, residue: int) -> Residue:
    """Return a data gradient's results residue + stride * q, summed from the last factor on."""
    common = math.gcd(stride, dilation)
    step = stride // common
    meeting = [k for k in range(min(step, kernel)) if (residue + pad - k * dilation) % stride == 0]
    if not meeting:
        return Residue(0, 0, 0)
    first = meeting[0]
    taps = -(-(kernel - first) // step)
    last = (residue + pad - first * dilation) // stride - (taps - 1) * dilation // common
    return Residue(first + (taps - 1) * step, last, taps)


def residues_text(axis: CorrelationAxis) -> str:
    """Return a C++ initialiser of the residues."""
    return f"{{{', '.join(f'{{{p.first}, {p.offset}, {p.taps}}}' for p in axis.residues)}}}"


# -- tiles of the depthwise kernels --------------------------------------------------------------------

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
        # Short strips give more threads, but each waits for its first rows; and a wave that is not full takes as long
        # as a full one.
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
        found = [Tile(t.channels, round_up(t.rows, g.stride[0]), round_up(t.columns, g.stride[1])) for t in found]
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
        rows, columns = round_up(1, g.stride[0]), round_up(2 if single and strided else 4, g.stride[1])
        return Walk(Tile(width, rows, columns), 1, *((128, 3) if single else (256, 2)))
    if strided:
        return Walk(Tile(1 if single else width, 1, 2), 1, 128, 5)
    if single:
        return Walk(Tile(width, 1, 4), 1, 128, 3)
    # Seven columns divide MobileNet's last planes without a rest.
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
