"""Losses over the pixels of two images, of FlowNet 2: LpqLoss, and a part of L1Loss."""

from __future__ import annotations

from dataclasses import dataclass
from math import fabs
from typing import Any

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, LayerContext, register_layer
from caffepy.layers.core.formulas import identity
from caffepy.layers.core.layout_adapter import flatten_pixels
from caffepy.layers.loss.base import LossLayer
from caffepy.proto import caffe_pb2


@expression
def difference(a: Each, b: Each) -> Each:
    return a - b


@expression
def counted(d: Each, factor: Scalar) -> Each:
    return factor if d == d else 0.0


@expression
def term(d: Each, weight: Scalar, power: Scalar, shift: Scalar, plateau: Scalar) -> Any:
    size = fabs(d) if d == d else 0.0
    return weight * ((0.0 if size < plateau else size) + shift) ** power


@expression
def value(total: Each, power: Scalar, shift: Scalar, plateau: Scalar) -> Any:
    return ((0.0 if total < plateau else total) + shift) ** power


@expression
def value_slope(total: Each, factor: Scalar, power: Scalar, shift: Scalar, plateau: Scalar) -> Each:
    return 0.0 if total < plateau else factor * power * (total + shift) ** (power - 1)


@expression
def term_slope(d: Each, slope: Channel, weight: Scalar, power: Scalar, shift: Scalar, plateau: Scalar) -> Each:
    size = fabs(d) if d == d else 0.0
    steep = 0.0 if size == 0 or size < plateau else slope * weight * power * (size + shift) ** (power - 1)
    return steep if d > 0 else -steep


@expression
def divided(dx: Each, count: Scalar) -> Each:
    return dx / max(count, 1.0)


@expression
def negated(x: Each) -> Each:
    return -x


@dataclass(frozen=True)
class Formula:
    """The settings of loss = sum over pixels of (s + q_shift)^q, s = weight * sum over channels of (|d| + p_shift)^p.

    Args:
        p, p_shift: see above.
        q, q_shift: see above.
        mean: whether the weight is 1 / channels, else 1.
        plateau: |d| below it counts 0.
        sum_plateau: s below it counts 0.
    """

    p: float
    p_shift: float
    q: float
    q_shift: float
    mean: bool = False
    plateau: float = 0.0
    sum_plateau: float = 0.0


class PixelLoss:
    """A loss over the pixels of d = a - b, or of d = a with one bottom, each (N, C, H, W). NaN in d counts 0.

    Args:
        layer: the loss layer, which calls the methods of the same names.
        counts_pixels: whether the sum is divided by the number of pixels that are not NaN, else by N.
    """

    def __init__(self, layer: LossLayer, counts_pixels: bool) -> None:
        self._layer = layer
        self._counts_pixels = counts_pixels
        self.divisor: float | None = None
        """The divisor of the sum, None if it is counted on the device. Valid after `reshape`."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Set the top's shape.

        Raises:
            ShapeError: the bottoms do not have the same four axes.
        """
        layer, shape = self._layer, bottom[0].shape
        if len(shape) != 4 or min(shape) < 1 or any(blob.shape != shape for blob in bottom):
            raise layer.shape_error("the bottoms must have the same four axes, (N, C, H, W)", *bottom)
        top[0].reshape(())
        self.divisor = None if self._counts_pixels else float(shape[0])
        pixels = shape[0] * shape[2] * shape[3]
        self._difference = layer.scratch("pixel difference", shape)
        self._sums, self._values = (layer.scratch(name, (pixels,)) for name in ("sums", "values"))
        self._total, self._count = (layer.scratch(name, ()) for name in ("total", "count"))

    def forward(self, f: Formula, bottom: Blobs, top: Blobs) -> None:
        """Compute the loss."""
        backend, d = self._layer.backend, self._difference.array
        channels = bottom[0].shape[1]
        if len(bottom) > 1:
            backend.apply(difference, (bottom[0].data, bottom[1].data), (d,))
        else:
            backend.copy(bottom[0].data, d)
        weight = 1 / channels if f.mean else 1.0
        sums, values = self._sums.array, self._values.array
        backend.reduce(term, (flatten_pixels(backend, d), weight, f.p, f.p_shift, f.plateau), (sums,), 0)
        backend.apply(value, (sums, f.q, f.q_shift, f.sum_plateau), (values,))
        backend.reduce(identity, (values,), (self._total.array,))
        if self.divisor is None:
            backend.reduce(counted, (d, 1 / channels), (self._count.array,))
        self._layer.write_loss(self._total.array, self._count.array, self.divisor, top[0].data)

    def backward(self, f: Formula, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        """Compute the gradients."""
        if not any(propagate_down):
            return
        first = propagate_down.index(True)
        layer, backend, dx = self._layer, self._layer.backend, bottom[first].diff
        weight = 1 / bottom[0].shape[1] if f.mean else 1.0
        slopes, sign = self._values.array, 1.0 if first == 0 else -1.0
        backend.apply(value_slope, (self._sums.array, sign * layer.scale(), f.q, f.q_shift, f.sum_plateau), (slopes,))
        d = flatten_pixels(backend, self._difference.array)
        backend.apply(term_slope, (d, slopes, weight, f.p, f.p_shift, f.plateau), (flatten_pixels(backend, dx),), 0)
        if self.divisor is None:
            backend.apply(divided, (dx, self._count.array), (dx,))
        layer.apply_top_gradient(top, dx)
        if len(propagate_down) > 1 and all(propagate_down):
            backend.apply(negated, (dx,), (bottom[1].diff,))


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
