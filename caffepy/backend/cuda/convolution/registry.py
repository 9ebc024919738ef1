"""Which candidates there are for a task, likely best first.

Owns what is offered when: cuDNN over the blobs as they lie, over blobs with padded or folded channels, group by group
or over NCHW copies; matrix products over unrolled windows; own kernels for small problems; and any of these followed by
a pass for bias and ReLU.
"""

from __future__ import annotations

from dataclasses import replace

from caffepy.backend.cuda.convolution.cudnn import CopiedCudnn, cudnn_candidates, split_candidates
from caffepy.backend.cuda.convolution.cudnn_graph import Plans
from caffepy.backend.cuda.convolution.folded import folded_sources
from caffepy.backend.cuda.convolution.im2col import Im2colConvolution
from caffepy.backend.cuda.convolution.implicit_gemm import small_candidates, suits_small_kernels
from caffepy.backend.cuda.convolution.plan import UNFUSED, Candidate, CudaConvolution, Operands, Resources, Source
from caffepy.backend.cuda.convolution.problem import Direction, Task, is_pointwise
from caffepy.backend.cuda.elementwise.launch import apply
from caffepy.backend.cuda.elementwise.reduce import reduce
from caffepy.backend.elementwise import Channel, Each, expression

MOST_GROUPS = 4
"""Groups up to which one matrix product per group is worth its launches."""


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
def moments(y: Each) -> tuple[Each, Each]:
    return y, y * y


class UnfusedEpilogue:
    """The convolution, and then one pass over y for bias and ReLU, or for sums.

    Args:
        task: with bias, ReLU or sums.
        convolution: carries out the plain task.
        resources: scratch memory.
    """

    name = UNFUSED

    def __init__(self, task: Task, convolution: CudaConvolution, resources: Resources) -> None:
        self._task = task
        self._convolution = convolution
        self._resources = resources

    def prepare(self) -> bool:
        """Always possible."""
        return True

    def run(self, operands: Operands) -> None:
        """Convolve, and read y once more."""
        self._convolution.run(self._task.plain, replace(operands, bias=None, sums=None))
        y = operands.out
        if operands.sums is not None:
            reduce(moments, (y,), (operands.sums[0], operands.sums[1]), 1, False, self._resources.scratch)
        elif operands.bias is None:
            apply(rectify, (y,), (y,), axis=1)
        else:
            apply(add_bias_and_rectify if self._task.relu else add_bias, (y, operands.bias), (y,), axis=1)


def sources(task: Task, convolution: CudaConvolution, resources: Resources) -> list[Source]:
    """All sources of candidates for a task, in the order in which they are tried without tuning."""
    found = [_cudnn(task, resources, Plans.READY)]
    if task.problem.geometry.group > 1 and not task.sums:
        found.append(Source("split", lambda: split_candidates(task, resources), checked=True))
    if not task.sums:
        found.append(_cudnn(task, resources, Plans.COMPILED))
    if suits_small_kernels(task, resources):
        found.append(Source("small", lambda: small_candidates(task, resources), checked=True))
    found += folded_sources(task, resources)
    if task != task.plain:
        return [*found, Source(UNFUSED, lambda: [UnfusedEpilogue(task, convolution, resources)])]
    found.append(_cudnn(task, resources, Plans.FALLBACK))
    copied = Source("copied", lambda: _copied(task, resources), last_resort=True)
    preferred = _prefers_products(task, resources)
    unrolling = not (preferred or is_pointwise(task.problem.geometry))
    products = Source("products", lambda: [Im2colConvolution(task, resources)], last_resort=unrolling)
    return [products, *found, copied] if preferred else [*found, copied, products]


def _cudnn(task: Task, resources: Resources, kind: Plans) -> Source:
    last_resort = kind is Plans.FALLBACK or (kind is Plans.COMPILED and task.problem.geometry.group == 1)
    return Source(kind.value, lambda: cudnn_candidates(task, resources, kind), last_resort)


def _copied(task: Task, resources: Resources) -> list[Candidate]:
    return [CopiedCudnn(task, resources)] if len(task.problem.x) == 4 else []


def _prefers_products(task: Task, resources: Resources) -> bool:
    """Whether in full float32 unrolling and cuBLAS beat cuDNN.

    Measured on an H200 with cuDNN 9.19 at the shapes of LeNet, CaffeNet and ResNet-50: without tensor cores cuDNN's
    gradients take 0.8 to 13 times as long, mostly twice, and are less exact; its forward pass is ahead but for 1x1
    windows.
    """
    problem = task.problem
    if resources.tf32 or problem.dtype != "float32":
        return False
    if len(problem.x) != 4 or problem.geometry.group > MOST_GROUPS:
        return False
    return task.direction is not Direction.FORWARD or is_pointwise(problem.geometry)
