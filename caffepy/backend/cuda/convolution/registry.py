"""The algorithm families for a task, the likely fastest first.

Families: cuDNN over the blobs in place, over blobs with padded channels or after space-to-depth, group by group, or
over NCHW copies; im2col and matrix products; own kernels for depthwise convolutions, for small problems (implicit GEMM)
and for shapes that leave the device idle in cuDNN; data gradients as forward convolutions; weight gradients as split-K
products; and any of these followed by a kernel for bias and ReLU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial

from caffepy.backend.cuda.convolution.algorithm import UNFUSED, AlgorithmFamily, Candidate, Operands, Resources
from caffepy.backend.cuda.convolution.cudnn import (
    ROUNDED_BIAS,
    CopiedCudnn,
    Plans,
    cudnn_candidates,
    rounds_bias,
    split_candidates,
)
from caffepy.backend.cuda.convolution.depth_multiplier import DepthMultiplier, suits_depth_multiplier
from caffepy.backend.cuda.convolution.depthwise import depthwise_candidates
from caffepy.backend.cuda.convolution.depthwise_tiling import suits_depthwise
from caffepy.backend.cuda.convolution.dgrad_few_channels import FewChannels, suits_few_channels
from caffepy.backend.cuda.convolution.gradients import (
    Choose,
    FlippedForward,
    SplitKProducts,
    suits_flipping,
    suits_split_k,
)
from caffepy.backend.cuda.convolution.im2col import Im2colConvolution
from caffepy.backend.cuda.convolution.implicit_gemm import small_candidates, suits_small_kernels
from caffepy.backend.cuda.convolution.large_depthwise import large_depthwise_candidates, suits_large_depthwise
from caffepy.backend.cuda.convolution.large_windows import LargeWindows, suits_large_windows
from caffepy.backend.cuda.convolution.problem import Direction, Task, is_pointwise, is_product
from caffepy.backend.cuda.convolution.small_k_wgrad import small_k_wgrad_candidates, suits_small_k_wgrad
from caffepy.backend.cuda.convolution.space_to_depth import space_to_depth_families
from caffepy.backend.cuda.expression import apply
from caffepy.backend.cuda.reduction import reduce
from caffepy.backend.expression import Channel, Each, expression
from caffepy.backend.layout import CHANNELS_LAST
from caffepy.backend.types import Array

MAX_GROUPS = 4
"""Maximum groups for which one matrix product per group is worth its launches."""


RunTask = Callable[[Task, Operands], None]


@expression
def add_bias(y: Each, bias: Channel) -> Each:
    return y + bias


@expression
def rectify(y: Each) -> Each:
    return max(y, 0.0)


@expression
def add_bias_and_rectify(y: Each, bias: Channel) -> Each:
    return max(y + bias, 0.0)


@expression
def add_residual(y: Each, residual: Each) -> Each:
    return y + residual


@expression
def add_residual_and_rectify(y: Each, residual: Each) -> Each:
    return max(y + residual, 0.0)


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
            apply(rectify, (y,), (y,), axis=1)
        else:
            apply(add_bias_and_rectify if self._task.relu else add_bias, (y, operands.bias), (y,), axis=1)

    def _add_residual(self, operands: Operands, residual: Array) -> None:
        y, relu = operands.out, self._task.relu
        if operands.bias is None:
            apply(add_residual_and_rectify if relu else add_residual, (y, residual), (y,), axis=1)
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
        return [*_ready_cudnn(task, resources), _cudnn(task, resources, Plans.COMPILED), unfused]
    families = _ready_cudnn(task, resources)
    if task.problem.geometry.group > 1 and not task.sums:
        families.append(_split(task, resources))
    if not task.sums:
        families.append(_cudnn(task, resources, Plans.COMPILED))
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
    families.append(_cudnn(task, resources, Plans.FALLBACK))
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
        find = partial(cudnn_candidates, task, resources, Plans.READY, rounded)
        return AlgorithmFamily(name, find, kept=find)

    plain = family(Plans.READY.value, False)
    return [family(ROUNDED_BIAS, True), plain] if rounds_bias(task) else [plain]


def _cudnn(task: Task, resources: Resources, kind: Plans) -> AlgorithmFamily:
    last_resort = kind is Plans.FALLBACK or (kind is Plans.COMPILED and task.problem.geometry.group == 1)
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
    """Return whether im2col and cuBLAS beat cuDNN in full float32.

    Measured on an H200 with cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50: without tensor cores cuDNN's
    gradients take 0.8 to 13 times as long, mostly twice, and are less accurate. Its forward pass is faster except for
    1x1 windows.
    """
    problem = task.problem
    if not _is_exact(task, resources) or len(problem.x) != 4 or problem.geometry.group > MAX_GROUPS:
        return False
    return task.direction is not Direction.FORWARD or is_pointwise(problem.geometry)
