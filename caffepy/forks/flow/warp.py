"""Warp, FlowWarp, Grid, Resample and Downsample of FlowNet 2."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Border, Each, Scalar, expression
from caffepy.backend.formulas import total
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, ScratchBuffer, register_layer
from caffepy.layers.spatial_map import SpatialMap


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


Taps = tuple[NDArray[np.int64], NDArray[np.float64]]
"""For each element along an axis of the top the elements of the bottom that it reads, and their weights."""

MAX_TAPS = 2**28
"""The most weights of an axis."""


@expression
def known(x: Each) -> Each:
    return x if x == x else 0.0


@expression
def is_known(x: Each) -> Each:
    return 1.0 if x == x else 0.0


@expression
def mean_of_known(total: Each, present: Each, nan: Scalar) -> Each:
    return nan if 1 - present > 0.5 * present else total / present


@expression
def share_of_known(dy: Each, present: Each) -> Each:
    return 0.0 if 1 - present > 0.5 * present else dy / present


@expression
def where_known(dx: Each, x: Each) -> Each:
    return dx if x == x else 0.0


class ResizingLayer(Layer):
    """Computes each axis of an image as weighted means of elements; the second bottom's data are not read."""

    bottoms = (1, 2)
    exact_bottoms = frozenset({1})
    recordable = True

    _shapes: tuple[tuple[int, ...], tuple[int, int]] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def given_size(self) -> tuple[int, int]:
        """Return height and width of the top without a second bottom."""
        raise NotImplementedError

    def taps(self, size: int, target: int, other_size: int, other_target: int) -> Taps:
        """Return the taps along one axis, given the sizes of bottom and top along it and along the other axis."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if len(shape) != 4 or min(shape[2:]) < 1:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W)", bottom[0])
        if len(bottom) > 1 and len(bottom[1].shape) != 4:
            raise self.shape_error("the second bottom must have four axes, (N, C, H, W)", bottom[1])
        height, width = bottom[1].shape[2:] if len(bottom) > 1 else self.given_size()
        if min(height, width) < 1:
            raise self.error("the top needs a height and a width of at least 1, or a second bottom that has them")
        self.check_memory(4 * math.prod(shape[:2]) * height * width, "its top")
        top[0].reshape((*shape[:2], height, width))
        if (shape, (height, width)) != self._shapes:
            self._make_maps(bottom, height, width)
            self._shapes = (shape, (height, width))
        self._middle = self.scratch("middle", (*shape[:2], shape[2], width))

    def _make_maps(self, bottom: Blobs, height: int, width: int) -> None:
        old_height, old_width = bottom[0].shape[2:]
        for size, target in ((old_height, height), (old_width, width)):
            if size != target and max(size, target) ** 2 > MAX_TAPS:
                raise self.shape_error(f"resizing {size} to {target} pixels needs too many weights", bottom[0])
        columns = self.taps(old_width, width, old_height, height)
        rows = self.taps(old_height, height, old_width, width)
        entries = width * (old_height * columns[0].shape[1] + height * rows[0].shape[1])
        self.check_memory(40 * entries, "the weights of its pixels")
        lines, places = np.arange(old_height), np.arange(width)
        self._along_rows = _make_map(
            self,
            (old_height * width, old_height * old_width),
            lines[:, None, None] * width + places[None, :, None],
            lines[:, None, None] * old_width + columns[0][None],
            np.broadcast_to(columns[1], (old_height, *columns[1].shape)),
        )
        self._along_columns = _make_map(
            self,
            (height * width, old_height * width),
            np.arange(height)[:, None, None] * width + places[None, :, None],
            rows[0][:, None, :] * width + places[None, :, None],
            np.broadcast_to(rows[1][:, None, :], (height, width, rows[1].shape[1])),
        )

    def resize(self, x: Array, y: Array) -> None:
        """Compute the top of an image."""
        self._along_rows.forward(x, self._middle.array)
        self._along_columns.forward(self._middle.array, y)

    def resize_back(self, dy: Array, dx: Array) -> None:
        """Compute the gradient of `resize`."""
        self._along_columns.backward(dy, self._middle.array)
        self._along_rows.backward(self._middle.array, dx)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.resize(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.resize_back(top[0].diff, bottom[0].diff)
        if len(bottom) > 1 and propagate_down[1]:
            self.backend.fill(bottom[1].diff, 0)


def _make_map(layer: Layer, shape: tuple[int, int], rows: Any, columns: Any, weights: Any) -> SpatialMap:
    rows, columns, weights = np.broadcast_arrays(rows, columns, weights)
    used = weights != 0
    return SpatialMap(layer.backend, shape, rows[used], columns[used], weights[used].astype(np.float32))


def _round(values: NDArray[np.float32]) -> NDArray[np.int64]:
    """Round half away from 0, as C's round."""
    rounded: NDArray[np.int64] = (np.sign(values) * np.floor(np.abs(values) + np.float32(0.5))).astype(np.int64)
    return rounded


def _neighbours(positions: NDArray[np.float32], radius: int, size: int) -> tuple[Any, Any, Any]:
    """Return the pixels around each position, their distances, and whether they exist."""
    pixels = _round(positions)[:, None] + np.arange(-radius, radius + 1)
    distances = positions[:, None].astype(np.float64) - pixels
    exists = (pixels >= 0) & (pixels < size)
    return np.clip(pixels, 0, size - 1), distances, exists


def _normalised(pixels: Any, weights: Any) -> Taps:
    totals = weights.sum(axis=1, keepdims=True)
    return pixels, np.divide(weights, totals, out=np.zeros_like(weights), where=totals != 0)


def _triangle(x: Any) -> Any:
    return np.maximum(1 - np.abs(x), 0)


def _cubic(x: Any) -> Any:
    """The cubic convolution kernel with a = -1/2 (Keys 1981)."""
    d = np.abs(x)
    near = d * d * (1.5 * d - 2.5) + 1
    far = d * (d * (-0.5 * d + 2.5) - 4) + 2
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


_Resample = caffe_pb2.ResampleParameter


@register_layer("Resample")
class ResampleLayer(ResizingLayer):
    """Resizes x (N, C, H, W) to `height` x `width`, or to the second bottom's (FlowNet 2's `resample_layer.cu`).

    `type` is NEAREST, LINEAR or CUBIC (a = -1/2). With `antialias` the filter of a smaller image is H / height times as
    high and W / width times as wide. Element j along the rows lies at j * W / width + H / (2 height) - 1/2: as in
    FlowNet 2, the offset of the columns has the factor of the rows and vice versa. Weights are normalised at the edges.

    Raises:
        ConfigError: the size is missing, or the type is AREA.
        ShapeError: a bottom does not have four axes.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        if self.param.resample_param.type == _Resample.AREA:
            raise self.error("resample_param.type AREA is not defined; use NEAREST, LINEAR or CUBIC")

    def given_size(self) -> tuple[int, int]:
        return self.param.resample_param.height, self.param.resample_param.width

    def taps(self, size: int, target: int, other_size: int, other_target: int) -> Taps:
        param, one = self.param.resample_param, np.float32(1)
        factor = np.float32(size) / np.float32(target)
        other_factor = np.float32(other_size) / np.float32(other_target)
        half = np.float32(0.5)
        positions = np.arange(target, dtype=np.float32) * factor + other_factor * half - half
        if param.type == _Resample.NEAREST:
            return np.clip(_round(positions), 0, size - 1)[:, None], np.ones((target, 1))
        kernel, reach = (_cubic, 4) if param.type == _Resample.CUBIC else (_triangle, 2)
        widened = param.antialias and (factor > 1 or other_factor > 1)
        scale = one / (factor if widened else one)
        radius = 2 if factor < 1 else math.ceil(np.float32(reach) / scale)
        pixels, distances, exists = _neighbours(positions, radius, size)
        return _normalised(pixels, np.where(exists, kernel(float(scale) * distances), 0.0))


@register_layer("Downsample")
class DownsampleLayer(ResizingLayer):
    """Resizes x (N, C, H, W) to `top_height` x `top_width`, or to the second bottom's, with missing values.

    Source: FlowNet 2's `downsample_layer.cu`. Corners are aligned. Pixels have the weight max(0, 1 - |distance| /
    scale) along each axis, with the scale (W - 1) / (W' - 1). NaN in x is a missing value: y is the weighted mean of
    the others, or NaN where the missing weight is more than half of the others', or where no pixel has a weight, as
    between the pixels of a smaller x. dx is 0 at missing values.

    Raises:
        ConfigError: the size is missing.
        ShapeError: a bottom does not have four axes, or one side of the top or the bottom has one pixel alone.
    """

    _present: ScratchBuffer

    def given_size(self) -> tuple[int, int]:
        return self.param.downsample_param.top_height, self.param.downsample_param.top_width

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        self._value, self._mask = (self.scratch(name, bottom[0].shape) for name in ("value", "mask"))
        self._total, self._present, self._share = (
            self.scratch(name, top[0].shape) for name in ("total", "present", "share")
        )

    def taps(self, size: int, target: int, other_size: int, other_target: int) -> Taps:
        if size == target:
            return np.arange(size)[:, None], np.ones((size, 1))
        if min(size, target) < 2:
            raise self.shape_error(f"{size} pixels cannot become {target}: both must be at least 2")
        scale = np.float32(size - 1) / np.float32(target - 1)
        positions = np.arange(target, dtype=np.float32) / np.float32(target - 1) * np.float32(size - 1)
        pixels, distances, exists = _neighbours(positions, math.ceil(scale), size)
        # FlowNet's kernel computes in float32, which decides where a weight is 0 at a distance of `scale`.
        weights = _triangle(distances.astype(np.float32) / scale).astype(np.float64)
        return _normalised(pixels, np.where(exists, weights, 0.0))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, x = self.backend, bottom[0].data
        backend.apply(known, (x,), (self._value.array,))
        backend.apply(is_known, (x,), (self._mask.array,))
        self.resize(self._value.array, self._total.array)
        self.resize(self._mask.array, self._present.array)
        backend.apply(mean_of_known, (self._total.array, self._present.array, math.nan), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            share, dx = self._share.array, bottom[0].diff
            self.backend.apply(share_of_known, (top[0].diff, self._present.array), (share,))
            self.resize_back(share, dx)
            self.backend.apply(where_known, (dx, bottom[0].data), (dx,))
        if len(bottom) > 1 and propagate_down[1]:
            self.backend.fill(bottom[1].diff, 0)
