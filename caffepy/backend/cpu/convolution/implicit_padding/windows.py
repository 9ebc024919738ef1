"""Sums over windows of images that are read where they lie: convolutions and the gradients of their images.

Groups of a few channels have little to multiply for each element, so that a padded copy of the image would take as
long as the products; a single group of many takes up to a seventh less time without it. Pixels whose windows meet the
same taps inside the image share tiles, which need no zeros; pixels of all phases of a stride are computed in one pass.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Ending
from caffepy.backend.cpu.convolution.implicit_padding.lines import forward_axis, lines_of
from caffepy.backend.cpu.convolution.phases import Axis, axis_phases
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.gemm.microkernel import ROWS, tile
from caffepy.backend.cpu.gemm.packing import Panels, WeightPacking, extended, pack_weights
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, fetch, table_at

TOGETHER = 512
"""Pixels, about, of small images that are taken together, and of parts of large ones."""
CACHED = 96 * 1024
"""Elements of images that all groups of an item read: they are in the second cache when they are read again."""
SPAN = 64
"""Elements of a pixel that an item has at least, so that what it reads lies together."""
ITEMS_PER_THREAD = 4
"""Items for each thread from which groups and panels are no longer divided."""


def _packed_order(phases: Sequence[Axis], kernel: tuple[int, ...]) -> Any:
    """The kernel's elements in the order of the packed weights: what follows each other in an image does so there."""
    columns = np.concatenate([phase.taps for phase in phases])
    missing = np.setdiff1d(np.arange(kernel[-1]), columns)  # phases that no pixel has
    columns = np.concatenate([columns, missing])
    return (np.arange(math.prod(kernel[:-1]))[:, None] * kernel[-1] + columns).reshape(-1)


@kernel
def correlate_windows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, image: Int, x_group: Int, taps_at: Words, packed: Floats,
    packed_group: Int, packed_taps: Words, taps: Int, start: Floats, y: Floats, y_image: Int, y_group: Int,
    blocks: Int, groups: Int, parts: Int, table: Words, panels: Int, width: Int, bounds: Words, tiles: Words,
    pixels_at: Words, y_at: Words, newest: Words, addend: Floats, adds: Int, relu: Int,
) -> None:  # fmt: skip
    """y[pixel, column] = start[column] + sum over a tile's taps and inner of x * packed (+ addend), perhaps rectified.

    Items are (images, block, part of the panels of all groups). `bounds` has for each width of a panel and each block
    where its tiles begin; a tile is (first pixel, pixels, first tap, taps, elements of each, first of the newest taps,
    their end).
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
            rows = 6 if vectors == 2 else (4 if vectors == 3 else 8)
            own = (vectors - 1) * (blocks + 1) + block
            for number in range(7 * bounds[own], 7 * bounds[own + 1], 7):
                first, tap = tiles[number], tiles[number + 2]
                if panel == 0 or unit == opening:  # what the next tile is the first to read: pixels lie too far apart
                    for new in range(tiles[number + 5], tiles[number + 6]):
                        wanted = ahead(source, newest[new])
                        for i in range(first + rows, first + 2 * rows):
                            fetch(ahead(wanted, pixels_at[i]))
                tile(
                    vectors, source, table_at(pixels_at, first), table_at(taps_at, tap), 1,
                    weights, table_at(steps, tap), wide, tiles[number + 3], tiles[number + 4],
                    begins, 0, target, table_at(y_at, first), tiles[number + 1], last, more, adds, relu,
                )  # fmt: skip


class _Tiles(NamedTuple):
    """See `correlate_windows`."""

    bounds: ConstantTable
    tiles: ConstantTable
    pixels_at: ConstantTable
    y_at: ConstantTable


class _Taps(NamedTuple):
    """What a class of pixels reads, as offsets from where a window begins.

    Attributes:
        shifts: of runs of elements.
        taps: of these, the first ones' positions in the packed weights.
        length: elements of each run.
        newest: the offsets that no neighbouring pixel has read.
    """

    shifts: Any
    taps: Any
    length: int
    newest: Any


def _newest(taps: Any, steps: Sequence[int]) -> Any:
    """Those of some taps, given as offsets, that neighbouring pixels, so far apart along each axis, do not read."""
    return taps[~np.any([np.isin(taps + step, taps) for step in steps], axis=0)] if len(taps) else taps


class WindowCorrelation:
    """The sums of a convolution's forward pass or of its gradient of the image, planned.

    Args:
        shape: of the convolution.
        back: whether it is the gradient of the image.
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
            axis_phases(size, *shape.window(i)) if back else [forward_axis(out, *shape.window(i))]
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
        self, axes: Sequence[list[Axis]], read: tuple[int, ...], made: tuple[int, ...], packed_at: Any
    ) -> None:
        """Where each pixel's window begins, where it lies itself, its row, and the class of its taps.

        `packed_at` has the position of each of the kernel's elements in the packed weights.
        """
        parts, kernel = [], packed_at.shape
        positions = packed_at.reshape(-1, kernel[-1])
        for phase in itertools.product(*axes):
            h = lines_of(phase[:-1], read[:-1], made[:-1], kernel[:-1])
            w = lines_of(phase[-1:], read[-1:], made[-1:], kernel[-1:])
            first = len(self._classes)
            for rows, columns in itertools.product(h.kinds, w.kinds):
                shifts = h.shifts[rows][:, None] * read[-1] + w.shifts[columns]
                taps, length = positions[h.taps[rows][:, None], w.taps[columns]], 1
                if self._groups == 1 and shifts.size and np.all(np.diff(shifts) == 1) and np.all(np.diff(taps) == 1):
                    length = shifts.shape[1]  # what follows each other in the image is one run
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
        """Parts of the rows of a large image."""
        rows, count = math.prod(made[:-1]), len(self._at[0])
        return max(1, min(rows, round(count / TOGETHER)))

    def filled(self, images: int) -> float:
        """The share of the tiles' rows that have a pixel: with kernels large for an image, few pixels share taps."""
        counts = np.unique(self._keys(), return_counts=True)[1] * min(images, self._together)
        rows = ROWS[int(self.panels.entries[0, 0])]
        return float(counts.sum() / max(1, (-(-counts // rows) * rows).sum()))

    def _keys(self) -> Any:
        """Block and class of each pixel, block * classes + class; pixels with one key share tiles."""
        _, _, row, kind = self._at
        return row * self._blocks // max(1, int(row.max(initial=0)) + 1) * len(self._classes) + kind

    def _arranged(self, together: int) -> _Tiles:
        """The tiles of so many images."""
        if together not in self._tiles:
            x_at, y_at, key = (np.tile(values, together) for values in (*self._at[:2], self._keys()))
            image = np.repeat(np.arange(together), len(self._at[0]))
            x_at, y_at = x_at + image * self._images[0], y_at + image * self._images[1]
            order = np.lexsort((y_at, key))
            x_at, y_at, key = x_at[order], y_at[order], key[order]
            begins = np.flatnonzero(np.diff(key, prepend=-1))
            self._tiles[together] = self._cut(x_at, y_at, key, [*begins.tolist(), len(key)])
        return self._tiles[together]

    def _cut(self, x_at: Any, y_at: Any, key: Any, begins: list[int]) -> _Tiles:
        """Tiles of 1, 2 and 3 vectors for pixels in the order of blocks and classes, of which each begins anew."""
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
                    order += [*range(first, first + count), *[first] * (ROWS[vectors] - count)]
            starts[self._blocks] = len(tiles)
            for block in reversed(range(self._blocks)):
                starts[block] = starts[block + 1] if starts[block] < 0 else starts[block]
            bounds.append(starts)
        return _Tiles(*map(extended, (np.concatenate(bounds), tiles, x_at[order], y_at[order])))

    @property
    def packed_size(self) -> int:
        """Elements of the packed weights."""
        return self.panels.size * self._groups

    def pack(self, threads: int, weights: Any, group_step: int, packed: Any) -> None:
        """Bring the weights into the order in which `run` reads them."""
        rows, step, order = self._weights
        packing = WeightPacking(rows, step, self._groups, group_step, order)
        pack_weights(threads, self.panels, weights, packing, packed)

    def _parts(self, threads: int, together: int, items: int) -> int:
        """Parts of the groups: what an item reads stays in a cache, and all threads have something to do."""
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
        together = min(self._together, -(-images // threads))
        done, (x_image, y_image) = 0, self._images
        for many, times in ((together, images // together), (images % together, 1)):
            if not many or not times:
                continue
            tiles, parts = self._arranged(many), self._parts(threads, many, times * self._blocks)
            correlate_windows.run(
                threads, times * self._blocks * parts, 1, x[done:], many * x_image, self._channels, self._taps_at,
                packed, self.panels.size, self._packed_taps, self._taps, start, y[done:],
                many * y_image, self._columns, self._blocks, self._groups, parts, self.panels.table,
                self.panels.count, WIDTH, tiles.bounds, tiles.tiles, tiles.pixels_at, tiles.y_at, self._newest,
                (y if addend is None else addend)[done:], int(addend is not None), int(relu),
            )  # fmt: skip
            done += many * times
