"""SoftmaxWithLoss and SoftmaxWithLossOHEM."""

from __future__ import annotations

import math
from math import log

from caffepy.backend import Array, Each, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import identity
from caffepy.layers.core.labels import Labels
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import LossLayer
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@expression
def label_term(probability: Each, slope: Each) -> Each:
    """-log(probability) of the label, 0 of other classes and ignored labels: only the label's slope is below 0."""
    return -log(max(probability, 1.1754943508222875e-38)) if slope < 0 else 0.0


@register_layer("SoftmaxWithLoss")
class SoftmaxWithLossLayer(LossLayer):
    """loss = sum of -log softmax(x)[label] / divisor (Caffe's `softmax_loss_layer.cpp`).

    Shapes: x (N, C, ...) with classes along `softmax_param.axis`, one label for each position. The divisor is the
    number of labels that are not ignored (VALID, the default), of all labels (FULL), of samples (BATCH_SIZE), 1 (NONE)
    or `pre_fixed_normalizer`, at least 1 (PRE_FIXED). An optional second top holds softmax(x). dx = (softmax(x) -
    onehot(label)) * loss weight / divisor. With `label_smoothing` s the target of loss and gradient is
    (1 - s) onehot(label) + s / C (Szegedy et al. 2015).

    An optional third top has the labels' shape and holds -log softmax(x)[label] of each position, 0 where the label is
    ignored (R-FCN's `softmax_loss_layer.cpp`). BoxAnnotatorOHEM reads it.

    Raises:
        ConfigError: label_smoothing is outside [0, 1], or is given with three tops, or softmax_param has a normalize_type
            other than "Softmax".
        ShapeError: the number of labels is not the number of positions.
        DataError: a label is outside the classes.
    """

    tops = (1, 3)
    no_gradient_tops = frozenset({1, 2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._smoothing = self.param.loss_param.label_smoothing
        if not 0 <= self._smoothing <= 1:
            raise self.error(f"loss_param's label_smoothing is {self._smoothing:g}; it must be from 0 to 1")
        kind = self.param.softmax_param.normalize_type
        if kind != "Softmax":
            raise self.error(f"softmax_param's normalize_type is '{kind}'; caffepy has Softmax only")
        if self._smoothing and len(top) > 2:
            raise self.error("the third top has no definition with label_smoothing; remove one of them")
        self._labels = Labels(self)
        self._totals = self.backend.zeros((2,))
        self._sum, self._count = (self.backend.view(self._totals[i : i + 1], ()) for i in range(2))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._divisor = self.divisor(_Parameter.VALID, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(bottom[0].shape)
        if len(top) > 2:
            top[2].reshape(bottom[1].shape)
            classes, inner = self._labels.classes, math.prod(bottom[0].shape[self._axis + 1 :])
            self._planes = LayoutAdapter(self.backend, bottom[0].shape, (self._labels.outer, classes, inner))
            self._each = LayoutAdapter(self.backend, bottom[1].shape, (self._labels.size,))
            self._ones = self.scratch("ones", (1, classes))

    def _probabilities(self, bottom: Blobs, top: Blobs) -> Array:
        """Return the array for the probabilities, which `backward` reads."""
        if len(top) > 1 and not self.tops_overwritten:
            return top[1].data
        return self.scratch("probabilities", bottom[0].shape).array

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        probabilities = self._probabilities(bottom, top)
        self.backend.softmax_loss_forward(
            bottom[0].data, self._labels.load(), probabilities, self._totals, self._labels.bad_index, self._axis,
            self.ignored,
        )  # fmt: skip
        if self._smoothing:
            labels = self._labels.loaded()
            self.backend.smooth_loss_forward(
                probabilities, labels, self._totals, self._axis, self.ignored, self._smoothing
            )
        if len(top) > 1 and self.tops_overwritten:
            self.backend.copy(probabilities, top[1].data)
        if len(top) > 2:
            self._write_each(probabilities, top[2].data)
        self.write_loss(self._sum, self._count, self._divisor, top[0].data)

    def _write_each(self, probabilities: Array, losses: Array) -> None:
        """Write the loss of each position."""
        terms = self.scratch("terms", tuple(probabilities.shape)).array
        labels = self._labels.loaded()
        self.backend.softmax_loss_backward(probabilities, labels, terms, None, self._axis, self.ignored, 1.0)
        self.backend.apply(label_term, (probabilities, terms), (terms,))
        planes, each = self._planes.load(terms), self._each.target(losses)
        outer, classes, inner = planes.shape
        if inner == 1:
            self.backend.reduce(identity, (self.backend.reshaped(planes, (outer, classes)),), (each,), 0)
        else:
            self.backend.fill(self._ones.array, 1)
            for plane, row in zip(planes, each.reshape(outer, 1, inner), strict=True):
                self.backend.gemm(self._ones.array, plane, row)
        self._each.store(losses)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        totals = self._totals if self._divisor is None else None
        labels, scale = self._labels.loaded(), self.scale()
        self.backend.softmax_loss_backward(
            self._probabilities(bottom, top), labels, bottom[0].diff, totals, self._axis, self.ignored, scale
        )
        if self._smoothing:
            smoothed = scale * self._smoothing
            self.backend.smooth_loss_backward(labels, bottom[0].diff, totals, self._axis, self.ignored, smoothed)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


@register_layer("SoftmaxWithLossOHEM")
class SoftmaxWithLossOHEMLayer(SoftmaxWithLossLayer):
    """SoftmaxWithLoss with up to three tops, under the name of `softmax_loss_ohem_layer.cpp` (R-FCN, Intel Caffe)."""
