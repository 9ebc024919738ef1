"""The device boundary: every primitive that a layer or solver may ask of a device.

A layer says what is computed, a backend how. A backend belongs to one device and one solver thread.
Each group of primitives is an abstract class here; the modules of the same names in `cpu/` (NumPy and numba) and
`cuda/` (CuPy and cuDNN) implement it: `PoolingPrimitives` in `cpu/pooling.py` and `cuda/pooling.py`. Some primitives
have a plain form here, composed of elementary ones: a backend uses it until it has a kernel of its own, which tests
compare with it. What primitives take is in `types.py`, what a backend returns in `handles.py`.

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
from functools import cached_property
from typing import Any

from caffepy.backend.elementwise import Expression
from caffepy.backend.formulas import (
    drop,
    finished,
    gradient_sums,
    identity,
    input_gradient,
    moments,
    normalise,
    normalise_relu,
    plus,
    plus_rectified,
    rectified,
    running_count,
    scaled,
    squared_distance,
    stored_statistics,
    times,
    where_normal_positive,
    where_positive,
)
from caffepy.backend.handles import (
    AsyncCopy,
    BoxLoss,
    Convolution,
    DeviceScalars,
    DeviceTimer,
    Event,
    Graph,
    TimedEvent,
)
from caffepy.backend.input_ring import HostRing, ImageSlot, InputRing
from caffepy.backend.types import (
    Array,
    BatchNormState,
    BoxLossSettings,
    Counter,
    Geometry,
    LrnWindow,
    RandomStream,
    SparseMatrix,
    element_dtype,
)


def _address(array: Array) -> int:
    interface = getattr(array, "__array_interface__", None) or array.__cuda_array_interface__
    return int(interface["data"][0])


class MemoryPrimitives(ABC):
    """The device and its arrays. All floating-point arrays are float32 unless said otherwise."""

    name: str
    """``cpu`` or ``cuda:0``."""

    dtypes: tuple[str, ...] = ("float32",)
    """Which of DTYPES its blobs can be kept in."""

    holds_values: bool = True
    """Whether arrays hold numbers; false on the meta device, where filling them is needless."""

    @abstractmethod
    def activate(self) -> AbstractContextManager[None]:
        """Make this the calling thread's device (and stream, or number of CPU threads) within a `with` block."""

    @abstractmethod
    def device_description(self) -> str:
        """The device in words for the log: ``NVIDIA H200 (device 0, 139.7 GiB)``, ``CPU, 2 threads``."""

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

    @cached_property
    def _buffers(self) -> dict[tuple[str, tuple[int, ...]], Array]:
        return {}

    def _buffer(self, purpose: str, shape: tuple[int, ...]) -> Array:
        """Memory that lasts for one primitive in its plain form."""
        key = (purpose, tuple(shape))
        if key not in self._buffers:
            self._buffers[key] = self.zeros(tuple(shape))
        return self._buffers[key]


class CopyPrimitives(MemoryPrimitives):
    """Filling and copying."""

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


class ElementwisePrimitives(CopyPrimitives):
    """Formulas of elements."""

    @abstractmethod
    def apply(
        self, expression: Expression, inputs: Sequence[Array | float], outputs: Sequence[Array], axis: int = 1
    ) -> None:
        """outputs = expression(*inputs) for each element; see `Expression`.

        Arguments of kind `Each` and all outputs have one shape. Arguments of kind `Channel` have the shape of
        those axes that start at `axis`: (C,) for axis 1 of an (N, C, H, W) array, (C, H) likewise.
        An output may be one of the inputs.
        """

    def add_n(self, sources: Sequence[Array], destination: Array) -> None:
        """destination = the sum of two or more arrays of its shape; it may be one of them."""
        # What lies in the destination has to be read before it is overwritten.
        first, second, *more = sorted(sources, key=lambda array: _address(array) != _address(destination))
        self.apply(plus, (first, second), (destination,))
        for array in more:
            self.apply(plus, (destination, array), (destination,))


class ReductionPrimitives(ElementwisePrimitives):
    """Sums over axes."""

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
    def all_finite(self, array: Array) -> bool:
        """Whether no element is NaN or infinite; waits for the device."""


class DensePrimitives(ElementwisePrimitives):
    """Matrix products, with a formula of each element behind them."""

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
        """out = expression(op(a) @ op(b), channel), 2-D arrays as `gemm` takes them.

        `channel` is float32, with an element for each column of out. The formula has an Each argument, then a Channel
        argument, and one result. Whether the product is rounded to out's dtype before the formula takes it is the
        backend's choice.
        """
        self.gemm(a, b, out, transpose_a, transpose_b)
        self.apply(expression, (out, channel), (out,))


class ConvolutionPrimitives(ElementwisePrimitives):
    """Convolutions, planned for shapes."""

    @abstractmethod
    def plan_convolution(
        self, x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry, dtype: str = "float32"
    ) -> Convolution:
        """A convolution of these shapes, any number of spatial axes."""

    def convolve_and_add(
        self, plan: Convolution, x: Array, weights: Array, bias: Array | None, residual: Array, y: Array, relu: bool
    ) -> None:
        """y = the plan's forward pass + residual, or max(that, 0). Residual, of y's shape and dtype, is not y."""
        plan.forward(x, weights, bias, y)
        self.apply(plus_rectified if relu else plus, (y, residual), (y,))

    def keep_weights(self, plan: Convolution, weights: Array, given: Array | None = None) -> bool:
        """Let the plan's forward passes with `given` (None: `weights`) rely on the present values of `weights`.

        Returns whether the plan, which has them in an order of its own, does so and needs `weights` no more.
        """
        return False


class PoolingPrimitives(ABC):
    """Maxima, means and random elements of windows."""

    mask_dtype: str = "int32"
    """dtype of max pooling's mask where nobody reads it: int32, or uint8 for windows of up to 255 elements."""

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
    def pool_stochastic_forward(self, x: Array, chance: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        """y = an element of each window of x, drawn in proportion to its value by `chance`, uniform in [0, 1).

        It is the first, row by row, at which the running sum reaches chance * the window's sum. mask, int32, becomes
        its h * W + w, as `pool_max_backward` takes it. Windows are clipped to the image and have no padding.
        """


class NormalisationPrimitives(ReductionPrimitives):
    """Batch normalisation, gradients of activations, local response normalisation."""

    keeps_lrn_scale: bool = True
    """Whether LRN's backward pass needs the scale of its forward pass."""

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        """n.mean and n.inverse = those of x (N, C, ...) for each channel; the running sums take them in.

        With f = n.fraction and m elements a channel: sum_mean = f * sum_mean + mean,
        sum_variance = f * sum_variance + m / (m - 1) * variance, count = f * count + 1. Exact also where the mean is
        large beside the deviation.
        """
        # Two passes: E(x^2) - E(x)^2 loses all digits where the mean is large.
        elements = math.prod(x.shape) // max(x.shape[1], 1)
        per_element = 1 / max(elements, 1)
        variance = self._buffer("variance", n.mean.shape)
        self.reduce(scaled, (x, per_element), (n.mean,))
        self.reduce(squared_distance, (x, n.mean, per_element), (variance,))
        self.batch_norm_finish(variance, elements, n)

    def batch_norm_measure_sums(self, sums: Array, elements: int, n: BatchNormState) -> None:
        """The same from a convolution's `sums`, each over so many elements."""
        variance = self._buffer("variance", n.mean.shape)
        self.apply(moments, (sums[0], sums[1], 1 / max(elements, 1)), (n.mean, variance), axis=0)
        self.batch_norm_finish(variance, elements, n)

    def batch_norm_finish(self, variance: Array, elements: int, n: BatchNormState) -> None:
        """n.inverse, and the running sums as above, from n.mean and a variance (C,) over so many elements a channel."""
        correction = elements / (elements - 1) if elements > 1 else 1.0
        inputs = (n.mean, variance, n.sum_mean, n.sum_variance, n.fraction, correction, n.epsilon)
        self.apply(finished, inputs, (n.inverse, n.sum_mean, n.sum_variance), axis=0)
        self.apply(running_count, (n.count, n.fraction), (n.count,), axis=0)

    def batch_norm_load(self, n: BatchNormState) -> None:
        """n.mean and n.inverse = the running sums over their count; 0 and 1 / sqrt(epsilon) if the count is 0."""
        count = self.view(n.count, ())
        self.apply(stored_statistics, (n.sum_mean, n.sum_variance, count, n.epsilon), (n.mean, n.inverse))

    def batch_norm_forward(
        self, x: Array, n: BatchNormState, y: Array, residual: Array | None = None, relu: bool = False,
        mask: Array | None = None,
    ) -> None:  # fmt: skip
        """y = (x - mean) * inverse * scale + bias (+ residual), or max(that, 0).

        `mask` (uint8, `mask_bytes(x.size)` elements) gets one bit for each element in memory order, bit i % 8 of byte
        i // 8: whether the sum was above 0. y may be x.
        """
        inputs = (x, n.mean, n.inverse, n.scale, n.bias)
        if residual is None and mask is None:
            self.apply(normalise_relu if relu else normalise, inputs, (y,))
            return
        self.apply(normalise, inputs, (y,))
        if residual is not None:
            self.apply(plus, (y, residual), (y,))
        if mask is not None:
            self._write_mask(y, mask)
        if relu:
            self.apply(rectified, (y,), (y,))

    def _write_mask(self, y: Array, mask: Array) -> None:
        """One bit an element, worked out on the host: only backends without kernels of their own come here."""
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
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool = False,
        mask: Array | None = None, total: Array | None = None,
    ) -> None:  # fmt: skip
        """First pass: `sums` (sum_dy_x, sum_dy) = (sum of g * normal, sum of g).

        g = the sum of `dys`, 0 where the ReLU was off; normal = (x - mean) * inverse. `mask` says where it was off;
        without one that is computed from x. `total` gets g; it may be one of `dys`, and must be given if there are
        several.
        """
        g = dys[0]
        if len(dys) > 1:
            assert total is not None, "several gradients need an array for their sum"
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
        """Second pass: dx = scale * inverse * (g - (sum_dy + normal * sum_dy_x) / m), m elements a channel.

        g = dy, 0 where the ReLU was off as x tells if `relu`. dx may be dy.
        """
        if relu:
            self.apply(where_normal_positive, (x, dy, n.mean, n.inverse, n.scale, n.bias), (dx,))
            dy = dx
        per_element = x.shape[1] / max(math.prod(x.shape), 1)
        inputs = (x, dy, n.mean, n.inverse, n.scale, *sums, per_element)
        self.apply(input_gradient, inputs, (dx,))

    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        """dx = dy where y > 0, else 0; dbias (+)= the sum of dx for each channel (axis 1). dx may be dy."""
        self.activation_backward(where_positive, y, dy, dx, dbias, accumulate)

    def activation_backward(
        self, expression: Expression, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool
    ) -> None:
        """dx = expression(y, dy), a formula of two Each arguments; dbias (+)= the sum of dx for each channel (axis 1).

        Whether dx is rounded to its dtype before it is added up is the backend's choice. dx may be dy.
        """
        self.apply(expression, (y, dy), (dx,))
        if dbias is not None:
            self.reduce(identity, (dx,), (dbias,), accumulate=accumulate)

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


class SoftmaxPrimitives(ABC):
    """Softmax, its loss, and the ranks of labels."""

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


class RandomPrimitives(ElementwisePrimitives):
    """Counter-based random numbers; see `RandomStream`."""

    @abstractmethod
    def random_uniform(self, out: Array, stream: RandomStream, counter: Counter) -> None:
        """Fill `out` (first axis: samples) with float32 in [0, 1), the same bits on every backend.

        Counter words: (i // 4, sample low 32 bits, sample high 32 bits, pass_number); key: (seed low ^ stream,
        seed high); word i % 4 of the result; the upper 24 bits times 2^-24.
        """

    @cached_property
    def _chances(self) -> dict[tuple[int, tuple[int, ...]], tuple[Counter, RandomStream, Array]]:
        return {}

    def dropout(self, source: Array, destination: Array, ratio: float, stream: RandomStream, counter: Counter) -> None:
        """destination = source / (1 - ratio) where the element's random number is at least ratio, else 0.

        The same counter keeps the same elements, so this is the backward pass as well.
        """
        key = (stream.stream, tuple(source.shape))
        cached = self._chances.get(key)
        chances = self.zeros(source.shape) if cached is None else cached[2]
        if cached is None or cached[:2] != (counter, stream):
            self.random_uniform(chances, stream, counter)
            self._chances[key] = (counter, stream, chances)
        self.apply(drop, (source, chances, ratio, 1 / (1 - ratio)), (destination,))


class IndexingPrimitives(ABC):
    """Elements moved by index: rows, sparse maps of pixels, the largest elements, regions of interest.

    Arrays are dense and float32 unless said otherwise. The rows of an array are its parts along axis 0. Every sum is
    made in a fixed order: same input, same bits.

    `bad`: int32 (1,), set to the position in `index` (or `labels`, `mask`, `rois`) of an entry that names nothing, left
    alone (callers set -1) if there is none. Such entries give zeros and take part in no gradient.
    """

    @abstractmethod
    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        """destination[i] = source[index[i]], with `index` float32 (rows of destination,), rounded towards 0."""

    @abstractmethod
    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        """destination[index[i]] += source[i], in the order of i; the gradient of `gather_rows`."""

    @abstractmethod
    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        """out[i, labels[i]] = 1, all else 0; labels (size,), out (size, classes)."""

    @abstractmethod
    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        """y[n, c] = matrix @ x[n, c], the axes from the third on being one in logical order; in any dtype.

        x (N, C, ...) has as many elements a channel as the matrix has columns, y (N, C, ...) as it has rows.
        """

    @abstractmethod
    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        """The largest elements along `axis`, falling; the one of the larger index comes first where two are equal.

        indices and values have x's shape but along `axis`, where they have as many as are wanted.
        """

    @abstractmethod
    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        """y[n, c, mask] = x, all else 0, where mask (x's shape) is h * W + w in y's plane; of equals the last stays."""

    @abstractmethod
    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        """dx = dy[n, c, mask]."""

    @abstractmethod
    def roi_max_forward(self, x: Array, rois: Array, y: Array, mask: Array, scale: float, bad: Array) -> None:
        """y (R, C, h, w) = the maximum of each bin of each region of x (N, C, H, W); 0 where a bin is empty.

        rois, float32 of R * 5 elements: sample, x1, y1, x2, y2 before `scale`. mask (int32, y's shape) becomes
        h * W + w, or -1. Bins: Fast R-CNN's `roi_pooling_layer.cpp`.
        """

    @abstractmethod
    def roi_max_backward(self, dy: Array, rois: Array, mask: Array, dx: Array, scale: float) -> None:
        """dx = the sum of dy over the bins whose maximum lies there, in the regions' order."""

    @abstractmethod
    def roi_average_forward(self, x: Array, rois: Array, y: Array, scale: float, bad: Array) -> None:
        """y (R, D, g, g) = the mean over each bin of each region, of the bin's own channel of x (N, D * g * g, H, W).

        Bin (h, w) of output d takes channel (d * g + h) * g + w (R-FCN's `psroi_pooling_layer.cu`).
        """

    @abstractmethod
    def roi_average_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        """dx = each dy / the bin's area, spread over its bin of its channel, added up in the regions' order."""


class RecurrentPrimitives(ElementwisePrimitives):
    """The gates of an LSTM at one time step, for N streams. All arrays are float32 unless said otherwise."""

    @abstractmethod
    def lstm_unit_forward(self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array) -> None:
        """One time step (Caffe's `lstm_unit_layer.cpp`), given the gates' inputs of shape (N, 4 D).

        gates become (i, f, o, g) = (sigmoid, sigmoid, sigmoid, tanh) of their four parts;
        cell = f * cell_before + i * g, without the first term where cont is 0 and with it times cont elsewhere;
        hidden = o * tanh(cell). cell_before, cell and hidden: (N, D); cont: (N,).
        """

    @abstractmethod
    def lstm_unit_backward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, d_hidden: Array
    ) -> None:
        """The gradients by the gates' inputs and by cell_before, given those by cell and hidden.

        gates hold (i, f, o, g) and become the gradient by their inputs; d_cell becomes that by cell_before.
        """

    def lstm_step_forward(
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, hidden: Array,
        next_cont: Array | None = None, carried: Array | None = None,
    ) -> None:  # fmt: skip
        """`lstm_unit_forward` within a loop over time: carried = next_cont hidden as well, for the next step's product.

        At the last step there is neither. hidden and carried, both (N, D), are of any dtype of blobs.
        """
        self.lstm_unit_forward(gates, cell_before, cont, cell, hidden)
        if next_cont is not None and carried is not None:
            self.apply(times, (hidden, next_cont), (carried,), axis=0)

    def lstm_step_backward(  # noqa: PLR0913 -- what a step reads and writes
        self, gates: Array, cell_before: Array, cont: Array, cell: Array, d_cell: Array, dy: Array, d_gates: Array,
        next_cont: Array | None = None, d_carried: Array | None = None,
    ) -> None:  # fmt: skip
        """`lstm_unit_backward` within a loop over time, given d_hidden = dy + next_cont d_carried.

        dy is the top's gradient, d_carried that by the next step's `carried`; the last step has none. The gradient by
        the gates' inputs goes to d_gates, which may be gates. dy and d_gates, of one dtype of blobs: (N, D), (N, 4 D);
        d_carried, (N, D), is overwritten.
        """
        d_hidden = dy
        if next_cont is not None and d_carried is not None:
            d_hidden = d_carried
            self.apply(times, (d_carried, next_cont), (d_hidden,), axis=0)
            self.add(dy, d_hidden)
        self.lstm_unit_backward(gates, cell_before, cont, cell, d_cell, d_hidden)
        if d_gates is not gates:
            self.copy(gates, d_gates)


class DetectionPrimitives:
    """SSD's loss, whose priors, objects and choices stay on the device."""

    computes_box_loss: bool = False
    """Whether `box_loss` gives SSD's loss; where not, the layer computes it on the host."""

    def box_loss(self, settings: BoxLossSettings, images: int, priors: int) -> BoxLoss:
        """SSD's loss for so many images and priors of each, where `computes_box_loss` holds."""
        raise AssertionError("SSD's loss is computed on the host")


class InputPrimitives(CopyPrimitives):
    """A net's input; here in host memory, by NumPy."""

    def host_memory(self, size: int) -> Any:
        """Host memory (NumPy, uint8, 1-D) from which `InputRing.put` copies at full speed; any thread may ask."""
        import numpy as np

        return np.empty(size, np.uint8)

    def adopt(self, array: Any) -> Array | None:
        """An array of another library as one of this backend without a copy; None where it does not lie on its device.

        All work that fills the array has finished when this returns.
        """
        return None

    def upload(self, host: Any, destination: Array) -> None:
        """As `from_host`, through memory that the device copies from at full speed; does not wait for the copy.

        The host array may be changed when this returns.
        """
        self.from_host(host, destination)

    def download(self, arrays: Sequence[Array]) -> list[Any]:
        """As `to_host` of each, through memory that the device copies to at full speed; waits once for all."""
        return [self.to_host(array) for array in arrays]

    def input_ring(self, slot_size: int, block: int, blocks: int) -> InputRing:
        """A ring of slots; see `InputRing`.

        Raises:
            DeviceError: there is no memory for it.
        """
        return HostRing(slot_size, block, blocks)

    def take_images(
        self, ring: InputRing, counter: Counter, slot: ImageSlot, mean: Array, scale: float, images: Array,
        labels: Array | None,
    ) -> None:  # fmt: skip
        """images[n, c, h, w] = (pixel - mean[c, top + h, left + w']) * scale of the pass that `counter` names.

        w' is w, or W - 1 - w where the image is mirrored. mean: float32 of shape (C, whole H, whole W) for images cut
        out of wholes, or (C, 1, 1) for one number a channel. images: (N, C, H, W) of any dtype; labels: float32 (N,).
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
        """values = the float32 numbers, in the memory order of `values`, from byte `offset` of the pass's slot on."""
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
    RecurrentPrimitives,
    DetectionPrimitives,
    InputPrimitives,
):
    """One device, as layers and solvers see it: all groups of primitives, streams, events and graphs."""

    asynchronous: bool
    """Whether primitives return before their result is there."""

    threads: int = 0
    """How many CPU threads its primitives use; 0: they do not run on the CPU."""

    captures: bool = False
    """Whether `capture` takes everything that solvers do."""

    captures_inference: bool = False
    """Whether it takes forward passes of layers that are `recordable`; so it does where `captures` holds."""

    capturing: bool = False
    """Whether work is being captured now."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything asked of this backend is done."""

    @abstractmethod
    def close(self) -> None:
        """Give back streams, handles and workspaces; the backend cannot be used any more. Callable twice."""

    def capture(self, *works: Callable[[], None]) -> Graph:
        """A graph of what works, in this order, ask of this backend; nothing is computed.

        They must have run once before, and the arrays that they touch must not move afterwards.

        Raises:
            RunError: something in them cannot be captured.
        """
        raise AssertionError(f"{self.name} captures no graphs")

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
