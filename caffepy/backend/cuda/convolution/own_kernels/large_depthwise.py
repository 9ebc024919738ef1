"""Depthwise convolutions with large windows or strides, and their gradients: kernels/large_depthwise.cu.

cuDNN's plans for them take ten times what the arithmetic takes, or fifty times what moving the arrays takes. Here
arithmetic limits large windows, memory limits large strides, whose results meet few weights each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, argument, defines, library_kernel
from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.own_kernels.correlation import phases_text
from caffepy.backend.cuda.convolution.own_kernels.large_depthwise_tiling import (
    Tiling,
    correlation_of,
    large_depthwise_tilings,
)
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import raw

WIDEST = 4
"""Channels of a load."""

NOTHING = np.uint64(0)
"""A pointer that is not used."""


def large_depthwise_candidates(task: Task, resources: Resources) -> list[LargeDepthwise]:
    """One for each tiling."""
    kind = LargeDepthwiseWeights if task.direction is Direction.WEIGHTS else LargeDepthwise
    return [kind(task, tiling, resources) for tiling in large_depthwise_tilings(task)]


class LargeDepthwise:
    """A candidate: one tiling of y or dx.

    Args:
        task: one that `suits_large_depthwise`.
        tiling: of the results.
        resources: scratch memory.
    """

    _kernel_name = "large_depthwise"

    def __init__(self, task: Task, tiling: Tiling, resources: Resources) -> None:
        self.name = tiling.name
        self._task = task
        self._tiling = tiling
        self._resources = resources
        self._correlation = correlation_of(task)
        self._bytes = self._correlation.shared_bytes(tiling)
        self._packs, self._tiles = self._correlation.packs(tiling), self._correlation.tiles(tiling)
        self._kernel: Any = None

    def prepare(self) -> bool:
        """Compile."""
        self._kernel = library_kernel("large_depthwise", self._kernel_name, self._settings())
        self._kernel.max_dynamic_shared_size_bytes = self._bytes
        return True

    def _settings(self) -> str:
        """What the kernels' text needs before it."""
        task, tiling, down, across = self._task, self._tiling, self._correlation.down, self._correlation.across
        source = self._correlation.source(tiling)
        weights = task.direction is Direction.WEIGHTS
        return defines(
            STORED=C_TYPES[cupy.dtype(task.problem.array_dtype).char], A_H=down.a, A_W=across.a,
            B_H=down.b, B_W=across.b, CHANNELS=tiling.channels,
            TOGETHER=math.gcd(task.problem.x[1], tiling.channels, WIDEST), RUN=tiling.run, ROWS=tiling.rows,
            RUNS=tiling.runs, GROUPS=tiling.groups, SPLIT=tiling.split,
            RESIDENT=self._correlation.resident(tiling),
            SOURCE_H=source[0], SOURCE_W=source[1], PIXELS=self._correlation.pixels(tiling),
            EXTRA=self._correlation.extra(tiling), FACTOR_H=tiling.factors[0], FACTOR_W=tiling.factors[1],
            TAPS=tiling.factors[1] if weights else across.taps, STEP_H=down.step, STEP_W=across.step,
            PHASES_H=phases_text(down), PHASES_W=phases_text(across), BIAS=int(task.bias), RELU=int(task.relu),
            WEIGHTS=int(weights),
        )  # fmt: skip

    def run(self, operands: Operands) -> None:
        """One launch."""
        problem, down, across = self._task.problem, self._correlation.down, self._correlation.across
        bias = NOTHING if operands.bias is None else raw(operands.bias)
        arrays = (raw(operands.first), raw(operands.second), bias, raw(operands.out))
        source, _, result = problem.arrays(self._task.direction)
        sizes = (*source[2:], *result[2:], down.origin, across.origin)
        self._launch(source[0], (*arrays, problem.x[1], self._packs, *self._tiles, *sizes))

    def _launch(self, planes: int, arguments: tuple[Any, ...]) -> None:
        """For each tile of so many planes and each pack of channels a block."""
        grid = (planes * math.prod(self._tiles) * self._packs, self._tiling.shares)
        self._kernel(grid, (self._tiling.threads,), tuple(map(argument, arguments)), shared_mem=self._bytes)


class LargeDepthwiseWeights(LargeDepthwise):
    """A candidate: one tiling of dweights."""

    _kernel_name = "large_depthwise_weights"

    def run(self, operands: Operands) -> None:
        """One launch, and one more that adds up the blocks' parts."""
        problem, tiling, out = self._task.problem, self._tiling, raw(operands.out)
        number, pieces = self._correlation.parts(tiling), self._correlation.pieces(tiling)
        direct = number == 1 and not operands.accumulate
        parts = out
        if not direct:
            parts = self._resources.scratch.get("parts of a weight gradient", number * operands.out.size)
        arrays = (raw(operands.first), raw(operands.second), parts, problem.x[1], self._packs, *self._tiles, number)
        sizes = (*problem.x[2:], *problem.y[2:], *problem.geometry.pad, *problem.weights[2:])
        self._launch(number, (*arrays, *sizes, problem.x[0] * math.prod(pieces), *pieces))
        if not direct:
            sum_parts(parts, out, number, operands.accumulate)
