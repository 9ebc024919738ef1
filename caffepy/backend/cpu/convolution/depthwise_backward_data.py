"""The data gradient of a strided depthwise convolution; also the forward pass of a transposed one.

A pixel of the image sums the taps of its residue: its position modulo the stride. A separate pass per residue would
write the image in strips. Two algorithms write each row of the image in order:

- `ResidueDgrad` computes the residues of a row one after another, a tile of each, with the weights in registers.
- `ScatterDgrad`: one pixel of the output's gradient reaches a run of pixels in each row of the image. With the
  channels last, a run is `stride` times `channels` contiguous elements, and so are the reordered weights; the pixel
  is repeated as often. Vectors are full for any number of channels.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from caffepy.backend.cpu.convolution.axes import Axis, axis_residues, merged
from caffepy.backend.cpu.convolution.correlation import ConvolutionShape
from caffepy.backend.cpu.convolution.simd_groups import (
    LINE,
    NUMBERS,
    PIXELS,
    TABLE,
    WORD,
    Row,
    SimdGroups,
    SimdGroupsWriter,
    gather,
    generator,
    named_kernel,
    row_taps,
    row_tiles,
    step_of,
    table_of,
)
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Kernel, Words, device_function
from caffepy.backend.cpu.jit.threads import GRAIN, VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, table_at
from caffepy.backend.cpu.memory import Workspace

TAPS = range(2, 33)
"""Taps of a residue's row: a single tap shares no loads, and longer rows make long functions."""
MAX_STRIDE = 4 if WIDTH == 16 else 2
"""Maximum stride; beyond, a row has few pixels of a residue."""
APART = 512
"""Element distance of pixels whose multiples map to few L1 cache sets."""
ZEROS = ConstantTable(np.zeros(2 * WIDTH, np.float32))
"""Read in place of positions outside the image."""


class _TileWriter(SimdGroupsWriter):
    """Emits the sums of a tile of eight or four pixels."""

    def write_tile(self, row: Row, arguments: list[Any]) -> None:
        """See `row_tile`."""
        *first, pixels, relu, low, high, zeros = arguments
        builder, vector = self.builder, self.word(WIDTH)
        inside = builder.and_(
            builder.icmp_signed("<=", low, self.word(0)), builder.icmp_signed(">=", high, self.word(row.span(8)))
        )

        def write(count: int, edges: bool) -> list[Any]:
            fetched = self.word(LINE), self.word(1)
            self.write_row(row, count, True, edges, [*first, vector, vector, relu, low, high, zeros, *fetched])
            return []

        def eight() -> list[Any]:
            return self.choose(inside, lambda: write(8, False), lambda: write(8, True))

        self.choose(builder.icmp_signed("==", pixels, self.word(4)), lambda: write(4, True), eight)


@cache
def row_tile(row: Row) -> Any:
    """As `row_sums` for a whole vector and one channel per group, with eight or four pixels.

    Arguments: as those of `row_sums`, with the pixels in place of the numbers of elements read and written.
    """
    signature = types.void(
        NUMBERS, WORD, TABLE, WORD, TABLE, NUMBERS, NUMBERS, NUMBERS, WORD, WORD, WORD, WORD, WORD, NUMBERS
    )  # fmt: skip

    def typed(  # noqa: PLR0913 -- a kernel
        typing_context: Any, x: Any, step: Any, rows: Any, row_count: Any, columns: Any, weights: Any, start: Any,
        y: Any, y_step: Any, pixels: Any, relu: Any, low: Any, high: Any, zeros: Any,
    ) -> Any:  # fmt: skip
        return signature, generator(
            _TileWriter, SimdGroups(1, 1), lambda writer, arguments: writer.write_tile(row, arguments)
        )

    return intrinsic(typed)


@cache
def residue_kernel(taps: int, gap: int) -> Kernel:
    """Return the kernel of a `ResidueDgrad` whose residues have this many taps in a row, or one less."""
    sums, sums_less = row_tile(Row(taps, 1, gap)), row_tile(Row(max(1, taps - 1), 1, gap))

    def residue_rows(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, row_starts: Words, rows_table: Words, y_rows: Words, rows: Int,
        residues: Words, residue_count: Int, most: Int, columns: Words, tiles: Words, packed: Floats, filters: Int,
        start: Floats, y: Floats, y_image: Int, y_step: Int, vectors: Int, vector: Int, channels: Int, zeros: Floats,
    ) -> None:  # fmt: skip
        """Items are the rows (n, h) of y. `residues` gives for each residue of a row its start in x and in y, its taps
        (0: all, 1: one less, 2: none), its columns and tiles in their tables, and the end of its tiles."""
        for item in range(begin, end):
            n, r = item // rows, item % rows
            own, met = table_at(rows_table, 2 * row_starts[r]), row_starts[r + 1] - row_starts[r]
            target = ahead(y, n * y_image + y_rows[r])
            for tile in range(most):  # tile by tile over the residues, so that the row is written in order
                for residue in range(0, 6 * residue_count, 6):
                    kind, column = residues[residue + 2], table_at(columns, 2 * residues[residue + 3])
                    number, reached = residues[residue + 4] + tile, met if kind < 2 else 0
                    if number >= residues[residue + 5]:
                        continue
                    first, pixels = tiles[4 * number], tiles[4 * number + 1]
                    low, high = tiles[4 * number + 2], tiles[4 * number + 3]
                    a = ahead(x, n * x_image + residues[residue] + first * channels)
                    c = ahead(target, residues[residue + 1] + first * y_step)
                    for v in range(vectors):
                        w, at = ahead(packed, v * filters), min(v * vector, channels - vector)  # overlapping vectors
                        if kind == 0:
                            sums(
                                ahead(a, at), channels, own, reached, column, w, start, ahead(c, at), y_step, pixels, 0,
                                low, high, zeros,
                            )  # fmt: skip
                        else:
                            sums_less(
                                ahead(a, at), channels, own, reached, column, w, start, ahead(c, at), y_step, pixels, 0,
                                low, high, zeros,
                            )  # fmt: skip

    return named_kernel(residue_rows, [taps, gap])


def channel_order(channels: int, taps: int) -> Any:
    """Return for each element (vector, tap, lane) of packed weights its index in a depthwise layer's weights.

    The last vector ends with the last channel, so it overlaps the previous one and needs no mask.
    """
    v, k, lane = np.ix_(range(-(-channels // WIDTH)), range(taps), range(WIDTH))
    return (np.minimum(v * WIDTH, channels - WIDTH) + lane) * taps + k


def _residues(shape: ConvolutionShape) -> list[list[Axis]]:
    return [axis_residues(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]


def suits_residue_dgrad(shape: ConvolutionShape) -> bool:
    """Return whether `ResidueDgrad` computes the data gradient."""
    g = shape.geometry
    depthwise = g.group == shape.channels == shape.outputs and shape.channels >= WIDTH and shape.channels % APART
    if not depthwise or not 1 < g.stride[-1] <= MAX_STRIDE:
        return False
    columns = _residues(shape)[-1]
    return max(len(axis.taps) for axis in columns) in TAPS and min(len(axis.pixels) for axis in columns) >= PIXELS


class ResidueDgrad:
    """The planned data gradient.

    Args:
        shape: of a depthwise convolution.
    """

    def __init__(self, shape: ConvolutionShape) -> None:
        *axes, columns = _residues(shape)
        self._channels, self._kernel = shape.channels, shape.geometry.kernel
        self._sizes = shape.out, shape.sizes
        self._plan_rows([list(parts) for parts in itertools.product(*axes)])
        self._plan_columns(columns)
        self._vectors = -(-shape.channels // WIDTH)
        self._filters = math.prod(self._kernel)
        self._images = math.prod(shape.out) * shape.channels, math.prod(shape.sizes) * shape.channels
        self._work = shape.sizes[-1] * self._vectors * self._filters // max(1, shape.geometry.stride[-1])

    def _plan_rows(self, residues: Sequence[Sequence[Axis]]) -> None:
        """Compute the existing taps and the position of each image row."""
        (source, target), width = self._sizes, self._kernel[-1]
        rows: dict[int, Any] = {}
        for axes in residues:
            at, valid, taps = row_taps(axes, source[:-1], self._kernel[:-1])
            weights = np.broadcast_to(taps * width * WIDTH, valid.shape)
            entries = np.stack([at * source[-1] * self._channels, weights], axis=-1)
            pixels = merged([axis.pixels for axis in axes], target[:-1])
            rows |= {int(pixel): entries[i][valid[i]] for i, pixel in enumerate(pixels)}
        ordered = [rows[pixel] for pixel in sorted(rows)]
        self._rows = len(ordered)
        self._row_starts = table_of(np.cumsum([0, *map(len, ordered)]))
        self._row_taps = table_of(np.concatenate(ordered))
        self._y_rows = table_of(np.array(sorted(rows)) * target[-1] * self._channels)

    def _plan_columns(self, columns: Sequence[Axis]) -> None:
        """Compute each residue's start, taps and tiles in a row; see `residue_rows`."""
        channels, width = self._channels, self._sizes[0][-1]
        self._taps = max(len(axis.taps) for axis in columns)
        self._gap = max(step_of(axis.shifts) for axis in columns)
        residues: list[tuple[int, ...]] = []
        taps: list[tuple[int, int]] = []
        tiles: list[tuple[int, ...]] = []
        for axis in columns:
            own = row_tiles(axis if len(axis.taps) else _without_taps(axis), width)
            kind = self._taps - len(axis.taps) if len(axis.taps) else 2
            starts = int(axis.indices[0]) * channels, int(axis.pixels[0]) * channels
            residues.append((*starts, kind, len(taps), len(tiles), len(tiles) + len(own)))
            pairs = list(zip(axis.shifts * channels, axis.taps * WIDTH, strict=True))
            taps += pairs or [(0, 0)]
            tiles += own
        self._residue_table, self._residue_count = table_of(residues), len(residues)
        # A residue without taps uses the longest one's, with no rows.
        self._columns, self._tiles = table_of(taps + [(0, 0)] * self._taps), table_of(tiles)
        self._most = max(residue[5] - residue[4] for residue in residues)
        self._y_step = step_of(columns[0].pixels) * channels

    @property
    def order(self) -> Any:
        """Index in the weights for each element of packed weights."""
        return channel_order(self._channels, self._filters)

    def run(self, threads: int, images: int, dy: Any, packed: Any, start: Any, dx: Any) -> None:
        """Compute dx; `start` are zeros."""
        residue_kernel(self._taps, self._gap).run(
            threads, images * self._rows, max(1, VECTOR_GRAIN // max(1, self._work)), dy, self._images[0],
            self._row_starts, self._row_taps, self._y_rows, self._rows, self._residue_table, self._residue_count,
            self._most, self._columns, self._tiles, packed, self._filters * WIDTH, start, dx, self._images[1],
            self._y_step, self._vectors, WIDTH, self._channels, ZEROS,
        )  # fmt: skip


def _without_taps(axis: Axis) -> Axis:
    return Axis(axis.pixels, axis.indices, np.zeros(1, np.int64), np.zeros(1, np.int64))


VECTORS_AT_ONCE = 4
"""Vectors processed at a time."""
MIN_RUN = 2 * WIDTH
"""Minimum elements of a run."""


class _RunWriter(SimdGroupsWriter):
    """Emits the sums of a run."""

    def write(self, taps: int, arguments: list[Any]) -> None:
        """See `run_sums`."""
        builder = self.builder
        y, count, x, weights, run, keep = arguments
        keeps, block = builder.icmp_signed("!=", keep, self.word(0)), self.word(VECTORS_AT_ONCE * WIDTH)

        def products(at: Any, vectors: int, mask: Any) -> None:
            addresses = [self.vector_at(y, builder.add(at, self.word(v * WIDTH))) for v in range(vectors)]
            sums = self.choose(keeps, lambda: [self._loaded(a, mask) for a in addresses], lambda: self.zeros(vectors))
            for tap in range(taps):
                source = builder.sub(at, builder.mul(run, self.word(tap)))
                filters = builder.add(at, builder.mul(run, self.word(tap)))
                for v in range(vectors):
                    factor = self._loaded(self.vector_at(x, builder.add(source, self.word(v * WIDTH))), mask)
                    weight = self._loaded(self.vector_at(weights, builder.add(filters, self.word(v * WIDTH))), mask)
                    sums[v] = self.multiply_add(factor, weight, sums[v])
            for address, total in zip(addresses, sums, strict=True):
                if mask is None:
                    builder.store(total, address, align=4)
                else:
                    self.store(total, address, builder.sub(count, at), mask)

        def over_blocks(index: Any, _: Any, nothing: list[Any]) -> list[Any]:
            products(builder.mul(index, block), VECTORS_AT_ONCE, None)
            return nothing

        def over_rest(index: Any, _: Any, nothing: list[Any]) -> list[Any]:
            at = builder.add(done, builder.mul(index, self.word(WIDTH)))
            products(at, 1, self.lanes(builder.sub(count, at)))
            return nothing

        blocks = builder.sdiv(count, block)
        self.loop(blocks, [], [], over_blocks)
        done = builder.mul(blocks, block)
        rest = builder.add(builder.sub(count, done), self.word(WIDTH - 1))
        self.loop(builder.sdiv(rest, self.word(WIDTH)), [], [], over_rest)

    def _loaded(self, address: Any, mask: Any) -> Any:
        return self.builder.load(address, align=4) if mask is None else self.masked_load(address, mask)


@cache
def run_sums(taps: int) -> Any:
    """Return an intrinsic: y[e] = keep * y[e] + the sum over taps of x[e - tap * run] * weights[e + tap * run].

    Arguments: y, number of elements, x, weights, run, keep (0 or 1).
    """
    signature = types.void(NUMBERS, WORD, NUMBERS, NUMBERS, WORD, WORD)

    def typed(typing_context: Any, y: Any, count: Any, x: Any, weights: Any, run: Any, keep: Any) -> Any:
        return signature, generator(
            _RunWriter, SimdGroups(1, 1), lambda writer, arguments: writer.write(taps, arguments)
        )  # fmt: skip

    return intrinsic(typed)


@device_function
def _clear(target: Any, start: Any, count: Any) -> None:
    for i in range(start, start + count):
        target[i] = 0


@device_function
def _repeat(source: Any, at: Any, pixels: Any, channels: Any, many: Any, target: Any, to: Any) -> None:
    """Write each pixel `many` times."""
    for pixel in range(at, at + pixels * channels, channels):
        for _ in range(many):
            for c in range(channels):
                target[to + c] = source[pixel + c]
            to += channels


@cache
def scatter_kernel(taps: int) -> Kernel:
    """Return the kernel of a `ScatterDgrad`."""
    sums = run_sums(taps)

    def scatter(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, dy: Floats, weights: Floats, dx: Floats, repeated: Floats, size: Int, groups: Int,
        items: Int, images: Int, channels: Int, height: Int, width: Int, out_height: Int, out_width: Int, kernel: Int,
        reach: Int, stride: Int, pad: Int, across: Int, left: Int, blocks: Int,
    ) -> None:  # fmt: skip
        """Items are parts of the row groups that the same rows of dy reach, of all images.

        `repeated` holds `reach` rows of dy with each pixel repeated `across` times, preceded by `taps` - 1 zero pixels
        and followed by as many as complete `blocks`.
        """
        run = across * channels
        line = (blocks + taps - 1) * run
        for item in range(begin, end):
            lines, image, newest = ahead(repeated, item * size), -1, 0
            _clear(lines, 0, size)
            for number in range(item * groups * images // items, (item + 1) * groups * images // items):
                n, g = number // groups, number % groups
                if n != image:
                    image, newest = n, g - reach
                for oh in range(max(0, newest + 1), min(out_height, g + 1)):
                    source = (n * out_height + oh) * out_width * channels
                    target = oh % reach * line + (taps - 1) * run
                    _repeat(dy, source, min(out_width, blocks), channels, across, lines, target)
                newest = g
                for h in range(max(0, g * stride - pad), min(height, (g + 1) * stride - pad)):
                    residue, keep = h + pad - g * stride, 0
                    row = (n * height + h) * width * channels
                    for tap in range(reach):
                        oh, k = g - tap, residue + tap * stride
                        if 0 <= oh < out_height and k < kernel:
                            x, w = ahead(lines, oh % reach * line + (taps - 1) * run), ahead(weights, k * taps * run)
                            for i in range(blocks):
                                skip, at = max(0, left - i * across) * channels, (i * across - left) * channels
                                count = min(run, width * channels - at) - skip
                                sums(
                                    ahead(dx, row + at + skip), count, ahead(x, i * run + skip), ahead(w, skip), run,
                                    keep,
                                )  # fmt: skip
                            keep = 1
                    if keep == 0:
                        _clear(dx, row, width * channels)

    return named_kernel(scatter, [taps])


def one_window(shape: ConvolutionShape) -> ConvolutionShape:
    """If the image has a single window, return the shape with a stride beyond it, so that a row is one run."""
    if shape.out != (1, 1):
        return shape
    g = shape.geometry
    stride = tuple(max(k, size + pad) for k, size, pad in zip(g.kernel, shape.sizes, g.pad, strict=True))
    x, weights = (shape.images, shape.channels, *shape.sizes), (shape.outputs, shape.group_channels, *g.kernel)
    wide = ConvolutionShape(x, weights, replace(g, stride=stride))
    return wide if wide.out == shape.out else shape


def suits_scatter_dgrad(shape: ConvolutionShape) -> bool:
    """Return whether `ScatterDgrad` computes the data gradient."""
    g = shape.geometry
    depthwise = g.group == shape.channels == shape.outputs and len(shape.sizes) == 2 and g.dilation == (1, 1)
    return depthwise and g.stride[1] > 1 and g.stride[1] * shape.channels >= MIN_RUN


class ScatterDgrad:
    """The planned data gradient.

    Args:
        shape: of a depthwise convolution over two spatial axes.
        threads: the backend's threads.
        workspace: the backend's workspace.
    """

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        g, (height, width) = shape.geometry, shape.sizes
        self._reach, self._taps = (-(-kernel // stride) for kernel, stride in zip(g.kernel, g.stride, strict=True))
        self._groups = (height - 1 + g.pad[0]) // g.stride[0] + 1
        self._blocks = (width - 1 + g.pad[1]) // g.stride[1] + 1
        c, k, tap, residue = np.ix_(range(shape.channels), range(g.kernel[0]), range(self._taps), range(g.stride[1]))
        column = residue + tap * g.stride[1]
        order = np.where(column < g.kernel[1], (c * g.kernel[0] + k) * g.kernel[1] + column, -1)
        self._order = ConstantTable(np.ascontiguousarray(order.transpose(1, 2, 3, 0), np.int64))

    def run(self, dy: Any, weights: Any, dx: Any) -> None:
        shape, g, images = self._shape, self._shape.geometry, dy.shape[0]
        packed = self._workspace.take("weights", self._order.array.size)
        gather.run(self._threads, self._order.array.size, GRAIN, weights, self._order, packed)
        size = self._reach * (self._blocks + self._taps - 1) * g.stride[1] * shape.channels
        row = shape.sizes[1] * shape.channels
        groups = images * self._groups
        items = max(1, min(self._threads, groups * g.stride[0] * row // GRAIN))
        scatter_kernel(self._taps).run(
            self._threads, items, 1, dy, packed, dx, self._workspace.take("repeated", items * size), size,
            self._groups, items, images, shape.channels, *shape.sizes, *shape.out, g.kernel[0], self._reach,
            g.stride[0], g.pad[0], g.stride[1], g.pad[1], self._blocks,
        )  # fmt: skip
