"""The innermost loop of matrix products and convolutions: one tile of the result in vector registers.

    c[r, j] = start[r, j] + sum over o, i of a[a_rows[r] + a_outer[o] + i * a_inner] * b[b_outer[o] + i * b_inner + j]

optionally followed by + addend[r, j] and max(., 0) before the store.

An element of `a` is broadcast to a vector, which multiplies vectors of `b`. Rows, outer and inner steps have arbitrary
offsets, so the same loop computes matrix products, convolutions straight from the image (no im2col) and their
gradients. Numba does not keep a tile in registers, so the loop is emitted as LLVM IR. It works on every processor that
numba supports and reaches 80 to 90 % of the peak on processors with AVX2.

Also defines the panels, as wide as a tile, of a product's columns, and the packing of weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, device_function, kernel
from caffepy.backend.cpu.jit.vector import WIDTH, Writer, ahead, copy_vectors, emitted, transpose_square

LONG, LONG_TALL = 32, 128
"""Inner steps above which each outer step has its own sum: sums of sums lose fewer bits than one long sum.

With 24 accumulators the previous sums must be spilled to memory.
"""
ROWS = {1: 8, 2: 6, 3: 4}
"""Rows of a tile by vectors: 12 accumulators (8 for the narrow tile) of 16 registers leave room for factors."""
TALL = {1: 12, 2: 12, 3: 8} if WIDTH == 16 else ROWS
"""Rows of a tall tile: 24 accumulators of 32 registers (AVX-512) leave room for the factors.

It reads b half as often. Tiles that read a from an image are faster with fewer rows, because the rows are far apart.
"""
TALL1, TALL2, TALL3 = TALL[1], TALL[2], TALL[3]
TOGETHER = 4
"""Contiguous rows of `a` in a tile of `FOURS`, which share one address."""
FOURS = {12: 6.5, 16: 8.5} if WIDTH == 16 else {}
"""Rows of single-vector tiles with few addresses, and their cycles per step.

Twelve addresses exceed the address registers: reloading them in each step costs as much as loading the elements.
"""


class _TileWriter(Writer):
    """Emits the tile's instructions."""

    def __init__(
        self, builder: Any, vectors: int, rows: int, arguments: Sequence[Any], width: int, together: int
    ) -> None:
        super().__init__(builder, width)
        self.rows, self.together = rows, together
        # A tall tile has 24 accumulators, so a separate sum for each outer step spills the total to memory (see LONG).
        # Only a long inner loop repays that.
        self.long = LONG if rows == ROWS[vectors] else LONG_TALL
        self.vectors = vectors
        (
            self.a,
            self.a_rows,
            self.a_outer,
            self.a_inner,
            self.b,
            self.b_outer,
            self.b_inner,
            self.outer,
            self.inner,
            self.start,
            self.keep,
            self.c,
            self.c_rows,
            self.count,
            self.last,
            self.addend,
            self.adds,
            self.relu,
        ) = arguments

    def _row(self, row: int) -> Any:
        """Rows beyond the count alias the first row, which is readable."""
        there = self.builder.icmp_signed("<", self.word(row), self.count)
        return self.builder.select(there, self.word(row), self.word(0))

    def _rows_of(self, source: Any, keep: Any, mask: Any) -> list[Any]:
        """Load the tile's elements of an array with c's row layout; one row for all if `keep` is 0."""
        sums = []
        for row in range(self.rows):
            offset = self.builder.mul(keep, self.table(self.c_rows, self._row(row)))
            for vector in range(self.vectors):
                address = self.vector_at(source, self.builder.add(offset, self.word(vector * self.width)))
                if vector == self.vectors - 1:
                    sums.append(self.masked_load(address, mask))
                else:
                    sums.append(self.builder.load(address, align=4))
        return sums

    def _step(self, a_places: list[Any], a_at: Any, b_at: Any, sums: list[Any]) -> list[Any]:
        # The columns stay in registers while each row's factor is broadcast against them: a step has `vectors` vector
        # loads and `rows` scalar loads for `rows * vectors` multiplications.
        columns = [
            self.builder.load(self.vector_at(self.b, self.builder.add(b_at, self.word(v * self.width))), align=4)
            for v in range(self.vectors)
        ]
        result = []
        for row in range(self.rows):
            # Two steps, because the second one is a constant: it becomes a part of the load's address, and `together`
            # rows need one address register.
            place = self.builder.gep(a_places[row // self.together], [a_at])
            place = self.builder.gep(place, [self.word(row % self.together)])
            factor = self.splat(self.builder.load(place, align=4))
            for vector in range(self.vectors):
                result.append(self.multiply_add(factor, columns[vector], sums[row * self.vectors + vector]))
        return result

    def _inner(self, addresses: list[Any]) -> Callable[..., Any]:
        def body(index: Any, _: list[Any], sums: list[Any]) -> list[Any]:
            at = [self.table(self.a_outer, index), self.table(self.b_outer, index)]

            def step(_: Any, at: list[Any], inside: list[Any]) -> list[Any]:
                result = self._step(addresses, at[0], at[1], inside)
                return [*result, self.builder.add(at[0], self.a_inner), self.builder.add(at[1], self.b_inner)]

            return self.loop(self.inner, sums, at, step)

        # An outer step is a row of the kernel or a part of K. Its own sum is rounded into the total once.
        def strided(index: Any, extra: list[Any], sums: list[Any]) -> list[Any]:
            part = body(index, extra, self._zeros())
            return [self.builder.fadd(total, more) for total, more in zip(sums, part, strict=True)]

        # Chosen at run time, because one compiled tile serves all shapes.
        def either(index: Any, extra: list[Any], sums: list[Any]) -> list[Any]:
            long = self.builder.icmp_signed(">=", self.inner, self.word(self.long))
            return self.choose(long, lambda: strided(index, extra, sums), lambda: body(index, extra, sums))

        return either

    def _zeros(self) -> list[Any]:
        return [ir.Constant(self.vector, [0.0] * self.width)] * (self.rows * self.vectors)

    def _sums(self, first: list[Any], second: list[Any]) -> list[Any]:
        return [self.builder.fadd(x, y) for x, y in zip(first, second, strict=True)]

    def _store_row(self, row: int, sums: list[Any], mask: Any) -> None:
        offset = self.table(self.c_rows, self.word(row))
        for vector in range(self.vectors - 1):
            address = self.vector_at(self.c, self.builder.add(offset, self.word(vector * self.width)))
            self.builder.store(sums[row * self.vectors + vector], address, align=4)
        # Only the last vector of a panel can have idle lanes (see `Panels`); the others need no mask.
        last = self.vector_at(self.c, self.builder.add(offset, self.word((self.vectors - 1) * self.width)))
        value = sums[(row + 1) * self.vectors - 1]
        self.store(value, last, self.last, mask)

    def write(self) -> None:
        mask = self.lanes(self.last)
        firsts = range(0, self.rows, self.together)
        addresses = [self.builder.gep(self.a, [self.table(self.a_rows, self.word(row))]) for row in firsts]
        sums = self.loop(self.outer, self._zeros(), [], self._inner(addresses))
        # The accumulators begin at zero, and bias and residual are added behind the sum: Caffe adds the bias last.
        # Another rounding decides near-ties of max pooling otherwise (docs/decisions/0003-cpu-kernels-by-numba.md).
        sums = self._sums(self._rows_of(self.start, self.keep, mask), sums)
        adds, rectifies = (self.builder.icmp_signed("!=", flag, self.word(0)) for flag in (self.adds, self.relu))
        sums = self.choose(adds, lambda: self._sums(self._rows_of(self.addend, self.word(1), mask), sums), lambda: sums)
        sums = self.choose(rectifies, lambda: [self.rectified(total) for total in sums], lambda: sums)
        # Rows beyond the count were computed from the first row's elements (see `_row`); they are dropped here.
        for row in range(self.rows):
            with self.builder.if_then(self.builder.icmp_signed("<", self.word(row), self.count)):
                self._store_row(row, sums, mask)


def _tile(vectors: int, rows: int, width: int = WIDTH, together: int = 1) -> Any:
    def write(builder: Any, *arguments: Any) -> None:
        _TileWriter(builder, vectors, rows, arguments, width, together).write()

    return emitted("pttwptwwwpwptwwpww", write)


HALF = WIDTH // 2 if WIDTH == 16 else 0
"""Maximum lanes of a last vector for which single-vector tiles use half vectors: this halves the multiplications' time
on processors with two half-vector units, and costs no more elsewhere."""
LAST = 14
"""Number of the operand `last` of a tile."""


def _tile_function(name: str, rows: dict[int, int]) -> Any:
    """Return a function, callable by kernels, that emits a tile of 1, 2 or 3 vectors, or a half one, with these rows.

    Its name identifies it in the cached machine code.
    """
    tile1, tile2, tile3 = (_tile(vectors, many) for vectors, many in rows.items())
    half_tile = _tile(1, rows[1], HALF or WIDTH)

    def any_tile(vectors: Any, *operands: Any) -> None:
        if vectors == 2:
            tile2(*operands)
        elif vectors == 3:
            tile3(*operands)
        elif operands[LAST] <= HALF:
            half_tile(*operands)
        else:
            tile1(*operands)

    any_tile.__name__ = any_tile.__qualname__ = name
    return device_function(any_tile)


tile, tall_tile = _tile_function("tile", ROWS), _tile_function("tall_tile", TALL)
"""Tiles of `vectors` vectors with the rows of `ROWS` and `TALL`. Their other operands are the ones that `_TileWriter`
names, in that order. Tables are int64. `start` is indexed by c's row offset
times `keep` (0 or 1): one row for all (zeros, bias) or c itself. `count` rows and `last` lanes of the last vector are
written. If `adds` is not 0, the rows of `addend`, with c's layout, are added. If `relu` is not 0, the result is
rectified."""


_FEW, _MANY = list(FOURS) or [ROWS[1], ROWS[1]]
_few, _many = (_tile(1, rows, WIDTH, TOGETHER) for rows in (_FEW, _MANY))
_half_few, _half_many = (_tile(1, rows, HALF or WIDTH, TOGETHER) for rows in (_FEW, _MANY))


@device_function
def tile_of_fours(rows: Any, *operands: Any) -> None:
    """As `tall_tile` for one vector and a row count in `FOURS`; only every fourth of `a_rows` is read."""
    if rows == _MANY:
        if operands[LAST] <= HALF:
            _half_many(*operands)
        else:
            _many(*operands)
    elif operands[LAST] <= HALF:
        _half_few(*operands)
    else:
        _few(*operands)


def rows_of_fours(rows: int, run: int) -> int:
    """Return the rows of `tile_of_fours` for rows that are contiguous in runs of `run`; 0: do not use it."""
    choices = FOURS if run % TOGETHER == 0 else {}
    return min(choices, key=lambda high: choices[high] * -(-rows // high), default=0)


COST = {1: 4.5, 2: 6.0, 3: 6.0}
"""Cycles of a tile's step by number of vectors: bound by loads in the narrow tile, else by multiplications."""
COST_TALL = {1: 6.5, 2: 12.0, 3: 12.0} if WIDTH == 16 else COST
"""Cycles of a tall tile's step."""


SPARE = 16
"""Padding entries of tables, because tiles read whole."""


def extended(table: Any) -> ConstantTable:
    """Return a table as int64, padded with its last entry for tiles that read beyond the end."""
    flat = np.asarray(table, np.int64).reshape(-1)
    if not flat.size:
        return ConstantTable(np.zeros(SPARE, np.int64))
    return ConstantTable(np.concatenate([flat, np.repeat(flat[-1:], SPARE)]))


@cache
def panel_vectors(columns: int, rows: int, tall: bool = False) -> tuple[int, ...]:
    """Return the vectors of each panel that minimise the cycles for `rows` by `columns`, including idle lanes."""
    vectors = -(-columns // WIDTH)
    choices = []
    # At most one single panel: single tiles are bound by loads (see COST), so a second one never pays.
    for threes in range(vectors // 3 + 1):
        rest = vectors - 3 * threes
        choices.append((3,) * threes + (2,) * (rest // 2) + (1,) * (rest % 2))
    half = 0 < (columns - 1) % WIDTH + 1 <= HALF
    # Of two single panels the second one can be a half vector; a panel of two vectors has whole ones.
    if half and vectors == 2:
        choices.append((1, 1))
    cost, high = (COST_TALL, TALL) if tall else (COST, ROWS)

    def cycles(panels: tuple[int, ...]) -> float:
        own = [cost[v] * -(-rows // high[v]) for v in panels]
        return sum(own) - (own[-1] / 2 if half and panels[-1] == 1 else 0)

    return min(choices, key=cycles)


class Panels:
    """The panels of a factor of `depth` rows by `columns` columns, to be multiplied by a factor of `rows` rows.

    The widths suit tiles or, with `tall`, tall tiles; `widths` overrides them.

    Attributes:
        entries: int64 (panels, 4): vectors, first column, start in the packed buffer, lanes of the last vector.
        size: elements of the packed buffer.
    """

    def __init__(
        self, depth: int, columns: int, rows: int, tall: bool = False, widths: tuple[int, ...] | None = None
    ) -> None:
        entries, column, start = [], 0, 0
        for vectors in panel_vectors(columns, rows, tall) if widths is None else widths:
            last = min(WIDTH, columns - column - (vectors - 1) * WIDTH)
            entries.append((vectors, column, start, last))
            column += vectors * WIDTH
            start += vectors * WIDTH * depth
        self.entries = np.array(entries, np.int64).reshape(-1, 4)
        self.table = ConstantTable(self.entries)
        self.count = len(entries)
        self.size = start
        self.depth = depth
        self.columns = columns


@kernel
def pack(
    begin: Int,
    end: Int,
    source: Floats,
    rows: Words,
    depth: Int,
    step: Int,
    group_step: Int,
    packed: Floats,
    size: Int,
    table: Words,
    panels: Int,
    columns: Int,
    width: Int,
) -> None:
    """Element (k, j) is at rows[k] + j * step. Items are (group, panel); columns beyond the last are zero."""
    for item in range(begin, end):
        group = item // panels
        panel = 4 * (item % panels)
        wide = table[panel] * width
        first = table[panel + 1]
        target = group * size + table[panel + 2]
        inside = min(wide, columns - first)
        turned = 0
        # Filters lie one behind another, so neighbours in a panel are `step` elements apart: element by element, each
        # one would touch a cache line of its own. Where WIDTH rows are contiguous in the source, squares are transposed
        # in registers, and whole cache lines are used.
        if step != 1 and inside == wide:  # squares to transpose
            while turned + width <= depth and rows[turned + width - 1] - rows[turned] == width - 1:
                origin = group * group_step + rows[turned] + first * step
                for j in range(0, wide, width):
                    square = ahead(packed, target + turned * wide + j)
                    transpose_square(ahead(source, origin + j * step), step, square, wide)
                turned += width
        for k in range(turned, depth):
            origin = group * group_step + rows[k] + first * step
            if step == 1:  # a vectorisable copy
                for j in range(inside):
                    packed[target + k * wide + j] = source[origin + j]
            else:
                for j in range(inside):
                    packed[target + k * wide + j] = source[origin + j * step]
            for j in range(inside, wide):
                packed[target + k * wide + j] = 0


@kernel
def pack_rows(
    begin: Int,
    end: Int,
    source: Floats,
    rows: Words,
    order: Words,
    depth: Int,
    group_step: Int,
    packed: Floats,
    size: Int,
    table: Words,
    panels: Int,
    columns: Int,
    width: Int,
) -> None:
    """As `pack` for contiguous columns. Items are (group, row), with rows in source order."""
    for item in range(begin, end):
        group, k = item // depth, order[item % depth]
        origin = group * group_step + rows[k]
        # One row goes to all panels: the source, which is large, is read once and in order; the scattered accesses are
        # writes.
        for panel in range(0, 4 * panels, 4):
            vectors, first = table[panel], table[panel + 1]
            wide = vectors * width
            to = group * size + table[panel + 2] + k * wide
            inside = min(wide, columns - first)
            if inside == wide:
                copy_vectors(ahead(source, origin + first), ahead(packed, to), vectors)
            else:
                for j in range(inside):
                    packed[to + j] = source[origin + first + j]
                # Tiles multiply whole vectors: a lane without a column must hold a number that is harmless.
                for j in range(inside, wide):
                    packed[to + j] = 0


@dataclass(frozen=True)
class WeightPacking:
    """Memory layout of the weights to pack, in elements.

    Args:
        rows: offset of each row (an element of the sum).
        step: distance of columns.
        groups: number of weight groups.
        group_step: distance of groups.
        order: rows in source order, if different; large weights are read in this order.
    """

    rows: Any
    step: int
    groups: int = 1
    group_step: int = 0
    order: Any = None


def pack_weights(threads: int, panels: Panels, source: Any, packing: WeightPacking, packed: Any) -> None:
    """Pack the weights of all groups into panels."""
    if packing.order is not None and packing.step == 1:
        pack_rows.run(
            threads,
            packing.groups * panels.depth,
            max(1, 4096 // max(1, panels.columns)),
            source,
            packing.rows,
            packing.order,
            panels.depth,
            packing.group_step,
            packed,
            panels.size,
            panels.table,
            panels.count,
            panels.columns,
            WIDTH,
        )
        return
    pack.run(
        threads,
        packing.groups * panels.count,
        max(1, 4096 // max(1, panels.depth * WIDTH)),
        source,
        packing.rows,
        panels.depth,
        packing.step,
        packing.group_step,
        packed,
        panels.size,
        panels.table,
        panels.count,
        panels.columns,
        WIDTH,
    )
