"""SigmoidCrossEntropyLoss."""

from __future__ import annotations

from math import exp, fabs, floor, log1p

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import ElementLossLayer
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@expression
def cross_entropy(x: Each, target: Each, factor: Scalar) -> Each:
    return (max(x, 0.0) - x * target + log1p(exp(-fabs(x)))) * factor


@expression
def cross_entropy_ignoring(x: Each, target: Each, ignored: Scalar) -> tuple[Each, Each]:
    whole = floor(target) if target >= 0 else -floor(-target)
    counts = 0.0 if whole == ignored else 1.0
    return 0.0 if whole == ignored else max(x, 0.0) - x * target + log1p(exp(-fabs(x))), counts


@expression
def cross_entropy_gradient(x: Each, target: Each, scale: Scalar) -> Each:
    return (1 / (1 + exp(-x)) - target) * scale


@expression
def cross_entropy_gradient_ignoring(x: Each, target: Each, scale: Scalar, ignored: Scalar) -> Each:
    whole = floor(target) if target >= 0 else -floor(-target)
    return 0.0 if whole == ignored else (1 / (1 + exp(-x)) - target) * scale


@expression
def divided_by_channel_count(x: Each, count: Channel) -> Each:
    return x / max(count, 1.0)


@expression
def weighted_cross_entropy(x: Each, target: Each, weight: Each) -> tuple[Each, Each]:
    return weight * (max(x, 0.0) - x * target + log1p(exp(-fabs(x)))), weight


@expression
def weighted_cross_entropy_gradient(x: Each, target: Each, weight: Each, scale: Scalar) -> Each:
    return weight * (1 / (1 + exp(-x)) - target) * scale


@expression
def mean_of_weights(total: Each, weight: Each, devices: Scalar) -> Each:
    return total * devices / weight if weight > 0 else 0.0


@expression
def over_weight(x: Each, weight: Channel) -> Each:
    return x / weight if weight > 0 else 0.0


@register_layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLossLayer(ElementLossLayer):
    """loss = sum of -(t log p + (1 - t) log(1 - p)) / divisor, p = 1 / (1 + e^-x).

    x and the targets t are (N, …); t is in [0, 1]. Targets whose integer part equals `ignore_label` are ignored. The
    default divisor is N; `normalization` and `normalize` select another. dx = (p - t) * loss weight / divisor (Caffe's
    `sigmoid_cross_entropy_loss_layer.cpp`).

    An optional third bottom with x's count holds a weight of each element. The loss is then the weighted mean, 0 if the
    weights' sum is not above 0, and dx is weighted alike (MNC's `sigmoid_cross_entropy_loss_layer.cpp`).

    Raises:
        ConfigError: ignore_label or a divisor is given with three bottoms.
        ShapeError: the counts differ.
    """

    bottoms = (2, 3)
    exact_bottoms = frozenset({2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.loss_param
        if len(bottom) > 2 and any(param.HasField(name) for name in ("ignore_label", "normalization", "normalize")):
            raise self.error("with weights the sum is divided by their sum; remove ignore_label and normalization")
        self._sum, self._count = self.backend.zeros(()), self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._divisor = self.divisor(_Parameter.BATCH_SIZE, bottom[0].count, bottom[0].shape[0])
        if len(bottom) > 2:
            if bottom[2].count != bottom[0].count:
                raise self.shape_error("weights must have the first bottom's count", bottom[2], bottom[0])
            self._divisor = None
            self._weights = LayoutAdapter(self.backend, bottom[2].shape, bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, t = bottom[0].data, self._targets.load(bottom[1].data)
        if len(bottom) > 2:
            weights = self._weights.load(bottom[2].data)
            self.backend.reduce(weighted_cross_entropy, (x, t, weights), (self._sum, self._count))
            if self.communicates():
                assert self.context.all_reduce_sum is not None
                self.context.all_reduce_sum(self._count.reshape(1))
            inputs = (self._sum, self._count, float(self._label_devices))
            self.backend.apply(mean_of_weights, inputs, (top[0].data,))
            return
        if self.ignored is None:  # the divisor is known on the host
            assert self._divisor is not None
            self.backend.reduce(cross_entropy, (x, t, 1 / self._divisor), (top[0].data,))
            return
        self.backend.reduce(cross_entropy_ignoring, (x, t, float(self.ignored)), (self._sum, self._count))
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if any(propagate_down[2:]):
            self.backend.fill(bottom[2].diff, 0)
        if not propagate_down[0]:
            return
        x, t, dx = bottom[0].data, self._targets.target(bottom[1].data), bottom[0].diff
        scale = self.scale()
        if len(bottom) > 2:
            weights = self._weights.target(bottom[2].data)
            self.backend.apply(weighted_cross_entropy_gradient, (x, t, weights, scale), (dx,))
            self.backend.apply(over_weight, (dx, self._count), (dx,), 0)
            self.apply_top_gradient(top, dx)
            return
        if self.ignored is None:
            self.backend.apply(cross_entropy_gradient, (x, t, scale), (dx,))
        else:
            self.backend.apply(cross_entropy_gradient_ignoring, (x, t, scale, float(self.ignored)), (dx,))
        if self._divisor is None:
            self.backend.apply(divided_by_channel_count, (dx, self._count), (dx,), 0)
        self.apply_top_gradient(top, dx)
