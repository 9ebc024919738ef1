"""Accuracy."""

from __future__ import annotations

import numpy as np

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.backend.formulas import negated, ratio_or_zero
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.loss import NO_IGNORED_LABEL, Labels


@expression
def hits(rank: Each, label: Each, top_k: Scalar, ignored: Scalar) -> tuple[Each, Each]:
    counts = 1.0 if rank >= 0 and label != ignored else 0.0
    return counts * (1.0 if rank < top_k else 0.0), counts


@expression
def class_hits(rank: Each, label: Each, number: Channel, top_k: Scalar, ignored: Scalar) -> tuple[Each, Each]:
    counts = 1.0 if label == number and rank >= 0 and label != ignored else 0.0
    return counts * (1.0 if rank < top_k else 0.0), counts


@expression
def without_ignored(label: Each, ignored: Scalar) -> Each:
    return 0.0 if label == ignored else label


@register_layer("Accuracy")
class AccuracyLayer(Layer):
    """The fraction of labels among the `top_k` highest scores (Caffe's `accuracy_layer.cpp`, BVLC 1.0).

    Shapes: scores (N, C, ...) with classes along `axis`, one label for each position, top (). A label is a hit if fewer
    than top_k other classes score at least as high, so that ties count against it. In NVIDIA's dialect only ties with
    classes of a higher index count. A second top (C,) holds the accuracy of each class, 0 for a class without labels.
    Labels equal to `ignore_label` are not counted. With `min_is_better` the lowest scores win (caffe-windows).

    Raises:
        ShapeError: top_k exceeds the number of classes, or the number of labels is not the number of positions.
        DataError: a label is outside the classes.
    """

    bottoms = (2, 2)
    tops = (1, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.accuracy_param
        self._labels = Labels(self)
        self._hits, self._count = self.backend.zeros(()), self.backend.zeros(())
        self._ignored = float(param.ignore_label) if param.HasField("ignore_label") else NO_IGNORED_LABEL
        self._top_k = float(param.top_k)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.accuracy_param
        self._axis = bottom[0].axis(param.axis, self.where)
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        if param.top_k > self._labels.classes:
            raise self.shape_error(f"top_k is {param.top_k}, but there are {self._labels.classes} classes", bottom[0])
        top[0].reshape(())
        zeros = self.backend.zeros
        self._ranks, self._safe_labels = zeros((self._labels.size,)), zeros((self._labels.size,))
        if len(top) > 1:
            top[1].reshape((self._labels.classes,))
            self._make_class_buffers(self._labels.size, self._labels.classes)

    def _make_class_buffers(self, size: int, classes: int) -> None:
        zeros = self.backend.zeros
        self._class_hits, self._class_counts = zeros((classes,)), zeros((classes,))
        self._spread_ranks, self._spread_labels = zeros((size, classes)), zeros((size, classes))
        self._numbers, self._ones = zeros((classes,)), zeros((1, classes))
        self.backend.from_host(np.arange(classes, dtype=np.float32), self._numbers)
        self.backend.fill(self._ones, 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, labels = self.backend, self._labels.load()
        # The ignored label may be outside the classes (255 in segmentation), which is not an error.
        backend.apply(without_ignored, (labels, self._ignored), (self._safe_labels,))
        scores = bottom[0].data
        if self.param.accuracy_param.min_is_better:
            scores = self.scratch("negative", bottom[0].shape).array
            backend.apply(negated, (bottom[0].data,), (scores,))
        ranked = (scores, self._safe_labels, self._ranks, self._labels.bad_index, self._axis)
        backend.label_ranks(*ranked, self.context.nvidia)
        inputs = (self._ranks, labels, self._top_k, self._ignored)
        backend.reduce(hits, inputs, (self._hits, self._count))
        backend.apply(ratio_or_zero, (self._hits, self._count), (top[0].data,))
        if len(top) > 1:
            self._score_classes(labels, top[1].data)

    def _score_classes(self, labels: Array, scores: Array) -> None:
        backend = self.backend
        for row, spread in ((self._ranks, self._spread_ranks), (labels, self._spread_labels)):
            backend.gemm(row.reshape(-1, 1), self._ones, spread)
        inputs = (self._spread_ranks, self._spread_labels, self._numbers, self._top_k, self._ignored)
        backend.reduce(class_hits, inputs, (self._class_hits, self._class_counts))
        backend.apply(ratio_or_zero, (self._class_hits, self._class_counts), (scores,))

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()
