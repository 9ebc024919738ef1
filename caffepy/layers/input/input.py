"""Input."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Input")
class InputLayer(Layer):
    """Tops that the caller fills (Caffe's `input_layer.cpp`), with one shape for each top or one for all.

    `transform_param` and `image_data_param` (new_height, new_width) say how `caffepy classify`, `caffepy detect` and
    `caffepy.load` make the first top's values of images: as ImageData does in the TEST phase, without mirroring.

    Raises:
        ConfigError: the number of shapes is neither 0, 1 nor the number of tops.
    """

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
        """Does nothing: `setup` or the caller shapes the tops."""

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        """Does nothing: the caller fills the tops."""
