"""The base classes of losses (Caffe's `loss_layer.hpp`)."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.formulas import product_with_channel, scaled
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter

LOG_THRESHOLD = 1e-20
"""The smallest probability whose logarithm is computed: Caffe's kLOG_THRESHOLD."""

NO_IGNORED_LABEL = -1e30
"""Stands for a missing `ignore_label` in formulas: no label has this value."""


@expression
def divided_by_count(total: Each, count: Each, devices: Scalar) -> Each:
    return total * devices / max(count, 1.0)


class LossLayer(Layer):
    """A layer that compares bottoms 0 and 1, (N, …) each, and computes a scalar loss of shape ().

    Training averages losses and gradients over devices. Each device scales its own such that the average equals the
    result of one device with the whole batch.

    Raises:
        ShapeError: the bottoms differ in N.
    """

    bottoms = (2, 2)
    is_loss = True
    auto_tops = True
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    _divisor: float | None = 1.0
    """The result of `divisor` for the current shapes."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom[:2]:
            if not blob.shape:
                raise self.shape_error("both bottoms need a first axis, N", bottom[0], bottom[1])
        if bottom[0].shape[0] != bottom[1].shape[0]:
            raise self.shape_error("both bottoms must have the same first axis, N", bottom[0], bottom[1])
        top[0].reshape(())

    @property
    def _starts_gradient(self) -> bool:
        """Whether backpropagation starts at the first top: it has a loss weight and no later layer writes its diff.

        If a later layer writes the gradient, the default weight 1 counts in the reported loss but not in the gradient,
        as in Caffe.
        """
        return bool(self.loss_weights and self.loss_weights[0]) and not self.reader_propagates

    @property
    def _gradient_is_weight(self) -> bool:
        """Whether the first top's gradient is its loss weight, so that it is known without reading the device."""
        return self._starts_gradient and not self.program_writes_diff

    def weight(self) -> float:
        """Return the first top's gradient if it is known on the host; else 1, and `apply_top_gradient` multiplies."""
        return self.loss_weights[0] if self._gradient_is_weight else 1.0

    def apply_top_gradient(self, top: Blobs, dx: Array) -> None:
        """Multiply a bottom's diff by the first top's diff unless `weight` did, and by the loss scale.

        A gradient that a later layer wrote contains the loss scale already.
        """
        if not self._gradient_is_weight:
            self.backend.apply(product_with_channel, (dx, top[0].diff), (dx,), 0)
        if self._starts_gradient and self.context.loss_scale is not None:
            self.backend.apply(scaled, (dx, self.context.loss_scale), (dx,))

    def normalization(self, default: int) -> int:
        """Return the mode of the field `normalization` or of the old `normalize`; `default` if neither is set."""
        param = self.param.loss_param
        if param.HasField("normalize") and not param.HasField("normalization"):
            return _Parameter.VALID if param.normalize else _Parameter.BATCH_SIZE
        return param.normalization if param.HasField("normalization") else default

    def divisor(self, default: int, labels: int, batch: int) -> float | None:
        """Return the divisor of the sum of losses; None: the number of valid labels, counted on the device.

        For the mode NONE it is 1 / devices, because training averages over the devices. PRE_FIXED is not divided, as in
        R-FCN's Caffe: each device divides its own sum by `pre_fixed_normalizer`.

        Args:
            default: the mode if the prototxt has neither `normalization` nor the old `normalize`.
            labels: number of labels, ignored ones included.
            batch: number of samples.
        """
        mode = self.normalization(default)
        if mode == _Parameter.VALID and self.param.loss_param.HasField("ignore_label"):
            return None
        if mode == _Parameter.PRE_FIXED:
            return float(max(self.param.loss_param.pre_fixed_normalizer, 1))
        counts = {_Parameter.FULL: labels, _Parameter.VALID: labels, _Parameter.BATCH_SIZE: batch}
        if mode not in counts:
            return 1 / self.context.shard.parts if self.context.phase == caffe_pb2.TRAIN else 1.0
        return float(max(counts[mode], 1))  # type: ignore[index]

    def communicates(self) -> bool:
        return self._divisor is None and self.context.all_reduce_sum is not None

    def capture_blocker(self) -> str | None:
        if not self.communicates() or self.context.all_reduce_capturable:
            return None
        return "it counts labels over all devices through the host"

    @property
    def _label_devices(self) -> int:
        """Number of devices whose labels the count includes."""
        return self.context.shard.world_size if self.communicates() else 1

    def scale(self) -> float:
        """Return the factor of the gradient, without a divisor that is counted on the device."""
        return self.weight() * self._label_devices if self._divisor is None else self.weight() / self._divisor

    def write_loss(self, total: Array, count: Array, divisor: float | None, loss: Array) -> None:
        """loss = total / divisor. Without a divisor loss = total / count, after an all-reduce of `count`."""
        if divisor is None:
            if self.communicates():
                assert self.context.all_reduce_sum is not None
                self.context.all_reduce_sum(count.reshape(1))
            self.backend.apply(divided_by_count, (total, count, float(self._label_devices)), (loss,))
        else:
            self.backend.apply(scaled, (total, 1 / divisor), (loss,))

    @property
    def ignored(self) -> int | None:
        """The label that the loss ignores, or None."""
        param = self.param.loss_param
        return param.ignore_label if param.HasField("ignore_label") else None


class ElementLossLayer(LossLayer):
    """An elementwise loss. The second bottom has the first one's count and may have another shape.

    Raises:
        ShapeError: the counts differ.
    """

    _shapes: tuple[tuple[int, ...], ...] | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if bottom[0].count != bottom[1].count:
            raise self.shape_error("both bottoms must have the same count", bottom[0], bottom[1])
        shapes = (bottom[0].shape, bottom[1].shape)
        if shapes != self._shapes:
            self._shapes = shapes
            self._targets = LayoutAdapter(self.backend, bottom[1].shape, bottom[0].shape)
            self._target_diffs = LayoutAdapter(self.backend, bottom[1].shape, bottom[0].shape)
