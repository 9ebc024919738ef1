"""FocalLoss."""

from __future__ import annotations

from math import log

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.formulas import scaled
from caffepy.layers.labels import Labels
from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.loss import LossLayer

_SMALLEST = 1.1754944e-38
"""The smallest probability whose logarithm is computed: FLT_MIN."""
_NEAREST = 1e-10
"""The smallest 1 - p by which the gradient divides."""


@expression
def missing(difference: Each) -> Each:
    return -difference if difference < 0 else 0.0


@expression
def probability(difference: Each, p: Each) -> Each:
    return p if difference < 0 else 0.0


@expression
def focal(miss: Each, p: Each, alpha: Scalar, gamma: Scalar, smallest: Scalar) -> Each:
    return 0.0 if miss <= 0 else -alpha * miss**gamma * log(max(p, smallest))


@expression
def focal_gradient(
    difference: Each, miss: Channel, p: Channel, alpha: Scalar, gamma: Scalar, smallest: Scalar, nearest: Scalar
) -> Each:
    return difference * alpha * miss**gamma * (1 - gamma * p / max(miss, nearest) * log(max(p, smallest)))  # type: ignore[no-any-return]


@expression
def divided(gradient: Each, count: Channel, factor: Scalar) -> Each:
    return gradient * factor / max(count, 1.0)


@register_layer("FocalLoss")
class FocalLossLayer(LossLayer):
    """loss = sum of -alpha (1 - p)^gamma log p / divisor with p = softmax(x)[label] (Lin et al. 2017).

    As `focal_loss_layer.cpp` of zimenglan-sysu-512. Shapes: x (N, C, ...) with classes along `softmax_param.axis`, one
    label for each position. The divisor is the number of labels that are not ignored (VALID, the default), of all
    labels (FULL), of samples (BATCH_SIZE), or 1 (NONE). An optional second top holds softmax(x). dx = alpha (1 -
    p)^gamma (1 - gamma p log p / (1 - p)) (softmax(x) - onehot(label)) * loss weight / divisor.

    Raises:
        ConfigError: alpha is not above 0, or gamma is below 0.
        ShapeError: the number of labels is not the number of positions.
        DataError: a label is outside the classes.
    """

    tops = (1, 2)
    no_gradient_tops = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.focal_loss_param
        if not param.alpha > 0 or not param.gamma >= 0:
            raise self.error(f"alpha is {param.alpha:g} and gamma {param.gamma:g}; give alpha > 0 and gamma >= 0")
        self._labels = Labels(self)
        self._totals = self.backend.zeros((2,))
        self._count = self.backend.view(self._totals[1:], ())
        self._sum = self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._divisor = self.divisor(caffe_pb2.LossParameter.VALID, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(bottom[0].shape)

    def _rows(self, array: Array) -> Array:
        """Return a view of an array of x's shape, with the classes last."""
        axes = range(len(array.shape))
        return array.transpose(*(axis for axis in axes if axis != self._axis), self._axis)

    def _scratch(self, name: str) -> Array:
        return self.scratch(name, (self._labels.size, self._labels.classes)).array

    def _positions(self, name: str) -> Array:
        return self.scratch(name, (self._labels.size,)).array

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, param, labels = self.backend, self.param.focal_loss_param, self._labels.load()
        x, p, difference = self._scratch("x"), self._scratch("p"), self._scratch("difference")
        rows = self._rows(bottom[0].data)
        backend.copy(rows, x.reshape(*rows.shape))
        backend.softmax_loss_forward(x, labels, p, self._totals, self._labels.bad_index, 1, self.ignored)
        backend.softmax_loss_backward(p, labels, difference, None, 1, self.ignored, 1.0)
        miss, hit = self._positions("miss"), self._positions("hit")
        backend.reduce(missing, (difference,), (miss,), 0)
        backend.reduce(probability, (difference, p), (hit,), 0)
        backend.reduce(focal, (miss, hit, param.alpha, param.gamma, _SMALLEST), (self._sum,))
        if len(top) > 1:
            backend.copy(p.reshape(*rows.shape), self._rows(top[1].data))
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        param, x = self.param.focal_loss_param, self._scratch("x")
        arguments = (
            self._scratch("difference"), self._positions("miss"), self._positions("hit"), param.alpha, param.gamma,
            _SMALLEST, _NEAREST,
        )  # fmt: skip
        self.backend.apply(focal_gradient, arguments, (x,), 0)
        if self._divisor is None:
            self.backend.apply(divided, (x, self._count, self.scale()), (x,), 0)
        else:
            self.backend.apply(scaled, (x, self.scale()), (x,))
        rows = self._rows(bottom[0].diff)
        self.backend.copy(x.reshape(*rows.shape), rows)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()
