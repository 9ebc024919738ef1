"""Convolutions as operation graphs of cuDNN.

Owns the graphs: their tensors, what is fused into a forward pass, and which of cuDNN's engines are allowed: none that
rounds to TF32 in fp32 mode, none that says it is not deterministic. Those for sums do not say so, yet their sums differ
from run to run in the last bits (cuDNN 9.19, all plans at the shapes of ResNet-50, sixty runs each, on an H200): they
are for backends that need not be deterministic. Behaviour: NVIDIA's cuDNN frontend 1.x.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from enum import Enum
from typing import Any

from caffepy.backend.cuda.convolution.algorithm import Resources
from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.types import convolution_workspace

logger = logging.getLogger(__name__)

MAX_PLANS = 10
"""Plans of one graph that are candidates, those that are barred not counted: the best among them takes at most 0.1 %
longer than the best of twenty (ResNet-50 and MobileNet in FLOAT16 on an H200, all tasks together)."""

MAX_COMPILED = 3
"""The same where cuDNN compiles them at run time, which takes a third of a second each."""

FIRST, SECOND, OUT, BIAS, SUM, SQUARES, RESIDUAL = 1, 2, 3, 4, 5, 6, 7
"""Identities of a graph's tensors."""

_INEXACT = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD",
            "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")  # fmt: skip
"""Numerical notes of engines that are further from float32 arithmetic than its own rounding."""
_INEXACT_FOR_TF32 = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD_TILE_6x6",
                     "WINOGRAD_TILE_13x13")  # fmt: skip
_INEXACT_FOR_HALF = ("REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD", "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6",
                     "WINOGRAD_TILE_13x13")  # fmt: skip

_UNDECLARED = {Direction.WEIGHTS: ["eng17_", "eng67_"]}
"""Engines that carry none of these notes and yet miss float32 results, the first by up to 9e-3 of the largest value,
the other by up to 3e-5 (measured with cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50)."""


def strides_of(shape: tuple[int, ...], channels_last: bool, pitch: int | None = None) -> list[int]:
    """Element strides of (N, C, spatial...) in the order N, C, spatial... or N, spatial..., C.

    Args:
        shape: the array's, or that of some of its channels.
        channels_last: the order in memory.
        pitch: with channels last, how many channels the whole array has.
    """
    order = [0, *range(2, len(shape)), 1] if channels_last else list(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= pitch if axis == 1 and channels_last and pitch else shape[axis]
    return strides


def _at_least_four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """cuDNN wants two spatial axes or more: (N, C, W) becomes (N, C, 1, W), which lies alike in memory."""
    return shape if len(shape) > 3 else (shape[0], shape[1], 1, shape[2])


class Plans(Enum):
    """Kinds of plans that cuDNN proposes."""

    READY = "cuDNN"  # heuristics' choice among its own kernels
    COMPILED = "compiled cuDNN"  # heuristics' choice among kernels that it compiles at run time
    FALLBACK = "fallback cuDNN"  # what works for many shapes, mostly slowly


class CudnnGraph:
    """One operation graph with the plans that heuristics propose for it.

    Args:
        task: what to compute.
        resources: cuDNN and what products may round.
        channels_last: how the arrays lie.
        split: compute one group, its channels among those of the whole arrays.
        rounded_bias: take the bias in the problem's dtype, which more engines can do.
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

    def build(self, kind: Plans, several: bool = True) -> bool:
        """Write the graph and ask for plans; False if cuDNN has none.

        Args:
            kind: of the plans.
            several: ask both of cuDNN's heuristics, not only the faster one, whose plans come first.
        """
        cudnn = self.resources.cudnn
        modes = [cudnn.heur_mode.FALLBACK] if kind is Plans.FALLBACK else [cudnn.heur_mode.A, cudnn.heur_mode.B]
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
            # In one call: release 1.18 mixes up the notes of plans that were asked for in several.
            graph.create_execution_plans(modes)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
            return False
        self._bar(graph)
        return True

    def again(self) -> CudnnGraph:
        """The same graph, not built; plans of this one go on to be usable."""
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
        graph.deselect_workspace_greater_than(self._most_workspace())

    def _most_workspace(self) -> int:
        """Bytes that a plan may use beside its arrays."""
        problem = self.task.problem
        item = 4 if problem.dtype == "float32" else 2
        return convolution_workspace(sum(math.prod(shape) for shape in problem.arrays(self.task.direction)) * item)

    def serialised(self, index: int) -> bytes:
        """A plan that was built, for `load`.

        Raises:
            RuntimeError: cuDNN cannot write it.
        """
        self.graph.build_plan_at_index(index)  # `serialize` takes the plan that this was last called for
        return bytes(self.graph.serialize())

    def load(self, plan: bytes) -> bool:
        """Take one plan that was kept, as number 0, instead of `build`; False if it cannot be used."""
        cudnn = self.resources.cudnn
        graph = self.graph = cudnn.pygraph(handle=self.resources.handle)
        try:
            graph.deserialize(self.resources.handle, bytearray(plan))
            return self._is_of_this_task(graph)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError, TypeError, AttributeError) as error:
            logger.debug("a kept plan of cuDNN cannot be used: %s", error)
            return False

    def _is_of_this_task(self, graph: Any) -> bool:
        """Whether a graph that was read has this one's tensors, and a workspace that is allowed."""
        for position, (uid, shape) in enumerate(zip((FIRST, SECOND, OUT), self._shapes(), strict=True)):
            tensor = graph.query_tensor_attributes_of_uid(uid)
            lies = (list(tensor.get_dim()), list(tensor.get_stride()), tensor.get_data_type())
            if lies != (list(shape), self._strides(shape, position), self._type):
                return False
        return 0 <= int(graph.get_workspace_size_plan_at_index(0)) <= self._most_workspace()

    def kept_as(self, name: str) -> str:
        """What a plan is kept under: all that its graph depends on, and its name."""
        layout = f"{'NHWC' if self._channels_last else 'NCHW'} parts {self.groups} rounded {self.rounded_bias}"
        return f"{self.task} tf32 {self.resources.tf32} {layout}; {name}"

    def names(self, kind: Plans) -> Iterator[tuple[int, str]]:
        """Number and name of each plan of a kind, those that were proposed twice once."""
        seen = set()
        for index in range(self.graph.get_execution_plan_count()):
            if kind is Plans.FALLBACK or self._is_compiled(index) is (kind is Plans.COMPILED):
                name = self.graph.get_plan_name_at_index(index)
                if name not in seen:
                    seen.add(name)
                    yield index, name

    def _is_compiled(self, index: int) -> bool:
        notes = self.graph.get_behavior_notes_for_plan_at_index(index)
        return self.resources.cudnn.behavior_note.RUNTIME_COMPILATION in notes

    def _shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the two inputs and of the output, of one group if they are split."""
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
        """Write the operations and their tensors into an empty graph."""
        shapes = self._shapes()
        first, second = (
            graph.tensor(name=name, dim=list(shapes[i]), stride=self._strides(shapes[i], i), data_type=self._type,
                         uid=uid)
            for i, (name, uid) in enumerate((("first", FIRST), ("second", SECOND)))
        )  # fmt: skip
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
        """What follows a forward convolution: bias, residual, ReLU, or sums for each channel."""
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
