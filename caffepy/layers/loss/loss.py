"""Losses: layers whose first top is a number to be made small (Caffe's `loss_layer.hpp`)."""

from __future__ import annotations

from math import exp, fabs, floor, log1p

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import product_with_channel, scaled
from caffepy.layers.core.labels import Labels
from caffepy.layers.core.order import Reordered
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@expression
def over_count(total: Each, count: Each, devices: Scalar) -> Each:
    return total * devices / max(count, 1.0)


@expression
def over_count_channel(x: Each, count: Channel) -> Each:
    return x / max(count, 1.0)


class LossLayer(Layer):
    """A layer that compares bottom 0 with bottom 1 and gives one number, of shape ().

    Losses and gradients of devices that train together are averaged, so that each device's are made such that the
    average is what one device with the whole batch has.
    """

    bottoms = (2, 2)
    is_loss = True
    auto_tops = True
    no_gradient_bottoms = frozenset({1})

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
    def _knows_weight(self) -> bool:
        """Whether the first top's gradient is its loss weight: not where a layer above writes that gradient.

        Then the unwritten weight 1 counts in the loss that is reported, but not in the gradient, as in Caffe.
        """
        return bool(self.loss_weights and self.loss_weights[0]) and not self.reader_propagates

    def weight(self) -> float:
        """The gradient of the loss by the first top, if it is known beforehand; else 1 (see `finish`)."""
        return self.loss_weights[0] if self._knows_weight else 1.0

    def finish(self, top: Blobs, dx: Array) -> None:
        """Multiply a bottom's diff by the first top's, where that is not a loss weight but comes from layers above.

        Where it is one, the loss scale comes in instead.
        """
        if not self._knows_weight:
            self.backend.apply(product_with_channel, (dx, top[0].diff), (dx,), 0)
        elif self.context.loss_scale is not None:
            self.backend.apply(scaled, (dx, self.context.loss_scale), (dx,))

    def divisor(self, default: int, places: int, batch: int) -> float | None:
        """What the sum of losses is divided by; None: the number of places counted on the device.

        Where nothing is divided (NONE) it is 1 over the devices, since an average over these follows.

        Args:
            default: the mode where the prototxt has neither `normalization` nor the old `normalize`.
            places: losses added up if none is ignored.
            batch: samples.
        """
        param = self.param.loss_param
        mode: int = param.normalization if param.HasField("normalization") else default
        if param.HasField("normalize") and not param.HasField("normalization"):
            mode = _Parameter.VALID if param.normalize else _Parameter.BATCH_SIZE
        if mode == _Parameter.VALID and param.HasField("ignore_label"):
            return None
        counts = {_Parameter.FULL: places, _Parameter.VALID: places, _Parameter.BATCH_SIZE: batch}
        if mode not in counts:
            return 1 / self.context.shard.world_size if self.context.phase == caffe_pb2.TRAIN else 1.0
        return float(max(counts[mode], 1))  # type: ignore[index]

    def meets_devices(self) -> bool:
        return self._divisor is None and self.context.total_over_devices is not None

    def capture_blocker(self) -> str:
        if not self.meets_devices() or self.context.average_captured:
            return ""
        return "it counts labels over all devices through the host"

    @property
    def _counted_devices(self) -> int:
        """How many devices' labels a count is of."""
        return self.context.shard.world_size if self.meets_devices() else 1

    def scale(self) -> float:
        """The gradient's factor, without what is counted on the device."""
        return self.weight() * self._counted_devices if self._divisor is None else self.weight() / self._divisor

    def put_loss(self, total: Array, count: Array, divisor: float | None, loss: Array) -> None:
        """loss = total / divisor, or over the count that the device made; that becomes the count of all devices."""
        if divisor is None:
            if self.meets_devices():
                assert self.context.total_over_devices is not None
                self.context.total_over_devices(count.reshape(1))
            self.backend.apply(over_count, (total, count, float(self._counted_devices)), (loss,))
        else:
            self.backend.apply(scaled, (total, 1 / divisor), (loss,))

    @property
    def ignored(self) -> int | None:
        """The label that is left out."""
        param = self.param.loss_param
        return param.ignore_label if param.HasField("ignore_label") else None


@register_layer("SoftmaxWithLoss")
class SoftmaxWithLossLayer(LossLayer):
    """loss = sum of -log softmax(x)[label] / divisor (Caffe's `softmax_loss_layer.cpp`).

    Shapes: x (N, C, ...) with classes along `softmax_param.axis`, one label for each place. The divisor is the number
    of labels not ignored (VALID, the default), of all (FULL), of samples (BATCH_SIZE), or 1 (NONE). A second top gets
    the probabilities. dx = (softmax(x) - onehot(label)) * loss weight / divisor.
    """

    tops = (1, 2)
    no_gradient_tops = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        if self.param.loss_param.label_smoothing:
            raise self.error("label_smoothing is not there yet; leave it out")
        self._labels = Labels(self)
        self._totals = self.backend.zeros((2,))
        self._sum, self._count = (self.backend.view(self._totals[i : i + 1], ()) for i in range(2))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._axis = bottom[0].axis(self.param.softmax_param.axis, f"layer '{self.name}' ({self.type})")
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._divisor = self.divisor(_Parameter.VALID, self._labels.places, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(bottom[0].shape)

    def _probabilities(self, bottom: Blobs, top: Blobs) -> Array:
        """Where they are kept for the backward pass."""
        if len(top) > 1 and not self.tops_overwritten:
            return top[1].data
        return self.temporary("probabilities", bottom[0].shape).array

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        probabilities = self._probabilities(bottom, top)
        self.backend.softmax_loss_forward(
            bottom[0].data, self._labels.pull(), probabilities, self._totals, self._labels.bad, self._axis,
            self.ignored,
        )  # fmt: skip
        if len(top) > 1 and self.tops_overwritten:
            self.backend.copy(probabilities, top[1].data)
        self.put_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        by_count = self._divisor is None
        scale = self.scale()
        self.backend.softmax_loss_backward(
            self._probabilities(bottom, top), self._labels.kept(), bottom[0].diff, self._totals if by_count else None,
            self._axis, self.ignored, scale,
        )  # fmt: skip
        self.finish(top, bottom[0].diff)

    def check(self) -> None:
        self._labels.check()


@expression
def cross_entropy(x: Each, target: Each) -> tuple[Each, Each]:
    return max(x, 0.0) - x * target + log1p(exp(-fabs(x))), 1.0


@expression
def cross_entropy_ignoring(x: Each, target: Each, ignored: Scalar) -> tuple[Each, Each]:
    whole = floor(target) if target >= 0 else -floor(-target)
    counts = 0.0 if whole == ignored else 1.0
    return 0.0 if whole == ignored else max(x, 0.0) - x * target + log1p(exp(-fabs(x))), counts


@expression
def cross_entropy_gradient(x: Each, target: Each, scale: Scalar) -> Each:
    return (1 / (1 + exp(-x)) - target) * scale


@expression
def cross_entropy_gradient_ignoring(x: Each, target: Each, scale: Scalar, ignored: Scalar) -> Each:
    whole = floor(target) if target >= 0 else -floor(-target)
    return 0.0 if whole == ignored else (1 / (1 + exp(-x)) - target) * scale


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
            self._targets = Reordered(self.backend, bottom[1].shape, bottom[0].shape)
            self._target_diffs = Reordered(self.backend, bottom[1].shape, bottom[0].shape)


@register_layer("SigmoidCrossEntropyLoss")
class SigmoidCrossEntropyLossLayer(ElementLossLayer):
    """loss = sum of -(t log p + (1 - t) log(1 - p)) / divisor, p = 1 / (1 + e^-x).

    Targets t are from [0, 1]; those whose whole part is `ignore_label` are left out. The divisor is the number of
    samples unless `normalization` or `normalize` says otherwise. dx = (p - t) * loss weight / divisor (Caffe's
    `sigmoid_cross_entropy_loss_layer.cpp`).
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._sum, self._count = self.backend.zeros(()), self.backend.zeros(())

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._divisor = self.divisor(_Parameter.BATCH_SIZE, bottom[0].count, bottom[0].shape[0])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, t = bottom[0].data, self._targets.pull(bottom[1].data)
        if self.ignored is None:
            self.backend.reduce(cross_entropy, (x, t), (self._sum, self._count))
        else:
            inputs = (x, t, float(self.ignored))
            self.backend.reduce(cross_entropy_ignoring, inputs, (self._sum, self._count))
        self.put_loss(self._sum, self._count, self._divisor, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        x, t, dx = bottom[0].data, self._targets.target(bottom[1].data), bottom[0].diff
        scale = self.scale()
        if self.ignored is None:
            self.backend.apply(cross_entropy_gradient, (x, t, scale), (dx,))
        else:
            self.backend.apply(cross_entropy_gradient_ignoring, (x, t, scale, float(self.ignored)), (dx,))
        if self._divisor is None:
            self.backend.apply(over_count_channel, (dx, self._count), (dx,), 0)
        self.finish(top, dx)


@expression
def squared_difference(a: Each, b: Each, factor: Scalar) -> Each:
    return (a - b) * (a - b) * factor


@expression
def difference(a: Each, b: Each, factor: Scalar) -> Each:
    return (a - b) * factor


@register_layer("EuclideanLoss")
class EuclideanLossLayer(ElementLossLayer):
    """loss = sum of (a - b)^2 / (2 N) (Caffe's `euclidean_loss_layer.cpp`).

    da = (a - b) * loss weight / N, db = -da.
    """

    no_gradient_bottoms = frozenset()

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        a, b = bottom[0].data, self._targets.pull(bottom[1].data)
        factor = 0.5 / max(bottom[0].shape[0], 1)
        self.backend.reduce(squared_difference, (a, b, factor), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        a, b = bottom[0].data, self._targets.target(bottom[1].data)
        factor = self.weight() / max(bottom[0].shape[0], 1)
        if propagate_down[0]:
            self.backend.apply(difference, (a, b, factor), (bottom[0].diff,))
            self.finish(top, bottom[0].diff)
        if propagate_down[1]:
            db = self._target_diffs.target(bottom[1].diff)
            self.backend.apply(difference, (a, b, -factor), (db,))
            self.finish(top, db)
            self._target_diffs.push(bottom[1].diff)
