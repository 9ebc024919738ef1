"""SegAccuracy, SegmentationEvaluate and EltwiseAccuracy: how well a segmentation agrees with its labels."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.backend.formulas import identity, product, ratio_or_zero
from caffepy.data.images import resize
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.accuracy import AccuracyLayer
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, Layer, LayerContext, LayoutAdapter, register_layer
from caffepy.layers.loss import Labels


@expression
def without(label: Each, counts: Each, ignored: Scalar) -> tuple[Each, Each]:
    return (0.0 if label == ignored else label), (0.0 if label == ignored else counts)


@expression
def cell_of(label: Each, predicted: Each, valid: Each, counts: Each, classes: Scalar) -> Each:
    return label * classes + predicted if valid * counts > 0 else classes * classes


@expression
def class_scores(hit: Each, actual: Each, predicted: Each) -> tuple[Each, Each, Each]:
    return (
        0.0 if actual == 0 else hit / actual,
        1.0 if actual > 0 else 0.0,
        1.0 if actual + predicted == 2 * hit else hit / (actual + predicted - hit),
    )


@expression
def over(value: Each, hits: Scalar) -> Each:
    return value / hits


@register_layer("SegAccuracy")
class SegAccuracyLayer(Layer):
    """Accuracy of a segmentation from its confusion matrix (`seg_accuracy_layer.cpp` of DeepLab and PSPNet).

    Bottoms: scores (N, C, H, W) and labels (N, 1, H, W). The prediction is the class with the highest score, of equal
    ones the last. Top (1, 1, 1, 3): the part of pixels with the right class; the mean of each class's part, over
    classes that have labels; the mean over all classes of intersection / union, 1 for a class that has neither labels
    nor predictions. Pixels whose label is in `ignore_label` do not count. With `reset: false` the matrix adds up over
    all passes, in float64 on the host.

    Raises:
        ShapeError: the shapes differ.
        DataError: a label that is not ignored is outside the classes.
    """

    bottoms = (2, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._labels = Labels(self)
        self._ignored = list(self.param.seg_accuracy_param.ignore_label)
        self._adds_up = not self.param.seg_accuracy_param.reset
        self._total: NDArray[np.float64] | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4 or bottom[1].shape != (shape[0], 1, *shape[2:]):
            raise self.shape_error("needs scores (N, C, H, W) and labels (N, 1, H, W)", bottom[0], bottom[1])
        self._labels.reshape(bottom[0], bottom[1], 1)
        top[0].reshape((1, 1, 1, 3))
        zeros, size, classes = self.backend.zeros, self._labels.size, shape[1]
        self._best = self.scratch("best", (shape[0], 1, *shape[2:]))
        self._best_scores = self.scratch("best scores", (shape[0], 1, *shape[2:]))
        self._predicted = LayoutAdapter(self.backend, self._best.shape, (size,))
        names = ("labels", "counts", "valid", "cells")
        self._safe, self._counts, self._valid, self._cells = (self.scratch(name, (size,)) for name in names)
        if getattr(self, "_classes", None) != classes:
            self._classes = classes
            self._matrix = zeros((classes * classes + 1, 1))
            self._ones_of_class, self._identity = zeros((classes, 1)), zeros((classes, classes))
            self.backend.fill(self._ones_of_class, 1)
            self.backend.from_host(np.eye(classes, dtype=np.float32), self._identity)
            self._hits, self._actual, self._guessed = (zeros((classes,)) for _ in range(3))
            self._scores = [zeros((classes,)) for _ in range(3)]
            self._sums = [zeros(()) for _ in range(5)]
        self._ones = self.scratch("ones", (size, 1))

    def capture_blocker(self) -> str | None:
        return "it adds up its counts on the host, because of reset: false" if self._adds_up else None

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        return not param.seg_accuracy_param.reset

    def has_side_effects(self) -> bool:
        return self._adds_up

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, classes = self.backend, self._classes
        labels, safe, counts = self._labels.load(), self._safe.array, self._counts.array
        backend.copy(labels, safe)
        backend.fill(counts, 1)
        for ignored in self._ignored:
            backend.apply(without, (safe, counts, float(ignored)), (safe, counts))
        valid = self._valid.array.reshape(-1, 1)
        backend.gather_rows(self._ones_of_class, safe, valid, self._labels.bad_index)
        backend.largest(bottom[0].data, 1, self._best.array, self._best_scores.array)
        predicted = self._predicted.load(self._best.array)
        inputs = (safe, predicted, self._valid.array, counts, float(classes))
        backend.apply(cell_of, inputs, (self._cells.array,))
        backend.fill(self._ones.array, 1)
        backend.fill(self._matrix, 0)
        backend.scatter_add_rows(self._ones.array, self._cells.array, self._matrix)
        matrix = self._matrix[: classes * classes].reshape(classes, classes)
        if self._adds_up and backend.holds_values:
            self._add_up(matrix, top[0].data)
        else:
            self._score(matrix, top[0].data)

    def _score(self, matrix: Array, scores: Array) -> None:
        backend = self.backend
        hits, total, recall, present, jaccard = self._sums
        backend.reduce(product, (matrix, self._identity), (self._hits,), 0)
        backend.reduce(identity, (matrix,), (self._actual,), 0)
        backend.reduce(identity, (matrix,), (self._guessed,), 1)
        backend.apply(class_scores, (self._hits, self._actual, self._guessed), self._scores)
        sources = (self._hits, self._actual, *self._scores)
        for source, output in zip(sources, self._sums, strict=True):
            backend.reduce(identity, (source,), (output,))
        flat = backend.flat(scores)
        backend.apply(ratio_or_zero, (hits, total), (flat[0:1].reshape(()),))
        backend.apply(ratio_or_zero, (recall, present), (flat[1:2].reshape(()),))
        backend.apply(over, (jaccard, float(self._classes)), (flat[2:3].reshape(()),))

    def _add_up(self, matrix: Array, scores: Array) -> None:
        counts = np.asarray(self.backend.to_host(matrix), np.float64)
        if self._total is not None and self._total.shape == counts.shape:
            counts = counts + self._total
        self._total = counts
        hits, actual, guessed = np.diag(counts), counts.sum(1), counts.sum(0)
        union, present = actual + guessed - hits, actual > 0
        recall = hits[present] / actual[present]
        jaccard = np.where(union == hits, 1, hits / np.maximum(union, 1))
        found = [hits.sum() / max(counts.sum(), 1), recall.mean() if recall.size else 0, jaccard.mean()]
        self.backend.from_host(np.array(found, np.float32).reshape(1, 1, 1, 3), scores)

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()


_BYTE = 255


@register_layer("SegmentationEvaluate")
class SegmentationEvaluateLayer(HostLayer):
    """Overlaps of the masks of a batch's first image (`segmentation_evaluate_layer.cpp` of MobileNet-YOLO).

    Shapes: predictions (N, C, H, W) and masks (N, C, H', W') with values from 0 to 1, top (1, 1, 1, C) with
    intersection over union. A pixel belongs to a mask if its value exceeds `threshold`. Predictions of another size are
    resized as bytes with OpenCV's bilinear interpolation; a class without pixels in the mask then has -1, unless
    predictions match. Computed on the host.

    Raises:
        ShapeError: the bottoms differ in C.
    """

    bottoms = (2, 2)
    has_backward = False
    no_gradient_bottoms = frozenset({1})
    blocker = "it compares masks on the host"

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shapes = [blob.shape for blob in bottom]
        if any(len(shape) != 4 or not shape[0] for shape in shapes) or shapes[0][1] != shapes[1][1]:
            raise self.shape_error("needs predictions N C H W and masks of as many channels", *bottom)
        top[0].reshape((1, 1, 1, shapes[1][1]))

    def compute(self, predictions: NDArray[np.float32], masks: NDArray[np.float32]) -> list[NDArray[np.float64]]:
        found = [self._overlap(*pair) for pair in zip(predictions[0], masks[0], strict=True)]
        return [np.array(found).reshape(1, 1, 1, -1)]

    def _overlap(self, predicted: NDArray[np.float32], mask: NDArray[np.float32]) -> float:
        threshold = self.param.segmentation_evaluate_param.threshold
        resized = predicted.shape != mask.shape
        if resized:
            image = np.nan_to_num(predicted * np.float32(_BYTE)).astype(np.int64).astype(np.uint8)
            found = resize(image, mask.shape[0], mask.shape[1], ipp=True)[:, :, 0] > int(threshold * _BYTE)
        else:
            found = predicted > np.float32(threshold)
        wanted = mask > np.float32(threshold)
        shared = int((found & wanted).sum())
        if shared:
            return shared / (int(found.sum()) + int(wanted.sum()) - shared)
        return -1.0 if resized and not wanted.any() else 0.0


@register_layer("EltwiseAccuracy")
class EltwiseAccuracyLayer(AccuracyLayer):
    """Accuracy with the settings in `eltwise_accuracy_param` (DeconvNet's `eltwise_accuracy_layer.cpp`).

    Bottoms: scores (N, C, H, W) and labels (N, 1, H, W). The top is (). Pixels whose label is `ignore_label` do not
    count.

    Raises:
        ShapeError: top_k exceeds the number of classes, or the number of labels is not the number of pixels.
        DataError: a label is outside the classes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        own = self.param.eltwise_accuracy_param
        self.param.accuracy_param.top_k = own.top_k
        if own.HasField("ignore_label"):
            self.param.accuracy_param.ignore_label = own.ignore_label
        super().setup(bottom, top)
