"""Convolutions over blobs with more channels than they have: one or three, as first layers have, are few for cuDNN.

Owns three changes of a problem that leave its result alone. Padding: channels of zeros are added up to a number that
engines like. Folding: where windows step by s, each s x s block of places becomes one place of s * s times as many
channels, and a window of k x k a window of ceil(k / s) x ceil(k / s) that steps by 1. Widening, after folding: the
places of a window's row, which follow each other in memory, are read as channels of one place, so that x's places
overlap and windows are one place wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from caffepy.backend.base import Array, Geometry
from caffepy.backend.cuda_convolution import Candidate, Direction, Operands, Problem, Resources, Source, Task
from caffepy.backend.cuda_cudnn import cudnn_candidates, overlapped_candidates
from caffepy.backend.cuda_kernels import c_type, defines, launch, library_kernel
from caffepy.backend.cuda_memory import Scratch, raw, view

MOST_FOLDED_CHANNELS = 64
"""Channels after folding up to which it is offered: an input with many channels needs no folding."""


@dataclass(frozen=True)
class Folding:
    """How one array is folded: (N, C, H, W) into (N', C', H', W').

    Args:
        plain: shape of the array.
        folded: shape afterwards.
        step: places a side that become one.
        shift: zeros before the first row and column.
    """

    plain: tuple[int, ...]
    folded: tuple[int, ...]
    step: int = 1
    shift: tuple[int, int] = (0, 0)

    def fold(self, array: Array, scratch: Scratch, purpose: str) -> Array:
        """The folded array in scratch memory, or the array itself if folding does not change it."""
        if self.plain == self.folded:
            return array
        out = view(scratch.get(purpose, math.prod(self.folded), array.dtype.name), self.folded)
        width = 16 // out.itemsize
        while self.folded[1] % width:
            width //= 2
        kernel = library_kernel("folding", "fold", self._defines(array, out, width))
        count = out.size // width
        launch(kernel, count, (raw(array), out, self.plain[0], count))
        return out

    def unfold(self, folded: Array, plain: Array, accumulate: bool = False) -> None:
        """plain (+)= what was folded."""
        kernel = library_kernel("folding", "unfold", self._defines(folded, plain, 1))
        launch(kernel, plain.size, (folded, raw(plain), accumulate, plain.size))

    def _defines(self, source: Array, target: Array, width: int) -> str:
        (_, channels, height, columns), (_, folded_channels, folded_height, folded_columns) = self.plain, self.folded
        return defines(
            In=c_type(source), Out=c_type(target), HEIGHT=height, WIDTH=columns, CHANNELS=channels,
            FOLDED_HEIGHT=folded_height, FOLDED_WIDTH=folded_columns, FOLDED_CHANNELS=folded_channels,
            STEP=self.step, SHIFT_H=self.shift[0], SHIFT_W=self.shift[1], PACK=width,
        )  # fmt: skip


@dataclass(frozen=True)
class FoldedProblem:
    """A problem with the same result as another one.

    Args:
        problem: what cuDNN computes.
        x: how x becomes its x.
        weights: likewise.
        y: likewise; only channels are added.
        x_strides: of the problem's x, where its places overlap.
    """

    problem: Problem
    x: Folding
    weights: Folding
    y: Folding
    x_strides: tuple[int, ...] | None = None

    def of(self, direction: Direction) -> tuple[Folding, Folding, Folding]:
        """Those of the two inputs and of the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


class FoldedPlan:
    """A candidate of the folded problem between folding and unfolding.

    Args:
        task: of the plain problem.
        folded: the other problem.
        inner: carries out the task for that.
        name: the candidate's.
        resources: scratch memory.
    """

    def __init__(
        self, task: Task, folded: FoldedProblem, inner: Candidate, name: str, resources: Resources
    ) -> None:
        self.name = name
        self._task = task
        self._folded = folded
        self._inner = inner
        self._resources = resources
        self.prepare = inner.prepare

    def run(self, operands: Operands) -> None:
        """Fold the inputs, compute, unfold the output."""
        first, second, out = self._folded.of(self._task.direction)
        scratch = self._resources.scratch
        a = first.fold(operands.first, scratch, "folded first")
        b = second.fold(operands.second, scratch, "folded second")
        dtype = self._task.problem.dtype
        if out.plain == out.folded and operands.out.dtype == dtype and not operands.accumulate:
            self._inner.run(Operands(a, b, operands.out, operands.bias, operands.sums))
            return
        result = view(scratch.get("folded result", math.prod(out.folded), dtype), out.folded)
        self._inner.run(Operands(a, b, result, operands.bias, operands.sums))
        out.unfold(result, operands.out, operands.accumulate)


def folded_sources(task: Task, resources: Resources) -> list[Source]:
    """Sources of candidates for a problem with few channels, or with odd numbers of them."""
    problem = task.problem
    if len(problem.x) != 4 or problem.geometry.group != 1:
        return []
    sources = []
    for name, folded in _foldings(problem, task.direction):
        if task == task.plain or folded.y.plain == folded.y.folded:
            sources.append(_source(name, task, folded, resources))
    return sources


def _source(name: str, task: Task, folded: FoldedProblem, resources: Resources) -> Source:
    inner_task = Task(folded.problem, task.direction, task.bias, task.relu, task.sums)

    def candidates() -> Iterator[Candidate]:
        if folded.x_strides is None:
            plans = cudnn_candidates(inner_task, resources)
        else:
            plans = overlapped_candidates(inner_task, resources, folded.x_strides)
        for inner in plans:
            yield FoldedPlan(task, folded, inner, f"{name}{inner.name}", resources)

    return Source(name, candidates)


def _foldings(problem: Problem, direction: Direction) -> Iterator[tuple[str, FoldedProblem]]:
    """Names and problems: folded if windows step alike both ways and channels are few; padded if channels are odd."""
    item = 4 if problem.storage == "float32" else 2
    unit = 16 // item
    channels, outputs = problem.x[1], _up(problem.weights[0], unit)
    step = problem.geometry.stride[0]
    inner = _up(channels * step * step, unit)
    if _can_fold(problem) and inner <= MOST_FOLDED_CHANNELS:
        folded = fold(problem, inner, outputs)
        if direction is not Direction.DATA and folded.problem.geometry.kernel[1] > 1 and channels < unit:
            yield f"widened {inner} ", widen(folded)
        if step > 1:
            yield f"folded {inner} ", folded
    widths = {_up(channels, unit)} | ({_up(channels, 4)} if channels < 4 else set())
    for width in sorted(widths):
        if (width, outputs) != (channels, problem.weights[0]):
            yield f"padded {width} ", pad(problem, width, outputs)


def _up(number: int, unit: int) -> int:
    return -(-number // unit) * unit


def _can_fold(problem: Problem) -> bool:
    g = problem.geometry
    step = g.stride[0]
    return g.stride[1] == step and g.dilation == (1, 1) and min(g.kernel) >= step


def pad(problem: Problem, channels: int, outputs: int) -> FoldedProblem:
    """The problem with this many channels and outputs."""
    x, w, y = problem.x, problem.weights, problem.y
    x_padded, w_padded = (x[0], channels, *x[2:]), (outputs, channels, *w[2:])
    inner = Problem(x_padded, w_padded, problem.geometry, problem.storage)
    return FoldedProblem(inner, Folding(x, x_padded), Folding(w, w_padded), Folding(y, (y[0], outputs, *y[2:])))


def fold(problem: Problem, channels: int, outputs: int) -> FoldedProblem:
    """The problem with windows that step by 1, over this many channels."""
    g, x, w, y = problem.geometry, problem.x, problem.weights, problem.y
    step = g.stride[0]
    kernel = tuple(-(-k // step) for k in g.kernel)
    size = tuple(out + k - 1 for out, k in zip(y[2:], kernel, strict=True))
    x_folded, w_folded = (x[0], channels, *size), (outputs, channels, *kernel)
    inner = Problem(x_folded, w_folded, Geometry(kernel, (1, 1), (0, 0), (1, 1)), problem.storage)
    return FoldedProblem(
        inner,
        Folding(x, x_folded, step, (g.pad[0], g.pad[1])),
        Folding(w, w_folded, step),
        Folding(y, (y[0], outputs, *y[2:])),
    )


def widen(folded: FoldedProblem) -> FoldedProblem:
    """A folded problem with the places of a window's row as channels."""
    problem = folded.problem
    n, channels, height, width = problem.x
    kernel_h, kernel_w = problem.geometry.kernel
    inner = Problem(
        (n, kernel_w * channels, height, width - kernel_w + 1),
        (problem.weights[0], kernel_w * channels, kernel_h, 1),
        Geometry((kernel_h, 1), (1, 1), (0, 0), (1, 1)),
        problem.storage,
    )
    strides = (height * width * channels, 1, width * channels, channels)
    return FoldedProblem(inner, folded.x, folded.weights, folded.y, strides)
