"""Softmax and SoftmaxWithLoss."""

from __future__ import annotations

import math
from math import log

import numpy as np

from caffepy.backend import Array, Channel, Each, expression
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.formulas import identity, product, product_with_channel
from caffepy.layers.labels import Labels
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter
from caffepy.layers.loss import NO_IGNORED_LABEL, ClassRows, LossLayer, valid_labels


@register_layer("Softmax")
class SoftmaxLayer(Layer):
    """y = exp(x - max x) / sum of exp(x - max x) along `axis` (Caffe's `softmax_layer.cpp`)."""

    recordable = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.softmax_forward(bottom[0].data, top[0].data, self._axis)
        self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.softmax_backward(self.saved_top(top), top[0].diff, bottom[0].diff, self._axis)


_Parameter = caffe_pb2.LossParameter
LEAST_PROBABILITY = 1.1754943508222875e-38
"""FLT_MIN."""


@expression
def weighted_loss(p: Each, target: Each, weight: Channel) -> Each:
    return -target * log(max(p, LEAST_PROBABILITY)) * weight


@expression
def label_term(probability: Each, slope: Each) -> Each:
    """-log(probability) of the label, 0 of other classes and ignored labels: only the label's slope is below 0."""
    return -log(max(probability, LEAST_PROBABILITY)) if slope < 0 else 0.0


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

    With SegNet's and ENet's `weight_by_label_freqs` each position's loss and gradient are multiplied by
    class_weighting[label]; the divisor stays (`softmax_loss_layer.cpp` of caffe-segnet).

    Raises:
        ConfigError: label_smoothing is outside [0, 1], or is given with weight_by_label_freqs; either is given with
            three tops; or softmax_param has a normalize_type other than "Softmax".
        ShapeError: the number of labels is not the number of positions, or class_weighting does not have one weight
            for each class.
        DataError: a label is outside the classes.
    """

    tops = (1, 3)
    no_gradient_tops = frozenset({1, 2})
    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._smoothing = self.param.loss_param.label_smoothing
        if not 0 <= self._smoothing <= 1:
            raise self.error(f"loss_param's label_smoothing is {self._smoothing:g}; it must be from 0 to 1")
        kind = self.param.softmax_param.normalize_type
        if kind != "Softmax":
            raise self.error(f"softmax_param's normalize_type is '{kind}'; caffepy has Softmax only")
        param = self.param.loss_param
        if len(top) > 2 and (self._smoothing or param.weight_by_label_freqs):
            name = "label_smoothing" if self._smoothing else "weight_by_label_freqs"
            raise self.error(f"the third top has no definition with {name}; remove one of them")
        self._weighting: Array | None = None
        if param.weight_by_label_freqs:
            if self._smoothing:
                raise self.error("loss_param has both label_smoothing and weight_by_label_freqs; keep one of them")
            self._weighting = self.backend.zeros((len(param.class_weighting), 1))
            self.backend.from_host(np.array(param.class_weighting, np.float32)[:, None], self._weighting)
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
        if self._weighting is not None:
            self._reshape_weights(bottom[0].shape, self._weighting.shape[0])

    def _reshape_weights(self, shape: tuple[int, ...], weights: int) -> None:
        if weights != self._labels.classes:
            raise self.shape_error(f"class_weighting has {weights} weights for {self._labels.classes} classes")
        if shape != self._shape:
            self._shape = shape
            self._rows = ClassRows(self.backend, shape, self._axis)
        self._weights, self._valid, self._safe = (
            self.scratch(name, (self._labels.size,)) for name in ("weights", "valid", "labels")
        )
        self._one_hot = self.scratch("one hot", (self._labels.size, weights))

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
        if self._weighting is not None:
            self._weight_loss(probabilities, self._weighting)
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

    def _weight_loss(self, probabilities: Array, weighting: Array) -> None:
        """Compute each position's weight, and the weighted sum of losses."""
        backend, weights, safe = self.backend, self._weights.array, self._safe.array
        ignored = NO_IGNORED_LABEL if self.ignored is None else float(self.ignored)
        backend.apply(valid_labels, (self._labels.loaded(), ignored), (safe, self._valid.array))
        backend.gather_rows(weighting, safe, weights.reshape(-1, 1), self._labels.bad_index)
        backend.apply(product, (weights, self._valid.array), (weights,))
        backend.one_hot(safe, self._one_hot.array, self._labels.bad_index)
        inputs = (self._rows.load(probabilities), self._one_hot.array, weights)
        backend.reduce(weighted_loss, inputs, (self._sum,), 0)

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
        if self._weighting is not None:
            rows = self._rows.load(bottom[0].diff)
            self.backend.apply(product_with_channel, (rows, self._weights.array), (rows,), 0)
            self._rows.store(bottom[0].diff)
        self.apply_top_gradient(top, bottom[0].diff)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()
