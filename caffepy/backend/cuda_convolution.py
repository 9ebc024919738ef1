"""Convolutions on the GPU: cuDNN in the blobs' own layout, cuDNN over NCHW copies, or unrolling and cuBLAS.

Owns the choice among the three. Each way can compute any of the three directions of a convolution or says that it
cannot; for each direction the first that can is kept.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from caffepy.backend.base import Array, Geometry, spatial_output
from caffepy.backend.cuda_blas import Blas
from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_elementwise import apply
from caffepy.backend.cuda_memory import Scratch, view
from caffepy.backend.expression import Channel, Each, expression
from caffepy.errors import RunError

logger = logging.getLogger(__name__)

MOST_GROUPS = 4
"""Groups up to which one matrix product per group is worth its launches."""


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
    """

    x: tuple[int, ...]
    weights: tuple[int, ...]
    geometry: Geometry

    @property
    def y(self) -> tuple[int, ...]:
        """(N, num_output, spatial...)."""
        g = self.geometry
        windows = zip(self.x[2:], g.kernel, g.stride, g.pad, g.dilation, strict=True)
        return (self.x[0], self.weights[0], *(spatial_output(*window) for window in windows))

    def arrays(self, direction: Direction) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Shapes of the two inputs and of the output."""
        if direction is Direction.FORWARD:
            return self.x, self.weights, self.y
        if direction is Direction.DATA:
            return self.y, self.weights, self.x
        return self.x, self.y, self.weights


class Way(Protocol):
    """One way of computing convolutions of one problem."""

    name: str

    def prepare(self, direction: Direction) -> bool:
        """Plan a direction; False if this way cannot compute it."""

    def run(self, direction: Direction, first: Array, second: Array, out: Array) -> None:
        """Compute `out` from the two inputs of a prepared direction."""


@dataclass
class Resources:
    """What the ways of one backend share."""

    cudnn: Any
    handle: Any
    blas: Blas
    scratch: Scratch
    tf32: bool


@expression
def add_bias(y: Each, bias: Channel) -> Each:
    return y + bias


@expression
def add_to(total: Each, value: Each) -> Each:
    return total + value


class CudaConvolution:
    """A `Convolution` that plans each direction when it is first needed.

    Args:
        problem: the shapes.
        ways: for each direction, ways of computing it, best first.
        scratch: where the temporary of an accumulated gradient comes from.
    """

    def __init__(self, problem: Problem, ways: Mapping[Direction, Sequence[Way]], scratch: Scratch) -> None:
        self.problem = problem
        self._ways = ways
        self._scratch = scratch
        self._chosen: dict[Direction, Way] = {}

    def way(self, direction: Direction) -> Way:
        """The way that computes a direction."""
        if direction not in self._chosen:
            for way in self._ways[direction]:
                if way.prepare(direction):
                    self._chosen[direction] = way
                    logger.debug("convolution %s of %s: %s", direction.value, self.problem, way.name)
                    break
            else:
                raise RunError(f"no way to compute convolution {direction.value} of {self.problem}")
        return self._chosen[direction]

    def _run(self, direction: Direction, first: Array, second: Array, out: Array) -> None:
        arrays = (first, second, out)
        shapes = self.problem.arrays(direction)
        assert all(tuple(a.shape) == s for a, s in zip(arrays, shapes, strict=True)), (direction, self.problem)
        if out.size and first.size:
            self.way(direction).run(direction, first, second, out)

    gives_sums = False

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        """y = weights * x (+ bias)."""
        assert not relu and sums is None
        self._run(Direction.FORWARD, x, weights, y)
        if bias is not None:
            apply(add_bias, (y, bias.reshape(-1)), (y,), axis=1)

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """dx = the transposed convolution of dy with weights."""
        self._run(Direction.DATA, dy, weights, dx)

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy."""
        if not accumulate:
            self._run(Direction.WEIGHTS, x, dy, dweights)
            return
        shape = tuple(dweights.shape)
        gradient = view(self._scratch.get("weight gradient", math.prod(shape)), shape)
        self._run(Direction.WEIGHTS, x, dy, gradient)
        apply(add_to, (dweights, gradient), (dweights,), axis=1)


def is_pointwise(geometry: Geometry) -> bool:
    """Whether each window is one place and the windows are all places, so that nothing need be unrolled."""
    g = geometry
    return all(k == 1 and s == 1 and p == 0 for k, s, p in zip(g.kernel, g.stride, g.pad, strict=True))


def prefers_products(problem: Problem, direction: Direction) -> bool:
    """Whether in full float32 unrolling and cuBLAS beat cuDNN.

    Measured on an H200 with cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50: without tensor cores cuDNN's
    gradients take 0.8 to 13 times as long, mostly twice, and are less exact; its forward pass is ahead but for 1x1
    windows.
    """
    if len(problem.x) != 4 or problem.geometry.group > MOST_GROUPS:
        return False
    return direction is not Direction.FORWARD or is_pointwise(problem.geometry)


def plan_convolution(problem: Problem, resources: Resources) -> CudaConvolution:
    """A convolution with all ways that its number of axes allows."""
    from caffepy.backend.cuda_cudnn import CopiedCudnn, DirectCudnn
    from caffepy.backend.cuda_im2col import Im2colConvolution

    library: list[Way] = []
    if len(problem.x) in (3, 4, 5):
        library.append(DirectCudnn(problem, resources))
    if len(problem.x) == 4:
        library.append(CopiedCudnn(problem, resources))
    products = Im2colConvolution(problem, resources)
    ways = {}
    for direction in Direction:
        first = not resources.tf32 and prefers_products(problem, direction)
        ways[direction] = [products, *library] if first else [*library, products]
    return CudaConvolution(problem, ways, resources.scratch)


def channels_first(array: Array, scratch: Scratch, purpose: str) -> Array:
    """A copy in C order, in scratch memory."""
    copy = scratch.get(purpose, array.size).reshape(array.shape)
    cupy.copyto(copy, array)
    return copy
