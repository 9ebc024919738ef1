"""Interfaces of convolution algorithms: operands, candidates, and the backend's shared resources."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from caffepy.backend.cuda.compiler import aligned, launch_blocks, library_kernel
from caffepy.backend.cuda.convolution.cache import PlanCache
from caffepy.backend.cuda.convolution.problem import Task
from caffepy.backend.cuda.expression import apply
from caffepy.backend.cuda.gemm import Blas
from caffepy.backend.cuda.memory import Scratch, flat
from caffepy.backend.formulas import identity, total
from caffepy.backend.types import Array

UNFUSED = "unfused"
"""Name of the candidate that computes bias, ReLU or sums in a separate kernel."""


@dataclass(frozen=True)
class Operands:
    """The arrays of one call: in the problem's dtype, dense and aligned, unless stated as float32.

    Args:
        first: x, or dy for a data gradient.
        second: the weights, or dy for a weight gradient.
        out: y, dx, or dweights (float32).
        bias: float32 (num_output,).
        sums: float32 (2, num_output).
        residual: of y's shape, added to y before the ReLU.
        accumulate: whether to add to dweights.
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
    """Unique among a task's candidates, and the same in every process with the same libraries."""

    def prepare(self) -> bool:
        """Compile or build kernels. Return False if the candidate does not support the task."""

    def run(self, operands: Operands) -> None:
        """Compute the task on the current stream; `prepare` must have returned True."""


@runtime_checkable
class KeepingCandidate(Candidate, Protocol):
    """A candidate with expensive, cacheable preparation."""

    def keep(self) -> None:
        """Store the prepared result for this and later processes."""


@dataclass(frozen=True)
class AlgorithmFamily:
    """Candidates of one kind. The list is created lazily, because it may query cuDNN or compile.

    Args:
        name: prefix of the candidates' names.
        candidates: all candidates, likely best first.
        last_resort: use it only if no earlier family supports the task.
        checked: compare a candidate's result with that of an unchecked family before use.
        kept: the candidate of a name, if `KeepingCandidate.keep` stored its preparation.
    """

    name: str
    candidates: Callable[[], Iterable[Candidate]]
    last_resort: bool = False
    checked: bool = False
    kept: Callable[[str], Iterable[Candidate]] | None = None


class Tuner(Protocol):
    """Chooses among candidates."""

    enabled: bool
    """Whether candidates are timed."""

    def will_time(self, task: Task, resources: Resources) -> bool:
        """Return whether `choose` will time the candidates of a task."""

    def choose(
        self, task: Task, families: Sequence[AlgorithmFamily], operands: Operands | None, resources: Resources
    ) -> Candidate | None:
        """Return the prepared candidate for a task, or None; `operands` are arrays to time it on."""


@dataclass
class Resources:
    """Resources shared by the convolutions of one backend.

    Args:
        cudnn: the frontend's module.
        handle: cuDNN's handle, bound to the backend's stream.
        blas: cuBLAS on that stream.
        scratch: workspaces valid within one call.
        tf32: whether products of float32 numbers may use TF32.
        tuner: chooses among candidates.
        deterministic: whether every run must give the same bits.
        plans: cuDNN plans stored by earlier processes.
        compiled: tasks whose own kernels are compiled, with the kernels' form.
    """

    cudnn: Any
    handle: Any
    blas: Blas
    scratch: Scratch
    tf32: bool
    tuner: Tuner
    deterministic: bool = True
    plans: PlanCache | None = None
    compiled: set[tuple[Task, str]] = field(default_factory=set)


def fits(array: Array, dtype: str) -> bool:
    """Return whether an array has the dtype and the alignment for wide loads."""
    return array.dtype == dtype and aligned(array)


def write_result(result: Array, operands: Operands) -> None:
    """out (+)= a result of its shape in any dtype."""
    target, source = flat(operands.out), flat(result)
    if operands.accumulate:
        apply(total, (target, source), (target,), axis=0)
    else:
        apply(identity, (source,), (target,), axis=0)


def sum_parts(parts: Array, out: Array, number: int, accumulate: bool) -> None:
    """out (+)= the sum of `number` contiguous arrays of its size, always in the same order."""
    kernel = library_kernel("split_k", "sum_parts")
    launch_blocks(kernel, (-(-out.size // 32),), (32, 8), (parts, out, out.size, number, accumulate))
