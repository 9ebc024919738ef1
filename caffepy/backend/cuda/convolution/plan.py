"""Convolutions on the GPU: what is to be computed, and which of many ways computes it.

Owns `CudaConvolution`, which keeps one candidate for each task, and what candidates are. Which there are is
`cuda/convolution/registry.py`'s, which of them is best `cuda/convolution/autotune.py`'s.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol

from caffepy.backend.cuda.compiler import aligned
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.cuda.elementwise.launch import apply
from caffepy.backend.cuda.gemm.cublas import Blas
from caffepy.backend.cuda.memory import Scratch, flat, view
from caffepy.backend.elementwise import Each, expression
from caffepy.backend.types import Array
from caffepy.errors import RunError

if TYPE_CHECKING:
    from caffepy.backend.cuda.convolution.autotune import Tuner

UNFUSED = "apart"
"""Name of the candidate that does what follows a forward pass in a pass of its own."""


@dataclass(frozen=True)
class Operands:
    """The arrays of one call: in the problem's dtype, dense and aligned, but for the float32 ones.

    Args:
        first: x, or dy for a gradient to data.
        second: the weights, or dy for a gradient to weights.
        out: y, dx, or dweights, which are float32.
        bias: float32 (num_output,).
        sums: float32 (2, num_output).
        accumulate: whether dweights are added to.
    """

    first: Array
    second: Array
    out: Array
    bias: Array | None = None
    sums: Array | None = None
    accumulate: bool = False


class Candidate(Protocol):
    """One way of carrying out one task."""

    name: str
    """Tells it from all other candidates of the task, in every process with the same libraries."""

    def prepare(self) -> bool:
        """Build what it needs; False if it cannot do the task after all."""

    def run(self, operands: Operands) -> None:
        """Carry the task out; only after `prepare`."""


@dataclass(frozen=True)
class Source:
    """Candidates of one kind, listed only when they are wanted.

    Args:
        name: what the candidates' names begin with.
        candidates: all of them, likely best first.
        last_resort: whether they are only for tasks that no source before can do.
        checked: whether a candidate's result must agree with that of a source without this mark before it is used.
    """

    name: str
    candidates: Callable[[], Iterable[Candidate]]
    last_resort: bool = False
    checked: bool = False


@dataclass
class Resources:
    """What the convolutions of one backend share.

    Args:
        cudnn: the frontend's module.
        handle: cuDNN's, bound to the backend's stream.
        blas: matrix products.
        scratch: memory within a call.
        tf32: whether products of float32 numbers may round them to TF32.
        tuner: chooses among candidates.
        deterministic: whether every run must give the same bits.
    """

    cudnn: Any
    handle: Any
    blas: Blas
    scratch: Scratch
    tf32: bool
    tuner: Tuner
    deterministic: bool = True


@expression
def identity(x: Each) -> Each:
    return x


@expression
def add_to(total: Each, value: Each) -> Each:
    return total + value


class CudaConvolution:
    """A `Convolution` that chooses a candidate for each task when it is first needed.

    Args:
        problem: the shapes.
        resources: what convolutions share.
    """

    def __init__(self, problem: Problem, resources: Resources) -> None:
        self.problem = problem
        self._resources = resources
        self._chosen: dict[Task, Candidate | None] = {}

    def candidate(self, task: Task, operands: Operands | None) -> Candidate | None:
        """What carries out a task; `operands` are arrays to try candidates on, None if there are none at hand."""
        if task not in self._chosen:
            from caffepy.backend.cuda.convolution.registry import sources

            listed = sources(task, self, self._resources)
            self._chosen[task] = self._resources.tuner.choose(task, listed, operands, self._resources)
        return self._chosen[task]

    def run(self, task: Task, operands: Operands) -> None:
        """Carry out a task."""
        assert (operands.bias is None, operands.sums is None) == (not task.bias, not task.sums), task
        chosen = self.candidate(task, operands)
        if chosen is None:
            raise RunError(f"no way to compute convolution {task.direction.value} of {task.problem}")
        chosen.run(operands)

    @cached_property
    def gives_sums(self) -> bool:
        """Whether sums from the convolution itself are allowed and cost less than reading y once more for them."""
        exact = self.problem.dtype == "float32" and not self._resources.tf32
        if self._resources.deterministic or exact or len(self.problem.x) != 4 or math.prod(self.problem.y) == 0:
            return False
        chosen = self.candidate(Task(self.problem, Direction.FORWARD, sums=True), None)
        return chosen is not None and chosen.name != UNFUSED

    def forward(
        self, x: Array, weights: Array, bias: Array | None, y: Array, relu: bool = False, sums: Array | None = None
    ) -> None:
        """y = weights * x (+ bias), or max(that, 0); sums of y and y^2."""
        assert sums is None or (self.gives_sums and bias is None and not relu), "sums are not for this convolution"
        task = Task(self.problem, Direction.FORWARD, bias is not None, relu, sums is not None)
        bias = None if bias is None else self._given(bias.reshape(-1), bias.size, "aligned bias", "float32")
        self._convolve(task, Operands(x, weights, y, bias, sums))

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """dx = the transposed convolution of dy with weights."""
        self._convolve(Task(self.problem, Direction.DATA), Operands(dy, weights, dx))

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy."""
        task = Task(self.problem, Direction.WEIGHTS)
        self._convolve(task, Operands(x, dy, dweights, accumulate=accumulate))

    def _convolve(self, task: Task, given: Operands) -> None:
        """Bring the arrays into the problem's dtype, run, and bring the result into its own."""
        shapes = self.problem.arrays(task.direction)
        arrays = (given.first, given.second, given.out)
        assert all(tuple(a.shape) == s for a, s in zip(arrays, shapes, strict=True)), (task.direction, self.problem)
        if not given.out.size or not given.first.size:
            return
        dtype = self.problem.array_dtype
        operands = replace(
            given,
            first=self._given(given.first, shapes[0], "converted input", dtype),
            second=self._given(given.second, shapes[1], "converted second input", dtype),
        )
        result = "float32" if task.direction is Direction.WEIGHTS else dtype
        if not fits(given.out, result):
            scratch = self._resources.scratch.get("converted output", given.out.size, result)
            operands = replace(operands, out=view(scratch, shapes[2]), accumulate=False)
        self.run(task, operands)
        if operands.out is not given.out:
            write_result(operands.out, given)

    def _given(self, array: Array, shape: Any, purpose: str, dtype: str) -> Array:
        """The array itself, or a copy in scratch memory of the right dtype."""
        if fits(array, dtype):
            return array
        copy = view(self._resources.scratch.get(purpose, array.size, dtype), tuple(array.shape))
        apply(identity, (array,), (copy,), axis=0)
        return copy


def fits(array: Array, dtype: str) -> bool:
    """Whether an array is of a dtype and begins where wide loads may."""
    return array.dtype == dtype and aligned(array)


def write_result(result: Array, operands: Operands) -> None:
    """out (+)= a result of its shape in any dtype."""
    target, source = flat(operands.out), flat(result)
    if operands.accumulate:
        apply(add_to, (target, source), (target,), axis=0)
    else:
        apply(identity, (source,), (target,), axis=0)
