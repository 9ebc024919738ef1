"""The device boundary: every primitive that a layer or solver may ask of a device.

A layer says what is computed, a backend how. A backend belongs to one device and one solver thread.
`cpu.py` implements it with NumPy and numba, `cuda.py` with CuPy and cuDNN; nothing else in caffepy knows
which of them it runs on.

Arrays are NumPy's or CuPy's. Their logical order is Caffe's (N, C, H, W); in memory a 4-D array that the
backend allocated is channels last (N, H, W, C), all others are C-contiguous. Two arrays of one shape from
one backend therefore have the same strides, and a primitive may treat them as flat in memory order; an array that is a
slice of another (Concat, Slice) may only be given to `copy` and `add`.

Everything on a CUDA backend is ordered on the backend's stream and may be captured: primitives do not synchronise,
except `to_host`, `from_host` of pageable memory, and `synchronize`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from caffepy.backend.expression import Expression

Array = Any
"""A numpy.ndarray or cupy.ndarray."""

MATH_MODES = ("fp32", "tf32")
"""How a GPU multiplies: in full float32, or on tensor cores, which round factors to ten bits of mantissa."""


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


class Convolution(Protocol):
    """A convolution of fixed shapes, planned once (algorithm, workspace) and run many times.

    Shapes for two spatial axes: x (N, C, H, W), weights (num_output, C / group, kernel_h, kernel_w),
    bias (num_output,), y (N, num_output, H', W').
    """

    def forward(self, x: Array, weights: Array, bias: Array | None, y: Array) -> None:
        """y = weights * x (+ bias): cross-correlation, as every Caffe computes it."""

    def backward_data(self, dy: Array, weights: Array, dx: Array) -> None:
        """dx = the transposed convolution of dy with weights; also Deconvolution's forward pass."""

    def backward_weights(self, x: Array, dy: Array, dweights: Array, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy, summed over the batch."""


class Backend(ABC):
    """One device, as layers and solvers see it. All floating-point arrays are float32 unless said otherwise."""

    name: str
    """``cpu`` or ``cuda:0``."""

    asynchronous: bool
    """Whether primitives return before their result is there."""

    # -- the device ---------------------------------------------------------------------------------

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Make this the calling thread's device (and stream, or number of CPU threads) within a `with` block."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything asked of this backend is done."""

    @abstractmethod
    def close(self) -> None:
        """Give back streams, handles and workspaces; the backend cannot be used any more. Callable twice."""

    @abstractmethod
    def device_description(self) -> str:
        """The device in words for the log: ``NVIDIA H200 (device 0, 139.7 GiB)``, ``CPU, 2 threads``."""

    # -- memory -------------------------------------------------------------------------------------

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """A zeroed array in this backend's memory order for that shape.

        Raises:
            DeviceError: out of memory, saying how much was asked for.
        """

    @abstractmethod
    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """A logical view of prod(shape) elements of a 1-D array, in the same memory order as `zeros` chooses."""

    @abstractmethod
    def flat(self, array: Array) -> Array:
        """The elements of an array of this backend as 1-D view in memory order (inverse of `view`)."""

    @abstractmethod
    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        """The elements in logical (C) order under another shape: a view if memory order allows, else a copy.

        The result is C-contiguous when `shape` is not 4-D; for 4-D it has this backend's order.
        """

    @abstractmethod
    def fill(self, array: Array, value: float) -> None:
        """Set every element."""

    @abstractmethod
    def copy(self, source: Array, destination: Array) -> None:
        """destination[...] = source, of equal logical shape and any strides."""

    @abstractmethod
    def add(self, source: Array, destination: Array) -> None:
        """destination[...] += source, of equal logical shape and any strides."""

    @abstractmethod
    def from_host(self, host: Any, destination: Array) -> None:
        """Copy a NumPy array (logical order, equal shape, converted to the destination's dtype) to the device."""

    @abstractmethod
    def to_host(self, array: Array) -> Any:
        """A C-contiguous NumPy copy in logical order; waits for the device."""

    # -- elementwise and reductions -----------------------------------------------------------------

    @abstractmethod
    def apply(
        self, expression: Expression, inputs: Sequence[Array | float], outputs: Sequence[Array], axis: int = 1
    ) -> None:
        """outputs = expression(*inputs) for each element; see `Expression`.

        Arguments of kind `Each` and all outputs have one shape. Arguments of kind `Channel` have the shape of
        those axes that start at `axis`: (C,) for axis 1 of an (N, C, H, W) array, (C, H) likewise.
        An output may be one of the inputs.
        """

    @abstractmethod
    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Array | float],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        """outputs (+)= the sum of expression(*inputs) over all axes but those of the output.

        An output of shape (C,) with axis 1 keeps the channels; of shape () it is the sum over everything.
        Sums are made pairwise or in float64, always in the same order: same input, same bits.
        """

    @abstractmethod
    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        """out (+)= op(a) @ op(b), 2-D arrays with a unit stride in one axis."""

    # -- windows ------------------------------------------------------------------------------------

    @abstractmethod
    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry
    ) -> Convolution:
        """A convolution of these shapes, any number of spatial axes."""

    @abstractmethod
    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        """y = maximum over each window of x (N, C, H, W), clipped to the image; the first maximum wins.

        mask (int32, shape of y) becomes its place h * W + w in the plane. Windows: Caffe's `pooling_layer.cpp`.
        """

    @abstractmethod
    def pool_max_backward(self, dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
        """dx = sum of dy over the windows whose maximum lies there."""

    @abstractmethod
    def pool_average_forward(self, x: Array, y: Array, geometry: Geometry) -> None:
        """y = sum over each window / its area, where the area counts padding but ends at H + pad, W + pad (Caffe)."""

    @abstractmethod
    def pool_average_backward(self, dy: Array, dx: Array, geometry: Geometry) -> None:
        """dx = each dy / area, spread over its window."""

    @abstractmethod
    def lrn_across_forward(
        self, x: Array, y: Array, scale: Array, size: int, alpha: float, beta: float, k: float
    ) -> None:
        """scale = k + alpha / size * (sum of x^2 over `size` channels around); y = x * scale^-beta."""

    @abstractmethod
    def lrn_across_backward(
        self, x: Array, y: Array, scale: Array, dy: Array, dx: Array, size: int, alpha: float, beta: float
    ) -> None:
        """dx = dy * scale^-beta - 2 alpha beta / size * x * sum over the channels around of (dy * y / scale)."""

    # -- classes ------------------------------------------------------------------------------------

    @abstractmethod
    def softmax_forward(self, x: Array, y: Array, axis: int) -> None:
        """y = exp(x - max) / sum of it, along `axis`."""

    @abstractmethod
    def softmax_backward(self, y: Array, dy: Array, dx: Array, axis: int) -> None:
        """dx = y * (dy - sum over `axis` of y * dy)."""

    @abstractmethod
    def softmax_loss_forward(
        self,
        x: Array,
        labels: Array,
        probabilities: Array,
        totals: Array,
        bad_label: Array,
        axis: int,
        ignore_label: int | None,
    ) -> None:
        """probabilities = softmax(x); totals[0] = sum of -log max(p[label], FLT_MIN); totals[1] = labels counted.

        labels: float32, one for each place, in the logical order of x without `axis`. totals: float32 (2,).
        bad_label: int32 (1,): set to the index of some label outside [0, classes), which is then not counted;
        left alone (callers set -1) if there is none.
        """

    @abstractmethod
    def softmax_loss_backward(
        self,
        probabilities: Array,
        labels: Array,
        dx: Array,
        totals: Array,
        axis: int,
        ignore_label: int | None,
        scale: float,
        divide_by_valid: bool,
    ) -> None:
        """dx = (probabilities - onehot(label)) * scale, 0 where ignored; over max(totals[1], 1) if divide_by_valid."""

    @abstractmethod
    def label_ranks(self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int) -> None:
        """ranks = how many classes score at least as high as the label's own, itself not counted (BVLC's Accuracy).

        labels and ranks: float32, logical order of x without `axis`. bad_label as in `softmax_loss_forward`; a bad
        label's rank is -1.
        """

    # -- random numbers -----------------------------------------------------------------------------

    @abstractmethod
    def random_uniform(
        self, out: Array, stream: RandomStream, pass_number: int, first_sample: int
    ) -> None:
        """Fill `out` (first axis: samples) with float32 in [0, 1), the same bits on every backend.

        Counter words: (i // 4, sample low 32 bits, sample high 32 bits, pass_number); key: (seed low ^ stream,
        seed high); word i % 4 of the result; the upper 24 bits times 2^-24.
        """

    # -- health -------------------------------------------------------------------------------------

    @abstractmethod
    def all_finite(self, array: Array) -> bool:
        """Whether no element is NaN or infinite; waits for the device."""


def spatial_output(size: int, kernel: int, stride: int, pad: int, dilation: int) -> int:
    """Convolution's output size along one axis: floor((size + 2 pad - (dilation (kernel - 1) + 1)) / stride) + 1."""
    return (size + 2 * pad - (dilation * (kernel - 1) + 1)) // stride + 1


