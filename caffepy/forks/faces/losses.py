"""Losses of distances: CenterLoss, GeneralContrastiveLoss, GeneralTripletLoss and TripletLoss."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.backend.formulas import difference, pair_gradient, scaled, scaled_magnitude, squared_difference
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, LayerContext, LayoutAdapter, register_layer
from caffepy.layers.loss import IndexCheck, LossLayer

DISTANCES = ("L1", "L2")


@expression
def square_loss(d: Each, factor: Scalar) -> Each:
    return 0.5 * d * d * factor


@expression
def sign(d: Each) -> Each:
    return 1.0 if d > 0 else (-1.0 if d < 0 else 0.0)


@expression
def center_gradient(total: Each, before: Each, count: Channel, factor: Scalar) -> Each:
    return before - total * factor / (count + 1)


@register_layer("CenterLoss")
class CenterLossLayer(LossLayer):
    """loss = sum of |x_i - c_label(i)|^2 / (2 N), or with `distance_type: "L1"` sum of |x_i - c_label(i)| / N.

    Shapes: x (N, ..., K) with the axes from `axis` on flattened into K, one label for each sample, centers
    (num_output, K), loss (). With d_i = x_i - c_label(i), dx = d * loss weight / N. As in the fork, the gradient of
    center j does not depend on the loss weight: it is -(sum of d_i over its n_j samples) / (n_j + 1). For L1, sign(d)
    takes the place of d. The sums are over the samples of all devices (`center_loss_layer.cpp` of caffe-face; Wen,
    Zhang, Li and Qiao 2016; L1: caffe-windows).

    Raises:
        ConfigError: num_output is missing, or distance_type is unknown.
        ShapeError: the samples have another size than the centers, or there is not one label for each.
        DataError: a label is outside the classes.
    """

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.center_loss_param
        if param.num_output < 1:
            raise self.error("center_loss_param needs num_output, the number of classes")
        if param.distance_type not in DISTANCES:
            raise self.error(f"distance_type is '{param.distance_type}'; it must be L1 or L2")
        axis = bottom[0].axis(param.axis, self.where)
        self._width = math.prod(bottom[0].shape[axis:])
        self.add_parameter((param.num_output, self._width), param.center_filler)
        self._check = IndexCheck(
            self,
            f"label {{}} of '{bottom[1].title}' is outside 0 to {param.num_output - 1}; correct the data, or "
            "give center_loss_param a larger num_output",
        )

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        shape, param = bottom[0].shape, self.param.center_loss_param
        axis = bottom[0].axis(param.axis, self.where)
        samples = math.prod(shape[:axis])
        if math.prod(shape[axis:]) != self._width:
            raise self.shape_error(f"the axes from {axis} on must have {self._width} elements", bottom[0])
        if bottom[1].count != samples:
            raise self.shape_error(f"needs one label for each of {samples} samples", bottom[0], bottom[1])
        rows = (samples, self._width)
        if shape != self._shape:
            self._shape = shape
            self._x, self._dx = (LayoutAdapter(self.backend, shape, rows) for _ in range(2))
        self._labels = LayoutAdapter(self.backend, bottom[1].shape, rows[:1])
        self._differences = self.scratch("differences", rows)
        self._sums = self.scratch("sums", (param.num_output, self._width))
        self._counts = self.scratch("counts", (param.num_output, 1))
        self._ones = self.scratch("ones", (samples, 1))

    def communicates(self) -> bool:
        return self.context.all_reduce_sum is not None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, d = self.backend, self._differences.array
        x, labels = self._x.load(bottom[0].data), self._labels.load(bottom[1].data)
        backend.gather_rows(self.blobs[0].data, labels, d, self._check.bad_index)
        backend.apply(difference, (x, d), (d,))
        formula = scaled_magnitude if self.param.center_loss_param.distance_type == "L1" else square_loss
        backend.reduce(formula, (d, 1 / max(bottom[0].shape[0], 1)), (top[0].data,))
        if not self.context.forward_only:
            self._count(labels)

    def _count(self, labels: Array) -> None:
        """Count the samples of each class on all devices."""
        backend, counts = self.backend, self._counts.array
        backend.fill(counts, 0)
        backend.fill(self._ones.array, 1)
        backend.scatter_add_rows(self._ones.array, labels, counts)
        if self.context.all_reduce_sum is not None:
            self.context.all_reduce_sum(counts)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, d = self.backend, self._differences.array
        if self.param.center_loss_param.distance_type == "L1":
            backend.apply(sign, (d,), (d,))
        if self.propagate_to_params[0]:
            self._propagate_to_centers(d, bottom)
        if propagate_down[0]:
            dx = self._dx.target(bottom[0].diff)
            backend.apply(scaled, (d, self.weight() / max(bottom[0].shape[0], 1)), (dx,))
            self.apply_top_gradient(top, dx)
            self._dx.store(bottom[0].diff)

    def _propagate_to_centers(self, d: Array, bottom: Blobs) -> None:
        backend, sums, diff = self.backend, self._sums.array, self.blobs[0].diff
        backend.fill(sums, 0)
        backend.scatter_add_rows(d, self._labels.target(bottom[1].data), sums)
        if not self.accumulate(0):
            backend.fill(diff, 0)
        # Training averages over devices, so that a sum is multiplied by their number; the update divides by the scale.
        devices = float(self.context.shard.world_size) if self.communicates() else 1.0
        if self.context.loss_scale is not None:
            backend.apply(scaled, (sums, self.context.loss_scale), (sums,))
        backend.apply(center_gradient, (sums, diff, self._counts.array.reshape(-1), devices), (diff,), 0)

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


KEPT = 0.99
"""Share of the old average of the label's part in the new one."""
LEAST_LOSS = 1e-9
"""Below this a triplet has no gradient."""


class DistanceLossLayer(LossLayer):
    """A loss of distances (N, classes) and labels that the host computes."""

    bottoms = (2, 3)
    tops = (1, 2)
    no_gradient_bottoms = frozenset({1, 2})
    no_gradient_tops = frozenset({1})

    statistics = 2
    """Numbers in the second top."""
    weighs_samples = False
    """Whether the third bottom has a factor for each sample, else a value for each distance."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        samples = bottom[0].shape[0]
        self._rows = (samples, bottom[0].count // max(samples, 1))
        if self._rows[1] < 2:
            raise self.shape_error("needs distances (N, classes) of at least two classes", bottom[0])
        if bottom[1].count != samples:
            raise self.shape_error("needs one label for each sample", bottom[0], bottom[1])
        if len(bottom) > 2 and bottom[2].count != (samples if self.weighs_samples else bottom[0].count):
            each = "sample" if self.weighs_samples else "distance"
            raise self.shape_error(f"needs one value in the third bottom for each {each}", bottom[0], bottom[2])
        if len(top) > 1:
            top[1].reshape((self.statistics,))
        self._factors = self.scratch("factors", bottom[0].shape)

    def capture_blocker(self) -> str | None:
        return "the host computes it"

    def read(self, bottom: Blobs, index: int) -> np.ndarray:
        """Return a bottom's values on the host, (N, classes)."""
        return np.asarray(self.backend.to_host(bottom[index].data), np.float64).reshape(self._rows)

    def read_labels(self, bottom: Blobs) -> np.ndarray:
        """Return the labels.

        Raises:
            DataError: one is outside the classes.
        """
        labels = np.asarray(self.backend.to_host(bottom[1].data)).reshape(-1).astype(np.int64)
        if self.backend.holds_values and ((labels < 0) | (labels >= self._rows[1])).any():
            raise self.data_error(
                f"a label of '{bottom[1].title}' is outside 0 to {self._rows[1] - 1}; correct the data"
            )
        return labels

    def write(self, top: Blobs, loss: float, slopes: np.ndarray, statistics: Sequence[float], shape: Any) -> None:
        """Set the tops, and keep the gradient of the loss by the distances for `backward`."""
        backend = self.backend
        backend.from_host(np.array(loss, np.float32), top[0].data)
        backend.from_host(slopes.astype(np.float32).reshape(shape), self._factors.array)
        if len(top) > 1:
            backend.from_host(np.array(statistics, np.float32), top[1].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            dx = bottom[0].diff
            self.backend.apply(scaled, (self._factors.array, self.weight()), (dx,))
            self.apply_top_gradient(top, dx)


@register_layer("GeneralContrastiveLoss")
class GeneralContrastiveLossLayer(DistanceLossLayer):
    """loss = sum of |p_i| + sum of |q_ij| over N, of distances d (N, classes) and one label l_i for each sample.

    p_i = positive_weight * min(max(d_il - positive_margin, 0), positive_outlier_thresh). For other classes with
    d_ij < negative_margin, q_ij = negative_weight * (negative_margin - d_ij), or negative_weight * e^-d_ij with
    `exp_negative_weight`. With `max_negative_only` only the largest q of a sample counts, with `max_positive_only` only
    the smallest p of the batch. With `positive_first` the q of a sample count only where d_il <= positive_upper_bound.
    With `add_intra_mae` the average 0.99 a + 0.01 * mean of p / positive_weight, at most max_negative_margin, is added
    to negative_margin.

    Shapes: d (N, ...), labels (N,), loss (). A third bottom gives the values of d for gradients after the first has
    them. The second top (2,) holds the means of the label's and of the others' parts, with `add_intra_mae` also a.

    dd = the derivative / N. Where `normalize_negative` v is given and r = sum of |dq| / (v N) exceeds positive_weight,
    the others' gradients are divided by r (`general_constrastive_loss_layer.cpp` of caffe-windows).

    Raises:
        ShapeError: there are fewer than two classes, or not one label for each sample.
        DataError: a label is outside the classes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._average = self.backend.zeros(())
        self.statistics = 3 if self.param.general_contrastive_loss_param.add_intra_mae else 2

    def state(self) -> Sequence[Array]:
        return (self._average,)

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST with the margins' average; in a training each device has its own, as of running statistics."""
        return context.phase == caffe_pb2.TEST and param.general_contrastive_loss_param.add_intra_mae

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.general_contrastive_loss_param
        d, labels = self.read(bottom, 2 if len(bottom) > 2 else 0), self.read_labels(bottom)
        samples, classes = self._rows
        rows = np.arange(samples)
        average = float(self.backend.to_host(self._average))
        margin = param.negative_margin + (average if param.add_intra_mae else 0.0)
        label = np.zeros(d.shape, bool)
        label[rows, labels] = True

        part = np.minimum(np.maximum(d[rows, labels] - param.positive_margin, 0), param.positive_outlier_thresh)
        inside = (part > 0) & (part < param.positive_outlier_thresh)
        counted = np.ones(samples, bool)
        if param.max_positive_only:
            counted = rows == np.argmin(part * param.positive_weight)
        near = (d < margin) & ~label
        gap = np.where(near, margin - d, 0)
        value = np.where(near, np.exp(-np.where(near, d, 0)) if param.exp_negative_weight else gap, 0)
        value *= param.negative_weight
        slope = -value if param.exp_negative_weight else np.where(near, -param.negative_weight, 0.0)
        if param.max_negative_only:
            chosen = np.zeros(d.shape, bool)
            chosen[rows, np.argmax(np.where(label, -np.inf, value), 1)] = True
            value, slope = np.where(chosen, value, 0), np.where(chosen, slope, 0)
        far = d[rows, labels] > param.positive_upper_bound if param.positive_first else np.zeros(samples, bool)
        value[far], slope[far] = 0, 0

        loss = (np.abs(part * param.positive_weight * counted).sum() + np.abs(value).sum()) / samples
        if param.HasField("normalize_negative"):
            ratio = np.abs(slope.sum()) / param.normalize_negative / samples
            slope /= ratio if ratio > param.positive_weight else 1.0
        slope[rows, labels] = np.where(far | (inside & counted), param.positive_weight, 0)
        following = min(KEPT * average + (1 - KEPT) * part.mean(), param.max_negative_margin)
        statistics = [part.mean(), gap.sum() / samples / (classes - 1), following]
        self.backend.fill(self._average, following)
        self.write(top, loss, slope / samples, statistics[: self.statistics], bottom[0].shape)


@register_layer("GeneralTripletLoss")
class GeneralTripletLossLayer(DistanceLossLayer):
    """loss = negative_weight / N * sum of max(d_il + margin - d_ij, 0) over all j other than the label l_i.

    With `hardest_only` only the largest term of a sample counts. With `positive_first` the terms count only where
    d_il <= positive_upper_bound.

    Shapes: distances d (N, ...), labels (N,), loss (). A third bottom (N,) multiplies the gradients. The second top
    (2,) holds the means of the label's distances and of the others.

    As in the fork, the gradients are not the derivatives: -negative_weight / N where a term is positive, and
    positive_weight / N for the label where a term is positive, always with `add_center_loss`, and where
    `positive_first` leaves the terms out (`general_triplet_loss_layer.cpp` of caffe-windows).

    Raises:
        ShapeError: there are fewer than two classes, or not one label and one factor for each sample.
        DataError: a label is outside the classes.
    """

    weighs_samples = True

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.general_triplet_loss_param
        d, labels = self.read(bottom, 0), self.read_labels(bottom)
        samples, classes = self._rows
        rows = np.arange(samples)
        own = d[rows, labels]
        terms = np.maximum(own[:, None] + param.margin - d, 0)
        terms[rows, labels] = 0
        if param.hardest_only:
            hardest = np.argmax(terms, 1)
            terms = np.where(np.arange(classes) == hardest[:, None], terms, 0)
        far = own > param.positive_upper_bound if param.positive_first else np.zeros(samples, bool)
        terms[far] = 0
        slope = np.where(terms > 0, -param.negative_weight, 0.0)
        pulled = far | (terms > 0).any(1) | param.add_center_loss
        slope[rows, labels] = np.where(pulled, param.positive_weight, 0.0)
        if len(bottom) > 2:
            slope *= np.asarray(self.backend.to_host(bottom[2].data)).reshape(-1, 1)
        others = (d.sum() - own.sum()) / samples / (classes - 1)
        loss = np.abs(terms * param.negative_weight).sum() / samples
        self.write(top, loss, slope / samples, [own.mean(), others], bottom[0].shape)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(bottom) > 2 and bottom[2].count != bottom[0].shape[0]:
            raise self.shape_error("the third bottom must have one number for each sample", bottom[0], bottom[2])


@expression
def hinge(near: Each, far: Each, margin: Scalar) -> tuple[Each, Each]:
    loss = max(margin + near - far, 0.0)
    return loss, 0.0 if loss < LEAST_LOSS else 1.0


@expression
def half(loss: Each, factor: Scalar) -> Each:
    return 0.5 * loss * factor


@register_layer("TripletLoss")
class TripletLossLayer(LossLayer):
    """loss = sum of max(margin + |a - p|^2 - |a - n|^2, 0) / (2 N), of anchors, positives and negatives (N, ...).

    Where a term is at least 1e-9, da = (n - p) / N, dp = (p - a) / N, dn = (a - n) / N
    (`triplet_loss_layer.cpp` of caffe-windows; Schroff, Kalenichenko and Philbin 2015).

    Raises:
        ShapeError: the bottoms differ in shape.
    """

    bottoms = (3, 3)
    no_gradient_bottoms = frozenset()

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if not bottom[0].shape == bottom[1].shape == bottom[2].shape:
            raise self.shape_error("anchors, positives and negatives must have one shape", *bottom)
        samples = bottom[0].shape[0]
        self._near, self._far, self._acts = (self.scratch(name, (samples,)) for name in ("near", "far", "acts"))
        rows = (samples, bottom[0].count // max(samples, 1))
        self._values = [LayoutAdapter(self.backend, bottom[0].shape, rows) for _ in range(3)]
        self._diffs = LayoutAdapter(self.backend, bottom[0].shape, rows)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, near, far = self.backend, self._near.array, self._far.array
        a, p, n = (adapter.load(blob.data) for adapter, blob in zip(self._values, bottom, strict=True))
        backend.reduce(squared_difference, (a, p), (near,), 0)
        backend.reduce(squared_difference, (a, n), (far,), 0)
        backend.apply(hinge, (near, far, self.param.triplet_loss_param.margin), (near, self._acts.array))
        backend.reduce(half, (near, 1 / max(bottom[0].shape[0], 1)), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        a, p, n = (adapter.target(blob.data) for adapter, blob in zip(self._values, bottom, strict=True))
        factor = self.weight() / max(bottom[0].shape[0], 1)
        for blob, wanted, pair in zip(bottom, propagate_down, ((n, p), (p, a), (a, n)), strict=True):
            if wanted:
                dx = self._diffs.target(blob.diff)
                self.backend.apply(pair_gradient, (*pair, self._acts.array, factor), (dx,), 0)
                self.apply_top_gradient(top, dx)
                self._diffs.store(blob.diff)
