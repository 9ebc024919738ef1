"""Convolution over two spatial axes on the CPU, channels last, straight from the (padded) image.

With channels last, the elements of one kernel row that meet an output pixel lie next to each other, so a tile of output
pixels by output channels is a sum over kernel rows of small matrix products that read the image in place: no columns are
written (im2col), which would cost as much memory traffic as the products themselves. The gradient of the image is the same
sum over the padded gradient of the output, once for each phase of the stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.backend.base import Geometry, spatial_output
from caffepy.backend.cpu_panels import Panels, pack_weights, panel_vectors
from caffepy.backend.cpu_runtime import Floats, Int, Words, kernel
from caffepy.backend.cpu_tile import ROWS, WIDTH, ahead, table_at, tile1, tile2, tile3
from caffepy.backend.cpu_workspace import Workspace

BLOCK = 192
"""Output pixels that one item of work covers: their part of the image stays in the first or second cache."""
CHUNK = 8 * 2**20
"""Elements of padded images made at a time, so that the workspace does not grow with the batch."""
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
            if vectors == 2:
                for q in range(first, stop, 6):
                    tile2(
                        source, table_at(pixels_at, q), taps_at, 1, weights, steps, 2 * width, taps, inner,
                        begins, 0, target, table_at(y_at, q), stop - q, last,
                    )  # fmt: skip
            elif vectors == 3:
                for q in range(first, stop, 4):
                    tile3(
                        source, table_at(pixels_at, q), taps_at, 1, weights, steps, 3 * width, taps, inner,
                        begins, 0, target, table_at(y_at, q), stop - q, last,
                    )  # fmt: skip
            else:
                for q in range(first, stop, 8):
                    tile1(
                        source, table_at(pixels_at, q), taps_at, 1, weights, steps, width, taps, inner,
                        begins, 0, target, table_at(y_at, q), stop - q, last,
                    )  # fmt: skip


@kernel
def correlate_weights(
    begin: Int, end: Int, x: Floats, image: Int, x_group: Int, x_lines: Words, x_step: Int, taps_at: Words,
    dy: Floats, dy_image: Int, dy_group: Int, dy_lines: Words, dy_step: Int, lines: Int, line: Int,
    dw: Floats, dw_group: Int, dw_rows: Words, dw_row: Int, inner: Int,
    images: Int, accumulate: Int, zeros: Floats, counts: Words, units: Words,
) -> None:  # fmt: skip
    """dw[output, tap, j] (+)= sum over pixels of dy * x. Items are units: tiles of dw (see `_Unit`)."""
    for n in range(images):
        keep = 1 if accumulate == 1 or n > 0 else 0
        for unit in range(begin, end):
            vectors = units[7 * unit]
            group = units[7 * unit + 1]
            tap = units[7 * unit + 2]
            column = units[7 * unit + 3]
            row = units[7 * unit + 4]
            count = units[7 * unit + 5]
            last = units[7 * unit + 6]
            factor = ahead(dy, n * dy_image + group * dy_group + row)
            source = ahead(x, n * image + group * x_group + taps_at[tap] + column)
            target = ahead(dw, group * dw_group + row * dw_row + tap * inner + column)
            begins = target if keep == 1 else zeros
            rows = table_at(counts, 8 * count)
            if vectors == 2:
                tile2(
                    factor, rows, dy_lines, dy_step, source, x_lines, x_step, lines, line,
                    begins, keep, target, dw_rows, count, last,
                )  # fmt: skip
            elif vectors == 3:
                tile3(
                    factor, rows, dy_lines, dy_step, source, x_lines, x_step, lines, line,
                    begins, keep, target, dw_rows, count, last,
                )  # fmt: skip
            else:
                tile1(
                    factor, rows, dy_lines, dy_step, source, x_lines, x_step, lines, line,
                    begins, keep, target, dw_rows, count, last,
                )  # fmt: skip


_ZEROS = np.zeros(4 * WIDTH, np.float32)


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

    def write(self, threads: int, x: Any, padded: Any) -> None:
        """Copy the images x (N, C, H, W) with zeros around them."""
        row = self.padded_width * self.channels
        rows = x.shape[0] * self.padded_height
        pad_images.run(
            threads, rows, max(1, 16384 // row), x, padded, self.width * self.channels, self.height, self.top,
            self.left * self.channels, self.padded_height, row,
        )  # fmt: skip


def _extended(table: Any) -> Any:
    """A table as int64 with the last entry repeated as often as a tile may read beyond."""
    flat = np.asarray(table, np.int64).reshape(-1)
    return np.concatenate([flat, np.repeat(flat[-1:], SPARE)])


class _Correlation:
    """One sum over taps, planned: y[pixel, column] = start[column] + sum over taps, inner of x * weights.

    Args:
        padding: of the image that is read.
        pixels_at: offset in the padded image for each output pixel.
        taps_at: offset added for each tap.
        weight_rows: place of each (tap, inner) in one group's weights, and `weight_step` from column to column.
        y_at: offset of each output pixel.
        y_image: elements of an output image.
        columns: output channels of a group.
    """

    def __init__(
        self, padding: _Padding, group_channels: int, pixels_at: Any, taps_at: Any, inner: int, weight_rows: Any,
        weight_step: int, y_at: Any, y_image: int, columns: int, groups: int,
    ) -> None:  # fmt: skip
        self.padding = padding
        self._group_channels = group_channels
        self._pixels = len(pixels_at)
        self._pixels_at, self._y_at = _extended(pixels_at), _extended(y_at)
        self._taps, self._inner = len(taps_at), inner
        self._taps_at = np.asarray(taps_at, np.int64)
        self._weight_rows = np.asarray(weight_rows, np.int64)
        self._weight_step = weight_step
        self._y_image, self._columns, self._groups = y_image, columns, groups
        self.panels = Panels(len(self._weight_rows), columns)
        widths = np.arange(1, 4)[:, None] * WIDTH
        self._packed_taps = (np.arange(self._taps) * inner * widths).astype(np.int64).reshape(-1)

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
            self.panels.count, WIDTH,
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
        self._zeros = np.zeros(max(self._outputs, self._channels), np.float32)
        self._make_taps()
        self._forward: _Correlation | None = None
        self._backward: list[_Correlation] | None = None
        self._gradient: _WeightGradient | None = None

    def _moves(self) -> tuple[tuple[int, ...], ...]:
        g = self._geometry
        return g.kernel, g.stride, g.pad, g.dilation

    def _make_taps(self) -> None:
        """Runs of elements that lie next to each other in the image: whole kernel rows, or one kernel element each."""
        g = self._geometry
        row = self._padding.padded_width * self._channels
        self._whole_rows = g.group == 1 and (g.dilation[1] == 1 or g.kernel[1] == 1)
        h = np.arange(g.kernel[0])[:, None] * g.dilation[0] * row
        w = np.arange(g.kernel[1])[None, :] * g.dilation[1] * self._channels
        self._taps_at = (h[:, 0] if self._whole_rows else (h + w).reshape(-1)).astype(np.int64)
        self._inner = self._depth // len(self._taps_at)

    # -- forward ------------------------------------------------------------------------------------

    def _plan_forward(self) -> _Correlation:
        g, p = self._geometry, self._padding
        oh = np.arange(self._out_height)[:, None] * g.stride[0] - p.top
        ow = np.arange(self._out_width)[None, :] * g.stride[1] - p.left
        pixels = self._out_height * self._out_width
        return _Correlation(
            p, self._group_channels, p.at(oh, ow).reshape(-1), self._taps_at, self._inner, np.arange(self._depth),
            self._depth, np.arange(pixels) * self._outputs, pixels * self._outputs, self._group_outputs, g.group,
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

    A pixel h of the image with h + pad = stride i + phase gets from tap k the output pixel i + (phase - k dilation) / stride.
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
    whole = plan._geometry.group == 1 and bool(np.all(np.diff(w.shifts) == 1)) and bool(w.shifts)
    shifts_w = np.array(w.shifts[:1] if whole else w.shifts, np.int64)
    row = padding.padded_width * padding.channels
    taps_at = np.array(h.shifts, np.int64)[:, None] * row + shifts_w[None, :] * padding.channels
    tap = np.array(h.taps, np.int64)[:, None] * kernel_w + np.array(w.taps, np.int64)[None, :]
    weight_rows = tap.reshape(-1, 1) * plan._group_channels + np.arange(outputs)[None, :] * plan._depth
    pixels_at = padding.at(h.indices[:, None], w.indices[None, :]).reshape(-1)
    y_at = (h.pixels[:, None] * plan._width + w.pixels[None, :]).reshape(-1) * plan._channels
    inner = outputs * len(w.taps) if whole else outputs
    return _Correlation(
        padding, outputs, pixels_at, taps_at.reshape(-1), inner, weight_rows.reshape(-1), 1, y_at,
        plan._height * plan._width * plan._channels, plan._group_channels, plan._geometry.group,
    )  # fmt: skip


class _WeightGradient:
    """The weights' gradient, divided into tiles of (output channels, elements of a tap)."""

    def __init__(self, plan: TileConvolution) -> None:
        self._plan = plan
        g, p = plan._geometry, plan._padding
        self._x_lines = _extended(np.arange(plan._out_height) * g.stride[0] * p.padded_width * p.channels)
        self._dy_lines = _extended(np.arange(plan._out_height) * plan._out_width * plan._outputs)
        self._dw_rows = _extended(np.arange(SPARE) * plan._depth)
        # Row r of a tile of `count` rows, at 8 count + r: rows beyond the count repeat the last.
        self._counts = np.minimum(np.arange(8)[None, :], np.maximum(np.arange(9)[:, None] - 1, 0)).astype(np.int64)
        self._units = np.array(self._make_units(), np.int64)

    def _make_units(self) -> list[tuple[int, ...]]:
        """(vectors, group, tap, first column, first output, outputs, lanes of the last vector) of each tile."""
        plan, units = self._plan, []
        for group in range(plan._geometry.group):
            for tap in range(len(plan._taps_at)):
                column = 0
                for vectors in panel_vectors(plan._inner):
                    last = min(WIDTH, plan._inner - column - (vectors - 1) * WIDTH)
                    for row in range(0, plan._group_outputs, ROWS[vectors]):
                        count = min(ROWS[vectors], plan._group_outputs - row)
                        units.append((vectors, group, tap, column, row, count, last))
                    column += vectors * WIDTH
        return units

    def run(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        """Add the images' share; x is padded or, if it needs no padding, as it is."""
        plan, images = self._plan, dy.shape[0]
        if plan._padding.needed or plan._inner % WIDTH == 0:
            self._call(x, dy, dweights, accumulate)
            return
        # A tile reads whole vectors, so the last image is read from a copy with something behind it.
        if images > 1:
            self._call(x[:-1], dy[:-1], dweights, accumulate)
        copy = plan._workspace.take("images", plan._padding.elements + WIDTH)
        plan._padding.write(1, x[-1:], copy)
        self._call(copy, dy[-1:], dweights, accumulate or images > 1)

    def _call(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        plan = self._plan
        correlate_weights.run(
            plan._threads, len(self._units), 1, x, plan._padding.elements, plan._group_channels, self._x_lines,
            plan._geometry.stride[1] * plan._channels, plan._taps_at, dy,
            plan._out_height * plan._out_width * plan._outputs, plan._group_outputs, self._dy_lines, plan._outputs,
            plan._out_height, plan._out_width, dweights, plan._group_step, self._dw_rows, plan._depth, plan._inner,
            dy.shape[0], int(accumulate), _ZEROS, self._counts, self._units,
        )  # fmt: skip
