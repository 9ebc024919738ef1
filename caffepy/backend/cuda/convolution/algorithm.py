"""What all convolution algorithms share: their operands, the contract of a candidate, and the backend's resources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from caffepy.backend.cuda.compiler import aligned, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.plan_cache import PlanCache
from caffepy.backend.cuda.convolution.problem import Task
from caffepy.backend.cuda.dense import Blas
from caffepy.backend.cuda.elementwise import apply
from caffepy.backend.cuda.memory import Scratch, flat
from caffepy.backend.elementwise import Each, expression
from caffepy.backend.types import Array

UNFUSED = "unfused"
"""Name of the candidate that computes bias, ReLU or sums in a kernel after the convolution."""


@dataclass(frozen=True)
class Operands:
    """The arrays of one call: in the problem's dtype, dense and aligned, but for the float32 ones.

    Args:
        first: x, or dy for a gradient to data.
        second: the weights, or dy for a gradient to weights.
        out: y, dx, or dweights, which are float32.
        bias: float32 (num_output,).
        sums: float32 (2, num_output).
        residual: of the shape of y, added to it before the ReLU.
        accumulate: whether dweights are added to.
    """

    first: Array
    second: Array
    out: Array
    bias: Array | None = None
    sums: Array | None = None
    accumulate: bool = False
    residual: Array | None = None


class Candidate(Protocol):
    """One algorithm for one task."""

    name: str
    """Unique among the candidates of a task, and the same in every process with the same libraries."""

    def prepare(self) -> bool:
        """Compile or build what it needs; False if it cannot do the task."""

    def run(self, operands: Operands) -> None:
        """Compute the task on the current stream; `prepare` must have returned True."""


@runtime_checkable
class KeepingCandidate(Candidate, Protocol):
    """A candidate that takes long to prepare."""

    def keep(self) -> None:
        """Once it is prepared, keep what took long, for itself and later processes."""


@dataclass(frozen=True)
class AlgorithmFamily:
    """Candidates of one kind. They are listed only when needed, since listing them may ask cuDNN or compile.

    Args:
        name: what the candidates' names begin with.
        candidates: all of them, likely best first.
        last_resort: used only if no family before it can do the task.
        checked: a candidate's result must agree with that of an unchecked family before it is used.
        kept: the candidate of a name, if what takes long to prepare was kept by `KeepingCandidate.keep`.
    """

    name: str
    candidates: Callable[[], Iterable[Candidate]]
    last_resort: bool = False
    checked: bool = False
    kept: Callable[[str], Iterable[Candidate]] | None = None


class Tuner(Protocol):
    """Chooses among candidates."""

    enabled: bool
    """Whether it tries them."""

    def choose(
        self, task: Task, families: Sequence[AlgorithmFamily], operands: Operands | None, resources: Resources
    ) -> Candidate | None:
        """The prepared candidate to use for a task, None if there is none; `operands` are arrays to time it on."""


@dataclass
class Resources:
    """What the convolutions of one backend share.

    Args:
        cudnn: the frontend's module.
        handle: cuDNN's, bound to the backend's stream.
        blas: cuBLAS on that stream.
        scratch: workspaces that last for one call.
        tf32: whether products of float32 numbers may round them to TF32.
        tuner: chooses among candidates.
        deterministic: whether every run must give the same bits.
        plans: those of cuDNN that earlier processes have kept.
    """

    cudnn: Any
    handle: Any
    blas: Blas
    scratch: Scratch
    tf32: bool
    tuner: Tuner
    deterministic: bool = True
    plans: PlanCache | None = None


@expression
def identity(x: Each) -> Each:
    return x


@expression
def add_to(total: Each, value: Each) -> Each:
    return total + value


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


def sum_parts(parts: Array, out: Array, number: int, accumulate: bool) -> None:
    """out (+)= the sum of so many arrays of its size that lie behind one another, always in the same order."""
    kernel = library_kernel("split_k", "sum_parts")
    launch_blocks(kernel, (-(-out.size // 32),), (32, 8), (parts, out, out.size, number, accumulate))
