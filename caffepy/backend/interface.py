"""The device boundary: every primitive that a layer or solver may ask of a device.

A layer says what is computed, a backend how. A backend belongs to one device and one solver thread.
`cpu/backend.py` implements it with NumPy and numba, `cuda/backend.py` with CuPy and cuDNN; nothing else in caffepy
knows which of them it runs on. What primitives are given is in `types.py`, what a backend hands out in `handles.py`;
primitives that move elements by index are in `indexing_primitives.py`, those of input in `input_ring.py`, those of
fully connected layers in `dense_primitives.py`.

Arrays are NumPy's or CuPy's. Their logical order is Caffe's, (N, C, H, W) or (N, C, D, H, W); in memory such an image
that the backend allocated is channels last, (N, H, W, C) or (N, D, H, W, C), all others are C-contiguous. Two arrays of
one shape from one backend therefore have the same strides, and a primitive may treat them as flat in memory order; an
array that is a slice of another (Concat, Slice) may only be given to `copy` and `add`.

Elements are float32, or where a net asks for it float16 or bfloat16 (`DTYPES`); a bfloat16 array has the dtype uint16
and holds the upper halves of float32 numbers. Whatever the dtype, primitives compute and sum in float32 or
better and round once, at the end. Parameters, their gradients and every array of shape (C,) are float32.

Everything on a CUDA backend is ordered on the backend's stream and may be captured: primitives do not synchronise,
except `to_host`, `from_host` of pageable memory, and `synchronize`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from caffepy.backend.dense_primitives import DensePrimitives
from caffepy.backend.detection_primitives import DetectionPrimitives
from caffepy.backend.elementwise import Expression
from caffepy.backend.handles import AsyncCopy, Convolution, DeviceScalars, DeviceTimer, Event, Graph, TimedEvent
from caffepy.backend.indexing_primitives import IndexingPrimitives
from caffepy.backend.input_ring import InputPrimitives
from caffepy.backend.recurrent_primitives import RecurrentPrimitives
from caffepy.backend.types import Array, BatchNormState, Counter, Geometry, LrnWindow, RandomStream, element_dtype


class Backend(DensePrimitives, DetectionPrimitives, InputPrimitives, RecurrentPrimitives, IndexingPrimitives, ABC):
    """One device, as layers and solvers see it. All floating-point arrays are float32 unless said otherwise."""

    name: str
    """``cpu`` or ``cuda:0``."""

    asynchronous: bool
    """Whether primitives return before their result is there."""

    threads: int = 0
    """How many CPU threads its primitives use; 0: they do not run on the CPU."""

    captures: bool = False
    """Whether work can be captured into graphs."""

    records: bool = False
    """Whether `record` can make repeated work cheaper."""

    capturing: bool = False
    """Whether work is being captured now."""

    dtypes: tuple[str, ...] = ("float32",)
    """Which of DTYPES its blobs can be kept in."""

    mask_dtype: str = "int32"
    """dtype of max pooling's mask where nobody reads it: int32, or uint8 for windows of up to 255 elements."""

    keeps_lrn_scale: bool = True
    """Whether LRN's backward pass needs the scale of its forward pass."""

    holds_values: bool = True
    """Whether arrays hold numbers; false on the meta device, where filling them is needless."""

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

    def capture(self, work: Callable[[], None]) -> Graph:
        """A graph of what `work` asks of this backend; nothing is computed. `work` must have run once before.

        Raises:
            RunError: something in it cannot be captured.
        """
        raise AssertionError(f"{self.name} captures no graphs")

    def record(self, works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
        """Do works that touch arrays by primitives alone; calls that do the same again while no array moves."""
        raise AssertionError(f"{self.name} records nothing")

    def trim(self) -> None:
        """Give the system back what is allocated and not used; nothing changes for what is."""

    @abstractmethod
    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        """Storage for so many numbers and counters, which captured work reads."""

    @abstractmethod
    def record_event(self) -> Event:
        """An event after the work that was queued so far."""

    @abstractmethod
    def record_timed_event(self) -> TimedEvent:
        """An event on the current stream, with its time; cannot be captured."""

    @abstractmethod
    def device_timer(self, count: int) -> DeviceTimer:
        """`count` stopwatches that captured work can start and stop."""

    @abstractmethod
    def copy_to_host_async(self, array: Array) -> AsyncCopy:
        """Queue a copy of a small array to the host; does not wait for it."""

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

    def workspace(self, own: int) -> int:
        """Most bytes that a backend takes for itself if its largest convolution has arrays of `own` bytes."""
        return 0

    def available_memory(self) -> int | None:
        """Bytes that could be allocated; None where nobody says so beforehand."""
        return None

    def arena(self, size: int) -> Array:
        """Memory of `size` bytes, 1-D uint8, for many arrays, see `view_at`.

        Raises:
            OutOfMemoryError: there is not so much.
        """
        return self.zeros((size,), "uint8")

    def view_at(self, arena: Array, offset: int, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """An array of undefined values within an arena, from byte `offset` on, in the memory order of `zeros`."""
        import numpy as np  # not above: the command line's options read constants of this package

        element = element_dtype(dtype)
        size = math.prod(shape) * np.dtype(element).itemsize
        return self.view(arena[offset : offset + size].view(element), shape)

    def workspace_lease(self, buffer: Array | None) -> AbstractContextManager[None]:
        """In a `with` block, primitives take workspaces from `buffer` (1-D uint8) as long as they fit."""
        return nullcontext()

    @abstractmethod
    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        """The elements in logical (C) order under another shape: a view if memory order allows, else a copy.

        An image has the backend's order, all else is C-contiguous.
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
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        """A convolution of these shapes, any number of spatial axes."""

    @abstractmethod
    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        """y = the plan's forward pass + residual, or max(that, 0). Residual, of y's shape and dtype, is not y."""

    def keep_weights(self, plan: Convolution, weights: Array, given: Array | None = None) -> bool:
        """Let the plan's forward passes with `given` (None: `weights`) rely on the present values of `weights`.

        Returns whether the plan, which has them in an order of its own, does so and needs `weights` no more.
        """
        return False

    @abstractmethod
    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        """y = maximum over each window of x (N, C, H, W), clipped to the image; the first maximum or NaN wins.

        mask (shape of y) becomes its index: h * W + w in the plane if int32; if uint8, its index in the window, whose
        rows and columns are counted from the window's own beginning, padding included. Windows: Caffe's
        `pooling_layer.cpp`.
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
    def lrn_across_forward(self, x: Array, y: Array, scale: Array | None, window: LrnWindow) -> None:
        """scale = k + alpha / size * (sum of x^2 over `size` channels around); y = x * scale^-beta.

        `scale` is kept for the backward pass where the backend `keeps_lrn_scale`, else None.
        """

    @abstractmethod
    def lrn_across_backward(
        self, x: Array, y: Array | None, scale: Array | None, dy: Array, dx: Array, window: LrnWindow
    ) -> None:
        """dx = dy * scale^-beta - 2 alpha beta / size * x * sum over the channels around of (dy * y / scale).

        `y` and `scale` are None where the backend does not keep the scale and works both out again from x.
        """

    # -- normalisation and activation ---------------------------------------------------------------

    @abstractmethod
    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        """n.mean and n.inverse = those of x (N, C, ...) for each channel; the running sums take them in.

        With f = n.fraction and m elements a channel: sum_mean = f * sum_mean + mean,
        sum_variance = f * sum_variance + m / (m - 1) * variance, count = f * count + 1. Exact also where the mean is
        large beside the deviation.
        """

    @abstractmethod
    def batch_norm_measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        """The same from a convolution's `sums`, each over so many elements."""

    @abstractmethod
    def batch_norm_finish(self, variance: Array, elements: int, n: BatchNormState) -> None:
        """n.inverse, and the running sums as above, from n.mean and a variance (C,) over so many elements a channel."""

    @abstractmethod
    def batch_norm_load(self, n: BatchNormState) -> None:
        """n.mean and n.inverse = the running sums over their count; 0 and 1 / sqrt(epsilon) if the count is 0."""

    @abstractmethod
    def batch_norm_forward(
        self, x: Array, n: BatchNormState, y: Array, residual: Array | None = None, relu: bool = False,
        mask: Array | None = None,
    ) -> None:  # fmt: skip
        """y = (x - mean) * inverse * scale + bias (+ residual), or max(that, 0).

        `mask` (uint8, `mask_bytes(x.size)` elements) gets one bit for each element in memory order, bit i % 8 of byte
        i // 8: whether the sum was above 0. y may be x.
        """

    @abstractmethod
    def batch_norm_backward_sums(
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool = False,
        mask: Array | None = None, total: Array | None = None,
    ) -> None:  # fmt: skip
        """First pass: `sums` (sum_dy_x, sum_dy) = (sum of g * normal, sum of g).

        g = the sum of `dys`, 0 where the ReLU was off; normal = (x - mean) * inverse. `mask` says where it was off;
        without one that is computed from x. `total` gets g; it may be one of `dys`, and must be given if there are
        several.
        """

    @abstractmethod
    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        """Second pass: dx = scale * inverse * (g - (sum_dy + normal * sum_dy_x) / m), m elements a channel.

        g = dy, 0 where the ReLU was off as x tells if `relu`. dx may be dy.
        """

    @abstractmethod
    def dropout(self, source: Array, destination: Array, ratio: float, stream: RandomStream, counter: Counter) -> None:
        """destination = source / (1 - ratio) where the element's random number is at least ratio, else 0.

        The same counter keeps the same elements, so this is the backward pass as well.
        """

    @abstractmethod
    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        """destination = the sum of two or more arrays of its shape; it may be one of them."""

    # -- softmax ------------------------------------------------------------------------------------

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

        labels: float32, one for each position, in the logical order of x without `axis`. totals: float32 (2,).
        bad_label: int32 (1,): set to the index of some label outside [0, classes), which is then not counted;
        left alone (callers set -1) if there is none.
        """

    @abstractmethod
    def softmax_loss_backward(
        self,
        probabilities: Array,
        labels: Array,
        dx: Array,
        totals: Array | None,
        axis: int,
        ignore_label: int | None,
        scale: float,
    ) -> None:
        """dx = (probabilities - onehot(label)) * scale, 0 where ignored; over max(totals[1], 1) if given."""

    @abstractmethod
    def smooth_loss_forward(
        self, probabilities: Array, labels: Array, totals: Array, axis: int, ignore_label: int | None, smoothing: float
    ) -> None:
        """What label smoothing makes of the sum of losses: each label that counts has part `smoothing` of its target
        spread evenly over all classes.

        totals[0] += smoothing * the sum of (mean over all classes of -log max(p, FLT_MIN)) - (that of the label's own).
        """

    @abstractmethod
    def smooth_loss_backward(
        self, labels: Array, dx: Array, totals: Array | None, axis: int, ignore_label: int | None, scale: float
    ) -> None:
        """dx += (onehot(label) - 1 / classes) * scale, nothing where ignored; over max(totals[1], 1) if given.

        That is what smoothing adds to `softmax_loss_backward`, with its scale times the smoothing.
        """

    @abstractmethod
    def label_ranks(
        self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, higher_wins: bool = False
    ) -> None:
        """ranks = how many classes score higher than the label's own, or as high.

        Of those that score as high all count (BVLC's Accuracy), with `higher_wins` those of a higher number (NVIDIA's).
        labels and ranks: float32, logical order of x without `axis`. bad_label as in `softmax_loss_forward`; a bad
        label's rank is -1.
        """

    # -- random numbers -----------------------------------------------------------------------------

    @abstractmethod
    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        """Fill `out` (first axis: samples) with float32 in [0, 1), the same bits on every backend.

        Counter words: (i // 4, sample low 32 bits, sample high 32 bits, pass_number); key: (seed low ^ stream,
        seed high); word i % 4 of the result; the upper 24 bits times 2^-24.
        """

    # -- health -------------------------------------------------------------------------------------

    @abstractmethod
    def all_finite(self, array: Array) -> bool:
        """Whether no element is NaN or infinite; waits for the device."""
