"""Im2col: the windows of a convolution, one column each."""

from __future__ import annotations

import math

import numpy as np

from caffepy.backend import Backend, Geometry
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.core.layout_adapter import LayoutAdapter
from caffepy.layers.vision.base_convolution import BaseConvolutionLayer, Shape
from caffepy.layers.vision.spatial_map import SpatialMap


@register_layer("Im2col")
class Im2colLayer(BaseConvolutionLayer):
    """y[n, c * K + k, window] = element k of the window of channel c, 0 in the padding (Caffe's `im2col_layer.cpp`).

    Shapes: x (batch axes…, C, spatial…) with the channels at `axis`, y (batch axes…, C * K, windows…), where K is the
    number of elements of a window. It reads kernel, stride, pad and dilation of `convolution_param` for any number of
    spatial axes, and has no parameters.

    Raises:
        ShapeError: there are no spatial axes after `axis`, or their number changes.
    """

    supports_half = False
    bottoms = (1, 1)  # type: ignore[assignment]
    tops = (1, 1)  # type: ignore[assignment]

    _shape: Shape | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self.axis = bottom[0].axis(self.param.convolution_param.axis, self.where)
        axes = len(bottom[0].shape) - self.axis - 1
        if axes < 1:
            raise self.shape_error(f"there must be spatial axes after axis {self.axis}", bottom[0])
        self._geometry = self._read_geometry(axes)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape, g, axis = bottom[0].shape, self._geometry, self.axis
        if len(shape) != axis + 1 + len(g.kernel):
            raise self.shape_error(f"the bottom must keep its {len(g.kernel)} spatial axes", bottom[0])
        sizes, elements = self._spatial(bottom), math.prod(g.kernel)
        top[0].reshape((*shape[:axis], shape[axis] * elements, *sizes))
        if shape != self._shape:
            self._shape = shape
            x = (math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :]))
            y = (*x[:2], elements * math.prod(sizes))
            self._image, self._image_diff = (LayoutAdapter(self.backend, shape, x) for _ in range(2))
            self._columns, self._column_diffs = (LayoutAdapter(self.backend, top[0].shape, y) for _ in range(2))
            self._map = window_map(self.backend, g, shape[axis + 1 :], sizes)

    def _output_size(self, size: int, axis: int) -> int:
        g = self._geometry
        span = size + 2 * g.pad[axis] - (g.dilation[axis] * (g.kernel[axis] - 1) + 1)
        # Rounded towards 0 as in C++.
        return (span // g.stride[axis] if span >= 0 else -(-span // g.stride[axis])) + 1

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._map.forward(self._image.load(bottom[0].data), self._columns.target(top[0].data))
        self._columns.store(top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._map.backward(self._column_diffs.load(top[0].diff), self._image_diff.target(bottom[0].diff))
            self._image_diff.store(bottom[0].diff)


def window_map(backend: Backend, g: Geometry, image: Shape, windows: Shape) -> SpatialMap:
    """Return the map from the pixels of an image to (element of the window, window)."""
    indices = np.indices((*g.kernel, *windows)).reshape(2 * len(image), -1)
    pixel, inside = np.zeros(indices.shape[1], np.int64), np.ones(indices.shape[1], bool)
    for axis, size in enumerate(image):
        at = indices[axis] * g.dilation[axis] + indices[len(image) + axis] * g.stride[axis] - g.pad[axis]
        inside &= (at >= 0) & (at < size)
        pixel = pixel * size + at
    rows = np.flatnonzero(inside)
    return SpatialMap(backend, (len(pixel), math.prod(image)), rows, pixel[rows])
