"""A convolution on the GPU: holds one candidate per task and converts arrays for it.

`registry.py` lists the candidates, `autotune.py` chooses the fastest.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cached_property
from typing import Any

from caffepy.backend.cuda.convolution.algorithm import (
    UNFUSED,
    Candidate,
    Operands,
    Resources,
    fits,
    identity,
    write_result,
)
from caffepy.backend.cuda.convolution.depthwise import DepthwiseGradients, DepthwiseWalk
from caffepy.backend.cuda.convolution.depthwise_tiling import suits_depthwise, walk_of
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.convolution.registry import algorithm_families
from caffepy.backend.cuda.expression import apply
from caffepy.backend.cuda.memory import CudaMemory
from caffepy.backend.handles import Convolution, NormalisedForward, NormalisedGradients
from caffepy.backend.interface import ConvolutionPrimitives
from caffepy.backend.layout import view
from caffepy.backend.types import Array, Geometry, NormalisedBottom
from caffepy.errors import RunError


class CudaConvolutionPlan:
    """A `Convolution` that chooses a candidate for each task at first use.

    Args:
        problem: the shapes.
        resources: shared resources of the backend's convolutions.
    """

    def __init__(self, problem: Problem, resources: Resources) -> None:
        self.problem = problem
        self._resources = resources
        self._chosen: dict[Task, Candidate | None] = {}
        self._gradients: dict[bool, DepthwiseGradients] = {}
        self._normalised: dict[tuple[Task, bool], DepthwiseWalk] = {}

    def candidate(self, task: Task, operands: Operands | None) -> Candidate | None:
        """Return the candidate for a task, or None; `operands` are arrays for timing, if available."""
        if task not in self._chosen:
            families = algorithm_families(task, self.run, self.candidate, self._resources)
            self._chosen[task] = self._resources.tuner.choose(task, families, operands, self._resources)
        return self._chosen[task]

    def run(self, task: Task, operands: Operands) -> None:
        given = (operands.bias is not None, operands.sums is not None, operands.residual is not None)
        assert given == (task.bias, task.sums, task.residual), task
        chosen = self.candidate(task, operands)
        if chosen is None:
            raise RunError(f"no algorithm for convolution {task.direction.value} of {task.problem}")
        chosen.run(operands)

    @cached_property
    def gives_sums(self) -> bool:
        """Whether the convolution may compute sums itself and does so faster than a second pass over y."""
        task = Task(self.problem, Direction.FORWARD, sums=True)
        exact = self.problem.dtype == "float32" and not self._resources.tf32
        if len(self.problem.x) != 4 or math.prod(self.problem.y) == 0:
            return False
        if suits_depthwise(task):
            return True  # own kernels sum the values in registers
        if self._resources.deterministic or exact:
            return False
        chosen = self.candidate(task, None)
        return chosen is not None and chosen.name != UNFUSED

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None,
        residual: Array | None = None,
    ) -> None:  # fmt: skip
        assert sums is None or (self.gives_sums and bias is None and not relu), "this convolution cannot compute sums"
        task = Task(self.problem, Direction.FORWARD, bias is not None, relu, sums is not None, residual is not None)
        bias = None if bias is None else self._as_operand(bias.reshape(-1), bias.size, "aligned bias", "float32")
        if residual is not None:
            residual = self._as_operand(residual, self.problem.y, "converted residual", self.problem.array_dtype)
        self._convolve(task, Operands(x, weights, y, bias, sums, residual=residual))

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        self._convolve(Task(self.problem, Direction.DATA), Operands(dy, weights, dx))

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        task = Task(self.problem, Direction.WEIGHTS)
        self._convolve(task, Operands(x, dy, dweights, accumulate=accumulate))

    @cached_property
    def backward_normalised(self) -> NormalisedGradients | None:
        possible = math.prod(self.problem.y) > 0 and walk_of(Task(self.problem, Direction.DATA)) is not None
        return self._both_gradients if possible else None

    @cached_property
    def forward_normalised(self) -> NormalisedForward | None:
        return None if self.backward_normalised is None else self._forward_normalised

    def _forward_normalised(self, bottom: NormalisedBottom, weights: Array, y: Array, sums: Array | None) -> None:
        dtype, task = self.problem.array_dtype, Task(self.problem, Direction.FORWARD, sums=sums is not None)
        operands = Operands(
            self._as_operand(bottom.x, self.problem.x, "converted input", dtype),
            self._as_operand(weights, self.problem.weights, "converted second input", dtype),
            y if fits(y, dtype) else view(self._resources.scratch.get("converted output", y.size, dtype), y.shape),
            sums=sums,
        )
        if (task, bottom.relu) not in self._normalised:
            walk = walk_of(task)
            assert walk is not None
            chosen = self._normalised[task, bottom.relu] = DepthwiseWalk(task, walk, self._resources, bottom.relu)
            chosen.prepare()
        self._normalised[task, bottom.relu].run_normalised(bottom, operands)
        if operands.out is not y:
            write_result(operands.out, Operands(bottom.x, weights, y))

    def _both_gradients(
        self, bottom: NormalisedBottom, dy: Array, weights: Array, dx: Array, dweights: Array, accumulate: bool
    ) -> None:
        dtype, scratch = self.problem.array_dtype, self._resources.scratch
        given = Operands(dy, weights, dx, accumulate=accumulate)
        operands = replace(
            given,
            first=self._as_operand(dy, self.problem.y, "converted input", dtype),
            second=self._as_operand(weights, self.problem.weights, "converted second input", dtype),
            out=dx if fits(dx, dtype) else view(scratch.get("converted output", dx.size, dtype), self.problem.x),
        )
        x = self._as_operand(bottom.x, self.problem.x, "converted third input", dtype)
        if bottom.relu not in self._gradients:
            walk = walk_of(Task(self.problem, Direction.DATA))
            assert walk is not None
            chosen = self._gradients[bottom.relu] = DepthwiseGradients(self.problem, bottom.relu, walk, self._resources)
            chosen.prepare()
        self._gradients[bottom.relu].run_all(replace(bottom, x=x), operands, dweights)
        if operands.out is not dx:
            write_result(operands.out, Operands(dy, weights, dx))

    def _convolve(self, task: Task, given: Operands) -> None:
        """Convert the arrays to the problem's dtype, run, and convert the result to its dtype."""
        shapes = self.problem.arrays(task.direction)
        arrays = (given.first, given.second, given.out)
        assert all(tuple(a.shape) == s for a, s in zip(arrays, shapes, strict=True)), (task.direction, self.problem)
        if not given.out.size or not given.first.size:
            return
        dtype = self.problem.array_dtype
        operands = replace(
            given,
            first=self._as_operand(given.first, shapes[0], "converted input", dtype),
            second=self._as_operand(given.second, shapes[1], "converted second input", dtype),
        )
        result = "float32" if task.direction is Direction.WEIGHTS else dtype
        if not fits(given.out, result):
            scratch = self._resources.scratch.get("converted output", given.out.size, result)
            operands = replace(operands, out=view(scratch, shapes[2]), accumulate=False)
        self.run(task, operands)
        if operands.out is not given.out:
            write_result(operands.out, given)

    def _as_operand(self, array: Array, shape: Any, purpose: str, dtype: str) -> Array:
        """Return the array itself if it has the required dtype and alignment, else a copy in scratch memory."""
        if fits(array, dtype):
            return array
        copy = view(self._resources.scratch.get(purpose, array.size, dtype), tuple(array.shape))
        apply(identity, (array,), (copy,), axis=0)
        return copy


class CudaConvolution(ConvolutionPrimitives, CudaMemory):
    """`ConvolutionPrimitives` of the GPU."""

    _resources: Resources
    _convolutions: dict[Problem, CudaConvolutionPlan]

    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        problem = Problem(tuple(x_shape), tuple(weights_shape), geometry, dtype)
        if problem not in self._convolutions:
            self._convolutions[problem] = CudaConvolutionPlan(problem, self._resources)
        return self._convolutions[problem]

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        assert isinstance(plan, CudaConvolutionPlan)
        plan.forward(x, weights, bias, y, relu, residual=residual)
