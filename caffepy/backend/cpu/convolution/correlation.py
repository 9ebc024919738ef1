"""Correlation over padded images, the core of convolutions and of their data gradients, and the weight gradient.

Defines the sizes of a convolution, shared by all its passes, and divides the output of a correlation into balanced
items of work. The division does not affect the results: a sum is computed by the same tile of the same panel in any
item.

For the data gradient, per-axis index maps relate a convolution's image and output.

The weight gradient is a product of image and gradient, summed over pixels. A tile's sums skip output lines and columns
for which all its elements are outside the image.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, device_function, kernel
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors, fetch, table_at
from caffepy.backend.cpu.memory import Workspace
from caffepy.backend.cpu.microkernel import (
    COST,
    COST_TALL,
    ROWS,
    SPARE,
    TALL,
    Panels,
    WeightPacking,
    extended,
    pack_weights,
    rows_of_fours,
    tall_tile,
    tile,
    tile_of_fours,
)
from caffepy.backend.types import Geometry, spatial_output

# -- indices along axes --------------------------------------------------------------------------------


def merged(indices: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Return all combinations of indices along several axes, as flattened indices for the given sizes."""
    total = np.zeros(1, np.int64)
    for index, size in zip(indices, sizes, strict=True):
        total = (total[:, None] * size + np.asarray(index, np.int64)[None, :]).reshape(-1)
    return total


@dataclass(frozen=True)
class AxisTaps:
    """Result pixels along one axis (or several merged ones), and their taps.

    Args:
        pixels: positions of the results.
        indices: source position that a tap of shift 0 reads, per result.
        taps: kernel indices of the taps.
        shifts: source shift of each tap, ascending.
    """

    pixels: Any
    indices: Any
    taps: Any
    shifts: Any


def taps_inside(axes: Sequence[AxisTaps], sizes: Sequence[int]) -> Any:
    """Return for merged axes whether each pixel's taps read inside a source of these sizes (pixels, taps)."""
    valid = np.ones((1, 1), bool)
    for axis, size in zip(axes, sizes, strict=True):
        own = axis.indices[:, None] + axis.shifts[None, :]
        inside = (own >= 0) & (own < size)
        shape = (valid.shape[0] * inside.shape[0], valid.shape[1] * inside.shape[1])
        valid = (valid[:, None, :, None] & inside[None, :, None, :]).reshape(shape)
    return valid


def forward_axis(out: int, kernel: int, stride: int, pad: int, dilation: int) -> AxisTaps:
    """Return the axis of a forward pass."""
    taps = np.arange(kernel)
    return AxisTaps(np.arange(out), np.arange(out) * stride - pad, taps, taps * dilation)


def axis_residues(size: int, kernel: int, stride: int, pad: int, dilation: int) -> list[AxisTaps]:
    """Return an image's pixels along one axis for each non-empty residue of the stride.

    A pixel h of the image with h + pad = stride i + residue receives from tap k the output pixel
    i + (residue - k dilation) / stride.
    """
    residues = []
    for residue in range(stride):
        pixels = np.array([h for h in range(size) if (h + pad) % stride == residue], np.int64)
        # Reversed, because the shift falls with k: taps in this order read the source forwards.
        taps = np.array([k for k in reversed(range(kernel)) if (residue - k * dilation) % stride == 0], np.int64)
        if len(pixels):
            residues.append(AxisTaps(pixels, (pixels + pad) // stride, taps, (residue - taps * dilation) // stride))
    return residues


def reach(residues: list[AxisTaps], size: int) -> tuple[int, int]:
    """Return (zeros before, padded size) such that every tap of every residue stays inside."""
    low = min([int(p.indices[0] + p.shifts[0]) for p in residues if len(p.shifts)], default=0)
    high = max([int(p.indices[-1] + p.shifts[-1]) for p in residues if len(p.shifts)], default=0)
    before = max(0, -low)
    return before, before + max(size, high + 1)


def merged_axes(
    parts: Sequence[AxisTaps], sizes: Sequence[int], kernel: Sequence[int], before: Sequence[int], padded: Sequence[int]
) -> AxisTaps:
    """Merge several axes into one: results of an image of these sizes, source with zeros `before` and padded sizes."""
    return AxisTaps(
        merged([part.pixels for part in parts], sizes),
        merged([part.indices + zeros for part, zeros in zip(parts, before, strict=True)], padded),
        merged([part.taps for part in parts], kernel),
        merged([part.shifts for part in parts], padded),
    )


# -- correlation ---------------------------------------------------------------------------------------

BLOCK = 192
"""Maximum output pixels per item, so that their part of the image stays in the L1 or L2 cache."""
ITEMS_PER_THREAD = 32
"""Items per thread from which uneven division is negligible."""
FINER = 4
"""Additional blocks and parts per thread to consider beyond the minimum."""
READING = 4
"""Packed weights read per cycle from a shared cache."""


class Division(NamedTuple):
    """Division into items (image, group, part of the panels, block of pixels).

    Args:
        block: pixels per block.
        blocks: number of blocks.
        parts: number of panel parts.
    """

    block: int
    blocks: int
    parts: int


def divide(panels: Panels, pixels: int, threads: int, images: int) -> Division:
    """Return the division with the shortest longest share; `images` counts the groups of all images."""
    fewest = -(-pixels // BLOCK)
    # Large blocks reload each panel's weights seldom. Smaller ones are worth trying only if few items would leave
    # threads idle.
    if threads == 1 or images * fewest >= ITEMS_PER_THREAD * threads:
        return Division(BLOCK, fewest, 1)
    return min(_divisions(panels, pixels, threads), key=lambda one: longest_share(one, panels, pixels, threads, images))


def _divisions(panels: Panels, pixels: int, threads: int) -> Iterator[Division]:
    """Yield the candidate divisions, those with few items first."""
    unit = math.lcm(*(ROWS[vectors] for vectors in panels.entries[:, 0].tolist()))
    fewest = -(-pixels // BLOCK)
    for parts in range(1, min(panels.count, FINER * threads) + 1):
        for number in range(fewest, fewest + FINER * threads + 1):
            block = -(-pixels // (number * unit)) * unit
            yield Division(block, -(-pixels // block), parts)


def longest_share(division: Division, panels: Panels, pixels: int, threads: int, images: int) -> float:
    """Return the cycles of the thread with the most work."""
    costs = np.tile(_costs(division, panels, pixels).reshape(-1), images)
    size = -(-len(costs) // threads)
    return float(np.add.reduceat(costs, np.arange(0, len(costs), size)).max())


def _costs(division: Division, panels: Panels, pixels: int) -> Any:
    """Return the cycles of each (part, block): tiles, and the weights that each block reloads."""
    block, blocks, parts = division
    inside = np.minimum(block, pixels - np.arange(blocks) * block)
    vectors = panels.entries[:, 0]
    rows, cost = (np.array([table[v] for v in vectors.tolist()]) for table in (ROWS, COST))
    cycles = panels.depth * (cost[:, None] * -(-inside[None, :] // rows[:, None]) + vectors[:, None] * WIDTH / READING)
    bounds = np.arange(parts) * panels.count // parts
    return np.add.reduceat(cycles, bounds, axis=0)


TOGETHER = 512
"""Approximate pixels of small images per item, so that an image's last tile is not half empty."""


@kernel
def pad_images(
    begin: Int,
    end: Int,
    x: Floats,
    padded: Floats,
    row: Int,
    sources: Words,
    left: Int,
    rows: Int,
    padded_rows: Int,
    padded_row: Int,
) -> None:
    """Items are rows of the padded images; `row`, `left` and `padded_row` count elements.

    `sources` gives for each row of a padded image the row of the image, or -1.
    """
    for item in range(begin, end):
        h = sources[item % padded_rows]
        target = item * padded_row
        if h < 0:
            for i in range(padded_row):
                padded[target + i] = 0
        else:
            source = ((item // padded_rows) * rows + h) * row
            stop = min(left + row, padded_row)
            for i in range(left):
                padded[target + i] = 0
            for i in range(stop - left):
                padded[target + left + i] = x[source + i]
            for i in range(stop, padded_row):
                padded[target + i] = 0


@kernel
def correlate(
    begin: Int,
    end: Int,
    x: Floats,
    x_from: Int,
    image: Int,
    x_group: Int,
    pixels_at: Words,
    taps_at: Words,
    taps: Int,
    inner: Int,
    packed: Floats,
    packed_group: Int,
    packed_taps: Words,
    start: Floats,
    y: Floats,
    y_from: Int,
    y_image: Int,
    y_group: Int,
    y_at: Words,
    pixels: Int,
    block: Int,
    blocks: Int,
    groups: Int,
    table: Words,
    panels: Int,
    width: Int,
    cutting: Int,
    cuts2: Words,
    cuts3: Words,
    cuts1: Words,
    parts: Int,
    addend: Floats,
    adds: Int,
    relu: Int,
) -> None:
    """y[pixel, column] = start[column] + sum over taps and inner of x * packed (+ addend), optionally rectified.

    Items are (images, group, part of the panels, block). `pixels` are the pixels of an item's images.
    """
    for item in range(begin, end):
        # A thread gets neighbouring items, so the block varies fastest: its items share an image, a group and the
        # panels' weights.
        first = (item % blocks) * block
        part = item // blocks % parts
        group = item // (blocks * parts) % groups
        n = item // (blocks * parts * groups)
        stop = min(first + block, pixels)
        source = ahead(x, x_from + n * image + group * x_group)
        # All tiles of the block use a panel before the next panel: the panel's weights are read again and again, and
        # the block of pixels once for each panel.
        for panel in range(part * panels // parts, (part + 1) * panels // parts):
            vectors = table[4 * panel]
            column = table[4 * panel + 1]
            weights = ahead(packed, group * packed_group + table[4 * panel + 2])
            last = table[4 * panel + 3]
            begins = ahead(start, group * y_group + column)
            at = y_from + n * y_image + group * y_group + column
            target = ahead(y, at)
            steps = table_at(packed_taps, (vectors - 1) * taps)
            wide = vectors * width
            rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
            cuts = cuts2 if vectors == 2 else (cuts3 if vectors == 3 else cuts1)
            tap0, tap1, inner0, inner1 = 0, taps, 0, inner
            for q in range(first, stop, rows):
                if cutting == 1:
                    cut = 4 * (q // rows)
                    # Only the taps that any pixel of the tile reads inside the image; the others would add zeros.
                    tap0, tap1, inner0, inner1 = cuts[cut], cuts[cut + 1], cuts[cut + 2], cuts[cut + 3]
                tile(
                    vectors,
                    ahead(source, inner0),
                    table_at(pixels_at, q),
                    table_at(taps_at, tap0),
                    1,
                    ahead(weights, inner0 * wide),
                    table_at(steps, tap0),
                    wide,
                    tap1 - tap0,
                    inner1 - inner0,
                    begins,
                    0,
                    target,
                    table_at(y_at, q),
                    stop - q,
                    last,
                    ahead(addend, at),
                    adds,
                    relu,
                )


@dataclass(frozen=True)
class Padding:
    """The position of a channels-last image within its padded form.

    All spatial axes but the last are merged into the rows of the image.

    Args:
        sizes: sizes of the image's spatial axes.
        channels: elements of a pixel.
        before: zeros before the image along each axis.
        padded: sizes of the padded image.
    """

    sizes: tuple[int, ...]
    channels: int
    before: tuple[int, ...]
    padded: tuple[int, ...]

    @property
    def needed(self) -> bool:
        """Whether the image has zeros around it."""
        return self.sizes != self.padded or any(self.before)

    @property
    def rows(self) -> int:
        """Rows of a padded image."""
        return math.prod(self.padded[:-1])

    @property
    def row(self) -> int:
        """Elements of a row of a padded image."""
        return self.padded[-1] * self.channels

    @property
    def elements(self) -> int:
        return self.rows * self.row

    def offset(self, rows: Any, columns: Any) -> Any:
        """Return the offset of a pixel of a padded image, or the distance of pixels so far apart."""
        return rows * self.row + columns * self.channels

    @cached_property
    def _sources(self) -> ConstantTable:
        """Row of the image for each row of the padded image, or -1."""
        axes = zip(self.sizes[:-1], self.before[:-1], self.padded[:-1], strict=True)
        valid = [(np.arange(padded) >= before) & (np.arange(padded) < before + size) for size, before, padded in axes]
        rows = np.full(self.rows, -1, np.int64)
        rows[merged([np.flatnonzero(axis) for axis in valid], self.padded[:-1])] = np.arange(math.prod(self.sizes[:-1]))
        return ConstantTable(rows)

    def has_rows(self, rows: Any) -> Any:
        """Return whether rows of the padded image are rows of the image."""
        return self._sources.array[rows] >= 0

    def write(self, threads: int, x: Any, padded: Any) -> None:
        """Copy the images x (N, ...) with zero padding."""
        pad_images.run(
            threads,
            x.shape[0] * self.rows,
            max(1, GRAIN // self.row),
            x,
            padded,
            self.sizes[-1] * self.channels,
            self._sources,
            self.before[-1] * self.channels,
            math.prod(self.sizes[:-1]),
            self.rows,
            self.row,
        )


@dataclass(frozen=True)
class Taps:
    """The contiguous runs of elements that one output pixel reads.

    Args:
        rows: shift of each run from the pixel's window, in rows of the image.
        columns: the same in columns.
        length: pixels of a run.
        channels: elements of a pixel that belong to a run.
    """

    rows: Any
    columns: Any
    length: int
    channels: int

    def _valid(self, padding: Padding, h: Any, w: Any) -> Any:
        """Return whether each (window, run) has an element inside the image."""
        at_w = w[:, None] + self.columns - padding.before[-1]
        return padding.has_rows(h[:, None] + self.rows) & (at_w + self.length > 0) & (at_w < padding.sizes[-1])

    def met(self, padding: Padding, h: Any, w: Any) -> Any:
        """Return for each run whether any window at (h, w) reads an element of it inside the image.

        Other runs are zero in every sum. Kernels larger than the image and wide dilations have many.
        """
        return self._valid(padding, h, w).any(axis=0)

    def part(self, wanted: Any) -> Taps:
        """Return a subset of the runs."""
        return replace(self, rows=self.rows[wanted], columns=self.columns[wanted])

    def inside(self, padding: Padding, h: Any, w: Any) -> Any:
        """Return for each window at (h, w): [first tap, last tap + 1, first element, last element + 1] inside the
        image.

        Elements outside are zero and may be skipped.
        """
        width, at_w = padding.sizes[-1], w[:, None] + self.columns - padding.before[-1]
        valid, count = self._valid(padding, h, w), len(self.rows)
        first, stop = np.argmax(valid, axis=1), count - np.argmax(valid[:, ::-1], axis=1)
        begins = np.clip(-at_w.min(axis=1), 0, self.length)
        ends = np.clip(width - at_w.max(axis=1), 0, self.length)
        if self.length == 1:
            begins, ends = np.zeros_like(begins), np.ones_like(ends)
        cut = np.stack([first, stop, begins * self.channels, ends * self.channels], axis=1)
        cut[~valid.any(axis=1)] = (count, 0, self.length * self.channels, 0)
        return cut


def _tile_cuts(cuts: Any, rows: int) -> Any:
    """Return the union of the cuts of a tile's pixels."""
    tiles = []
    for first in range(0, len(cuts), rows):
        part = cuts[first : first + rows]
        low, high = part.min(axis=0), part.max(axis=0)
        tiles.append((low[0], max(low[0], high[1]), low[2], max(low[2], high[3])))
    return extended(tiles)


@dataclass(frozen=True)
class Pixels:
    """The output pixels of a correlation.

    Args:
        h: row of the padded image where each pixel's window begins.
        w: column of the same.
        offsets: offset of each pixel in an output image.
        image: elements of an output image.
    """

    h: Any
    w: Any
    offsets: Any
    image: int


@dataclass(frozen=True)
class Filters:
    """The weights of a correlation.

    Args:
        rows: offset of each (tap, element) in one group's weights.
        step: distance of output channels in elements.
        columns: output channels of a group.
        groups: number of groups.
    """

    rows: Any
    step: int
    columns: int
    groups: int


@dataclass(frozen=True)
class Ending:
    """The epilogue of a correlation.

    Args:
        addend: an array with y's layout to add, or None.
        relu: whether to apply a ReLU.
    """

    addend: Any
    relu: bool


class _Arrangement(NamedTuple):
    """Input and output offsets of some images' pixels, and the cuts of tiles of 1, 2 and 3 vectors."""

    x_at: ConstantTable
    y_at: ConstantTable
    cuts1: ConstantTable
    cuts2: ConstantTable
    cuts3: ConstantTable


class PaddedCorrelation:
    """A planned sum over taps: y[pixel, column] = start[column] + sum over taps, inner of x * weights.

    Args:
        padding: of the image that is read.
        taps: elements read by each window.
        pixels: positions of windows and results.
        filters: memory layout of the weights.
    """

    def __init__(self, padding: Padding, taps: Taps, pixels: Pixels, filters: Filters) -> None:
        self.padding = padding
        h, w = pixels.h, pixels.w
        # Taps that no window reads inside the image are left out of the packed weights too.
        if padding.needed and len(taps.rows):
            met = taps.met(padding, h, w)
            filters = replace(filters, rows=np.reshape(filters.rows, (len(taps.rows), -1))[met])
            taps = taps.part(met)
        self._x_group = taps.channels
        self._pixels = len(h)
        self._together = max(1, TOGETHER // max(1, len(h)))
        self._at = padding.offset(h, w), np.reshape(pixels.offsets, -1)
        self._taps, self._inner = len(taps.rows), taps.length * taps.channels
        self._taps_at = extended(padding.offset(taps.rows, taps.columns))
        self._weight_rows = extended(filters.rows)
        self._weight_order = extended(np.argsort(np.reshape(filters.rows, -1), kind="stable"))
        self._weight_step = filters.step
        self._y_image, self._columns, self._groups = pixels.image, filters.columns, filters.groups
        self.panels = Panels(np.size(filters.rows), filters.columns, self._together * self._pixels)
        widths = np.arange(1, 4)[:, None] * WIDTH
        self._packed_taps = extended(np.arange(self._taps) * self._inner * widths)
        self._cutting = padding.needed and self._taps > 0
        cuts = taps.inside(padding, h, w) if self._cutting else np.zeros((1, 4), np.int64)
        self._inside = cuts
        self._arranged: dict[int, _Arrangement] = {}
        self._divisions: dict[tuple[int, int], list[tuple[int, int, Division]]] = {}

    def _arrangement(self, together: int) -> _Arrangement:
        """Return the pixels of this many images; pixels of small images with equal taps share tiles."""
        if together not in self._arranged:
            image = np.arange(together)[:, None]
            x_at, y_at = (
                (image * size + at).reshape(-1)
                for at, size in zip(self._at, (self.padding.elements, self._y_image), strict=True)
            )
            cuts = np.tile(self._inside, (together, 1)) if self._cutting else self._inside
            # A tile is cut to the union of its pixels' taps. In small images most tiles would hold an edge pixel and an
            # inner one; sorted, pixels with equal cuts share tiles.
            if self._cutting and len(x_at) <= TOGETHER:
                order = np.lexsort(cuts.T)
                x_at, y_at, cuts = x_at[order], y_at[order], cuts[order]
            tables = (_tile_cuts(cuts, ROWS[vectors]) for vectors in (1, 2, 3))
            self._arranged[together] = _Arrangement(extended(x_at), extended(y_at), *tables)
        return self._arranged[together]

    @property
    def packed_size(self) -> int:
        """Elements of the packed weights."""
        return self.panels.size * self._groups

    def pack(self, threads: int, weights: Any, group_step: int, packed: Any) -> None:
        """Pack the weights in the order in which `run` reads them."""
        order = self._weight_order
        packing = WeightPacking(self._weight_rows, self._weight_step, self._groups, group_step, order)
        pack_weights(threads, self.panels, weights, packing, packed)

    def _division(self, threads: int, images: int) -> list[tuple[int, int, Division]]:
        """Return (images per item, repetitions, division), then the same for the remaining images."""
        key = threads, images
        if key not in self._divisions:
            # No more images in an item than a thread's share: else threads would stay idle.
            together = min(self._together, -(-images // threads))
            parts = [(together, images // together), (images % together, 1)]
            self._divisions[key] = [
                (many, times, divide(self.panels, many * self._pixels, threads, times * self._groups))
                for many, times in parts
                if many and times
            ]
        return self._divisions[key]

    def run(
        self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any, ending: Ending | None = None
    ) -> None:
        """Compute y of some images from padded x."""
        addend, relu = (None, False) if ending is None else (ending.addend, ending.relu)
        done = 0
        for together, times, (block, blocks, parts) in self._division(threads, images):
            own = self._arrangement(together)
            correlate.run(
                threads,
                times * self._groups * parts * blocks,
                1,
                x,
                done * self.padding.elements,
                together * self.padding.elements,
                self._x_group,
                own.x_at,
                self._taps_at,
                self._taps,
                self._inner,
                packed,
                self.panels.size,
                self._packed_taps,
                start,
                y,
                done * self._y_image,
                together * self._y_image,
                self._columns,
                own.y_at,
                together * self._pixels,
                block,
                blocks,
                self._groups,
                self.panels.table,
                self.panels.count,
                WIDTH,
                int(self._cutting),
                own.cuts2,
                own.cuts3,
                own.cuts1,
                parts,
                y if addend is None else addend,
                int(addend is not None),
                int(relu),
            )
            done += together * times


class ConvolutionShape:
    """Sizes, padding and taps of a convolution over two or more spatial axes; all but the last are merged.

    Args:
        x: (N, C, spatial...).
        weights: (num_output, C / group, kernel...).
        geometry: window geometry.
    """

    def __init__(self, x: tuple[int, ...], weights: tuple[int, ...], geometry: Geometry) -> None:
        self.geometry = g = geometry
        self.images, self.channels, self.sizes = x[0], x[1], x[2:]
        self.outputs, self.group_channels = weights[:2]
        self.out = tuple(spatial_output(size, *self.window(i)) for i, size in enumerate(self.sizes))
        self.out_height, self.out_width = math.prod(self.out[:-1]), self.out[-1]
        self.pixels = self.images * self.out_height * self.out_width
        """Output pixels of all images."""
        self.group_outputs = self.outputs // g.group
        self.depth = math.prod(weights[1:])
        """Elements of one filter."""
        self.weights = self.outputs * self.depth
        """Elements of all filters."""
        self.group_step = self.group_outputs * self.depth
        """Elements of the filters of one group."""
        padded = tuple(size + 2 * pad for size, pad in zip(self.sizes, g.pad, strict=True))
        self.scattered = g.group > 1 and math.prod(g.kernel) > 1
        """Whether a window's elements are not contiguous, so that each pixel is a separate run."""
        self.padding = Padding(self.sizes, self.channels, g.pad, padded)
        self.line_rows = merged(
            [np.arange(out) * stride for out, stride in zip(self.out[:-1], g.stride[:-1], strict=True)], padded[:-1]
        )
        """Row of the padded image where the windows of each output row begin."""
        self.taps = self._make_taps()

    def window(self, axis: int) -> tuple[int, int, int, int]:
        """Return (kernel, stride, pad, dilation) along one spatial axis."""
        g = self.geometry
        return g.kernel[axis], g.stride[axis], g.pad[axis], g.dilation[axis]

    def _make_taps(self) -> Taps:
        """Return whole kernel rows if their elements are contiguous in the image, else single kernel elements."""
        g = self.geometry
        whole = g.kernel[-1] == 1 or (g.dilation[-1] == 1 and g.group == 1)
        length = g.kernel[-1] if whole else 1
        axes = zip(g.kernel[:-1], g.dilation[:-1], strict=True)
        rows = merged([np.arange(kernel) * dilation for kernel, dilation in axes], self.padding.padded[:-1])
        columns = np.arange(0, g.kernel[-1], length) * g.dilation[-1]
        rows, columns = (v.reshape(-1) for v in np.meshgrid(rows, columns, indexing="ij"))
        return Taps(rows, columns, length, self.group_channels)


# -- the weight gradient -------------------------------------------------------------------------------

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
def add_products(
    a: Any,
    a_lines: Any,
    a_step: Any,
    b: Any,
    b_lines: Any,
    b_step: Any,
    lines: Any,
    line: Any,
    block: Any,
    starts: Any,
    panel_lines: Any,
    entries: Any,
    c: Any,
    c_rows: Any,
    accumulate: Any,
    zeros: Any,
    rows: Any,
    units: Any,
    first_unit: Any,
    stop_unit: Any,
    panel: Any,
    width: Any,
    high: Any,
    first_block: Any,
    stop_block: Any,
) -> None:
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
        # The first block writes c and the others add to it, so c need not be cleared.
        keep = 1 if accumulate == 1 or first > 0 else 0
        height = min(block, lines - first)
        packed = -1
        parts, fetched = (starts[min(number + 2, blocks)] - starts[number + 1]) * length, 0
        for unit in range(FIELDS * first_unit, FIELDS * stop_unit, FIELDS):
            vectors = units[unit]
            last = units[unit + 6]
            wide = vectors * width
            # Units are ordered by panel, so each panel is packed once for a block.
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
            # Prefetches are spread evenly over the units: a burst of them would hold up the tile's own loads.
            stop = min(parts, fetched + parts // (stop_unit - first_unit) + 1)
            fetch_lines(a, a_lines, starts[number + 1], length, fetched, stop)
            fetched = stop
            at = units[unit + 7] * (blocks + 1) + number
            begins, ends = starts[at], starts[at + 1]
            w0, w1 = units[unit + 8], units[unit + 9]
            # A tile that meets no line must still run once: it writes the zeros that the later blocks add to.
            if keep == 0 or (ends > begins and w1 > w0):
                target_at = ahead(c, units[unit + 3])
                operands = (
                    ahead(a, units[unit + 1] + w0 * a_step),
                    table_at(rows, units[unit + 4]),
                    table_at(a_lines, begins),
                    a_step,
                    ahead(panel, (w0 - first * line) * wide),
                    table_at(panel_lines, (vectors - 1) * entries + begins),
                    wide,
                    ends - begins,
                    w1 - w0,
                    target_at if keep == 1 else zeros,
                    keep,
                    target_at,
                    table_at(c_rows, units[unit + 10]),
                    units[unit + 5],
                    last,
                    zeros,
                    0,
                    0,
                )
                if vectors == 1 and high > 0:
                    tile_of_fours(high, *operands)
                else:
                    tall_tile(vectors, *operands)


@kernel
def correlate_weights(
    begin: Int,
    end: Int,
    a: Floats,
    a_lines: Words,
    a_step: Int,
    b: Floats,
    b_lines: Words,
    b_step: Int,
    lines: Int,
    line: Int,
    block: Int,
    starts: Words,
    panel_lines: Words,
    entries: Int,
    c: Floats,
    c_rows: Words,
    accumulate: Int,
    zeros: Floats,
    rows: Words,
    units: Words,
    count: Int,
    items: Int,
    panels: Floats,
    panel_size: Int,
    width: Int,
    high: Int,
) -> None:
    """See `add_products`. Items are parts of the units."""
    for item in range(begin, end):
        add_products(
            a,
            a_lines,
            a_step,
            b,
            b_lines,
            b_step,
            lines,
            line,
            block,
            starts,
            panel_lines,
            entries,
            c,
            c_rows,
            accumulate,
            zeros,
            rows,
            units,
            item * count // items,
            (item + 1) * count // items,
            ahead(panels, item * panel_size),
            width,
            high,
            0,
            lines,
        )


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
        # Decided by the shape alone: another order of sums gives other bits, which must not depend on the threads.
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
            (
                vectors,
                last,
                int(at) + column,
                run * self._inner + column,
                self._extent([run], column, min(column + vectors * WIDTH, self._inner)),
            )
            for run, at in enumerate(self._taps_at)
            for vectors, column, last in panels
        ]
        units: list[tuple[int, ...]] = []
        for group, (x_group, dy_group) in enumerate(self._groups()):
            for vectors, last, x_at, element, extent in columns:
                for row in range(0, shape.group_outputs, TALL[vectors]):
                    count = min(TALL[vectors], shape.group_outputs - row)
                    dw_at = (group * shape.group_outputs + row) * shape.depth + element
                    units.append(
                        (vectors, dy_group + row, x_group + x_at, dw_at, tables[count], count, last, *extent, 0)
                    )
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
            self._threads,
            items,
            1,
            a,
            tables.a,
            a_step,
            b,
            tables.b,
            b_step,
            lines,
            shape.out_width,
            self._block,
            tables.starts,
            tables.panel,
            tables.entries,
            target,
            self._c_rows,
            # A transposed result is summed in the workspace and added to the caller's array when it is turned
            # (`finish`).
            int(not first or (accumulate and not self._transposed)),
            ZEROS,
            self._rows_table,
            self._units,
            count,
            items,
            self._workspace.take("panels", items * size),
            size,
            WIDTH,
            self._high,
        )

    def finish(self, dweights: Any, accumulate: bool) -> None:
        """Finish the sum after all images are added."""
        if self._transposed:
            shape, transposed = self._shape, self._workspace.take("weights", dweights.size)
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
