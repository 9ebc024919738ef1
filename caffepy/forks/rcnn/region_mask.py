"""MaskPooling and MaskResize, of Multi-task Network Cascades (Dai et al. 2016)."""

from __future__ import annotations

import numpy as np

from caffepy.layers.formulas import identity, product, product_with_channel
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.layout_adapter import LayoutAdapter, flatten_pixels
from caffepy.layers.spatial_map import SpatialMap


@register_layer("MaskPooling")
class MaskPoolingLayer(Layer):
    """y[n, c] = x[n, c] * mask[n, 0] (MNC's `mask_pooling_layer.cu`).

    Shapes: x and y (N, C, H, W), mask (N, 1, H, W). dx = dy * mask, and dmask = sum over the channels of dy * x.

    Raises:
        ShapeError: the bottoms have other shapes.
    """

    bottoms = (2, 2)
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, mask = bottom[0].shape, bottom[1].shape
        if len(x) != 4 or mask != (x[0], 1, *x[2:]):
            raise self.shape_error("needs images N C H W and masks N 1 H W", *bottom)
        top[0].reshape(x)
        pixels = (x[0] * x[2] * x[3],)
        self._masks, self._mask_diffs = (LayoutAdapter(self.backend, mask, pixels) for _ in range(2))
        self._product = self.scratch("product", x)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = (flatten_pixels(self.backend, blob.data) for blob in (bottom[0], top[0]))
        self.backend.apply(product_with_channel, (x, self._masks.load(bottom[1].data)), (y,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = flatten_pixels(self.backend, top[0].diff)
        if propagate_down[1]:
            self.backend.apply(product, (top[0].diff, bottom[0].data), (self._product.array,))
            rows = flatten_pixels(self.backend, self._product.array)
            self.backend.reduce(identity, (rows,), (self._mask_diffs.target(bottom[1].diff),), 0)
            self._mask_diffs.store(bottom[1].diff)
        if propagate_down[0]:
            dx = flatten_pixels(self.backend, bottom[0].diff)
            self.backend.apply(product_with_channel, (dy, self._masks.load(bottom[1].data)), (dx,), 0)


@register_layer("MaskResize")
class MaskResizeLayer(Layer):
    """Bilinear resizing of x (N, C, H, W) to `output_height` x `output_width` (MNC's `mask_resize_layer.cu`).

    y at (i, j) is x at (i H / output_height, j W / output_width), interpolated between the four neighbours. Up to half
    a pixel beyond the last row or column it has their value, further out it is 0. dx adds up dy times these weights.
    (MNC's kernel adds up two rows and columns only, which is less where the top is larger than the bottom.)

    Raises:
        ConfigError: output_height or output_width is 0.
        ShapeError: the bottom does not have four axes, or is empty.
    """

    supports_half = True
    recordable = True

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.mask_resize_param
        if min(param.output_height, param.output_width) < 1:
            raise self.error("mask_resize_param needs output_height and output_width, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.mask_resize_param, bottom[0].shape
        if len(shape) != 4 or min(shape[2:]) < 1:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W), and pixels", bottom[0])
        sizes = (param.output_height, param.output_width)
        top[0].reshape((*shape[:2], *sizes))
        if shape != self._shape:
            self._shape = shape
            (rows, row_weights), (columns, column_weights) = map(_neighbours, shape[2:], sizes)
            pixels = rows[:, None, :, None] * shape[3] + columns[None, :, None, :]
            weights = row_weights[:, None, :, None] * column_weights[None, :, None, :]
            targets = np.broadcast_to(np.arange(sizes[0] * sizes[1]).reshape(*sizes, 1, 1), pixels.shape)
            used = weights != 0
            matrix = (sizes[0] * sizes[1], shape[2] * shape[3])
            self._map = SpatialMap(self.backend, matrix, targets[used], pixels[used], weights[used])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._map.forward(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._map.backward(top[0].diff, bottom[0].diff)


def _neighbours(size: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two neighbours of each target position along one axis, (target, 2), and their weights."""
    places = np.arange(target, dtype=np.float32) * (np.float32(size) / np.float32(target))
    inside = places <= np.float32(size) - np.float32(0.5)
    places = np.minimum(places, np.float32(size - 1))
    first = places.astype(np.int64)
    fraction = places - first.astype(np.float32)
    neighbours = np.stack([first, np.minimum(first + 1, size - 1)], 1)
    return neighbours, np.stack([1 - fraction, fraction], 1) * inside[:, None]


def resize_matrix(size: int, target: int) -> np.ndarray:
    """Return the matrix (target, size) that resizes one axis."""
    matrix = np.zeros((target, size), np.float32)
    neighbours, weights = _neighbours(size, target)
    np.add.at(matrix, (np.arange(target)[:, None], neighbours), weights)
    return matrix
