"""Depthwise convolutions with large windows or strides, and their gradients: kernels/large_depthwise.cu.

cuDNN's plans for them take ten times the arithmetic's time, or fifty times the memory traffic's. Large windows are
bound by arithmetic. Large strides, with few weights per result, are bound by memory. This module decides which
convolutions the kernels suit, and chooses the tilings.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice, product
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, MULTIPROCESSORS, argument, defines, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.correlation import Axis, axis_of, residues_text
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import round_up

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
class Correlation:
    """A task from the kernels' view."""

    task: Task
    down: Axis
    across: Axis

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
        most = SHARED_BY_BLOCKS // (self.shared_bytes(tiling) + 1024)
        return max(1, min(most, MAX_WARPS // -(-tiling.threads // 32)))

    def parts(self, tiling: Tiling) -> int:
        """Return the partial sums of a weight gradient."""
        blocks = math.prod(self.tiles(tiling)) * self.packs(tiling)
        pieces = self.task.problem.x[0] * math.prod(self.pieces(tiling))
        return max(1, min(pieces, MULTIPROCESSORS * self.resident(tiling) // blocks))


@lru_cache(maxsize=256)
def correlation_of(task: Task) -> Correlation:
    down, across = (axis_of(task.problem, task.direction, number) for number in range(2))
    return Correlation(task, down, across)


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


def _possible(correlation: Correlation) -> Iterator[Tiling]:
    """Yield the tilings that fit a multiprocessor."""
    down, across, factors = correlation.down, correlation.across, _factors(correlation)
    # Odd runs: neighbouring threads read different banks.
    shapes = product(
        (1, 2, 4, 8, 16, 32), (7, 5, 3, 1) if across.a == 1 else (7, 4, 2, 1), (4, 2, 1) if down.a == 1 else (1,)
    )
    for channels, run, rows in shapes:
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


def _split(correlation: Correlation, tiling: Tiling) -> Iterator[Tiling]:
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


def _factors(correlation: Correlation) -> list[tuple[int, int]]:
    """Return rows and columns of factors at once: parts of dy, or the whole window."""
    height, width = correlation.down.factors, correlation.across.factors
    if correlation.task.direction is not Direction.WEIGHTS:
        return [(height, width)]
    rows = [-(-height // parts) for parts in (1, 2, 3, 4, 6, 8, 12, height)]
    # With a stride, few pixels of dy need many of x.
    most = {-(-width // MAX_COLUMNS) * parts for parts in ((1, 2, 4) if correlation.across.b > 1 else (1,))}
    columns = [-(-width // min(parts, width)) for parts in sorted(most)]
    return sorted(set(product(rows, columns)), key=lambda part: (-math.prod(part), part))


def cycles_of(correlation: Correlation, tiling: Tiling) -> float:
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
    waves = -(-blocks // (MULTIPROCESSORS * resident))
    at_once = min(resident, -(-blocks // MULTIPROCESSORS))
    return waves * max(at_once * one / min(1.0, at_once * warps / WARPS), alone)


def _wait(correlation: Correlation, tiling: Tiling) -> float:
    """Return the cycles until a block's arrays are loaded."""
    weights = correlation.task.direction is Direction.WEIGHTS
    numbers = math.prod(correlation.source(tiling)) + math.prod(tiling.factors) * (1 if weights else tiling.channels)
    return START + LOAD * (numbers / (8 * tiling.threads))


def _loads(correlation: Correlation, tiling: Tiling) -> float:
    """Return the bytes of a block's loads, in 32-byte sectors."""
    item = 4 if correlation.task.problem.dtype == "float32" else 2
    together = max(1.0, tiling.channels * item / 32) + tiling.channels / 16
    planes = [correlation.source(tiling)]
    if correlation.task.direction is Direction.WEIGHTS:
        return together * sum(map(math.prod, (*planes, tiling.factors)))
    return together * math.prod(planes[0]) + math.prod(tiling.factors) * tiling.channels / 8


START, LOAD = 2500, 700
"""Cycles of a block's start and end, and of eight loads of a thread."""


def _cycles_of_warp(correlation: Correlation, tiling: Tiling, down: int, across: int) -> tuple[float, float]:
    """Return the cycles for `down` x `across` taps of a warp: multiprocessor throughput, and latency of a lone warp.

    Throughput is bound by arithmetic or by shared memory loads.
    """
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


def _stores(correlation: Correlation, tiling: Tiling) -> float:
    """Return the cycles of a warp's stores; contiguous channels are stored together."""
    problem = correlation.task.problem
    item, channels = 4 if problem.dtype == "float32" else 2, min(tiling.channels, problem.x[1])
    together = channels * item / 32
    whole = together == int(together) and problem.x[1] * item % 32 == 0
    cycles = together if whole else max(0.0, together - 1) + PARTIAL * min(2.0, together + 1)
    return tiling.rows * tiling.run * (2 + 32 / tiling.channels * cycles)


WIDEST = 4
"""Channels per load."""

NOTHING = np.uint64(0)
"""Null pointer."""


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
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char], A_H=down.a, A_W=across.a,
            B_H=down.b, B_W=across.b, CHANNELS=tiling.channels,
            TOGETHER=math.gcd(task.problem.x[1], tiling.channels, WIDEST), RUN=tiling.run, ROWS=tiling.rows,
            RUNS=tiling.runs, GROUPS=tiling.groups, SPLIT=tiling.split,
            RESIDENT=self._correlation.resident(tiling),
            SOURCE_H=source[0], SOURCE_W=source[1], PIXELS=self._correlation.pixels(tiling),
            EXTRA=self._correlation.extra(tiling), FACTOR_H=tiling.factors[0], FACTOR_W=tiling.factors[1],
            TAPS=tiling.factors[1] if weights else across.taps, STEP_H=down.step, STEP_W=across.step,
            RESIDUES_H=residues_text(down), RESIDUES_W=residues_text(across), BIAS=int(task.bias), RELU=int(task.relu),
            WEIGHTS=int(weights),
        )  # fmt: skip

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
