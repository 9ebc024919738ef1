"""What primitives take: arrays and their dtypes, geometry of windows, random sequences, statistics; sizes.

Nothing here computes or belongs to a device. The sizes are those that a net must know before there are arrays: of
outputs, of masks, and of what a GPU takes for itself.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Array = Any
"""A numpy.ndarray or cupy.ndarray."""

DTYPES = ("float32", "float16", "bfloat16")
"""dtypes of a blob."""

Counter = Any
"""Position in a random sequence: the pair (pass number, global number of the first sample), or a uint64 array of both
in device memory, which a captured graph reads at each launch."""

PRODUCT_WORKSPACE = 32 * 2**20
"""Bytes of workspace that cuBLAS is given: what NVIDIA recommends for Hopper and newer."""


def element_dtype(dtype: str) -> str:
    """The NumPy dtype of the arrays that hold a blob dtype: bfloat16 numbers lie in uint16."""
    return "uint16" if dtype == "bfloat16" else dtype


@dataclass(frozen=True)
class Geometry:
    """How a window moves over the spatial axes of a blob, one entry for each spatial axis.

    Args:
        kernel: window size.
        stride: step.
        pad: zeros put before and after.
        dilation: distance of the window's elements.
        group: into how many groups input and output channels are divided (convolution only).
    """

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    pad: tuple[int, ...]
    dilation: tuple[int, ...]
    group: int = 1


@dataclass(frozen=True)
class LrnWindow:
    """Parameters of local response normalisation across channels; formula: `Backend.lrn_across_forward`.

    Args:
        size: channels of a window, odd.
        alpha: factor of the window's sum of squares, divided by `size`.
        beta: exponent.
        k: constant of the base.
    """

    size: int
    alpha: float
    beta: float
    k: float = 1.0


@dataclass(frozen=True)
class RandomStream:
    """Key of a counter-based random sequence (Philox 4x32-10, Salmon et al., SC11).

    The number for element i (logical order, within its sample) of global sample s is a function of
    (seed, stream, pass_number, s, i) alone, so it does not depend on how samples are spread over devices.

    Args:
        seed: the solver's random_seed, 64 bits.
        stream: tells apart the users of randomness of one net, e.g. a hash of the layer's name; 32 bits.
    """

    seed: int
    stream: int


@dataclass
class BatchNormState:
    """Statistics and parameters of one batch normalisation: float32 arrays of shape (C,), but for the count.

    Args:
        mean: of the present batch, or the stored one.
        inverse: 1 / sqrt(variance + epsilon), likewise.
        scale: factor after normalising.
        bias: term after that.
        sum_mean: running sum of means (Caffe's blob 0).
        sum_variance: running sum of variances (blob 1).
        count: shape (1,), the weight of what the sums hold (blob 2).
        epsilon: added to the variance.
        fraction: what of the running sums is kept at each batch.
    """

    mean: Array
    inverse: Array
    scale: Array
    bias: Array
    sum_mean: Array
    sum_variance: Array
    count: Array
    epsilon: float
    fraction: float


@dataclass(frozen=True)
class NormalisedBottom:
    """The bottom of a convolution, as the batch normalisation that it comes from.

    Args:
        x: what is normalised, of the bottom's shape.
        n: statistics and parameters of the normalisation.
        relu: whether the bottom is max(normal, 0).
        sums: where in a backward pass the gradients of scale and bias go, float32 (C,) each:
            `Backend.batch_norm_backward_sums`.
    """

    x: Array
    n: BatchNormState
    relu: bool
    sums: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix in compressed sparse rows, in device memory.

    Args:
        begins: int32 (rows + 1,), where each row's entries begin in the other two.
        columns: int32 (entries,), each within [0, columns).
        weights: float32 (entries,).
        shape: (rows, columns).
    """

    begins: Array
    columns: Array
    weights: Array
    shape: tuple[int, int]


@dataclass(frozen=True)
class BoxLossSettings:
    """What SSD's loss is to compute: fields of MultiBoxLossParameter; see `MultiBoxLossLayer`.

    Args:
        classes: with the background.
        background: its label.
        code: value of CodeType, how predictions stand for boxes.
        threshold: overlap from which on a prior belongs to an object.
        per_prediction: priors beside the best of each object may belong to it.
        ignore_crossing: priors that cross the image's border are left out.
        difficult: objects that are marked so count.
        agnostic: all objects are of the class behind the background's.
        mines: of the priors without an object `ratio` for each match count, those with the largest losses.
        ratio: see there.
        most_overlap: priors that overlap an object as much as this are not mined.
        logistic: scores are compared by cross entropy of their sigmoids, else by that of their softmax.
        squared: boxes are compared by d^2 / 2, else by the smooth L1 loss.
        variance_in_target: predictions are not to be divided by the priors' variances.
        inside: coordinates of priors beside the image do not count.
        weight: of the boxes' loss.
        boxes_count: whether the boxes' loss is part of the loss.
        scores_count: whether that of the scores is.
    """

    classes: int
    background: int
    code: int
    threshold: float
    per_prediction: bool
    ignore_crossing: bool
    difficult: bool
    agnostic: bool
    mines: bool
    ratio: float
    most_overlap: float
    logistic: bool
    squared: bool
    variance_in_target: bool
    inside: bool
    weight: float
    boxes_count: bool
    scores_count: bool


def convolution_workspace(own: int) -> int:
    """Bytes that a convolution on a GPU may use beside its arrays of `own` bytes: small nets should stay small."""
    return min(2**30, 2**25 + 4 * own)


def gpu_workspace(own: int) -> int:
    """`Backend.workspace` of a GPU: what its largest convolution may use, and what cuBLAS has."""
    return PRODUCT_WORKSPACE + (convolution_workspace(own) if own else 0)


def mask_bytes(size: int) -> int:
    """Bytes of a mask with one bit for each of `size` elements; a multiple of 16, so that it can be written wide."""
    return -(-size // 128) * 16


def spatial_output(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Convolution's output size along one axis: floor((size + 2 pad - (dilation (kernel - 1) + 1)) / stride) + 1."""
    return (size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1
