"""Weight gradients over few pixels, in half precision, by own kernels (kernels/small_k_wgrad.cu).

Such a gradient has more results than its factors have elements, and is float32. A cuDNN plan writes halves, which a
second kernel would convert. Here each block computes complete sums and writes them once.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import defines, divider, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, is_whole_image
from caffepy.backend.cuda.device import has_tensor_cores
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import CHANNELS_LAST
from caffepy.backend.types import Geometry

MAX_PIXELS = 256
"""Maximum pixels of all images; up to here one block per sum suffices."""

MIN_RESULTS = 2**17
"""Minimum weights; below, there are too few blocks."""

UNIT = 8
"""Channels and outputs must be multiples of a load's halves."""

TILES = ((128, 128), (64, 128), (64, 64))
"""Outputs and window elements per block, the largest first, which reads the least."""

THREADS = 256

TYPES = {"float16": ("float16", "f16"), "bfloat16": ("bfloat16", "bf16")}
"""dtype names in kernels/common.cu and in PTX."""


def suits_small_k_wgrad(task: Task) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem = task.problem
    if task != Task(problem, Direction.WEIGHTS) or problem.dtype not in TYPES or len(problem.x) not in CHANNELS_LAST:
        return False
    if problem.geometry.group != 1 or problem.x[1] % UNIT or problem.weights[0] % UNIT:
        return False
    if pixels_of(problem) > MAX_PIXELS or math.prod(problem.weights) < MIN_RESULTS:
        return False
    if max(math.prod(problem.x), math.prod(problem.weights)) > MAX_INDEX:
        return False
    return has_tensor_cores()


def pixels_of(problem: Problem) -> int:
    """Return the length of each sum."""
    return problem.y[0] * math.prod(problem.y[2:])


def small_k_wgrad_candidates(task: Task) -> list[SmallKWgrad]:
    """Return one candidate per tile."""
    return [SmallKWgrad(task, tile) for tile in TILES]


class SmallKWgrad:
    """A candidate: one tile.

    Args:
        task: one that `suits_small_k_wgrad`.
        tile: outputs and window elements per block.
    """

    def __init__(self, task: Task, tile: tuple[int, int]) -> None:
        problem = task.problem
        self.name = f"wgrad small-k {tile[0]}x{tile[1]}"
        self._tile = tile
        self._dtype = problem.dtype
        outputs, columns = problem.weights[0], math.prod(problem.weights[1:])
        self._grid = (-(-columns // tile[1]), -(-outputs // tile[0]))
        self._sizes = (outputs, columns, pixels_of(problem))
        self._geometry = _arguments(problem)
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile; the text does not depend on the problem."""
        element, name = TYPES[self._dtype]
        text = defines(Element=element, MMA_TYPE=f'"{name}"', TILE_M=self._tile[0], TILE_N=self._tile[1])
        self._kernel = library_kernel("small_k_wgrad", "small_k_wgrad", text)
        return True

    def run(self, operands: Operands) -> None:
        """One launch."""
        arrays = (raw(operands.first), raw(operands.second), raw(operands.out))
        arguments = (*arrays, *self._sizes, operands.accumulate, *self._geometry)
        launch_blocks(self._kernel, self._grid, (THREADS,), arguments)


def _arguments(problem: Problem) -> tuple[Any, ...]:
    """Return the geometry as kernel arguments over three axes; a whole image is one pixel."""
    if is_whole_image(problem):
        channels = math.prod(problem.x[1:])
        pixel = Geometry((1, 1), (1, 1), (0, 0), (1, 1))
        problem = Problem((problem.x[0], channels, 1, 1), (problem.weights[0], channels, 1, 1), pixel)
    g, channels, more = problem.geometry, problem.x[1], 5 - len(problem.x)
    ones, zeros = (1,) * more, (0,) * more
    divided_sizes = (*(*ones, *g.kernel)[1:], *ones, *problem.y[2:])
    divided = [value for size in divided_sizes for value in (np.int32(size), divider(size))]
    moves = (*ones, *g.stride, *zeros, *g.pad, *ones, *g.dilation)
    return (channels, divider(channels), *divided, *ones, *problem.x[2:], *moves)
