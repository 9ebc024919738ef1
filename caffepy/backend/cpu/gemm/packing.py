"""Columns of a matrix product divided into panels as wide as a tile, and the packing of weights into them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cpu.gemm.microkernel import HALF, ROWS, TALL
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors, turn_square

COST = {1: 4.5, 2: 6.0, 3: 6.0}
"""Cycles of one step of a tile, given its vectors: bound by loads in the narrow one, else by multiplications."""
COST_TALL = {1: 6.5, 2: 12.0, 3: 12.0} if WIDTH == 16 else COST
"""Likewise of a tall tile."""


SPARE = 16
"""Entries that tables have beyond the last, as a tile reads whole."""


def extended(table: Any) -> ConstantTable:
    """A table as int64 with the last entry repeated as often as a tile may read beyond."""
    flat = np.asarray(table, np.int64).reshape(-1)
    if not flat.size:
        return ConstantTable(np.zeros(SPARE, np.int64))
    return ConstantTable(np.concatenate([flat, np.repeat(flat[-1:], SPARE)]))


@cache
def panel_vectors(columns: int, rows: int, tall: bool = False) -> tuple[int, ...]:
    """How many vectors each panel has, so that the fewest cycles are spent on `rows` by `columns`, waste included."""
    vectors = -(-columns // WIDTH)
    choices = []
    for threes in range(vectors // 3 + 1):
        rest = vectors - 3 * threes
        choices.append((3,) * threes + (2,) * (rest // 2) + (1,) * (rest % 2))
    half = 0 < (columns - 1) % WIDTH + 1 <= HALF
    if half and vectors == 2:
        choices.append((1, 1))
    cost, high = (COST_TALL, TALL) if tall else (COST, ROWS)

    def cycles(panels: tuple[int, ...]) -> float:
        own = [cost[v] * -(-rows // high[v]) for v in panels]
        return sum(own) - (own[-1] / 2 if half and panels[-1] == 1 else 0)

    return min(choices, key=cycles)


class Panels:
    """The panels of a factor of `depth` rows by `columns` columns, to be multiplied by one of `rows` rows.

    They are meant for tiles or, with `tall`, for tall ones; with `widths` they have these vectors.

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
def pack(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, rows: Words, depth: Int, step: Int, group_step: Int,
    packed: Floats, size: Int, table: Words, panels: Int, columns: Int, width: Int,
) -> None:  # fmt: skip
    """Element (k, j) lies at rows[k] + j * step. Items are (group, panel); beyond the columns come zeros."""
    for item in range(begin, end):
        group = item // panels
        panel = 4 * (item % panels)
        wide = table[panel] * width
        first = table[panel + 1]
        target = group * size + table[panel + 2]
        inside = min(wide, columns - first)
        turned = 0
        if step != 1 and inside == wide:  # squares whose rows lie in the source as columns
            while turned + width <= depth and rows[turned + width - 1] - rows[turned] == width - 1:
                origin = group * group_step + rows[turned] + first * step
                for j in range(0, wide, width):
                    square = ahead(packed, target + turned * wide + j)
                    turn_square(ahead(source, origin + j * step), step, square, wide)
                turned += width
        for k in range(turned, depth):
            origin = group * group_step + rows[k] + first * step
            if step == 1:  # a copy that can be vectorised
                for j in range(inside):
                    packed[target + k * wide + j] = source[origin + j]
            else:
                for j in range(inside):
                    packed[target + k * wide + j] = source[origin + j * step]
            for j in range(inside, wide):
                packed[target + k * wide + j] = 0


@kernel
def pack_rows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, rows: Words, order: Words, depth: Int, group_step: Int, packed: Floats,
    size: Int, table: Words, panels: Int, columns: Int, width: Int,
) -> None:  # fmt: skip
    """As `pack` for columns that lie together. Items are (group, row), rows in the order in which they lie."""
    for item in range(begin, end):
        group, k = item // depth, order[item % depth]
        origin = group * group_step + rows[k]
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
                for j in range(inside, wide):
                    packed[to + j] = 0


@dataclass(frozen=True)
class WeightPacking:
    """Where the weights to pack lie in their array, in elements.

    Args:
        rows: offset of each row (an element of the sum).
        step: from one column to the next.
        groups: how many groups of weights there are.
        group_step: from one group to the next.
        order: of the rows as they lie, where that is another one: large weights are read in it.
    """

    rows: Any
    step: int
    groups: int = 1
    group_step: int = 0
    order: Any = None


def pack_weights(threads: int, panels: Panels, source: Any, packing: WeightPacking, packed: Any) -> None:
    """Bring the weights of all groups into panel order."""
    if packing.order is not None and packing.step == 1:
        pack_rows.run(
            threads, packing.groups * panels.depth, max(1, 4096 // max(1, panels.columns)), source, packing.rows,
            packing.order, panels.depth, packing.group_step, packed, panels.size, panels.table, panels.count,
            panels.columns, WIDTH,
        )  # fmt: skip
        return
    pack.run(
        threads, packing.groups * panels.count, max(1, 4096 // max(1, panels.depth * WIDTH)), source, packing.rows,
        panels.depth, packing.step, packing.group_step, packed, panels.size, panels.table, panels.count,
        panels.columns, WIDTH,
    )  # fmt: skip
