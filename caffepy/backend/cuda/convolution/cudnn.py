"""Candidates that are plans of cuDNN: over the blobs as they lie, group by group, over NCHW copies.

Owns how a plan is built and run, and its workspace.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator

from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, identity, write_result
from caffepy.backend.cuda.convolution.cudnn_graph import (
    BIAS,
    FIRST,
    MAX_COMPILED,
    MAX_PLANS,
    OUT,
    RESIDUAL,
    SECOND,
    SQUARES,
    SUM,
    CudnnGraph,
    Plans,
)
from caffepy.backend.cuda.convolution.problem import Direction, Task
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.elementwise.launch import apply
from caffepy.backend.cuda.memory import Scratch
from caffepy.backend.layout import CHANNELS_LAST, view
from caffepy.backend.types import Array

logger = logging.getLogger(__name__)

ROUNDED_BIAS = f"{Plans.READY.value} rounded bias"
"""What the names of plans with a rounded bias begin with."""

MAX_SPLIT_GROUPS = 8
"""Groups up to which one convolution for each may be faster than cuDNN's engines for groups."""


class CudnnPlan:
    """A candidate: one plan of a graph, run once for each of its groups.

    Args:
        graph: a graph that was built, or loaded.
        index: the plan's number there.
        name: the candidate's.
        built: whether the plan is, because the graph was loaded with it.
    """

    def __init__(self, graph: CudnnGraph, index: int, name: str, built: bool = False) -> None:
        self.name = name
        self._graph = graph
        self.index = index
        self._built = built
        self._size = 0
        self.is_usable = False
        """Whether `prepare` was called and went well."""

    def prepare(self) -> bool:
        """Build the plan; False if it is barred or cannot be built."""
        graph = self._graph.graph
        try:
            if not self._built:
                graph.build_plan_at_index(self.index)
        except (self._graph.resources.cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
            return False  # of a barred plan: a RuntimeError, from release 1.27 on a ValueError
        self._size = int(graph.get_workspace_size_plan_at_index(self.index))
        self._workspace()
        self.is_usable = True
        return True

    def keep(self) -> None:
        """Keep the plan, once prepared, for other processes.

        Not one with a ReLU: float32 plans that were read hid NaN, which those that were built pass on.
        """
        plans = self._graph.resources.plans
        if self._built or plans is None or self._graph.task.relu:
            return
        try:
            plans.write(self._graph.kept_as(self.name), self._graph.serialised(self.index))
        except (self._graph.resources.cudnn.cudnnGraphNotSupportedError, RuntimeError, AttributeError) as error:
            logger.debug("%s is not kept: %s", self.name, error)

    def _workspace(self) -> Array:
        return self._graph.resources.scratch.get("cuDNN workspace", self._size, "uint8")

    def run(self, operands: Operands) -> None:
        """Execute the plan; weight gradients that cuDNN does not write as they are wanted go through scratch memory."""
        task, scratch = self._graph.task, self._graph.resources.scratch
        dtype = task.problem.array_dtype
        if task.direction is not Direction.WEIGHTS or (operands.out.dtype == dtype and not operands.accumulate):
            self._execute(operands, operands.out)
            return
        shape = task.problem.weights
        gradient = view(scratch.get("weight gradient", math.prod(shape), dtype), shape)
        self._execute(operands, gradient)
        write_result(gradient, operands)

    def _execute(self, operands: Operands, out: Array) -> None:
        graph = self._graph
        pointers = {FIRST: operands.first.data.ptr, SECOND: operands.second.data.ptr, OUT: out.data.ptr}
        if operands.bias is not None and graph.task.bias:
            bias = operands.bias
            if graph.rounded_bias:
                rounded = graph.resources.scratch.get("rounded bias", bias.size, graph.task.problem.array_dtype)
                apply(identity, (bias,), (rounded,), axis=0)
                bias = rounded
            pointers[BIAS] = bias.data.ptr
        if operands.sums is not None and graph.task.sums:
            pointers[SUM] = operands.sums.data.ptr
            pointers[SQUARES] = operands.sums.data.ptr + operands.sums.nbytes // 2
        if operands.residual is not None and graph.task.residual:
            pointers[RESIDUAL] = operands.residual.data.ptr
        workspace = self._workspace().data.ptr
        steps = {uid: self._step(uid) for uid in pointers}
        for group in range(graph.groups):
            addresses = {uid: pointer + group * steps[uid] for uid, pointer in pointers.items()}
            graph.graph.execute_plan_at_index(addresses, workspace, self.index, handle=graph.resources.handle)

    def _step(self, uid: int) -> int:
        """Bytes from one group's part of a tensor to the next one's."""
        task, groups = self._graph.task, self._graph.groups
        problem = task.problem
        item = int(cupy.dtype(problem.array_dtype).itemsize)
        x, y = problem.x[1] // groups, problem.weights[0] // groups
        weights = math.prod(problem.weights) // groups
        by_direction = {Direction.FORWARD: (x, weights, y), Direction.DATA: (y, weights, x)}
        first, second, out = by_direction.get(task.direction, (x, y, weights))
        bias = y * (item if self._graph.rounded_bias else 4)
        steps = {FIRST: first * item, SECOND: second * item, OUT: out * item, BIAS: bias, RESIDUAL: out * item}
        return steps.get(uid, 0)


def rounds_bias(task: Task) -> bool:
    """Whether there are plans that take the bias in the problem's dtype beside those that take it in float32."""
    return task.bias and task.problem.dtype != "float32"


def cudnn_candidates(
    task: Task,
    resources: Resources,
    kind: Plans = Plans.READY,
    rounded: bool | None = None,
    kept: str | None = None,
) -> Iterator[CudnnPlan]:
    """Plans over the blobs as they lie: channels last for two and three spatial axes.

    Args:
        task: what to compute.
        resources: cuDNN and scratch memory.
        kind: of the plans.
        rounded: those with a rounded bias, or those without; None: both.
        kept: the one candidate that is wanted, if it was kept.
    """
    problem = task.problem
    if len(problem.x) not in (3, 4, 5) or (task.sums and problem.weights[0] % 4):
        return
    last = len(problem.x) in CHANNELS_LAST
    if rounds_bias(task) and kind is Plans.READY and rounded is not False:
        yield from _plans(CudnnGraph(task, resources, last, rounded_bias=True), kind, f"{ROUNDED_BIAS} ", kept)
    if rounded is not True:
        yield from _plans(CudnnGraph(task, resources, last), kind, f"{kind.value} ", kept)


def split_candidates(task: Task, resources: Resources, kept: str | None = None) -> Iterator[CudnnPlan]:
    """Plans that compute one group, run for each: faster than cuDNN's engines for a few large groups."""
    problem = task.problem
    item = 4 if problem.dtype == "float32" else 2
    groups = problem.geometry.group
    sizes = (problem.x[1] // groups, problem.weights[0] // groups)
    aligned = all(size * item % 16 == 0 for size in sizes)
    if len(problem.x) in CHANNELS_LAST and 1 < groups <= MAX_SPLIT_GROUPS and aligned:
        graph = CudnnGraph(task, resources, True, split=True, rounded_bias=rounds_bias(task))
        yield from _plans(graph, Plans.READY, "split cuDNN ", kept)


def _plans(graph: CudnnGraph, kind: Plans, prefix: str, kept: str | None = None) -> Iterator[CudnnPlan]:
    if kept is not None:
        yield from _kept_plan(graph, prefix, kept)
    else:
        yield from _proposed_plans(graph, kind, prefix)


def _proposed_plans(graph: CudnnGraph, kind: Plans, prefix: str) -> Iterator[CudnnPlan]:
    """Plans until enough of them could be prepared; the slower heuristics are asked where the faster have too few."""
    most = MAX_COMPILED if kind is Plans.COMPILED else MAX_PLANS
    seen: set[str] = set()
    usable = 0
    for several in (False, True) if kind is Plans.READY else (True,):
        if several and seen:
            graph = graph.again()
        for index, name in graph.names(kind) if graph.build(kind, several) else ():
            if name not in seen:
                seen.add(name)
                plan = CudnnPlan(graph, index, prefix + name)
                yield plan
                usable += plan.is_usable
                if usable == most:
                    return


def _kept_plan(graph: CudnnGraph, prefix: str, name: str) -> Iterator[CudnnPlan]:
    plans = graph.resources.plans
    if plans is not None and name.startswith(prefix):
        plan = plans.read(graph.kept_as(name))
        if plan is not None and graph.load(plan):
            yield CudnnPlan(graph, 0, name, built=True)


class CopiedCudnn:
    """cuDNN over copies in NCHW order, for shapes that its channels-last engines do not take.

    Args:
        task: a plain task.
        resources: cuDNN and scratch memory.
    """

    name = "copied"

    def __init__(self, task: Task, resources: Resources) -> None:
        self._task = task
        self._resources = resources
        self._plan: CudnnPlan | None = None

    def prepare(self) -> bool:
        """Build the first plan that can be built."""
        if self._plan is None:
            self._plan = next((plan for plan in self._plans() if plan.prepare()), None)
        return self._plan is not None

    def _plans(self) -> Iterator[CudnnPlan]:
        graph = CudnnGraph(self._task, self._resources, channels_last=False)
        yield from _kept_plan(graph, self.name, self.name)
        for kind in (Plans.READY, Plans.FALLBACK):
            for plan in _plans(graph, kind, ""):
                plan.name = self.name
                yield plan

    def keep(self) -> None:
        """Keep the plan, once prepared."""
        assert self._plan is not None
        self._plan.keep()

    def run(self, operands: Operands) -> None:
        assert self._plan is not None
        scratch, task = self._resources.scratch, self._task
        first = channels_first(operands.first, scratch, "first NCHW copy")
        second = channels_first(operands.second, scratch, "second NCHW copy")
        shape = task.problem.arrays(task.direction)[2]
        result = scratch.get("NCHW result", math.prod(shape), task.problem.array_dtype).reshape(shape)
        self._plan.run(Operands(first, second, result))
        if task.direction is Direction.WEIGHTS:
            in_order = view(scratch.get("weight gradient", math.prod(shape), task.problem.array_dtype), shape)
            cupy.copyto(in_order, result)
            write_result(in_order, operands)
        else:
            cupy.copyto(operands.out, result)


def channels_first(array: Array, scratch: Scratch, purpose: str) -> Array:
    """A copy in C order, in scratch memory."""
    copy = scratch.get(purpose, array.size, array.dtype.name).reshape(array.shape)
    cupy.copyto(copy, array)
    return copy
