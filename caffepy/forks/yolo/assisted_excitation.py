"""AssistedExcitation."""

from __future__ import annotations

import math

import numpy as np

from caffepy.backend import Channel, Each, Scalar, expression
from caffepy.data.boxes import Rows
from caffepy.forks.yolo.boxes import YOLO_COLUMNS
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, flatten_pixels, register_layer

_LAST_PART = 0.75
"""Part of the training after which nothing is added."""
_ROUNDING = 0.95
"""Added to right and bottom edges, in positions, before they are truncated."""


@expression
def excited(x: Each, mean: Channel, inside: Channel, factor: Scalar) -> Each:
    return x + factor * mean * inside


@register_layer("AssistedExcitation")
class AssistedExcitationLayer(Layer):
    """y = x + a m inside of objects (`assisted_excitation_layer.cpp` of MobileNet-YOLO; Derakhshani et al. 2019).

    Shapes: x (N, C, H, W), objects (N, 1, T, 5) with rows class, center x, center y, width, height, and m (N, H, W). In
    iteration i of max_iter a = max(cos(pi / 2 i / (0.75 max_iter)), 0); without a solver a is 1, in tests 0. dx = dy; m
    has no gradient. MobileNet-YOLO changes the first image of a batch only.

    Raises:
        ShapeError: the shapes do not match.
    """

    bottoms = (3, 3)
    no_gradient_bottoms = frozenset({1})
    exact_bottoms = frozenset({2})

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        shape = bottom[0].shape
        if len(shape) != 4 or bottom[2].count != shape[0] * shape[2] * shape[3]:
            raise self.shape_error("needs x N C H W and means N H W", bottom[0], bottom[2])
        if not bottom[1].shape or bottom[1].shape[0] != shape[0] or bottom[1].shape[-1] != YOLO_COLUMNS:
            raise self.shape_error("needs objects N 1 T 5", bottom[0], bottom[1])
        top[0].reshape(shape)

    def capture_blocker(self) -> str:
        return "it reads objects on the host"

    def _factor(self) -> float:
        context = self.context
        if context.phase != caffe_pb2.TRAIN:
            return 0.0
        iteration = context.passes.number // context.iter_size
        return (
            max(math.cos(math.pi / 2 * iteration / (_LAST_PART * context.max_iter)), 0.0) if context.max_iter else 1.0
        )

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        images, _, height, width = bottom[0].shape
        labels = self.backend.to_host(bottom[1].data)
        inside = self.scratch("inside", (images * height * width,)).array
        if self.backend.holds_values:
            self.backend.from_host(_insides(labels.reshape(images, -1, YOLO_COLUMNS), height, width).ravel(), inside)
        mean = self.backend.reshaped(bottom[2].data, inside.shape)
        x, y = (flatten_pixels(self.backend, blob.data) for blob in (bottom[0], top[0]))
        self.backend.apply(excited, (x, mean, inside, self._factor()), (y,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)
        if propagate_down[2]:
            self.backend.fill(bottom[2].diff, 0)


def _insides(objects: Rows, height: int, width: int) -> Rows:
    """Return 1 for the positions (N, H, W) inside of an object and 0 for others. A list ends at a width of 0."""
    result = np.zeros((len(objects), height, width), np.float32)
    present = np.logical_and.accumulate(objects[:, :, 3] != 0, axis=1) & np.isfinite(objects).all(2)
    for image, row in zip(*np.nonzero(present), strict=True):
        _, x, y, wide, high = objects[image, row].tolist()
        left, top = (
            min(max(int((place - side / 2) * size), 0), size - 1)
            for place, side, size in ((x, wide, width), (y, high, height))
        )
        right, bottom = (
            int((place + side / 2) * size + _ROUNDING) for place, side, size in ((x, wide, width), (y, high, height))
        )
        result[image, top : max(bottom, top + 1), left : max(right, left + 1)] = 1
    return result
