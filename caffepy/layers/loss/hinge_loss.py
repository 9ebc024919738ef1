"""HingeLoss and MultinomialLogisticLoss, losses with one label for each sample."""

from __future__ import annotations

import math
from math import log

from caffepy.backend import Array, Each, Expression, Scalar, expression
from caffepy.blob import Blob
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.labels import Labels
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import LOG_THRESHOLD, LossLayer
from caffepy.proto import caffe_pb2

_Norm = caffe_pb2.HingeLossParameter


@expression
def hinge(x: Each, hot: Each, factor: Scalar) -> Each:
    return max(1 + x - 2 * x * hot, 0.0) * factor


@expression
def squared_hinge(x: Each, hot: Each, factor: Scalar) -> Each:
    margin = max(1 + x - 2 * x * hot, 0.0)
    return margin * margin * factor


@expression
def hinge_gradient(x: Each, hot: Each, factor: Scalar) -> Each:
    margin = max(1 + x - 2 * x * hot, 0.0)
    return (factor - 2 * factor * hot) if margin > 0 else 0.0


@expression
def squared_hinge_gradient(x: Each, hot: Each, factor: Scalar) -> Each:
    return 2 * max(1 + x - 2 * x * hot, 0.0) * (1 - 2 * hot) * factor


@expression
def negative_log(x: Each, hot: Each, factor: Scalar) -> Each:
    return -log(max(x, LOG_THRESHOLD)) * factor if hot > 0 else 0.0


@expression
def negative_log_gradient(x: Each, hot: Each, factor: Scalar) -> Each:
    return -factor / max(x, LOG_THRESHOLD) if hot > 0 else 0.0


class SampleLabelLoss(LossLayer):
    """loss = sum of formula(x, one-hot label) / N. Subclasses define `formulas`.

    Shapes: x (N, …), labels (N,), which index the elements of a sample.

    Raises:
        DataError: a label is outside the elements of a sample.
    """

    _shape: tuple[int, ...] | None = None

    def formulas(self) -> tuple[Expression, Expression]:
        """Return the formulas of the loss and of its gradient, with arguments (x, one-hot label, factor)."""
        raise NotImplementedError

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._labels = Labels(self)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape = bottom[0].shape
        rows = (shape[0], math.prod(shape[1:]))
        self._labels.reshape(Blob(self.backend, rows, bottom[0].name), bottom[1], 1)
        if shape != self._shape:
            self._shape = shape
            self._x, self._dx = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        self._hot = self.scratch("one-hot", rows)

    def _factor(self) -> float:
        return 1 / max(self._hot.shape[0], 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        hot: Array = self._hot.array
        self.backend.one_hot(self._labels.load(), hot, self._labels.bad_index)
        self.backend.reduce(self.formulas()[0], (self._x.load(bottom[0].data), hot, self._factor()), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        inputs = (self._x.load(bottom[0].data), self._hot.array, self.weight() * self._factor())
        dx = self._dx.target(bottom[0].diff)
        self.backend.apply(self.formulas()[1], inputs, (dx,))
        self.apply_top_gradient(top, dx)
        self._dx.store(bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


@register_layer("HingeLoss")
class HingeLossLayer(SampleLabelLoss):
    """loss = sum of max(0, 1 - t x)^p / N, t = 1 for the label's element, else -1 (Caffe's `hinge_loss_layer.cpp`).

    p is 1 with `norm: L1` and 2 with `norm: L2`. Shapes: x (N, …), labels (N,).
    """

    def formulas(self) -> tuple[Expression, Expression]:
        if self.param.hinge_loss_param.norm == _Norm.L2:
            return squared_hinge, squared_hinge_gradient
        return hinge, hinge_gradient


@register_layer("MultinomialLogisticLoss")
class MultinomialLogisticLossLayer(SampleLabelLoss):
    """loss = sum of -log max(x[label], 1e-20) / N for probabilities x (Caffe's `multinomial_logistic_loss_layer.cpp`).

    Shapes: x (N, …), labels (N,).
    """

    def formulas(self) -> tuple[Expression, Expression]:
        return negative_log, negative_log_gradient
