"""SoftmaxWithLoss."""

from __future__ import annotations

from caffepy.backend import Array
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.labels import Labels
from caffepy.layers.loss.base import LossLayer
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.LossParameter


@register_layer("SoftmaxWithLoss")
class SoftmaxWithLossLayer(LossLayer):
    """loss = sum of -log softmax(x)[label] / divisor (Caffe's `softmax_loss_layer.cpp`).

    Shapes: x (N, C, ...) with classes along `softmax_param.axis`, a label for each position. The divisor is the number
    of labels not ignored (VALID, the default), of all (FULL), of samples (BATCH_SIZE), or 1 (NONE). A second top gets
    the probabilities. dx = (softmax(x) - onehot(label)) * loss weight / divisor.
    """

    tops = (1, 2)
    no_gradient_tops = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.loss_param.label_smoothing:
            raise self.error("label_smoothing is not there yet; leave it out")
        self._labels = Labels(self)
        self._totals = self.backend.zeros((2,))
        self._sum, self._count = (self.backend.view(self._totals[i : i + 1], ()) for i in range(2))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._axis = bottom[0].axis(self.param.softmax_param.axis, f"layer '{self.name}' ({self.type})")
        self._labels.reshape(bottom[0], bottom[1], self._axis)
        self._divisor = self.divisor(_Parameter.VALID, self._labels.size, self._labels.outer)
        if len(top) > 1:
            top[1].reshape(bottom[0].shape)

    def _probabilities(self, bottom: Blobs, top: Blobs) -> Array:
        """Where they are kept for the backward pass."""
        if len(top) > 1 and not self.tops_overwritten:
            return top[1].data
        return self.scratch("probabilities", bottom[0].shape).array

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

    def raise_device_errors(self) -> None:
        self._labels.raise_device_errors()
