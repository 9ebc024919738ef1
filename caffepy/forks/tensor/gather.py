"""Gather and Scatter: elements of an axis, or the joining and dividing of a batch among devices."""

from __future__ import annotations

import math

from caffepy.layers.layer import Blobs, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter
from caffepy.layers.tensor import RearrangingLayer, consecutive_parts


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
    """y has the elements of `axis` with these `indices`, in their order (`gather_layer.cpp` of synopsys-caffe).

    `shape` gives the axes that take the axis's place; without it there is one, and a single 0 means none, for a single
    index. dx sums the gradients of an element (the fork has no backward pass).

    Without `gather_param` it is the layer of TSN's Caffe (its `gather_layer.cpp`), which collects the batches of all
    MPI processes. Here each top is its bottom: each device trains on its own part of the batch, and the average of the
    devices' gradients is that of the whole batch.

    Raises:
        ConfigError: there are no indices, shape has another count, or an index is outside the axis.
    """

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._selects = self.param.HasField("gather_param")
        if not self._selects:
            return
        if len(bottom) > 1:
            raise self.error(f"has {len(bottom)} bottoms; with gather_param give it one")
        param = self.param.gather_param
        self._indices = list(param.indices)
        self._axes = [] if list(param.shape) == [0] else list(param.shape) or [len(self._indices)]
        if not self._indices or math.prod(self._axes) != len(self._indices):
            raise self.error(f"gather_param has {len(self._indices)} indices for the shape {self._axes}; give as many")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if not self._selects:
            super().reshape(bottom, top)
            return
        shape = bottom[0].shape
        axis = bottom[0].axis(self.param.gather_param.axis, self.where)
        if max(self._indices) >= shape[axis]:
            raise self.error(f"index {max(self._indices)} is outside axis {axis}, 0 to {shape[axis] - 1}")
        top[0].reshape((*shape[:axis], *self._axes, *shape[axis + 1 :]))
        gathered = (*shape[:axis], len(self._indices), *shape[axis + 1 :])
        if shape != self._shape:
            self._shape = shape
            self._y, self._dy = (LayoutAdapter(self.backend, top[0].shape, gathered, self.dtype) for _ in range(2))
            self._parts = consecutive_parts(self._indices, axis)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self._selects:
            super().forward(bottom, top)
            return
        y = self._y.target(top[0].data)
        for source, destination in self._parts:
            self.backend.copy(bottom[0].data[source], y[destination])
        self._y.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not self._selects:
            super().backward(top, propagate_down, bottom)
            return
        if not propagate_down[0]:
            return
        dy = self._dy.load(top[0].diff)
        self.backend.fill(bottom[0].diff, 0)
        for source, destination in self._parts:
            self.backend.add(dy[destination], bottom[0].diff[source])


@register_layer("Scatter")
class ScatterLayer(PartOfBatchLayer):
    """y = x for each pair of bottom and top (yjxiong's `scatter_layer.cpp`): the inverse of Gather."""
