"""The base class of elementwise layers (Caffe's `neuron_layer.hpp`)."""

from __future__ import annotations

from caffepy.backend import Array, Expression
from caffepy.layers.core.base import Blobs, Layer
from caffepy.layers.core.buffer import ScratchBuffer


class ActivationLayer(Layer):
    """An elementwise layer. The top has the bottom's shape and may be the bottom (in place).

    Subclasses define `activate` and `differentiate`. In place, a buffer saves the bottom if the gradient needs it.
    """

    supports_half = True
    recordable = True
    keeps_labels = True

    forward_with_bias: Expression | None = None
    """Formula of y from a product and the bias of its channel. InnerProduct applies it as the epilogue of the product;
    None: no fusion."""

    gradient_from_top: Expression | None = None
    """Formula of dx from y and dy, for a layer with `forward_with_bias`."""

    _saved_bottom: ScratchBuffer | None = None

    def reads_bottom(self) -> bool:
        """Whether the gradient is computed from the bottom's data; if not, from the top's."""
        return False

    def activate(self, x: Array, y: Array) -> None:
        """Compute y from x, which may be the same array."""
        raise NotImplementedError

    def differentiate(self, source: Array, dy: Array, dx: Array) -> None:
        """Compute dx from dy, which may be the same array.

        `source` is the bottom's data if `reads_bottom()`, else the top's.
        """
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)
        save = bottom[0] is top[0] and self.reads_bottom()
        self._saved_bottom = self.scratch("saved bottom", bottom[0].shape, self.dtype) if save else None

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
        """Return the data for `differentiate`: the bottom's if `reads_bottom()`, else the top's."""
        if not self.reads_bottom():
            return self.saved_top(top)
        return bottom[0].data if self._saved_bottom is None else self._saved_bottom.array
