"""Gradients rewritten as other operations, where few cuDNN engines are fast.

A data gradient with stride 1 equals a forward convolution of padded dy with flipped weights, which is faster for large
windows and for one axis. The weight gradient of a 1x1 convolution is a matrix product with one row per output, one
column per channel and a sum over all pixels of all images. With few channels a single product leaves most
multiprocessors idle. Therefore the pixels are split into parts with separate products, which are added in a fixed order
(split-K).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from caffepy.backend.cuda.compiler import RESIDENT_BLOCKS
from caffepy.backend.cuda.convolution.algorithm import Candidate, Operands, Resources, sum_parts
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, is_pointwise
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.memory import raw
from caffepy.backend.layout import CHANNELS_LAST, memory_order, view
from caffepy.backend.types import Array

CUDNN_SLOW_WINDOW = 81
"""Minimum window pixels for which cuDNN's channels-last data gradients are slow."""

Choose = Callable[[Task, Operands | None], Candidate | None]

TILE = 64
"""Assumed side of a block's tile of the result."""

MIN_DEPTH = 256
"""Minimum pixels of a part; below, the addition costs more than splitting saves."""

MAX_NUMBERS = 2**22
"""Maximum elements of all parts together."""


def suits_flipping(task: Task) -> bool:
    """Return whether a task is a data gradient for which this may be the fastest."""
    g = task.problem.geometry
    return (
        task.direction is Direction.DATA
        and (len(g.kernel) == 1 or (len(task.problem.x) in CHANNELS_LAST and math.prod(g.kernel) >= CUDNN_SLOW_WINDOW))
        and math.prod(g.kernel) > 1
        and g.group == 1
        and all(step == 1 for step in g.stride)
        and all(pad >= 0 for pad in _padding(task.problem))
    )


def flipped(problem: Problem) -> Problem:
    """Return the forward convolution whose result is the problem's data gradient.

    Its weights (C, num_output, kernel...) are the problem's (num_output, C, kernel...) with reversed spatial axes. Its
    padding is dilation * (kernel - 1) - pad.
    """
    outputs, channels, *kernel = problem.weights
    geometry = replace(problem.geometry, pad=_padding(problem))
    return Problem(problem.y, (channels, outputs, *kernel), geometry, problem.dtype)


def _padding(problem: Problem) -> tuple[int, ...]:
    g = problem.geometry
    return tuple(d * (k - 1) - p for k, p, d in zip(g.kernel, g.pad, g.dilation, strict=True))


class FlippedForward:
    """The candidate: the fastest forward convolution with flipped weights.

    Args:
        task: one that `suits_flipping`.
        choose: returns the candidate of another task.
        resources: scratch memory.
    """

    name = "flipped"

    def __init__(self, task: Task, choose: Choose, resources: Resources) -> None:
        self._task = Task(flipped(task.problem), Direction.FORWARD)
        self._choose = choose
        self._resources = resources
        self._forward: Candidate | None = None

    def prepare(self) -> bool:
        """Choose the forward candidate, which may require tuning."""
        self._forward = self._choose(self._task, None)
        return self._forward is not None

    def run(self, operands: Operands) -> None:
        """Flip the weights in scratch memory, then run the forward convolution."""
        assert self._forward is not None
        self._forward.run(replace(operands, second=self._flipped_weights(operands.second)))

    def _flipped_weights(self, weights: Array) -> Array:
        scratch = self._resources.scratch.get("turned weights", weights.size, weights.dtype.name)
        turned = view(scratch, self._task.problem.weights)
        cupy.copyto(turned, cupy.flip(weights.swapaxes(0, 1), tuple(range(2, weights.ndim))))
        return turned


def parts_of(problem: Problem) -> tuple[int, int]:
    """Return the number of parts and their pixels, a multiple of eight; one part if splitting does not pay."""
    outputs, channels = problem.weights[:2]
    pixels = problem.x[0] * math.prod(problem.x[2:])
    tiles = -(-outputs // TILE) * -(-channels // TILE)
    number = min(RESIDENT_BLOCKS // tiles, pixels // MIN_DEPTH, MAX_NUMBERS // (outputs * channels))
    if number < 2:
        return 1, pixels
    return number, pixels // number // 8 * 8


def suits_split_k(task: Task) -> bool:
    """Return whether the candidate supports a task and may be the fastest."""
    problem = task.problem
    return (
        task.direction is Direction.WEIGHTS
        and len(problem.x) in CHANNELS_LAST
        and problem.geometry.group == 1
        and is_pointwise(problem.geometry)
        and parts_of(problem)[0] > 1
    )


class SplitKProducts:
    """The candidate.

    Args:
        task: a plain one that `suits_split_k`.
        resources: cuBLAS and scratch memory.
    """

    def __init__(self, task: Task, resources: Resources) -> None:
        self._problem = task.problem
        self._resources = resources
        self._parts, self._depth = parts_of(task.problem)
        self.name = f"split-K {self._parts}"

    def prepare(self) -> bool:
        return True

    def run(self, operands: Operands) -> None:
        """Launch the products of all parts, one for the remaining pixels, and the addition."""
        outputs, channels = self._problem.weights[:2]
        x, dy = _pixels(operands.first), _pixels(operands.second)
        split = self._parts * self._depth
        number = self._parts + (split < x.shape[0])
        parts = self._resources.scratch.get("parts of a weight gradient", number * outputs * channels)
        parts = parts.reshape(number, outputs, channels)
        shape = (self._parts, self._depth, -1)
        blas = self._resources.blas
        whole = parts[: self._parts]
        blas.gemm_of_parts(dy[:split].reshape(shape), x[:split].reshape(shape), whole, True, False, False)
        if split < x.shape[0]:
            blas.gemm(dy[split:], x[split:], parts[-1], True, False, False)
        sum_parts(parts, raw(operands.out), number, operands.accumulate)


def _pixels(images: Array) -> Array:
    """Return the images as a matrix with one row per pixel."""
    return memory_order(images).reshape(-1, images.shape[1])
