"""Data gradients of large windows over one to four channels, by own kernels (kernels/large_windows.cu).

Tensor cores compute at least eight channels, so most of their work would be wasted. cuDNN's plans take as long for one
channel as for many. These kernels multiply in full float32.
"""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.cuda.compiler import RESIDENT_BLOCKS, defines, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.gradients import CUDNN_SLOW_WINDOW
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import round_up

MAX_CHANNELS = 4
"""Maximum channels; above, tensor cores are faster."""

MAX_MULTIPLICATIONS = 2**35
"""Maximum multiplications, about a millisecond."""

RUN, ROWS, TILE_W, SPLIT = 8, 8, 64, 4
"""Pixels per thread, rows and columns per block, threads that share a pixel, as in the kernels' text."""

THREADS = 256

MAX_FLOATS = 12288
"""Floats of shared memory that a block may use without opting in."""

MAX_IMAGES = 65535
"""Maximum blocks of a grid along its second axis."""


def suits_large_windows(task: Task) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem, g = task.problem, task.problem.geometry
    if task.direction is not Direction.DATA or len(problem.x) != 4 or problem.dtype != "float32" or g.group != 1:
        return False
    if g.stride != (1, 1) or g.dilation != (1, 1) or math.prod(g.kernel) < CUDNN_SLOW_WINDOW:
        return False
    if problem.x[1] > MAX_CHANNELS or problem.x[0] * problem.x[1] > MAX_IMAGES:
        return False
    if math.prod(problem.x) * problem.weights[0] * math.prod(g.kernel) > MAX_MULTIPLICATIONS:
        return False
    return max(math.prod(problem.x), math.prod(problem.y)) <= MAX_INDEX and shared_floats(problem) <= MAX_FLOATS


def pitch_of(problem: Problem) -> int:
    """Return the row pitch of dy in shared memory."""
    return round_up(TILE_W - RUN + round_up(problem.geometry.kernel[1] + RUN - 1, 4) + 4, 8) - 4


def shared_floats(problem: Problem) -> int:
    """Return the floats in shared memory: the window and rows of dy, later reused for the threads' sums."""
    height, width = problem.geometry.kernel
    source = (ROWS + height - 1) * pitch_of(problem)
    return max(source, SPLIT * ROWS * TILE_W) + height * round_up(width, 4)


class LargeWindows:
    """The candidate.

    Args:
        task: one that `suits_large_windows`.
        resources: scratch memory.
    """

    name = "large windows"

    def __init__(self, task: Task, resources: Resources) -> None:
        self._problem = task.problem
        self._resources = resources
        n, channels, height, width = task.problem.x
        self._tiles = (-(-height // ROWS), -(-width // TILE_W))
        blocks = math.prod(self._tiles) * n * channels
        self._parts = max(1, min(task.problem.weights[0], RESIDENT_BLOCKS // blocks))
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile."""
        problem = self._problem
        height, width = problem.geometry.kernel
        text = defines(
            OUTPUTS=problem.weights[0], CHANNELS=problem.x[1], KERNEL_H=height, KERNEL_W=width, PITCH=pitch_of(problem)
        )
        self._kernel = library_kernel("large_windows", "large_windows", text)
        return True

    def run(self, operands: Operands) -> None:
        """Launch the kernel, and for few images one that adds partial sums over the outputs."""
        problem, out = self._problem, raw(operands.out)
        n, channels, height, width = problem.x
        sums = out
        if self._parts > 1:
            sums = self._resources.scratch.get("parts of a data gradient", self._parts * operands.out.size)
        grid = (math.prod(self._tiles), n * channels, self._parts)
        sizes = (n, height, width, *problem.y[2:], *problem.geometry.pad, self._tiles[1])
        launch_blocks(self._kernel, grid, (THREADS,), (raw(operands.first), raw(operands.second), sums, *sizes))
        if self._parts > 1:
            sum_parts(sums, out, self._parts, False)
