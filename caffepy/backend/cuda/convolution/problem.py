"""What a convolution on the GPU is asked for: shapes, direction, and what is done to its result."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from caffepy.backend.types import Geometry, element_dtype, spatial_output


class Direction(Enum):
    """What a convolution computes, and from which two arrays."""

    FORWARD = "forward"  # x, weights -> y
    DATA = "backward to data"  # dy, weights -> dx
    WEIGHTS = "backward to weights"  # x, dy -> dweights


@dataclass(frozen=True)
class Problem:
    """A convolution's shapes.

    Args:
        x: (N, C, spatial...).
        weights: (num_output, C / group, kernel...).
        geometry: how the window moves.
        dtype: of x, y and the weights.
    """

    x: tuple[int, ...]
    weights: tuple[int, ...]
    geometry: Geometry
    dtype: str = "float32"

    @cached_property
    def y(self) -> tuple[int, ...]:
        """(N, num_output, spatial...)."""
        g = self.geometry
        windows = zip(self.x[2:], g.kernel, g.stride, g.pad, g.dilation, strict=True)
        return (self.x[0], self.weights[0], *(spatial_output(*window) for window in windows))

    @property
    def array_dtype(self) -> str:
        """dtype of the device's arrays: bfloat16 numbers lie in uint16."""
        return element_dtype(self.dtype)

    @property
    def multiplications(self) -> int:
        """How many there are in each direction, those with padding counted."""
        return math.prod(self.y) * math.prod(self.weights[1:])

    def arrays(self, direction: Direction) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two inputs and of the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


@dataclass(frozen=True)
class Task:
    """One direction of a problem, and what is done to the forward pass's result on its way to memory."""

    problem: Problem
    direction: Direction
    bias: bool = False
    relu: bool = False
    sums: bool = False
    residual: bool = False

    @property
    def plain(self) -> Task:
        """The same without anything done to the result."""
        return Task(self.problem, self.direction)


def is_pointwise(geometry: Geometry) -> bool:
    """Whether the convolution is 1x1 with stride 1 and no padding: a matrix product without im2col."""
    g = geometry
    return all(k == 1 and s == 1 and p == 0 for k, s, p in zip(g.kernel, g.stride, g.pad, strict=True))


def is_whole_image(problem: Problem) -> bool:
    """Whether the only window of each image is the image itself, in one group: an inner product of all its numbers."""
    g = problem.geometry
    return g.kernel == problem.x[2:] and g.group == 1 and not any(g.pad) and all(d == 1 for d in g.dilation)


def is_product(problem: Problem) -> bool:
    """Whether the convolution is a matrix product of its arrays as they are, without im2col."""
    return is_pointwise(problem.geometry) or is_whole_image(problem)
