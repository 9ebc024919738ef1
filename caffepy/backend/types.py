"""Argument types of primitives: arrays and dtypes, window geometry, random streams, statistics; workspace sizes.

Nothing here computes or belongs to a device. The size functions give what a net must know before it allocates arrays:
sizes of outputs, masks and GPU workspaces.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

Array = Any
"""A numpy.ndarray or cupy.ndarray."""

DTYPES = ("float32", "float16", "bfloat16")
"""dtypes of a blob."""

Counter = Any
"""Position in a random sequence: the pair (pass number, global number of the first sample), or a uint64 array of both
in device memory, which a captured graph reads at each launch."""

PRODUCT_WORKSPACE = 32 * 2**20
"""Bytes of cuBLAS's workspace, as NVIDIA recommends for Hopper and newer."""


def element_dtype(dtype: str) -> str:
    """Return the NumPy dtype that stores a blob dtype: uint16 for bfloat16."""
    return "uint16" if dtype == "bfloat16" else dtype


@dataclass(frozen=True)
class Geometry:
    """Window geometry over the spatial axes of a blob, one entry per spatial axis.

    Args:
        kernel: window size.
        stride: step.
        pad: zeros before and after.
        dilation: distance between window elements.
        group: number of groups of input and output channels (convolution only).
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
        k: additive constant.
    """

    size: int
    alpha: float
    beta: float
    k: float = 1.0


@dataclass(frozen=True)
class RandomStream:
    """Key of a counter-based random sequence (Philox 4x32-10, Salmon et al., SC11).

    The number for element i (logical order, within its sample) of global sample s is a function of
    (seed, stream, pass_number, s, i) only, independent of how samples are distributed over devices.

    Args:
        seed: the solver's random_seed, 64 bits.
        stream: identifies the user of random numbers within a net, e.g. a hash of the layer's name; 32 bits.
    """

    seed: int
    stream: int


@dataclass
class BatchNormState:
    """Statistics and parameters of one batch normalisation: float32 arrays of shape (C,), except the count.

    Args:
        mean: of the current batch, or the stored mean.
        inverse: 1 / sqrt(variance + epsilon) of the same.
        scale: factor after normalisation.
        bias: term added after the factor.
        sum_mean: running sum of means (Caffe's blob 0).
        sum_variance: running sum of variances (blob 1).
        count: shape (1,), total weight of the running sums (blob 2).
        epsilon: added to the variance.
        fraction: decay of the running sums per batch.
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
    """A convolution's bottom, expressed by the batch normalisation that produces it.

    Args:
        x: the normalisation's input, of the bottom's shape.
        n: statistics and parameters of the normalisation.
        relu: whether a ReLU follows the normalisation.
        sums: receives the gradients of scale and bias in a backward pass, float32 (C,) each:
            `Backend.batch_norm_backward_sums`.
    """

    x: Array
    n: BatchNormState
    relu: bool
    sums: tuple[Array, Array] | None = None


@dataclass(frozen=True)
class SparseMatrix:
    """A matrix in compressed sparse row (CSR) format, in device memory.

    Args:
        begins: row offsets, int32 (rows + 1,).
        columns: column indices, int32 (entries,), each within [0, columns).
        weights: values, float32 (entries,).
        shape: (rows, columns).
    """

    begins: Array
    columns: Array
    weights: Array
    shape: tuple[int, int]


@dataclass(frozen=True)
class CorrelationWindow:
    """Patches and displacements of the correlation of two images, in pixels; pairs are (rows, columns).

    Args:
        kernel: height and width of a patch.
        stride: distance of the patches in the first image.
        origin: upper left corner of the first patch; negative if it lies in the padding.
        first: the first displacement.
        count: number of displacements.
        step: distance of the displacements.
        subtract: take absolute differences, else products.
    """

    kernel: int
    stride: int
    origin: tuple[int, int]
    first: tuple[int, int]
    count: tuple[int, int]
    step: int
    subtract: bool = False

    @property
    def numbers(self) -> tuple[int, ...]:
        """All settings in the order of the kernels' arguments."""
        return (self.kernel, self.stride, *self.origin, *self.first, *self.count, self.step, int(self.subtract))


class Border(IntEnum):
    """What an image has outside its pixels when it is sampled at fractional positions."""

    ZERO = 0
    """Pixels outside are 0."""
    INSIDE = 1
    """Positions outside [0, size - 1] have a fill value. The derivative at a pixel is the mean of both sides'."""
    REPEAT = 2
    """Positions outside [0, size) have a fill value. The last pixel is repeated once."""


@dataclass(frozen=True)
class BoxLossSettings:
    """Options of SSD's loss: fields of MultiBoxLossParameter; see `MultiBoxLossLayer`.

    Args:
        classes: number of classes, with the background.
        background: label of the background.
        code: value of CodeType, the encoding of predicted boxes.
        threshold: minimum overlap of a prior with its object.
        per_prediction: match every prior above the threshold, not only the best of each object.
        ignore_crossing: ignore priors that cross the image's border.
        difficult: include objects marked as difficult.
        agnostic: give all objects the class after the background's.
        mines: keep only the `ratio` unmatched priors per match that have the largest losses.
        ratio: see `mines`.
        most_overlap: do not mine priors with at least this overlap with an object.
        logistic: use sigmoid cross entropy for the scores, else softmax cross entropy.
        squared: use d^2 / 2 for the boxes, else the smooth L1 loss.
        variance_in_target: do not divide predictions by the priors' variances.
        inside: ignore prior coordinates outside the image.
        weight: weight of the boxes' loss.
        boxes_count: whether the loss includes the boxes' loss.
        scores_count: whether the loss includes the scores' loss.
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
    """Return the workspace bytes that a GPU convolution may use if its arrays have `own` bytes."""
    return min(2**30, 2**25 + 4 * own)


def gpu_workspace(own: int) -> int:
    """Return `Backend.workspace` of a GPU: the workspaces of its largest convolution and of cuBLAS."""
    return PRODUCT_WORKSPACE + (convolution_workspace(own) if own else 0)


def mask_bytes(size: int) -> int:
    """Return the bytes of a bit mask of `size` elements, rounded up to 16 for wide stores."""
    return -(-size // 128) * 16


def spatial_output(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Return convolution's output size: floor((size + 2 pad - (dilation (kernel - 1) + 1)) / stride) + 1."""
    return (size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1
