"""cuDNN candidates for equivalent problems: rearrange inputs (kernels/space_to_depth.cu), compute, rearrange back."""

from __future__ import annotations

import math
from collections.abc import Iterator

from caffepy.backend.cuda.compiler import c_type, defines, launch, library_kernel
from caffepy.backend.cuda.convolution.algorithm import (
    AlgorithmFamily,
    Candidate,
    KeepingCandidate,
    Operands,
    Resources,
)
from caffepy.backend.cuda.convolution.cudnn import cudnn_candidates
from caffepy.backend.cuda.convolution.problem import Task
from caffepy.backend.cuda.convolution.space_to_depth import EquivalentProblem, SpaceToDepth, equivalent_problems
from caffepy.backend.cuda.memory import Scratch, raw
from caffepy.backend.layout import view
from caffepy.backend.types import Array


def rearrange(change: SpaceToDepth, array: Array, scratch: Scratch, purpose: str) -> Array:
    """The rearranged array in scratch memory, or the array itself if there is nothing to change."""
    if change.source == change.target:
        return array
    out = view(scratch.get(purpose, math.prod(change.target), array.dtype.name), change.target)
    pack = 16 // out.itemsize
    while (change.target[1] // change.row) % pack:
        pack //= 2
    kernel = library_kernel("space_to_depth", "fold", _defines(change, array, out, pack))
    count = out.size // pack
    launch(kernel, count, (raw(array), out, change.source[0], count))
    return out


def restore(change: SpaceToDepth, rearranged: Array, target: Array, accumulate: bool) -> None:
    """target (+)= the array that `rearranged` was made of."""
    assert change.row == 1, "gathered rows overlap: they have no inverse"
    kernel = library_kernel("space_to_depth", "unfold", _defines(change, rearranged, target, 1))
    launch(kernel, target.size, (rearranged, raw(target), accumulate, target.size))


def _defines(change: SpaceToDepth, source: Array, target: Array, pack: int) -> str:
    (_, channels, height, width), (_, out_channels, out_height, out_width) = change.source, change.target
    return defines(
        In=c_type(source), Out=c_type(target), HEIGHT=height, WIDTH=width, CHANNELS=channels,
        FOLDED_HEIGHT=out_height, FOLDED_WIDTH=out_width, FOLDED_CHANNELS=out_channels,
        STEP=change.block, SHIFT_H=change.pad[0], SHIFT_W=change.pad[1], TOGETHER=change.row, PACK=pack,
    )  # fmt: skip


class SpaceToDepthCandidate:
    """A candidate for an equivalent problem, between copies of its arrays.

    Args:
        task: of the original problem.
        equivalent: the problem that is computed.
        inner: computes the same task of that problem.
        name: the candidate's.
        resources: scratch memory.
    """

    def __init__(
        self, task: Task, equivalent: EquivalentProblem, inner: KeepingCandidate, name: str, resources: Resources
    ) -> None:
        self.name = name
        self._task = task
        self._equivalent = equivalent
        self._inner = inner
        self._resources = resources
        self.prepare = inner.prepare
        self.keep = inner.keep

    def run(self, operands: Operands) -> None:
        first, second, out = self._equivalent.arrays(self._task.direction)
        scratch = self._resources.scratch
        a = rearrange(first, operands.first, scratch, "rearranged first")
        b = rearrange(second, operands.second, scratch, "rearranged second")
        dtype = self._task.problem.array_dtype
        if out.source == out.target and operands.out.dtype == dtype and not operands.accumulate:
            self._inner.run(Operands(a, b, operands.out, operands.bias, operands.sums))
            return
        result = view(scratch.get("rearranged result", math.prod(out.target), dtype), out.target)
        self._inner.run(Operands(a, b, result, operands.bias, operands.sums))
        restore(out, result, operands.out, operands.accumulate)


def space_to_depth_families(task: Task, resources: Resources) -> list[AlgorithmFamily]:
    """A family for each equivalent problem: there are some where channels are few or odd in number."""
    return [_family(name, task, equivalent, resources) for name, equivalent in _equivalents(task)]


def _equivalents(task: Task) -> Iterator[tuple[str, EquivalentProblem]]:
    for name, equivalent in equivalent_problems(task.problem, task.direction):
        if task == task.plain or equivalent.y.source == equivalent.y.target:
            yield name, equivalent


def _family(name: str, task: Task, equivalent: EquivalentProblem, resources: Resources) -> AlgorithmFamily:
    inner_task = Task(equivalent.problem, task.direction, task.bias, task.relu, task.sums)

    def candidates(kept: str | None = None) -> Iterator[Candidate]:
        inner_name = None if kept is None else kept.removeprefix(name)
        for inner in cudnn_candidates(inner_task, resources, kept=inner_name):
            yield SpaceToDepthCandidate(task, equivalent, inner, f"{name}{inner.name}", resources)

    return AlgorithmFamily(name, candidates, checked=True, kept=candidates)
