"""Convolution tasks on the GPU: shapes, direction, and epilogue."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from caffepy.backend.types import Geometry, element_dtype, spatial_output


class Direction(Enum):
    """Result of a convolution task, and the two arrays that it is computed from."""

    FORWARD = "forward"  # x, weights -> y
    DATA = "backward to data"  # dy, weights -> dx
    WEIGHTS = "backward to weights"  # x, dy -> dweights


@dataclass(frozen=True)
class Problem:
    """A convolution's shapes.

    Args:
        x: (N, C, spatial...).
        weights: (num_output, C / group, kernel...).
        geometry: window geometry.
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
        """dtype of the device's arrays; uint16 stores bfloat16."""
        return element_dtype(self.dtype)

    @property
    def multiplications(self) -> int:
        """Multiplications in each direction, including those with padding."""
        return math.prod(self.y) * math.prod(self.weights[1:])

    def arrays(self, direction: Direction) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the two inputs and of the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


@dataclass(frozen=True)
class Task:
    """One direction of a problem, and the epilogue of the forward pass."""

    problem: Problem
    direction: Direction
    bias: bool = False
    relu: bool = False
    sums: bool = False
    residual: bool = False

    @property
    def plain(self) -> Task:
        """The task without its epilogue."""
        return Task(self.problem, self.direction)


def is_pointwise(geometry: Geometry) -> bool:
    """Return whether the convolution is 1x1 with stride 1 and no padding: a matrix product without im2col."""
    g = geometry
    return all(k == 1 and s == 1 and p == 0 for k, s, p in zip(g.kernel, g.stride, g.pad, strict=True))


def is_whole_image(problem: Problem) -> bool:
    """Return whether each image has a single window, the image itself, in one group: an inner product."""
    g = problem.geometry
    return g.kernel == problem.x[2:] and g.group == 1 and not any(g.pad) and all(d == 1 for d in g.dilation)


def is_product(problem: Problem) -> bool:
    """Return whether the convolution is a matrix product of its arrays without im2col."""
    return is_pointwise(problem.geometry) or is_whole_image(problem)
