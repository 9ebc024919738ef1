"""Winograd convolutions with 3x3 windows of stride 1: 16 products instead of 36.

A tile of 2x2 outputs is transformed from 4x4 pixels. Each of the 16 elements is a matrix product of tiles by channels
and channels by outputs. A tile's pixels are read from the image without padding. Transformed tiles are processed in
blocks that stay in the L2 cache. With a dilation of d, the pixels and outputs of a tile are d apart.

The transforms are emitted as LLVM IR, one channel vector at a time. With B, G and A of Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks" (CVPR 2016), a tile y of 2x2 outputs is
A^T [(G g G^T) * (B^T d B)] A for the 4x4 pixels d around it and the 3x3 weights g, where * multiplies element by
element. The gradient of g is therefore G^T [(A dy A^T) * (B^T d B)] G. B and A have elements 0, 1 and -1, G also 1/2.
The 16 transformed elements are stored in separate planes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from caffepy.backend.cpu.convolution.correlation import ConvolutionShape, Ending, forward_axis, taps_inside
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, device_function, kernel
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer, ahead, emitted, table_at, transpose_square
from caffepy.backend.cpu.memory import Workspace
from caffepy.backend.cpu.microkernel import ROWS, Panels, extended, tile
from caffepy.backend.types import Geometry, spatial_output

Line = Sequence[Any]
"""Vectors along one axis of a tile."""
_HALF = ir.Constant(VECTOR, [0.5] * WIDTH)


class _Transforms(Writer):
    """Emits transforms of squares of vectors, along one axis and then along the other."""

    def plus(self, x: Any, y: Any) -> Any:
        return self.builder.fadd(x, y)

    def minus(self, x: Any, y: Any) -> Any:
        return self.builder.fsub(x, y)

    def half(self, x: Any) -> Any:
        return self.builder.fmul(x, _HALF)

    def image(self, d: Line) -> Line:
        """B^T d."""
        return self.minus(d[0], d[2]), self.plus(d[1], d[2]), self.minus(d[2], d[1]), self.minus(d[1], d[3])

    def filters(self, g: Line) -> Line:
        """G g."""
        outer = self.plus(g[0], g[2])
        return g[0], self.half(self.plus(outer, g[1])), self.half(self.minus(outer, g[1])), g[2]

    def gradient(self, dy: Line) -> Line:
        """A dy."""
        return dy[0], self.plus(dy[0], dy[1]), self.minus(dy[0], dy[1]), self.builder.fneg(dy[1])

    def output(self, m: Line) -> Line:
        """A^T m."""
        return self.plus(self.plus(m[0], m[1]), m[2]), self.minus(self.minus(m[1], m[2]), m[3])

    def filters_gradient(self, m: Line) -> Line:
        """G^T m."""
        both = self.half(self.plus(m[1], m[2]))
        return self.plus(m[0], both), self.half(self.minus(m[1], m[2])), self.plus(both, m[3])

    def square(self, transform: Callable[[Line], Line], values: Sequence[Line]) -> list[Any]:
        """Transform all columns, then all rows; return the elements row by row."""
        columns = [transform(column) for column in zip(*values, strict=True)]
        return [value for row in zip(*columns, strict=True) for value in transform(row)]

    def load(self, pointer: Any, offset: Any) -> Any:
        return self.builder.load(self.vector_at(pointer, offset), align=4)

    def line(self, first: Any, gap: Any, size: Any, count: int) -> list[tuple[Any, Any]]:
        """Return `count` positions from `first` on, `gap` apart, and whether each is in 0 ... size - 1."""
        at = [self.builder.add(first, self.builder.mul(gap, self.word(i))) for i in range(count)]
        # Unsigned, a position before the image is a huge number: one comparison tests both ends.
        return [(one, self.builder.icmp_unsigned("<", one, size)) for one in at]

    def pixels(self, image: Any, other: Any, place: Sequence[Any], count: int) -> list[list[Any]]:
        """Return pointers to `count` x `count` pixels, or `other` for pixels outside the image."""
        # `place` is the first row and column, which may be negative, the distance of rows and of columns, the image's
        # height and width, and its channels.
        h, w, gap_h, gap_w, height, width, channels = place
        b = self.builder
        result: list[list[Any]] = []
        columns = self.line(w, gap_w, width, count)
        for row, row_there in self.line(h, gap_h, height, count):
            result.append([])
            for column, column_there in columns:
                at = b.mul(b.add(b.mul(row, width), column), channels)
                there = b.and_(row_there, column_there)
                # A pointer to zeros (or to scratch memory, for stores) instead of a branch: the loops over channels
                # need no masks.
                result[-1].append(b.select(there, b.gep(image, [at]), other))
        return result

    def each_vector(self, count: Any, start: Any, body: Callable[[Any], None]) -> Any:
        """Emit body(offset) for `count` vectors from the offset `start` on; return the end offset."""

        def step(_: Any, at: list[Any], sums: list[Any]) -> list[Any]:
            body(at[0])
            return [self.builder.add(at[0], self.word(WIDTH))]

        self.loop(count, [], [start], step)
        return self.builder.add(start, self.builder.mul(count, self.word(WIDTH)))

    def write_planes(self, values: list[Any], target: Any, at: Any, plane: Any) -> None:
        for index, value in enumerate(values):
            offset = self.builder.add(at, self.builder.mul(plane, self.word(index)))
            self.builder.store(value, self.vector_at(target, offset), align=4)

    def read_planes(self, source: Any, at: Any, plane: Any) -> list[list[Any]]:
        """Load the 4x4 elements at an offset of each plane."""
        values = [self.load(source, self.builder.add(at, self.builder.mul(plane, self.word(i)))) for i in range(16)]
        return [values[row : row + 4] for row in range(0, 16, 4)]


def _written(write: Callable[..., None], kinds: str) -> Any:
    """As `emitted`, with a `_Transforms` in place of the builder."""
    return emitted(kinds, lambda builder, *arguments: write(_Transforms(builder), *arguments))


def _from_image(name: str, count: int) -> Callable[..., None]:
    """Return an emitter that transforms `count` x `count` pixels into panels `panel` elements apart."""

    def write(
        t: _Transforms,
        image: Any,
        zeros: Any,
        h: Any,
        w: Any,
        gap_h: Any,
        gap_w: Any,
        height: Any,
        width: Any,
        channels: Any,
        target: Any,
        plane: Any,
        panels: Any,
        panel: Any,
        vectors: Any,
    ) -> None:
        pixels = t.pixels(image, zeros, (h, w, gap_h, gap_w, height, width, channels), count)

        def body(index: Any, at: list[Any], sums: list[Any]) -> list[Any]:
            start, to = at
            shift = t.builder.sub(to, start)

            def vector(c: Any) -> None:
                values = [[t.load(pixel, c) for pixel in row] for row in pixels]
                t.write_planes(t.square(getattr(t, name), values), target, t.builder.add(c, shift), plane)

            return [t.each_vector(vectors, start, vector), t.builder.add(to, panel)]

        t.loop(panels, [], [t.word(0), t.word(0)], body)

    return write


image_tile = _written(_from_image("image", 4), "ppwwwwwwwpwwww")
"""B^T d B of one tile.

Arguments: (image, zeros, row, column, distance of rows, of columns, height, width, channels, target, plane, panels,
panel, vectors).
"""
gradient_tile = _written(_from_image("gradient", 2), "ppwwwwwwwpwwww")
"""A dy A^T of one tile, with the same arguments."""


def _write_filters(t: _Transforms, source: Any, tap: Any, target: Any, plane: Any) -> None:
    values = [t.load(source, t.builder.mul(tap, t.word(i))) for i in range(9)]
    square = [values[row : row + 3] for row in range(0, 9, 3)]
    t.write_planes(t.square(t.filters, square), target, t.word(0), plane)


filter_tile = _written(_write_filters, "pwpw")
"""G g G^T of one vector of filters: (source, elements from one tap to the next, target, plane)."""


def _write_output(
    t: _Transforms,
    source: Any,
    plane: Any,
    start: Any,
    y: Any,
    rest: Any,
    h: Any,
    w: Any,
    gap_h: Any,
    gap_w: Any,
    height: Any,
    width: Any,
    channels: Any,
    vectors: Any,
    addend: Any,
    adds: Any,
    relu: Any,
) -> None:
    place = (h, w, gap_h, gap_w, height, width, channels)
    targets = [one for row in t.pixels(y, rest, place, 2) for one in row]
    addends = [one for row in t.pixels(addend, rest, place, 2) for one in row]
    some, rectifies = (t.builder.icmp_signed("!=", flag, t.word(0)) for flag in (adds, relu))

    def vector(c: Any) -> None:
        # The bias enters behind the inverse transform, once for each output; before it, it would have to be transformed
        # too.
        first = t.load(start, c)
        values = [t.plus(value, first) for value in t.square(t.output, t.read_planes(source, c, plane))]

        def added() -> list[Any]:
            return [t.plus(value, t.load(one, c)) for value, one in zip(values, addends, strict=True)]

        total = t.choose(some, added, lambda: values)
        total = t.choose(rectifies, lambda: [t.rectified(value) for value in total], lambda: total)
        for value, target in zip(total, targets, strict=True):
            t.builder.store(value, t.vector_at(target, c), align=4)

    t.each_vector(vectors, t.word(0), vector)


output_tile = _written(_write_output, "pwpppwwwwwwwwpww")
"""A^T m A + start (+ addend), optionally rectified, of one tile.

Arguments: (source, plane, start, y, scratch for pixels outside, row, column, distance of rows, of columns, height,
width, channels, vectors, addend, adds, relu).
"""


def _write_filters_gradient(t: _Transforms, source: Any, plane: Any, target: Any, tap: Any, accumulate: Any) -> None:
    values = t.square(t.filters_gradient, t.read_planes(source, t.word(0), plane))
    offsets = [t.builder.mul(tap, t.word(i)) for i in range(9)]

    def added() -> list[Any]:
        return [t.plus(t.load(target, at), value) for at, value in zip(offsets, values, strict=True)]

    total = t.choose(t.builder.icmp_signed("!=", accumulate, t.word(0)), added, lambda: values)
    for at, value in zip(offsets, total, strict=True):
        t.builder.store(value, t.vector_at(target, at), align=4)


filter_gradient_tile = _written(_write_filters_gradient, "pwpww")
"""target (+)= G^T m G of one vector of filters: (source, plane, target, elements between taps, accumulate)."""


@kernel
def transform_filters(
    begin: Int,
    end: Int,
    weights: Floats,
    channels: Int,
    backward: Int,
    packed: Floats,
    plane: Int,
    table: Words,
    width: Int,
    depth: Int,
    squares: Floats,
    square_size: Int,
    total: Int,
    items: Int,
) -> None:
    """G g G^T of all filters, packed into panels. Items are parts of (panel, `width` of the elements of the sum).

    The panels' columns are output channels or, with `backward`, channels of flipped filters.
    """
    blocks = depth // width
    for item in range(begin, end):
        square = ahead(squares, item * square_size)
        for number in range(item * total // items, (item + 1) * total // items):
            panel, first = 4 * (number // blocks), number % blocks * width
            vectors, column = table[panel], table[panel + 1]
            wide = vectors * width
            for v in range(0, wide, width):
                target = ahead(packed, table[panel + 2] + first * wide + v)
                # The data gradient correlates with filters turned by 180 degrees: from the last tap on, with a negative
                # step. Its columns are channels, which are contiguous in the weights.
                source, row, tap = ahead(weights, (first * 9 + 8) * channels + column + v), 9 * channels, -channels
                if backward == 0:
                    # The columns of the forward pass are outputs, which are 9 * channels apart: nine squares are turned
                    # first.
                    for i in range(9):
                        here = ahead(weights, ((column + v) * 9 + i) * channels + first)
                        transpose_square(here, 9 * channels, ahead(square, i * width * width), width)
                    source, row, tap = square, width, width * width
                for k in range(width):
                    filter_tile(ahead(source, k * row), tap, ahead(target, k * wide), plane)


@device_function
def begin_of(tile: Any, gap: Any) -> Any:
    """Return the first output of a tile along an axis: of every 2 gap outputs, the first `gap` begin tiles."""
    return tile + tile // gap * gap


@kernel
def correlate_tiles(
    begin: Int,
    end: Int,
    x: Floats,
    height: Int,
    width: Int,
    channels: Int,
    pad_h: Int,
    pad_w: Int,
    gap_h: Int,
    gap_w: Int,
    zeros: Floats,
    packed: Floats,
    packed_plane: Int,
    table: Words,
    panels: Int,
    parts: Int,
    lanes: Int,
    no_offset: Words,
    scratch: Floats,
    scratch_size: Int,
    x_plane: Int,
    x_rows: Words,
    y_plane: Int,
    y_row: Int,
    y_rows: Words,
    start: Floats,
    y: Floats,
    out_height: Int,
    out_width: Int,
    outputs: Int,
    addend: Floats,
    adds: Int,
    relu: Int,
    image_tiles: Int,
    line_tiles: Int,
    tiles: Int,
    block: Int,
    total: Int,
    items: Int,
) -> None:
    """y = start + the correlation of x with filters (+ addend), optionally rectified.

    Items are parts of the (block of tiles, part of the panels).
    """
    for item in range(begin, end):
        images = ahead(scratch, item * scratch_size)
        products = ahead(images, 16 * x_plane)
        rest = ahead(products, 16 * y_plane)
        transformed = -1
        for number in range(item * total // items, (item + 1) * total // items):
            first, part = number // parts * block, number % parts
            count = min(block, tiles - first)
            # The parts of a block are neighbouring numbers: the images are transformed once for all parts of this item.
            if first != transformed:
                transformed = first
                for t in range(count):
                    n, at = (first + t) // image_tiles, (first + t) % image_tiles
                    image_tile(
                        ahead(x, n * height * width * channels),
                        zeros,
                        begin_of(at // line_tiles, gap_h) - pad_h,
                        begin_of(at % line_tiles, gap_w) - pad_w,
                        gap_h,
                        gap_w,
                        height,
                        width,
                        channels,
                        ahead(images, t * channels),
                        x_plane,
                        1,
                        0,
                        channels // lanes,
                    )
            panel0, panel1 = part * panels // parts, (part + 1) * panels // parts
            column0, vectors_done = table[4 * panel0 + 1], 0
            for panel in range(panel0, panel1):
                vectors_done += table[4 * panel]
            # The 16 elements are independent matrix products, each with its own plane of the weights.
            for i in range(16):
                for panel in range(panel0, panel1):
                    vectors, column = table[4 * panel], table[4 * panel + 1] - column0
                    rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
                    weights = ahead(packed, i * packed_plane + table[4 * panel + 2])
                    target = ahead(products, i * y_plane + column)
                    for r in range(0, count, rows):
                        tile(
                            vectors,
                            ahead(images, i * x_plane),
                            table_at(x_rows, r),
                            no_offset,
                            1,
                            weights,
                            no_offset,
                            vectors * lanes,
                            1,
                            channels,
                            zeros,
                            0,
                            target,
                            table_at(y_rows, r),
                            count - r,
                            lanes,
                            zeros,
                            0,
                            0,
                        )
            for t in range(count):
                n, at = (first + t) // image_tiles, (first + t) % image_tiles
                offset = n * out_height * out_width * outputs + column0
                output_tile(
                    ahead(products, t * y_row),
                    y_plane,
                    ahead(start, column0),
                    ahead(y, offset),
                    rest,
                    begin_of(at // line_tiles, gap_h),
                    begin_of(at % line_tiles, gap_w),
                    gap_h,
                    gap_w,
                    out_height,
                    out_width,
                    outputs,
                    vectors_done,
                    ahead(addend, offset),
                    adds,
                    relu,
                )


@kernel
def transform_images(
    begin: Int,
    end: Int,
    first: Int,
    x: Floats,
    height: Int,
    width: Int,
    channels: Int,
    pad_h: Int,
    pad_w: Int,
    gap_h: Int,
    gap_w: Int,
    x_tiles: Floats,
    x_plane: Int,
    x_vectors: Int,
    dy: Floats,
    out_height: Int,
    out_width: Int,
    outputs: Int,
    dy_tiles: Floats,
    dy_plane: Int,
    dy_vectors: Int,
    zeros: Floats,
    image_tiles: Int,
    line_tiles: Int,
    tiles: Int,
    lanes: Int,
) -> None:
    """B^T d B of the images and A dy A^T of the gradient, in panels. Items are tiles after `first`."""
    x_wide, dy_wide = x_vectors * lanes, dy_vectors * lanes
    for item in range(begin, end):
        n, at = (first + item) // image_tiles, (first + item) % image_tiles
        h, w = begin_of(at // line_tiles, gap_h), begin_of(at % line_tiles, gap_w)
        image_tile(
            ahead(x, n * height * width * channels),
            zeros,
            h - pad_h,
            w - pad_w,
            gap_h,
            gap_w,
            height,
            width,
            channels,
            ahead(x_tiles, item * x_wide),
            x_plane,
            channels // x_wide,
            tiles * x_wide,
            x_vectors,
        )
        gradient_tile(
            ahead(dy, n * out_height * out_width * outputs),
            zeros,
            h,
            w,
            gap_h,
            gap_w,
            out_height,
            out_width,
            outputs,
            ahead(dy_tiles, item * dy_wide),
            dy_plane,
            outputs // dy_wide,
            tiles * dy_wide,
            dy_vectors,
        )


@kernel
def multiply_tiles(
    begin: Int,
    end: Int,
    x_tiles: Floats,
    x_plane: Int,
    vectors: Int,
    channels: Int,
    dy_tiles: Floats,
    dy_plane: Int,
    dy_wide: Int,
    dy_rows: Words,
    outputs: Int,
    tiles: Int,
    block: Int,
    products: Floats,
    plane: Int,
    c_rows: Words,
    accumulate: Int,
    zeros: Floats,
    no_offset: Words,
    lanes: Int,
    total: Int,
    items: Int,
) -> None:
    """products[i, k, c] (+)= sum over tiles of dy[i, k] * x[i, c]. Items are parts of the (i, panel of c)."""
    wide = vectors * lanes
    panels = channels // wide
    rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
    for item in range(begin, end):
        for number in range(item * total // items, (item + 1) * total // items):
            i, panel = number // panels, number % panels
            for first in range(0, tiles, block):
                height = min(block, tiles - first)
                # A block's sum is rounded into the products before the next one: see SUM.
                keep = 1 if accumulate == 1 or first > 0 else 0
                factors = ahead(x_tiles, i * x_plane + (panel * tiles + first) * wide)
                for k in range(0, outputs, rows):
                    target = ahead(products, i * plane + k * channels + panel * wide)
                    tile(
                        vectors,
                        ahead(dy_tiles, i * dy_plane + first * dy_wide),
                        table_at(dy_rows, k),
                        no_offset,
                        dy_wide,
                        factors,
                        no_offset,
                        wide,
                        1,
                        height,
                        target if keep == 1 else zeros,
                        keep,
                        target,
                        c_rows,
                        outputs - k,
                        lanes,
                        zeros,
                        0,
                        0,
                    )


@kernel
def transform_gradients(
    begin: Int, end: Int, products: Floats, plane: Int, channels: Int, lanes: Int, dweights: Floats, accumulate: Int
) -> None:
    """dweights (+)= G^T m G of all filters. Items are output channels."""
    for k in range(begin, end):
        for c in range(0, channels, lanes):
            filter_gradient_tile(
                ahead(products, k * channels + c), plane, ahead(dweights, k * 9 * channels + c), channels, accumulate
            )


ROWS_OF_ALL = math.lcm(*ROWS.values())
"""A multiple of the rows of every tile of a product."""
BLOCK = 48
"""Approximate tiles that are transformed and multiplied together."""
COLUMNS = 128
"""Approximate output channels whose products are kept until their transform."""
SUM = 128
"""Approximate tiles whose products are summed in registers."""
MIN_CHANNELS = 32
"""Minimum channels and outputs for which fewer products outweigh the transforms."""
MIN_TILES = 48
"""Minimum tiles of a batch for which they outweigh the larger weights."""
MAX_PRODUCTS = 0.6
"""Maximum products of a dilated convolution relative to direct sums: many of its windows and tiles exceed the image."""
CHUNK = 2**19
"""Elements of transformed images and gradients per chunk."""
_NO_OFFSET = ConstantTable(np.zeros(1, np.int64))


def is_winograd(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Return whether a convolution has suitable windows and is large enough."""
    g = geometry
    windows = (g.kernel, g.stride, g.group) == ((3, 3), (1, 1), 1)
    if not windows or any(pad > 2 * gap for pad, gap in zip(g.pad, g.dilation, strict=True)):
        return False
    if any(size % WIDTH or size < MIN_CHANNELS for size in weights_shape[:2]):
        return False
    out = tuple(map(spatial_output, x_shape[2:], g.kernel, g.stride, g.pad, g.dilation))
    tiles = _Tiles(out, g.dilation).count
    return x_shape[0] * tiles >= MIN_TILES and (
        max(g.dilation) == 1 or 16 * tiles < MAX_PRODUCTS * _products(x_shape[2:], out, g)
    )


def _products(sizes: tuple[int, ...], out: tuple[int, ...], g: Geometry) -> int:
    """Return the products of direct sums for an image, channel and output, without those of zeros around the image."""
    axes = map(forward_axis, out, g.kernel, g.stride, g.pad, g.dilation)
    return math.prod(int(taps_inside([axis], [size]).sum()) for axis, size in zip(axes, sizes, strict=True))


class _Tiles:
    """The tiles of an output image whose windows have this dilation."""

    def __init__(self, out: tuple[int, ...], dilation: tuple[int, ...]) -> None:
        lines, self.line = (
            size // (2 * gap) * gap + min(size % (2 * gap), gap) for size, gap in zip(out, dilation, strict=True)
        )
        self.count = lines * self.line


class _Images(NamedTuple):
    """The images of the source or the result.

    Args:
        sizes: height and width.
        channels: of a pixel.
    """

    sizes: tuple[int, ...]
    channels: int


class _WinogradPass:
    """The planned computation of y from x, or of dx from dy and flipped filters.

    Args:
        threads: the backend's threads.
        workspace: the backend's workspace.
        read: the source images.
        made: the result images.
        pad: zeros before the source.
        gaps: dilation.
        images: number of images.
    """

    def __init__(
        self,
        threads: int,
        workspace: Workspace,
        read: _Images,
        made: _Images,
        pad: tuple[int, ...],
        gaps: tuple[int, ...],
        images: int,
    ) -> None:
        self._threads, self._workspace = threads, workspace
        self._read, self._made, self._pad, self._gaps = read, made, pad, gaps
        self._image_tiles = _Tiles(made.sizes, gaps)
        self._tiles = images * self._image_tiles.count
        self._blocks = -(-self._tiles // BLOCK)
        self._block = -(-self._tiles // (self._blocks * ROWS_OF_ALL)) * ROWS_OF_ALL
        self._panels = Panels(read.channels, made.channels, self._block)
        self._plane = self._panels.size + WIDTH  # planes a power of two apart would share few cache sets
        self._parts = self._divided()
        bounds = [part * self._panels.count // self._parts for part in range(self._parts)]
        self._columns = int(np.add.reduceat(self._panels.entries[:, 0], bounds).max()) * WIDTH
        self._x_rows, self._y_rows = (extended(np.arange(self._block) * row) for row in (read.channels, self._columns))
        self._zeros = ConstantTable(np.zeros(max(read.channels, made.channels), np.float32))

    def _divided(self) -> int:
        """Return the number of panel parts, so that products stay in a cache and all threads have work."""
        parts = max(1, round(self._made.channels / COLUMNS))
        if self._threads > 1:
            parts = max(parts, -(-3 * self._threads // self._blocks))
        return min(parts, self._panels.count)

    @property
    def packed_size(self) -> int:
        return 16 * self._plane

    def pack(self, weights: Any, backward: bool, packed: Any) -> None:
        """Transform and pack the filters in the order in which `run` reads them."""
        read, made, panels = self._read.channels, self._made.channels, self._panels
        total = panels.count * (read // WIDTH)
        items, size = min(self._threads, total), 9 * WIDTH * WIDTH
        transform_filters.run(
            self._threads,
            items,
            1,
            weights,
            made if backward else read,
            int(backward),
            packed,
            self._plane,
            panels.table,
            WIDTH,
            read,
            self._workspace.take("squares", items * size),
            size,
            total,
            items,
        )

    def run(self, x: Any, packed: Any, start: Any, y: Any, ending: Ending) -> None:
        """Compute y; `start` has one number per channel, or is None."""
        # WIDTH more, as for the planes of the weights.
        x_plane, y_plane = (self._block * row + WIDTH for row in (self._read.channels, self._columns))
        total = self._blocks * self._parts
        items, size = min(self._threads, total), 16 * (x_plane + y_plane) + self._made.channels
        correlate_tiles.run(
            self._threads,
            items,
            1,
            x,
            *self._read.sizes,
            self._read.channels,
            *self._pad,
            *self._gaps,
            self._zeros,
            packed,
            self._plane,
            self._panels.table,
            self._panels.count,
            self._parts,
            WIDTH,
            _NO_OFFSET,
            self._workspace.take("images", items * size),
            size,
            x_plane,
            self._x_rows,
            y_plane,
            self._columns,
            self._y_rows,
            self._zeros if start is None else start,
            y,
            *self._made.sizes,
            self._made.channels,
            y if ending.addend is None else ending.addend,
            int(ending.addend is not None),
            int(ending.relu),
            self._image_tiles.count,
            self._image_tiles.line,
            self._tiles,
            self._block,
            total,
            items,
        )


def _vectors(channels: int) -> int:
    """Return the vectors of equally wide panels."""
    return next(count for count in (2, 3, 1) if channels // WIDTH % count == 0)


class _WeightGradient:
    """The planned weight gradient."""

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        self._tiles = _Tiles(shape.out, shape.geometry.dilation)
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
        # Equal chunks; a small last one would leave threads idle.
        size = -(-tiles // chunks)
        for first in range(0, tiles, size):
            self._add(x, dy, first, min(size, tiles - first), products)
        channels = self._shape.channels
        # G^T m G is linear, so the products of all chunks are summed and transformed once.
        transform_gradients.run(
            self._threads,
            self._shape.outputs,
            max(1, 4096 // channels),
            products,
            self._plane,
            channels,
            WIDTH,
            dweights,
            int(accumulate),
        )

    def _rows(self, tiles: int) -> ConstantTable:
        """Return offsets of the output channels in the transformed gradient of this many tiles."""
        if tiles not in self._dy_rows:
            k, wide = np.arange(self._shape.outputs), self._dy_vectors * WIDTH
            self._dy_rows[tiles] = extended(k // wide * tiles * wide + k % wide)
        return self._dy_rows[tiles]

    def _add(self, x: Any, dy: Any, first: int, tiles: int, products: Any) -> None:
        shape = self._shape
        # WIDTH more, as for the planes of the weights in `_WinogradPass`.
        x_plane, dy_plane = tiles * shape.channels + WIDTH, tiles * shape.outputs + WIDTH
        buffer = self._workspace.take("images", 16 * (x_plane + dy_plane))
        x_tiles, dy_tiles = buffer[: 16 * x_plane], buffer[16 * x_plane :]
        transform_images.run(
            self._threads,
            tiles,
            8,
            first,
            x,
            *shape.sizes,
            shape.channels,
            *shape.geometry.pad,
            *shape.geometry.dilation,
            x_tiles,
            x_plane,
            self._x_vectors,
            dy,
            *shape.out,
            shape.outputs,
            dy_tiles,
            dy_plane,
            self._dy_vectors,
            self._zeros,
            self._tiles.count,
            self._tiles.line,
            tiles,
            WIDTH,
        )
        # Threads divide elements and panels, never the tiles that are summed: the order of a sum does not depend on
        # threads.
        total = 16 * (shape.channels // (self._x_vectors * WIDTH))
        items, block = min(self._threads, total), -(-tiles // -(-tiles // SUM))
        multiply_tiles.run(
            self._threads,
            items,
            1,
            x_tiles,
            x_plane,
            self._x_vectors,
            shape.channels,
            dy_tiles,
            dy_plane,
            self._dy_vectors * WIDTH,
            self._rows(tiles),
            shape.outputs,
            tiles,
            block,
            products,
            self._plane,
            self._c_rows,
            int(first > 0),
            self._zeros,
            _NO_OFFSET,
            WIDTH,
            total,
            items,
        )


class WinogradConvolution(TileConvolution):
    """A planned convolution with 3x3 windows of stride 1 over channels-last arrays.

    The error of each pass is stated in tests/unit/backend/cpu/convolution/test_winograd.py.
    """

    @cached_property
    def _ahead(self) -> _WinogradPass:
        s, g = self.shape, self.shape.geometry
        read, made = _Images(s.sizes, s.channels), _Images(s.out, s.outputs)
        return _WinogradPass(self.threads, self.workspace, read, made, g.pad, g.dilation, s.images)

    @cached_property
    def _back(self) -> _WinogradPass:
        s, g = self.shape, self.shape.geometry
        read, made = _Images(s.out, s.outputs), _Images(s.sizes, s.channels)
        # The gradient of a pixel comes from all windows that contain it: 2 gap - p zeros around dy for a padding of p.
        pad = tuple(2 * gap - p for gap, p in zip(g.dilation, g.pad, strict=True))
        return _WinogradPass(self.threads, self.workspace, read, made, pad, g.dilation, s.images)

    @cached_property
    def _of_weights(self) -> _WeightGradient:
        return _WeightGradient(self.shape, self.threads, self.workspace)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:
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
