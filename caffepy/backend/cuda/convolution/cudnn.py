"""Convolutions by cuDNN: over the blobs in place, group by group, or over NCHW copies.

Builds and runs plans, with their workspace and operation graphs: tensors, fusion into a forward pass, and the allowed
engines. Engines that round to TF32 are excluded in fp32 mode, as are engines that declare themselves
non-deterministic. Engines for sums do not declare it, yet their sums differ from run to run in the last bits (cuDNN
9.19, all plans at ResNet-50's shapes, sixty runs each, on an H200). They are used only by backends that need not be
deterministic. Behaviour: NVIDIA's cuDNN frontend 1.x.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from enum import Enum
from functools import cache
from typing import Any

from caffepy.backend.cuda.convolution.algorithm import Operands, Resources, write_result
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, suits_depthwise
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.expression import apply
from caffepy.backend.cuda.memory import Scratch
from caffepy.backend.formulas import identity
from caffepy.backend.types import CHANNELS_LAST, Array, convolution_workspace, view

logger = logging.getLogger(__name__)

MAX_PLANS = 10
"""Maximum candidates per graph, excluding barred plans: the best of them is at most 0.1 % slower than the best of
twenty (ResNet-50 and MobileNet in FLOAT16 on an H200, total of all tasks)."""

MAX_COMPILED = 3
"""The same for plans that cuDNN compiles at run time, in about 0.3 s each."""

MAX_BESIDE_OWN = 3
"""Maximum ready plans for depthwise convolutions, which have own kernels: cuDNN takes 0.1 to 0.6 s to load each."""

FIRST, SECOND, OUT, BIAS, SUM, SQUARES, RESIDUAL = 1, 2, 3, 4, 5, 6, 7
"""Identifiers of a graph's tensors."""

_INEXACT = (
    "TENSOR_CORE",
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
"""Numerical notes of engines that deviate from float32 arithmetic by more than its rounding."""
_INEXACT_FOR_TF32 = (
    "DOWN_CONVERT_INPUTS",
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)
_INEXACT_FOR_HALF = (
    "REDUCED_PRECISION_REDUCTION",
    "FFT",
    "WINOGRAD",
    "WINOGRAD_TILE_4x4",
    "WINOGRAD_TILE_6x6",
    "WINOGRAD_TILE_13x13",
)

_UNDECLARED = {Direction.WEIGHTS: ["eng17_", "eng67_"]}
"""Engines without these notes that nevertheless miss float32 accuracy: the first by up to 9e-3 of the largest value,
the second by up to 3e-5 (cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50)."""


def strides_of(shape: tuple[int, ...], channels_last: bool, pitch: int | None = None) -> list[int]:
    """Return element strides of (N, C, spatial...) stored as N, C, spatial... or N, spatial..., C."""
    order = [0, *range(2, len(shape)), 1] if channels_last else list(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= pitch if axis == 1 and channels_last and pitch else shape[axis]
    return strides


def _at_least_four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Append spatial axes of size 1: cuDNN requires two, and (N, C, 1, W) has the memory layout of (N, C, W)."""
    return shape if len(shape) > 3 else (shape[0], shape[1], 1, shape[2])


class PlanKind(Enum):
    """Kinds of plans that cuDNN proposes."""

    READY = "cuDNN"  # heuristics, precompiled kernels
    COMPILED = "compiled cuDNN"  # heuristics, kernels compiled at run time
    FALLBACK = "fallback cuDNN"  # generic engines, mostly slow


@cache
def _warn_of_mixed_releases(version: int) -> None:
    """Say once per process that cuDNN is not usable."""
    logger.warning(
        "cuDNN %d cannot load its libraries, so convolutions run without it, several times slower; mostly two releases "
        "are mixed: compare the folders of LD_LIBRARY_PATH with `pip list | grep cudnn`, and leave one of them",
        version,
    )


class CudnnGraph:
    """One operation graph with the plans that heuristics propose for it.

    Args:
        task: the task to compute.
        resources: cuDNN, and the allowed rounding of products.
        channels_last: memory order of the arrays.
        split: compute one group, as a channel range of the whole arrays.
        rounded_bias: pass the bias in the problem's dtype, which more engines support.
    """

    def __init__(
        self, task: Task, resources: Resources, channels_last: bool, split: bool = False, rounded_bias: bool = False
    ) -> None:
        self.task = task
        self.resources = resources
        self._split = split
        self.groups = task.problem.geometry.group if split else 1
        self.rounded_bias = rounded_bias
        self._channels_last = channels_last
        cudnn = resources.cudnn
        types = {"float32": "FLOAT", "float16": "HALF", "bfloat16": "BFLOAT16"}
        self._type = getattr(cudnn.data_type, types[task.problem.dtype])
        self.graph: Any = None

    def build(self, kind: PlanKind, several: bool = True) -> bool:
        """Build the graph and request plans. Return False if cuDNN has none.

        Args:
            kind: kind of plans.
            several: use both heuristics, not only the faster one, whose plans come first.
        """
        if kind is not PlanKind.READY and self._has_ambiguous_strides():
            return False
        cudnn = self.resources.cudnn
        modes = [cudnn.heur_mode.FALLBACK] if kind is PlanKind.FALLBACK else [cudnn.heur_mode.A, cudnn.heur_mode.B]
        modes = modes if several else modes[:1]
        single = cudnn.data_type.FLOAT
        graph = self.graph = cudnn.pygraph(
            io_data_type=self._type,
            intermediate_data_type=single,
            compute_data_type=single,
            handle=self.resources.handle,
        )
        try:
            self._describe(graph)
            graph.validate()
            graph.build_operation_graph()
            # Pass all notes in one call: release 1.18 confuses the notes of separate calls.
            graph.create_execution_plans(modes)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError) as error:
            if "SUBLIBRARY" in str(error):
                _warn_of_mixed_releases(cudnn.backend_version())
            return False
        self._bar(graph)
        return True

    def _has_ambiguous_strides(self) -> bool:
        """Return whether an image has one element for each channel, and the others are NCHW.

        The strides of one element fit both memory orders. Engines that cuDNN compiles and fallback engines then read
        wrong elements or beyond the arrays (9.19: engines 4, 7, 71 and 78 on an H200).
        """
        problem = self.task.problem
        return not self._channels_last and any(math.prod(shape[2:]) == 1 for shape in (problem.x, problem.y))

    def again(self) -> CudnnGraph:
        """Return the same graph, not built; this graph's plans stay valid."""
        return CudnnGraph(self.task, self.resources, self._channels_last, self._split, self.rounded_bias)

    def _bar(self, graph: Any) -> None:
        cudnn, task = self.resources.cudnn, self.task
        notes: tuple[str, ...]
        if task.problem.dtype != "float32":
            notes = _INEXACT_FOR_HALF
        else:
            notes = _INEXACT_FOR_TF32 if self.resources.tf32 else _INEXACT
            graph.deselect_engines([] if self.resources.tf32 else _UNDECLARED.get(task.direction, []))
        graph.deselect_numeric_notes([getattr(cudnn.numerical_note, name) for name in (*notes, "NONDETERMINISTIC")])
        # A workspace stays allocated for the whole run, and would take memory from the batch.
        graph.deselect_workspace_greater_than(self._most_workspace())

    def _most_workspace(self) -> int:
        """Return the maximum workspace bytes of a plan."""
        problem = self.task.problem
        item = 4 if problem.dtype == "float32" else 2
        return convolution_workspace(sum(math.prod(shape) for shape in problem.arrays(self.task.direction)) * item)

    def serialised(self, index: int) -> bytes:
        """Serialise a built plan for `load`.

        Raises:
            RuntimeError: cuDNN cannot serialise it.
        """
        self.graph.build_plan_at_index(index)  # `serialize` applies to the last plan built
        return bytes(self.graph.serialize())

    def load(self, plan: bytes) -> bool:
        """Load one serialised plan as number 0, instead of `build`. Return False if it is unusable."""
        if self._has_ambiguous_strides():
            return False  # a stored plan does not tell its kind, and earlier releases stored compiled ones
        cudnn = self.resources.cudnn
        graph = self.graph = cudnn.pygraph(handle=self.resources.handle)
        try:
            graph.deserialize(self.resources.handle, bytearray(plan))
            return self._is_of_this_task(graph)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.debug("a stored cuDNN plan cannot be used: %s", error)
            return False

    def _is_of_this_task(self, graph: Any) -> bool:
        """Return whether a deserialised graph has this graph's tensors and an allowed workspace."""
        for position, (uid, shape) in enumerate(zip((FIRST, SECOND, OUT), self._shapes(), strict=True)):
            tensor = graph.query_tensor_attributes_of_uid(uid)
            lies = (list(tensor.get_dim()), list(tensor.get_stride()), tensor.get_data_type())
            # A stored file is not trusted: a plan for other shapes would write beyond the arrays.
            if lies != (list(shape), self._strides(shape, position), self._type):
                return False
        return 0 <= int(graph.get_workspace_size_plan_at_index(0)) <= self._most_workspace()

    def kept_as(self, name: str) -> str:
        """Return the cache key of a plan: everything that the graph depends on, and the plan's name."""
        layout = f"{'NHWC' if self._channels_last else 'NCHW'} parts {self.groups} rounded {self.rounded_bias}"
        return f"{self.task} tf32 {self.resources.tf32} {layout}; {name}"

    def names(self, kind: PlanKind) -> Iterator[tuple[int, str]]:
        """Yield number and name of each plan of a kind, without duplicates."""
        seen = set()
        for index in range(self.graph.get_execution_plan_count()):
            if kind is PlanKind.FALLBACK or self._is_compiled(index) is (kind is PlanKind.COMPILED):
                name = self.graph.get_plan_name_at_index(index)
                if name not in seen:
                    seen.add(name)
                    yield index, name

    def _is_compiled(self, index: int) -> bool:
        notes = self.graph.get_behavior_notes_for_plan_at_index(index)
        return self.resources.cudnn.behavior_note.RUNTIME_COMPILATION in notes

    def _shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the two inputs and the output, or of one group's part if split."""
        problem, groups = self.task.problem, self.groups
        one = Problem(
            (problem.x[0], problem.x[1] // groups, *problem.x[2:]),
            (problem.weights[0] // groups, *problem.weights[1:]),
            problem.geometry,
        )
        return [_at_least_four(shape) for shape in one.arrays(self.task.direction)]

    def _strides(self, shape: tuple[int, ...], position: int) -> list[int]:
        is_weights = position == (2 if self.task.direction is Direction.WEIGHTS else 1)
        return strides_of(shape, self._channels_last, shape[1] * (1 if is_weights else self.groups))

    def _describe(self, graph: Any) -> None:
        """Add operations and tensors to an empty graph."""
        shapes = self._shapes()
        first, second = (
            graph.tensor(
                name=name, dim=list(shapes[i]), stride=self._strides(shapes[i], i), data_type=self._type, uid=uid
            )
            for i, (name, uid) in enumerate((("first", FIRST), ("second", SECOND)))
        )
        window = self._window()
        if self.task.direction is Direction.FORWARD:
            out = self._finished(graph, graph.conv_fprop(image=first, weight=second, **window), shapes[2])
        elif self.task.direction is Direction.DATA:
            out = graph.conv_dgrad(loss=first, filter=second, **window)
        else:
            out = graph.conv_wgrad(image=first, loss=second, **window)
        out.set_output(True).set_uid(OUT).set_data_type(self._type)
        out.set_dim(list(shapes[2])).set_stride(self._strides(shapes[2], 2))

    def _finished(self, graph: Any, out: Any, shape: tuple[int, ...]) -> Any:
        """Add the forward pass's epilogue: bias, residual and ReLU, or channel sums."""
        single = self.resources.cudnn.data_type.FLOAT
        channels = [1, shape[1], *(1,) * (len(shape) - 2)]
        strides = strides_of(tuple(channels), True)
        out.set_dim(list(shape)).set_stride(self._strides(shape, 2))
        if self.task.sums:
            out.set_data_type(self._type)
            for tensor, uid in zip(graph.genstats(input=out, compute_data_type=single), (SUM, SQUARES), strict=True):
                tensor.set_output(True).set_uid(uid).set_data_type(single).set_dim(channels).set_stride(strides)
        if self.task.bias:
            kind = self._type if self.rounded_bias else single
            bias = graph.tensor(name="bias", dim=channels, stride=strides, data_type=kind, uid=BIAS)
            out.set_data_type(single)
            out = graph.add(a=out, b=bias, compute_data_type=single)
        if self.task.residual:
            lies = {"dim": list(shape), "stride": self._strides(shape, 2)}
            residual = graph.tensor(name="residual", data_type=self._type, uid=RESIDUAL, **lies)
            out.set_data_type(single)
            out = graph.add(a=out, b=residual, compute_data_type=single)
        if self.task.relu:
            out.set_data_type(single)
            out = graph.relu(input=out, compute_data_type=single)
        return out

    def _window(self) -> dict[str, Any]:
        g = self.task.problem.geometry
        unit = [1] if len(g.kernel) == 1 else []
        zero = [0] if len(g.kernel) == 1 else []
        return {
            "padding": zero + list(g.pad),
            "stride": unit + list(g.stride),
            "dilation": unit + list(g.dilation),
            "compute_data_type": self.resources.cudnn.data_type.FLOAT,
        }


ROUNDED_BIAS = f"{PlanKind.READY.value} rounded bias"
"""Name prefix of plans with a rounded bias."""

MAX_SPLIT_GROUPS = 8
"""Maximum groups for which one convolution per group may beat cuDNN's grouped engines."""


class CudnnPlan:
    """A candidate: one plan of a graph, run once per group.

    Args:
        graph: a built or loaded graph.
        index: number of the plan in the graph.
        name: the candidate's name.
        built: whether the plan is built, as in a loaded graph.
    """

    def __init__(self, graph: CudnnGraph, index: int, name: str, built: bool = False) -> None:
        self.name = name
        self._graph = graph
        self.index = index
        self._built = built
        self._size = 0
        self.is_usable = False
        """Whether `prepare` succeeded."""

    def prepare(self) -> bool:
        """Build the plan. Return False if it is barred or cannot be built."""
        graph = self._graph.graph
        try:
            if not self._built:
                graph.build_plan_at_index(self.index)
        except (self._graph.resources.cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
            return False  # a barred plan raises RuntimeError, from release 1.27 on ValueError
        self._size = int(graph.get_workspace_size_plan_at_index(self.index))
        # Taken now, because a capture must not allocate.
        self._workspace()
        self.is_usable = True
        return True

    def keep(self) -> None:
        """Store the prepared plan for other processes.

        Plans with a ReLU are not stored: deserialised, float32 plans lose NaN.
        """
        plans = self._graph.resources.plans
        if self._built or plans is None or self._graph.task.relu:
            return
        try:
            plans.write(self._graph.kept_as(self.name), self._graph.serialised(self.index))
        except (self._graph.resources.cudnn.cudnnGraphNotSupportedError, RuntimeError, AttributeError) as error:
            logger.debug("%s is not stored: %s", self.name, error)

    def _workspace(self) -> Array:
        return self._graph.resources.scratch.get("cuDNN workspace", self._size, "uint8")

    def run(self, operands: Operands) -> None:
        """Execute the plan. Weight gradients in another dtype or order than dweights pass through scratch memory."""
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
        """Return the bytes between two groups' parts of a tensor."""
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
    """Return whether there are separate plans with the bias in the problem's dtype and in float32."""
    return task.bias and task.problem.dtype != "float32"


def cudnn_candidates(
    task: Task,
    resources: Resources,
    kind: PlanKind = PlanKind.READY,
    rounded: bool | None = None,
    kept: str | None = None,
) -> Iterator[CudnnPlan]:
    """Yield plans over the blobs in place: channels last for two and three spatial axes.

    Args:
        task: the task to compute.
        resources: cuDNN and scratch memory.
        kind: kind of plans.
        rounded: with a rounded bias, or without; None: both.
        kept: name of the only wanted candidate, if it is in the plan cache.
    """
    problem = task.problem
    if len(problem.x) not in (3, 4, 5) or (task.sums and problem.weights[0] % 4):
        return
    last = len(problem.x) in CHANNELS_LAST
    if rounds_bias(task) and kind is PlanKind.READY and rounded is not False:
        yield from _plans(CudnnGraph(task, resources, last, rounded_bias=True), kind, f"{ROUNDED_BIAS} ", kept)
    if rounded is not True:
        yield from _plans(CudnnGraph(task, resources, last), kind, f"{kind.value} ", kept)


def split_candidates(task: Task, resources: Resources, kept: str | None = None) -> Iterator[CudnnPlan]:
    """Yield plans for one group, run once per group: faster than grouped engines for a few large groups."""
    problem = task.problem
    item = 4 if problem.dtype == "float32" else 2
    groups = problem.geometry.group
    sizes = (problem.x[1] // groups, problem.weights[0] // groups)
    aligned = all(size * item % 16 == 0 for size in sizes)
    if len(problem.x) in CHANNELS_LAST and 1 < groups <= MAX_SPLIT_GROUPS and aligned:
        graph = CudnnGraph(task, resources, True, split=True, rounded_bias=rounds_bias(task))
        yield from _plans(graph, PlanKind.READY, "split cuDNN ", kept)


def _plans(graph: CudnnGraph, kind: PlanKind, prefix: str, kept: str | None = None) -> Iterator[CudnnPlan]:
    if kept is not None:
        yield from _kept_plan(graph, prefix, kept)
    else:
        yield from _proposed_plans(graph, kind, prefix)


def _proposed_plans(graph: CudnnGraph, kind: PlanKind, prefix: str) -> Iterator[CudnnPlan]:
    """Yield plans until enough could be prepared; query the slow heuristics if the fast ones give too few."""
    ready = MAX_BESIDE_OWN if suits_depthwise(graph.task) else MAX_PLANS
    most = MAX_COMPILED if kind is PlanKind.COMPILED else ready
    seen: set[str] = set()
    usable = 0
    # The second heuristic takes long; it is asked only if the first one gives too few plans.
    for several in (False, True) if kind is PlanKind.READY else (True,):
        if several and seen:
            # Another graph, because plans of the first one may be among the candidates already.
            graph = graph.again()
        for index, name in graph.names(kind) if graph.build(kind, several) else ():
            if name not in seen:
                seen.add(name)
                plan = CudnnPlan(graph, index, prefix + name)
                yield plan
                usable += plan.is_usable
                # Counted when the caller has prepared the plan: a barred one does not use up the limit.
                if usable == most:
                    return


def _kept_plan(graph: CudnnGraph, prefix: str, name: str) -> Iterator[CudnnPlan]:
    plans = graph.resources.plans
    if plans is not None and name.startswith(prefix):
        plan = plans.read(graph.kept_as(name))
        if plan is not None and graph.load(plan):
            yield CudnnPlan(graph, 0, name, built=True)


class CopiedCudnn:
    """cuDNN over NCHW copies, for shapes that its channels-last engines do not support.

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
        for kind in (PlanKind.READY, PlanKind.FALLBACK):
            for plan in _plans(graph, kind, ""):
                plan.name = self.name
                yield plan

    def keep(self) -> None:
        """Store the prepared plan."""
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
    """Return a copy in C order, in scratch memory."""
    copy = scratch.get(purpose, array.size, array.dtype.name).reshape(array.shape)
    cupy.copyto(copy, array)
    return copy
