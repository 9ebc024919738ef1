"""Matrix products on the CPU, in register tiles, on the kernels' thread pool.

The smaller factor is packed into panels as wide as a tile; the larger one is read in place. Inner products of a small
batch are bound by the memory traffic of the weights, so each weight is read once and each gradient written once.

Products of a matrix and few vectors, all contiguous along K (an inner product layer with one to four images),

    c[j, v] (+)= sum over k of w[j, k] * x[v, k]

have their own kernel. The tile of `microkernel.py` holds results in its lanes, so with one image all lanes but one
would be idle. Here the lanes split K, and the time is that of reading the weights once.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir

from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel, note_host_work
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer, ahead, copy_vectors, emitted, table_at
from caffepy.backend.cpu.memory import CpuMemory, Workspace
from caffepy.backend.cpu.microkernel import COST, ROWS, Panels, WeightPacking, extended, pack_weights, tile
from caffepy.backend.interface import DensePrimitives
from caffepy.backend.types import Array

DOT_ROWS = 4
"""Matrix rows read side by side."""
MAX_VECTORS = 4
"""Maximum vectors for which dots are faster than tiles."""
_SPAN = 2
"""Vector registers per row and step: enough independent sums to hide multiply-add latency."""


class _DotsWriter(Writer):
    """Emits the dot products of four rows with one vector."""

    def __init__(self, builder: Any, arguments: Sequence[Any]) -> None:
        super().__init__(builder)
        self.w, self.w_step, self.count, self.x, self.depth, self.c, self.c_step, self.accumulate = arguments

    def _row(self, row: int) -> Any:
        """Return the address of a row; rows beyond the count alias the first."""
        there = self.builder.icmp_signed("<", self.word(row), self.count)
        index = self.builder.select(there, self.word(row), self.word(0))
        return self.builder.gep(self.w, [self.builder.mul(index, self.w_step)])

    def _step(self, rows: list[Any], sums: list[Any], begin: Any, load: Any) -> list[Any]:
        result = []
        for span in range(len(sums) // DOT_ROWS):
            at = self.builder.add(begin, self.word(span * WIDTH))
            # Loaded once for the four rows.
            x = load(self.vector_at(self.x, at))
            for row in range(DOT_ROWS):
                result.append(self.multiply_add(load(self.vector_at(rows[row], at)), x, sums[span * DOT_ROWS + row]))
        return result

    def _total(self, vector: Any) -> Any:
        """Return the horizontal sum of the lanes, by pairwise halving."""
        half = WIDTH // 2
        while half:
            moved = [lane + half if lane < half else 0 for lane in range(WIDTH)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), moved)
            vector = self.builder.fadd(vector, self.builder.shuffle_vector(vector, vector, mask))
            half //= 2
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    def write(self) -> None:
        builder = self.builder
        rows = [self._row(row) for row in range(DOT_ROWS)]
        zeros = [ir.Constant(VECTOR, [0.0] * WIDTH)] * (DOT_ROWS * _SPAN)
        step = _SPAN * WIDTH

        def whole(index: Any, _: list[Any], sums: list[Any]) -> list[Any]:
            begin = builder.mul(index, self.word(step))
            return self._step(rows, sums, begin, lambda address: builder.load(address, align=4))

        steps = builder.sdiv(self.depth, self.word(step))
        sums = self.loop(steps, zeros, [], whole)
        # The spans of a row had sums of their own, so that a multiplication does not wait for the one before it. The
        # rest has too few steps for that.
        sums = [builder.fadd(sums[row], sums[DOT_ROWS + row]) for row in range(DOT_ROWS)]

        def rest(index: Any, _: list[Any], sums: list[Any]) -> list[Any]:
            begin = builder.add(builder.mul(steps, self.word(step)), builder.mul(index, self.word(WIDTH)))
            # Masked lanes are zero in both factors, and reads beyond the end of a row, which may be the end of the
            # array, are avoided.
            mask = self.lanes(builder.sub(self.depth, begin))
            return self._step(rows, sums, begin, lambda address: self.masked_load(address, mask))

        left = builder.sub(self.depth, builder.mul(steps, self.word(step)))
        count = builder.sdiv(builder.add(left, self.word(WIDTH - 1)), self.word(WIDTH))
        for row, total in enumerate(self.loop(count, sums, [], rest)):
            with builder.if_then(builder.icmp_signed("<", self.word(row), self.count)):
                self._store(row, self._total(total))

    def _store(self, row: int, total: Any) -> None:
        address = self.builder.gep(self.c, [self.builder.mul(self.word(row), self.c_step)])
        adds = self.builder.icmp_signed("!=", self.accumulate, self.word(0))
        zero = ir.Constant(ir.FloatType(), 0.0)
        [before] = self.choose(adds, lambda: [self.builder.load(address, align=4)], lambda: [zero])
        self.builder.store(self.builder.fadd(before, total), address, align=4)


_four_dots = emitted("pwwpwpww", lambda builder, *arguments: _DotsWriter(builder, arguments).write())
"""c[r * c_step] (+)= dot product of row r and x, for up to four rows.

Arguments: w and its row distance, the number of rows, x, the depth, c and its row distance, whether to add to c.
"""


@kernel
def dots(
    begin: Int,
    end: Int,
    w: Floats,
    w_step: Int,
    rows: Int,
    x: Floats,
    x_step: Int,
    vectors: Int,
    depth: Int,
    c: Floats,
    c_row: Int,
    c_vector: Int,
    accumulate: Int,
    items: Int,
) -> None:
    """c (+)= w @ x transposed. Items are parts of the rows."""
    groups = (rows + 3) // 4
    for item in range(begin, end):
        for group in range(item * groups // items, (item + 1) * groups // items):
            row = 4 * group
            # All vectors use a group of rows while it is in the cache: the weights come from memory once.
            for v in range(vectors):
                _four_dots(
                    ahead(w, row * w_step),
                    w_step,
                    min(4, rows - row),
                    ahead(x, v * x_step),
                    depth,
                    ahead(c, row * c_row + v * c_vector),
                    c_row,
                    accumulate,
                )


GROUP = 24
"""Rows per pass over the panels, a multiple of every tile's rows."""
DEPTH = 256
"""K block size. Sums of blocks lose fewer bits than one long sum."""
SMALL = 128 * 1024
"""Elements of a packed factor that fit the L2 cache."""
BLOCK = 240
"""Approximate columns to pack at a time from a large factor."""
CACHED = 2**22
"""Elements above which a factor comes from memory, which prefetches well only if few rows are read side by side."""
_ZEROS = ConstantTable(np.zeros(4 * WIDTH, np.float32))
_NO_OFFSET = ConstantTable(np.zeros(1, np.int64))


@kernel
def product_by_rows(
    begin: Int,
    end: Int,
    a: Floats,
    a_step: Int,
    a_rows: Words,
    strip: Floats,
    strip_rows: Words,
    packed: Floats,
    table: Words,
    panels: Int,
    width: Int,
    depth: Int,
    part: Int,
    no_offset: Words,
    c: Floats,
    c_rows: Words,
    accumulate: Int,
    zeros: Floats,
    rows: Int,
    group: Int,
    groups: Int,
    items: Int,
) -> None:
    """c (+)= a * packed. Items are parts of the row groups; `strip` holds a transposed group if K is not contiguous."""
    for item in range(begin, end):
        for g in range(item * groups // items, (item + 1) * groups // items):
            first = g * group
            # The sum of a part of K is rounded into c, and the next part adds to it (`keep`): see DEPTH.
            for k in range(0, depth, part):
                height = min(part, depth - k)
                keep = 1 if accumulate == 1 or k > 0 else 0
                source = ahead(a, k * a_step)
                offsets, step = table_at(a_rows, first), a_step
                # A tile walks along K in steps of `step`. If K is not contiguous, its loads would be far apart: a group
                # of rows is turned into a strip first, and all panels read the strip.
                if a_step != 1:
                    step = group
                    copy = ahead(strip, item * part * group)
                    for i in range(height):
                        for r in range(min(group, rows - first)):
                            copy[i * group + r] = source[i * a_step + a_rows[first + r]]
                    source, offsets = copy, strip_rows
                for panel in range(panels):
                    vectors = table[4 * panel]
                    wide = vectors * width
                    weights = ahead(packed, table[4 * panel + 2] + k * wide)
                    # ROWS, which compiled code cannot index.
                    high = 6 if vectors == 2 else (4 if vectors == 3 else 8)
                    for r in range(0, min(group, rows - first), high):
                        target = ahead(c, c_rows[first + r] + table[4 * panel + 1])
                        begins = target if keep == 1 else zeros
                        tile(
                            vectors,
                            source,
                            table_at(offsets, r),
                            no_offset,
                            step,
                            weights,
                            no_offset,
                            wide,
                            1,
                            height,
                            begins,
                            keep,
                            target,
                            c_rows,
                            rows - first - r,
                            table[4 * panel + 3],
                            zeros,
                            0,
                            0,
                        )


@kernel
def product_by_columns(
    begin: Int,
    end: Int,
    a: Floats,
    a_rows: Words,
    a_step: Int,
    rows: Int,
    b: Floats,
    b_step: Int,
    columns: Int,
    packed: Floats,
    vectors: Int,
    width: Int,
    depth: Int,
    part: Int,
    no_offset: Words,
    c: Floats,
    c_rows: Words,
    accumulate: Int,
    zeros: Floats,
    high: Int,
    block: Int,
    blocks: Int,
    items: Int,
    direct: Int,
) -> None:
    """c (+)= a * b, b contiguous along its columns. Items are parts of the column blocks.

    With `direct`, whole panels are read in place instead of being packed.
    """
    wide = vectors * width
    for item in range(begin, end):
        buffer = ahead(packed, item * part * block)
        for number in range(item * blocks // items, (item + 1) * blocks // items):
            first = number * block
            stop = min(first + block, columns)
            # A whole block is packed for one part of K and then used by all rows of a, while it is cached.
            for k in range(0, depth, part):
                height = min(part, depth - k)
                keep = 1 if accumulate == 1 or k > 0 else 0
                # In place, only the last panel is packed: tiles load whole vectors, which would reach beyond the end of
                # b. The lanes behind its columns hold anything; they are not stored.
                start = stop // wide * wide if direct == 1 else first
                for i in range(height):
                    for j in range(start, stop, wide):
                        source = (k + i) * b_step + j
                        target = (j - first) * height + i * wide
                        if j + wide <= stop:
                            copy_vectors(ahead(b, source), ahead(buffer, target), vectors)
                        else:
                            for v in range(stop - j):
                                buffer[target + v] = b[source + v]
                for j in range(first, stop, wide):
                    inside = min(wide, stop - j)
                    used = (inside + width - 1) // width
                    panel, step = ahead(buffer, (j - first) * height), wide
                    if direct == 1 and inside == wide:
                        panel, step = ahead(b, k * b_step + j), b_step
                    for r in range(0, rows, high):
                        target_at = ahead(c, c_rows[r] + j)
                        begins = target_at if keep == 1 else zeros
                        tile(
                            used,
                            ahead(a, k * a_step),
                            table_at(a_rows, r),
                            no_offset,
                            a_step,
                            panel,
                            no_offset,
                            step,
                            1,
                            height,
                            begins,
                            keep,
                            target_at,
                            c_rows,
                            min(high, rows - r),
                            inside - (used - 1) * width,
                            zeros,
                            0,
                            0,
                        )


@kernel
def transpose(
    begin: Int, end: Int, source: Floats, source_row: Int, target: Floats, target_row: Int, rows: Int, accumulate: Int
) -> None:
    """target[j, r] (+)= source[r, j]. Items are blocks of 16 r."""
    for item in range(begin, end):
        first = item * 16
        stop = min(first + 16, rows)
        for j in range(source_row):
            for r in range(first, stop):
                value = source[r * source_row + j]
                offset = j * target_row + r
                target[offset] = target[offset] + value if accumulate == 1 else value


@lru_cache(maxsize=1024)
def _offsets(count: int, step: int) -> ConstantTable:
    """Return offsets of rows `step` elements apart, padded by repeating the last, because tiles read beyond it."""
    return extended(np.arange(count) * step)


@lru_cache(maxsize=1024)
def _panels(depth: int, columns: int, rows: int) -> Panels:
    return Panels(depth, columns, rows)


@lru_cache(maxsize=1024)
def even_block(columns: int, panel: int, about: int, threads: int) -> int:
    """Return a block's columns: whole panels, near `about`, with an even load of all threads."""
    # Counts of blocks around the wanted one are tried: the longest share decides, and of equal ones the block nearest
    # to `about`.
    rounds = -(-columns // (about * threads))
    blocks = [-(-columns // (count * threads * panel)) * panel for count in range(max(1, rounds - 1), rounds + 3)]
    return min(
        (block for block in blocks if block <= about + 2 * panel),
        key=lambda block: (-(-columns // (block * threads)) * block, abs(block - about)),
    )


def _direct_rows(rows: int, size: int) -> int:
    """Return the rows of b per block that are read in place, given the rows of a and the size of b."""
    if size <= CACHED:
        return 32
    return 8 if rows <= 8 else 16


def _strides(matrix: Any) -> tuple[int, int]:
    """Return strides in elements; an axis of size one counts as contiguous."""
    first, second = (stride // matrix.itemsize for stride in matrix.strides)
    return (first if matrix.shape[0] > 1 else matrix.shape[1]), (second if matrix.shape[1] > 1 else 1)


class Gemm:
    """Matrix products of one backend.

    Args:
        threads: the backend's threads.
        workspace: the backend's workspace.
    """

    def __init__(self, threads: int, workspace: Workspace) -> None:
        self._threads = threads
        self._workspace = workspace

    def __call__(self, a: Any, b: Any, c: Any, accumulate: bool) -> None:
        """c (+)= a @ b for matrices with a unit stride in one axis."""
        # Tiles write rows of c. A c with contiguous columns is the transposed product.
        if _strides(c)[1] != 1:
            a, b, c = b.T, a.T, c.T
        rows, depth = a.shape
        columns = b.shape[1]
        if not c.size:
            return
        if depth == 0:
            note_host_work()
            c[...] = c if accumulate else 0
        # The order of the cases: first what tiles would do with idle lanes, then the larger factor in place, and the
        # smaller one packed.
        elif min(rows, columns) <= MAX_VECTORS and _strides(a)[1] == 1 and _strides(b)[0] == 1:
            self._by_dots(a, b, c, accumulate)
        elif columns > rows and _strides(b)[1] != 1:
            self._transposed(a, b, c, accumulate)
        elif depth * columns <= SMALL or columns <= rows:
            self._by_rows(a, b, c, _strides(c)[0], accumulate)
        else:
            self._by_columns(a, b, c, accumulate)

    def _by_dots(self, a: Any, b: Any, c: Any, accumulate: bool) -> None:
        """Compute dot products; both factors are contiguous along K and one has few rows."""
        if a.shape[0] < b.shape[1]:
            a, b, c = b.T, a.T, c.T
        (rows, depth), vectors = a.shape, b.shape[1]
        items = min(4 * self._threads, -(-rows // 4))  # more items than threads, for load balance
        dots.run(
            self._threads,
            items,
            1 if rows * vectors * depth > 2**15 else items,
            a,
            _strides(a)[0],
            rows,
            b,
            _strides(b)[1],
            vectors,
            depth,
            c,
            *_strides(c),
            int(accumulate),
            items,
        )

    def _transposed(self, a: Any, b: Any, c: Any, accumulate: bool) -> None:
        """c transposed = b transposed @ a transposed, if b is larger and contiguous along K."""
        rows, columns = c.shape
        result = self._workspace.take("product", c.size)
        self._by_rows(b.T, a.T, result, rows, accumulate=False)
        items = -(-columns // 16)
        transpose.run(
            self._threads, items, max(1, 1024 // rows), result, rows, c, _strides(c)[0], columns, int(accumulate)
        )

    def _by_rows(self, a: Any, b: Any, c: Any, c_row: int, accumulate: bool) -> None:
        (rows, depth), columns = a.shape, b.shape[1]
        (a_row, a_step), (b_step, b_column) = _strides(a), _strides(b)
        panels = _panels(depth, columns, rows)
        packed = self._workspace.take("weights", panels.size)
        pack_weights(self._threads, panels, b, WeightPacking(_offsets(depth, b_step), b_column), packed)
        groups = -(-rows // GROUP)
        items = min(self._threads, groups)
        part = min(depth, DEPTH)
        strip = self._workspace.take("strip", items * part * GROUP + WIDTH) if a_step != 1 else _ZEROS
        product_by_rows.run(
            self._threads,
            items,
            1 if rows * columns * depth > 2**15 else items,
            a,
            a_step,
            _offsets(rows, a_row),
            strip,
            _offsets(GROUP, 1),
            packed,
            panels.table,
            panels.count,
            WIDTH,
            depth,
            part,
            _NO_OFFSET,
            c,
            _offsets(rows, c_row),
            int(accumulate),
            _ZEROS,
            rows,
            GROUP,
            groups,
            items,
        )

    def _by_columns(self, a: Any, b: Any, c: Any, accumulate: bool) -> None:
        (rows, depth), columns = a.shape, b.shape[1]
        (a_row, a_step), (b_row, _) = _strides(a), _strides(b)
        vectors = min((2, 3), key=lambda v: COST[v] * -(-rows // ROWS[v]) / v)
        # With few rows of a, a panel is read once or twice: read it in place, in long pieces of few rows of b.
        direct = rows <= 2 * ROWS[vectors]
        block, part = (8 * BLOCK, min(depth, _direct_rows(rows, b.size))) if direct else (BLOCK, min(depth, DEPTH))
        block = even_block(columns, vectors * WIDTH, block, self._threads)
        blocks = -(-columns // block)
        items = min(self._threads, blocks)
        product_by_columns.run(
            self._threads,
            items,
            1,
            a,
            _offsets(rows, a_row),
            a_step,
            rows,
            b,
            b_row,
            columns,
            self._workspace.take("panels", items * part * block),
            vectors,
            WIDTH,
            depth,
            part,
            _NO_OFFSET,
            c,
            _offsets(rows, _strides(c)[0]),
            int(accumulate),
            _ZEROS,
            ROWS[vectors],
            block,
            blocks,
            items,
            int(direct),
        )


class CpuDense(DensePrimitives, CpuMemory):
    """`DensePrimitives` of the CPU."""

    _gemm: Gemm

    def gemm(
        self,
        a: Array,
        b: Array,
        out: Array,
        transpose_a: bool = False,
        transpose_b: bool = False,
        accumulate: bool = False,
    ) -> None:
        self._gemm(a.T if transpose_a else a, b.T if transpose_b else b, out, accumulate)
