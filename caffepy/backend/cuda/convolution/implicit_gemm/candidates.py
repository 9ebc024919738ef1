"""Convolutions of small images by own kernels, where cuDNN's take longer to start than to run.

Owns when a problem is small, and the candidates of the likely fastest tilings.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, TF32_PRODUCTS, argument, defines, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.implicit_gemm.tiling import MIN_WINDOW_BY_ROWS, Layout, shape_of, tilings
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.device import cupy, has_tensor_cores
from caffepy.backend.cuda.memory import raw

MAX_MULTIPLICATIONS = 2**30
"""Beyond so many, cuDNN's kernels are ahead."""

MAX_FOR_LARGE_WINDOWS = 2**34
"""The same for weights' gradients of large windows, where few channels leave cuDNN's tiles mostly empty."""

MAX_CHANNELS = 64
"""Channels and outputs beyond which cuDNN's tensor cores have enough to do at once."""

MAX_CANDIDATES = 2
"""Tilings that are tried, each of which takes half a second to compile."""


def suits_small_kernels(task: Task, resources: Resources) -> bool:
    """Whether the kernels can do a task and may be ahead with it."""
    problem, g = task.problem, task.problem.geometry
    large = task.direction is Direction.WEIGHTS and math.prod(g.kernel) >= MIN_WINDOW_BY_ROWS
    most = MAX_FOR_LARGE_WINDOWS if large else MAX_MULTIPLICATIONS
    if len(problem.x) != 4 or g.group != 1 or task.sums or problem.multiplications > most:
        return False
    if problem.dtype == "float32" and not resources.tf32:
        return False
    if max(problem.x[1], problem.weights[0]) > MAX_CHANNELS or math.prod(g.kernel) == 1:
        return False
    if task.direction is Direction.DATA and g.stride != (1, 1):
        return False
    return has_tensor_cores()


def small_candidates(task: Task, resources: Resources) -> list[SmallConvolution]:
    """The likely fastest tilings of a task."""
    multiprocessors = int(cupy.cuda.Device().attributes["MultiProcessorCount"])
    layouts = tilings(shape_of(task), task.direction is Direction.WEIGHTS, multiprocessors)
    return [SmallConvolution(task, layout, resources) for layout in layouts[:MAX_CANDIDATES]]


class SmallConvolution:
    """A candidate: one tiling.

    Args:
        task: what to compute.
        layout: the tiling with what follows from it.
        resources: scratch memory.
    """

    def __init__(self, task: Task, layout: Layout, resources: Resources) -> None:
        self.name = layout.tiling.name
        self._task = task
        self._layout = layout
        self._resources = resources
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile; False if the GPU has not the shared memory."""
        layout = self._layout
        limit = cupy.cuda.Device().attributes["MaxSharedMemoryPerBlockOptin"]
        if 4 * layout.words > limit:
            return False
        name = "weights" if layout.weights else "gather"
        kind = {} if layout.weights else {"GATHER": 1}
        element = C_TYPES[cupy.dtype(self._task.problem.array_dtype).char]
        text = defines(Element=element, **kind, **layout.constants())
        self._kernel = library_kernel("small_convolution", name, text, TF32_PRODUCTS)
        self._kernel.max_dynamic_shared_size_bytes = 4 * layout.words
        return True

    def run(self, operands: Operands) -> None:
        """One launch, and for weight gradients one more that adds up their parts."""
        if self._layout.weights:
            self._weights(operands)
            return
        bias = operands.bias if self._task.bias else None
        pointer = np.uint64(0) if bias is None else bias
        self._launch(
            raw(operands.first), raw(operands.second), pointer, raw(operands.out), self._layout.shape.images,
            bias is not None, self._task.relu,
        )  # fmt: skip

    def _weights(self, operands: Operands) -> None:
        parts, size = self._layout.grid[0], operands.out.size
        out = raw(operands.out)
        direct = parts == 1 and not operands.accumulate
        sums = out if direct else self._resources.scratch.get("parts of a weight gradient", parts * size)
        self._launch(raw(operands.first), raw(operands.second), sums, self._layout.shape.images, self._layout.pieces)
        if not direct:
            sum_parts(sums, out, parts, operands.accumulate)

    def _launch(self, *arguments: Any) -> None:
        layout = self._layout
        values = tuple(map(argument, arguments))
        self._kernel(layout.grid, (32 * layout.tiling.warps,), values, shared_mem=4 * layout.words)
