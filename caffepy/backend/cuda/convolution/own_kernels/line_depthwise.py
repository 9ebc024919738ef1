"""Depthwise convolutions over one axis, and their gradients to data, by own kernels (kernels/line_depthwise.cu).

They take what moving the arrays takes. cuDNN has one plan that does, which it compiles at run time.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, defines, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.indexing import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import round_up

MAX_WEIGHTS = 32
"""Of a window: a thread has them in registers."""

THREADS, MAX_RESULTS = 128, 1024
"""Threads of a block, as in the kernels' text, and its results at most."""

MAX_FLOATS = 12288
"""Of shared memory that a block may have without being granted it."""

NOTHING = np.uint64(0)
"""A pointer that is not used."""


def suits_line_depthwise(task: Task) -> bool:
    """Whether the kernels can do a task."""
    problem, g = task.problem, task.problem.geometry
    if len(problem.x) != 3 or not g.group == problem.x[1] == problem.weights[0]:
        return False
    if task.direction is Direction.WEIGHTS or task.sums or task.residual or g.kernel[0] > MAX_WEIGHTS:
        return False
    if task.direction is Direction.DATA and g.stride != (1,):
        return False
    return max(math.prod(problem.x), math.prod(problem.y)) <= MAX_INDEX and _span(task) <= MAX_FLOATS


def _chunk(task: Task) -> int:
    """Results of a block."""
    return min(MAX_RESULTS, round_up(task.problem.arrays(task.direction)[2][2], THREADS))


def _span(task: Task) -> int:
    """Numbers that a block's results need."""
    g = task.problem.geometry
    return (_chunk(task) - 1) * g.stride[0] + (g.kernel[0] - 1) * g.dilation[0] + 1


def padding(problem: Problem, direction: Direction) -> int:
    """Zeros before the source: a gradient to data is a convolution of dy with the weights turned round."""
    g = problem.geometry
    return g.pad[0] if direction is Direction.FORWARD else (g.kernel[0] - 1) * g.dilation[0] - g.pad[0]


class LineDepthwise:
    """The candidate.

    Args:
        task: one that `suits_line_depthwise`.
    """

    name = "depthwise line"

    def __init__(self, task: Task) -> None:
        self._task = task
        source, _, result = task.problem.arrays(task.direction)
        chunks = -(-result[2] // _chunk(task))
        self._grid = (result[0] * result[1] * chunks,)
        self._sizes = (result[1], source[2], result[2], chunks)
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile."""
        task, g = self._task, self._task.problem.geometry
        text = defines(
            Element=C_TYPES[cupy.dtype(task.problem.array_dtype).char], KERNEL=g.kernel[0], STRIDE=g.stride[0],
            PAD=padding(task.problem, task.direction), DILATION=g.dilation[0], CHUNK=_chunk(task),
            FLIPPED=int(task.direction is Direction.DATA), BIAS=int(task.bias), RELU=int(task.relu),
        )  # fmt: skip
        self._kernel = library_kernel("line_depthwise", "line_depthwise", text)
        return True

    def run(self, operands: Operands) -> None:
        """One launch."""
        bias = NOTHING if operands.bias is None else raw(operands.bias)
        arrays = (raw(operands.first), raw(operands.second), bias, raw(operands.out))
        launch_blocks(self._kernel, self._grid, (THREADS,), (*arrays, *self._sizes))
