"""Which candidates there are for a task, likely best first.

Owns what is offered when: cuDNN over the blobs as they lie, over blobs with padded or folded channels, group by group
or over NCHW copies; matrix products over unrolled windows; own kernels for small problems; and any of these followed by
a pass for bias and ReLU.
"""

from __future__ import annotations

from caffepy.backend.cuda_convolution import (
    Candidate,
    CudaConvolution,
    Direction,
    Operands,
    Resources,
    Source,
    Task,
    add_bias,
    add_bias_and_rectify,
    is_pointwise,
    rectify,
)
from caffepy.backend.cuda_cudnn import CopiedCudnn, Plans, cudnn_candidates, split_candidates
from caffepy.backend.cuda_elementwise import apply
from caffepy.backend.cuda_folding import folded_sources
from caffepy.backend.cuda_im2col import Im2colConvolution
from caffepy.backend.cuda_small_convolution import small_candidates, suits_small_kernels

MOST_GROUPS = 4
"""Groups up to which one matrix product per group is worth its launches."""


class Apart:
    """The convolution, and then one pass over y for bias and ReLU.

    Args:
        task: with bias, ReLU or both.
        convolution: carries out the plain task.
    """

    name = "apart"

    def __init__(self, task: Task, convolution: CudaConvolution) -> None:
        self._task = task
        self._convolution = convolution

    def prepare(self) -> bool:
        """Always possible."""
        return True

    def run(self, operands: Operands) -> None:
        """Convolve, add, rectify."""
        self._convolution.run(self._task.plain, operands)
        y = operands.out
        if operands.bias is None:
            apply(rectify, (y,), (y,), axis=1)
        else:
            apply(add_bias_and_rectify if self._task.relu else add_bias, (y, operands.bias), (y,), axis=1)


def sources(task: Task, convolution: CudaConvolution, resources: Resources) -> list[Source]:
    """All sources of candidates for a task, in the order in which they are tried without tuning."""
    found = [*folded_sources(task, resources), _cudnn(task, resources, Plans.READY)]
    if task.sums:
        return found
    if suits_small_kernels(task, resources):
        found.insert(0, Source("small", lambda: small_candidates(task, resources)))
    if task.problem.geometry.group > 1:
        found.append(Source("split", lambda: split_candidates(task, resources)))
    found.append(_cudnn(task, resources, Plans.COMPILED))
    if task != task.plain:
        return [*found, Source("apart", lambda: [Apart(task, convolution)])]
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
    if resources.tf32 or problem.storage != "float32":
        return False
    if len(problem.x) != 4 or problem.geometry.group > MOST_GROUPS:
        return False
    return task.direction is not Direction.FORWARD or is_pointwise(problem.geometry)
