"""The gradient of the weights of convolutions in groups on the CPU, from images that are read where they lie.

A padded copy of the image would take as long as the products. Rows of a tile are elements of a kernel's column, vectors
run along the outputs; each kind of line, whose windows meet the same rows of the kernel inside the image, has tiles of
its own, which need no zeros.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.implicit_padding.lines import forward_axis, lines_of
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.weight_gradient import LINE, ZEROS, add_products, transpose_add
from caffepy.backend.cpu.gemm.microkernel import FOURS, TALL, rows_of_fours
from caffepy.backend.cpu.gemm.packing import COST_TALL, SPARE, Panels, extended, panel_vectors
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors
from caffepy.backend.cpu.workspace import Workspace

TOGETHER = 512
"""Pixels, about, of small images that are taken together."""
CACHED = 16 * 1024
"""Elements of a panel: what tiles read again and again stays in the first cache."""
COPIED = 128 * 1024
"""Elements of a group's images that are brought together: they are in the second cache, and not in two of its sets."""
BAND = 192 * 1024
"""Elements of the parts of large images that all groups pass over if a line of the caches holds several groups: they
are in the second cache when the next group reads them."""
FAR = 256
"""Elements from a pixel to the next one from which few sets of the first cache hold a group's pixels."""


@kernel
def clear(begin: Int, end: Int, target: Floats) -> None:
    """Write zeros."""
    for i in range(begin, end):
        target[i] = 0


@kernel
def correlate_where_it_lies(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, x_images: Int, x_group: Int, x_lines: Words, x_step: Int, dy: Floats,
    dy_images: Int, dy_group: Int, dy_lines: Words, dy_step: Int, lines: Int, line: Int, block: Int, starts: Words,
    panel_lines: Words, entries: Int, times: Int, groups: Int, shares: Int, parts: Int, c: Floats, c_rows: Words,
    zeros: Floats, rows: Words, units: Words, segments: Words, count: Int, panels: Floats, panel_size: Int,
    copied: Int, copies: Floats, width: Int, high: Int, bands: Int,
) -> None:  # fmt: skip
    """c[r, j] += sum over the lines of `times` sets of images of x * dy, for each group.

    Items are (share of the groups, part of the `count` segments of a group's units), which write different tiles.
    `bands`: parts of the images that all groups pass over before the next part.
    """
    whole, blocks = x_group // width * width, (lines + block - 1) // block
    for item in range(begin, end):
        share, part = item // parts, item % parts
        first, stop = share * groups // shares, (share + 1) * groups // shares
        first_unit, stop_unit = segments[part * count // parts], segments[(part + 1) * count // parts]
        for n in range(times):
            for band in range(bands):
                first_block, stop_block = band * blocks // bands, (band + 1) * blocks // bands
                for group in range(first, stop):
                    source = ahead(x, n * x_images + group * x_group)
                    if copied > 0:
                        copy = ahead(copies, item * copied * x_group)
                        for i in range(copied):
                            pixel, to = ahead(source, i * groups * x_group), ahead(copy, i * x_group)
                            for j in range(0, whole, width):
                                copy_vectors(ahead(pixel, j), ahead(to, j), 1)
                            for j in range(whole, x_group):
                                to[j] = pixel[j]
                        source = copy
                    add_products(
                        source, x_lines, x_step,
                        ahead(dy, n * dy_images + group * dy_group), dy_lines, dy_step, lines, line, block, starts,
                        panel_lines, entries, ahead(c, group * dy_group), c_rows, 1, zeros, rows, units,
                        first_unit, stop_unit, ahead(panels, item * panel_size), width, high, first_block, stop_block,
                    )  # fmt: skip


class _Tables(NamedTuple):
    """See `add_products`."""

    starts: ConstantTable
    x: ConstantTable
    dy: ConstantTable
    panel: ConstantTable
    entries: int


class GroupWeightGradient:
    """The weights' gradient of a convolution in groups, planned.

    Args:
        shape: of the convolution.
        threads: of the backend.
        workspace: of the backend.
    """

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        axes = [forward_axis(out, *shape.window(i)) for i, out in enumerate(shape.out)]
        kernel_sizes = shape.geometry.kernel
        self._h, self._w = (
            lines_of(axes[part], shape.sizes[part], shape.out[part], kernel_sizes[part])
            for part in (slice(-1), slice(-1, None))
        )
        self._together = max(1, min(shape.images, TOGETHER // max(1, shape.out_height * shape.out_width)))
        self._block = max(1, CACHED // max(1, shape.out_width * 3 * WIDTH))
        line = shape.padding.row * shape.geometry.stride[-2] + shape.out_width * shape.outputs
        self._banded = shape.group_channels < LINE and self._together * shape.out_height * line > BAND
        if self._banded:
            self._block = max(1, min(self._block, BAND // line))
        rows = len(self._h.taps) * shape.group_channels
        self._high = rows_of_fours(rows, shape.group_channels)
        self._heights = {**TALL, 1: self._high or TALL[1]}
        self._widths = self._panel_widths(rows)
        self._rows: list[Any] = []
        self._c_rows: list[Any] = []
        self._copies = self._is_copied()
        self._pixel = shape.group_channels if self._copies else shape.channels
        units, segments = self._plan_units()
        self._units, self._segments = extended(units), extended(segments)
        self._count = len(segments) - 1
        self._row_table, self._c_row_table = (extended(np.concatenate(part)) for part in (self._rows, self._c_rows))
        self._tables: dict[int, _Tables] = {}

    def _panel_widths(self, rows: int) -> tuple[int, ...]:
        """Vectors of each panel: single ones where tiles of two or three would leave more rows of a column empty."""
        own = panel_vectors(self._shape.group_outputs, self._shape.depth, tall=True)
        cost = {**COST_TALL, 1: FOURS.get(self._high, COST_TALL[1])}
        single = (1,) * sum(own)
        return min((own, single), key=lambda each: sum(cost[v] * -(-rows // self._heights[v]) for v in each))

    def _is_copied(self) -> bool:
        """Whether a group's pixels, which many tiles read, lie too far apart for the first cache."""
        shape = self._shape
        elements = self._together * math.prod(shape.sizes) * shape.group_channels
        apart = shape.geometry.stride[-1] * shape.channels >= FAR
        return not self._banded and elements <= COPIED and apart and (WIDTH < 16 or shape.group_channels >= 2 * WIDTH)

    def _plan_units(self) -> tuple[list[tuple[int, ...]], list[int]]:
        """(vectors, offset in x, in dy, in c, row table, rows, last lanes, list of lines, columns, c's row table)."""
        shape, segments = self._shape, [0]
        units: list[tuple[int, ...]] = []
        panels = Panels(0, shape.group_outputs, shape.depth, widths=self._widths).entries.tolist()
        for vectors, column, _, last in panels:
            for tap, shift in zip(self._w.taps, self._w.shifts, strict=True):
                extent = self._columns(int(shift))
                for number, met in enumerate(self._h.kinds):
                    for table, c_table, rows in self._rows_of(met, int(tap), int(shift), self._heights[vectors]):
                        units.append((vectors, 0, column, column, table, rows, last, number, *extent, c_table))
                segments.append(len(units))
        return units, segments

    def _columns(self, shift: int) -> tuple[int, int]:
        """Columns of the output at which an element of the kernel lies inside the image."""
        inside = np.flatnonzero((self._w.source + shift >= 0) & (self._w.source + shift < self._shape.sizes[-1]))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)

    def _rows_of(self, met: Any, tap: int, shift: int, high: int) -> list[tuple[int, int, int]]:
        """The tables and the number of rows of each tile of a column of the kernel; `met`: its rows in the image."""
        shape, channels = self._shape, np.arange(self._shape.group_channels)
        x = (self._h.shifts[met] * shape.sizes[-1] + shift)[:, None] * self._pixel + channels
        c = (self._h.taps[met] * shape.geometry.kernel[-1] + tap)[:, None] * shape.group_channels + channels
        x, c, result = x.reshape(-1), c.reshape(-1) * shape.outputs, []
        for first in range(0, len(x), high):
            at = np.arange(first, first + SPARE)  # those beyond the last repeat the first four, which lie together
            at = np.where(at < len(x), at, first + np.arange(SPARE) % min(4, len(x) - first))
            result.append((SPARE * len(self._rows), SPARE * len(self._rows), min(high, len(x) - first)))
            self._rows.append(x[at])
            self._c_rows.append(c[at])
        return result

    def _lines(self, images: int) -> _Tables:
        """Where the lines of all images begin in what is read."""
        if images not in self._tables:
            shape, height = self._shape, self._shape.out_height
            image = np.arange(images)[:, None]
            x_row, dy_row = shape.sizes[-1] * self._pixel, shape.out_width * shape.outputs
            x = (image * math.prod(shape.sizes[:-1]) + self._h.source) * x_row + self._w.source[0] * self._pixel
            dy = (image * height + np.arange(height)) * dy_row
            lists = [np.flatnonzero(np.tile(self._h.kind == number, images)) for number in range(len(self._h.kinds))]
            bounds = np.minimum(np.arange(-(-images * height // self._block) + 1) * self._block, images * height)
            offsets = np.cumsum([0, *map(len, lists)])
            starts = [at + np.searchsorted(own, bounds) for at, own in zip(offsets, lists, strict=False)]
            every = np.concatenate(lists)
            panel = every * (np.arange(1, 4)[:, None] * WIDTH * shape.out_width)
            x = x.reshape(-1)[every]
            self._tables[images] = _Tables(
                extended(np.concatenate(starts)), extended(x), extended(dy), extended(panel), len(every)
            )
        return self._tables[images]

    def run(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        """The gradient of all images."""
        shape, turned = self._shape, self._workspace.take("weights", dweights.size)
        clear.run(self._threads, dweights.size, GRAIN, turned)
        done, images = 0, x.shape[0]
        for many, times in ((self._together, images // self._together), (images % self._together, 1)):
            if many and times:
                self._add(x[done:], dy[done:], turned, many, times)
            done += many * times
        transpose_add.run(
            self._threads, -(-shape.outputs // LINE), max(1, 256 // shape.depth), turned, dweights, shape.depth,
            shape.outputs, int(accumulate),
        )  # fmt: skip

    def _add(self, x: Any, dy: Any, turned: Any, images: int, times: int) -> None:
        shape, tables, groups = self._shape, self._lines(images), self._shape.geometry.group
        lines, plane = images * shape.out_height, math.prod(shape.sizes) * shape.channels
        shares = min(self._threads, groups)
        parts = min(self._count, -(-self._threads // shares))
        size = min(self._block, lines) * shape.out_width * 3 * WIDTH
        copied = images * math.prod(shape.sizes) if self._copies else 0
        correlate_where_it_lies.run(
            self._threads, shares * parts, 1, x, images * plane, shape.group_channels, tables.x,
            shape.geometry.stride[-1] * self._pixel, dy, lines * shape.out_width * shape.outputs,
            shape.group_outputs, tables.dy, shape.outputs, lines, shape.out_width, self._block, tables.starts,
            tables.panel, tables.entries, times, groups, shares, parts, turned, self._c_row_table, ZEROS,
            self._row_table, self._units, self._segments, self._count,
            self._workspace.take("panels", shares * parts * size), size, copied,
            self._workspace.take("images", shares * parts * copied * shape.group_channels + WIDTH), WIDTH,
            self._high, -(-lines // self._block) if self._banded else 1,
        )  # fmt: skip
