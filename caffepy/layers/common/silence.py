"""Silence."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Silence")
class SilenceLayer(Layer):
    """Consumes blobs, so that they are not outputs of the net (Caffe's `silence_layer.cpp`). Their gradient is 0."""

    supports_half = True
    inherits_dtype = True

    bottoms = (1, None)
    tops = (0, 0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: there are no tops."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: there are no tops."""

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, needs_gradient in zip(bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.fill(blob.diff, 0)
