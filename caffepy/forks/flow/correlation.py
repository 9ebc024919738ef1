"""Correlation, Correlation1D, ChannelNorm, ExpMax and LpqLoss of FlowNet 2."""

from __future__ import annotations

import math
from math import exp

from caffepy.backend import Channel, CorrelationWindow, Each, Geometry, Scalar, expression
from caffepy.backend.formulas import difference, identity, root, squared
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, LayerContext, flatten_pixels, register_layer
from caffepy.layers.loss import Formula, LossLayer, PixelLoss


@register_layer("Correlation")
class CorrelationLayer(Layer):
    """y[n, (p, q), i, j] = the mean of a[n, c, h, w] * b[n, c, h + dp, w + dq] over a patch and all channels c.

    Displacements dp and dq are the multiples of `stride_2` from -`max_displacement` to `max_displacement`. A patch has
    `kernel_size` x `kernel_size` pixels (h, w); patches are `stride_1` pixels apart, and their centres keep a distance
    of max_displacement + (kernel_size - 1) / 2 from the edges of the image with `pad` zeros around it. With
    `correlation_type` SUBTRACT y is the mean of |a - b|.

    Shapes: a and b (N, C, H, W), y (N, displacements, H', W'). Source: FlowNet 2's `correlation_layer.cu` (Dosovitskiy
    et al. 2015).

    Raises:
        ConfigError: kernel_size or max_displacement is missing, kernel_size is even, or a stride is 0.
        ShapeError: the bottoms differ in shape, or the image is too small.
    """

    bottoms = (2, 2)
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.correlation_param
        if not param.HasField("kernel_size") or not param.HasField("max_displacement"):
            raise self.error("correlation_param needs kernel_size and max_displacement")
        if param.kernel_size % 2 == 0:
            raise self.error(f"correlation_param.kernel_size is {param.kernel_size}; it must be odd")
        if min(param.stride_1, param.stride_2) < 1:
            raise self.error("stride_1 and stride_2 of correlation_param must be at least 1")

    def displacements(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Return the first displacement (down, right) in units of stride_2, and the numbers of displacements."""
        radius = self.param.correlation_param.max_displacement // self.param.correlation_param.stride_2
        return (-radius, -radius), (2 * radius + 1, 2 * radius + 1)

    vertical = True
    """Whether rows are displaced and padded too."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.correlation_param
        if len(bottom[0].shape) != 4 or bottom[0].shape != bottom[1].shape:
            raise self.shape_error("both bottoms must have the same four axes, (N, C, H, W)", *bottom)
        first, count = self.displacements()
        samples, _, *sizes = bottom[0].shape
        spans, origin = [], []
        for size, moves in zip(sizes, (self.vertical, True), strict=True):
            reach = param.max_displacement if moves else 0
            pad = param.pad if moves else 0
            span = size + 2 * pad - 2 * reach - (param.kernel_size - 1)
            spans.append(-(-span // param.stride_1))
            origin.append(reach - pad)
        if min(spans) < 1:
            raise self.shape_error("the image is too small for max_displacement, kernel_size and pad", bottom[0])
        self.window = CorrelationWindow(
            kernel=param.kernel_size,
            stride=param.stride_1,
            origin=(origin[0], origin[1]),
            first=(first[0] * param.stride_2, first[1] * param.stride_2),
            count=count,
            step=param.stride_2,
            subtract=param.correlation_type == caffe_pb2.CorrelationParameter.SUBTRACT,
        )
        shape = (samples, count[0] * count[1], *spans)
        self.check_memory(4 * samples * shape[1] * spans[0] * spans[1], "its top")
        top[0].reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.correlate_forward(bottom[0].data, bottom[1].data, top[0].data, self.window)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        diffs = [blob.diff if wanted else None for blob, wanted in zip(bottom, propagate_down, strict=True)]
        a, b = bottom[0].data, bottom[1].data
        self.backend.correlate_backward(top[0].diff, a, b, diffs[0], diffs[1], self.window)


@register_layer("Correlation1D")
class Correlation1DLayer(CorrelationLayer):
    """Correlation with displacements along rows only, for stereo (FlowNet 2's `correlation_layer1d.cu`).

    `pad` adds zeros to the left and to the right. With `single_direction` 1 the displacements are 0 to
    `max_displacement`; with -1 they begin at -(max_displacement / stride_2 + 1) * stride_2 and end at -stride_2, as in
    FlowNet 2. Pixels outside the image are 0.

    Raises:
        ConfigError: single_direction is not -1, 0 or 1, and as Correlation.
        ShapeError: as Correlation.
    """

    vertical = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        direction = self.param.correlation_param.single_direction
        if direction not in (-1, 0, 1):
            raise self.error(f"correlation_param.single_direction is {direction}; it must be -1, 0 or 1")

    def displacements(self) -> tuple[tuple[int, int], tuple[int, int]]:
        param = self.param.correlation_param
        radius = param.max_displacement // param.stride_2
        if param.single_direction == 0:
            return (0, -radius), (1, 2 * radius + 1)
        return (0, 0 if param.single_direction > 0 else -(radius + 1)), (1, radius + 1)


TINY = 1e-9
"""Added to the norm where it divides."""


@expression
def norm_gradient(x: Each, norm: Channel, dy: Channel, tiny: Scalar) -> Each:
    return dy * x / (norm + tiny)


@expression
def scaled_power(x: Each, largest: Channel, inner: Scalar, outer: Scalar) -> Each:
    return outer * exp(inner * (x - largest))


@expression
def scaled_product(y: Each, dy: Each, inner: Scalar) -> Each:
    return inner * y * dy


class PixelLayer(Layer):
    """A layer over the channels of each pixel of x (N, C, H, W).

    Raises:
        ShapeError: the bottom does not have four axes.
    """

    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4 or shape[1] < 1:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W), and a channel", bottom[0])
        self._rows = shape[0] * shape[2] * shape[3]


@register_layer("ChannelNorm")
class ChannelNormLayer(PixelLayer):
    """y (N, 1, H, W) = sqrt(sum over the channels of x^2) (FlowNet 2's `channel_norm_layer.cpp`).

    dx = dy * x / (y + 1e-9).

    Raises:
        ShapeError: the bottom does not have four axes.
    """

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        top[0].reshape((bottom[0].shape[0], 1, *bottom[0].shape[2:]))
        self._norm = self.scratch("norm", (self._rows,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, norm = self.backend, self._norm.array
        backend.reduce(squared, (flatten_pixels(backend, bottom[0].data),), (norm,), 0)
        backend.apply(root, (norm,), (norm,))
        backend.copy(norm, backend.flat(top[0].data))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            backend = self.backend
            x, dx = (flatten_pixels(backend, array) for array in (bottom[0].data, bottom[0].diff))
            dy = backend.flat(top[0].diff)
            backend.apply(norm_gradient, (x, self._norm.array, dy, TINY), (dx,), 0)


@register_layer("ExpMax")
class ExpMaxLayer(PixelLayer):
    """y = base ^ (shift + scale * (x - m)), where m is the largest channel of each pixel.

    Source: LiteFlowNet's `expmax_layer.cu`. The base -1 stands for e. As in LiteFlowNet, `shift` and `scale` are those
    of Exp. dx = scale * log(base) * y * dy, at the largest channel minus the sum of this over the channels; LiteFlowNet
    leaves out that sum. It also uses the first sample's maxima for all samples.

    Raises:
        ConfigError: the base is 0, negative other than -1, or not finite.
        ShapeError: the bottom does not have four axes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.expmax_param
        if param.base != -1 and not 0 < param.base < math.inf:
            raise self.error(f"expmax_param.base is {param.base:g}; it must be above 0, or -1 for e")
        logarithm = 1.0 if param.base == -1 else math.log(param.base)
        self._inner = logarithm * param.scale
        self._outer = math.exp(logarithm * param.shift)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        top[0].reshape(shape)
        self._lines = (self._rows, 1, 1, shape[1])
        self._window = Geometry((1, shape[1]), (1, 1), (0, 0), (1, 1))
        self._largest = self.scratch("largest", (self._rows, 1, 1, 1))
        self._mask = self.scratch("mask", (self._rows, 1, 1, 1), "int32")
        self._sum = self.scratch("sum", (self._rows, 1, 1, 1))
        self._share = self.scratch("share", self._lines)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, largest = self.backend, self._largest.array
        lines = backend.view(backend.flat(bottom[0].data), self._lines)
        backend.pool_max_forward(lines, largest, self._mask.array, self._window)
        x, y = (flatten_pixels(backend, array) for array in (bottom[0].data, top[0].data))
        backend.apply(scaled_power, (x, backend.flat(largest), self._inner, self._outer), (y,), 0)
        self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        backend, share, sums = self.backend, self._share.array, self._sum.array
        y, dx = self.saved_top(top), bottom[0].diff
        backend.apply(scaled_product, (y, top[0].diff, self._inner), (dx,))
        rows = flatten_pixels(backend, dx)
        backend.reduce(identity, (rows,), (backend.flat(sums),), 0)
        backend.pool_max_backward(sums, self._mask.array, share, self._window)
        backend.apply(difference, (backend.flat(dx), backend.flat(share)), (backend.flat(dx),))


@register_layer("LpqLoss")
class LpqLossLayer(LossLayer):
    """loss = sum over pixels of (sum over channels of (|d| + p_epsilon)^p + q_epsilon)^q / N, d = a - b.

    With one bottom d = a. `l2_prescale_by_channels` makes a mean of the sum over channels, `normalize_by_num_entries`
    divides by the number of pixels that are not NaN instead of N. NaN in d counts 0 and has no gradient. p and q may be
    given several times; entry i holds from iteration `pq_episode_starts_at_iter[i]` on. Shapes: a, b (N, C, H, W).
    Source: FlowNet 2's `lpq_loss_layer.cu`.

    Raises:
        ConfigError: p, q and pq_episode_starts_at_iter do not have equal numbers of entries, or the iterations do not
            begin at 0 and rise.
        ShapeError: the bottoms do not have the same four axes.
    """

    bottoms = (1, 2)
    no_gradient_bottoms = frozenset()

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.lpq_loss_param
        self._pixels = PixelLoss(self, param.normalize_by_num_entries)
        starts = list(param.pq_episode_starts_at_iter)
        if not starts and len(param.p) == len(param.q) == 1:
            starts = [0]
        if not starts or not len(starts) == len(param.p) == len(param.q):
            raise self.error("lpq_loss_param needs p, q and pq_episode_starts_at_iter, each given equally often")
        if starts[0] != 0 or any(a >= b for a, b in zip(starts, starts[1:], strict=False)):
            raise self.error("pq_episode_starts_at_iter of lpq_loss_param must begin with 0 and rise")
        self._episodes = list(zip(starts, param.p, param.q, strict=True))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._pixels.reshape(bottom, top)
        self._divisor = self._pixels.divisor

    def _formula(self) -> Formula:
        param, iteration = self.param.lpq_loss_param, self.context.passes.number // max(self.context.iter_size, 1)
        _, p, q = [episode for episode in self._episodes if episode[0] <= iteration][-1]
        return Formula(p, param.p_epsilon, q, param.q_epsilon, param.l2_prescale_by_channels)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._pixels.forward(self._formula(), bottom, top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self._pixels.backward(self._formula(), top, propagate_down, bottom)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST where the exponents follow the number of passes, which is another on each device."""
        return context.phase == caffe_pb2.TEST and len(param.lpq_loss_param.p) > 1

    def capture_blocker(self) -> str | None:
        if len(self._episodes) > 1:
            return "its exponents change during the training"
        return super().capture_blocker()
