"""Convolutions that are matrix products without im2col: 1x1 kernels, or a kernel as large as the image.

Pointwise convolutions are products of a matrix with contiguous rows and packed weights:

    y[p, j] = start[j] + sum over k of x[p, k] * w[k, j] (+ addend[p, j]), optionally rectified

The tiles of `microkernel.py` look up their row offsets and cuts, which takes a large part of the time with 32 channels.
Here rows are equidistant, and tile heights are chosen to leave no partial tile: 49 pixels are seven tiles, of eight,
seven and two rows, not thirteen of four.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.gemm import Gemm
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel, note_host_work
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, WORD, Writer, ahead, emitted
from caffepy.backend.cpu.microkernel import Panels, WeightPacking, extended, pack_weights
from caffepy.backend.types import Geometry, memory_order

HEIGHTS = (8, 7, 6, 4, 2, 1) if WIDTH == 16 else (6, 5, 4, 2, 1)
"""Possible tile heights."""
WIDEST = 3 if WIDTH == 16 else 2
"""Vectors of a panel: 24 accumulators of 32 registers (AVX-512) leave room for the factors; otherwise 12 of 16."""
MIN_EVEN_ROWS = 64
"""Minimum rows for tiles of one height, with other heights only for the remainder."""
BLOCK = 2**16
"""Elements of x per pass over all panels; with a panel they stay in the L2 cache."""
MIN_ROWS, MAX_ROWS = 96, 192
"""Rows of a block; with fewer, weights are reread too often from a shared cache."""
GRAIN = 1024
"""Minimum tile steps for a second thread."""


class _PixelsWriter(Writer):
    """Emits the instructions of a tile."""

    def __init__(self, builder: Any, arguments: Sequence[Any]) -> None:
        super().__init__(builder)
        (
            self.x,
            self.x_step,
            self.weights,
            self.depth,
            self.start,
            self.y,
            self.y_step,
            self.last,
            self.addend,
            self.adds,
            self.relu,
        ) = arguments

    def _vectors(self, row: Any, vectors: int, mask: Any) -> list[Any]:
        """Load contiguous vectors, the last one masked."""
        # Only the last vector of a row can be partial.
        whole = [self.builder.load(self.vector_at(row, self.word(v * WIDTH)), align=4) for v in range(vectors - 1)]
        return [*whole, self.masked_load(self.vector_at(row, self.word((vectors - 1) * WIDTH)), mask)]

    def _products(self, rows: int, vectors: int) -> list[Any]:
        """Emit the sums over the depth."""
        builder = self.builder
        places = [builder.gep(self.x, [builder.mul(self.x_step, self.word(row))]) for row in range(rows)]

        def step(index: Any, extra: list[Any], sums: list[Any]) -> list[Any]:
            columns = [builder.load(self.vector_at(extra[0], self.word(v * WIDTH)), align=4) for v in range(vectors)]
            result = []
            for row in range(rows):
                factor = self.splat(builder.load(builder.gep(places[row], [index]), align=4))
                for vector, column in enumerate(columns):
                    result.append(self.multiply_add(factor, column, sums[row * vectors + vector]))
            return [*result, builder.gep(extra[0], [self.word(vectors * WIDTH)])]

        zeros = [ir.Constant(VECTOR, [0.0] * WIDTH)] * (rows * vectors)
        return self.loop(self.depth, zeros, [self.weights], step)

    def write(self, rows: int, vectors: int) -> None:
        """Emit the tile: products and epilogue."""
        builder, mask = self.builder, self.lanes(self.last)
        sums, start = self._products(rows, vectors), self._vectors(self.start, vectors, mask)
        # Bias and residual behind the sum, as in `microkernel.py`.
        sums = [builder.fadd(start[i % vectors], total) for i, total in enumerate(sums)]
        offsets = [builder.mul(self.y_step, self.word(row)) for row in range(rows)]

        def added() -> list[Any]:
            more = [vector for at in offsets for vector in self._vectors(builder.gep(self.addend, [at]), vectors, mask)]
            return [builder.fadd(one, total) for one, total in zip(more, sums, strict=True)]

        adds, rectifies = (builder.icmp_signed("!=", flag, self.word(0)) for flag in (self.adds, self.relu))
        total = self.choose(adds, added, lambda: sums)
        total = self.choose(rectifies, lambda: [self.rectified(each) for each in total], lambda: total)
        for row, at in enumerate(offsets):
            target, own = builder.gep(self.y, [at]), total[row * vectors : (row + 1) * vectors]
            for v, value in enumerate(own[:-1]):
                builder.store(value, self.vector_at(target, self.word(v * WIDTH)), align=4)
            self.store(own[-1], self.vector_at(target, self.word((vectors - 1) * WIDTH)), self.last, mask)


def _write_tile(builder: Any, high: Any, wide: Any, *arguments: Any) -> None:
    """Emit a tile for each height in `HEIGHTS` and each number of vectors, and the choice between them."""
    number = builder.add(builder.mul(high, ir.Constant(WORD, WIDEST + 1)), wide)
    done = builder.append_basic_block("tile.end")
    # The size is known at run time only, and each size is unrolled. One switch costs less than a chain of comparisons,
    # which counts with few channels.
    switch = builder.switch(number, done)
    for rows, vectors in itertools.product(HEIGHTS, range(1, WIDEST + 1)):
        block = builder.append_basic_block(f"tile.{rows}.{vectors}")
        switch.add_case(ir.Constant(WORD, rows * (WIDEST + 1) + vectors), block)
        builder.position_at_end(block)
        _PixelsWriter(builder, arguments).write(rows, vectors)
        builder.branch(done)
    builder.position_at_end(done)


_tile = emitted("wwpwpwppwwpww", _write_tile)
"""A tile with a height in `HEIGHTS` and up to `WIDEST` vectors; other sizes do nothing.

Arguments: rows and vectors; x and its row distance in elements, weights, depth, start, y and its row distance, lanes of
the last vector, addend (with y's layout), whether to add it, whether to rectify.
"""


@kernel
def multiply_pixels(
    begin: Int,
    end: Int,
    x: Floats,
    depth: Int,
    packed: Floats,
    table: Words,
    panels: Int,
    start: Floats,
    y: Floats,
    outputs: Int,
    high: Int,
    many: Int,
    rest: Words,
    tiles: Int,
    block: Int,
    addend: Floats,
    adds: Int,
    relu: Int,
) -> None:
    """Items are tiles: the tiles of a block for the first panel, then for the next panel, and so on; then other blocks.

    `many` tiles have `high` rows, followed by those of `rest`: (first row, rows).
    """
    # Items of one panel are neighbours, so a thread's items share a panel's weights for as long as possible. A range
    # may begin and end within a panel.
    item = begin
    while item < end:
        number = item // (block * panels)
        first = number * block
        count = min(block, tiles - first)
        panel, skipped = (item - first * panels) // count, (item - first * panels) % count
        stop = min(count, skipped + end - item)
        vectors, column, last = table[4 * panel], table[4 * panel + 1], table[4 * panel + 3]
        weights, begins = ahead(packed, table[4 * panel + 2]), ahead(start, column)
        for tile in range(first + skipped, first + stop):
            row, rows = tile * high, high
            if tile >= many:
                row, rows = rest[2 * (tile - many)], rest[2 * (tile - many) + 1]
            at = row * outputs + column
            _tile(
                rows,
                vectors,
                ahead(x, row * depth),
                depth,
                weights,
                depth,
                begins,
                ahead(y, at),
                outputs,
                last,
                ahead(addend, at),
                adds,
                relu,
            )
        item += stop - skipped


def _cost(rows: int) -> float:
    """Return the cycles of a step of the widest tile, including a share of the tile's fixed cost."""
    return max(WIDEST * rows * WIDTH / 16, 4) + 0.75  # a step waits for the previous one; there are two units


@cache
def heights(rows: int) -> tuple[int, ...]:
    """Return the row counts of tiles that minimise the cycles, the most frequent first."""
    # The cheapest division of `total` rows is a tile and the cheapest division of the others.
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for total in range(1, rows + 1):
        choices = [(best[total - h][0] + _cost(h), (h, *best[total - h][1])) for h in HEIGHTS if h <= total]
        best.append(min(choices))
    return tuple(sorted(best[rows][1], reverse=True))


class Cut(NamedTuple):
    """Rows divided into tiles.

    Args:
        high: rows of the first tiles.
        many: number of these tiles.
        rest: (first row, rows) of the others.
        tiles: total number.
    """

    high: int
    many: int
    rest: ConstantTable
    tiles: int


@lru_cache(maxsize=1024)
def cut(rows: int) -> Cut:
    """Return tiles that cover this many rows."""
    high = max(HEIGHTS, key=lambda h: (-_cost(h) / h, -h))
    # The search over heights gets the last rows only: it is quadratic, and a remainder of so many rows can be divided
    # without a partial tile.
    many = max(0, (rows - MIN_EVEN_ROWS) // high)
    others = heights(rows - many * high)
    first = many * high + np.cumsum([0, *others])[:-1]
    return Cut(high, many, extended(np.stack([first, others], axis=-1)), many + len(others))


@lru_cache(maxsize=1024)
def block_of(tiles: int, rows: int, depth: int, threads: int) -> int:
    """Return the tiles per block: one block whose panels are divided among threads, or one block per thread."""
    wanted = min(MAX_ROWS, max(MIN_ROWS, BLOCK // depth))
    blocks = -(-rows // wanted)
    if threads > 1 and rows >= MIN_ROWS * threads / 2:
        # As many blocks for each thread: an odd one would be waited for.
        blocks = -(-blocks // threads) * threads
    return -(-tiles // blocks)


def _widths(columns: int) -> tuple[int, ...]:
    """Return the vectors of each panel: the widest, and two of two instead of a single vector."""
    vectors = -(-columns // WIDTH)
    wide, left = divmod(vectors, WIDEST)
    if left == 1 and wide and WIDEST == 3:
        return (3,) * (wide - 1) + (2, 2)
    return (WIDEST,) * wide + ((left,) if left else ())


class PixelProduct:
    """A planned product of any number of rows with weights of one size.

    Args:
        depth: elements of a row.
        columns: elements of a result row.
        packing: memory layout of the weights.
    """

    def __init__(self, depth: int, columns: int, packing: WeightPacking) -> None:
        self._panels = Panels(depth, columns, 0, widths=_widths(columns))
        self._packing = packing

    @property
    def packed_size(self) -> int:
        """Elements of packed weights."""
        return self._panels.size

    def pack(self, threads: int, weights: Any, packed: Any) -> None:
        """Pack weights in the tiles' order."""
        pack_weights(threads, self._panels, weights, self._packing, packed)

    def run(
        self, threads: int, rows: int, x: Any, packed: Any, start: Any, y: Any, addend: Any = None, relu: bool = False
    ) -> None:
        """Compute y."""
        panels, own = self._panels, cut(rows)
        multiply_pixels.run(
            threads,
            own.tiles * panels.count,
            max(1, GRAIN // panels.depth),
            x,
            panels.depth,
            packed,
            panels.table,
            panels.count,
            start,
            y,
            panels.columns,
            own.high,
            own.many,
            own.rest,
            own.tiles,
            block_of(own.tiles, rows, panels.depth, threads),
            y if addend is None else addend,
            int(addend is not None),
            int(relu),
        )


PACKED = 256 if WIDTH == 16 else 512
"""Minimum pixels for which packing the weights pays."""


def is_pixels(geometry: Geometry) -> bool:
    """Return whether windows are single, contiguous pixels that cover all pixels and channels."""
    g = geometry
    return math.prod(g.kernel) == 1 and all(stride == 1 for stride in g.stride) and not any(g.pad) and g.group == 1


def is_product(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Return whether windows tile the image without overlap and are too few to pack the weights."""
    g, sizes = geometry, x_shape[2:]
    if g.group > 1 or any(g.pad):
        return False
    pixels = is_pixels(geometry)
    windows = x_shape[0] * (math.prod(sizes) if pixels else 1)
    return (pixels or g.kernel == sizes) and windows < (min(PACKED, weights_shape[0]) if pixels else weights_shape[0])


class PixelConvolution(TileConvolution):
    """A planned convolution whose windows are the rows of a matrix."""

    @cached_property
    def _product(self) -> PixelProduct:
        depth = self.shape.depth
        return PixelProduct(depth, self.shape.outputs, WeightPacking(extended(np.arange(depth)), depth))

    @cached_property
    def _back(self) -> PixelProduct:
        depth, outputs = self.shape.depth, self.shape.outputs
        return PixelProduct(outputs, depth, WeightPacking(extended(np.arange(outputs) * depth), 1))

    @property
    def packed_size(self) -> int:
        return self._product.packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        self._product.pack(self.threads, weights, packed)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:
        assert sums is None, "gives no sums"
        start = self.zeros if bias is None else bias
        self._product.run(self.threads, y.size // self.shape.outputs, x, self.packed(weights), start, y, residual, relu)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        packed = self.workspace.take("weights", self._back.packed_size)
        self._back.pack(self.threads, weights, packed)
        self._back.run(self.threads, dy.size // self.shape.outputs, dy, packed, self.zeros, dx)


class ProductConvolution(PixelConvolution):
    """A product convolution that reads weights in place unless they are cached."""

    @cached_property
    def _gemm(self) -> Gemm:
        return Gemm(self.threads, self.workspace)

    def _matrix(self, array: Any, columns: int) -> Any:
        return memory_order(array).reshape(-1, columns)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:
        if self.kept_for(weights) is not None:  # in tile order, which is faster once it exists
            super().forward(x, weights, bias, y, relu, sums, residual)
            return
        assert sums is None, "gives no sums"
        note_host_work()
        shape = self.shape
        out = self._matrix(y, shape.outputs)
        self._gemm(self._matrix(x, shape.depth), self._matrix(weights, shape.depth).T, out, accumulate=False)
        if bias is not None:
            out += bias
        if residual is not None:
            y += residual
        if relu:
            np.maximum(out, 0, out=out)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        depth = self.shape.depth
        self._gemm(
            self._matrix(dy, self.shape.outputs),
            self._matrix(weights, depth),
            self._matrix(dx, depth),
            accumulate=False,
        )

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        depth = self.shape.depth
        self._gemm(
            self._matrix(dy, self.shape.outputs).T, self._matrix(x, depth), self._matrix(dweights, depth), accumulate
        )
