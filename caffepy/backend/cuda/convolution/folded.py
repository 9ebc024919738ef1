"""Candidates of cuDNN over folded arrays.

Owns the copies between an array and its folded form (kernels/space_to_depth.cu) and when they are made.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from caffepy.backend.cuda.compiler import c_type, defines, launch, library_kernel
from caffepy.backend.cuda.convolution.cudnn import cudnn_candidates
from caffepy.backend.cuda.convolution.plan import Candidate, Operands, Resources, Source
from caffepy.backend.cuda.convolution.problem import Task
from caffepy.backend.cuda.convolution.space_to_depth import FoldedProblem, Folding, foldings
from caffepy.backend.cuda.memory import Scratch, raw, view
from caffepy.backend.types import Array


def fold(folding: Folding, array: Array, scratch: Scratch, purpose: str) -> Array:
    """The folded array in scratch memory, or the array itself if folding does not change it."""
    if folding.plain == folding.folded:
        return array
    out = view(scratch.get(purpose, math.prod(folding.folded), array.dtype.name), folding.folded)
    pack = 16 // out.itemsize
    while (folding.folded[1] // folding.width) % pack:
        pack //= 2
    kernel = library_kernel("space_to_depth", "fold", _defines(folding, array, out, pack))
    count = out.size // pack
    launch(kernel, count, (raw(array), out, folding.plain[0], count))
    return out


def unfold(folding: Folding, folded: Array, plain: Array, accumulate: bool) -> None:
    """plain (+)= what was folded."""
    assert folding.width == 1, "places put together cannot be told apart again"
    kernel = library_kernel("space_to_depth", "unfold", _defines(folding, folded, plain, 1))
    launch(kernel, plain.size, (folded, raw(plain), accumulate, plain.size))


def _defines(folding: Folding, source: Array, target: Array, pack: int) -> str:
    (_, channels, height, width), (_, folded_channels, folded_height, folded_width) = folding.plain, folding.folded
    return defines(
        In=c_type(source), Out=c_type(target), HEIGHT=height, WIDTH=width, CHANNELS=channels,
        FOLDED_HEIGHT=folded_height, FOLDED_WIDTH=folded_width, FOLDED_CHANNELS=folded_channels,
        STEP=folding.step, SHIFT_H=folding.shift[0], SHIFT_W=folding.shift[1], TOGETHER=folding.width, PACK=pack,
    )  # fmt: skip


class FoldedPlan:
    """A candidate of the folded problem between folding and unfolding.

    Args:
        task: of the plain problem.
        folded: the other problem.
        inner: carries out the task for that.
        name: the candidate's.
        resources: scratch memory.
    """

    def __init__(self, task: Task, folded: FoldedProblem, inner: Candidate, name: str, resources: Resources) -> None:
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
        a = fold(first, operands.first, scratch, "folded first")
        b = fold(second, operands.second, scratch, "folded second")
        dtype = self._task.problem.array_dtype
        if out.plain == out.folded and operands.out.dtype == dtype and not operands.accumulate:
            self._inner.run(Operands(a, b, operands.out, operands.bias, operands.sums))
            return
        result = view(scratch.get("folded result", math.prod(out.folded), dtype), out.folded)
        self._inner.run(Operands(a, b, result, operands.bias, operands.sums))
        unfold(out, result, operands.out, operands.accumulate)


def folded_sources(task: Task, resources: Resources) -> list[Source]:
    """Sources of candidates for a problem with few channels, or with odd numbers of them."""
    return [
        _source(name, task, folded, resources)
        for name, folded in foldings(task.problem, task.direction)
        if task == task.plain or folded.y.plain == folded.y.folded
    ]


def _source(name: str, task: Task, folded: FoldedProblem, resources: Resources) -> Source:
    inner_task = Task(folded.problem, task.direction, task.bias, task.relu, task.sums)

    def candidates() -> Iterator[Candidate]:
        for inner in cudnn_candidates(inner_task, resources):
            yield FoldedPlan(task, folded, inner, f"{name}{inner.name}", resources)

    return Source(name, candidates, checked=True)
