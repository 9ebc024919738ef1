"""Depthwise convolutions by own kernels, for small and large windows and strides, and for channel multipliers.

Small windows have two kinds of kernels: tiled (kernels/depthwise.cu), and walking (kernels/depthwise_walk.cu), where
threads walk down their columns. cuDNN's plans for this many groups read the image once per weight of the window; its
weight gradients are slower still.

A convolution with a channel multiplier is a depthwise convolution of repeated channels: if each channel is repeated
once per output, every output has its own channel and the depthwise kernels apply. They take a fraction of the time of
cuDNN's grouped engines. The data gradient is the sum over the repeated channels' gradients; before the sum only float32
results are allowed, to round once.

Large windows or strides have kernels/large_depthwise.cu. cuDNN's plans for them take ten times the arithmetic's time,
or fifty times the memory traffic's. Large windows are bound by arithmetic. Large strides, with few weights per result,
are bound by memory. This module decides which convolutions the kernels suit, and chooses the tilings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from itertools import islice, product
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import (
    C_TYPES,
    MULTIPROCESSORS,
    argument,
    c_type,
    defines,
    divider,
    launch,
    launch_blocks,
    library_kernel,
)
from caffepy.backend.cuda.convolution.algorithm import Candidate, Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.problem import (
    CorrelationAxis,
    Direction,
    Problem,
    Task,
    Tile,
    Walk,
    always_within,
    axis_of,
    residues_text,
    source_columns,
    strip_rows,
    tiles,
    walk_of,
)
from caffepy.backend.cuda.convolution.rewritten import Choose
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import Array, NormalisedBottom, convolution_workspace, round_up, view

# -- small windows -------------------------------------------------------------------------------------

THREADS = 256
CHANNELS = 128
"""Maximum channels per block of tiles, which has one thread per channel sum."""

WALK_CHANNELS = 64
"""Maximum channels per walking block: with two per thread, a warp's loads are contiguous."""

BLOCKS = 4
"""Blocks of tiles per multiprocessor; more would only reload weights."""

NOTHING = np.uint64(0)
"""Null pointer."""

TILES = ("depthwise_tiles",)
"""Files prepended to the kernels' texts."""


def depthwise_candidates(task: Task, resources: Resources) -> list[DepthwiseConvolution]:
    """Return one candidate per tile, and the walking one."""
    walk = None if task.direction is Direction.WEIGHTS else walk_of(task)
    walking = [] if walk is None else [DepthwiseWalk(task, walk, resources)]
    return [*(DepthwiseConvolution(task, tile, resources) for tile in tiles(task)), *walking]


@cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


class DepthwiseConvolution:
    """A candidate: one tile.

    Args:
        task: the task to compute.
        tile: the results of a thread.
        resources: scratch memory.
    """

    _threads, _most_channels, _blocks = THREADS, CHANNELS, BLOCKS
    """Threads per block, channels per block, blocks per multiprocessor."""

    def __init__(self, task: Task, tile: Tile, resources: Resources) -> None:
        self.name = tile.name
        self._tile = tile
        self._task = task
        self._resources = resources
        self._kernel: Any = None
        self._result, self._source = self._planes()
        self._lay_out()

    def _planes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the tiled array and of the array that tiles read."""
        problem = self._task.problem
        if self._task.direction is Direction.DATA:
            return problem.x, problem.y
        return problem.y, problem.x

    def _lay_out(self) -> None:
        """Compute the grid: as many packs of channels side by side as divide the channels evenly."""
        images, channels, height, width = self._result
        packs = channels // self._tile.channels
        self._across = -(-packs * self._tile.channels // self._most_channels)
        # Equal blocks side by side: a narrow last one would idle most of its threads in every tile.
        side = -(-packs // self._across)
        self._block = (side, self._threads // side)
        columns = -(-width // self._tile.columns)
        down, *own = self._rows_of_threads(images * columns)
        rows = -(-height // down)
        self._tiles = images * rows * columns
        divided = (rows, divider(rows), columns, divider(columns))
        self._arguments = (height, width, *self._source[2:], *own, packs, self._tiles, *divided)

    def _rows_of_threads(self, side_by_side: int) -> tuple[int, ...]:
        """Return the rows per thread and further kernel arguments; `side_by_side`: tiles of a row."""
        return (self._tile.rows,)

    def prepare(self) -> bool:
        """Compile."""
        name = "depthwise_weights" if self._task.direction is Direction.WEIGHTS else "depthwise"
        self._kernel = library_kernel(name, name, self._settings(), TILES)
        return True

    def _settings(self, **more: int) -> str:
        """Return constants prepended to the kernels' text."""
        task, g = self._task, self._task.problem.geometry
        pairs = zip(("KERNEL", "STRIDE", "PAD", "DILATION"), (g.kernel, g.stride, g.pad, g.dilation), strict=True)
        geometry = {f"{name}_{axis}": n for name, pair in pairs for axis, n in zip("HW", pair, strict=True)}
        return defines(
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char],
            WIDTH=self._tile.channels,
            TILE_H=self._tile.rows,
            TILE_W=self._tile.columns,
            DATA=int(task.direction is Direction.DATA),
            BIAS=int(task.bias),
            RELU=int(task.relu),
            SUMS=int(task.sums),
            THREADS=self._threads,
            CHANNELS=self._most_channels,
            **geometry,
            **more,
        )

    def run(self, operands: Operands) -> None:
        """Launch the kernel, and for weight gradients or sums a second one that adds the blocks' partial sums."""
        if self._task.direction is Direction.WEIGHTS:
            number = self._down()
            parts = self._parts(number, operands.out)
            self._launch(number, raw(operands.first), raw(operands.second), parts)
            sum_parts(parts, raw(operands.out), number, operands.accumulate)
            return
        self._convolve(operands, ())

    def _convolve(self, operands: Operands, per_channel: tuple[Any, ...]) -> None:
        """Compute y or dx; `per_channel`: additional kernel arguments of the bottom's normalisation."""
        number = self._down()
        bias = NOTHING if operands.bias is None else raw(operands.bias)
        parts = NOTHING if operands.sums is None else self._parts(number, operands.sums)
        arrays = (raw(operands.first), raw(operands.second), bias, *per_channel, raw(operands.out), parts)
        self._launch(number, *arrays)
        if operands.sums is not None:
            sum_parts(parts, raw(operands.sums), number, False)

    def _down(self) -> int:
        """Return the blocks that share the tiles of a pack of channels."""
        return max(1, min(-(-self._tiles // self._block[1]), self._most_down()))

    def _most_down(self) -> int:
        return max(1, self._blocks * _multiprocessors(cupy.cuda.runtime.getDevice()) // self._across)

    def _parts(self, number: int, of: Array) -> Array:
        return self._resources.scratch.get("parts of sums", number * of.size)

    def _launch(self, number: int, *arrays: Any) -> None:
        launch_blocks(self._kernel, (self._across, number), self._block, (*arrays, *self._arguments))


class DepthwiseWalk(DepthwiseConvolution):
    """A candidate whose threads walk down their columns.

    Args:
        task: the task to compute, not a weight gradient.
        walk: parameters of the walk.
        resources: scratch memory.
        rectified: if the bottom is normalised on load, whether it is rectified too; else None.
    """

    _most_channels = WALK_CHANNELS

    def __init__(self, task: Task, walk: Walk, resources: Resources, rectified: bool | None = None) -> None:
        self._walk = walk
        self._threads, self._blocks = walk.threads, walk.resident
        self._rectified = rectified
        super().__init__(task, walk.tile, resources)
        self.name = walk.name

    def _rows_of_threads(self, side_by_side: int) -> tuple[int, ...]:
        at_once = self._most_down() * self._block[1]
        rows = strip_rows(self._result[2], self._tile.rows, side_by_side, at_once)
        return rows, rows

    def prepare(self) -> bool:
        self._kernel = library_kernel("depthwise_walk", "walk_forward", self._settings(), TILES)
        return True

    def _settings(self, **more: int) -> str:
        bottom = {"NORMALISED": int(self._rectified is not None), "RECTIFIED": int(bool(self._rectified))}
        own = {"GRADIENTS": 0, "AHEAD": self._walk.ahead, "RESIDENT": self._walk.resident}
        return super()._settings(**{**bottom, **own, **self._always(), **more})

    def _always(self) -> dict[str, int]:
        """Return bit masks of a strip's columns that are within the image at every position."""
        columns, width, stride = self._tile.columns, self._result[3], self._task.problem.geometry.stride[1]
        lefts = range(0, width, columns)
        first, number = source_columns(self._task, columns)
        data = self._task.direction is Direction.DATA
        begins = [(left // stride if data else left * stride) + first for left in lefts]
        return {
            "OWN_ALWAYS": always_within(lefts, columns, width),
            "SOURCE_ALWAYS": always_within(begins, number, self._source[3]),
        }

    def run(self, operands: Operands) -> None:
        self._convolve(operands, (NOTHING,) * 4)

    def run_normalised(self, bottom: NormalisedBottom, operands: Operands) -> None:
        """Compute the task of a normalised bottom; `operands.first` is the normalisation's input."""
        n = bottom.n
        self._convolve(operands, tuple(map(raw, (n.mean, n.inverse, n.scale, n.bias))))


class DepthwiseGradients(DepthwiseWalk):
    """Both gradients and the preceding batch normalisation's sums in one pass, with the normalisation recomputed.

    Args:
        problem: the convolution.
        relu: whether its bottom is rectified.
        walk: parameters of the walk over the bottom.
        resources: scratch memory.
    """

    def __init__(self, problem: Problem, relu: bool, walk: Walk, resources: Resources) -> None:
        super().__init__(Task(problem, Direction.DATA, relu=relu), walk, resources)
        self._finish: Any = None

    def prepare(self) -> bool:
        self._kernel = library_kernel("depthwise_walk", "walk_gradients", self._settings(GRADIENTS=1), TILES)
        area = defines(AREA=math.prod(self._task.problem.geometry.kernel))
        self._finish = library_kernel("depthwise_finish", "finish_gradients", area, ("split_k",))
        return True

    def run_all(self, bottom: NormalisedBottom, operands: Operands, dweights: Array) -> None:
        """Launch the kernel, and one that adds the blocks' partial sums.

        Args:
            bottom: bottom of the convolution.
            operands: dy, the weights and dx; `accumulate` applies to dweights.
            dweights: float32.
        """
        assert bottom.sums is not None
        n, number, channels = bottom.n, self._down(), self._task.problem.x[1]
        size = dweights.size + 2 * channels
        parts = self._resources.scratch.get("parts of sums", number * size)
        per_channel = (n.mean, n.inverse, n.scale, n.bias)
        arrays = map(raw, (bottom.x, operands.first, operands.second, *per_channel, operands.out))
        self._launch(number, *arrays, parts)
        sums = (raw(dweights), *bottom.sums, channels, number, operands.accumulate)
        launch_blocks(self._finish, (-(-size // 32),), (32, 8), (parts, n.inverse, *sums))


# -- channel multipliers -------------------------------------------------------------------------------


def suits_depth_multiplier(task: Task) -> bool:
    """Return whether a task has a channel multiplier and memory for the repeated arrays."""
    problem, channels = task.problem, task.problem.x[1]
    if len(problem.x) != 4 or not problem.geometry.group == channels < problem.weights[0]:
        return False
    if task.direction is Direction.DATA and problem.dtype != "float32":
        return False
    item = 4 if problem.dtype == "float32" else 2
    arrays = sum(math.prod(shape) for shape in problem.arrays(task.direction))
    size = math.prod(repeated(problem).x)
    return size <= MAX_INDEX and size * item <= convolution_workspace(arrays * item) // 2


def repeated(problem: Problem) -> Problem:
    """Return the depthwise problem."""
    outputs = problem.weights[0]
    x = (problem.x[0], outputs, *problem.x[2:])
    return Problem(x, problem.weights, replace(problem.geometry, group=outputs), problem.dtype)


class DepthMultiplier:
    """The candidate: the fastest candidate of the depthwise problem.

    Args:
        task: a plain task that `suits_depth_multiplier`.
        choose: returns the candidate of another task.
        resources: scratch memory.
    """

    name = "depth multiplier"

    def __init__(self, task: Task, choose: Choose, resources: Resources) -> None:
        self._task = Task(repeated(task.problem), task.direction)
        self._times = task.problem.weights[0] // task.problem.x[1]
        self._choose = choose
        self._resources = resources
        self._inner: Candidate | None = None

    def prepare(self) -> bool:
        """Choose the depthwise candidate, which may require tuning."""
        self._inner = self._choose(self._task, None)
        return self._inner is not None

    def run(self, operands: Operands) -> None:
        """Launch the repeat (or sum) kernel and the depthwise candidate."""
        assert self._inner is not None
        if self._task.direction is not Direction.DATA:
            self._inner.run(replace(operands, first=self._repeated(operands.first)))
            return
        x = self._task.problem.x
        result = view(self._resources.scratch.get("repeated channels", math.prod(x)), x)
        self._inner.run(replace(operands, out=result))
        kernel = library_kernel("repeat_channels", "add_channels", defines(Element="float", PACK=1))
        launch(kernel, operands.out.size, (raw(result), raw(operands.out), self._times, operands.out.size))

    def _repeated(self, x: Array) -> Array:
        shape = self._task.problem.x
        result = view(self._resources.scratch.get("repeated channels", math.prod(shape), x.dtype.name), shape)
        pack = math.gcd(result.size, 4)
        kernel = library_kernel("repeat_channels", "repeat_channels", defines(Element=c_type(x), PACK=pack))
        count = result.size // pack
        launch(kernel, count, (raw(x), raw(result), divider(self._times), count))
        return result


# -- large windows and strides -------------------------------------------------------------------------

MIN_AREA, MIN_STRIDE = 49, 5
"""Minimum weights of a window, or minimum stride; below, kernels/depthwise.cu is faster."""

MAX_TAPS = 8
"""Taps of a row that a thread keeps in registers, as in the kernels' text."""

MAX_BYTES = 96 * 1024
"""Maximum shared memory bytes per block, so that two blocks fit a multiprocessor."""

MAX_THREADS, WARPS = 512, 12
"""Maximum threads per block; warps that saturate a multiprocessor's arithmetic."""

MAX_COLUMNS = 64
"""Maximum columns of dy per block at once."""

SPLITS, MIN_ROWS = (2, 4, 8), 4
"""Threads that may share a result, and minimum rows of factors for each."""

MAX_TILINGS = 3
"""Maximum tilings to be tried."""

MAX_FACTORS = 4
"""Number of dy part sizes to compare, the largest that fit."""

SHARED_BY_BLOCKS, MAX_WARPS = 220 * 1024, 16
"""Shared memory of a multiprocessor, and warps that its registers allow at 128 registers per thread."""


@dataclass(frozen=True)
class Tiling:
    """The results of a block and a thread.

    Args:
        channels: channels per block, a power of two up to 32.
        run: columns per thread.
        rows: rows per thread.
        runs: threads across.
        groups: threads down.
        factors: rows and columns of factors at once.
        shares: blocks that share the vertical residues.
        split: threads that share a result's rows of factors.
    """

    channels: int
    run: int
    rows: int
    runs: int
    groups: int
    factors: tuple[int, int]
    shares: int = 1
    split: int = 1

    @property
    def name(self) -> str:
        """Unique among a task's tilings."""
        thread, factors = f"{self.channels}x{self.rows}x{self.run}", "x".join(map(str, self.factors))
        return f"large depthwise {thread} by {self.groups}x{self.runs}, {factors} in {self.shares} by {self.split}"

    @property
    def threads(self) -> int:
        return self.channels * self.runs * self.groups * self.split


@dataclass(frozen=True)
class LargeDepthwiseTask:
    """A task from the kernels' view."""

    task: Task
    down: CorrelationAxis
    across: CorrelationAxis

    @cached_property
    def numbers_of_taps(self) -> Counter[tuple[int, int]]:
        """Return the number of residues by rows and columns of taps."""
        return Counter((down.taps, across.taps) for down, across in product(self.down.residues, self.across.residues))

    def source(self, tiling: Tiling) -> tuple[int, int]:
        """Return rows and columns of the source in a block's shared memory."""
        height, width = tiling.groups * tiling.rows, tiling.runs * tiling.run
        if self.task.direction is Direction.WEIGHTS:
            return self.down.pixels(height, tiling.factors[0]), self.across.pixels(width, tiling.factors[1])
        return self.down.pixels(height), self.across.pixels(width)

    def extra(self, tiling: Tiling) -> int:
        """Return padding pixels of shared memory after a thread's pixels: an odd distance avoids bank conflicts."""
        return int(self.across.a > 1 and tiling.run * self.across.a % 2 == 0)

    def pixels(self, tiling: Tiling) -> int:
        """Return the row pitch of the source in shared memory, in pixels."""
        width = self.source(tiling)[1]
        return width + (width - 1) // (tiling.run * self.across.a) * self.extra(tiling)

    def shared_bytes(self, tiling: Tiling) -> int:
        """Return shared memory bytes of source and factors."""
        source = round_up(self.source(tiling)[0] * self.pixels(tiling) * tiling.channels, 4)
        # Threads that share results exchange their sums in the memory of source and factors, which are used up by then.
        sums = tiling.threads * tiling.rows * tiling.run if tiling.split > 1 else 0
        return 4 * max(source + math.prod(tiling.factors) * tiling.channels, sums)

    def tiles(self, tiling: Tiling) -> tuple[int, int]:
        """Return the tiles of a result plane (rows, columns)."""
        height, width = tiling.groups * tiling.rows, tiling.runs * tiling.run
        return -(-self.down.results // height), -(-self.across.results // width)

    def packs(self, tiling: Tiling) -> int:
        """Return the packs of channels."""
        return -(-self.task.problem.x[1] // tiling.channels)

    def pieces(self, tiling: Tiling) -> tuple[int, int]:
        """Return the pieces of a factor plane (rows, columns)."""
        return -(-self.down.factors // tiling.factors[0]), -(-self.across.factors // tiling.factors[1])

    def resident(self, tiling: Tiling) -> int:
        """Return the resident blocks of a multiprocessor."""
        # CUDA keeps a kibibyte of each block's shared memory for itself.
        most = SHARED_BY_BLOCKS // (self.shared_bytes(tiling) + 1024)
        return max(1, min(most, MAX_WARPS // -(-tiling.threads // 32)))

    def parts(self, tiling: Tiling) -> int:
        """Return the partial sums of a weight gradient."""
        blocks = math.prod(self.tiles(tiling)) * self.packs(tiling)
        pieces = self.task.problem.x[0] * math.prod(self.pieces(tiling))
        return max(1, min(pieces, MULTIPROCESSORS * self.resident(tiling) // blocks))


@lru_cache(maxsize=256)
def correlation_of(task: Task) -> LargeDepthwiseTask:
    down, across = (axis_of(task.problem, task.direction, number) for number in range(2))
    return LargeDepthwiseTask(task, down, across)


def suits_large_depthwise(task: Task) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem, g = task.problem, task.problem.geometry
    if len(problem.x) != 4 or not g.group == problem.x[1] == problem.weights[0] or task.sums or task.residual:
        return False
    if math.prod(g.kernel) < MIN_AREA and max(g.stride) < MIN_STRIDE or math.prod(g.kernel) == 1:
        return False
    return 0 not in problem.x + problem.y and max(math.prod(problem.x), math.prod(problem.y)) <= MAX_INDEX


@lru_cache(maxsize=256)
def large_depthwise_tilings(task: Task) -> tuple[Tiling, ...]:
    """Return the likely fastest tiling per channel count, the likely fastest first."""
    correlation = correlation_of(task)
    best: dict[int, tuple[float, Tiling]] = {}
    for tiling in _possible(correlation):
        cycles = cycles_of(correlation, tiling)
        if tiling.channels not in best or cycles < best[tiling.channels][0]:
            best[tiling.channels] = cycles, tiling
    return tuple(tiling for _, tiling in sorted(best.values(), key=lambda pair: pair[0])[:MAX_TILINGS])


def _possible(correlation: LargeDepthwiseTask) -> Iterator[Tiling]:
    """Yield the tilings that fit a multiprocessor."""
    down, across, factors = correlation.down, correlation.across, _factors(correlation)
    # Odd runs: neighbouring threads read different banks.
    shapes = product(
        (1, 2, 4, 8, 16, 32), (7, 5, 3, 1) if across.a == 1 else (7, 4, 2, 1), (4, 2, 1) if down.a == 1 else (1,)
    )
    for channels, run, rows in shapes:
        # More than half of the lanes would have no channel.
        if channels >= 2 * correlation.task.problem.x[1]:
            continue
        every_run = _threads(across.results, run, across.b if across.a == 1 and run > 1 else 1)
        every_group = _threads(down.results, rows, down.b if down.a == 1 and rows > 1 else 1)
        shares = [number for number in (1, 2, 4, 8, 16, 32) if number <= len(down.residues)]
        for runs, groups in product(every_run, every_group):
            if channels * runs * groups <= MAX_THREADS:
                first = Tiling(channels, run, rows, runs, groups, factors[0])
                fitting = (
                    each for each in factors if correlation.shared_bytes(replace(first, factors=each)) <= MAX_BYTES
                )
                for each, shared in product(islice(fitting, MAX_FACTORS), shares):
                    yield replace(first, factors=each, shares=shared)
                single = len(down.residues) == len(across.residues) == 1
                if correlation.task.direction is not Direction.WEIGHTS and single:
                    yield from _split(correlation, first)


def _split(correlation: LargeDepthwiseTask, tiling: Tiling) -> Iterator[Tiling]:
    """Yield the tiling with several threads per result."""
    for split in SPLITS:
        several = replace(tiling, split=split)
        possible = split * MIN_ROWS <= tiling.factors[0] and several.threads <= MAX_THREADS
        if possible and correlation.shared_bytes(several) <= MAX_BYTES:
            yield several


def _threads(results: int, each: int, multiple: int) -> list[int]:
    """Return thread counts along an axis with which whole tiles, or one tile, cover the results."""
    numbers = (math.ceil(math.ceil(results / tiles) / each) for tiles in (1, 2, 3, 4, 8, 16))
    return list(dict.fromkeys(round_up(number, multiple) for number in numbers))


def _factors(correlation: LargeDepthwiseTask) -> list[tuple[int, int]]:
    """Return rows and columns of factors at once: parts of dy, or the whole window."""
    height, width = correlation.down.factors, correlation.across.factors
    if correlation.task.direction is not Direction.WEIGHTS:
        return [(height, width)]
    rows = [-(-height // parts) for parts in (1, 2, 3, 4, 6, 8, 12, height)]
    # With a stride, few pixels of dy need many of x.
    most = {-(-width // MAX_COLUMNS) * parts for parts in ((1, 2, 4) if correlation.across.b > 1 else (1,))}
    columns = [-(-width // min(parts, width)) for parts in sorted(most)]
    return sorted(set(product(rows, columns)), key=lambda part: (-math.prod(part), part))


def cycles_of(correlation: LargeDepthwiseTask, tiling: Tiling) -> float:
    """Return the approximate multiprocessor cycles of a tiling, for ranking."""
    resident, warps = correlation.resident(tiling), -(-tiling.threads // 32)
    blocks = math.prod(correlation.tiles(tiling)) * correlation.packs(tiling)
    images = correlation.task.problem.x[0]
    loads, wait = _loads(correlation, tiling), _wait(correlation, tiling)
    if correlation.task.direction is Direction.WEIGHTS:
        parts, pieces = correlation.parts(tiling), images * math.prod(correlation.pieces(tiling))
        cycles, alone = _cycles_of_warp(correlation, tiling, *tiling.factors)
        turns = -(-pieces // parts)
        one, alone = turns * (loads + warps * cycles), turns * (wait + alone)
        one += parts * math.prod(correlation.task.problem.weights[2:]) * tiling.channels / 256
        blocks *= parts
    else:
        one, alone = loads, wait
        for (down, across), number in correlation.numbers_of_taps.items():
            cycles, chain = _cycles_of_warp(correlation, tiling, -(-down // tiling.split), across)
            if tiling.split > 1:
                cycles += 3 * tiling.rows * tiling.run
            one += warps * number * (cycles + _stores(correlation, tiling) / tiling.split) / tiling.shares
            alone += number * (chain + 4 * tiling.rows * tiling.run) / tiling.shares
        blocks *= images * tiling.shares
    # The device is counted as an H200 everywhere, so that the same tilings are tried, and may be chosen, on each GPU.
    waves = -(-blocks // (MULTIPROCESSORS * resident))
    at_once = min(resident, -(-blocks // MULTIPROCESSORS))
    return waves * max(at_once * one / min(1.0, at_once * warps / WARPS), alone)


def _wait(correlation: LargeDepthwiseTask, tiling: Tiling) -> float:
    """Return the cycles until a block's arrays are loaded."""
    weights = correlation.task.direction is Direction.WEIGHTS
    numbers = math.prod(correlation.source(tiling)) + math.prod(tiling.factors) * (1 if weights else tiling.channels)
    return START + LOAD * (numbers / (8 * tiling.threads))


def _loads(correlation: LargeDepthwiseTask, tiling: Tiling) -> float:
    """Return the bytes of a block's loads, in 32-byte sectors."""
    item = 4 if correlation.task.problem.dtype == "float32" else 2
    together = max(1.0, tiling.channels * item / 32) + tiling.channels / 16
    planes = [correlation.source(tiling)]
    if correlation.task.direction is Direction.WEIGHTS:
        return together * sum(map(math.prod, (*planes, tiling.factors)))
    return together * math.prod(planes[0]) + math.prod(tiling.factors) * tiling.channels / 8


START, LOAD = 2500, 700
"""Cycles of a block's start and end, and of eight loads of a thread."""


def _cycles_of_warp(correlation: LargeDepthwiseTask, tiling: Tiling, down: int, across: int) -> tuple[float, float]:
    """Return the cycles for `down` x `across` taps of a warp: multiprocessor throughput, and latency of a lone warp."""
    # Throughput is bound by arithmetic or by shared memory loads.
    shift = correlation.across.b if correlation.across.a == 1 else correlation.across.a
    chunks = max(1, -(-across // MAX_TAPS))
    each = -(-across // chunks)
    values = min(tiling.run * each, (tiling.run - 1) * shift + (each - 1) * correlation.across.b + 1)
    if shift == correlation.across.b:
        values = tiling.run + each - 1
    products, steps = down * tiling.rows * tiling.run * across, (down + tiling.rows - 1) * chunks
    words = steps * (values + each)
    cycles = max(products / 4, words) + 0.2 * min(products / 4, words) + 2 * steps
    return cycles, products + words + 40 * steps


PARTIAL = 6
"""Cycles of a store that fills a 32-byte sector partially, and of one that fills it."""


def _stores(correlation: LargeDepthwiseTask, tiling: Tiling) -> float:
    """Return the cycles of a warp's stores; contiguous channels are stored together."""
    problem = correlation.task.problem
    item, channels = 4 if problem.dtype == "float32" else 2, min(tiling.channels, problem.x[1])
    together = channels * item / 32
    whole = together == int(together) and problem.x[1] * item % 32 == 0
    cycles = together if whole else max(0.0, together - 1) + PARTIAL * min(2.0, together + 1)
    return tiling.rows * tiling.run * (2 + 32 / tiling.channels * cycles)


WIDEST = 4
"""Channels per load."""


def large_depthwise_candidates(task: Task, resources: Resources) -> list[LargeDepthwise]:
    """Return one candidate per tiling."""
    kind = LargeDepthwiseWeights if task.direction is Direction.WEIGHTS else LargeDepthwise
    return [kind(task, tiling, resources) for tiling in large_depthwise_tilings(task)]


class LargeDepthwise:
    """A candidate: one tiling of y or dx.

    Args:
        task: one that `suits_large_depthwise`.
        tiling: the division of the results.
        resources: scratch memory.
    """

    _kernel_name = "large_depthwise"

    def __init__(self, task: Task, tiling: Tiling, resources: Resources) -> None:
        self.name = tiling.name
        self._task = task
        self._tiling = tiling
        self._resources = resources
        self._correlation = correlation_of(task)
        self._bytes = self._correlation.shared_bytes(tiling)
        self._packs, self._tiles = self._correlation.packs(tiling), self._correlation.tiles(tiling)
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile."""
        self._kernel = library_kernel("large_depthwise", self._kernel_name, self._settings())
        self._kernel.max_dynamic_shared_size_bytes = self._bytes
        return True

    def _settings(self) -> str:
        """Return constants prepended to the kernels' text."""
        task, tiling, down, across = self._task, self._tiling, self._correlation.down, self._correlation.across
        source = self._correlation.source(tiling)
        weights = task.direction is Direction.WEIGHTS
        return defines(
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char],
            A_H=down.a,
            A_W=across.a,
            B_H=down.b,
            B_W=across.b,
            CHANNELS=tiling.channels,
            TOGETHER=math.gcd(task.problem.x[1], tiling.channels, WIDEST),
            RUN=tiling.run,
            ROWS=tiling.rows,
            RUNS=tiling.runs,
            GROUPS=tiling.groups,
            SPLIT=tiling.split,
            RESIDENT=self._correlation.resident(tiling),
            SOURCE_H=source[0],
            SOURCE_W=source[1],
            PIXELS=self._correlation.pixels(tiling),
            EXTRA=self._correlation.extra(tiling),
            FACTOR_H=tiling.factors[0],
            FACTOR_W=tiling.factors[1],
            TAPS=tiling.factors[1] if weights else across.taps,
            STEP_H=down.step,
            STEP_W=across.step,
            RESIDUES_H=residues_text(down),
            RESIDUES_W=residues_text(across),
            BIAS=int(task.bias),
            RELU=int(task.relu),
            WEIGHTS=int(weights),
        )

    def run(self, operands: Operands) -> None:
        """One launch."""
        problem, down, across = self._task.problem, self._correlation.down, self._correlation.across
        bias = NOTHING if operands.bias is None else raw(operands.bias)
        arrays = (raw(operands.first), raw(operands.second), bias, raw(operands.out))
        source, _, result = problem.arrays(self._task.direction)
        sizes = (*source[2:], *result[2:], down.origin, across.origin)
        self._launch(source[0], (*arrays, problem.x[1], self._packs, *self._tiles, *sizes))

    def _launch(self, planes: int, arguments: tuple[Any, ...]) -> None:
        """Launch one block per tile of `planes` planes and per pack of channels."""
        grid = (planes * math.prod(self._tiles) * self._packs, self._tiling.shares)
        self._kernel(grid, (self._tiling.threads,), tuple(map(argument, arguments)), shared_mem=self._bytes)


class LargeDepthwiseWeights(LargeDepthwise):
    """A candidate: one tiling of dweights."""

    _kernel_name = "large_depthwise_weights"

    def run(self, operands: Operands) -> None:
        """Launch the kernel, and one that adds the blocks' partial sums."""
        problem, tiling, out = self._task.problem, self._tiling, raw(operands.out)
        number, pieces = self._correlation.parts(tiling), self._correlation.pieces(tiling)
        direct = number == 1 and not operands.accumulate
        parts = out
        if not direct:
            parts = self._resources.scratch.get("parts of a weight gradient", number * operands.out.size)
        arrays = (raw(operands.first), raw(operands.second), parts, problem.x[1], self._packs, *self._tiles, number)
        sizes = (*problem.x[2:], *problem.y[2:], *problem.geometry.pad, *problem.weights[2:])
        self._launch(number, (*arrays, *sizes, problem.x[0] * math.prod(pieces), *pieces))
        if not direct:
            sum_parts(parts, out, number, operands.accumulate)
