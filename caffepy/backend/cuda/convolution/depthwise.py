"""Depthwise convolutions, each channel with a window of its own, by own kernels: kernels/depthwise.cu and
kernels/depthwise_gradients.cu.

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
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import Array, NormalisedBottom

THREADS = 256
CHANNELS = 128
"""The most channels of a block, which has a thread for the sum of each."""

BLOCKS = 4
"""Blocks for each multiprocessor; more would only load weights again."""

NOTHING = np.uint64(0)
"""A pointer that is not used."""

TILES = ("depthwise_tiles",)
"""Files that the kernels' texts begin with."""


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

    rectified: bool | None = None
    """Of a bottom that is normalised while it is loaded, whether it is rectified as well."""

    def __init__(self, task: Task, tile: Tile, resources: Resources) -> None:
        self.name = tile.name
        self.tile = tile
        self._task = task
        self._resources = resources
        self._kernel: Any = None
        self._blocks = BLOCKS
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
        packs = channels // self.tile.channels
        self._across = -(-packs * self.tile.channels // CHANNELS)
        side = -(-packs // self._across)
        self._block = (side, THREADS // side)
        rows, columns = -(-height // self.tile.rows), -(-width // self.tile.columns)
        self._tiles = images * rows * columns
        self._arguments = (
            height, width, *self._source[2:], packs, self._tiles, rows, divider(rows), columns, divider(columns),
        )  # fmt: skip

    def prepare(self) -> bool:
        """Compile."""
        name = "depthwise_weights" if self._task.direction is Direction.WEIGHTS else "depthwise"
        self._kernel = library_kernel("depthwise", name, self._settings(), TILES)
        return True

    def _settings(self) -> str:
        """What the kernels' text needs before it."""
        task, g = self._task, self._task.problem.geometry
        pairs = zip(("KERNEL", "STRIDE", "PAD", "DILATION"), (g.kernel, g.stride, g.pad, g.dilation), strict=True)
        geometry = {f"{name}_{axis}": n for name, pair in pairs for axis, n in zip("HW", pair, strict=True)}
        return defines(
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char], WIDTH=self.tile.channels,
            TILE_H=self.tile.rows, TILE_W=self.tile.columns, DATA=int(task.direction is Direction.DATA),
            BIAS=int(task.bias), RELU=int(task.relu), SUMS=int(task.sums), THREADS=THREADS, CHANNELS=CHANNELS,
            NORMALISED=int(self.rectified is not None), RECTIFIED=int(bool(self.rectified)), **geometry,
        )  # fmt: skip

    def run(self, operands: Operands) -> None:
        """One launch, and one more that adds up the blocks' parts of a weight gradient or of sums."""
        number = self._down()
        if self._task.direction is Direction.WEIGHTS:
            parts = self._parts(number, operands.out)
            self._launch(number, raw(operands.first), raw(operands.second), parts)
            sum_parts(parts, raw(operands.out), number, operands.accumulate)
            return
        self._convolve(number, operands, (NOTHING,) * 4)

    def _convolve(self, number: int, operands: Operands, per_channel: tuple[Any, ...]) -> None:
        """Results that are no gradient to weights; `per_channel`: what the bottom is normalised with."""
        bias = NOTHING if operands.bias is None else raw(operands.bias)
        parts = NOTHING if operands.sums is None else self._parts(number, operands.sums)
        arrays = (raw(operands.first), raw(operands.second), bias, *per_channel, raw(operands.out), parts)
        self._launch(number, *arrays)
        if operands.sums is not None:
            sum_parts(parts, raw(operands.sums), number, False)

    def _down(self) -> int:
        """Blocks that take turns at the tiles of a pack of channels."""
        most = self._blocks * _multiprocessors(cupy.cuda.runtime.getDevice()) // self._across
        return max(1, min(-(-self._tiles // self._block[1]), most))

    def _parts(self, number: int, of: Array) -> Array:
        return self._resources.scratch.get("parts of sums", number * of.size)

    def _launch(self, number: int, *arrays: Any) -> None:
        launch_blocks(self._kernel, (self._across, number), self._block, (*arrays, *self._arguments))


class DepthwiseNormalised(DepthwiseConvolution):
    """A forward pass that normalises its bottom while it loads it.

    Args:
        task: the convolution's forward pass.
        rectified: whether the bottom is rectified.
        tile: of the top, that a thread computes.
        resources: scratch memory.
    """

    def __init__(self, task: Task, rectified: bool, tile: Tile, resources: Resources) -> None:
        super().__init__(task, tile, resources)
        self.rectified = rectified
        self.prepare()

    def run_normalised(self, bottom: NormalisedBottom, operands: Operands) -> None:
        """One launch, and one more that adds up the blocks' sums; `operands.first` is what is normalised."""
        n = bottom.n
        self._convolve(self._down(), operands, tuple(map(raw, (n.mean, n.inverse, n.scale, n.bias))))


class DepthwiseGradients(DepthwiseConvolution):
    """Both gradients and the sums for the batch normalisation before, which is computed anew, in one pass.

    Args:
        problem: the convolution.
        relu: whether its bottom is rectified.
        tile: of the bottom, that a thread computes.
        resident: blocks of a multiprocessor at a time, whose registers must do.
        resources: scratch memory.
    """

    def __init__(self, problem: Problem, relu: bool, tile: Tile, resident: int, resources: Resources) -> None:
        super().__init__(Task(problem, Direction.DATA, relu=relu), tile, resources)
        self._finish: Any = None
        self._resident = resident
        self._blocks = 2 * resident
        self.prepare()

    def prepare(self) -> bool:
        text, parts = defines(RESIDENT=self._resident) + self._settings(), ("split_k", *TILES)
        self._kernel = library_kernel("depthwise_gradients", "depthwise_gradients", text, parts)
        self._finish = library_kernel("depthwise_gradients", "finish_gradients", text, parts)
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
