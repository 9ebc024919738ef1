"""Weights' gradients over one axis, in groups of few channels, by own kernels (kernels/line_weights.cu).

Blobs over one axis lie with the channels first, for which cuDNN has few engines, and fewer still for groups. Here each
block reads its part of x and dy once.
"""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.cuda.compiler import C_TYPES, RESIDENT_BLOCKS, TF32_PRODUCTS, argument, defines, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.device import cupy, has_tensor_cores
from caffepy.backend.cuda.indexing import MAX_INDEX
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import round_up

CHUNK, THREADS = 128, 256
"""Pixels that a block takes at once, and its threads: as in the kernels' text."""

MAX_OUTPUTS = 64
"""Of a group: a warp has the sums of all of them in registers."""

MAX_TILES = 24
"""Tiles of 16 x 8 sums that a warp has registers for."""

MAX_DEPTH = 512
"""Elements of a window in a group, beyond which cuDNN is ahead."""

MAX_WORDS = 24 * 1024
"""Of shared memory: two blocks fit into a multiprocessor."""


def suits_line_weights(task: Task, resources: Resources) -> bool:
    """Whether the kernels can do a task and may be ahead with it."""
    problem, group = task.problem, task.problem.geometry.group
    if task.direction is not Direction.WEIGHTS or len(problem.x) != 3:
        return False
    if problem.dtype == "float32" and not resources.tf32:
        return False
    depth = math.prod(problem.weights[1:])
    if problem.weights[1] == 1 or problem.weights[0] // group > MAX_OUTPUTS or depth > MAX_DEPTH:
        return False
    if max(math.prod(problem.x), math.prod(problem.y)) > MAX_INDEX or words_of(problem) > MAX_WORDS:
        return False
    return has_tensor_cores()


def patch_pitch(problem: Problem) -> int:
    """Distance of two channels in shared memory: their pixels lie in different banks."""
    g = problem.geometry
    return round_up((CHUNK - 1) * g.stride[0] + (g.kernel[0] - 1) * g.dilation[0] + 1, 32) + 16


def together(problem: Problem) -> int:
    """Elements of a load: no line of x or dy may end within one."""
    return math.gcd(problem.x[2], problem.y[2], 4)


def tiles_of(problem: Problem) -> tuple[int, int]:
    """Tiles of outputs, and of elements of a window that a block takes."""
    outputs = -(-problem.weights[0] // (16 * problem.geometry.group))
    elements = -(-math.prod(problem.weights[1:]) // 8)
    blocks = -(-elements * outputs // MAX_TILES)
    return outputs, -(-elements // blocks)


def words_of(problem: Problem) -> int:
    """Words of shared memory: x and dy, later the sums."""
    outputs, elements = tiles_of(problem)
    arrays = problem.weights[1] * patch_pitch(problem) + outputs * 16 * (CHUNK + 4)
    return max(arrays, outputs * elements * 128)


class LineWeights:
    """The candidate.

    Args:
        task: one that `suits_line_weights`.
        resources: scratch memory.
    """

    name = "lines"

    def __init__(self, task: Task, resources: Resources) -> None:
        self._problem = problem = task.problem
        self._resources = resources
        self._words = words_of(problem)
        tiles = -(-math.prod(problem.weights[1:]) // (8 * tiles_of(problem)[1]))
        pieces, group = problem.x[0] * -(-problem.y[2] // CHUNK), problem.geometry.group
        self._grid = (max(1, min(pieces, RESIDENT_BLOCKS // (group * tiles))), group, tiles)
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile."""
        problem, g = self._problem, self._problem.geometry
        text = defines(
            Element=C_TYPES[cupy.dtype(problem.array_dtype).char], OUTPUTS=problem.weights[0] // g.group,
            CHANNELS=problem.weights[1], KERNEL=g.kernel[0], STRIDE=g.stride[0], PAD=g.pad[0], DILATION=g.dilation[0],
            TILES_N=tiles_of(problem)[1], PATCH_PITCH=patch_pitch(problem), TOGETHER=together(problem),
        )  # fmt: skip
        self._kernel = library_kernel("line_weights", "line_weights", text, TF32_PRODUCTS)
        self._kernel.max_dynamic_shared_size_bytes = 4 * self._words
        return True

    def run(self, operands: Operands) -> None:
        """One launch, and one more that adds up the blocks' parts."""
        problem, parts, out = self._problem, self._grid[0], raw(operands.out)
        direct = parts == 1 and not operands.accumulate
        sums = out
        if not direct:
            sums = self._resources.scratch.get("parts of a weight gradient", parts * operands.out.size)
        arguments = (raw(operands.first), raw(operands.second), sums, problem.x[0], problem.x[2], problem.y[2])
        self._kernel(self._grid, (THREADS,), tuple(map(argument, arguments)), shared_mem=4 * self._words)
        if not direct:
            sum_parts(sums, out, parts, operands.accumulate)
