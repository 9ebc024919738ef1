"""Silence."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Silence")
class SilenceLayer(Layer):
    """Takes blobs that nobody else reads, so that they do not count as the net's outputs; its gradient is 0."""

    supports_half = True
    inherits_dtype = True

    bottoms = (1, None)
    tops = (0, 0)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """There are no tops to shape."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """There is nothing to compute."""

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)
