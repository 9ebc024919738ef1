"""The base classes of losses, layers whose first top is a number to be minimised (Caffe's `loss_layer.hpp`)."""

from __future__ import annotations

from caffepy.backend import Array, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.formulas import product_with_channel, scaled
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@expression
def over_count(total: Each, count: Each, devices: Scalar) -> Each:
    return total * devices / max(count, 1.0)


class LossLayer(Layer):
    """A layer that compares bottom 0 with bottom 1 and gives one number, of shape ().

    Losses and gradients of devices that train together are averaged, so that each device's are made such that the
    average is what one device with the whole batch has.
    """

    bottoms = (2, 2)
    is_loss = True
    auto_tops = True
    no_gradient_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    _divisor: float | None = 1.0
    """What `divisor` said of the present shapes."""

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom[:2]:
            if not blob.shape:
                raise self.shape_error("both bottoms need a first axis, N", bottom[0], bottom[1])
        if bottom[0].shape[0] != bottom[1].shape[0]:
            raise self.shape_error("both bottoms must have the same first axis, N", bottom[0], bottom[1])
        top[0].reshape(())

    @property
    def _is_weighted(self) -> bool:
        """Whether the first top's gradient begins as its loss weight: not where a layer above writes that gradient.

        Then the unwritten weight 1 counts in the loss that is reported, but not in the gradient, as in Caffe.
        """
        return bool(self.loss_weights and self.loss_weights[0]) and not self.reader_propagates

    @property
    def _knows_weight(self) -> bool:
        """Whether the first top's gradient is its loss weight, and no program has written another one."""
        return self._is_weighted and not self.program_writes_diff

    def weight(self) -> float:
        """The gradient of the loss by the first top, if it is known beforehand; else 1 (see `finish`)."""
        return self.loss_weights[0] if self._knows_weight else 1.0

    def finish(self, top: Blobs, dx: Array) -> None:
        """Multiply a bottom's diff by the first top's, where that is not a loss weight but comes from layers above.

        The loss scale comes in as well where no layer above has brought it.
        """
        if not self._knows_weight:
            self.backend.apply(product_with_channel, (dx, top[0].diff), (dx,), 0)
        if self._is_weighted and self.context.loss_scale is not None:
            self.backend.apply(scaled, (dx, self.context.loss_scale), (dx,))

    def normalization(self, default: int) -> int:
        """The mode that the prototxt chooses by `normalization` or the old `normalize`; `default` where by neither."""
        param = self.param.loss_param
        if param.HasField("normalize") and not param.HasField("normalization"):
            return _Parameter.VALID if param.normalize else _Parameter.BATCH_SIZE
        return param.normalization if param.HasField("normalization") else default

    def divisor(self, default: int, labels: int, batch: int) -> float | None:
        """What the sum of losses is divided by; None: the number of valid labels, counted on the device.

        Where nothing is divided (NONE) it is 1 over the devices, since an average over these follows.

        Args:
            default: the mode where the prototxt has neither `normalization` nor the old `normalize`.
            labels: losses added up if none is ignored.
            batch: samples.
        """
        mode = self.normalization(default)
        if mode == _Parameter.VALID and self.param.loss_param.HasField("ignore_label"):
            return None
        counts = {_Parameter.FULL: labels, _Parameter.VALID: labels, _Parameter.BATCH_SIZE: batch}
        if mode not in counts:
            return 1 / self.context.shard.world_size if self.context.phase == caffe_pb2.TRAIN else 1.0
        return float(max(counts[mode], 1))  # type: ignore[index]

    def communicates(self) -> bool:
        return self._divisor is None and self.context.all_reduce_sum is not None

    def capture_blocker(self) -> str | None:
        if not self.communicates() or self.context.all_reduce_capturable:
            return None
        return "it counts labels over all devices through the host"

    @property
    def _counted_devices(self) -> int:
        """How many devices' labels a count is of."""
        return self.context.shard.world_size if self.communicates() else 1

    def scale(self) -> float:
        """The gradient's factor, without what is counted on the device."""
        return self.weight() * self._counted_devices if self._divisor is None else self.weight() / self._divisor

    def put_loss(self, total: Array, count: Array, divisor: float | None, loss: Array) -> None:
        """loss = total / divisor, or over the count that the device made; that becomes the count of all devices."""
        if divisor is None:
            if self.communicates():
                assert self.context.all_reduce_sum is not None
                self.context.all_reduce_sum(count.reshape(1))
            self.backend.apply(over_count, (total, count, float(self._counted_devices)), (loss,))
        else:
            self.backend.apply(scaled, (total, 1 / divisor), (loss,))

    @property
    def ignored(self) -> int | None:
        """The label that is left out."""
        param = self.param.loss_param
        return param.ignore_label if param.HasField("ignore_label") else None


class ElementLossLayer(LossLayer):
    """A loss that compares elements one by one; the second bottom may have another shape of the same count."""

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
