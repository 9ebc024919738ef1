"""Convolutions by 3x3 windows of stride 1, as Winograd computes them: 16 products in the place of 36.

A tile of 2x2 outputs is transformed from 4x4 pixels (`tiles.py`); each of the 16 elements is a matrix product
of tiles by channels and channels by outputs. A tile's pixels are read from the image without padding. What is
transformed of some tiles stays in the second cache until it is used.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Ending
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.winograd.kernels import (
    correlate_tiles,
    multiply_tiles,
    transform_filters,
    transform_gradients,
    transform_images,
)
from caffepy.backend.cpu.gemm.microkernel import ROWS
from caffepy.backend.cpu.gemm.packing import Panels, extended
from caffepy.backend.cpu.jit.kernel import ConstantTable
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.types import Geometry

ROWS_OF_ALL = math.lcm(*ROWS.values())
"""The rows of every tile of a product divide it."""
BLOCK = 48
"""Tiles, about, that are transformed and multiplied together."""
COLUMNS = 128
"""Output channels, about, whose products are kept until they are transformed."""
SUM = 128
"""Tiles, about, whose products are added up in registers."""
MIN_CHANNELS = 32
"""Channels and outputs from which the fewer products make up for the transforms."""
MIN_TILES = 48
"""Tiles of a batch from which they make up for the larger weights."""
CHUNK = 2**19
"""Elements of transformed images and gradients that are made at a time."""
_NO_OFFSET = ConstantTable(np.zeros(1, np.int64))


def is_winograd(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether a convolution has the windows for it and is large enough."""
    g = geometry
    windows = (g.kernel, g.stride, g.dilation, g.group) == ((3, 3), (1, 1), (1, 1), 1)
    if not windows or any(pad > 2 for pad in g.pad):
        return False
    if any(size % WIDTH or size < MIN_CHANNELS for size in weights_shape[:2]):
        return False
    out = tuple(size + 2 * pad - 2 for size, pad in zip(x_shape[2:], g.pad, strict=True))
    return x_shape[0] * _Tiles(out).count >= MIN_TILES


class _Tiles:
    """The tiles of an image of outputs."""

    def __init__(self, out: tuple[int, ...]) -> None:
        self.line = -(-out[1] // 2)
        self.count = -(-out[0] // 2) * self.line


class _Images(NamedTuple):
    """What is read or computed.

    Args:
        sizes: height and width.
        channels: of a pixel.
    """

    sizes: tuple[int, ...]
    channels: int


class _Correlation:
    """y from x, or dx from dy and the filters turned round, planned.

    Args:
        threads: of the backend.
        workspace: of the backend.
        read: the images that are read.
        made: those that are computed.
        pad: zeros before what is read.
        images: how many.
    """

    def __init__(
        self, threads: int, workspace: Workspace, read: _Images, made: _Images, pad: tuple[int, ...], images: int
    ) -> None:
        self._threads, self._workspace = threads, workspace
        self._read, self._made, self._pad = read, made, pad
        self._image_tiles = _Tiles(made.sizes)
        self._tiles = images * self._image_tiles.count
        self._blocks = -(-self._tiles // BLOCK)
        self._block = -(-self._tiles // (self._blocks * ROWS_OF_ALL)) * ROWS_OF_ALL
        self._panels = Panels(read.channels, made.channels, self._block)
        self._plane = self._panels.size + WIDTH  # planes a power of two apart would share few lines of a cache
        self._parts = self._divided()
        bounds = [part * self._panels.count // self._parts for part in range(self._parts)]
        self._columns = int(np.add.reduceat(self._panels.entries[:, 0], bounds).max()) * WIDTH
        self._x_rows, self._y_rows = (extended(np.arange(self._block) * row) for row in (read.channels, self._columns))
        self._zeros = ConstantTable(np.zeros(max(read.channels, made.channels), np.float32))

    def _divided(self) -> int:
        """Into how many parts the panels are divided: so that products stay in a cache and all threads have work."""
        parts = max(1, round(self._made.channels / COLUMNS))
        if self._threads > 1:
            parts = max(parts, -(-3 * self._threads // self._blocks))
        return min(parts, self._panels.count)

    @property
    def packed_size(self) -> int:
        return 16 * self._plane

    def pack(self, weights: Any, backward: bool, packed: Any) -> None:
        """Transform the filters into the order in which `run` reads them."""
        read, made, panels = self._read.channels, self._made.channels, self._panels
        total = panels.count * (read // WIDTH)
        items, size = min(self._threads, total), 9 * WIDTH * WIDTH
        transform_filters.run(
            self._threads, items, 1, weights, made if backward else read, int(backward), packed, self._plane,
            panels.table, panels.count, WIDTH, read, self._workspace.take("squares", items * size), size, total, items,
        )  # fmt: skip

    def run(self, x: Any, packed: Any, start: Any, y: Any, ending: Ending) -> None:
        """Compute y; `start` is a number for each channel, or None."""
        x_plane, y_plane = (self._block * row + WIDTH for row in (self._read.channels, self._columns))
        total = self._blocks * self._parts
        items, size = min(self._threads, total), 16 * (x_plane + y_plane) + self._made.channels
        correlate_tiles.run(
            self._threads, items, 1, x, *self._read.sizes, self._read.channels, *self._pad, self._zeros, packed,
            self._plane, self._panels.table, self._panels.count, self._parts, WIDTH, _NO_OFFSET,
            self._workspace.take("images", items * size), size, x_plane, self._x_rows, y_plane, self._columns,
            self._y_rows, self._zeros if start is None else start, y, *self._made.sizes, self._made.channels,
            y if ending.addend is None else ending.addend, int(ending.addend is not None), int(ending.relu),
            self._image_tiles.count, self._image_tiles.line, self._tiles, self._block, total, items,
        )  # fmt: skip


def _vectors(channels: int) -> int:
    """Vectors of panels that are all alike."""
    return next(count for count in (2, 3, 1) if channels // WIDTH % count == 0)


class _WeightGradient:
    """The gradient of the weights, planned."""

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        self._tiles = _Tiles(shape.out)
        self._chunk = max(SUM, CHUNK // (16 * (shape.channels + shape.outputs)))
        self._x_vectors, self._dy_vectors = _vectors(shape.channels), _vectors(shape.outputs)
        self._plane = shape.outputs * shape.channels + WIDTH
        self._c_rows = extended(np.arange(8) * shape.channels)
        self._zeros = ConstantTable(np.zeros(max(shape.channels, shape.outputs), np.float32))
        self._dy_rows: dict[int, ConstantTable] = {}

    def run(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        products = self._workspace.take("weights", 16 * self._plane)
        tiles = x.shape[0] * self._tiles.count
        chunks = -(-tiles // self._chunk)
        size = -(-tiles // chunks)
        for first in range(0, tiles, size):
            self._add(x, dy, first, min(size, tiles - first), products)
        channels = self._shape.channels
        transform_gradients.run(
            self._threads, self._shape.outputs, max(1, 4096 // channels), products, self._plane, channels, WIDTH,
            dweights, int(accumulate),
        )  # fmt: skip

    def _rows(self, tiles: int) -> ConstantTable:
        """Where the output channels are in the transformed gradient of so many tiles."""
        if tiles not in self._dy_rows:
            k, wide = np.arange(self._shape.outputs), self._dy_vectors * WIDTH
            self._dy_rows[tiles] = extended(k // wide * tiles * wide + k % wide)
        return self._dy_rows[tiles]

    def _add(self, x: Any, dy: Any, first: int, tiles: int, products: Any) -> None:
        shape = self._shape
        x_plane, dy_plane = tiles * shape.channels + WIDTH, tiles * shape.outputs + WIDTH
        buffer = self._workspace.take("images", 16 * (x_plane + dy_plane))
        x_tiles, dy_tiles = buffer[: 16 * x_plane], buffer[16 * x_plane :]
        transform_images.run(
            self._threads, tiles, 8, first, x, *shape.sizes, shape.channels, *shape.geometry.pad, x_tiles, x_plane,
            self._x_vectors, dy, *shape.out, shape.outputs, dy_tiles, dy_plane, self._dy_vectors, self._zeros,
            self._tiles.count, self._tiles.line, tiles, WIDTH,
        )  # fmt: skip
        total = 16 * (shape.channels // (self._x_vectors * WIDTH))
        items, block = min(self._threads, total), -(-tiles // -(-tiles // SUM))
        multiply_tiles.run(
            self._threads, items, 1, x_tiles, x_plane, self._x_vectors, shape.channels, dy_tiles, dy_plane,
            self._dy_vectors * WIDTH, self._rows(tiles), shape.outputs, tiles, block, products,
            self._plane, self._c_rows, int(first > 0), self._zeros, _NO_OFFSET, WIDTH, total, items,
        )  # fmt: skip


class WinogradConvolution(TileConvolution):
    """A planned convolution by 3x3 windows of stride 1; arrays lie channels last in memory.

    The error of each pass is stated in tests/unit/backend/cpu/test_winograd.py.
    """

    @cached_property
    def _ahead(self) -> _Correlation:
        s = self.shape
        read, made = _Images(s.sizes, s.channels), _Images(s.out, s.outputs)
        return _Correlation(self.threads, self.workspace, read, made, s.geometry.pad, s.images)

    @cached_property
    def _back(self) -> _Correlation:
        s = self.shape
        read, made = _Images(s.out, s.outputs), _Images(s.sizes, s.channels)
        return _Correlation(self.threads, self.workspace, read, made, tuple(2 - p for p in s.geometry.pad), s.images)

    @cached_property
    def _of_weights(self) -> _WeightGradient:
        return _WeightGradient(self.shape, self.threads, self.workspace)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        self._ahead.run(x, self.packed(weights), bias, y, Ending(residual, relu))

    @property
    def packed_size(self) -> int:
        return self._ahead.packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        self._ahead.pack(weights, False, packed)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        packed = self.workspace.take("weights", self._back.packed_size)
        self._back.pack(weights, True, packed)
        self._back.run(dy, packed, None, dx, Ending(None, False))

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        self._of_weights.run(x, dy, dweights, accumulate)
