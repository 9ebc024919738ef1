"""Warp, FlowWarp and Grid."""

from __future__ import annotations

import math

import numpy as np

from caffepy.backend import Array, Border
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import total
from caffepy.proto import caffe_pb2


class PixelGrid:
    """The array (N, 2, H, W) that holds column and row of each pixel.

    Args:
        layer: whose backend allocates it.
        shape: (N, 2, H, W).
    """

    def __init__(self, layer: Layer, shape: tuple[int, ...]) -> None:
        layer.check_memory(4 * math.prod(shape), "its pixel positions")
        self.shape = shape
        self.array: Array = layer.backend.zeros(shape)
        if layer.backend.holds_values:
            rows, columns = np.meshgrid(np.arange(shape[2]), np.arange(shape[3]), indexing="ij")
            layer.backend.from_host(np.broadcast_to(np.stack([columns, rows]), shape).astype(np.float32), self.array)


class WarpBase(Layer):
    """Samples x (N, C, H, W) by bilinear interpolation at the positions of the second bottom, (N, 2, H', W')."""

    bottoms = (2, 2)
    recordable = True

    _grid: PixelGrid | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def displaced(self) -> bool:
        """Return whether the second bottom holds displacements, else positions."""
        return True

    def border(self) -> Border:
        """Return what the image has outside its pixels."""
        raise NotImplementedError

    def fill(self) -> float:
        """Return the value of pixels from outside the image."""
        return 0.0

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, flow = bottom[0].shape, bottom[1].shape
        if len(x) != 4 or len(flow) != 4 or flow[1] != 2 or flow[0] != x[0] or min(x[2:]) < 1:
            raise self.shape_error("needs an image (N, C, H, W) and positions (N, 2, H', W')", *bottom)
        if self.displaced() and flow[2:] != x[2:]:
            raise self.shape_error("displacements must have the image's height and width", *bottom)
        top[0].reshape((*x[:2], *flow[2:]))
        if self.displaced() and (self._grid is None or self._grid.shape != flow):
            self._grid = PixelGrid(self, flow)
        self._positions = self.scratch("positions", flow)

    def _locate(self, bottom: Blobs) -> Array:
        if not self.displaced():
            return bottom[1].data
        assert self._grid is not None
        self.backend.apply(total, (bottom[1].data, self._grid.array), (self._positions.array,))
        return self._positions.array

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        positions = self._locate(bottom)
        self.backend.sample_forward(bottom[0].data, positions, top[0].data, self.border(), self.fill())

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        positions = self._locate(bottom)
        diffs = [blob.diff if wanted else None for blob, wanted in zip(bottom, propagate_down, strict=True)]
        self.backend.sample_backward(bottom[0].data, positions, top[0].diff, diffs[0], diffs[1], self.border())


@register_layer("Warp")
class WarpLayer(WarpBase):
    """y[n, :, i, j] = x[n, :, i + v, j + u], or x[n, :, v, u], for (u, v) = flow[n, :, i, j].

    Values between pixels are interpolated bilinearly. PWC-Net's flow holds displacements
    (its own `warp_layer.cu`): y is 0 where the position lies outside [0, W - 1] x [0, H - 1], and the derivative
    at whole positions is the mean of both sides'. LiteFlowNet's holds positions (`warp_layer.cpp`): pixels outside x
    are 0. If `warp_param.positions` is missing, a flow that is computed from the top of a Grid layer holds positions.

    Shapes: x (N, C, H, W), flow (N, 2, H', W'), y (N, C, H', W').

    Raises:
        ShapeError: the bottoms have other shapes, or displacements have another height or width than x.
    """

    def displaced(self) -> bool:
        return not self.param.warp_param.positions

    def border(self) -> Border:
        return Border.INSIDE if self.displaced() else Border.ZERO


@register_layer("FlowWarp")
class FlowWarpLayer(WarpBase):
    """y[n, :, i, j] = x[n, :, i + v, j + u] for (u, v) = flow[n, :, i, j] (FlowNet 2's `flow_warp_layer.cpp`).

    Positions outside [0, W) x [0, H) give 0, or NaN with `fill_value` NOT_A_NUMBER. Between the last pixel and the edge
    x has the last pixel's value. Shapes: x (N, C, H, W), flow (N, 2, H, W), y as x.

    Raises:
        ShapeError: the bottoms have other shapes.
    """

    def border(self) -> Border:
        return Border.REPEAT

    def fill(self) -> float:
        nan = self.param.flow_warp_param.fill_value == caffe_pb2.FlowWarpParameter.NOT_A_NUMBER
        return math.nan if nan else 0.0


@register_layer("Grid")
class GridLayer(Layer):
    """y (N, 2, H, W) = column and row of each pixel of x (N, C, H, W) (LiteFlowNet's `grid_layer.cpp`).

    Raises:
        ShapeError: the bottom does not have four axes.
    """

    reads_shapes_only = True
    has_backward = False

    _grid: PixelGrid | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        shape = (shape[0], 2, *shape[2:])
        top[0].reshape(shape)
        if self._grid is None or self._grid.shape != shape:
            self._grid = PixelGrid(self, shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        assert self._grid is not None
        self.backend.copy(self._grid.array, top[0].data)
