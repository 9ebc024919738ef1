"""The device boundary: all primitives that layers and solvers call.

A layer states what to compute; a backend decides how. A backend belongs to one device and one solver thread.
Each group of primitives is an abstract class in this module. The modules of the same names in `cpu/` (NumPy and numba)
and `cuda/` (CuPy and cuDNN) implement it: `PoolingPrimitives` in `cpu/pooling.py` and `cuda/pooling.py`. But
`CopyPrimitives` and `InputPrimitives` are in `memory.py`, `ElementwisePrimitives` and `ReductionPrimitives` in
`expression.py`, and `DensePrimitives` in `gemm.py`. Some primitives have a reference implementation here, composed of
elementary primitives. A backend inherits it until it has its own kernel; tests compare the kernel with it. `types.py`
defines the types of arguments and of results.

Arrays are NumPy or CuPy arrays. Their logical order is Caffe's, (N, C, H, W) or (N, C, D, H, W). Images that a backend
allocates are channels last in memory, (N, H, W, C) or (N, D, H, W, C); all other arrays are C-contiguous. Two arrays of
one shape from one backend therefore have the same strides, and a primitive may treat them as flat in memory order.
Slices of other arrays (Concat, Slice) may only be passed to `copy` and `add`.

Elements are float32, or float16 or bfloat16 where the net asks for it (`DTYPES`). A bfloat16 array has the dtype uint16
and holds the upper halves of float32 numbers. For every dtype, primitives compute and accumulate in float32 or
better and round once, at the end. Parameters, their gradients and every array of shape (C,) are float32.

All work of a CUDA backend is ordered on the backend's stream and may be captured. Primitives do not synchronise,
except `to_host`, `from_host` of pageable memory, and `synchronize`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property
from typing import Any

from caffepy.backend.expression import Expression
from caffepy.backend.formulas import (
    drop,
    finished,
    gradient_sums,
    identity,
    input_gradient,
    moments,
    normalise,
    normalise_relu,
    plus_rectified,
    product_with_channel,
    rectified,
    running_count,
    scaled,
    squared_distance,
    stored_statistics,
    total,
    where_normal_positive,
    where_positive,
)
from caffepy.backend.types import (
    Array,
    AsyncCopy,
    BatchNormState,
    Border,
    BoxLoss,
    BoxLossSettings,
    Convolution,
    CorrelationWindow,
    Counter,
    DeviceScalars,
    DeviceTimer,
    Event,
    Geometry,
    Graph,
    HostRing,
    ImageSlot,
    InputRing,
    LrnWindow,
    RandomStream,
    SparseMatrix,
    TimedEvent,
    address,
    element_dtype,
)


class MemoryPrimitives(ABC):
    """Device and array management. Floating-point arrays are float32 unless stated otherwise."""

    name: str
    """``cpu`` or ``cuda:0``."""

    dtypes: tuple[str, ...] = ("float32",)
    """Blob dtypes that the device supports, a subset of DTYPES."""

    holds_values: bool = True
    """Whether arrays hold numbers. False on the meta device, so that fillers can be skipped."""

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Make this the calling thread's device, with its stream or CPU thread count, within a `with` block."""

    @abstractmethod
    def device_description(self) -> str:
        """Return the device description for the log: ``NVIDIA H200 (device 0, 139.7 GiB)``, ``CPU, 2 threads``."""

    @abstractmethod
    def zeros(self, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """Return a zeroed array in this backend's memory order for that shape.

        Raises:
            DeviceError: out of memory; the message states the requested size.
        """

    @abstractmethod
    def view(self, flat: Array, shape: tuple[int, ...]) -> Array:
        """Return a logical view of prod(shape) elements of a 1-D array, in the memory order of `zeros`."""

    @abstractmethod
    def flat(self, array: Array) -> Array:
        """Return the elements of an array as a 1-D view in memory order (inverse of `view`)."""

    def workspace(self, own: int) -> int:
        """Return the most workspace bytes for a net whose largest convolution has arrays of `own` bytes."""
        return 0

    def available_memory(self) -> int | None:
        """Return the bytes that can still be allocated, or None if unknown."""
        return None

    def arena(self, size: int) -> Array:
        """Return `size` bytes of memory, 1-D uint8, to be divided into arrays by `view_at`.

        Raises:
            OutOfMemoryError: the allocation failed.
        """
        return self.zeros((size,), "uint8")

    def view_at(self, arena: Array, offset: int, shape: tuple[int, ...], dtype: str = "float32") -> Array:
        """Return an uninitialised array at byte `offset` of an arena, in the memory order of `zeros`."""
        import numpy as np  # imported lazily: the command line's options import constants of this package

        element = element_dtype(dtype)
        size = math.prod(shape) * np.dtype(element).itemsize
        return self.view(arena[offset : offset + size].view(element), shape)

    def workspace_lease(self, buffer: Array | None) -> AbstractContextManager[None]:
        """Within a `with` block, primitives take workspaces from `buffer` (1-D uint8) as long as they fit."""
        return nullcontext()

    @abstractmethod
    def reshaped(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return the elements in logical (C) order under another shape: a view if memory order allows, else a copy.

        An image has the backend's memory order; any other array is C-contiguous.
        """

    @cached_property
    def _buffers(self) -> dict[tuple[str, tuple[int, ...]], Array]:
        return {}

    def _buffer(self, purpose: str, shape: tuple[int, ...]) -> Array:
        """Return a cached temporary array, valid within one call of a reference implementation."""
        key = (purpose, tuple(shape))
        if key not in self._buffers:
            self._buffers[key] = self.zeros(tuple(shape))
        return self._buffers[key]


class CopyPrimitives(MemoryPrimitives):
    """Fill and copy."""

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
        """Copy a NumPy array (logical order, equal shape) to the device, converted to the destination's dtype."""

    @abstractmethod
    def to_host(self, array: Array) -> Any:
        """Return a C-contiguous NumPy copy in logical order. Waits for the device."""


class ElementwisePrimitives(CopyPrimitives):
    """Elementwise formulas."""

    @abstractmethod
    def apply(
        self, expression: Expression, inputs: Sequence[Array | float], outputs: Sequence[Array], axis: int = 1
    ) -> None:
        """outputs = expression(*inputs) for each element; see `Expression`.

        Arguments of kind `Each` and all outputs have one shape. Arguments of kind `Channel` have the shape of the axes
        that start at `axis`: (C,) for axis 1 of an (N, C, H, W) array, or (C, H). They repeat along their axes of size
        1: (N, 1, H, W) for axis 0 has a value for each pixel. An output may alias an input.
        """

    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        """destination = the sum of two or more arrays of its shape. It may alias one of them."""
        # Read the operand that aliases the destination before the destination is overwritten.
        first, second, *more = sorted(sources, key=lambda array: address(array) != address(destination))
        self.apply(total, (first, second), (destination,))
        for array in more:
            self.apply(total, (destination, array), (destination,))


class ReductionPrimitives(ElementwisePrimitives):
    """Reductions over axes."""

    @abstractmethod
    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Array | float],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        """outputs (+)= the sum of expression(*inputs) over all axes that the output lacks.

        An output of shape (C,) with axis 1 keeps the channels; an output of shape () is the sum of all elements. Axes
        of size 1 are summed too.
        Sums are pairwise or in float64, always in the same order: same input, same bits.
        """

    @abstractmethod
    def all_finite(self, array: Array) -> bool:
        """Return whether every element is finite. Waits for the device."""


class DensePrimitives(ElementwisePrimitives):
    """Matrix products, with an optional elementwise epilogue."""

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
        """out (+)= op(a) @ op(b) for 2-D arrays with a unit stride in one axis."""

    def gemm_and_apply(
        self,
        expression: Expression,
        a: Array,
        b: Array,
        channel: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
    ) -> None:
        """out = expression(op(a) @ op(b), channel), for 2-D arrays as in `gemm`.

        `channel` is float32, with one element per column of out. The formula takes an Each and a Channel argument and
        has one result. The backend may round the product to out's dtype before it applies the formula.
        """
        self.gemm(a, b, out, transpose_a, transpose_b)
        self.apply(expression, (out, channel), (out,))


class ConvolutionPrimitives(ElementwisePrimitives):
    """Convolutions, planned per shape."""

    @abstractmethod
    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        """Plan a convolution of these shapes with any number of spatial axes."""

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        """y = the plan's forward pass + residual, then ReLU if `relu`. residual: y's shape and dtype, not y itself."""
        plan.forward(x, weights, bias, y)
        self.apply(plus_rectified if relu else total, (y, residual), (y,))

    def keep_weights(self, plan: Convolution, weights: Array, given: Array | None = None) -> bool:
        """Let the plan cache `weights` in its own layout for forward passes that are given `given` (None: `weights`).

        Returns True if the plan cached the values and does not need `weights` any more.
        """
        return False


class PoolingPrimitives(ABC):
    """Maximum, average and stochastic pooling."""

    mask_dtype: str = "int32"
    """dtype of max pooling's mask if it is not a top: int32, or uint8 for windows of up to 255 elements."""

    @abstractmethod
    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        """y = maximum over each window of x (N, C, H, W), clipped to the image; the first maximum or NaN wins.

        mask has y's shape and receives the index of the maximum. int32: h * W + w in the plane. uint8: the index in the
        window, counted from the window's origin, which may lie in the padding. Windows: Caffe's `pooling_layer.cpp`.
        """

    @abstractmethod
    def pool_max_backward(self, dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
        """dx = sum of dy over the windows whose maximum has this position."""

    @abstractmethod
    def pool_average_forward(self, x: Array, y: Array, geometry: Geometry) -> None:
        """y = window sum / window area. The area includes padding up to H + pad, W + pad (as Caffe)."""

    @abstractmethod
    def pool_average_backward(self, dy: Array, dx: Array, geometry: Geometry) -> None:
        """dx = each dy / area, distributed over its window."""

    @abstractmethod
    def pool_stochastic_forward(self, x: Array, chance: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        """y = an element of each window of x, drawn in proportion to its value by `chance`, uniform in [0, 1).

        It is the first element, row by row, at which the running sum reaches chance * the window's sum. mask, int32,
        receives h * W + w, as `pool_max_backward` expects. Windows are clipped to the image and have no padding.
        """


class NormalisationPrimitives(ReductionPrimitives):
    """Batch normalisation, activation gradients, local response normalisation."""

    keeps_lrn_scale: bool = True
    """Whether LRN's backward pass needs the scale of its forward pass."""

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        """Compute n.mean and n.inverse of x (N, C, ...) per channel and update the running sums.

        With f = n.fraction and m elements per channel: sum_mean = f * sum_mean + mean,
        sum_variance = f * sum_variance + m / (m - 1) * variance, count = f * count + 1. Accurate also if the mean is
        large relative to the deviation.
        """
        # Two passes: E(x^2) - E(x)^2 cancels if the mean is large.
        elements = math.prod(x.shape) // max(x.shape[1], 1)
        per_element = 1 / max(elements, 1)
        variance = self._buffer("variance", n.mean.shape)
        self.reduce(scaled, (x, per_element), (n.mean,))
        self.reduce(squared_distance, (x, n.mean, per_element), (variance,))
        self.batch_norm_finish(variance, elements, n)

    def batch_norm_measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        """As `batch_norm_measure`, from a convolution's `sums` over `elements` elements per channel."""
        variance = self._buffer("variance", n.mean.shape)
        self.apply(moments, (sums[0], sums[1], 1 / max(elements, 1)), (n.mean, variance), axis=0)
        self.batch_norm_finish(variance, elements, n)

    def batch_norm_finish(self, variance: Array, elements: int, n: BatchNormState) -> None:
        """Compute n.inverse and update the running sums from n.mean and a variance (C,) over `elements` per channel."""
        correction = elements / (elements - 1) if elements > 1 else 1.0
        inputs = (n.mean, variance, n.sum_mean, n.sum_variance, n.fraction, correction, n.epsilon)
        self.apply(finished, inputs, (n.inverse, n.sum_mean, n.sum_variance), axis=0)
        self.apply(running_count, (n.count, n.fraction), (n.count,), axis=0)

    def batch_norm_load(self, n: BatchNormState) -> None:
        """Set n.mean and n.inverse from the running sums; 0 and 1 / sqrt(epsilon) if the count is 0."""
        count = self.view(n.count, ())
        self.apply(stored_statistics, (n.sum_mean, n.sum_variance, count, n.epsilon), (n.mean, n.inverse))

    def batch_norm_forward(
        self,
        x: Array,
        n: BatchNormState,
        y: Array,
        residual: Array | None = None,
        relu: bool = False,
        mask: Array | None = None,
    ) -> None:
        """y = (x - mean) * inverse * scale + bias (+ residual), then ReLU if `relu`. y may alias x.

        `mask` (uint8, `mask_bytes(x.size)` elements) receives one bit per element in memory order, bit i % 8 of byte
        i // 8: whether the value before the ReLU was above 0.
        """
        inputs = (x, n.mean, n.inverse, n.scale, n.bias)
        if residual is None and mask is None:
            self.apply(normalise_relu if relu else normalise, inputs, (y,))
            return
        self.apply(normalise, inputs, (y,))
        if residual is not None:
            self.apply(total, (y, residual), (y,))
        if mask is not None:
            self._write_mask(y, mask)
        if relu:
            self.apply(rectified, (y,), (y,))

    def _write_mask(self, y: Array, mask: Array) -> None:
        """Write one bit per element, computed on the host. Only the reference implementation uses it."""
        import numpy as np

        bits = np.packbits(self.to_host(self.flat(y)) > 0, bitorder="little")
        host = np.zeros(mask.shape, np.uint8)
        host[: len(bits)] = bits
        self.from_host(host, mask)

    def _read_mask(self, mask: Array, shape: tuple[int, ...]) -> Array:
        import numpy as np

        bits = np.unpackbits(self.to_host(mask), bitorder="little")[: math.prod(shape)]
        array = self._buffer("mask", shape)
        self.from_host(bits.astype(np.float32), self.flat(array))
        return array

    def batch_norm_backward_sums(
        self,
        x: Array,
        dys: Sequence[Array],
        n: BatchNormState,
        sums: Sequence[Array],
        relu: bool = False,
        mask: Array | None = None,
        total: Array | None = None,
    ) -> None:
        """First pass: `sums` (sum_dy_x, sum_dy) = (sum of g * normal, sum of g).

        g = the sum of `dys`, 0 where the ReLU was inactive; normal = (x - mean) * inverse. The ReLU's state is read
        from `mask`, or recomputed from x without a mask. `total` receives g. It may alias one of `dys` and is required
        if there are several.
        """
        g = dys[0]
        if len(dys) > 1:
            assert total is not None, "several gradients need `total`"
            self.add_n(dys, total)
            g = total
        if relu:
            out = total if total is not None else self._buffer("gradient", x.shape)
            if mask is not None:
                self.apply(where_positive, (self._read_mask(mask, x.shape), g), (out,))
            else:
                self.apply(where_normal_positive, (x, g, n.mean, n.inverse, n.scale, n.bias), (out,))
            g = out
        elif total is not None and g is not total:
            self.copy(g, total)
        self.reduce(gradient_sums, (x, g, n.mean, n.inverse), sums)

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        """Second pass: dx = scale * inverse * (g - (sum_dy + normal * sum_dy_x) / m), m elements per channel.

        g = dy, or 0 where `relu` is set and the ReLU, recomputed from x, was inactive. dx may alias dy.
        """
        if relu:
            self.apply(where_normal_positive, (x, dy, n.mean, n.inverse, n.scale, n.bias), (dx,))
            dy = dx
        per_element = x.shape[1] / max(math.prod(x.shape), 1)
        inputs = (x, dy, n.mean, n.inverse, n.scale, *sums, per_element)
        self.apply(input_gradient, inputs, (dx,))

    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        """dx = dy where y > 0, else 0; dbias (+)= the sum of dx per channel (axis 1). dx may alias dy."""
        self.activation_backward(where_positive, y, dy, dx, dbias, accumulate)

    def activation_backward(
        self, expression: Expression, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        """dx = expression(y, dy), a formula of two Each arguments; dbias (+)= the sum of dx per channel (axis 1).

        The backend may round dx to its dtype before the sum. dx may alias dy.
        """
        self.apply(expression, (y, dy), (dx,))
        if dbias is not None:
            self.reduce(identity, (dx,), (dbias,), accumulate=accumulate)

    @abstractmethod
    def lrn_across_forward(self, x: Array, y: Array, scale: Array | None, window: LrnWindow) -> None:
        """scale = k + alpha / size * (sum of x^2 over the `size` nearest channels); y = x * scale^-beta.

        `scale` is kept for the backward pass if the backend `keeps_lrn_scale`, else it is None.
        """

    @abstractmethod
    def lrn_across_backward(
        self, x: Array, y: Array | None, scale: Array | None, dy: Array, dx: Array, window: LrnWindow
    ) -> None:
        """dx = dy * scale^-beta - 2 alpha beta / size * x * sum over the nearest channels of (dy * y / scale).

        `y` and `scale` are None if the backend recomputes both from x.
        """


class SoftmaxPrimitives(ABC):
    """Softmax, softmax loss, and label ranks."""

    @abstractmethod
    def softmax_forward(self, x: Array, y: Array, axis: int) -> None:
        """y = exp(x - max) / sum(exp(x - max)) along `axis`."""

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
        bad_label: int32 (1,): receives the index of a label outside [0, classes), which is then not counted. It is
        unchanged if all labels are valid; callers initialise it to -1.
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
        """dx = (probabilities - onehot(label)) * scale, 0 where ignored; divided by max(totals[1], 1) if given."""

    @abstractmethod
    def smooth_loss_forward(
        self, probabilities: Array, labels: Array, totals: Array, axis: int, ignore_label: int | None, smoothing: float
    ) -> None:
        """Add label smoothing's share of the loss: `smoothing` of each target is spread evenly over all classes.

        totals[0] += smoothing * sum of (mean over classes of -log max(p, FLT_MIN) + log max(p[label], FLT_MIN)).
        """

    @abstractmethod
    def smooth_loss_backward(
        self, labels: Array, dx: Array, totals: Array | None, axis: int, ignore_label: int | None, scale: float
    ) -> None:
        """dx += (onehot(label) - 1 / classes) * scale, except where ignored; divided by max(totals[1], 1) if given.

        This is label smoothing's correction of `softmax_loss_backward`; `scale` is that call's scale times the
        smoothing.
        """

    @abstractmethod
    def label_ranks(
        self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, higher_wins: bool = False
    ) -> None:
        """ranks = how many other classes score at least as high as the label's class.

        Among equal scores all count (BVLC's Accuracy), or with `higher_wins` only higher classes (NVIDIA's Accuracy).
        labels and ranks: float32, logical order of x without `axis`. bad_label as in `softmax_loss_forward`; a bad
        label's rank is -1.
        """


class RandomPrimitives(ElementwisePrimitives):
    """Counter-based random numbers; see `RandomStream`."""

    @abstractmethod
    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        """Fill `out` (first axis: samples) with float32 in [0, 1), the same bits on every backend.

        Counter words: (i // 4, sample low 32 bits, sample high 32 bits, pass_number). Key: (seed low ^ stream, seed
        high). Element i takes word i % 4 of the result: its upper 24 bits times 2^-24.
        """

    @cached_property
    def _chances(self) -> dict[tuple[int, tuple[int, ...]], tuple[Counter, RandomStream, Array]]:
        return {}

    def dropout(self, source: Array, destination: Array, ratio: float, stream: RandomStream, counter: Counter) -> None:
        """destination = source / (1 - ratio) where the element's random number is at least ratio, else 0.

        The same counter keeps the same elements, so the backward pass calls it too.
        """
        key = (stream.stream, tuple(source.shape))
        cached = self._chances.get(key)
        chances = self.zeros(source.shape) if cached is None else cached[2]
        if cached is None or cached[:2] != (counter, stream):
            self.random_uniform(chances, stream, counter)
            self._chances[key] = (counter, stream, chances)
        self.apply(drop, (source, chances, ratio, 1 / (1 - ratio)), (destination,))


class IndexingPrimitives(ABC):
    """Indexed access: row gather and scatter, sparse pixel maps, top-k, unpooling, regions of interest.

    Arrays are dense and float32 unless stated otherwise. Rows are slices along axis 0. Every sum has a fixed order:
    same input, same bits.

    `bad`: int32 (1,), receives the position in `index` (or `labels`, `mask`, `rois`) of an entry that is out of range.
    It is unchanged if all entries are valid; callers initialise it to -1. Invalid entries give zeros and no gradient.
    """

    @abstractmethod
    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        """destination[i] = source[index[i]]. index: float32 (rows of destination,), rounded towards 0."""

    @abstractmethod
    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        """destination[index[i]] += source[i] in the order of i; the gradient of `gather_rows`."""

    @abstractmethod
    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        """out[i, labels[i]] = 1, all others 0; labels (size,), out (size, classes)."""

    @abstractmethod
    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        """y[n, c] = matrix @ x[n, c], with the axes from the third on flattened in logical order; any dtype.

        x (N, C, ...) has one element per matrix column and channel, y (N, C, ...) one per matrix row and channel.
        """

    @abstractmethod
    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        """Write the largest elements along `axis` in descending order; of equal elements the larger index comes first.

        indices and values have x's shape except along `axis`, where their size is the number of elements to find.
        """

    @abstractmethod
    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        """y[n, c, mask] = x, all others 0. mask (x's shape) is h * W + w in y's plane; the last duplicate wins."""

    @abstractmethod
    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        """dx = dy[n, c, mask]."""

    @abstractmethod
    def roi_max_forward(self, x: Array, rois: Array, y: Array, mask: Array, scale: float, bad: Array) -> None:
        """y (R, C, h, w) = the maximum of each bin of each region of x (N, C, H, W); 0 where a bin is empty.

        rois, float32 of R * 5 elements: sample, x1, y1, x2, y2 before `scale`. mask (int32, y's shape) receives
        h * W + w, or -1. Bins: Fast R-CNN's `roi_pooling_layer.cpp`.
        """

    @abstractmethod
    def roi_max_backward(self, dy: Array, rois: Array, mask: Array, dx: Array, scale: float) -> None:
        """dx = the sum of dy over the bins whose maximum has this position, in the regions' order."""

    @abstractmethod
    def roi_average_forward(self, x: Array, rois: Array, y: Array, scale: float, bad: Array) -> None:
        """y (R, D, g, g) = the mean over each bin of each region, of the bin's channel of x (N, D * g * g, H, W).

        Bin (h, w) of output d reads channel (d * g + h) * g + w (R-FCN's `psroi_pooling_layer.cu`).
        """

    @abstractmethod
    def roi_average_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        """dx = each dy / the bin's area, distributed over its bin of its channel, summed in the regions' order."""

    @abstractmethod
    def roi_bilinear_forward(
        self, x: Array, samples: Array, rows: Array, columns: Array, y: Array, group: int, bad: Array
    ) -> None:
        """y (R, D, h, w) = bilinear samples of x (N, D * group^2, H, W) at the points (rows[r, i], columns[r, j]).

        samples (R,), rows (R, h), columns (R, w): float32. Points are moved to [0, H - 1] and [0, W - 1]; those more
        than 0.5 outside give 0. Point (i, j) of output d reads channel (d * group + i * group // h) * group +
        j * group // w; h and w are multiples of group.
        """

    @abstractmethod
    def roi_bilinear_backward(
        self, dy: Array, samples: Array, rows: Array, columns: Array, dx: Array, group: int
    ) -> None:
        """dx = the sum of dy times the weight of each pixel in `roi_bilinear_forward`, in the regions' order."""


class FlowPrimitives(ABC):
    """Comparison of two images at displacements, and bilinear sampling at positions. Arrays are dense and float32."""

    @abstractmethod
    def correlate_forward(self, a: Array, b: Array, y: Array, window: CorrelationWindow) -> None:
        """y (N, displacements, H', W') = the mean product, or mean absolute difference, of patches of a and b.

        a and b: (N, C, H, W). The mean is over channels and pixels of a patch; pixels outside the images are 0.
        Displacements are counted row by row.
        """

    @abstractmethod
    def correlate_backward(
        self, dy: Array, a: Array, b: Array, da: Array | None, db: Array | None, window: CorrelationWindow
    ) -> None:
        """Compute the gradients by a and by b; None: that gradient is not needed."""

    @abstractmethod
    def sample_forward(self, x: Array, positions: Array, y: Array, border: Border, fill: float) -> None:
        """y (N, C, H', W') = x (N, C, H, W) at `positions` (N, 2, H', W'), columns and rows, by bilinear interpolation.

        `border` says which positions outside the image have the value `fill`.
        """

    @abstractmethod
    def sample_backward(
        self, x: Array, positions: Array, dy: Array, dx: Array | None, d_positions: Array | None, border: Border
    ) -> None:
        """Compute the gradients by x and by the positions; None: that gradient is not needed."""


class RecurrentPrimitives(ElementwisePrimitives):
    """LSTM gates of one time step, for N streams. Arrays are float32 unless stated otherwise."""

    @abstractmethod
    def lstm_unit_forward(self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array) -> None:
        """Compute one time step (Caffe's `lstm_unit_layer.cpp`) from the gates' pre-activations of shape (N, 4 D).

        gates become (i, f, o, g) = (sigmoid, sigmoid, sigmoid, tanh) of their four parts;
        cell = cont * f * cell_before + i * g, where the first term is skipped if cont is 0;
        hidden = o * tanh(cell). cell_before, cell and hidden: (N, D); cont: (N,).
        """

    @abstractmethod
    def lstm_unit_backward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, d_hidden: Array
    ) -> None:
        """Compute the gradients by the gates' pre-activations and by cell_before from those by cell and hidden.

        gates hold (i, f, o, g) and become the gradient by their pre-activations; d_cell becomes that by cell_before.
        """

    def lstm_step_forward(
        self,
        gates: Array,
        cell_before: Array,
        cont: Array,
        cell: Array,
        hidden: Array,
        next_cont: Array | None = None,
        carried: Array | None = None,
    ) -> None:
        """`lstm_unit_forward` within a loop over time, which also sets carried = next_cont * hidden for the next step.

        The last step has neither next_cont nor carried. hidden and carried, both (N, D), have any blob dtype.
        """
        self.lstm_unit_forward(gates, cell_before, cont, cell, hidden)
        if next_cont is not None and carried is not None:
            self.apply(product_with_channel, (hidden, next_cont), (carried,), axis=0)

    def lstm_step_backward(
        self,
        gates: Array,
        cell_before: Array,
        cont: Array,
        cell: Array,
        d_cell: Array,
        dy: Array,
        d_gates: Array,
        next_cont: Array | None = None,
        d_carried: Array | None = None,
    ) -> None:
        """`lstm_unit_backward` within a loop over time, with d_hidden = dy + next_cont * d_carried.

        dy is the top's gradient, d_carried the gradient by the next step's `carried`; the last step has none. d_gates
        receives the gradient by the gates' pre-activations and may alias gates. dy (N, D) and d_gates (N, 4 D) share
        one blob dtype; d_carried, (N, D), is overwritten.
        """
        d_hidden = dy
        if next_cont is not None and d_carried is not None:
            d_hidden = d_carried
            self.apply(product_with_channel, (d_carried, next_cont), (d_hidden,), axis=0)
            self.add(dy, d_hidden)
        self.lstm_unit_backward(gates, cell_before, cont, cell, d_cell, d_hidden)
        if d_gates is not gates:
            self.copy(gates, d_gates)


class DetectionPrimitives:
    """SSD's loss with prior matching and hard negative mining on the device."""

    computes_box_loss: bool = False
    """Whether the backend implements `box_loss`; otherwise the layer computes it on the host."""

    def box_loss(self, settings: BoxLossSettings, images: int, priors: int) -> BoxLoss:
        """Plan SSD's loss for a batch of `images` with `priors` each. Requires `computes_box_loss`."""
        raise AssertionError("SSD's loss is computed on the host")


class InputPrimitives(CopyPrimitives):
    """Net input. The reference implementation uses host memory and NumPy."""

    def host_memory(self, size: int) -> Any:
        """Return host memory (NumPy, uint8, 1-D) from which `InputRing.put` copies at full speed. Thread-safe."""
        import numpy as np

        return np.empty(size, np.uint8)

    def adopt(self, array: Any) -> Array | None:
        """Wrap another library's array without a copy; None if it is not in this device's memory.

        Work that fills the array has finished when this returns.
        """
        return None

    def upload(self, host: Any, destination: Array) -> None:
        """As `from_host`, through a staging buffer for full-speed transfers; does not wait for the copy.

        The caller may change the host array when this returns.
        """
        self.from_host(host, destination)

    def download(self, arrays: Sequence[Array]) -> list[Any]:
        """As `to_host` of each array, through a staging buffer for full-speed transfers; waits once for all."""
        return [self.to_host(array) for array in arrays]

    def input_ring(self, slot_size: int, block: int, blocks: int) -> InputRing:
        """Return a ring of input slots; see `InputRing`.

        Raises:
            DeviceError: out of memory.
        """
        return HostRing(slot_size, block, blocks)

    def take_images(
        self,
        ring: InputRing,
        counter: Counter,
        slot: ImageSlot,
        mean: Array,
        scale: float,
        images: Array,
        labels: Array | None,
    ) -> None:
        """images[n, c, h, w] = (pixel - mean[c, top + h, left + w']) * scale, for the pass in `counter`.

        w' is w, or W - 1 - w if the image is mirrored. mean: float32 of shape (C, full H, full W) if images are crops
        of larger images, or (C, 1, 1) for one value per channel. images: (N, C, H, W), any dtype. labels: float32 (N,).
        """
        import numpy as np

        assert isinstance(ring, HostRing)
        label_values, crops, pixels = slot.parts(ring.bytes_of(counter[0], 0, slot.size))
        means = self.to_host(mean)
        result = np.empty(slot.shape, np.float32)
        for image, (mirror, top, left), out in zip(pixels, crops, result, strict=True):
            part = means if means[0].size == 1 else means[:, top : top + slot.height, left : left + slot.width]
            values = (image.astype(np.float32) - part) * np.float32(scale)
            out[...] = values[:, :, ::-1] if mirror else values
        self.from_host(result, images)
        if labels is not None:
            self.from_host(label_values, labels)

    def take_values(self, ring: InputRing, counter: Counter, offset: int, values: Array) -> None:
        """Read float32 values, in the memory order of `values`, from byte `offset` of the pass's slot."""
        assert isinstance(ring, HostRing)
        source = ring.bytes_of(counter[0], offset, 4 * values.size).view("float32")
        self.copy(self.view(source, values.shape), values)


class Backend(
    DensePrimitives,
    ConvolutionPrimitives,
    PoolingPrimitives,
    NormalisationPrimitives,
    SoftmaxPrimitives,
    RandomPrimitives,
    IndexingPrimitives,
    FlowPrimitives,
    RecurrentPrimitives,
    DetectionPrimitives,
    InputPrimitives,
):
    """One device as seen by layers and solvers: all groups of primitives, streams, events and graphs."""

    asynchronous: bool
    """Whether primitives return before their result is available."""

    threads: int = 0
    """CPU threads that primitives use; 0 if they do not run on the CPU."""

    captures: bool = False
    """Whether `capture` supports complete solver iterations."""

    captures_inference: bool = False
    """Whether `capture` supports forward passes of `recordable` layers. Implied by `captures`."""

    capturing: bool = False
    """Whether a graph capture is in progress."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until all work of this backend has finished."""

    @abstractmethod
    def close(self) -> None:
        """Release streams, handles and workspaces. The backend is unusable afterwards. Idempotent."""

    def compile_helper(self, passes: Callable[[], Iterable[Callable[[], None]]]) -> AbstractContextManager[None]:
        """Let another process compile kernels of a net's pass within a `with` block, where that is faster.

        Args:
            passes: returns the layers' passes from the last to the first. The process calls them with arrays of any
                content; they must not change anything but arrays.
        """
        return nullcontext()

    def capture(self, *works: Callable[[], None]) -> Graph:
        """Capture the work that these functions queue, in this order, in a graph; nothing is computed.

        Each function must have run once before. The arrays that they use must not move afterwards.

        Raises:
            RunError: the work cannot be captured.
        """
        raise AssertionError(f"{self.name} does not support graph capture")

    def trim(self) -> None:
        """Return unused cached memory to the system."""

    @abstractmethod
    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        """Allocate device numbers and counters that captured work reads."""

    @abstractmethod
    def record_event(self) -> Event:
        """Record an event after the work queued so far."""

    @abstractmethod
    def record_timed_event(self) -> TimedEvent:
        """Record an event with timing on the current stream. Cannot be captured."""

    @abstractmethod
    def device_timer(self, count: int) -> DeviceTimer:
        """Create `count` stopwatches that captured work can start and stop."""

    @abstractmethod
    def copy_to_host_async(self, array: Array) -> AsyncCopy:
        """Queue a copy of a small array to the host; does not wait for it."""
