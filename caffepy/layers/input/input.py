"""Input."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Input")
class InputLayer(Layer):
    """Tops that the caller fills (Caffe's `input_layer.cpp`): one shape for each of them, or one for all."""

    supports_half = True
    recordable = True
    float32_tops_from = 1
    bottoms = (0, 0)
    tops = (1, None)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        shapes = self.param.input_param.shape
        if len(shapes) not in (0, 1, len(top)):
            raise self.error(
                f"input_param.shape must be given once, once for each of the {len(top)} tops, or not at all; "
                f"it is given {len(shapes)} times"
            )
        for i, blob in enumerate(top):
            if shapes:
                blob.reshape(tuple(shapes[i if len(shapes) > 1 else 0].dim))

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        """The tops keep the shapes that they were given."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """There is nothing to compute."""
