"""Convolutions by cuDNN's graph API.

Owns plans: which engines are allowed (none that rounds to TF32 in fp32 mode, none that is not deterministic) and their
workspace. Behaviour: NVIDIA's cuDNN frontend 1.x.
"""

from __future__ import annotations

import math
from typing import Any

from caffepy.backend.base import Array
from caffepy.backend.cuda_convolution import Direction, Problem, Resources, channels_first
from caffepy.backend.cuda_device import cupy

WORKSPACE_LIMIT = 2**30
"""Bytes that a plan may use beside its arrays; engines that want more are left out."""

FIRST, SECOND, OUT = 1, 2, 3
"""Identities of a plan's three tensors."""

_INEXACT = ("TENSOR_CORE", "DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD",
            "WINOGRAD_TILE_4x4", "WINOGRAD_TILE_6x6", "WINOGRAD_TILE_13x13")  # fmt: skip
"""Numerical notes of engines that are further from float32 arithmetic than its own rounding."""
_INEXACT_FOR_TF32 = ("DOWN_CONVERT_INPUTS", "REDUCED_PRECISION_REDUCTION", "FFT", "WINOGRAD_TILE_6x6",
                     "WINOGRAD_TILE_13x13")  # fmt: skip

_UNDECLARED = {Direction.WEIGHTS: ["eng17_", "eng67_"]}
"""Engines that carry none of these notes and yet miss float32 results, the first by up to 9e-3 of the largest value,
the other by up to 3e-5 (measured with cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50)."""


def strides_of(shape: tuple[int, ...], channels_last: bool) -> list[int]:
    """Element strides of (N, C, spatial...) in the order N, C, spatial... or N, spatial..., C."""
    order = [0, *range(2, len(shape)), 1] if channels_last else list(range(len(shape)))
    strides = [0] * len(shape)
    step = 1
    for axis in reversed(order):
        strides[axis] = step
        step *= shape[axis]
    return strides


def _at_least_four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """cuDNN wants two spatial axes or more: (N, C, W) becomes (N, C, 1, W), which lies alike in memory."""
    return shape if len(shape) > 3 else (shape[0], shape[1], 1, shape[2])


class CudnnPlans:
    """cuDNN's plans of one problem in one layout.

    Args:
        problem: the shapes.
        resources: handle and workspace.
        channels_last: the layout of all three arrays.
    """

    def __init__(self, problem: Problem, resources: Resources, channels_last: bool) -> None:
        self._problem = problem
        self._resources = resources
        self._channels_last = channels_last
        self._plans: dict[Direction, tuple[Any, int]] = {}

    def prepare(self, direction: Direction) -> bool:
        """Build the plan of a direction; False if cuDNN has none within the limits."""
        if direction in self._plans:
            return True
        cudnn = self._resources.cudnn
        try:
            graph = self._build(direction)
        except (cudnn.cudnnGraphNotSupportedError, RuntimeError, ValueError):
            return False
        size = int(graph.get_workspace_size())
        self._resources.scratch.get("cuDNN workspace", size, "uint8")
        self._plans[direction] = graph, size
        return True

    def _build(self, direction: Direction) -> Any:
        cudnn = self._resources.cudnn
        single = cudnn.data_type.FLOAT
        graph = cudnn.pygraph(
            io_data_type=single,
            intermediate_data_type=single,
            compute_data_type=single,
            handle=self._resources.handle,
        )
        self._describe(graph, direction)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        notes = _INEXACT_FOR_TF32 if self._resources.tf32 else _INEXACT
        unwanted = [getattr(cudnn.numerical_note, name) for name in (*notes, "NONDETERMINISTIC")]
        graph.deselect_numeric_notes(unwanted)
        graph.deselect_engines(_UNDECLARED.get(direction, []))
        graph.deselect_workspace_greater_than(WORKSPACE_LIMIT)
        graph.check_support()
        graph.build_plans(cudnn.build_plan_policy.HEURISTICS_CHOICE)
        return graph

    def _describe(self, graph: Any, direction: Direction) -> None:
        """Write the operation and its three tensors into an empty graph."""
        single = self._resources.cudnn.data_type.FLOAT
        shapes = [_at_least_four(shape) for shape in self._problem.arrays(direction)]
        first, second = (
            graph.tensor(
                name=name, dim=list(shape), stride=strides_of(shape, self._channels_last), data_type=single, uid=uid
            )
            for name, shape, uid in (("first", shapes[0], FIRST), ("second", shapes[1], SECOND))
        )
        window = self._window()
        if direction is Direction.FORWARD:
            out = graph.conv_fprop(image=first, weight=second, **window)
        elif direction is Direction.DATA:
            out = graph.conv_dgrad(loss=first, filter=second, **window)
        else:
            out = graph.conv_wgrad(image=first, loss=second, **window)
        out.set_output(True).set_uid(OUT).set_data_type(single)
        out.set_dim(list(shapes[2])).set_stride(strides_of(shapes[2], self._channels_last))

    def _window(self) -> dict[str, Any]:
        g = self._problem.geometry
        unit = [1] if len(g.kernel) == 1 else []
        zero = [0] if len(g.kernel) == 1 else []
        return {
            "padding": zero + list(g.pad),
            "stride": unit + list(g.stride),
            "dilation": unit + list(g.dilation),
            "compute_data_type": self._resources.cudnn.data_type.FLOAT,
        }

    def run(self, direction: Direction, first: Array, second: Array, out: Array) -> None:
        """Execute a prepared plan."""
        graph, size = self._plans[direction]
        workspace = self._resources.scratch.get("cuDNN workspace", size, "uint8")
        pointers = {FIRST: first.data.ptr, SECOND: second.data.ptr, OUT: out.data.ptr}
        graph.execute(pointers, workspace.data.ptr, handle=self._resources.handle)


class DirectCudnn:
    """cuDNN over the blobs as they lie: channels last for two spatial axes, C order otherwise."""

    name = "cuDNN"

    def __init__(self, problem: Problem, resources: Resources) -> None:
        self._plans = CudnnPlans(problem, resources, channels_last=len(problem.x) == 4)
        self.prepare = self._plans.prepare
        self.run = self._plans.run


class CopiedCudnn:
    """cuDNN over copies in NCHW order, for shapes that its channels-last engines do not take."""

    name = "cuDNN over NCHW copies"

    def __init__(self, problem: Problem, resources: Resources) -> None:
        self._plans = CudnnPlans(problem, resources, channels_last=False)
        self._scratch = resources.scratch
        self.prepare = self._plans.prepare

    def run(self, direction: Direction, first: Array, second: Array, out: Array) -> None:
        """Copy the inputs, compute, copy the output back."""
        a = channels_first(first, self._scratch, "first NCHW copy")
        b = channels_first(second, self._scratch, "second NCHW copy")
        result = self._scratch.get("NCHW result", math.prod(out.shape)).reshape(out.shape)
        self._plans.run(direction, a, b, result)
        cupy.copyto(out, result)
