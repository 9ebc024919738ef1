"""Split."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Split")
class SplitLayer(Layer):
    """Copies one blob to several readers: the tops share its data, and its diff is the sum of their diffs.

    The net inserts this layer where a blob has more than one reader (Caffe's `split_layer.cpp`).
    """

    supports_half = True
    keeps_labels = True
    inherits_dtype = True
    recordable = True

    tops = (1, None)

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in top:
            blob.reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for blob in top:
            if self.tops_overwritten:
                self.backend.copy(bottom[0].data, blob.data)
            else:
                blob.bind(data=bottom[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        dx = bottom[0].diff
        if len(top) == 1:
            self.backend.copy(top[0].diff, dx)
            return
        self.backend.add_n([blob.diff for blob in top], dx)
