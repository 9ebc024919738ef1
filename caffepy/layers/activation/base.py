"""The base class of layers that map each element by itself (Caffe's `neuron_layer.hpp`)."""

from __future__ import annotations

from caffepy.backend import Array, Expression
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.buffer import ScratchBuffer


class ActivationLayer(Layer):
    """A layer whose top has its bottom's shape and may be its bottom (in place).

    Subclasses write `activate` and `differentiate`. Where the gradient needs the bottom and the layer works in place,
    the bottom is kept in a buffer.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    behind_bias: Expression | None = None
    """y of a product and its channel's bias, where a fully connected layer may compute it with them."""

    gradient_of_top: Expression | None = None
    """dx of y and dy, where these are enough and there is `behind_bias`."""

    _saved_bottom: ScratchBuffer | None = None

    def reads_bottom(self) -> bool:
        """Whether the gradient needs the bottom's data; if not, the top's are enough."""
        return False

    def activate(self, x: Array, y: Array) -> None:
        """Compute y from x; they may be one array."""
        raise NotImplementedError

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        """Compute dx from dy, maybe in place; `source` is the bottom's data if `reads_bottom`, else the top's."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)
        keep = bottom[0] is top[0] and self.reads_bottom()
        self._saved_bottom = self.scratch("saved bottom", bottom[0].shape, self.dtype) if keep else None

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if self._saved_bottom is not None and not self.context.forward_only:
            self.backend.copy(bottom[0].data, self._saved_bottom.array)
        self.activate(bottom[0].data, top[0].data)
        if not self.reads_bottom():
            self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.differentiate(self.source(top, bottom), top[0].diff, bottom[0].diff)

    def source(self, top: Blobs, bottom: Blobs) -> Array:
        """What the gradient is computed from: the bottom's data, or the top's if they are enough."""
        if not self.reads_bottom():
            return self.saved_top(top)
        return bottom[0].data if self._saved_bottom is None else self._saved_bottom.array
