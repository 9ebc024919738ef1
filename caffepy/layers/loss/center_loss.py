"""CenterLoss: features near the center of their class."""

from __future__ import annotations

import math
from math import fabs

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.formulas import scaled
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.loss.base import LossLayer

DISTANCES = ("L1", "L2")


@expression
def difference(x: Each, y: Each) -> Each:
    return x - y


@expression
def square_loss(d: Each, factor: Scalar) -> Each:
    return 0.5 * d * d * factor


@expression
def absolute_loss(d: Each, factor: Scalar) -> Each:
    return fabs(d) * factor


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
            self, f"label {{}} of '{bottom[1].title}' is outside 0 to {param.num_output - 1}; correct the data, or "
            "give center_loss_param a larger num_output"
        )  # fmt: skip

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
        formula = absolute_loss if self.param.center_loss_param.distance_type == "L1" else square_loss
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
