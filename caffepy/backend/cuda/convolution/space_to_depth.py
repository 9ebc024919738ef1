"""Convolutions over blobs with more channels than they have: one or three, as first layers have, are few for cuDNN.

Owns three changes of a problem that leave its result alone. Padding: channels of zeros are added up to a number that
engines like. Folding: where windows step by s, each s x s block of places becomes one place of s * s times as many
channels, and a window of k x k a window of ceil(k / s) x ceil(k / s) that steps by 1. Widening, after folding: the
channels of all places in a window's row become channels of its first, so that windows are one place wide.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from caffepy.backend.cuda.convolution.problem import Direction, Problem
from caffepy.backend.types import Geometry, convolution_workspace

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
        width: places that are then put together, each with those that follow it.
    """

    plain: tuple[int, ...]
    folded: tuple[int, ...]
    step: int = 1
    shift: tuple[int, int] = (0, 0)
    width: int = 1


@dataclass(frozen=True)
class FoldedProblem:
    """A problem with the same result as another one.

    Args:
        problem: what cuDNN computes.
        x: how x becomes its x.
        weights: likewise.
        y: likewise; only channels are added.
    """

    problem: Problem
    x: Folding
    weights: Folding
    y: Folding

    def of(self, direction: Direction) -> tuple[Folding, Folding, Folding]:
        """Those of the two inputs and of the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


def foldings(problem: Problem, direction: Direction) -> Iterator[tuple[str, FoldedProblem]]:
    """Names and problems: widened or folded if channels are few, padded if there are odd numbers of them."""
    if len(problem.x) != 4 or problem.geometry.group != 1:
        return
    item = 4 if problem.dtype == "float32" else 2
    unit = 16 // item
    channels, outputs = problem.x[1], _up(problem.weights[0], unit)
    step = problem.geometry.stride[0]
    inner = _up(channels * step * step, unit)
    if _can_fold(problem) and inner <= MOST_FOLDED_CHANNELS:
        folded = fold(problem, inner, outputs)
        if direction is not Direction.DATA and channels < unit and folded.problem.geometry.kernel[1] > 1:
            widened = widen(folded)
            arrays = math.prod(problem.x) + math.prod(problem.y)
            if math.prod(widened.x.folded) * item <= convolution_workspace(arrays * item) // 2:
                yield f"widened {widened.problem.x[1]} ", widened
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
    inner = Problem(x_padded, w_padded, problem.geometry, problem.dtype)
    return FoldedProblem(inner, Folding(x, x_padded), Folding(w, w_padded), Folding(y, (y[0], outputs, *y[2:])))


def fold(problem: Problem, channels: int, outputs: int) -> FoldedProblem:
    """The problem with windows that step by 1, over this many channels."""
    g, x, w, y = problem.geometry, problem.x, problem.weights, problem.y
    step = g.stride[0]
    kernel = tuple(-(-k // step) for k in g.kernel)
    size = tuple(out + k - 1 for out, k in zip(y[2:], kernel, strict=True))
    x_folded, w_folded = (x[0], channels, *size), (outputs, channels, *kernel)
    inner = Problem(x_folded, w_folded, Geometry(kernel, (1, 1), (0, 0), (1, 1)), problem.dtype)
    return FoldedProblem(
        inner,
        Folding(x, x_folded, step, (g.pad[0], g.pad[1])),
        Folding(w, w_folded, step),
        Folding(y, (y[0], outputs, *y[2:])),
    )


def widen(folded: FoldedProblem) -> FoldedProblem:
    """A folded problem with the places of a window's row as channels of one; the weights lie in memory as they did."""
    problem = folded.problem
    n, channels, height, width = problem.x
    kernel_h, kernel_w = problem.geometry.kernel
    x = (n, kernel_w * channels, height, width - kernel_w + 1)
    weights = (problem.weights[0], kernel_w * channels, kernel_h, 1)
    inner = Problem(x, weights, Geometry((kernel_h, 1), (1, 1), (0, 0), (1, 1)), problem.dtype)
    return FoldedProblem(inner, replace(folded.x, folded=x, width=kernel_w), folded.weights, folded.y)
