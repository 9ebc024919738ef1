"""Softmax."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Softmax")
class SoftmaxLayer(Layer):
    """y = exp(x - max x) / sum of exp(x - max x) along `axis` (Caffe's `softmax_layer.cpp`)."""

    recordable = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self._axis = bottom[0].axis(self.param.softmax_param.axis, self.where)
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.softmax_forward(bottom[0].data, top[0].data, self._axis)
        self.save_top(top)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.softmax_backward(self.saved_top(top), top[0].diff, bottom[0].diff, self._axis)
