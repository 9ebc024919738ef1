"""The weight gradient of a convolution on the CPU: a product of image and gradient, summed over pixels.

A tile's sums skip output lines and columns for which all its elements are outside the image.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.correlation import ConvolutionShape
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, device_function, kernel
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors, fetch, table_at
from caffepy.backend.cpu.memory import Workspace
from caffepy.backend.cpu.microkernel import (
    COST_TALL,
    SPARE,
    TALL,
    Panels,
    extended,
    rows_of_fours,
    tall_tile,
    tile_of_fours,
)

CACHED, MIN_CACHED, MAX_CACHED = 144 * 1024, 72 * 1024, 288 * 1024
"""Elements of x or dy, and of panels of the other, per block of the weight gradient. If pixels are `FAR` apart it is
half the gradient's size, which is read and written each time, within the last two limits."""
FAR = 256
"""Minimum element distance of pixels that the hardware prefetcher cannot follow."""
COPYING, TURNING = 1.5, 2.0
"""Costs of copying a vector into a panel and of transposing a result element, in units of `COST_TALL`."""
LINE = 16
"""Elements of a cache line."""
FIELDS = 11
"""Fields of a unit."""
ZEROS = ConstantTable(np.zeros(4 * WIDTH, np.float32))
"""Initial accumulators."""


@device_function
def fetch_lines(a: Any, a_lines: Any, first: Any, length: Any, begin: Any, end: Any) -> None:
    """Prefetch parts of `LINE` elements of lines with `length` parts each; `first` is the first line's entry."""
    for part in range(begin, end):
        fetch(ahead(a, a_lines[first + part // length] + part % length * LINE))


@device_function
def add_products(  # noqa: PLR0913 -- a kernel's
    a: Any, a_lines: Any, a_step: Any, b: Any, b_lines: Any, b_step: Any, lines: Any, line: Any, block: Any,
    starts: Any, panel_lines: Any, entries: Any, c: Any, c_rows: Any, accumulate: Any, zeros: Any, rows: Any,
    units: Any, first_unit: Any, stop_unit: Any, panel: Any, width: Any, high: Any, first_block: Any,
    stop_block: Any,
) -> None:  # fmt: skip
    """c[r, j] (+)= sum over the lines of all images of a * b, for some units (tiles of c) and some blocks of lines.

    `high`: rows of single-vector tiles if rows of a are contiguous in fours, else 0. The columns of b that a tile needs
    are packed first: in the image they are far apart, often by a power of two, which maps to few cache sets. If pixels
    of a are `FAR` apart, the next block's part of a is prefetched meanwhile, a share with each tile. `starts` gives for
    each list of lines the begin of each block of lines; `a_lines` and `panel_lines` hold all lists one after another.
    """
    length = (line * a_step + LINE - 1) // LINE if a_step >= FAR else 0
    blocks = (lines + block - 1) // block
    for number in range(first_block, min(blocks, stop_block)):
        first = number * block
        keep = 1 if accumulate == 1 or first > 0 else 0
        height = min(block, lines - first)
        packed = -1
        parts, fetched = (starts[min(number + 2, blocks)] - starts[number + 1]) * length, 0
        for unit in range(FIELDS * first_unit, FIELDS * stop_unit, FIELDS):
            vectors = units[unit]
            last = units[unit + 6]
            wide = vectors * width
            if units[unit + 2] != packed:
                packed = units[unit + 2]
                inside = wide - width + last
                for h in range(height):
                    source = packed + b_lines[first + h]
                    target = h * line * wide
                    for _ in range(line):
                        if inside == wide:
                            copy_vectors(ahead(b, source), ahead(panel, target), vectors)
                        else:
                            for j in range(inside):
                                panel[target + j] = b[source + j]
                        source += b_step
                        target += wide
            stop = min(parts, fetched + parts // (stop_unit - first_unit) + 1)
            fetch_lines(a, a_lines, starts[number + 1], length, fetched, stop)
            fetched = stop
            at = units[unit + 7] * (blocks + 1) + number
            begins, ends = starts[at], starts[at + 1]
            w0, w1 = units[unit + 8], units[unit + 9]
            if keep == 0 or (ends > begins and w1 > w0):
                target_at = ahead(c, units[unit + 3])
                if vectors == 1 and high > 0:
                    tile_of_fours(
                        high, ahead(a, units[unit + 1] + w0 * a_step), table_at(rows, units[unit + 4]),
                        table_at(a_lines, begins), a_step, ahead(panel, (w0 - first * line) * wide),
                        table_at(panel_lines, begins), wide, ends - begins, w1 - w0,
                        target_at if keep == 1 else zeros, keep, target_at, table_at(c_rows, units[unit + 10]),
                        units[unit + 5], last, zeros, 0, 0,
                    )  # fmt: skip
                else:
                    tall_tile(
                        vectors, ahead(a, units[unit + 1] + w0 * a_step), table_at(rows, units[unit + 4]),
                        table_at(a_lines, begins), a_step, ahead(panel, (w0 - first * line) * wide),
                        table_at(panel_lines, (vectors - 1) * entries + begins), wide, ends - begins, w1 - w0,
                        target_at if keep == 1 else zeros, keep, target_at, table_at(c_rows, units[unit + 10]),
                        units[unit + 5], last, zeros, 0, 0,
                    )  # fmt: skip


@kernel
def correlate_weights(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, a: Floats, a_lines: Words, a_step: Int, b: Floats, b_lines: Words, b_step: Int, lines: Int,
    line: Int, block: Int, starts: Words, panel_lines: Words, entries: Int, c: Floats, c_rows: Words, accumulate: Int,
    zeros: Floats, rows: Words, units: Words, count: Int, items: Int, panels: Floats, panel_size: Int, width: Int,
    high: Int,
) -> None:  # fmt: skip
    """See `add_products`. Items are parts of the units."""
    for item in range(begin, end):
        add_products(
            a, a_lines, a_step, b, b_lines, b_step, lines, line, block, starts, panel_lines, entries, c, c_rows,
            accumulate, zeros, rows, units, item * count // items, (item + 1) * count // items,
            ahead(panels, item * panel_size), width, high, 0, lines,
        )  # fmt: skip


@kernel
def transpose_add(
    begin: Int, end: Int, source: Floats, target: Floats, rows: Int, columns: Int, accumulate: Int
) -> None:
    """target[j, r] (+)= source[r, j]. Items are rows of target."""
    for item in range(begin, end):
        first, stop = item * LINE, min(columns, (item + 1) * LINE)
        for r in range(rows):
            for j in range(first, stop):
                value = source[r * columns + j]
                target[j * rows + r] = target[j * rows + r] + value if accumulate == 1 else value


class _Lines(NamedTuple):
    """The lines of all images that tiles process, for a number of images; see `correlate_weights`."""

    starts: ConstantTable
    a: ConstantTable
    b: ConstantTable
    panel: ConstantTable
    entries: int


class _Extent(NamedTuple):
    """Where kernel elements overlap the image: output lines, by number of their list, and columns."""

    lines: int
    first: int
    stop: int


class WeightGradient:
    """The weight gradient, divided into tiles.

    A tile's rows are output channels and its vectors run along the elements of a tap, or vice versa (`transposed`) if
    that takes fewer cycles. Images of one or three channels have short taps, and the vectors' factor is copied for each
    tap.
    """

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        self._inner = shape.taps.length * shape.taps.channels
        self._transposed = self._cycles(transposed=True) < self._cycles(transposed=False)
        self._slopes_row = shape.out_width * shape.outputs
        self._lines: dict[int, _Lines] = {}
        self._taps_at = shape.padding.offset(shape.taps.rows, shape.taps.columns)
        self._met = shape.padding.has_rows(shape.line_rows[:, None] + shape.taps.rows[None, :])
        self._lists: dict[bytes, int] = {}
        self._rows: dict[tuple[int, ...], int] = {}
        self._high = rows_of_fours(shape.depth, self._inner) if self._transposed else 0
        units = self._transposed_units() if self._transposed else self._plain_units()
        self._units, self._count = extended(units), len(units)
        self._rows_table = extended(list(self._rows))
        self._c_rows = extended(np.arange(SPARE) * (shape.outputs if self._transposed else shape.depth))
        self._block = self._lines_at_a_time()

    def _cycles(self, transposed: bool) -> float:
        """Return the cycles of one group, in units of `COST_TALL`."""
        shape, runs = self._shape, 1 if transposed else len(self._shape.taps.rows)
        columns, rows = (shape.group_outputs, shape.depth) if transposed else (self._inner, shape.group_outputs)
        panels = self._panels(columns, rows)
        pixel = runs * sum(COST_TALL[v] * -(-rows // TALL[v]) + COPYING * v for v, _, _ in panels)
        return shape.images * shape.out_height * shape.out_width * pixel + TURNING * transposed * shape.group_step

    def _lines_at_a_time(self) -> int:
        """Return the output lines whose part of a, and one panel of b, stay in the L2 cache for all tiles."""
        shape = self._shape
        line = shape.padding.row * shape.geometry.stride[-2] if self._transposed else self._slopes_row
        line += 3 * WIDTH * shape.out_width
        step = shape.geometry.stride[-1] * shape.channels if self._transposed else shape.outputs
        far = min(MAX_CACHED, max(MIN_CACHED, shape.outputs * shape.depth // 2))
        return max(1, (far if step >= FAR else CACHED) // line)

    def _extent(self, runs: Any, first: int, stop: int) -> _Extent:
        """Return the extent of these elements of these runs."""
        shape, (step, width) = self._shape, (self._shape.geometry.stride[-1], self._shape.sizes[-1])
        met = self._met[:, runs].any(axis=1)
        number = self._lists.setdefault(met.tobytes(), len(self._lists))
        at = shape.taps.columns[runs] - shape.padding.before[-1]
        low, high = int(at.min()) + first // shape.taps.channels, int(at.max()) + (stop - 1) // shape.taps.channels
        stop_at = max(0, min(shape.out_width, (width - 1 - low) // step + 1))
        return _Extent(number, min(max(0, -(high // step)), stop_at), stop_at)

    def _tables(self, images: int) -> _Lines:
        """Return where the lines of all images begin in the source."""
        if images not in self._lines:
            shape, p = self._shape, self._shape.padding
            image, height = np.arange(images)[:, None], shape.out_height
            x = (image * p.elements + shape.line_rows * p.row).reshape(-1)
            dy = ((image * height + np.arange(height)) * self._slopes_row).reshape(-1)
            lists = [np.flatnonzero(np.tile(np.frombuffer(met, bool), images)) for met in self._lists]
            bounds = np.minimum(np.arange(-(-images * height // self._block) + 1) * self._block, images * height)
            offsets = np.cumsum([0, *map(len, lists)])
            starts = [at + np.searchsorted(own, bounds) for at, own in zip(offsets, lists, strict=False)]
            every = np.concatenate(lists)
            a, b = (x, dy) if self._transposed else (dy, x)
            panel = every * (np.arange(1, 4)[:, None] * WIDTH * shape.out_width)
            first = extended(np.concatenate(starts))
            self._lines[images] = _Lines(first, extended(a[every]), extended(b), extended(panel), len(every))
        return self._lines[images]

    def _row_table(self, offsets: Any) -> int:
        """Return the begin of a tile's row offsets in their table; padding repeats the first four."""
        entry = tuple(int(offsets[i if i < len(offsets) else i % min(4, len(offsets))]) for i in range(SPARE))
        return SPARE * self._rows.setdefault(entry, len(self._rows))

    def _panels(self, columns: int, rows: int) -> list[tuple[int, int, int]]:
        return [(int(v), int(c), int(last)) for v, c, _, last in Panels(0, columns, rows, tall=True).entries]

    def _plain_units(self) -> list[tuple[int, ...]]:
        """(vectors, offset in dy, in x, in dw, row table, rows, lanes of the last vector, extent) of each tile."""
        shape = self._shape
        panels = self._panels(self._inner, shape.group_outputs)
        tables = {count: self._row_table(range(count)) for count in range(1, SPARE + 1)}
        columns = [
            (vectors, last, int(at) + column, run * self._inner + column,
             self._extent([run], column, min(column + vectors * WIDTH, self._inner)))
            for run, at in enumerate(self._taps_at) for vectors, column, last in panels
        ]  # fmt: skip
        units: list[tuple[int, ...]] = []
        for group, (x_group, dy_group) in enumerate(self._groups()):
            for vectors, last, x_at, element, extent in columns:
                for row in range(0, shape.group_outputs, TALL[vectors]):
                    count = min(TALL[vectors], shape.group_outputs - row)
                    dw_at = (group * shape.group_outputs + row) * shape.depth + element
                    units.append(
                        (vectors, dy_group + row, x_group + x_at, dw_at, tables[count], count, last, *extent, 0)
                    )  # fmt: skip
        return units

    def _transposed_units(self) -> list[tuple[int, ...]]:
        """(vectors, offset in x, in dy, in dw transposed, row table, rows, lanes of the last vector, extent)."""
        shape = self._shape
        elements = (self._taps_at[:, None] + np.arange(self._inner)).reshape(-1)
        panels = self._panels(shape.group_outputs, shape.depth)
        heights = {**TALL, 1: self._high or TALL[1]}
        rows = {
            high: [self._transposed_rows(elements, row, high) for row in range(0, shape.depth, high)]
            for high in {heights[vectors] for vectors, _, _ in panels}
        }
        units: list[tuple[int, ...]] = []
        for group, (x_group, dy_group) in enumerate(self._groups()):
            for vectors, column, last in panels:
                at = group * shape.group_outputs + column
                for row, table, count, extent in rows[heights[vectors]]:
                    offset = row * shape.outputs + at
                    units.append((vectors, x_group, dy_group + column, offset, table, count, last, *extent, 0))
        return units

    def _transposed_rows(self, elements: Any, row: int, high: int) -> tuple[int, int, int, _Extent]:
        part = elements[row : row + high]
        first, last = divmod(row, self._inner), divmod(row + len(part) - 1, self._inner)
        span = (first[1], last[1] + 1) if first[0] == last[0] else (0, self._inner)
        return row, self._row_table(part), len(part), self._extent(range(first[0], last[0] + 1), *span)

    def _groups(self) -> list[tuple[int, int]]:
        """Return where each group's elements begin in x and in dy."""
        shape = self._shape
        return [(g * shape.group_channels, g * shape.group_outputs) for g in range(shape.geometry.group)]

    def add(self, x: Any, dy: Any, dweights: Any, accumulate: bool, first: bool) -> None:
        """Add the contribution of the first or further images; x is padded if it needs padding."""
        shape, lines = self._shape, dy.shape[0] * self._shape.out_height
        tables, count = self._tables(dy.shape[0]), self._count
        steps = shape.geometry.stride[-1] * shape.channels, shape.outputs
        (a, a_step), (b, b_step) = (
            ((x, steps[0]), (dy, steps[1])) if self._transposed else ((dy, steps[1]), (x, steps[0]))
        )
        target = self._workspace.take("weights", dweights.size) if self._transposed else dweights
        items = min(self._threads, count)
        size = min(self._block, lines) * shape.out_width * 3 * WIDTH
        correlate_weights.run(
            self._threads, items, 1, a, tables.a, a_step, b, tables.b, b_step, lines, shape.out_width, self._block,
            tables.starts, tables.panel, tables.entries, target, self._c_rows,
            int(not first or (accumulate and not self._transposed)), ZEROS, self._rows_table, self._units, count,
            items, self._workspace.take("panels", items * size), size, WIDTH, self._high,
        )  # fmt: skip

    def finish(self, dweights: Any, accumulate: bool) -> None:
        """Finish the sum after all images are added."""
        if self._transposed:
            shape, transposed = self._shape, self._workspace.take("weights", dweights.size)
            transpose_add.run(
                self._threads, -(-shape.outputs // LINE), max(1, 256 // shape.depth), transposed, dweights, shape.depth,
                shape.outputs, int(accumulate),
            )  # fmt: skip
