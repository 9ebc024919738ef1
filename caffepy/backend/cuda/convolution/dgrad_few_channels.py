"""Data gradients of one to four channels by own kernels, for any window and stride, and for large windows.

Tensor cores compute at least eight channels, so most of their work would be wasted. These kernels multiply in full
float32. In kernels/few_channels.cu the lanes of a warp split the sum over outputs. kernels/large_windows.cu is for
large windows, for which cuDNN's plans take as long with one channel as with many.
"""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.cuda.compiler import (
    C_TYPES,
    MAX_GRID,
    RESIDENT_BLOCKS,
    defines,
    launch,
    launch_blocks,
    library_kernel,
)
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, axis_of, residues_text
from caffepy.backend.cuda.convolution.rewritten import CUDNN_SLOW_WINDOW
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.types import CHANNELS_LAST, round_up

# -- any window and stride -----------------------------------------------------------------------------

MAX_CHANNELS, MIN_OUTPUTS = 4, 16
"""Maximum channels (above, tensor cores are faster) and minimum outputs (below, most lanes are idle)."""

MAX_MULTIPLICATIONS = 2**35
"""Maximum multiplications, about a millisecond."""

RUN, THREADS, LANES = 8, 256, 32
"""Results of a row per warp; threads per block and per warp, as in the kernels' text."""


def suits_few_channels(task: Task) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem, g = task.problem, task.problem.geometry
    if task.direction is not Direction.DATA or len(problem.x) not in CHANNELS_LAST or g.group != 1:
        return False
    if problem.x[1] > MAX_CHANNELS or problem.weights[0] < MIN_OUTPUTS or math.prod(g.kernel) == 1:
        return False
    if 0 in problem.x or 0 in problem.y or problem.multiplications > MAX_MULTIPLICATIONS:
        return False
    return max(math.prod(problem.x), math.prod(problem.y), LANES * warps_of(problem)) <= MAX_INDEX


def runs_of(problem: Problem) -> int:
    """Return the warps per residue of a row."""
    return -(-axis_of(problem, Direction.DATA, len(problem.x) - 3).results // RUN)


def warps_of(problem: Problem) -> int:
    """Return the warps for all results."""
    return problem.x[0] * math.prod(problem.x[2:-1]) * problem.geometry.stride[-1] * runs_of(problem)


class FewChannels:
    """The candidate.

    Args:
        task: one that `suits_few_channels`.
        resources: scratch memory.
    """

    name = "few channels"

    def __init__(self, task: Task, resources: Resources) -> None:
        self._problem = task.problem
        self._resources = resources
        self._warps = warps_of(task.problem)
        self._transpose_kernel: Any = None
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile."""
        problem, across = self._problem, axis_of(self._problem, Direction.DATA, len(self._problem.x) - 3)
        text = defines(
            STORED=C_TYPES[cupy.dtype(problem.array_dtype).char],
            CHANNELS=problem.x[1],
            OUTPUTS=problem.weights[0],
            RUN=RUN,
            RESIDUES=residues_text(across),
            TAPS=across.taps,
            STEP=-across.step,
            DISTANCE=across.b,
            **_window(problem),
        )
        self._transpose_kernel = library_kernel("few_channels", "turn_weights", text)
        self._kernel = library_kernel("few_channels", "few_channels", text)
        return True

    def run(self, operands: Operands) -> None:
        """Launch the weight transposition, then the kernel."""
        problem = self._problem
        turned = self._resources.scratch.get("turned weights", operands.second.size)
        launch(self._transpose_kernel, operands.second.size, (raw(operands.second), turned))
        more = (1,) * (5 - len(problem.x))
        across = axis_of(problem, Direction.DATA, len(problem.x) - 3)
        sizes = (*more, *problem.x[2:], *more, *problem.y[2:], across.origin, runs_of(problem))
        arrays = (raw(operands.first), turned, raw(operands.out))
        grid = (-(-self._warps * LANES // THREADS),)
        launch_blocks(self._kernel, grid, (THREADS,), (*arrays, self._warps, *sizes))


def _window(problem: Problem) -> dict[str, int]:
    """Return the window's constants over three axes; residues describe the row axis."""
    g, more = problem.geometry, 5 - len(problem.x)
    rows = {"STRIDE": (g.stride, 1), "PAD": (g.pad, 0), "DILATION": (g.dilation, 1)}
    settings = {
        f"{name}_{axis}": size
        for name, (sizes, missing) in rows.items()
        for axis, size in zip("DH", ((missing,) * more + sizes)[:2], strict=True)
    }
    kernel = zip("DHW", (1,) * more + g.kernel, strict=True)
    return {**settings, **{f"KERNEL_{axis}": size for axis, size in kernel}}


# -- large windows -------------------------------------------------------------------------------------

ROWS, TILE_W, SPLIT = 8, 64, 4
"""Rows and columns per block, threads that share a pixel, as in the kernels' text."""

MAX_FLOATS = 12288
"""Floats of shared memory that a block may use without opting in."""


def suits_large_windows(task: Task) -> bool:
    """Return whether the kernels support a task and may be the fastest."""
    problem, g = task.problem, task.problem.geometry
    if task.direction is not Direction.DATA or len(problem.x) != 4 or problem.dtype != "float32" or g.group != 1:
        return False
    if g.stride != (1, 1) or g.dilation != (1, 1) or math.prod(g.kernel) < CUDNN_SLOW_WINDOW:
        return False
    if problem.x[1] > MAX_CHANNELS or problem.x[0] * problem.x[1] > MAX_GRID:
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
        # Few images have few tiles: the sum over outputs is divided too, until the device is full.
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
