"""Gather and Scatter of yjxiong's Caffe, which join and divide a batch among devices."""

from __future__ import annotations

from caffepy.layers.common.rearrange import RearrangingLayer
from caffepy.layers.core.base import Blobs, register_layer


class PartOfBatchLayer(RearrangingLayer):
    """A layer whose tops are its bottoms: each device goes on with its own part of the batch."""

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True
    independent_pairs = True

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for source, target in zip(bottom, top, strict=True):
            target.reshape(source.shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        for source, target in zip(bottom, top, strict=True):
            self.backend.copy(source.data, target.data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for source, target, needs_gradient in zip(top, bottom, propagate_down, strict=True):
            if needs_gradient:
                self.backend.copy(source.diff, target.diff)


@register_layer("Gather")
class GatherLayer(PartOfBatchLayer):
    """y = x for each pair of bottom and top (yjxiong's `gather_layer.cpp`).

    That Caffe joins the parts of the batch of all devices here, so that each computes the layers that follow for the
    whole batch. In caffepy each device computes them for its own part; the average of the gradients is the same.
    """


@register_layer("Scatter")
class ScatterLayer(PartOfBatchLayer):
    """y = x for each pair of bottom and top (yjxiong's `scatter_layer.cpp`): the inverse of Gather."""
