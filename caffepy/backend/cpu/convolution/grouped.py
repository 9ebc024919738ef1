"""Convolution on the CPU with small groups (depthwise: one channel): a vector holds several groups.

There is little to multiply as a matrix: each element is read once per filter element, mostly from the L1 cache, so
depthwise convolutions are bound by memory.

The weight gradient has a separate algorithm (`PlanesPass`) for many channels and small images. The pixels of a channel
vector are then far apart, often by a power of two, which maps them to few L1 cache sets. Therefore one image's pixels
are packed into a zero-padded panel, and all sums stay in registers during a pass over it.

The data gradient of a strided depthwise convolution is also the forward pass of a transposed one. A pixel of the image
sums the taps of its residue: its position modulo the stride. A separate pass per residue would write the image in
strips. Two algorithms write each row of the image in order:

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

from caffepy.backend.cpu.convolution.correlation import AxisTaps, ConvolutionShape, axis_residues, forward_axis, merged
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.simd_groups import (
    LINE,
    PIXELS,
    Row,
    SimdGroups,
    SimdGroupsWriter,
    add_blocks,
    fold_kernel,
    gather,
    named_kernel,
    new_rows,
    next_rows,
    pixel_kernel,
    repeat_channels,
    row_kernel,
    row_of,
    row_tables,
    row_tap_kernel,
    row_taps,
    row_tiles,
    step_of,
    table_of,
    tap_kernel,
    tile_height,
    tiles,
)
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Kernel, Words, device_function, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN, VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, emitted, table_at
from caffepy.backend.cpu.memory import Workspace
from caffepy.backend.types import Geometry

# -- the data gradient of a strided depthwise convolution ----------------------------------------------

WINDOW_TAPS = range(2, 33)
"""Taps of a residue's row: a single tap shares no loads, and longer rows make long functions."""
MAX_STRIDE = 4 if WIDTH == 16 else 2
"""Maximum stride; beyond, a row has few pixels of a residue."""
APART = 512
"""Element distance of pixels whose multiples map to few L1 cache sets."""
ZEROS = ConstantTable(np.zeros(2 * WIDTH, np.float32))
"""Read in place of positions outside the image."""


class _TileWriter(SimdGroupsWriter):
    """Emits the sums of a tile of eight or four pixels."""

    def write_tile(self, row: Row, arguments: Sequence[Any]) -> None:
        """See `row_tile`."""
        *first, pixels, relu, low, high, zeros = arguments
        builder, vector = self.builder, self.word(WIDTH)
        inside = builder.and_(
            builder.icmp_signed("<=", low, self.word(0)), builder.icmp_signed(">=", high, self.word(row.span(8)))
        )

        def write(count: int, edges: bool) -> list[Any]:
            # The next cache line of the newest row only: the rows above it were read for the line before.
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

    def write(builder: Any, *arguments: Any) -> None:
        _TileWriter(builder, SimdGroups(1, 1)).write_tile(row, arguments)

    return emitted("pwtwtpppwwwwwp", write)


@cache
def residue_kernel(taps: int, gap: int) -> Kernel:
    """Return the kernel of a `ResidueDgrad` whose residues have this many taps in a row, or one less."""
    sums, sums_less = row_tile(Row(taps, 1, gap)), row_tile(Row(max(1, taps - 1), 1, gap))

    def residue_rows(
        begin: Int,
        end: Int,
        x: Floats,
        x_image: Int,
        row_starts: Words,
        rows_table: Words,
        y_rows: Words,
        rows: Int,
        residues: Words,
        residue_count: Int,
        most: Int,
        columns: Words,
        tiles: Words,
        packed: Floats,
        filters: Int,
        start: Floats,
        y: Floats,
        y_image: Int,
        y_step: Int,
        vectors: Int,
        vector: Int,
        channels: Int,
        zeros: Floats,
    ) -> None:
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
                        operands = (
                            ahead(a, at),
                            channels,
                            own,
                            reached,
                            column,
                            w,
                            start,
                            ahead(c, at),
                            y_step,
                            pixels,
                            0,
                            low,
                            high,
                            zeros,
                        )
                        if kind == 0:
                            sums(*operands)
                        else:
                            sums_less(*operands)

    return named_kernel(residue_rows, [taps, gap])


def channel_order(channels: int, taps: int) -> Any:
    """Return for each element (vector, tap, lane) of packed weights its index in a depthwise layer's weights.

    The last vector ends with the last channel, so it overlaps the previous one and needs no mask.
    """
    v, k, lane = np.ix_(range(-(-channels // WIDTH)), range(taps), range(WIDTH))
    return (np.minimum(v * WIDTH, channels - WIDTH) + lane) * taps + k


def _residues(shape: ConvolutionShape) -> list[list[AxisTaps]]:
    return [axis_residues(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]


def suits_residue_dgrad(shape: ConvolutionShape) -> bool:
    """Return whether `ResidueDgrad` computes the data gradient."""
    g = shape.geometry
    depthwise = g.group == shape.channels == shape.outputs and shape.channels >= WIDTH and shape.channels % APART
    if not depthwise or not 1 < g.stride[-1] <= MAX_STRIDE:
        return False
    columns = _residues(shape)[-1]
    return (
        max(len(axis.taps) for axis in columns) in WINDOW_TAPS and min(len(axis.pixels) for axis in columns) >= PIXELS
    )


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

    def _plan_rows(self, residues: Sequence[Sequence[AxisTaps]]) -> None:
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

    def _plan_columns(self, columns: Sequence[AxisTaps]) -> None:
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
            threads,
            images * self._rows,
            max(1, VECTOR_GRAIN // max(1, self._work)),
            dy,
            self._images[0],
            self._row_starts,
            self._row_taps,
            self._y_rows,
            self._rows,
            self._residue_table,
            self._residue_count,
            self._most,
            self._columns,
            self._tiles,
            packed,
            self._filters * WIDTH,
            start,
            dx,
            self._images[1],
            self._y_step,
            self._vectors,
            WIDTH,
            self._channels,
            ZEROS,
        )


def _without_taps(axis: AxisTaps) -> AxisTaps:
    return AxisTaps(axis.pixels, axis.indices, np.zeros(1, np.int64), np.zeros(1, np.int64))


VECTORS_AT_ONCE = 4
"""Vectors processed at a time."""
MIN_RUN = 2 * WIDTH
"""Minimum elements of a run."""


class _RunWriter(SimdGroupsWriter):
    """Emits the sums of a run."""

    def write(self, taps: int, arguments: Sequence[Any]) -> None:
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

    def write(builder: Any, *arguments: Any) -> None:
        _RunWriter(builder, SimdGroups(1, 1)).write(taps, arguments)

    return emitted("pwppww", write)


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

    def scatter(
        begin: Int,
        end: Int,
        dy: Floats,
        weights: Floats,
        dx: Floats,
        repeated: Floats,
        size: Int,
        groups: Int,
        items: Int,
        images: Int,
        channels: Int,
        height: Int,
        width: Int,
        out_height: Int,
        out_width: Int,
        kernel: Int,
        reach: Int,
        stride: Int,
        pad: Int,
        across: Int,
        left: Int,
        blocks: Int,
    ) -> None:
        """Items are parts of the row groups that the same rows of dy reach, of all images."""
        # `repeated` holds `reach` rows of dy with each pixel repeated `across` times, preceded by `taps` - 1 zero
        # pixels and followed by as many as complete `blocks`.
        run = across * channels
        line = (blocks + taps - 1) * run
        for item in range(begin, end):
            lines, image, newest = ahead(repeated, item * size), -1, 0
            # Once for an item: the zero pixels at both ends of a line are never written, and so serve all rows.
            _clear(lines, 0, size)
            for number in range(item * groups * images // items, (item + 1) * groups * images // items):
                n, g = number // groups, number % groups
                if n != image:
                    # A new image needs all rows of the ring; behind that, each group of rows needs one new row.
                    image, newest = n, g - reach
                for oh in range(max(0, newest + 1), min(out_height, g + 1)):
                    source = (n * out_height + oh) * out_width * channels
                    # A ring: row oh takes the place of row oh - reach, which no later group of rows reads.
                    target = oh % reach * line + (taps - 1) * run
                    _repeat(dy, source, min(out_width, blocks), channels, across, lines, target)
                newest = g
                for h in range(max(0, g * stride - pad), min(height, (g + 1) * stride - pad)):
                    # The first tap that reaches the row writes it, and the others add: dx need not be cleared, except
                    # for rows that no tap reaches.
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
                                    ahead(dx, row + at + skip),
                                    count,
                                    ahead(x, i * run + skip),
                                    ahead(w, skip),
                                    run,
                                    keep,
                                )
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
        # One item a thread, because each item fills its own ring of repeated rows.
        items = max(1, min(self._threads, groups * g.stride[0] * row // GRAIN))
        scatter_kernel(self._taps).run(
            self._threads,
            items,
            1,
            dy,
            packed,
            dx,
            self._workspace.take("repeated", items * size),
            size,
            self._groups,
            items,
            images,
            shape.channels,
            *shape.sizes,
            *shape.out,
            g.kernel[0],
            self._reach,
            g.stride[0],
            g.pad[0],
            g.stride[1],
            g.pad[1],
            self._blocks,
        )


# -- the weight gradient of many channels and small images ---------------------------------------------

SUMS = 20 if WIDTH == 16 else 9
"""Sums over taps that stay in registers beside their operands."""
PLANE = 12 * 1024
"""Maximum elements of x and dy of one channel vector for packing."""
BATCH = 2**21
"""Maximum elements of x and dy; beyond, reading line by line is faster, because the prefetcher follows it."""
MIN_CHANNELS = 8 * WIDTH
"""Minimum channels; with fewer, pixels are not far apart."""
BATCH_PARTS = 8
"""Batch parts with separate gradient sums; fixed, so that the summation order does not depend on threads."""


class _PlaneWriter(SimdGroupsWriter):
    """Emits the packing of pixels and the sums over a plane."""

    def write_copy(self, arguments: Sequence[Any]) -> None:
        """See `copy_pixels`."""
        x, step, count, target, inputs = arguments
        masks = self.masks(inputs, whole=False)

        def pixel(w: Any, _: Any, nothing: list[Any]) -> list[Any]:
            source = self.shifted(x, self.builder.mul(w, step))
            self.prefetch(source, WIDTH)  # of the next channel vector, which is read soon
            factor = self.factors(source, masks)[0]
            address = self.vector_at(target, self.builder.mul(w, self.word(WIDTH)))
            self.builder.store(factor, address, align=4)
            return nothing

        self.loop(count, [], [], pixel)

    def write_sums(self, row: Row, rows: int, pixels: int, arguments: Sequence[Any]) -> None:
        """See `plane_sums`."""
        x, x_line, gap, dy, dy_line, lines, blocks, totals = arguments
        builder, meets = self.builder, row.columns(pixels)

        def over_blocks(line: Any, slope: Any, block: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(block, self.word(pixels * WIDTH))
            own, source = self.shifted(slope, at), self.shifted(line, builder.mul(at, self.word(row.step)))
            slopes = [builder.load(self.vector_at(own, self.word(p * WIDTH)), align=4) for p in range(pixels)]
            sums = list(sums)
            for r in range(rows):
                begin = self.shifted(source, builder.mul(gap, self.word(r)))
                for column, pairs in meets.items():
                    factor = builder.load(self.vector_at(begin, self.word(column * WIDTH)), align=4)
                    for pixel, tap in pairs:
                        number = r * row.taps + tap
                        sums[number] = self.multiply_add(factor, slopes[pixel], sums[number])
            return sums

        def over_lines(h: Any, _: Any, sums: list[Any]) -> list[Any]:
            line, slope = self.shifted(x, builder.mul(h, x_line)), self.shifted(dy, builder.mul(h, dy_line))
            return self.loop(blocks, sums, [], lambda block, _, inner: over_blocks(line, slope, block, inner))

        for number, total in enumerate(self.loop(lines, self.zeros(rows * row.taps), [], over_lines)):
            address = self.vector_at(totals, self.word(number * WIDTH))
            builder.store(builder.fadd(builder.load(address, align=4), total), address, align=4)


@cache
def copy_pixels(lanes: SimdGroups) -> Any:
    """Return an intrinsic that packs the lanes' factors of some pixels, one vector after another.

    Arguments: the first pixel and the elements between pixels; the number of pixels; the target; elements of a pixel.
    """
    return emitted("pwwpw", lambda builder, *arguments: _PlaneWriter(builder, lanes).write_copy(arguments))


@cache
def plane_sums(row: Row, rows: int, pixels: int) -> Any:
    """Return an intrinsic: for all taps of a kernel of `rows` rows, totals += the sum over a plane of x * dy.

    Arguments: x, the elements between the windows of two lines and between two rows of a window; dy and the elements of
    its line; lines, blocks of `pixels` of each; totals.
    """

    def write(builder: Any, *arguments: Any) -> None:
        _PlaneWriter(builder, SimdGroups(1, 1)).write_sums(row, rows, pixels, arguments)

    return emitted("pwwpwwwp", write)


@cache
def plane_kernel(lanes: SimdGroups, row: Row, rows: int, pixels: int) -> Kernel:
    """Return the kernel of a `PlanesPass`."""
    copy_x, copy_dy, sums = copy_pixels(lanes), copy_pixels(SimdGroups(1, 1)), plane_sums(row, rows, pixels)

    def grouped_planes(
        begin: Int,
        end: Int,
        x: Floats,
        dy: Floats,
        totals: Floats,
        images: Int,
        block: Int,
        parts: Int,
        vectors: Int,
        filters: Int,
        sources: Int,
        used: Int,
        inputs: Int,
        outputs: Int,
        height: Int,
        width: Int,
        out_height: Int,
        out_width: Int,
        top: Int,
        left: Int,
        stride: Int,
        dilation: Int,
        columns: Int,
        blocks: Int,
        panels: Floats,
        x_size: Int,
        dy_size: Int,
        vector: Int,
    ) -> None:
        """Items are (block of images, part of the vectors). `columns` and `blocks` are those of a panel's line."""
        slopes = dy_size // out_height
        for item in range(begin, end):
            number, part = item // parts, item % parts
            first, stop = part * vectors // parts, (part + 1) * vectors // parts
            size = vectors * filters
            for i in range(number * size + first * filters, number * size + stop * filters):
                totals[i] = 0
            panel = ahead(panels, item * (x_size + dy_size))
            # The copies fill the inside of the panel; the zeros around it serve all images and vectors.
            for i in range(x_size + dy_size):
                panel[i] = 0
            slope = ahead(panel, x_size)
            for n in range(number * block, min(images, (number + 1) * block)):
                for v in range(first, stop):
                    read, made = min(sources, inputs - v * sources), min(used, outputs - v * used)
                    for h in range(height):
                        copy_x(
                            ahead(x, (n * height + h) * width * inputs + v * sources),
                            inputs,
                            width,
                            ahead(panel, ((h + top) * columns + left) * vector),
                            read,
                        )
                    for h in range(out_height):
                        copy_dy(
                            ahead(dy, (n * out_height + h) * out_width * outputs + v * used),
                            outputs,
                            out_width,
                            ahead(slope, h * slopes),
                            made,
                        )
                    sums(
                        panel,
                        stride * columns * vector,
                        dilation * columns * vector,
                        slope,
                        slopes,
                        out_height,
                        blocks,
                        ahead(totals, number * size + v * filters),
                    )

    return named_kernel(grouped_planes, [lanes.made, lanes.read, row.taps, row.step, row.gap, rows, pixels])


class PlanesPass:
    """The planned sums over each block of a batch.

    Args:
        lanes: distribution of groups over vectors in the forward pass.
        shape: of the convolution, over two spatial axes.
        row: the taps of a kernel row.
    """

    def __init__(self, lanes: SimdGroups, shape: ConvolutionShape, row: Row) -> None:
        self._lanes, self._shape, self._row = lanes, shape, row
        self._vectors = -(-shape.geometry.group // lanes.groups)
        # Seven where lines are multiples of seven, as ResNet's and MobileNet's are: no pixel of a block is idle.
        self._pixels = 7 if shape.out[-1] % 7 == 0 and WIDTH == 16 else 4
        self._blocks = -(-shape.out[-1] // self._pixels)
        (kernel, _), (stride, _), (dilation, _) = shape.geometry.kernel, shape.geometry.stride, shape.geometry.dilation
        reached = (shape.out[0] - 1) * stride + (kernel - 1) * dilation + 1
        self._rows = max(reached, shape.sizes[0] + shape.geometry.pad[0])
        self._columns = max(row.span(self._blocks * self._pixels), shape.sizes[1] + shape.geometry.pad[1])

    @property
    def _sizes(self) -> tuple[int, int]:
        """Elements of the panels of x and of dy."""
        return self._rows * self._columns * WIDTH, self._shape.out[0] * self._blocks * self._pixels * WIDTH

    @property
    def pays(self) -> bool:
        """Return whether panels are small enough, pixels far enough apart, and the batch fits the caches."""
        shape = self._shape
        taps = shape.geometry.kernel[0] * self._row.taps
        elements = shape.images * (math.prod(shape.sizes) * shape.channels + math.prod(shape.out) * shape.outputs)
        return (
            taps <= SUMS
            and sum(self._sizes) <= PLANE
            and min(shape.channels, shape.outputs) >= MIN_CHANNELS
            and elements <= BATCH
        )

    def blocks(self, images: int) -> int:
        """Return the batch parts with separate sums."""
        return -(-images // -(-images // BATCH_PARTS))

    def run(self, threads: int, x: Any, dy: Any, totals: Any, workspace: Workspace) -> None:
        """Write the sums of each block in packed weight order."""
        shape, g, lanes, images = self._shape, self._shape.geometry, self._lanes, x.shape[0]
        blocks = self.blocks(images)
        parts = min(self._vectors, -(-4 * threads // blocks)) if threads > 1 else 1
        panels = workspace.take("panels", blocks * parts * sum(self._sizes))
        taps = g.kernel[0] * self._row.taps
        work = images * shape.out[0] * shape.out[1] * self._vectors * taps
        plane_kernel(lanes, self._row, g.kernel[0], self._pixels).run(
            threads,
            blocks * parts,
            max(1, VECTOR_GRAIN * blocks * parts // max(1, work)),
            x,
            dy,
            totals,
            images,
            -(-images // BATCH_PARTS),
            parts,
            self._vectors,
            taps * WIDTH,
            lanes.sources,
            lanes.used,
            shape.channels,
            shape.outputs,
            *shape.sizes,
            *shape.out,
            *g.pad,
            g.stride[0],
            g.dilation[0],
            self._columns,
            self._blocks,
            panels,
            *self._sizes,
            WIDTH,
        )


# -- the planned convolution ---------------------------------------------------------------------------

BLOCKS = 8
"""Output parts with separate gradient sums; fixed, so that the summation order does not depend on threads."""
MAX_READ = 8
"""Maximum input channels of a group; each has its own instruction."""

FACTORS = 24 if WIDTH == 16 else 6
"""Vectors of a row of taps that stay in registers beside the sums of eight pixels."""
TAPS = 32
"""Maximum taps of a depthwise row that share loads: spilled taps cost no more than reloading them per pixel, and edge
pixels are also computed eight at a time."""
CACHED = 128 * 1024
"""Gradient elements per thread that all residues process before the next part."""
REPEATED = 256 * 1024
"""Elements of images with repeated channels, so that they are still cached when read."""
LARGE = 2**18
"""Minimum image elements for which, with vectors of 16, groups with stride 2 are faster read pixel by pixel."""
DEPTH = 64 // WIDTH
"""Prefetch distance in vectors, within a tile or to the next one."""


def _fits(lanes: SimdGroups) -> bool:
    return lanes.groups >= 2 and lanes.read <= MAX_READ


def _lanes(weights_shape: tuple[int, ...], group: int) -> tuple[SimdGroups, SimdGroups]:
    """Return the groups' distribution over vectors: forward (and weight gradient), and data gradient."""
    made, read = weights_shape[0] // group, weights_shape[1]
    return SimdGroups(made, read), SimdGroups(read, made)


def is_grouped(weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Return whether several groups fit a vector in at least one direction, or the data gradient is folded."""
    lanes = _lanes(weights_shape, geometry.group)
    return geometry.group > 1 and (any(map(_fits, lanes)) or _folds(lanes[1]))


def _folds(lanes: SimdGroups) -> bool:
    """Return whether the data gradient is computed per output and then summed, to avoid idle lanes."""
    return lanes.made == 1 and lanes.used < WIDTH


class _Pass:
    """Results at the pixels of some axes, each a sum over taps: the forward pass, or a residue of the data gradient.

    Args:
        lanes: distribution of groups over vectors.
        groups: number of groups.
        axes: results and sources along each spatial axis.
        sizes: sizes of the source's and of the result's spatial axes.
        kernel: sizes of the whole kernel.
    """

    def __init__(
        self,
        lanes: SimdGroups,
        groups: int,
        axes: Sequence[AxisTaps],
        sizes: tuple[tuple[int, ...], tuple[int, ...]],
        kernel: tuple[int, ...],
    ) -> None:
        (source, target), self._lanes, column = sizes, lanes, axes[-1]
        self._inputs, self._outputs = groups * lanes.read, groups * lanes.made
        self._vectors = -(-groups // lanes.groups)
        tap = lanes.read * WIDTH
        self._filters = math.prod(kernel) * tap
        self._row_starts, self._row_taps = row_tables(axes[:-1], source, kernel, self._inputs, tap)
        self._next_rows, self._fetched = next_rows(self._row_starts, self._row_taps), new_rows(axes)
        self._column_taps = table_of(np.stack([column.shifts * self._inputs, column.taps * tap], axis=-1))
        plain = lanes.read == 1 or WIDTH < 16 or math.prod(source) * self._inputs <= LARGE
        row = row_of(column, 0.75 if plain else 0.6)
        most = TAPS if lanes.read == 1 else FACTORS // lanes.read
        self._row = row if row is not None and row.taps <= most else None
        self._high = tile_height(len(column.indices))
        size = source[-1]
        self._tiles = tiles(column, size) if self._row is None else row_tiles(column, size, self._high)
        self._tile_table = table_of(self._tiles)
        self._steps = [step_of(column.indices), step_of(column.pixels)]
        self._from = int(column.indices[0]) * self._inputs
        rows = merged([axis.pixels for axis in axes[:-1]], target[:-1])
        self._y_rows = table_of((rows * target[-1] + column.pixels[0]) * self._outputs)
        self._rows = len(rows)
        self._images = math.prod(source) * self._inputs, math.prod(target) * self._outputs
        row_taps = math.prod(len(axis.taps) for axis in axes[:-1])
        self._work = len(column.pixels) * self._vectors * len(column.taps) * max(1, row_taps) * lanes.read

    def run(self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any, relu: bool = False) -> None:
        """Compute y of some images, optionally rectified."""
        lines = images * self._rows
        # Rows are divided among threads only if there are fewer than four rows for each.
        parts = min(len(self._tiles), -(-4 * threads // max(1, lines)))
        kernel, more = (
            (pixel_kernel(self._lanes), ())
            if self._row is None
            else (
                row_kernel(self._lanes, self._row, self._high),
                (ZEROS, self._next_rows, min(self._vectors, DEPTH), self._fetched),
            )
        )
        kernel.run(
            threads,
            lines * parts,
            max(1, VECTOR_GRAIN * parts // max(1, self._work)),
            x,
            self._images[0],
            self._from,
            self._steps[0] * self._inputs,
            self._row_starts,
            self._row_taps,
            self._column_taps,
            self._tile_table,
            len(self._tiles),
            parts,
            packed,
            self._filters,
            start,
            y,
            self._images[1],
            self._y_rows,
            self._steps[1] * self._outputs,
            self._rows,
            self._vectors,
            self._lanes.sources,
            self._lanes.used,
            self._inputs,
            self._outputs,
            int(relu),
            *more,
        )


class _WeightsPass:
    """The weight gradient.

    Args:
        lanes: distribution of groups over vectors in the forward pass.
        shape: of the convolution.
        axes: axes of the forward pass.
    """

    def __init__(self, lanes: SimdGroups, shape: ConvolutionShape, axes: Sequence[AxisTaps]) -> None:
        self._lanes, self._shape, column = lanes, shape, axes[-1]
        kernel, source, inputs = shape.geometry.kernel, shape.sizes, shape.channels
        self._vectors = -(-shape.geometry.group // lanes.groups)
        tap = lanes.read * WIDTH
        self._filters = math.prod(kernel) * tap
        self._starts, self._taps = row_tables(axes[:-1], source, kernel, inputs, tap)
        self._next_rows, self._fetched = next_rows(self._starts, self._taps), new_rows(axes)
        reached = column.indices[None, :] + column.shifts[:, None]
        begins = (reached < 0).sum(axis=1)
        ends = np.maximum(begins, (reached < source[-1]).sum(axis=1))
        self._columns = table_of(np.stack([begins, ends, column.shifts * inputs, column.taps * tap], axis=-1))
        self._from = int(column.indices[0]) * inputs
        at = int(column.indices[0] + column.shifts[0])
        self._bounds = -at, source[-1] - at
        row = row_of(column, 0.8) if lanes.read == 1 else None
        self._row = row if row is not None and row.taps <= SUMS else None
        planes = PlanesPass(lanes, shape, row) if row is not None and len(source) == 2 else None
        self._planes = planes if planes is not None and planes.pays else None
        order = _forward_order(lanes, shape).reshape(-1)
        # Idle lanes have the index -1 and are sorted to the front; the rest are the weights in order.
        self._positions = table_of(np.argsort(order, kind="stable")[-shape.weights :])

    def run(self, threads: int, x: Any, dy: Any, dweights: Any, accumulate: bool, workspace: Workspace) -> None:
        shape, size = self._shape, self._vectors * self._filters
        lines = x.shape[0] * shape.out_height
        block = max(1, -(-lines // BLOCKS))
        blocks = -(-lines // block) if self._planes is None else self._planes.blocks(x.shape[0])
        totals = workspace.take("totals", blocks * size)
        if self._planes is None:
            self._add_lines(threads, x, dy, totals, block)
        else:
            self._planes.run(threads, x, dy, totals, workspace)
        grain = max(1, GRAIN // blocks)
        add_blocks.run(threads, shape.weights, grain, totals, blocks, size, self._positions, dweights, int(accumulate))

    def _add_lines(self, threads: int, x: Any, dy: Any, totals: Any, block: int) -> None:
        shape, size = self._shape, self._vectors * self._filters
        lines = x.shape[0] * shape.out_height
        blocks = -(-lines // block)
        parts = min(self._vectors, -(-4 * threads // blocks))
        work = lines * shape.out_width * size // WIDTH
        kernel, more = self._kernel()
        kernel.run(
            threads,
            blocks * parts,
            max(1, VECTOR_GRAIN * blocks * parts // max(1, work)),
            x,
            math.prod(shape.sizes) * shape.channels,
            self._from,
            shape.geometry.stride[-1] * shape.channels,
            self._starts,
            self._taps,
            self._columns,
            shape.geometry.kernel[-1],
            dy,
            shape.out_width * shape.outputs,
            totals,
            self._filters,
            size,
            lines,
            block,
            shape.out_height,
            self._vectors,
            parts,
            self._lanes.sources,
            self._lanes.used,
            shape.channels,
            shape.outputs,
            *more,
        )

    def _kernel(self) -> tuple[Kernel, tuple[Any, ...]]:
        """Return the kernel and its arguments beyond those of `tap_kernel`."""
        if self._row is None:
            return tap_kernel(self._lanes), ()
        # Three rows share the loads of dy, if the sums of their taps stay in registers.
        rows = 3 if 3 * self._row.taps <= SUMS else 1
        more = (self._shape.out_width, *self._bounds, ZEROS, self._next_rows, self._fetched)
        return row_tap_kernel(self._lanes, self._row, rows), more


def _forward_order(lanes: SimdGroups, shape: ConvolutionShape) -> Any:
    """Return for each element (vector, tap, i, lane) of packed weights its index in the weights; -1: none."""
    taps = math.prod(shape.geometry.kernel)
    vectors = -(-shape.outputs // lanes.used)
    v, k, i, lane = np.ix_(range(vectors), range(taps), range(lanes.read), range(WIDTH))
    output = v * lanes.used + lane
    return np.where((lane < lanes.used) & (output < shape.outputs), (output * taps + k) * lanes.read + i, -1)


def _backward_order(lanes: SimdGroups, shape: ConvolutionShape) -> Any:
    """The same for the data gradient, whose lanes are the image's channels."""
    taps = math.prod(shape.geometry.kernel)
    vectors = -(-shape.geometry.group // lanes.groups)
    v, k, j, lane = np.ix_(range(vectors), range(taps), range(lanes.read), range(WIDTH))
    channel = v * lanes.used + lane
    output = channel // lanes.made * lanes.read + j
    index = (output * taps + k) * lanes.made + channel % lanes.made
    return np.where((lane < lanes.used) & (channel < shape.channels), index, -1)


class GroupedConvolution(TileConvolution):
    """A planned convolution with small groups; a direction in which no two groups fit a vector uses tiles."""

    def __init__(
        self,
        threads: int,
        workspace: Workspace,
        x_shape: tuple[int, ...],
        weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:
        super().__init__(threads, workspace, x_shape, weights_shape, geometry)
        self._lanes, self._back_lanes = _lanes(weights_shape, geometry.group)
        self._forward_pass: tuple[_Pass, ConstantTable, int] | None = None
        self._back_passes: tuple[list[_Pass] | list[ResidueDgrad], ConstantTable, int] | None = None
        self._weights_pass: _WeightsPass | None = None
        self._runs = one_window(self.shape)
        self._scatter: ScatterDgrad | None = None
        self._by_residues = suits_residue_dgrad(self.shape)

    def _axes(self) -> list[AxisTaps]:
        shape = self.shape
        return [forward_axis(out, *shape.window(i)) for i, out in enumerate(shape.out)]

    def _packed(self, weights: Any, order: ConstantTable, size: int) -> Any:
        packed = self.workspace.take("weights", size)
        self._gather(weights, order, size, packed)
        return packed

    def _gather(self, weights: Any, order: ConstantTable, size: int, packed: Any) -> None:
        gather.run(self.threads, size, GRAIN, weights, order, packed)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:
        if not _fits(self._lanes):
            super().forward(x, weights, bias, y, relu, sums, residual)
            return
        assert sums is None, "gives no sums"
        plan, start = self._planned_pass()[0], self.zeros if bias is None else bias
        plan.run(self.threads, x.shape[0], x, self.packed(weights), start, y, relu and residual is None)
        if residual is not None:  # tiles overlap, so they cannot add it
            note_host_work()
            y += residual
            if relu:
                np.maximum(y, 0, out=y)

    def _planned_pass(self) -> tuple[_Pass, ConstantTable, int]:
        if self._forward_pass is None:
            shape, geometry = self.shape, self.shape.geometry
            order = _forward_order(self._lanes, shape)
            sizes = (shape.sizes, shape.out)
            plan = _Pass(self._lanes, geometry.group, self._axes(), sizes, geometry.kernel)
            self._forward_pass = plan, table_of(order), order.size
        return self._forward_pass

    @property
    def packed_size(self) -> int:
        return self._planned_pass()[2] if _fits(self._lanes) else super().packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        if not _fits(self._lanes):
            super().pack(weights, packed)
            return
        _, table, size = self._planned_pass()
        self._gather(weights, table, size, packed)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        if suits_scatter_dgrad(self._runs) and not self._by_residues:
            if self._scatter is None:
                self._scatter = ScatterDgrad(self._runs, self.threads, self.workspace)
            self._scatter.run(dy, weights, dx)
            return
        folds = _folds(self._back_lanes)
        if not folds and not _fits(self._back_lanes):
            super().backward_data(dy, weights, dx)
            return
        if self._back_passes is None:
            self._back_passes = self._plan_back()
        plans, table, size = self._back_passes
        packed = self._packed(weights, table, size)
        many, image = (self._back_lanes.read if folds else 1), dx.size // dx.shape[0]
        each = max(dy.size // dy.shape[0], many * image if folds else 0)
        step = dy.shape[0] if len(plans) == 1 and not folds else max(1, self.threads * CACHED // each)
        for first in range(0, dy.shape[0], step):  # residues read the same elements, which stay in a cache
            part, target = dy[first : first + step], dx[first : first + step]
            made = self.workspace.take("folded", target.size * many) if folds else target
            for plan in plans:
                plan.run(self.threads, part.shape[0], part, packed, self.zeros, made)
            if folds:
                items = part.shape[0] * image // self.shape.channels
                fold_kernel(many).run(
                    self.threads,
                    items,
                    max(1, GRAIN // (many * self.shape.channels)),
                    made,
                    target,
                    self.shape.channels,
                )

    def _plan_back(self) -> tuple[list[_Pass] | list[ResidueDgrad], ConstantTable, int]:
        if self._by_residues:
            dgrad = ResidueDgrad(self.shape)
            return [dgrad], table_of(dgrad.order), dgrad.order.size
        shape, geometry, lanes, groups = self.shape, self.shape.geometry, self._back_lanes, self.shape.geometry.group
        if _folds(lanes):
            # As if each output had a channel of its own; `fold_kernel` then sums the outputs of a channel.
            lanes, groups = SimdGroups(1, 1), shape.outputs
        residues = [axis_residues(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]
        plans = [
            _Pass(lanes, groups, axes, (shape.out, shape.sizes), geometry.kernel)
            for axes in itertools.product(*residues)
        ]
        order = _forward_order(lanes, shape) if _folds(self._back_lanes) else _backward_order(lanes, shape)
        return plans, table_of(order), order.size

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        repeats = not _fits(self._lanes) and self._lanes.read == 1
        if not _fits(self._lanes) and not repeats:
            super().backward_weights(x, dy, dweights, accumulate)
            return
        if self._weights_pass is None:
            shape, lanes = (_one_output_a_group(self.shape), SimdGroups(1, 1)) if repeats else (self.shape, self._lanes)
            self._weights_pass = _WeightsPass(lanes, shape, self._axes())
        if not repeats:
            self._weights_pass.run(self.threads, x, dy, dweights, accumulate, self.workspace)
            return
        many, image = self.shape.group_outputs, x.size // x.shape[0]
        step = max(1, REPEATED // (many * image))  # the summation order does not depend on threads
        for first in range(0, x.shape[0], step):
            part = x[first : first + step]
            channels = self.workspace.take("repeated", many * part.size)[: many * part.size]
            repeat_channels.run(self.threads, part.size, max(1, GRAIN // many), part, channels, many)
            self._weights_pass.run(
                self.threads,
                channels.reshape(len(part), -1),
                dy[first : first + step],
                dweights,
                accumulate or first > 0,
                self.workspace,
            )


def _one_output_a_group(shape: ConvolutionShape) -> ConvolutionShape:
    """Return the shape of a layer with a channel multiplier in which each output has its own channel."""
    x, weights = (shape.images, shape.outputs, *shape.sizes), (shape.outputs, 1, *shape.geometry.kernel)
    return ConvolutionShape(x, weights, replace(shape.geometry, group=shape.outputs))
