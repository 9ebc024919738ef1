"""Which depthwise convolutions kernels/large_depthwise.cu suits, and what its blocks and threads compute of them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import islice, product

from caffepy.backend.cuda.compiler import MULTIPROCESSORS
from caffepy.backend.cuda.convolution.own_kernels.correlation import Axis, axis_of
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.indexing import MAX_INDEX
from caffepy.backend.layout import round_up

MIN_AREA, MIN_STRIDE = 49, 5
"""Weights of a window, or a stride, below which kernels/depthwise.cu is ahead."""

MAX_TAPS = 8
"""Factors of a row that a thread has in registers, as in the kernels' text."""

MAX_BYTES = 96 * 1024
"""Of shared memory: two blocks fit into a multiprocessor."""

MAX_THREADS, WARPS = 512, 12
"""Threads of a block; warps with which a multiprocessor computes as fast as it can."""

MAX_COLUMNS = 64
"""Columns of dy that a block has at once."""

SPLITS, MIN_ROWS = (2, 4, 8), 4
"""Threads that share a result, and rows of factors that each must have."""

MAX_TILINGS = 3
"""Those that are tried."""

MAX_FACTORS = 4
"""Parts of dy that are compared, the largest that fit."""

SHARED_BY_BLOCKS, MAX_WARPS = 220 * 1024, 16
"""Shared memory of a multiprocessor, and warps that it has registers for: each of its four parts has 128 for four."""


@dataclass(frozen=True)
class Tiling:
    """What a block and a thread compute.

    Args:
        channels: of a block, a power of two up to 32.
        run: columns of a thread.
        rows: of a thread.
        runs: threads across.
        groups: threads down.
        factors: rows and columns of factors at once.
        shares: blocks that share the phases down.
        split: threads that share the rows of factors of a result.
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
        """Unique among those of a task."""
        thread, factors = f"{self.channels}x{self.rows}x{self.run}", "x".join(map(str, self.factors))
        return f"large depthwise {thread} by {self.groups}x{self.runs}, {factors} in {self.shares} by {self.split}"

    @property
    def threads(self) -> int:
        return self.channels * self.runs * self.groups * self.split


@dataclass(frozen=True)
class Correlation:
    """A task as the kernels see it."""

    task: Task
    down: Axis
    across: Axis

    @cached_property
    def numbers_of_taps(self) -> Counter[tuple[int, int]]:
        """How many phases have so many rows and columns of factors."""
        return Counter((down.taps, across.taps) for down, across in product(self.down.phases, self.across.phases))

    def source(self, tiling: Tiling) -> tuple[int, int]:
        """Rows and columns of the source that a block has in shared memory."""
        height, width = tiling.groups * tiling.rows, tiling.runs * tiling.run
        if self.task.direction is Direction.WEIGHTS:
            return self.down.pixels(height, tiling.factors[0]), self.across.pixels(width, tiling.factors[1])
        return self.down.pixels(height), self.across.pixels(width)

    def extra(self, tiling: Tiling) -> int:
        """Pixels of shared memory left free behind those of a thread: with an odd distance no banks collide."""
        return int(self.across.a > 1 and tiling.run * self.across.a % 2 == 0)

    def pixels(self, tiling: Tiling) -> int:
        """Of shared memory from a row of the source to the next."""
        width = self.source(tiling)[1]
        return width + (width - 1) // (tiling.run * self.across.a) * self.extra(tiling)

    def shared_bytes(self, tiling: Tiling) -> int:
        """The source and the factors."""
        source = round_up(self.source(tiling)[0] * self.pixels(tiling) * tiling.channels, 4)
        sums = tiling.threads * tiling.rows * tiling.run if tiling.split > 1 else 0
        return 4 * max(source + math.prod(tiling.factors) * tiling.channels, sums)

    def tiles(self, tiling: Tiling) -> tuple[int, int]:
        """Of a plane of results."""
        height, width = tiling.groups * tiling.rows, tiling.runs * tiling.run
        return -(-self.down.results // height), -(-self.across.results // width)

    def packs(self, tiling: Tiling) -> int:
        """Of channels."""
        return -(-self.task.problem.x[1] // tiling.channels)

    def pieces(self, tiling: Tiling) -> tuple[int, int]:
        """Of a plane of factors."""
        return -(-self.down.factors // tiling.factors[0]), -(-self.across.factors // tiling.factors[1])

    def resident(self, tiling: Tiling) -> int:
        """Blocks that a multiprocessor has at once."""
        most = SHARED_BY_BLOCKS // (self.shared_bytes(tiling) + 1024)
        return max(1, min(most, MAX_WARPS // -(-tiling.threads // 32)))

    def parts(self, tiling: Tiling) -> int:
        """Sums of gradients to weights that are added up at the end."""
        blocks = math.prod(self.tiles(tiling)) * self.packs(tiling)
        pieces = self.task.problem.x[0] * math.prod(self.pieces(tiling))
        return max(1, min(pieces, MULTIPROCESSORS * self.resident(tiling) // blocks))


@lru_cache(maxsize=256)
def correlation_of(task: Task) -> Correlation:
    down, across = (axis_of(task.problem, task.direction, number) for number in range(2))
    return Correlation(task, down, across)


def suits_large_depthwise(task: Task) -> bool:
    """Whether the kernels can do a task and may be ahead with it."""
    problem, g = task.problem, task.problem.geometry
    if len(problem.x) != 4 or not g.group == problem.x[1] == problem.weights[0] or task.sums or task.residual:
        return False
    if math.prod(g.kernel) < MIN_AREA and max(g.stride) < MIN_STRIDE or math.prod(g.kernel) == 1:
        return False
    return 0 not in problem.x + problem.y and max(math.prod(problem.x), math.prod(problem.y)) <= MAX_INDEX


@lru_cache(maxsize=256)
def large_depthwise_tilings(task: Task) -> tuple[Tiling, ...]:
    """For each number of channels the one that is likely the fastest, the likely fastest first."""
    correlation = correlation_of(task)
    best: dict[int, tuple[float, Tiling]] = {}
    for tiling in _possible(correlation):
        cycles = cycles_of(correlation, tiling)
        if tiling.channels not in best or cycles < best[tiling.channels][0]:
            best[tiling.channels] = cycles, tiling
    return tuple(tiling for _, tiling in sorted(best.values(), key=lambda pair: pair[0])[:MAX_TILINGS])


def _possible(correlation: Correlation) -> Iterator[Tiling]:
    """Those that fit a multiprocessor."""
    down, across, factors = correlation.down, correlation.across, _factors(correlation)
    # Odd runs: threads that lie side by side read different banks.
    shapes = product(
        (1, 2, 4, 8, 16, 32), (7, 5, 3, 1) if across.a == 1 else (7, 4, 2, 1), (4, 2, 1) if down.a == 1 else (1,)
    )
    for channels, run, rows in shapes:
        if channels >= 2 * correlation.task.problem.x[1]:
            continue
        every_run = _threads(across.results, run, across.b if across.a == 1 and run > 1 else 1)
        every_group = _threads(down.results, rows, down.b if down.a == 1 and rows > 1 else 1)
        shares = [number for number in (1, 2, 4, 8, 16, 32) if number <= len(down.phases)]
        for runs, groups in product(every_run, every_group):
            if channels * runs * groups <= MAX_THREADS:
                first = Tiling(channels, run, rows, runs, groups, factors[0])
                fitting = (
                    each for each in factors if correlation.shared_bytes(replace(first, factors=each)) <= MAX_BYTES
                )
                for each, shared in product(islice(fitting, MAX_FACTORS), shares):
                    yield replace(first, factors=each, shares=shared)
                if correlation.task.direction is not Direction.WEIGHTS and len(down.phases) == len(across.phases) == 1:
                    yield from _split(correlation, first)


def _split(correlation: Correlation, tiling: Tiling) -> Iterator[Tiling]:
    """The same with several threads for each result."""
    for split in SPLITS:
        several = replace(tiling, split=split)
        possible = split * MIN_ROWS <= tiling.factors[0] and several.threads <= MAX_THREADS
        if possible and correlation.shared_bytes(several) <= MAX_BYTES:
            yield several


def _threads(results: int, each: int, multiple: int) -> list[int]:
    """Numbers of threads along an axis with which several tiles, or one, cover the results."""
    numbers = (math.ceil(math.ceil(results / tiles) / each) for tiles in (1, 2, 3, 4, 8, 16))
    return list(dict.fromkeys(round_up(number, multiple) for number in numbers))


def _factors(correlation: Correlation) -> list[tuple[int, int]]:
    """Rows and columns of factors at once: of dy parts, of a window all."""
    height, width = correlation.down.factors, correlation.across.factors
    if correlation.task.direction is not Direction.WEIGHTS:
        return [(height, width)]
    rows = [-(-height // parts) for parts in (1, 2, 3, 4, 6, 8, 12, height)]
    # With a stride few pixels of dy need many of x.
    most = {-(-width // MAX_COLUMNS) * parts for parts in ((1, 2, 4) if correlation.across.b > 1 else (1,))}
    columns = [-(-width // min(parts, width)) for parts in sorted(most)]
    return sorted(set(product(rows, columns)), key=lambda part: (-math.prod(part), part))


def cycles_of(correlation: Correlation, tiling: Tiling) -> float:
    """Roughly the cycles of a multiprocessor, to compare tilings by."""
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
    """Until a block's arrays are there."""
    weights = correlation.task.direction is Direction.WEIGHTS
    numbers = math.prod(correlation.source(tiling)) + math.prod(tiling.factors) * (1 if weights else tiling.channels)
    return START + LOAD * (numbers / (8 * tiling.threads))


def _loads(correlation: Correlation, tiling: Tiling) -> float:
    """Of a block's arrays: memory gives 32 bytes at once, whether or not all are used."""
    item = 4 if correlation.task.problem.dtype == "float32" else 2
    together = max(1.0, tiling.channels * item / 32) + tiling.channels / 16
    planes = [correlation.source(tiling)]
    if correlation.task.direction is Direction.WEIGHTS:
        return together * sum(map(math.prod, (*planes, tiling.factors)))
    return together * math.prod(planes[0]) + math.prod(tiling.factors) * tiling.channels / 8


START, LOAD = 2500, 700
"""Cycles of a block's beginning and end, and of eight loads of a thread."""


def _cycles_of_warp(correlation: Correlation, tiling: Tiling, down: int, across: int) -> tuple[float, float]:
    """Of so many taps of a thread's results: of the multiprocessor, and until a warp that is alone is done.

    Either arithmetic limits the first or loads from shared memory do.
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
"""Cycles of a store that does not fill the 32 bytes which memory has together; of one that does one."""


def _stores(correlation: Correlation, tiling: Tiling) -> float:
    """Of a warp's results: neighbouring channels are written together."""
    problem = correlation.task.problem
    item, channels = 4 if problem.dtype == "float32" else 2, min(tiling.channels, problem.x[1])
    together = channels * item / 32
    whole = together == int(together) and problem.x[1] * item % 32 == 0
    cycles = together if whole else max(0.0, together - 1) + PARTIAL * min(2.0, together + 1)
    return tiling.rows * tiling.run * (2 + 32 / tiling.channels * cycles)
