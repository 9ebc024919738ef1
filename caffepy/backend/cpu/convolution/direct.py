"""Direct convolution on the CPU, channels last, from the image in place or from a padded copy.

With channels last, the elements of a kernel row that an output pixel reads are contiguous. A tile of output pixels by
output channels is therefore a sum over kernel rows of small matrix products that read the image in place. No columns
are written (im2col), which would cost as much memory traffic as the products. The data gradient is the same sum over
the output's gradient.

Images are read without padding (`WindowCorrelation`, `GroupWeightGradient`) for groups, for the data gradient with a
stride, and if pixels with equal taps fill the tiles. Small groups have few multiplications per element, so a padded
copy of the image would take as long as the products. A single large group takes up to a seventh less time without the
copy. Pixels with equal taps inside the image share tiles, which need no zeros. One pass computes the pixels of all
residues of a stride.

In the weight gradient of groups, a tile's rows are elements of a kernel column and its vectors run along the outputs.
Lines are classified by the kernel rows inside the image; each class has its own tiles.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.correlation import (
    LINE,
    ZEROS,
    AxisTaps,
    ConvolutionShape,
    Ending,
    Filters,
    PaddedCorrelation,
    Padding,
    Pixels,
    Taps,
    WeightGradient,
    add_products,
    axis_residues,
    forward_axis,
    merged,
    merged_axes,
    reach,
    taps_inside,
    transpose_add,
)
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors, fetch, table_at
from caffepy.backend.cpu.memory import Workspace, aligned
from caffepy.backend.cpu.microkernel import (
    COST_TALL,
    FOURS,
    ROWS,
    SPARE,
    TALL,
    Panels,
    WeightPacking,
    extended,
    pack_weights,
    panel_vectors,
    rows_of_fours,
    tile,
)
from caffepy.backend.types import Geometry, host_address

# -- images without padding ----------------------------------------------------------------------------


class Lines(NamedTuple):
    """Rows, or columns, of the result.

    Args:
        at: position of each line in the result.
        source: source position that a tap of shift 0 reads, per line.
        shifts: source shift of each tap.
        taps: kernel index of each tap.
        kinds: taps inside the image, per class of lines.
        kind: class of each line.
    """

    at: Any
    source: Any
    shifts: Any
    taps: Any
    kinds: Any
    kind: Any


def lines_of(axes: Sequence[AxisTaps], read: Sequence[int], made: Sequence[int], kernel: Sequence[int]) -> Lines:
    """Merge several axes into one; `read` and `made` are the sizes of the source and of the result."""
    kinds, kind = np.unique(taps_inside(axes, read), axis=0, return_inverse=True)
    return Lines(
        merged([axis.pixels for axis in axes], made),
        merged([axis.indices for axis in axes], read),
        merged([axis.shifts for axis in axes], read),
        merged([axis.taps for axis in axes], kernel),
        kinds,
        kind.reshape(-1),
    )


TOGETHER = 512
"""Approximate pixels of small images per item, and of parts of large images."""
PANEL = 16 * 1024
"""Elements of a panel, which tiles reread from the L1 cache."""
COPIED = 128 * 1024
"""Elements of a group's images to pack, so that they fit the L2 cache without set conflicts."""
BAND = 192 * 1024
"""Elements of image parts that all groups process in turn if a cache line holds several groups, so that they stay in
the L2 cache."""
FAR = 256
"""Minimum element distance of pixels for which a group's pixels map to few L1 cache sets."""


@kernel
def clear(begin: Int, end: Int, target: Floats) -> None:
    """Write zeros."""
    for i in range(begin, end):
        target[i] = 0


@kernel
def correlate_where_it_lies(
    begin: Int,
    end: Int,
    x: Floats,
    x_images: Int,
    x_group: Int,
    x_lines: Words,
    x_step: Int,
    dy: Floats,
    dy_images: Int,
    dy_group: Int,
    dy_lines: Words,
    dy_step: Int,
    lines: Int,
    line: Int,
    block: Int,
    starts: Words,
    panel_lines: Words,
    entries: Int,
    times: Int,
    groups: Int,
    shares: Int,
    parts: Int,
    c: Floats,
    c_rows: Words,
    zeros: Floats,
    rows: Words,
    units: Words,
    segments: Words,
    count: Int,
    panels: Floats,
    panel_size: Int,
    copied: Int,
    copies: Floats,
    width: Int,
    high: Int,
    bands: Int,
) -> None:
    """c[r, j] += sum over the lines of `times` sets of images of x * dy, for each group.

    Items are (share of the groups, part of the `count` segments of a group's units), which write different tiles.
    `bands`: parts of the images that all groups process before the next part.
    """
    whole, blocks = x_group // width * width, (lines + block - 1) // block
    for item in range(begin, end):
        share, part = item // parts, item % parts
        first, stop = share * groups // shares, (share + 1) * groups // shares
        first_unit, stop_unit = segments[part * count // parts], segments[(part + 1) * count // parts]
        # Images, bands and groups in this order: a cache line holds several groups' channels, so all groups read a band
        # before the next band (BAND). An item writes the same sums for all images, in the order of the images.
        for n in range(times):
            for band in range(bands):
                first_block, stop_block = band * blocks // bands, (band + 1) * blocks // bands
                for group in range(first, stop):
                    source = ahead(x, n * x_images + group * x_group)
                    if copied > 0:
                        copy = ahead(copies, item * copied * x_group)
                        # In the image a group's pixels are `groups * x_group` elements apart; packed, they use whole
                        # cache lines and all cache sets.
                        for i in range(copied):
                            pixel, to = ahead(source, i * groups * x_group), ahead(copy, i * x_group)
                            for j in range(0, whole, width):
                                copy_vectors(ahead(pixel, j), ahead(to, j), 1)
                            for j in range(whole, x_group):
                                to[j] = pixel[j]
                        source = copy
                    add_products(
                        source,
                        x_lines,
                        x_step,
                        ahead(dy, n * dy_images + group * dy_group),
                        dy_lines,
                        dy_step,
                        lines,
                        line,
                        block,
                        starts,
                        panel_lines,
                        entries,
                        ahead(c, group * dy_group),
                        c_rows,
                        1,
                        zeros,
                        rows,
                        units,
                        first_unit,
                        stop_unit,
                        ahead(panels, item * panel_size),
                        width,
                        high,
                        first_block,
                        stop_block,
                    )


class _Tables(NamedTuple):
    """See `add_products`."""

    starts: ConstantTable
    x: ConstantTable
    dy: ConstantTable
    panel: ConstantTable
    entries: int


class GroupWeightGradient:
    """The planned weight gradient of a grouped convolution.

    Args:
        shape: of the convolution.
        threads: the backend's threads.
        workspace: the backend's workspace.
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
        self._block = max(1, PANEL // max(1, shape.out_width * 3 * WIDTH))
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
        """Return the vectors of each panel: single ones if wider tiles would leave more rows of a column idle."""
        own = panel_vectors(self._shape.group_outputs, self._shape.depth, tall=True)
        cost = {**COST_TALL, 1: FOURS.get(self._high, COST_TALL[1])}
        single = (1,) * sum(own)
        return min((own, single), key=lambda each: sum(cost[v] * -(-rows // self._heights[v]) for v in each))

    def _is_copied(self) -> bool:
        """Return whether a group's pixels, which many tiles read, are too far apart for the L1 cache."""
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
                # A segment holds all units that add to the same sums. Threads divide segments, so no two threads write
                # one sum.
                segments.append(len(units))
        return units, segments

    def _columns(self, shift: int) -> tuple[int, int]:
        """Return the output columns for which a kernel element is inside the image."""
        inside = np.flatnonzero((self._w.source + shift >= 0) & (self._w.source + shift < self._shape.sizes[-1]))
        return (int(inside[0]), int(inside[-1]) + 1) if len(inside) else (0, 0)

    def _rows_of(self, met: Any, tap: int, shift: int, high: int) -> list[tuple[int, int, int]]:
        """Return the tables and the row count of each tile of a kernel column; `met`: its rows inside the image."""
        shape, channels = self._shape, np.arange(self._shape.group_channels)
        x = (self._h.shifts[met] * shape.sizes[-1] + shift)[:, None] * self._pixel + channels
        c = (self._h.taps[met] * shape.geometry.kernel[-1] + tap)[:, None] * shape.group_channels + channels
        x, c, result = x.reshape(-1), c.reshape(-1) * shape.outputs, []
        for first in range(0, len(x), high):
            at = np.arange(first, first + SPARE)  # padding repeats the first four entries, which are contiguous
            at = np.where(at < len(x), at, first + np.arange(SPARE) % min(4, len(x) - first))
            result.append((SPARE * len(self._rows), SPARE * len(self._rows), min(high, len(x) - first)))
            self._rows.append(x[at])
            self._c_rows.append(c[at])
        return result

    def _lines(self, images: int) -> _Tables:
        """Return where the lines of all images begin in the source."""
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
        """Compute the gradient of all images."""
        shape, transposed = self._shape, self._workspace.take("weights", dweights.size)
        # Units of different classes of lines add to the same sums, so none of them may be the one that writes.
        clear.run(self._threads, dweights.size, GRAIN, transposed)
        done, images = 0, x.shape[0]
        for many, times in ((self._together, images // self._together), (images % self._together, 1)):
            if many and times:
                self._add(x[done:], dy[done:], transposed, many, times)
            done += many * times
        transpose_add.run(
            self._threads,
            -(-shape.outputs // LINE),
            max(1, 256 // shape.depth),
            transposed,
            dweights,
            shape.depth,
            shape.outputs,
            int(accumulate),
        )

    def _add(self, x: Any, dy: Any, transposed: Any, images: int, times: int) -> None:
        shape, tables, groups = self._shape, self._lines(images), self._shape.geometry.group
        lines, plane = images * shape.out_height, math.prod(shape.sizes) * shape.channels
        shares = min(self._threads, groups)
        parts = min(self._count, -(-self._threads // shares))
        size = min(self._block, lines) * shape.out_width * 3 * WIDTH
        copied = images * math.prod(shape.sizes) if self._copies else 0
        correlate_where_it_lies.run(
            self._threads,
            shares * parts,
            1,
            x,
            images * plane,
            shape.group_channels,
            tables.x,
            shape.geometry.stride[-1] * self._pixel,
            dy,
            lines * shape.out_width * shape.outputs,
            shape.group_outputs,
            tables.dy,
            shape.outputs,
            lines,
            shape.out_width,
            self._block,
            tables.starts,
            tables.panel,
            tables.entries,
            times,
            groups,
            shares,
            parts,
            transposed,
            self._c_row_table,
            ZEROS,
            self._row_table,
            self._units,
            self._segments,
            self._count,
            self._workspace.take("panels", shares * parts * size),
            size,
            copied,
            self._workspace.take("images", shares * parts * copied * shape.group_channels + WIDTH),
            WIDTH,
            self._high,
            -(-lines // self._block) if self._banded else 1,
        )


CACHED = 96 * 1024
"""Elements of images that all groups of an item read, so that they stay in the L2 cache."""
SPAN = 64
"""Minimum elements of a pixel per item, so that reads are contiguous."""
ITEMS_PER_THREAD = 4
"""Items per thread at which groups and panels are not divided further."""


def _packed_order(residues: Sequence[AxisTaps], kernel: tuple[int, ...]) -> Any:
    """Return the kernel's elements in packed order: neighbours in an image are neighbours in the packed weights."""
    columns = np.concatenate([residue.taps for residue in residues])
    missing = np.setdiff1d(np.arange(kernel[-1]), columns)  # residues without pixels
    columns = np.concatenate([columns, missing])
    return (np.arange(math.prod(kernel[:-1]))[:, None] * kernel[-1] + columns).reshape(-1)


@kernel
def correlate_windows(
    begin: Int,
    end: Int,
    x: Floats,
    image: Int,
    x_group: Int,
    taps_at: Words,
    packed: Floats,
    packed_group: Int,
    packed_taps: Words,
    taps: Int,
    start: Floats,
    y: Floats,
    y_image: Int,
    y_group: Int,
    blocks: Int,
    groups: Int,
    parts: Int,
    table: Words,
    panels: Int,
    width: Int,
    bounds: Words,
    tiles: Words,
    pixels_at: Words,
    y_at: Words,
    newest: Words,
    addend: Floats,
    adds: Int,
    relu: Int,
) -> None:
    """y[pixel, column] = start[column] + sum over a tile's taps and inner of x * packed (+ addend), optionally
    rectified.

    Items are (images, block, part of the panels of all groups). `bounds` gives for each panel width and block the range
    of its tiles. A tile is (first pixel, pixels, first tap, taps, elements of each, first of the newest taps, their
    end).
    """
    for item in range(begin, end):
        part, block, n = item % parts, item // parts % blocks, item // (parts * blocks)
        opening, stop = part * groups * panels // parts, (part + 1) * groups * panels // parts
        for unit in range(opening, stop):
            group, panel = unit // panels, unit % panels
            source = ahead(x, n * image + group * x_group)
            vectors, column, last = table[4 * panel], table[4 * panel + 1], table[4 * panel + 3]
            weights = ahead(packed, group * packed_group + table[4 * panel + 2])
            begins = ahead(start, group * y_group + column)
            at = n * y_image + group * y_group + column
            target, more, wide = ahead(y, at), ahead(addend, at), vectors * width
            steps = table_at(packed_taps, (vectors - 1) * taps)
            # ROWS, which compiled code cannot index.
            rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
            # A tile's height depends on the width of its panel, so each width has tiles of its own.
            own = (vectors - 1) * (blocks + 1) + block
            for number in range(7 * bounds[own], 7 * bounds[own + 1], 7):
                first, tap = tiles[number], tiles[number + 2]
                if panel == 0 or unit == opening:  # prefetch for the next tile: its pixels are far apart
                    # Of the next tile's taps only the ones that no neighbour of the pixel has read; the others are in
                    # the cache already.
                    for new in range(tiles[number + 5], tiles[number + 6]):
                        wanted = ahead(source, newest[new])
                        for i in range(first + rows, first + 2 * rows):
                            fetch(ahead(wanted, pixels_at[i]))
                tile(
                    vectors,
                    source,
                    table_at(pixels_at, first),
                    table_at(taps_at, tap),
                    1,
                    weights,
                    table_at(steps, tap),
                    wide,
                    tiles[number + 3],
                    tiles[number + 4],
                    begins,
                    0,
                    target,
                    table_at(y_at, first),
                    tiles[number + 1],
                    last,
                    more,
                    adds,
                    relu,
                )


class _Tiles(NamedTuple):
    """See `correlate_windows`."""

    bounds: ConstantTable
    tiles: ConstantTable
    pixels_at: ConstantTable
    y_at: ConstantTable


class _Taps(NamedTuple):
    """The taps of a class of pixels, as offsets from the window's origin.

    Attributes:
        shifts: offsets of runs of elements.
        taps: positions in the packed weights of each run's first tap.
        length: elements of each run.
        newest: offsets that no neighbouring pixel has read.
    """

    shifts: Any
    taps: Any
    length: int
    newest: Any


def _newest(taps: Any, steps: Sequence[int]) -> Any:
    """Return the tap offsets that neighbouring pixels, `steps` apart along each axis, do not read."""
    return taps[~np.any([np.isin(taps + step, taps) for step in steps], axis=0)] if len(taps) else taps


class WindowCorrelation:
    """The planned sums of a convolution's forward pass or data gradient.

    Args:
        shape: of the convolution.
        back: whether it is the data gradient.
    """

    def __init__(self, shape: ConvolutionShape, back: bool) -> None:
        g = shape.geometry
        read, made = (shape.out, shape.sizes) if back else (shape.sizes, shape.out)
        self._groups = g.group
        self._channels, self._columns = shape.group_channels, shape.group_outputs
        if back:
            self._channels, self._columns = self._columns, self._channels
        self._pixel = self._groups * self._channels
        self._images = math.prod(read) * self._pixel, math.prod(made) * self._groups * self._columns
        axes = [
            axis_residues(size, *shape.window(i)) if back else [forward_axis(out, *shape.window(i))]
            for i, (size, out) in enumerate(zip(shape.sizes, shape.out, strict=True))
        ]
        taps = _packed_order(axes[-1], g.kernel)
        self._weights: tuple[ConstantTable, int, ConstantTable | None]
        if back:
            rows = taps[:, None] * shape.group_channels + np.arange(self._channels) * shape.depth
            self._weights = extended(rows), 1, extended(np.argsort(rows.reshape(-1)))
        else:
            self._weights = extended(np.arange(shape.depth)), shape.depth, None
        self._classes: list[_Taps] = []
        strides = (1,) * len(read) if back else g.stride
        self._steps = [stride * math.prod(read[i + 1 :]) * self._pixel for i, stride in enumerate(strides)]
        self._plan_pixels(axes, read, made, np.argsort(taps).reshape(g.kernel))
        count = len(self._at[0])
        self._together = max(1, TOGETHER // max(1, count))
        self.panels = Panels(len(taps) * self._channels, self._columns, self._together * count)
        self._plan_taps()
        self._blocks = self._divide_rows(made)
        self._tiles: dict[int, _Tiles] = {}

    def _plan_pixels(
        self, axes: Sequence[list[AxisTaps]], read: tuple[int, ...], made: tuple[int, ...], packed_at: Any
    ) -> None:
        """Compute each pixel's window origin, position, row, and class of taps."""
        # `packed_at` gives the position of each kernel element in the packed weights.
        parts, kernel = [], packed_at.shape
        positions = packed_at.reshape(-1, kernel[-1])
        # Pixels of one residue of the stride read the same taps. All residues enter one list of tiles, so that a single
        # pass writes the whole result.
        for residue in itertools.product(*axes):
            h = lines_of(residue[:-1], read[:-1], made[:-1], kernel[:-1])
            w = lines_of(residue[-1:], read[-1:], made[-1:], kernel[-1:])
            first = len(self._classes)
            for rows, columns in itertools.product(h.kinds, w.kinds):
                shifts = h.shifts[rows][:, None] * read[-1] + w.shifts[columns]
                taps, length = positions[h.taps[rows][:, None], w.taps[columns]], 1
                if self._groups == 1 and shifts.size and np.all(np.diff(shifts) == 1) and np.all(np.diff(taps) == 1):
                    length = shifts.shape[1]  # merge contiguous elements into one run
                own = [values[:, ::length].reshape(-1) for values in (shifts * self._pixel, taps)]
                newest = _newest(shifts.reshape(-1) * self._pixel, self._steps)
                self._classes.append(_Taps(own[0], own[1], length * self._channels, newest))
            x_at = (h.source[:, None] * read[-1] + w.source) * self._pixel
            y_at = (h.at[:, None] * made[-1] + w.at) * self._groups * self._columns
            row = np.broadcast_to(h.at[:, None], x_at.shape)
            kind = first + h.kind[:, None] * len(w.kinds) + w.kind
            parts.append([values.reshape(-1) for values in (x_at, y_at, row, kind)])
        self._at = [np.concatenate(values) for values in zip(*parts, strict=True)]

    def _plan_taps(self) -> None:
        taps = np.concatenate([own.taps for own in self._classes])
        self._first_tap = np.cumsum([0, *(len(own.shifts) for own in self._classes)])
        self._first_new = np.cumsum([0, *(len(own.newest) for own in self._classes)])
        self._newest = extended(np.concatenate([own.newest for own in self._classes]))
        self._taps_at = extended(np.concatenate([own.shifts for own in self._classes]))
        widths = np.arange(1, 4)[:, None] * WIDTH
        self._packed_taps = extended(taps * self._channels * widths)
        self._taps = len(taps)

    def _divide_rows(self, made: tuple[int, ...]) -> int:
        """Return the number of row parts of a large image."""
        rows, count = math.prod(made[:-1]), len(self._at[0])
        return max(1, min(rows, round(count / TOGETHER)))

    def filled(self, images: int) -> float:
        """Return the share of tile rows in use; with kernels large relative to the image, few pixels share taps."""
        counts = np.unique(self._keys(), return_counts=True)[1] * min(images, self._together)
        rows = ROWS[int(self.panels.entries[0, 0])]
        return float(counts.sum() / max(1, (-(-counts // rows) * rows).sum()))

    def _keys(self) -> Any:
        """Block and class of each pixel, block * classes + class; pixels with equal keys share tiles."""
        _, _, row, kind = self._at
        return row * self._blocks // max(1, int(row.max(initial=0)) + 1) * len(self._classes) + kind

    def _arranged(self, together: int) -> _Tiles:
        """Return the tiles of this many images."""
        if together not in self._tiles:
            x_at, y_at, key = (np.tile(values, together) for values in (*self._at[:2], self._keys()))
            image = np.repeat(np.arange(together), len(self._at[0]))
            x_at, y_at = x_at + image * self._images[0], y_at + image * self._images[1]
            # Within a class by address, so that the pixels of a tile are neighbours.
            order = np.lexsort((y_at, key))
            x_at, y_at, key = x_at[order], y_at[order], key[order]
            begins = np.flatnonzero(np.diff(key, prepend=-1))
            self._tiles[together] = self._cut(x_at, y_at, key, [*begins.tolist(), len(key)])
        return self._tiles[together]

    def _cut(self, x_at: Any, y_at: Any, key: Any, begins: list[int]) -> _Tiles:
        """Return tiles of 1, 2 and 3 vectors for pixels sorted by block and class; each class starts a new tile."""
        wanted = set(self.panels.entries[:, 0].tolist())
        tiles: list[tuple[int, ...]] = []
        bounds: list[Any] = []
        order: list[int] = []
        for vectors in (1, 2, 3):
            starts = np.full(self._blocks + 1, -1)
            for begin, stop in itertools.pairwise(begins) if vectors in wanted else ():
                block, kind = divmod(int(key[begin]), len(self._classes))
                starts[block] = len(tiles) if starts[block] < 0 else starts[block]
                tap, end = (int(at) for at in self._first_tap[kind : kind + 2])
                new = (int(at) for at in self._first_new[kind : kind + 2])
                own = tap, end - tap, self._classes[kind].length, *new
                for first in range(begin, stop, ROWS[vectors]):
                    count = min(ROWS[vectors], stop - first)
                    tiles.append((len(order), count, *own))
                    # A tile reads the offsets of all its rows; the first pixel's stand in for missing ones.
                    order += [*range(first, first + count), *[first] * (ROWS[vectors] - count)]
            starts[self._blocks] = len(tiles)
            # A block without tiles of this width begins where the next block does, so that its range is empty.
            for block in reversed(range(self._blocks)):
                starts[block] = starts[block + 1] if starts[block] < 0 else starts[block]
            bounds.append(starts)
        return _Tiles(*map(extended, (np.concatenate(bounds), tiles, x_at[order], y_at[order])))

    @property
    def packed_size(self) -> int:
        """Elements of the packed weights."""
        return self.panels.size * self._groups

    def pack(self, threads: int, weights: Any, group_step: int, packed: Any) -> None:
        """Pack the weights in the order in which `run` reads them."""
        rows, step, order = self._weights
        packing = WeightPacking(rows, step, self._groups, group_step, order)
        pack_weights(threads, self.panels, weights, packing, packed)

    def _parts(self, threads: int, together: int, items: int) -> int:
        """Return the number of group parts: an item's data fits a cache, and all threads have work."""
        footprint = together * max(self._images) // self._blocks
        most = max(1, self._groups * self._channels // SPAN)
        parts = max(1, min(most, round(footprint / CACHED)))
        units = self._groups * self.panels.count
        return max(parts, min(units, -(-ITEMS_PER_THREAD * threads // items))) if threads > 1 else parts

    def run(
        self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any, ending: Ending | None = None
    ) -> None:
        """Compute y of some images."""
        addend, relu = (None, False) if ending is None else (ending.addend, ending.relu)
        # No more images in an item than a thread's share: else threads would stay idle.
        together = min(self._together, -(-images // threads))
        done, (x_image, y_image) = 0, self._images
        for many, times in ((together, images // together), (images % together, 1)):
            if not many or not times:
                continue
            tiles, parts = self._arranged(many), self._parts(threads, many, times * self._blocks)
            correlate_windows.run(
                threads,
                times * self._blocks * parts,
                1,
                x[done:],
                many * x_image,
                self._channels,
                self._taps_at,
                packed,
                self.panels.size,
                self._packed_taps,
                self._taps,
                start,
                y[done:],
                many * y_image,
                self._columns,
                self._blocks,
                self._groups,
                parts,
                self.panels.table,
                self.panels.count,
                WIDTH,
                tiles.bounds,
                tiles.tiles,
                tiles.pixels_at,
                tiles.y_at,
                self._newest,
                (y if addend is None else addend)[done:],
                int(addend is not None),
                int(relu),
            )
            done += many * times


# -- the planned convolution ---------------------------------------------------------------------------

CHUNK = 8 * 2**20
"""Elements of padded images per chunk, so that the workspace grows with neither batch nor image."""
MIN_GROUPED_PIXELS = 128
"""Minimum output pixels of all images for the grouped weight gradient; with fewer, transposing its result takes longer
than copying the image."""

FILLED = 0.9
"""Minimum share of used tile rows for reading images without a padded copy."""


class TileConvolution:
    """A planned convolution over two or more spatial axes of channels-last arrays.

    Args:
        threads: the backend's threads.
        workspace: the backend's workspace.
        x_shape: (N, C, spatial...).
        weights_shape: (num_output, C / group, kernel...).
        geometry: window geometry.
    """

    gives_sums = False
    forward_normalised = None
    backward_normalised = None

    def __init__(
        self,
        threads: int,
        workspace: Workspace,
        x_shape: tuple[int, ...],
        weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:
        self.threads, self.workspace = threads, workspace
        self.shape = ConvolutionShape(x_shape, weights_shape, geometry)
        columns = self.shape.channels * geometry.kernel[-1]
        self.zeros = ConstantTable(np.zeros(max(self.shape.outputs, columns), np.float32))
        self.kept: Any = None
        self._kept_at = 0
        self._forward: PaddedCorrelation | WindowCorrelation | None = None
        self._backward: PaddedCorrelation | WindowCorrelation | None = None
        self._gradient: WeightGradient | None = None
        self._group_gradient: GroupWeightGradient | None = None

    # -- forward ------------------------------------------------------------------------------------

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:
        assert sums is None, "gives no sums"
        plan, start, packed = self._planned(), self.zeros if bias is None else bias, self.packed(weights)
        if isinstance(plan, WindowCorrelation):
            plan.run(self.threads, x.shape[0], x, packed, start, y, Ending(residual, relu))
            return
        for some, padded in self._padded(x, self.shape.padding):
            ending = Ending(None if residual is None else residual[some], relu)
            plan.run(self.threads, some.stop - some.start, padded, packed, start, y[some], ending)

    def _planned(self) -> PaddedCorrelation | WindowCorrelation:
        if self._forward is None:
            # Without padding there is no copy to avoid, and pixels need not be sorted by their taps.
            unpadded = self.shape.padding.needed or self.shape.geometry.group > 1
            self._forward = (self._unpadded(back=False) if unpadded else None) or _plan_forward(self.shape)
        return self._forward

    def _unpadded(self, back: bool) -> WindowCorrelation | None:
        """Return a plan without a padded copy if it uses enough rows of its tiles, or if there is no alternative."""
        plan = WindowCorrelation(_with_wide_pixels(self.shape) if back else self.shape, back)
        only = self.shape.geometry.group > 1 or (back and max(self.shape.geometry.stride) > 1)
        return plan if only or plan.filled(self.shape.images) >= FILLED else None

    @property
    def packed_size(self) -> int:
        """Elements of the weights packed for `forward`."""
        return self._planned().packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        """Pack weights for `forward`."""
        self._planned().pack(self.threads, weights, self.shape.group_step, packed)

    def packed(self, weights: Any) -> Any:
        """Return weights packed for `forward`: the cached ones, or packed for this pass."""
        packed = self.kept_for(weights)
        if packed is None:
            # Training changes the weights between passes, so they are packed in each one; only inference keeps them.
            packed = self.workspace.take("weights", self.packed_size)
            self.pack(weights, packed)
        return packed

    def keep(self, weights: Any) -> None:
        """Cache packed weights for all `forward` calls with them, until the next `keep` of these weights."""
        # The same memory each time: captured kernel calls hold its address.
        self.kept = aligned(self.packed_size) if self.kept is None else self.kept
        self.pack(weights, self.kept)
        self._kept_at = host_address(weights)

    def use_kept_for(self, given: Any) -> None:
        """Use the last cached weights for calls with the weights `given`, and only for these."""
        self._kept_at = host_address(given)

    def kept_for(self, weights: Any) -> Any:
        """Return the cached packed weights of `weights`, or None."""
        return self.kept if self.kept is not None and self._kept_at == host_address(weights) else None

    def _padded(self, x: Any, padding: Padding) -> Iterator[tuple[slice, Any]]:
        """Yield the images chunk by chunk: (slice of images, their padded form)."""
        images = x.shape[0]
        step = max(1, CHUNK // padding.elements) if padding.needed else images
        for first in range(0, images, step):
            some = slice(first, min(first + step, images))
            if not padding.needed:
                yield some, x[some]
                continue
            padded = self.workspace.take("images", (some.stop - first) * padding.elements + WIDTH)
            padding.write(self.threads, x[some], padded)
            yield some, padded

    # -- data gradient --------------------------------------------------------------------------------

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        if self._backward is None:
            self._backward = self._unpadded(back=True) or _plan_backward(self.shape)
        plan, packed = self._backward, self.workspace.take("weights", self._backward.packed_size)
        plan.pack(self.threads, weights, self.shape.group_step, packed)
        if isinstance(plan, WindowCorrelation):
            plan.run(self.threads, dy.shape[0], dy, packed, self.zeros, dx)
            return
        for some, padded in self._padded(dy, plan.padding):
            plan.run(self.threads, some.stop - some.start, padded, packed, self.zeros, dx[some])

    # -- weight gradient ------------------------------------------------------------------------------

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        if self.shape.scattered and self.shape.pixels >= MIN_GROUPED_PIXELS:
            if self._group_gradient is None:
                self._group_gradient = GroupWeightGradient(self.shape, self.threads, self.workspace)
            self._group_gradient.run(x, dy, dweights, accumulate)
            return
        if self._gradient is None:
            self._gradient = WeightGradient(self.shape, self.threads, self.workspace)
        for some, padded in self._padded(x, self.shape.padding):
            self._gradient.add(padded, dy[some], dweights, accumulate, some.start == 0)
        self._gradient.finish(dweights, accumulate)


def _with_wide_pixels(shape: ConvolutionShape) -> ConvolutionShape:
    """Return the shape of the same arrays with neighbouring pixels of a row as one, so that they fill vectors.

    A pixel of r C channels stands for r pixels if r divides width, kernel, stride and padding along a row.
    """
    g = shape.geometry
    many = math.gcd(shape.sizes[-1], g.kernel[-1], g.stride[-1], g.pad[-1])
    if many == 1 or g.group > 1 or g.dilation[-1] > 1 or shape.channels % WIDTH == 0:
        return shape
    channels = many * shape.channels
    kernel, stride, pad = ((*axes[:-1], axes[-1] // many) for axes in (g.kernel, g.stride, g.pad))
    return ConvolutionShape(
        (shape.images, channels, *shape.sizes[:-1], shape.sizes[-1] // many),
        (shape.outputs, channels, *kernel),
        replace(g, kernel=kernel, stride=stride, pad=pad),
    )


def _plan_forward(shape: ConvolutionShape) -> PaddedCorrelation:
    g = shape.geometry
    h, w = np.meshgrid(shape.line_rows, np.arange(shape.out_width) * g.stride[-1], indexing="ij")
    pixels = Pixels(h.reshape(-1), w.reshape(-1), np.arange(h.size) * shape.outputs, h.size * shape.outputs)
    filters = Filters(np.arange(shape.depth), shape.depth, shape.group_outputs, g.group)
    return PaddedCorrelation(shape.padding, shape.taps, pixels, filters)


def _plan_backward(shape: ConvolutionShape) -> PaddedCorrelation:
    """Plan the data gradient of a convolution without a stride."""
    axes = [axis_residues(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]
    reaches = [reach(residues, size) for residues, size in zip(axes, shape.out, strict=True)]
    before, padded = tuple(zeros for zeros, _ in reaches), tuple(size for _, size in reaches)
    padding = Padding(shape.out, shape.outputs, before, padded)
    kernel, one = shape.geometry.kernel, [residues[0] for residues in axes]
    h = merged_axes(one[:-1], shape.sizes[:-1], kernel[:-1], before[:-1], padded[:-1])
    w = merged_axes(one[-1:], shape.sizes[-1:], kernel[-1:], before[-1:], padded[-1:])
    return _plan_residue(shape, padding, h, w)


def _plan_residue(shape: ConvolutionShape, padding: Padding, h: AxisTaps, w: AxisTaps) -> PaddedCorrelation:
    outputs, kernel_w = shape.group_outputs, shape.geometry.kernel[-1]
    whole = len(w.shifts) > 0 and bool(np.all(np.diff(w.shifts) == 1))
    length = len(w.taps) if whole else 1
    shifts = np.meshgrid(h.shifts, w.shifts[::length], indexing="ij")
    taps = Taps(shifts[0].reshape(-1), shifts[1].reshape(-1), length, outputs)
    tap = h.taps[:, None] * kernel_w + w.taps[None, :]
    weight_rows = tap.reshape(-1, 1) * shape.group_channels + np.arange(outputs)[None, :] * shape.depth
    at_h, at_w = np.meshgrid(h.indices, w.indices, indexing="ij")
    y_at = (h.pixels[:, None] * shape.sizes[-1] + w.pixels[None, :]) * shape.channels
    pixels = Pixels(at_h.reshape(-1), at_w.reshape(-1), y_at, math.prod(shape.sizes) * shape.channels)
    return PaddedCorrelation(padding, taps, pixels, Filters(weight_rows, 1, shape.group_channels, shape.geometry.group))
