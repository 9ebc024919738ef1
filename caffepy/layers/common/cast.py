"""Cast: conversion to another dtype. The net inserts it between layers of different dtypes."""

from __future__ import annotations

from caffepy.layers.core.base import Blobs, Layer, register_layer


@register_layer("Cast")
class CastLayer(Layer):
    """y = x, rounded to the top's dtype. dx = dy, rounded to the bottom's dtype."""

    supports_half = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        top[0].reshape(bottom[0].shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.copy(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)
