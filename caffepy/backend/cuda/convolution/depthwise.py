"""Depthwise convolutions by own kernels: tiled (kernels/depthwise.cu) and walking (kernels/depthwise_walk.cu), where
threads walk down their columns.

cuDNN's plans for this many groups read the image once per weight of the window; its weight gradients are slower still.
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
        self._kernel = library_kernel("depthwise", name, self._settings(), TILES)
        return True

    def _settings(self, **more: int) -> str:
        """Return constants prepended to the kernels' text."""
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
