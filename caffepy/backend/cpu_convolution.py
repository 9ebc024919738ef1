"""Convolution over two spatial axes on the CPU, channels last, straight from the (padded) image.

With channels last, the elements of one kernel row that meet an output pixel lie next to each other, so a tile of
output pixels by output channels is a sum over kernel rows of small matrix products that read the image in place: no
columns are written (im2col), which would cost as much memory traffic as the products themselves. The gradient of the
image is the same sum over the padded gradient of the output, once for each phase of the stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.backend.base import Geometry, spatial_output
from caffepy.backend.cpu_panels import Panels, pack_weights
from caffepy.backend.cpu_runtime import Floats, Int, Pinned, Words, kernel
from caffepy.backend.cpu_tile import ROWS, tile1, tile2, tile3
from caffepy.backend.cpu_vector import WIDTH, ahead, copy_vectors, table_at
from caffepy.backend.cpu_workspace import Workspace

BLOCK = 192
"""Output pixels that one item of work covers: their part of the image stays in the first or second cache."""
CHUNK = 8 * 2**20
"""Elements of padded images made at a time, so that the workspace does not grow with the batch."""
CACHED = 96 * 1024
"""Elements of x and dy that the gradient of the weights works on at a time."""
SPARE = 8
"""Entries that tables have beyond the last, as a tile reads whole."""


@kernel
def pad_images(
    begin: Int, end: Int, x: Floats, padded: Floats, row: Int, height: Int, top: Int, left: Int,
    padded_height: Int, padded_row: Int,
) -> None:  # fmt: skip
    """Items are rows of the padded images; `row`, `left` and `padded_row` count elements."""
    for item in range(begin, end):
        h = item % padded_height - top
        target = item * padded_row
        if h < 0 or h >= height:
            for i in range(padded_row):
                padded[target + i] = 0
        else:
            source = ((item // padded_height) * height + h) * row
            stop = min(left + row, padded_row)
            for i in range(left):
                padded[target + i] = 0
            for i in range(stop - left):
                padded[target + left + i] = x[source + i]
            for i in range(stop, padded_row):
                padded[target + i] = 0


@kernel
def correlate(
    begin: Int, end: Int, x: Floats, image: Int, x_group: Int, pixels_at: Words, taps_at: Words, taps: Int, inner: Int,
    packed: Floats, packed_group: Int, packed_taps: Words, start: Floats, y: Floats, y_image: Int, y_group: Int,
    y_at: Words, pixels: Int, block: Int, blocks: Int, groups: Int, table: Words, panels: Int, width: Int,
    cutting: Int, cuts2: Words, cuts3: Words, cuts1: Words,
) -> None:  # fmt: skip
    """y[pixel, column] = start[column] + sum over taps and inner of x * packed. Items are (image, group, block)."""
    for item in range(begin, end):
        first = (item % blocks) * block
        stop = min(first + block, pixels)
        group = (item // blocks) % groups
        n = item // (blocks * groups)
        source = ahead(x, n * image + group * x_group)
        for panel in range(panels):
            vectors = table[4 * panel]
            column = table[4 * panel + 1]
            weights = ahead(packed, group * packed_group + table[4 * panel + 2])
            last = table[4 * panel + 3]
            begins = ahead(start, group * y_group + column)
            target = ahead(y, n * y_image + group * y_group + column)
            steps = table_at(packed_taps, (vectors - 1) * taps)
            wide = vectors * width
            rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
            cuts = cuts2 if vectors == 2 else (cuts3 if vectors == 3 else cuts1)
            tap0, tap1, inner0, inner1 = 0, taps, 0, inner
            for q in range(first, stop, rows):
                if cutting == 1:
                    cut = 4 * (q // rows)
                    tap0, tap1, inner0, inner1 = cuts[cut], cuts[cut + 1], cuts[cut + 2], cuts[cut + 3]
                if vectors == 2:
                    tile2(
                        ahead(source, inner0), table_at(pixels_at, q), table_at(taps_at, tap0), 1,
                        ahead(weights, inner0 * wide), table_at(steps, tap0), wide, tap1 - tap0, inner1 - inner0,
                        begins, 0, target, table_at(y_at, q), stop - q, last,
                    )  # fmt: skip
                elif vectors == 3:
                    tile3(
                        ahead(source, inner0), table_at(pixels_at, q), table_at(taps_at, tap0), 1,
                        ahead(weights, inner0 * wide), table_at(steps, tap0), wide, tap1 - tap0, inner1 - inner0,
                        begins, 0, target, table_at(y_at, q), stop - q, last,
                    )  # fmt: skip
                else:
                    tile1(
                        ahead(source, inner0), table_at(pixels_at, q), table_at(taps_at, tap0), 1,
                        ahead(weights, inner0 * wide), table_at(steps, tap0), wide, tap1 - tap0, inner1 - inner0,
                        begins, 0, target, table_at(y_at, q), stop - q, last,
                    )  # fmt: skip


@kernel
def correlate_weights(
    begin: Int, end: Int, a: Floats, a_image: Int, a_lines: Words, a_step: Int,
    b: Floats, b_image: Int, b_lines: Words, b_step: Int, images: Int, lines: Int, line: Int, block: Int,
    c: Floats, c_rows: Words, accumulate: Int, zeros: Floats, rows: Words, units: Words, count: Int, items: Int,
    panels: Floats, panel_size: Int, panel_lines: Words, width: Int,
) -> None:  # fmt: skip
    """c[r, j] (+)= sum over images and pixels of a * b. Items are parts of the units: tiles of c (`_WeightGradient`).

    The columns of b that a tile needs are first brought together: in the image they are far apart, often by a
    power of two, for which caches have few places.
    """
    for item in range(begin, end):
        panel = ahead(panels, item * panel_size)
        for n in range(images):
            for first in range(0, lines, block):
                keep = 1 if accumulate == 1 or n > 0 or first > 0 else 0
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
                            source = n * b_image + packed + b_lines[first + h]
                            target = h * line * wide
                            for _ in range(line):
                                if inside == wide:
                                    copy_vectors(ahead(b, source), ahead(panel, target), vectors)
                                else:
                                    for j in range(inside):
                                        panel[target + j] = b[source + j]
                                source += b_step
                                target += wide
                    factor = ahead(a, n * a_image + units[unit + 1])
                    target_at = ahead(c, units[unit + 3])
                    row = table_at(rows, units[unit + 4])
                    begins = target_at if keep == 1 else zeros
                    steps = table_at(panel_lines, (vectors - 1) * lines)
                    if vectors == 2:
                        tile2(
                            factor, row, a_at, a_step, panel, steps, wide, height, line,
                            begins, keep, target_at, c_rows, units[unit + 5], last,
                        )  # fmt: skip
                    elif vectors == 3:
                        tile3(
                            factor, row, a_at, a_step, panel, steps, wide, height, line,
                            begins, keep, target_at, c_rows, units[unit + 5], last,
                        )  # fmt: skip
                    else:
                        tile1(
                            factor, row, a_at, a_step, panel, steps, wide, height, line,
                            begins, keep, target_at, c_rows, units[unit + 5], last,
                        )  # fmt: skip


_ZEROS = Pinned(np.zeros(4 * WIDTH, np.float32))


@dataclass(frozen=True)
class _Padding:
    """Where an image (H, W, C) lies in a padded one."""

    height: int
    width: int
    channels: int
    top: int
    left: int
    padded_height: int
    padded_width: int

    @property
    def needed(self) -> bool:
        return (self.height, self.width) != (self.padded_height, self.padded_width) or bool(self.top or self.left)

    @property
    def elements(self) -> int:
        return self.padded_height * self.padded_width * self.channels

    def at(self, h: Any, w: Any) -> Any:
        """Offset of the pixel that is (h, w) before padding."""
        return ((h + self.top) * self.padded_width + w + self.left) * self.channels

    def shift(self, rows: Any, columns: Any) -> Any:
        """Offset between pixels that are so many rows and columns apart."""
        return (rows * self.padded_width + columns) * self.channels

    def write(self, threads: int, x: Any, padded: Any) -> None:
        """Copy the images x (N, C, H, W) with zeros around them."""
        row = self.padded_width * self.channels
        rows = x.shape[0] * self.padded_height
        pad_images.run(
            threads, rows, max(1, 16384 // row), x, padded, self.width * self.channels, self.height, self.top,
            self.left * self.channels, self.padded_height, row,
        )  # fmt: skip


def _extended(table: Any) -> Pinned:
    """A table as int64 with the last entry repeated as often as a tile may read beyond."""
    flat = np.asarray(table, np.int64).reshape(-1)
    if not flat.size:
        return Pinned(np.zeros(SPARE, np.int64))
    return Pinned(np.concatenate([flat, np.repeat(flat[-1:], SPARE)]))


@dataclass(frozen=True)
class _Taps:
    """The runs of elements that one output pixel is computed from.

    Args:
        rows: shift of each run from the pixel's window, in rows of the image.
        columns: likewise in columns.
        length: pixels in a run.
        channels: elements of a pixel that belong to a run.
    """

    rows: Any
    columns: Any
    length: int
    channels: int

    def inside(self, padding: _Padding, h: Any, w: Any) -> Any:
        """For each window at (h, w): [first tap, last tap + 1, first element, last element + 1] inside the image.

        What lies outside is zero, so it may be left out of the sum.
        """
        at_h, at_w = h[:, None] + self.rows, w[:, None] + self.columns
        valid = (at_h >= 0) & (at_h < padding.height) & (at_w + self.length > 0) & (at_w < padding.width)
        count = len(self.rows)
        first, stop = np.argmax(valid, axis=1), count - np.argmax(valid[:, ::-1], axis=1)
        left = np.clip(-at_w.min(axis=1), 0, self.length)
        right = np.clip(padding.width - at_w.max(axis=1), 0, self.length)
        if self.length == 1:
            left, right = np.zeros_like(left), np.ones_like(right)
        cut = np.stack([first, stop, left * self.channels, right * self.channels], axis=1)
        cut[~valid.any(axis=1)] = (count, 0, self.length * self.channels, 0)
        return cut


def _tile_cuts(cuts: Any, rows: int) -> Any:
    """What a tile of several pixels needs of what each of them needs."""
    tiles = []
    for first in range(0, len(cuts), rows):
        part = cuts[first : first + rows]
        low, high = part.min(axis=0), part.max(axis=0)
        tiles.append((low[0], max(low[0], high[1]), low[2], max(low[2], high[3])))
    return _extended(tiles)


class _Correlation:
    """One sum over taps, planned: y[pixel, column] = start[column] + sum over taps, inner of x * weights.

    Args:
        padding: of the image that is read.
        h, w: where each output pixel's window begins in the image.
        taps: what is read from there.
        weight_rows: place of each (tap, element) in one group's weights, and `weight_step` from column to column.
        y_at: offset of each output pixel.
        y_image: elements of an output image.
        columns: output channels of a group.
        groups: how many of them.
    """

    def __init__(
        self, padding: _Padding, h: Any, w: Any, taps: _Taps, weight_rows: Any, weight_step: int,
        y_at: Any, y_image: int, columns: int, groups: int,
    ) -> None:  # fmt: skip
        self.padding = padding
        self._group_channels = taps.channels
        self._pixels = len(h)
        self._pixels_at, self._y_at = _extended(padding.at(h, w)), _extended(y_at)
        self._taps, self._inner = len(taps.rows), taps.length * taps.channels
        self._taps_at = _extended(padding.shift(taps.rows, taps.columns))
        self._weight_rows = _extended(weight_rows)
        self._weight_step = weight_step
        self._y_image, self._columns, self._groups = y_image, columns, groups
        self.panels = Panels(np.size(weight_rows), columns, self._pixels)
        widths = np.arange(1, 4)[:, None] * WIDTH
        self._packed_taps = _extended(np.arange(self._taps) * self._inner * widths)
        self._cutting = padding.needed and self._taps > 0
        cuts = taps.inside(padding, h, w) if self._cutting else np.zeros((1, 4), np.int64)
        self._cuts = {vectors: _tile_cuts(cuts, rows) for vectors, rows in ROWS.items()}

    def pack(self, threads: int, weights: Any, group_step: int, workspace: Workspace) -> Any:
        """The weights in panel order."""
        packed = workspace.take("weights", self.panels.size * self._groups)
        pack_weights(
            threads, self.panels, weights, self._weight_rows, self._weight_step, self._groups, group_step, packed
        )
        return packed

    def run(self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any) -> None:
        """Compute y of some images from x, which is padded."""
        pieces = max(1, -(-4 * threads // (images * self._groups)))
        block = min(BLOCK, max(24, -(-self._pixels // pieces // 24) * 24))
        blocks = -(-self._pixels // block)
        correlate.run(
            threads, images * self._groups * blocks, 1, x, self.padding.elements, self._group_channels,
            self._pixels_at, self._taps_at, self._taps, self._inner, packed, self.panels.size, self._packed_taps, start,
            y, self._y_image, self._columns, self._y_at, self._pixels, block, blocks, self._groups, self.panels.table,
            self.panels.count, WIDTH, int(self._cutting), self._cuts[2], self._cuts[3], self._cuts[1],
        )  # fmt: skip


class TileConvolution:
    """A planned convolution over two spatial axes.

    Args:
        threads: of the backend.
        workspace: of the backend.
        x_shape: (N, C, H, W).
        weights_shape: (num_output, C / group, kernel_h, kernel_w).
        geometry: how the windows move.
    """

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        self._threads, self._workspace, self._geometry = threads, workspace, geometry
        self._images, self._channels, self._height, self._width = x_shape
        self._outputs, self._group_channels = weights_shape[:2]
        self._out_height, self._out_width = (
            spatial_output(x_shape[2 + i], *(v[i] for v in self._moves())) for i in (0, 1)
        )
        self._group_outputs = self._outputs // geometry.group
        self._depth = math.prod(weights_shape[1:])
        self._group_step = self._group_outputs * self._depth
        self._padding = _Padding(
            self._height, self._width, self._channels, geometry.pad[0], geometry.pad[1],
            self._height + 2 * geometry.pad[0], self._width + 2 * geometry.pad[1],
        )  # fmt: skip
        self._zeros = Pinned(np.zeros(max(self._outputs, self._channels), np.float32))
        self._taps = self._make_taps()
        self._forward: _Correlation | None = None
        self._backward: list[_Correlation] | None = None
        self._gradient: _WeightGradient | None = None

    def _moves(self) -> tuple[tuple[int, ...], ...]:
        g = self._geometry
        return g.kernel, g.stride, g.pad, g.dilation

    def _make_taps(self) -> _Taps:
        """Whole kernel rows where their elements lie next to each other in the image, else single kernel elements."""
        g = self._geometry
        whole = g.group == 1 and (g.dilation[1] == 1 or g.kernel[1] == 1)
        length = g.kernel[1] if whole else 1
        rows, columns = np.arange(g.kernel[0]) * g.dilation[0], np.arange(0, g.kernel[1], length) * g.dilation[1]
        rows, columns = (v.reshape(-1) for v in np.meshgrid(rows, columns, indexing="ij"))
        return _Taps(rows, columns, length, self._group_channels)

    # -- forward ------------------------------------------------------------------------------------

    def _plan_forward(self) -> _Correlation:
        g, p = self._geometry, self._padding
        h, w = np.meshgrid(
            np.arange(self._out_height) * g.stride[0] - p.top, np.arange(self._out_width) * g.stride[1] - p.left,
            indexing="ij",
        )  # fmt: skip
        return _Correlation(
            p, h.reshape(-1), w.reshape(-1), self._taps, np.arange(self._depth), self._depth,
            np.arange(h.size) * self._outputs, h.size * self._outputs, self._group_outputs, g.group,
        )  # fmt: skip

    def forward(self, x: Any, weights: Any, bias: Any, y: Any) -> None:
        """y = weights * x (+ bias)."""
        if self._forward is None:
            self._forward = self._plan_forward()
        start = self._zeros if bias is None else bias
        packed = self._forward.pack(self._threads, weights, self._group_step, self._workspace)
        for first, stop, padded in self._padded(x, self._padding):
            self._forward.run(self._threads, stop - first, padded, packed, start, y[first:stop])

    def _padded(self, x: Any, padding: _Padding) -> Any:
        """The images in order, a chunk at a time: (first, stop, their padded form)."""
        images = x.shape[0]
        step = images if not padding.needed else max(1, CHUNK // padding.elements)
        for first in range(0, images, step):
            part = x[first : first + step]
            if padding.needed:
                padded = self._workspace.take("images", part.shape[0] * padding.elements + WIDTH)
                padding.write(self._threads, part, padded)
                part = padded
            yield first, min(first + step, images), part

    # -- gradient of the image ----------------------------------------------------------------------

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        """dx = the transposed convolution of dy with weights."""
        if self._backward is None:
            self._backward = _plan_backward(self)
        for first, stop, padded in self._padded(dy, self._backward[0].padding):
            for phase in self._backward:
                packed = phase.pack(self._threads, weights, self._group_step, self._workspace)
                phase.run(self._threads, stop - first, padded, packed, self._zeros, dx[first:stop])

    # -- gradient of the weights --------------------------------------------------------------------

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        """dweights (+)= correlation of x with dy."""
        if self._gradient is None:
            self._gradient = _WeightGradient(self)
        for first, stop, padded in self._padded(x, self._padding):
            self._gradient.run(padded, dy[first:stop], dweights, accumulate or first > 0)


@dataclass(frozen=True)
class _Axis:
    """Which pixels of the image along one axis belong to one phase of the stride, and which taps reach them.

    A pixel h of the image with h + pad = stride i + phase gets from tap k the output pixel
    i + (phase - k dilation) / stride.
    """

    pixels: Any
    indices: Any
    taps: list[int]
    shifts: list[int]


def _axis_phases(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[_Axis]:
    phases = []
    for phase in range(stride):
        pixels = np.array([h for h in range(size) if (h + pad) % stride == phase], np.int64)
        taps = [k for k in range(kernel) if (phase - k * dilation) % stride == 0]
        taps.sort(key=lambda k: -k)
        shifts = [(phase - k * dilation) // stride for k in taps]
        if len(pixels):
            phases.append(_Axis(pixels, (pixels + pad) // stride, taps, shifts))
    return phases


def _reach(phases: list[_Axis], size: int) -> tuple[int, int]:
    """(zeros needed before, padded size) so that every tap of every phase stays inside."""
    low = min([p.indices[0] + min(p.shifts) for p in phases if p.shifts], default=0)
    high = max([p.indices[-1] + max(p.shifts) for p in phases if p.shifts], default=0)
    before = max(0, -int(low))
    return before, before + max(size, int(high) + 1)


def _plan_backward(plan: TileConvolution) -> list[_Correlation]:
    moves = list(zip(*plan._moves(), strict=True))
    rows = _axis_phases(plan._height, *moves[0])
    columns = _axis_phases(plan._width, *moves[1])
    top, padded_height = _reach(rows, plan._out_height)
    left, padded_width = _reach(columns, plan._out_width)
    padding = _Padding(plan._out_height, plan._out_width, plan._outputs, top, left, padded_height, padded_width)
    return [_plan_phase(plan, padding, h, w) for h in rows for w in columns]


def _plan_phase(plan: TileConvolution, padding: _Padding, h: _Axis, w: _Axis) -> _Correlation:
    outputs, kernel_w = plan._group_outputs, plan._geometry.kernel[1]
    whole = plan._geometry.group == 1 and bool(w.shifts) and bool(np.all(np.diff(w.shifts) == 1))
    length = len(w.taps) if whole else 1
    shifts = np.meshgrid(np.array(h.shifts, np.int64), np.array(w.shifts[::length], np.int64), indexing="ij")
    taps = _Taps(shifts[0].reshape(-1), shifts[1].reshape(-1), length, outputs)
    tap = np.array(h.taps, np.int64)[:, None] * kernel_w + np.array(w.taps, np.int64)[None, :]
    weight_rows = tap.reshape(-1, 1) * plan._group_channels + np.arange(outputs)[None, :] * plan._depth
    at_h, at_w = np.meshgrid(h.indices, w.indices, indexing="ij")
    y_at = (h.pixels[:, None] * plan._width + w.pixels[None, :]) * plan._channels
    return _Correlation(
        padding, at_h.reshape(-1), at_w.reshape(-1), taps, weight_rows, 1, y_at,
        plan._height * plan._width * plan._channels, plan._group_channels, plan._geometry.group,
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


class _WeightGradient:
    """The weights' gradient, divided into tiles.

    Rows of a tile are output channels and vectors run along the elements of a tap, or the other way round (`turned`)
    where that wastes fewer lanes: images of one or three channels have short taps.
    """

    def __init__(self, plan: TileConvolution) -> None:
        self._plan = plan
        g, p, self._inner = plan._geometry, plan._padding, plan._taps.length * plan._taps.channels
        self._turned = g.group == 1 and _use(plan._outputs) > 1.1 * _use(self._inner)
        self._x_lines = _extended(np.arange(plan._out_height) * g.stride[0] * p.padded_width * p.channels)
        self._dy_lines = _extended(np.arange(plan._out_height) * plan._out_width * plan._outputs)
        self._taps_at = p.shift(plan._taps.rows, plan._taps.columns)
        self._rows: list[int] = []
        units = self._turned_units() if self._turned else self._plain_units()
        self._units, self._count = _extended(units), len(units)
        self._rows_table = _extended(self._rows)
        self._c_rows = _extended(np.arange(SPARE) * (plan._outputs if self._turned else plan._depth))
        self._block = self._lines_at_a_time()
        widths = np.arange(1, 4)[:, None] * WIDTH * plan._out_width
        self._panel_lines = _extended(np.arange(plan._out_height) * widths)

    def _lines_at_a_time(self) -> int:
        """Output lines whose part of x and dy stays in the second cache while all tiles pass over them."""
        plan = self._plan
        line = plan._out_width * plan._outputs
        line += plan._padding.padded_width * plan._channels * plan._geometry.stride[0]
        return max(1, CACHED // line)

    def _row_table(self, offsets: Any) -> int:
        """Enter a tile's row offsets; those beyond the last repeat it."""
        place = len(self._rows)
        self._rows.extend(int(offsets[min(i, len(offsets) - 1)]) for i in range(SPARE))
        return place

    def _panels(self, columns: int, rows: int) -> list[tuple[int, int, int]]:
        return [(int(v), int(c), int(last)) for v, c, _, last in Panels(0, columns, rows).entries]

    def _plain_units(self) -> list[tuple[int, ...]]:
        """(vectors, offset in dy, in x, in dw, row table, rows, lanes of the last vector) of each tile."""
        plan = self._plan
        units: list[tuple[int, ...]] = []
        tables = {count: self._row_table(range(count)) for count in range(1, 9)}
        for group in range(plan._geometry.group):
            for tap, at in enumerate(self._taps_at):
                for vectors, column, last in self._panels(self._inner, plan._group_outputs):
                    x_at = group * plan._group_channels + int(at) + column
                    for row in range(0, plan._group_outputs, ROWS[vectors]):
                        count = min(ROWS[vectors], plan._group_outputs - row)
                        output = group * plan._group_outputs + row
                        dw_at = output * plan._depth + tap * self._inner + column
                        units.append((vectors, output, x_at, dw_at, tables[count], count, last))
        return units

    def _turned_units(self) -> list[tuple[int, ...]]:
        """(vectors, offset in x, in dy, in dw transposed, row table, rows, lanes of the last vector) of each tile."""
        plan = self._plan
        units: list[tuple[int, ...]] = []
        elements = (self._taps_at[:, None] + np.arange(self._inner)).reshape(-1)
        for vectors, column, last in self._panels(plan._outputs, plan._depth):
            for row in range(0, plan._depth, ROWS[vectors]):
                part = elements[row : row + ROWS[vectors]]
                place = row * plan._outputs + column
                units.append((vectors, 0, column, place, self._row_table(part), len(part), last))
        return units

    def run(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        """Add the images' share; x is padded or, if it needs no padding, as it is."""
        plan = self._plan
        if not self._turned:
            self._call(x, dy, dweights, accumulate)
            return
        turned = plan._workspace.take("weights", dweights.size)
        self._call(x, dy, turned, accumulate=False)
        transpose_add.run(
            plan._threads, plan._outputs, max(1, 4096 // plan._depth), turned, dweights, plan._depth, plan._outputs,
            int(accumulate),
        )  # fmt: skip

    def _call(self, x: Any, dy: Any, target: Any, accumulate: bool) -> None:
        plan = self._plan
        of_x = (x, plan._padding.elements, self._x_lines, plan._geometry.stride[1] * plan._channels)
        of_dy = (dy, plan._out_height * plan._out_width * plan._outputs, self._dy_lines, plan._outputs)
        a, b = (of_x, of_dy) if self._turned else (of_dy, of_x)
        items = min(plan._threads, self._count)
        size = min(self._block, plan._out_height) * plan._out_width * 3 * WIDTH
        correlate_weights.run(
            plan._threads, items, 1, *a, *b, dy.shape[0], plan._out_height, plan._out_width, self._block, target,
            self._c_rows, int(accumulate), _ZEROS, self._rows_table, self._units, self._count, items,
            plan._workspace.take("panels", items * size), size, self._panel_lines, WIDTH,
        )  # fmt: skip
