"""Depthwise convolutions, each channel with a window of its own, by own kernels: kernels/depthwise.cu.

cuDNN's plans for so many groups read the image once for every weight of the window, and its gradients to weights are
slower still.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, defines, divider, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.depthwise_tiling import Tile, tiles
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import Array

THREADS = 256
CHANNELS = 128
"""The most channels of a block, which has a thread for the sum of each."""

BLOCKS = 4
"""Blocks for each multiprocessor; more would only load weights again."""


def depthwise_candidates(task: Task, resources: Resources) -> list[DepthwiseConvolution]:
    """One for each tile."""
    return [DepthwiseConvolution(task, tile, resources) for tile in tiles(task)]


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

    def __init__(self, task: Task, tile: Tile, resources: Resources) -> None:
        self.name = tile.name
        self._task = task
        self._tile = tile
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
        self._across = -(-packs * self._tile.channels // CHANNELS)
        side = -(-packs // self._across)
        self._block = (side, THREADS // side)
        rows, columns = -(-height // self._tile.rows), -(-width // self._tile.columns)
        self._tiles = images * rows * columns
        self._arguments = (
            height, width, *self._source[2:], packs, self._tiles, rows, divider(rows), columns, divider(columns),
        )  # fmt: skip

    def prepare(self) -> bool:
        """Compile."""
        task, g = self._task, self._task.problem.geometry
        pairs = zip(("KERNEL", "STRIDE", "PAD", "DILATION"), (g.kernel, g.stride, g.pad, g.dilation), strict=True)
        geometry = {f"{name}_{axis}": n for name, pair in pairs for axis, n in zip("HW", pair, strict=True)}
        text = defines(
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char], WIDTH=self._tile.channels,
            TILE_H=self._tile.rows, TILE_W=self._tile.columns, DATA=int(task.direction is Direction.DATA),
            BIAS=int(task.bias), RELU=int(task.relu), SUMS=int(task.sums), THREADS=THREADS, CHANNELS=CHANNELS,
            **geometry,
        )  # fmt: skip
        name = "depthwise_weights" if task.direction is Direction.WEIGHTS else "depthwise"
        self._kernel = library_kernel("depthwise", name, text)
        return True

    def run(self, operands: Operands) -> None:
        """One launch, and one more that adds up the blocks' parts of a weight gradient or of sums."""
        number = self._down()
        if self._task.direction is Direction.WEIGHTS:
            parts = self._parts(number, operands.out)
            self._launch(number, raw(operands.first), raw(operands.second), parts)
            sum_parts(parts, raw(operands.out), number, operands.accumulate)
            return
        nothing = np.uint64(0)
        bias = nothing if operands.bias is None else raw(operands.bias)
        parts = nothing if operands.sums is None else self._parts(number, operands.sums)
        self._launch(number, raw(operands.first), raw(operands.second), bias, raw(operands.out), parts)
        if operands.sums is not None:
            sum_parts(parts, raw(operands.sums), number, False)

    def _down(self) -> int:
        """Blocks that take turns at the tiles of a pack of channels."""
        most = BLOCKS * _multiprocessors(cupy.cuda.runtime.getDevice()) // self._across
        return max(1, min(-(-self._tiles // self._block[1]), most))

    def _parts(self, number: int, of: Array) -> Array:
        return self._resources.scratch.get("parts of sums", number * of.size)

    def _launch(self, number: int, *arrays: Any) -> None:
        launch_blocks(self._kernel, (self._across, number), self._block, (*arrays, *self._arguments))
