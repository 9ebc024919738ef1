"""Convolutions that are matrix products without im2col: 1x1 kernels, or a kernel as large as the image.

Convolutions of single pixels are products of a matrix whose rows follow each other and packed weights:

    y[p, j] = start[j] + sum over k of x[p, k] * w[k, j] (+ addend[p, j]), perhaps rectified

The tiles of `gemm.py` look up where their rows lie and what they leave out, which takes a good part of the time of 32
channels. Here rows lie evenly apart, and tiles have as many rows as leave none over: 49 pixels are seven tiles, of
eight, seven and two rows, not thirteen of four.
"""

from __future__ import annotations

import itertools
import math
from functools import cache, cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.dense import Gemm
from caffepy.backend.cpu.gemm import Panels, WeightPacking, extended, pack_weights
from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.kernel_graph import note_host_work
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, WORD, Writer, ahead
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Geometry

HEIGHTS = (8, 7, 6, 4, 2, 1) if WIDTH == 16 else (6, 5, 4, 2, 1)
"""Rows that a tile may have."""
WIDEST = 3 if WIDTH == 16 else 2
"""Vectors of a panel: 24 sums leave registers, of 32 with vectors of 16, for the factors; 12 of 16 otherwise."""
MIN_EVEN_ROWS = 64
"""Rows from which tiles of one height are taken, and of the others only as many as the rest needs."""
BLOCK = 2**16
"""Elements of x that pass over all panels together: with a panel they stay in the second cache."""
MIN_ROWS, MAX_ROWS = 96, 192
"""Rows of a block: with fewer weights are read too often from a cache that cores share."""
GRAIN = 1024
"""Steps of tiles below which a second thread costs more than it saves."""


class _PixelsWriter(Writer):
    """Writes the instructions of a tile."""

    def __init__(self, builder: Any, arguments: list[Any]) -> None:
        super().__init__(builder)
        (
            self.x, self.x_step, self.weights, self.depth, self.start, self.y, self.y_step, self.last, self.addend,
            self.adds, self.relu,
        ) = arguments  # fmt: skip

    def _vectors(self, row: Any, vectors: int, mask: Any) -> list[Any]:
        """Vectors that follow each other in memory, of the last one what the mask says."""
        whole = [self.builder.load(self.vector_at(row, self.word(v * WIDTH)), align=4) for v in range(vectors - 1)]
        return [*whole, self.masked_load(self.vector_at(row, self.word((vectors - 1) * WIDTH)), mask)]

    def _products(self, rows: int, vectors: int) -> list[Any]:
        """The sums over the depth."""
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
        """The tile: products, and what is done to them on the way to memory."""
        builder, mask = self.builder, self.lanes(self.last)
        sums, start = self._products(rows, vectors), self._vectors(self.start, vectors, mask)
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


@intrinsic
def _tile(  # noqa: PLR0913 -- a kernel
    typing_context: Any, rows: Any, vectors: Any, x: Any, x_step: Any, weights: Any, depth: Any, start: Any, y: Any,
    y_step: Any, last: Any, addend: Any, adds: Any, relu: Any,
) -> Any:  # fmt: skip
    """A tile of one of `HEIGHTS` and of up to `WIDEST` vectors; any others are none.

    Arguments behind its size: x and the elements from row to row, weights, depth, start, y and the elements from row to
    row, lanes of the last vector, addend (lies as y does), whether it is added, whether the result is rectified.
    """
    numbers, word = types.CPointer(types.float32), types.int64
    kinds = [word, word, numbers, word, numbers, word, numbers, numbers, word, word, numbers, word, word]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        number = builder.add(builder.mul(arguments[0], ir.Constant(WORD, WIDEST + 1)), arguments[1])
        done = builder.append_basic_block("tile.end")
        switch = builder.switch(number, done)
        for rows, vectors in itertools.product(HEIGHTS, range(1, WIDEST + 1)):
            block = builder.append_basic_block(f"tile.{rows}.{vectors}")
            switch.add_case(ir.Constant(WORD, rows * (WIDEST + 1) + vectors), block)
            builder.position_at_end(block)
            _PixelsWriter(builder, list(arguments[2:])).write(rows, vectors)
            builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return types.void(*kinds), generate


@kernel
def multiply_pixels(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, depth: Int, packed: Floats, table: Words, panels: Int, start: Floats, y: Floats,
    outputs: Int, high: Int, many: Int, rest: Words, tiles: Int, block: Int, addend: Floats, adds: Int, relu: Int,
) -> None:  # fmt: skip
    """Items are tiles: those of a block that meet the first panel, then the next panel, and so on; then other blocks.

    `many` tiles have `high` rows, then come those of `rest`: (first row, rows).
    """
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
                rows, vectors, ahead(x, row * depth), depth, weights, depth, begins, ahead(y, at), outputs, last,
                ahead(addend, at), adds, relu,
            )  # fmt: skip
        item += stop - skipped


def _cost(rows: int) -> float:
    """Cycles of a step of the widest tile, and a share of those that each tile costs beside its steps."""
    return max(WIDEST * rows * WIDTH / 16, 4) + 0.75  # a step waits for the one before, and there is a second unit


@cache
def heights(rows: int) -> tuple[int, ...]:
    """The rows of each tile, for the fewest cycles; those of which there are most come first."""
    best: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    for total in range(1, rows + 1):
        choices = [(best[total - h][0] + _cost(h), (h, *best[total - h][1])) for h in HEIGHTS if h <= total]
        best.append(min(choices))
    return tuple(sorted(best[rows][1], reverse=True))


class Cut(NamedTuple):
    """Rows cut into tiles.

    Args:
        high: rows of the first tiles.
        many: how many these are.
        rest: (first row, rows) of the others.
        tiles: how many there are in all.
    """

    high: int
    many: int
    rest: ConstantTable
    tiles: int


@lru_cache(maxsize=1024)
def cut(rows: int) -> Cut:
    """Tiles that cover so many rows."""
    high = max(HEIGHTS, key=lambda h: (-_cost(h) / h, -h))
    many = max(0, (rows - MIN_EVEN_ROWS) // high)
    others = heights(rows - many * high)
    first = many * high + np.cumsum([0, *others])[:-1]
    return Cut(high, many, extended(np.stack([first, others], axis=-1)), many + len(others))


@lru_cache(maxsize=1024)
def block_of(tiles: int, rows: int, depth: int, threads: int) -> int:
    """Tiles of a block: of one that threads share by panels, or of as many for each thread."""
    wanted = min(MAX_ROWS, max(MIN_ROWS, BLOCK // depth))
    blocks = -(-rows // wanted)
    if threads > 1 and rows >= MIN_ROWS * threads / 2:
        blocks = -(-blocks // threads) * threads
    return -(-tiles // blocks)


def _widths(columns: int) -> tuple[int, ...]:
    """Vectors of each panel: the widest, and none of a single vector where two of two can be."""
    vectors = -(-columns // WIDTH)
    wide, left = divmod(vectors, WIDEST)
    if left == 1 and wide and WIDEST == 3:
        return (3,) * (wide - 1) + (2, 2)
    return (WIDEST,) * wide + ((left,) if left else ())


class PixelProduct:
    """The product of any number of rows and weights of one size, planned.

    Args:
        depth: elements of a row.
        columns: elements of a row of the result.
        packing: where the weights lie.
    """

    def __init__(self, depth: int, columns: int, packing: WeightPacking) -> None:
        self._panels = Panels(depth, columns, 0, widths=_widths(columns))
        self._packing = packing

    @property
    def packed_size(self) -> int:
        """Elements of packed weights."""
        return self._panels.size

    def pack(self, threads: int, weights: Any, packed: Any) -> None:
        """Bring weights into the order of the tiles."""
        pack_weights(threads, self._panels, weights, self._packing, packed)

    def run(  # noqa: PLR0913 -- a kernel's
        self, threads: int, rows: int, x: Any, packed: Any, start: Any, y: Any, addend: Any = None, relu: bool = False
    ) -> None:  # fmt: skip
        """Compute y."""
        panels, own = self._panels, cut(rows)
        multiply_pixels.run(
            threads, own.tiles * panels.count, max(1, GRAIN // panels.depth), x, panels.depth, packed, panels.table,
            panels.count, start, y, panels.columns, own.high, own.many, own.rest, own.tiles,
            block_of(own.tiles, rows, panels.depth, threads), y if addend is None else addend, int(addend is not None),
            int(relu),
        )  # fmt: skip


PACKED = 256 if WIDTH == 16 else 512
"""Single pixels from which packed weights are read so often that it pays to pack them."""


def is_pixels(geometry: Geometry) -> bool:
    """Whether windows are single pixels that follow each other, and all of them, with all their channels."""
    g = geometry
    return math.prod(g.kernel) == 1 and all(stride == 1 for stride in g.stride) and not any(g.pad) and g.group == 1


def is_product(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether windows do not overlap and fill the image, and there are too few of them to pack the weights for."""
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
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        start = self.zeros if bias is None else bias
        self._product.run(
            self.threads, y.size // self.shape.outputs, x, self.packed(weights), start, y, residual, relu
        )  # fmt: skip

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        packed = self.workspace.take("weights", self._back.packed_size)
        self._back.pack(self.threads, weights, packed)
        self._back.run(self.threads, dy.size // self.shape.outputs, dy, packed, self.zeros, dx)


class ProductConvolution(PixelConvolution):
    """One whose weights, when they are not kept, are read where they lie."""

    @cached_property
    def _gemm(self) -> Gemm:
        return Gemm(self.threads, self.workspace)

    def _matrix(self, array: Any, columns: int) -> Any:
        return memory_order(array).reshape(-1, columns)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        if self.kept_for(weights) is not None:  # in the order of tiles, which is the faster one once it is there
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
            self._matrix(dy, self.shape.outputs), self._matrix(weights, depth), self._matrix(dx, depth),
            accumulate=False,
        )  # fmt: skip

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        depth = self.shape.depth
        self._gemm(
            self._matrix(dy, self.shape.outputs).T, self._matrix(x, depth), self._matrix(dweights, depth), accumulate
        )  # fmt: skip
