"""A convolution on the GPU: the families of algorithms for each task, and the plan that holds one candidate per task.

`autotune.py` chooses the fastest candidate. The plan converts arrays for it.

The families, the likely fastest of a task first: cuDNN over the blobs in place, over blobs with padded channels or
after space-to-depth, group by group, or over NCHW copies; im2col and matrix products; own kernels for depthwise
convolutions, for small problems (implicit GEMM) and for shapes that leave the device idle in cuDNN; data gradients as
forward convolutions; weight gradients as split-K products; and any of these followed by a kernel for bias and ReLU.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from caffepy.backend.cuda.compiler import compile_side_by_side
from caffepy.backend.cuda.convolution.algorithm import (
    UNFUSED,
    AlgorithmFamily,
    Candidate,
    Operands,
    Resources,
    fits,
    write_result,
)
from caffepy.backend.cuda.convolution.autotune import first_trusted
from caffepy.backend.cuda.convolution.cudnn import (
    ROUNDED_BIAS,
    CopiedCudnn,
    PlanKind,
    cudnn_candidates,
    rounds_bias,
    split_candidates,
)
from caffepy.backend.cuda.convolution.depthwise import (
    DepthMultiplier,
    DepthwiseGradients,
    DepthwiseWalk,
    depthwise_candidates,
    large_depthwise_candidates,
    repeated,
    suits_depth_multiplier,
    suits_large_depthwise,
)
from caffepy.backend.cuda.convolution.dgrad_few_channels import (
    FewChannels,
    LargeWindows,
    suits_few_channels,
    suits_large_windows,
)
from caffepy.backend.cuda.convolution.im2col import Im2colConvolution
from caffepy.backend.cuda.convolution.implicit_gemm import (
    small_candidates,
    small_k_wgrad_candidates,
    suits_small_k_wgrad,
    suits_small_kernels,
)
from caffepy.backend.cuda.convolution.problem import (
    Direction,
    Problem,
    Task,
    is_pointwise,
    is_product,
    suits_depthwise,
    walk_of,
)
from caffepy.backend.cuda.convolution.rewritten import (
    Choose,
    FlippedForward,
    SplitKProducts,
    space_to_depth_families,
    suits_flipping,
    suits_split_k,
)
from caffepy.backend.cuda.expression import apply, reduce
from caffepy.backend.cuda.memory import CudaMemory
from caffepy.backend.expression import Channel, Each, expression
from caffepy.backend.formulas import (
    identity,
    plus_rectified,
    rectified,
    rectified_with_channel,
    total,
    total_with_channel,
)
from caffepy.backend.interface import ConvolutionPrimitives
from caffepy.backend.types import (
    CHANNELS_LAST,
    Array,
    Convolution,
    Geometry,
    NormalisedBottom,
    NormalisedForward,
    NormalisedGradients,
    view,
)
from caffepy.errors import RunError

# -- families of algorithms ----------------------------------------------------------------------------

MAX_GROUPS = 4
"""Maximum groups for which one matrix product per group is worth its launches."""


RunTask = Callable[[Task, Operands], None]


@expression
def add_bias_and_residual(y: Each, residual: Each, bias: Channel) -> Each:
    return y + bias + residual


@expression
def add_all_and_rectify(y: Each, residual: Each, bias: Channel) -> Each:
    return max(y + bias + residual, 0.0)


@expression
def moments(y: Each) -> tuple[Each, Each]:
    return y, y * y


class UnfusedEpilogue:
    """The convolution, then one kernel over y for bias and ReLU, or for sums.

    Args:
        task: a task with bias, ReLU or sums.
        run_plain: computes the plain task.
        resources: scratch memory.
    """

    name = UNFUSED

    def __init__(self, task: Task, run_plain: RunTask, resources: Resources) -> None:
        self._task = task
        self._run_plain = run_plain
        self._resources = resources

    def prepare(self) -> bool:
        return True

    def run(self, operands: Operands) -> None:
        self._run_plain(self._task.plain, replace(operands, bias=None, sums=None, residual=None))
        y = operands.out
        if operands.sums is not None:
            reduce(moments, (y,), (operands.sums[0], operands.sums[1]), 1, False, self._resources.scratch)
        elif operands.residual is not None:
            self._add_residual(operands, operands.residual)
        elif operands.bias is None:
            apply(rectified, (y,), (y,), axis=1)
        else:
            apply(rectified_with_channel if self._task.relu else total_with_channel, (y, operands.bias), (y,), axis=1)

    def _add_residual(self, operands: Operands, residual: Array) -> None:
        y, relu = operands.out, self._task.relu
        if operands.bias is None:
            apply(plus_rectified if relu else total, (y, residual), (y,), axis=1)
        else:
            formula = add_all_and_rectify if relu else add_bias_and_residual
            apply(formula, (y, residual, operands.bias), (y,), axis=1)


def algorithm_families(task: Task, run_plain: RunTask, choose: Choose, resources: Resources) -> list[AlgorithmFamily]:
    """Return all families for a task. Without tuning, the first candidate that can be prepared is used.

    Args:
        task: the task to compute.
        run_plain: computes the task without bias, ReLU and sums, for the unfused epilogue.
        choose: returns the candidate of another task, for rewritten tasks.
        resources: resources of the backend.
    """
    unfused = AlgorithmFamily(UNFUSED, lambda: [UnfusedEpilogue(task, run_plain, resources)])
    if task.sums and suits_depthwise(task):
        # cuDNN's sums differ in their bits from run to run; these do not.
        own = AlgorithmFamily("depthwise", lambda: depthwise_candidates(task, resources), checked=True)
        return [own, unfused]
    if task.residual:
        return [*_ready_cudnn(task, resources), _cudnn(task, resources, PlanKind.COMPILED), unfused]
    families = _ready_cudnn(task, resources)
    if task.problem.geometry.group > 1 and not task.sums:
        families.append(_split(task, resources))
    if not task.sums:
        families.append(_cudnn(task, resources, PlanKind.COMPILED))
    families += _own_kernels(task, resources)
    families += space_to_depth_families(task, resources)
    if task != task.plain:
        return [*families, unfused]
    if suits_split_k(task):
        families.append(AlgorithmFamily("split-K", lambda: [SplitKProducts(task, resources)]))
    if suits_flipping(task):
        families.append(AlgorithmFamily("flipped", lambda: [FlippedForward(task, choose, resources)]))
    if suits_depth_multiplier(task):
        families.append(AlgorithmFamily("depth multiplier", lambda: [DepthMultiplier(task, choose, resources)]))
    families.append(_cudnn(task, resources, PlanKind.FALLBACK))
    # Over three axes, few engines support channels that are not a multiple of a load's.
    copied = AlgorithmFamily("copied", lambda: _copied(task, resources), last_resort=len(task.problem.x) == 4)
    preferred = _prefers_products(task, resources)
    # Without tensor cores and with few images, cuDNN leaves most of the device idle.
    tried = is_product(task.problem) or _is_exact(task, resources)
    products = AlgorithmFamily("products", lambda: [Im2colConvolution(task, resources)], last_resort=not tried)
    return [products, *families, copied] if preferred else [*families, copied, products]


def _own_kernels(task: Task, resources: Resources) -> list[AlgorithmFamily]:
    """Return the own-kernel families that support a task."""

    def family(name: str, candidates: Callable[[], Iterable[Candidate]]) -> AlgorithmFamily:
        return AlgorithmFamily(name, candidates, checked=True)

    found = []
    if suits_depthwise(task):
        found.append(family("depthwise", lambda: depthwise_candidates(task, resources)))
    if suits_large_depthwise(task):
        found.append(family("large depthwise", lambda: large_depthwise_candidates(task, resources)))
    if suits_small_kernels(task, resources):
        found.append(family("small", lambda: small_candidates(task, resources)))
    if suits_small_k_wgrad(task):
        found.append(family("wgrad small-k", lambda: small_k_wgrad_candidates(task)))
    if suits_large_windows(task):
        found.append(family(LargeWindows.name, lambda: [LargeWindows(task, resources)]))
    if suits_few_channels(task):
        found.append(family(FewChannels.name, lambda: [FewChannels(task, resources)]))
    return found


def _ready_cudnn(task: Task, resources: Resources) -> list[AlgorithmFamily]:
    """Return separate families for plans with and without a rounded bias; either may be faster."""

    def family(name: str, rounded: bool) -> AlgorithmFamily:
        find = partial(cudnn_candidates, task, resources, PlanKind.READY, rounded)
        return AlgorithmFamily(name, find, kept=find)

    plain = family(PlanKind.READY.value, False)
    return [family(ROUNDED_BIAS, True), plain] if rounds_bias(task) else [plain]


def _cudnn(task: Task, resources: Resources, kind: PlanKind) -> AlgorithmFamily:
    # Compiling takes cuDNN a third to two thirds of a second for each plan. It often wins for windows of groups of
    # several channels. Of 54 depthwise tasks of EfficientNet-B0 and ShuffleNet it won seven, 0.3 % of an iteration;
    # of ShuffleNet's grouped pointwise tasks it won none (H200).
    geometry = task.problem.geometry
    worthwhile = geometry.group > 1 and not is_pointwise(geometry) and not suits_depthwise(task)
    last_resort = kind is PlanKind.FALLBACK or (kind is PlanKind.COMPILED and not worthwhile)
    find = partial(cudnn_candidates, task, resources, kind, None)
    return AlgorithmFamily(kind.value, find, last_resort, kept=find)


def _split(task: Task, resources: Resources) -> AlgorithmFamily:
    find = partial(split_candidates, task, resources)
    return AlgorithmFamily("split", find, checked=True, kept=find)


def _copied(task: Task, resources: Resources) -> list[Candidate]:
    return [CopiedCudnn(task, resources)] if len(task.problem.x) in CHANNELS_LAST else []


def _is_exact(task: Task, resources: Resources) -> bool:
    """Return whether products are computed in full float32."""
    return task.problem.dtype == "float32" and not resources.tf32


def _prefers_products(task: Task, resources: Resources) -> bool:
    """Return whether im2col and cuBLAS beat cuDNN in full float32."""
    # Measured on an H200 with cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50: without tensor cores cuDNN's
    # gradients take 0.8 to 13 times as long, mostly twice, and are less accurate. Its forward pass is faster except for
    # 1x1 windows.
    problem = task.problem
    if not _is_exact(task, resources) or len(problem.x) != 4 or problem.geometry.group > MAX_GROUPS:
        return False
    return task.direction is not Direction.FORWARD or is_pointwise(problem.geometry)


def _sums_in_registers(task: Task) -> bool:
    """Return whether own kernels compute a task's sums, so that a second pass over y would only be slower.

    The plain task is then computed for comparison alone, and its own kernels are neither compiled nor timed.
    """
    return task.sums and suits_depthwise(task) and not suits_large_depthwise(task.plain)


def _compiled_together(task: Task) -> Iterable[Task]:
    """Return the tasks of a problem whose own kernels are compiled with a task's."""
    if task.direction is not Direction.FORWARD:
        return [replace(task, direction=each) for each in (Direction.DATA, Direction.WEIGHTS)]
    # A fused task is compared with the plain one and its epilogue.
    return [task] if _sums_in_registers(task) else dict.fromkeys((task, task.plain))


# -- plans ---------------------------------------------------------------------------------------------


class TunedConvolution:
    """A `Convolution` that chooses a candidate for each task at first use.

    Args:
        problem: the shapes.
        resources: shared resources of the backend's convolutions.
        planned: all problems of the backend.
    """

    def __init__(self, problem: Problem, resources: Resources, planned: Iterable[Problem]) -> None:
        self.problem = problem
        self._resources = resources
        self._planned = planned
        self._chosen: dict[Task, Candidate | None] = {}
        self._trusted: dict[Task, Candidate | None] = {}
        self._normalised: dict[tuple[Task, bool], DepthwiseWalk] = {}

    def candidate(self, task: Task, operands: Operands | None) -> Candidate | None:
        """Return the candidate for a task, or None; `operands` are arrays for timing, if available."""
        # Chosen in the first pass, with that pass's arrays: the times are those of the net's own data.
        if task not in self._chosen:
            if self._resources.tuner.will_time(task, self._resources):
                self._compile_alike(_compiled_together(task), self._own_candidates)
            run_plain = self._run_trusted if _sums_in_registers(task) else self.run
            families = algorithm_families(task, run_plain, self.candidate, self._resources)
            self._chosen[task] = self._resources.tuner.choose(task, families, operands, self._resources)
        return self._chosen[task]

    def _compile_alike(
        self, forms: Iterable[Task], candidates: Callable[[Task], Iterable[Candidate]], kind: str = ""
    ) -> None:
        """Compile kernels for these tasks of all planned problems: a net that runs one runs the others soon."""
        tasks = [replace(form, problem=p) for form in forms for p in self._planned if math.prod(p.y)]
        new = [each for each in tasks if (each, kind) not in self._resources.compiled]
        self._resources.compiled.update((each, kind) for each in new)
        compile_side_by_side([candidate.prepare for each in new for candidate in candidates(each)])

    def _own_candidates(self, task: Task) -> list[Candidate]:
        """Return the candidates with own kernels, also of the depthwise problem that a task is rewritten to."""
        tasks = [task]
        if suits_depth_multiplier(task):
            tasks.append(Task(repeated(task.problem), task.direction))
        families = [family for each in tasks for family in _own_kernels(each, self._resources)]
        return [candidate for family in families for candidate in family.candidates()]

    def _normalised_candidates(self, task: Task, relu: bool) -> list[DepthwiseWalk]:
        """Return the candidate with a normalised bottom: a forward pass, or both gradients for a data task."""
        walk = walk_of(task)
        if walk is None:
            return []
        if task.direction is Direction.DATA:
            return [DepthwiseGradients(task.problem, relu, walk, self._resources)]
        return [DepthwiseWalk(task, walk, self._resources, relu)]

    def _normalised_candidate(self, task: Task, relu: bool) -> DepthwiseWalk:
        if (task, relu) not in self._normalised:
            make = partial(self._normalised_candidates, relu=relu)
            self._compile_alike([task], make, f"normalised {relu}")
            (chosen,) = make(task)
            # Compiled now, in the eager pass: a capture may not load kernels.
            chosen.prepare()
            self._normalised[task, relu] = chosen
        return self._normalised[task, relu]

    def _run_trusted(self, task: Task, operands: Operands) -> None:
        """Run a task by the first candidate whose result needs no check, without timing the others."""
        if task not in self._trusted:
            families = algorithm_families(task, self.run, self.candidate, self._resources)
            self._trusted[task] = first_trusted(families)
        self._run_chosen(self._trusted[task], task, operands)

    def run(self, task: Task, operands: Operands) -> None:
        given = (operands.bias is not None, operands.sums is not None, operands.residual is not None)
        assert given == (task.bias, task.sums, task.residual), task
        self._run_chosen(self.candidate(task, operands), task, operands)

    def _run_chosen(self, chosen: Candidate | None, task: Task, operands: Operands) -> None:
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
        self,
        x: Array,
        weights: Array,
        bias: Array | None,
        y: Array,
        relu: bool = False,
        sums: Array | None = None,
        residual: Array | None = None,
    ) -> None:
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
        self._normalised_candidate(task, bottom.relu).run_normalised(bottom, operands)
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
        gradients = self._normalised_candidate(Task(self.problem, Direction.DATA), bottom.relu)
        assert isinstance(gradients, DepthwiseGradients)
        gradients.run_all(replace(bottom, x=x), operands, dweights)
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
            # The conversion of the result adds it to the earlier gradient, in float32.
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
    _convolutions: dict[Problem, TunedConvolution]

    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        problem = Problem(tuple(x_shape), tuple(weights_shape), geometry, dtype)
        if problem not in self._convolutions:
            self._convolutions[problem] = TunedConvolution(problem, self._resources, self._convolutions)
        return self._convolutions[problem]

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        assert isinstance(plan, TunedConvolution)
        plan.forward(x, weights, bias, y, relu, residual=residual)
