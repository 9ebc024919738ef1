"""Data gradients of one to four channels, for any window and stride, by own kernels (kernels/few_channels.cu).

Tensor cores compute at least eight channels, so most of their work would be wasted. These kernels multiply in full
float32; the lanes of a warp split the sum over outputs.
"""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.cuda.compiler import C_TYPES, defines, launch, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources
from caffepy.backend.cuda.convolution.correlation import axis_of, residues_text
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import CHANNELS_LAST

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
            STORED=C_TYPES[cupy.dtype(problem.array_dtype).char], CHANNELS=problem.x[1], OUTPUTS=problem.weights[0],
            RUN=RUN, RESIDUES=residues_text(across), TAPS=across.taps, STEP=-across.step, DISTANCE=across.b,
            **_window(problem),
        )  # fmt: skip
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
