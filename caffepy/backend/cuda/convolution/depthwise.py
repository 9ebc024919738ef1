"""Depthwise convolutions, each channel with a window of its own, by own kernels: kernels/depthwise.cu, whose threads
compute tiles, and kernels/depthwise_walk.cu, whose threads walk down their columns.

cuDNN's plans for so many groups read the image once for every weight of the window, and its gradients to weights are
slower still.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, defines, divider, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.depthwise_tiling import (
    Tile,
    Walk,
    always_within,
    source_columns,
    strip_rows,
    tiles,
    walk_of,
)
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import Array, NormalisedBottom

THREADS = 256
CHANNELS = 128
"""The most channels of a block of tiles, which has a thread for the sum of each."""

WALK_CHANNELS = 64
"""The most channels of a block that walks: of two a thread, what a warp loads lies together."""

BLOCKS = 4
"""Blocks of tiles for each multiprocessor; more would only load weights again."""

NOTHING = np.uint64(0)
"""A pointer that is not used."""

TILES = ("depthwise_tiles",)
"""Files that the kernels' texts begin with."""


def depthwise_candidates(task: Task, resources: Resources) -> list[DepthwiseConvolution]:
    """One for each tile, and one that walks."""
    walk = None if task.direction is Direction.WEIGHTS else walk_of(task)
    walking = [] if walk is None else [DepthwiseWalk(task, walk, resources)]
    return [*(DepthwiseConvolution(task, tile, resources) for tile in tiles(task)), *walking]


@cache
def _multiprocessors(device: int) -> int:
    return int(cupy.cuda.Device(device).attributes["MultiProcessorCount"])


class DepthwiseConvolution:
    """A candidate: one tile.

    Args:
        task: what to compute.
        tile: the results of a thread.
        resources: scratch memory.
    """

    _threads, _most_channels, _blocks = THREADS, CHANNELS, BLOCKS
    """Threads and channels of a block, blocks of a multiprocessor."""

    def __init__(self, task: Task, tile: Tile, resources: Resources) -> None:
        self.name = tile.name
        self._tile = tile
        self._task = task
        self._resources = resources
        self._kernel: Any = None
        self._result, self._source = self._planes()
        self._lay_out()

    def _planes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Shapes of what tiles divide and of what they are gathered from."""
        problem = self._task.problem
        if self._task.direction is Direction.DATA:
            return problem.x, problem.y
        return problem.y, problem.x

    def _lay_out(self) -> None:
        """The grid: as many packs of channels side by side as the channels divide into evenly."""
        images, channels, height, width = self._result
        packs = channels // self._tile.channels
        self._across = -(-packs * self._tile.channels // self._most_channels)
        side = -(-packs // self._across)
        self._block = (side, self._threads // side)
        columns = -(-width // self._tile.columns)
        down, *own = self._rows_of_threads(images * columns)
        rows = -(-height // down)
        self._tiles = images * rows * columns
        divided = (rows, divider(rows), columns, divider(columns))
        self._arguments = (height, width, *self._source[2:], *own, packs, self._tiles, *divided)

    def _rows_of_threads(self, side_by_side: int) -> tuple[int, ...]:
        """The rows that a thread takes, with further arguments of the kernel; `side_by_side`: tiles of a row."""
        return (self._tile.rows,)

    def prepare(self) -> bool:
        """Compile."""
        name = "depthwise_weights" if self._task.direction is Direction.WEIGHTS else "depthwise"
        self._kernel = library_kernel("depthwise", name, self._settings(), TILES)
        return True

    def _settings(self, **more: int) -> str:
        """What the kernels' text needs before it."""
        task, g = self._task, self._task.problem.geometry
        pairs = zip(("KERNEL", "STRIDE", "PAD", "DILATION"), (g.kernel, g.stride, g.pad, g.dilation), strict=True)
        geometry = {f"{name}_{axis}": n for name, pair in pairs for axis, n in zip("HW", pair, strict=True)}
        return defines(
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char], WIDTH=self._tile.channels,
            TILE_H=self._tile.rows, TILE_W=self._tile.columns, DATA=int(task.direction is Direction.DATA),
            BIAS=int(task.bias), RELU=int(task.relu), SUMS=int(task.sums), THREADS=self._threads,
            CHANNELS=self._most_channels, **geometry, **more,
        )  # fmt: skip

    def run(self, operands: Operands) -> None:
        """One launch, and one more that adds up the blocks' parts of a weight gradient or of sums."""
        if self._task.direction is Direction.WEIGHTS:
            number = self._down()
            parts = self._parts(number, operands.out)
            self._launch(number, raw(operands.first), raw(operands.second), parts)
            sum_parts(parts, raw(operands.out), number, operands.accumulate)
            return
        self._convolve(operands, ())

    def _convolve(self, operands: Operands, per_channel: tuple[Any, ...]) -> None:
        """Results that are no gradient to weights; `per_channel`: further arguments, about the bottom."""
        number = self._down()
        bias = NOTHING if operands.bias is None else raw(operands.bias)
        parts = NOTHING if operands.sums is None else self._parts(number, operands.sums)
        arrays = (raw(operands.first), raw(operands.second), bias, *per_channel, raw(operands.out), parts)
        self._launch(number, *arrays)
        if operands.sums is not None:
            sum_parts(parts, raw(operands.sums), number, False)

    def _down(self) -> int:
        """Blocks that take turns at the tiles of a pack of channels."""
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
        task: what to compute, no gradient to weights.
        walk: how.
        resources: scratch memory.
        rectified: of a bottom that is normalised while it is loaded, whether it is rectified as well; else None.
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
        """Which of a strip's columns lie within the image everywhere."""
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
        """The same of a bottom that is normalised; `operands.first` is what is."""
        n = bottom.n
        self._convolve(operands, tuple(map(raw, (n.mean, n.inverse, n.scale, n.bias))))


class DepthwiseGradients(DepthwiseWalk):
    """Both gradients and the sums for the batch normalisation before, which is computed anew, in one pass.

    Args:
        problem: the convolution.
        relu: whether its bottom is rectified.
        walk: over the bottom.
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
        """One launch, and one more that adds up the blocks' parts.

        Args:
            bottom: of the convolution.
            operands: dy, the weights and dx; whether dweights are added to.
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
