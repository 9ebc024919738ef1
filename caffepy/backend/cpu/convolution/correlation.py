"""Correlation over padded images: the core of convolutions and of their data gradients.

Defines the sizes of a convolution, shared by all its passes, and divides the output of a correlation into balanced
items of work. The division does not affect the results: a sum is computed by the same tile of the same panel in any
item.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.axes import merged
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, table_at
from caffepy.backend.cpu.microkernel import COST, ROWS, Panels, WeightPacking, extended, pack_weights, tile
from caffepy.backend.types import Geometry, spatial_output

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
def pad_images(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, padded: Floats, row: Int, sources: Words, left: Int, rows: Int, padded_rows: Int,
    padded_row: Int,
) -> None:  # fmt: skip
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
def correlate(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, x_from: Int, image: Int, x_group: Int, pixels_at: Words,
    taps_at: Words, taps: Int, inner: Int, packed: Floats, packed_group: Int, packed_taps: Words, start: Floats,
    y: Floats, y_from: Int, y_image: Int, y_group: Int, y_at: Words, pixels: Int, block: Int, blocks: Int,
    groups: Int, table: Words, panels: Int, width: Int, cutting: Int, cuts2: Words, cuts3: Words, cuts1: Words,
    parts: Int, addend: Floats, adds: Int, relu: Int,
) -> None:  # fmt: skip
    """y[pixel, column] = start[column] + sum over taps and inner of x * packed (+ addend), optionally rectified.

    Items are (images, group, part of the panels, block). `pixels` are the pixels of an item's images.
    """
    for item in range(begin, end):
        first = (item % blocks) * block
        part = item // blocks % parts
        group = item // (blocks * parts) % groups
        n = item // (blocks * parts * groups)
        stop = min(first + block, pixels)
        source = ahead(x, x_from + n * image + group * x_group)
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
                    tap0, tap1, inner0, inner1 = cuts[cut], cuts[cut + 1], cuts[cut + 2], cuts[cut + 3]
                tile(
                    vectors, ahead(source, inner0), table_at(pixels_at, q), table_at(taps_at, tap0), 1,
                    ahead(weights, inner0 * wide), table_at(steps, tap0), wide, tap1 - tap0, inner1 - inner0,
                    begins, 0, target, table_at(y_at, q), stop - q, last, ahead(addend, at), adds, relu,
                )  # fmt: skip


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
            threads, x.shape[0] * self.rows, max(1, GRAIN // self.row), x, padded, self.sizes[-1] * self.channels,
            self._sources, self.before[-1] * self.channels, math.prod(self.sizes[:-1]), self.rows, self.row,
        )  # fmt: skip


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


class Correlation:
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
            together = min(self._together, -(-images // threads))
            parts = [(together, images // together), (images % together, 1)]
            self._divisions[key] = [
                (many, times, divide(self.panels, many * self._pixels, threads, times * self._groups))
                for many, times in parts if many and times
            ]  # fmt: skip
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
                threads, times * self._groups * parts * blocks, 1, x, done * self.padding.elements,
                together * self.padding.elements, self._x_group, own.x_at, self._taps_at, self._taps, self._inner,
                packed, self.panels.size, self._packed_taps, start, y, done * self._y_image, together * self._y_image,
                self._columns, own.y_at, together * self._pixels, block, blocks, self._groups, self.panels.table,
                self.panels.count, WIDTH, int(self._cutting), own.cuts2, own.cuts3, own.cuts1, parts,
                y if addend is None else addend, int(addend is not None), int(relu),
            )  # fmt: skip
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
