"""The gradient of a convolution's weights on the CPU: a product of image and gradient, summed over pixels."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.correlation import SPARE, Padding, extended
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.gemm.microkernel import ROWS, tile
from caffepy.backend.cpu.gemm.packing import Panels
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.recording import note_host_work
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors, table_at
from caffepy.backend.cpu.workspace import Workspace

CACHED = 96 * 1024
"""Elements of x and dy that the gradient of the weights works on at a time."""
CACHED_GROUP = 32 * 1024
"""Likewise of one group, whose tiles read the elements of no other."""
_ZEROS = ConstantTable(np.zeros(4 * WIDTH, np.float32))


@kernel
def correlate_weights(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, a: Floats, a_lines: Words, a_step: Int,
    b: Floats, b_lines: Words, b_step: Int, lines: Int, line: Int, block: Int,
    c: Floats, c_rows: Words, accumulate: Int, zeros: Floats, rows: Words, units: Words, count: Int, items: Int,
    panels: Floats, panel_size: Int, panel_lines: Words, width: Int,
) -> None:  # fmt: skip
    """c[r, j] (+)= sum over the lines of all images of a * b. Items are parts of the units, tiles of c.

    The columns of b that a tile needs are first brought together: in the image they are far apart, often by a
    power of two, which map to the same few cache lines.
    """
    for item in range(begin, end):
        panel = ahead(panels, item * panel_size)
        for first in range(0, lines, block):
            keep = 1 if accumulate == 1 or first > 0 else 0
            height = min(block, lines - first)
            a_at = table_at(a_lines, first)
            packed = -1
            for unit in range(7 * (item * count // items), 7 * ((item + 1) * count // items), 7):
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
                factor = ahead(a, units[unit + 1])
                target_at = ahead(c, units[unit + 3])
                row = table_at(rows, units[unit + 4])
                begins = target_at if keep == 1 else zeros
                steps = table_at(panel_lines, (vectors - 1) * lines)
                tile(
                    vectors, factor, row, a_at, a_step, panel, steps, wide, height, line,
                    begins, keep, target_at, c_rows, units[unit + 5], last, zeros, 0, 0,
                )  # fmt: skip


@kernel
def transpose_add(
    begin: Int, end: Int, source: Floats, target: Floats, rows: Int, columns: Int, accumulate: Int
) -> None:
    """target[j, r] (+)= source[r, j]. Items are j."""
    for j in range(begin, end):
        for r in range(rows):
            value = source[r * columns + j]
            target[j * rows + r] = target[j * rows + r] + value if accumulate == 1 else value


def _use(size: int) -> float:
    """The share of vector lanes that do something when `size` elements are taken a vector at a time."""
    return size / (-(-size // WIDTH) * WIDTH)


class WeightGradient:
    """The weights' gradient, divided into tiles.

    Rows of a tile are output channels and vectors run along the elements of a tap, or the other way round (`turned`)
    where that wastes fewer lanes: images of one or three channels have short taps.
    """

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        g, p, self._inner = shape.geometry, shape.padding, shape.taps.length * shape.taps.channels
        self._turned = _use(shape.group_outputs) > 1.1 * _use(self._inner)
        self._slopes = Padding(shape.out, shape.outputs, (0,) * len(shape.out), shape.out, shape.apart)
        self._lines: dict[int, tuple[ConstantTable, ConstantTable, ConstantTable]] = {}
        self._taps_at = p.offset(shape.taps.rows, shape.taps.columns)
        self._met = np.ones(len(shape.taps.rows), bool)
        if p.cuts and not self._turned:
            rows, columns = np.meshgrid(shape.line_rows, np.arange(shape.out_width) * g.stride[-1], indexing="ij")
            self._met = shape.taps.met(p, rows.reshape(-1), columns.reshape(-1))
        self._rows: list[int] = []
        units = self._turned_units() if self._turned else self._plain_units()
        self._units, self._count = extended(units), len(units)
        self._rows_table = extended(self._rows)
        self._c_rows = extended(np.arange(SPARE) * (shape.outputs if self._turned else shape.depth))
        self._block = self._lines_at_a_time()

    def _lines_at_a_time(self) -> int:
        """Output lines whose part of x and dy stays in the second cache while all tiles pass over them."""
        shape = self._shape
        line = self._slopes.row + shape.padding.row * shape.geometry.stride[-2]
        return max(1, (CACHED if shape.apart == 1 else CACHED_GROUP) // line)

    def _tables(self, images: int) -> tuple[ConstantTable, ConstantTable, ConstantTable]:
        """Where the lines of all images begin in x, in dy and, for panels of each width, in the panel."""
        if images not in self._lines:
            shape, p = self._shape, self._shape.padding
            image, widths = np.arange(images)[:, None], np.arange(1, 4)[:, None] * WIDTH * shape.out_width
            x_lines = image * p.elements + shape.line_rows * p.row
            dy_lines = image * self._slopes.elements + np.arange(shape.out_height) * self._slopes.row
            panel_lines = np.arange(images * shape.out_height) * widths
            self._lines[images] = extended(x_lines), extended(dy_lines), extended(panel_lines)
        return self._lines[images]

    def _row_table(self, offsets: Any) -> int:
        """Enter a tile's row offsets; those beyond the last repeat it."""
        start = len(self._rows)
        self._rows.extend(int(offsets[min(i, len(offsets) - 1)]) for i in range(SPARE))
        return start

    def _panels(self, columns: int, rows: int) -> list[tuple[int, int, int]]:
        return [(int(v), int(c), int(last)) for v, c, _, last in Panels(0, columns, rows).entries]

    def _plain_units(self) -> list[tuple[int, ...]]:
        """(vectors, offset in dy, in x, in dw, row table, rows, lanes of the last vector) of each tile."""
        shape = self._shape
        units: list[tuple[int, ...]] = []
        tables = {count: self._row_table(range(count)) for count in range(1, 9)}
        for group, (x_group, dy_group) in enumerate(self._groups()):
            for tap, at in zip(np.flatnonzero(self._met).tolist(), self._taps_at[self._met], strict=True):
                for vectors, column, last in self._panels(self._inner, shape.group_outputs):
                    x_at = x_group + int(at) + column
                    for row in range(0, shape.group_outputs, ROWS[vectors]):
                        count = min(ROWS[vectors], shape.group_outputs - row)
                        dw_at = (group * shape.group_outputs + row) * shape.depth + tap * self._inner + column
                        units.append((vectors, dy_group + row, x_at, dw_at, tables[count], count, last))
        return units

    def _turned_units(self) -> list[tuple[int, ...]]:
        """(vectors, offset in x, in dy, in dw transposed, row table, rows, lanes of the last vector) of each tile."""
        shape = self._shape
        units: list[tuple[int, ...]] = []
        elements = (self._taps_at[:, None] + np.arange(self._inner)).reshape(-1)
        for group, (x_group, dy_group) in enumerate(self._groups()):
            for vectors, column, last in self._panels(shape.group_outputs, shape.depth):
                for row in range(0, shape.depth, ROWS[vectors]):
                    part = elements[row : row + ROWS[vectors]]
                    offset = row * shape.outputs + group * shape.group_outputs + column
                    units.append(
                        (vectors, x_group, dy_group + column, offset, self._row_table(part), len(part), last)
                    )  # fmt: skip
        return units

    def _groups(self) -> list[tuple[int, int]]:
        """Where each group's elements begin in x and in dy."""
        shape, (x, dy) = self._shape, (self._shape.padding, self._slopes)
        steps = (x.group, dy.group) if shape.apart > 1 else (shape.group_channels, shape.group_outputs)
        return [(group * steps[0], group * steps[1]) for group in range(shape.geometry.group)]

    def run(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        """Add the images' share; x is padded or, if it needs no padding, as it is."""
        shape = self._shape
        if not self._turned:
            if not accumulate and not self._met.all():
                note_host_work()
                dweights[...] = 0
            self._call(x, dy, dweights, accumulate)
            return
        turned = self._workspace.take("weights", dweights.size)
        self._call(x, dy, turned, accumulate=False)
        transpose_add.run(
            self._threads, shape.outputs, max(1, 4096 // shape.depth), turned, dweights, shape.depth, shape.outputs,
            int(accumulate),
        )  # fmt: skip

    def _call(self, x: Any, dy: Any, target: Any, accumulate: bool) -> None:
        shape, lines = self._shape, dy.shape[0] * self._shape.out_height
        x_lines, dy_lines, panel_lines = self._tables(dy.shape[0])
        if self._slopes.needed:
            slopes = self._workspace.take("slopes", dy.shape[0] * self._slopes.elements)
            self._slopes.write(self._threads, dy, slopes)
            dy = slopes
        of_x = (x, x_lines, shape.geometry.stride[-1] * shape.padding.pixel)
        of_dy = (dy, dy_lines, self._slopes.pixel)
        a, b = (of_x, of_dy) if self._turned else (of_dy, of_x)
        items = min(self._threads, self._count)
        size = min(self._block, lines) * shape.out_width * 3 * WIDTH
        correlate_weights.run(
            self._threads, items, 1, *a, *b, lines, shape.out_width, self._block, target,
            self._c_rows, int(accumulate), _ZEROS, self._rows_table, self._units, self._count, items,
            self._workspace.take("panels", items * size), size, panel_lines, WIDTH,
        )  # fmt: skip
