"""Convolutions by 3x3 windows of stride 1, as Winograd computes them: 16 products in the place of 36.

A tile of 2x2 outputs is transformed from 4x4 pixels (`winograd_tiles.py`); each of the 16 elements is a matrix product
of tiles by channels and channels by outputs. A tile's pixels are read from the image without padding. What is
transformed of some tiles stays in the second cache until it is used.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.correlation import extended
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.winograd_kernels import (
    correlate_tiles,
    multiply_tiles,
    transform_filters,
    transform_gradients,
    transform_images,
)
from caffepy.backend.cpu.gemm.packing import Panels
from caffepy.backend.cpu.jit.kernel import ConstantTable, address_of
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.workspace import Workspace, aligned
from caffepy.backend.types import Geometry

BLOCK = 48
"""Tiles, about, that are transformed and multiplied together: a multiple of the rows of every tile of a product."""
COLUMNS = 128
"""Output channels, about, whose products are kept until they are transformed."""
SUM = 128
"""Tiles, about, whose products are added up in registers."""
LEAST_CHANNELS = 32
"""Channels and outputs from which the fewer products make up for the transforms."""
LEAST_TILES = 48
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
    whole = all(size % WIDTH == 0 and size >= LEAST_CHANNELS for size in weights_shape[:2])
    return whole and x_shape[0] * _Tiles(ConvolutionShape(x_shape, weights_shape, geometry).out).count >= LEAST_TILES


class _Tiles:
    """The tiles of an image of outputs."""

    def __init__(self, out: tuple[int, ...]) -> None:
        self.line = -(-out[1] // 2)
        self.count = -(-out[0] // 2) * self.line


class _Correlation:
    """y from x, or dx from dy and the filters turned round, planned.

    Args:
        sizes: (height, width) of what is read.
        out: of what is computed.
        pad: zeros before what is read.
        channels: of what is read.
        outputs: channels of what is computed.
        images: about how many there are.
    """

    def __init__(
        self, sizes: tuple[int, ...], out: tuple[int, ...], pad: tuple[int, ...], channels: int, outputs: int,
        images: int,
    ) -> None:  # fmt: skip
        self.sizes, self.out, self.pad, self.channels, self.outputs = sizes, out, pad, channels, outputs
        self.tiles = _Tiles(out)
        blocks = -(-images * self.tiles.count // BLOCK)
        self.block = -(-images * self.tiles.count // (blocks * 12)) * 12
        self.panels = Panels(channels, outputs, self.block)
        self.plane = self.panels.size + WIDTH  # planes a power of two apart would share few lines of a cache
        self.x_rows = extended(np.arange(self.block) * channels)
        self.zeros = ConstantTable(np.zeros(max(channels, outputs), np.float32))

    @property
    def packed_size(self) -> int:
        return 16 * self.plane

    def pack(self, threads: int, workspace: Workspace, weights: Any, backward: bool, packed: Any) -> None:
        """Transform the filters into the order in which `run` reads them."""
        total = self.panels.count * (self.channels // WIDTH)
        items = min(threads, total)
        size = 9 * WIDTH * WIDTH
        outputs, channels = (self.channels, self.outputs) if backward else (self.outputs, self.channels)
        transform_filters.run(
            threads, items, 1, weights, outputs, channels, int(backward), packed, self.plane, self.panels.table,
            self.panels.count, WIDTH, self.channels, workspace.take("squares", items * size), size, total, items,
        )  # fmt: skip

    @cached_property
    def _y_rows(self) -> dict[int, ConstantTable]:
        return {}

    def _parts(self, threads: int, blocks: int) -> int:
        """Into how many parts the panels are divided: so that products stay in a cache and all threads have work."""
        parts = max(1, round(self.outputs / COLUMNS))
        while parts < self.panels.count and blocks * parts < 3 * threads:
            parts += 1
        return min(parts, self.panels.count)

    def _columns(self, parts: int) -> int:
        """The most columns that a part of the panels has."""
        bounds = [part * self.panels.count // parts for part in range(parts)]
        return int(np.add.reduceat(self.panels.entries[:, 0], bounds).max()) * WIDTH

    def run(
        self, threads: int, workspace: Workspace, x: Any, packed: Any, start: Any, y: Any, addend: Any, relu: bool
    ) -> None:  # fmt: skip
        tiles = x.shape[0] * self.tiles.count
        blocks = -(-tiles // self.block)
        parts = self._parts(threads, blocks)
        columns = self._columns(parts)
        if parts not in self._y_rows:
            self._y_rows[parts] = extended(np.arange(self.block) * columns)
        x_plane, y_plane = self.block * self.channels + WIDTH, self.block * columns + WIDTH
        total = blocks * parts
        items, size = min(threads, total), 16 * (x_plane + y_plane) + self.outputs
        correlate_tiles.run(
            threads, items, 1, x, *self.sizes, self.channels, *self.pad, self.zeros, packed, self.plane,
            self.panels.table, self.panels.count, parts, WIDTH, _NO_OFFSET, workspace.take("images", items * size), size,
            x_plane, self.x_rows, y_plane, columns, self._y_rows[parts], self.zeros if start is None else start, y,
            *self.out, self.outputs, y if addend is None else addend, int(addend is not None), int(relu),
            self.tiles.count, self.tiles.line, tiles, self.block, total, items,
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
        items = min(self._threads, total)
        multiply_tiles.run(
            self._threads, items, 1, x_tiles, x_plane, self._x_vectors, shape.channels, dy_tiles, dy_plane,
            self._dy_vectors * WIDTH, self._rows(tiles), shape.outputs, tiles, -(-tiles // -(-tiles // SUM)), products,
            self._plane, self._c_rows, int(first > 0), self._zeros, _NO_OFFSET, WIDTH, total, items,
        )  # fmt: skip


class WinogradConvolution(TileConvolution):
    """A planned convolution by 3x3 windows of stride 1; arrays lie channels last in memory.

    The error of each pass is stated in tests/unit/backend/cpu/test_winograd.py.
    """

    _gradient: Any

    def _plan_forward(self) -> _Correlation:
        s = self.shape
        return _Correlation(s.sizes, s.out, s.geometry.pad, s.channels, s.outputs, s.images)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        plan, packed = self._winograd, self.kept_for(weights)
        if packed is None:
            packed = self.workspace.take("weights", plan.packed_size)
            plan.pack(self.threads, self.workspace, weights, False, packed)
        plan.run(self.threads, self.workspace, x, packed, bias, y, residual, relu)

    @cached_property
    def _winograd(self) -> _Correlation:
        return self._plan_forward()

    def keep(self, weights: Any) -> None:
        plan = self._winograd
        self.kept = aligned(plan.packed_size) if self.kept is None else self.kept
        plan.pack(self.threads, self.workspace, weights, False, self.kept)
        self._kept_at = address_of(weights)

    @cached_property
    def _turned(self) -> _Correlation:
        s = self.shape
        pad = tuple(2 - pad for pad in s.geometry.pad)
        return _Correlation(s.out, s.sizes, pad, s.outputs, s.channels, s.images)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        plan = self._turned
        packed = self.workspace.take("weights", plan.packed_size)
        plan.pack(self.threads, self.workspace, weights, True, packed)
        plan.run(self.threads, self.workspace, dy, packed, None, dx, None, False)

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        if self._gradient is None:
            self._gradient = _WeightGradient(self.shape, self.threads, self.workspace)
        self._gradient.run(x, dy, dweights, accumulate)
