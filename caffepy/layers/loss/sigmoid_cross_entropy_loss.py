"""SigmoidCrossEntropyLoss."""

from __future__ import annotations

from math import exp, fabs, floor, log1p

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
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


@register_layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLossLayer(ElementLossLayer):
    """loss = sum of -(t log p + (1 - t) log(1 - p)) / divisor, p = 1 / (1 + e^-x).

    x and the targets t are (N, …); t is in [0, 1]. Targets whose integer part equals `ignore_label` are ignored. The
    default divisor is N; `normalization` and `normalize` select another. dx = (p - t) * loss weight / divisor (Caffe's
    `sigmoid_cross_entropy_loss_layer.cpp`).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._sum, self._count = self.backend.zeros(()), self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._divisor = self.divisor(_Parameter.BATCH_SIZE, bottom[0].count, bottom[0].shape[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, t = bottom[0].data, self._targets.load(bottom[1].data)
        if self.ignored is None:  # the divisor is known on the host
            assert self._divisor is not None
            self.backend.reduce(cross_entropy, (x, t, 1 / self._divisor), (top[0].data,))
            return
        self.backend.reduce(cross_entropy_ignoring, (x, t, float(self.ignored)), (self._sum, self._count))
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        x, t, dx = bottom[0].data, self._targets.target(bottom[1].data), bottom[0].diff
        scale = self.scale()
        if self.ignored is None:
            self.backend.apply(cross_entropy_gradient, (x, t, scale), (dx,))
        else:
            self.backend.apply(cross_entropy_gradient_ignoring, (x, t, scale, float(self.ignored)), (dx,))
        if self._divisor is None:
            self.backend.apply(divided_by_channel_count, (dx, self._count), (dx,), 0)
        self.apply_top_gradient(top, dx)
