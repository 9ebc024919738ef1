"""The gradient of the image of a depthwise convolution with a stride, all phases of the stride in one pass.

Each phase is a sum over its own taps, with the weights in registers. The phases of a row of the image are computed one
after the other, a tile of each, so that a part of the row is written at a time: a pass for each phase would write the
image in strips.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from caffepy.backend.cpu.convolution.phases import Axis, axis_phases, merged
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.simd_groups import (
    LINE,
    NUMBERS,
    PIXELS,
    TABLE,
    WORD,
    Row,
    SimdGroups,
    SimdGroupsWriter,
    generator,
)
from caffepy.backend.cpu.convolution.simd_groups_kernels import named_kernel
from caffepy.backend.cpu.convolution.simd_groups_tables import row_taps, row_tiles, step_of, table_of
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Kernel, Words
from caffepy.backend.cpu.jit.threads import VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, table_at

TAPS = range(2, 33)
"""Taps of a row of a phase: with a single one nothing is read twice, and rows of more are long functions."""
MAX_STRIDE = 4 if WIDTH == 16 else 2
"""With a wider one a row has few pixels in a phase."""
APART = 512
"""Elements from one pixel to the next, of which multiples share few sets of the first cache."""
ZEROS = ConstantTable(np.zeros(2 * WIDTH, np.float32))
"""What is read in place of what lies beside the image."""


class _TileWriter(SimdGroupsWriter):
    """Writes the sums of a tile of eight or four pixels."""

    def write_tile(self, row: Row, arguments: list[Any]) -> None:
        """See `row_tile`."""
        *first, pixels, relu, low, high, zeros = arguments
        builder, vector = self.builder, self.word(WIDTH)
        inside = builder.and_(
            builder.icmp_signed("<=", low, self.word(0)), builder.icmp_signed(">=", high, self.word(row.span(8)))
        )

        def write(count: int, edges: bool) -> list[Any]:
            fetched = self.word(LINE), self.word(1)
            self.write_row(row, count, True, edges, [*first, vector, vector, relu, low, high, zeros, *fetched])
            return []

        def eight() -> list[Any]:
            return self.choose(inside, lambda: write(8, False), lambda: write(8, True))

        self.choose(builder.icmp_signed("==", pixels, self.word(4)), lambda: write(4, True), eight)


@cache
def row_tile(row: Row) -> Any:
    """As `row_sums` for a whole vector, for one channel a group, and eight pixels or four.

    Arguments: as those, with the pixels in place of how many elements are read and written.
    """
    signature = types.void(
        NUMBERS, WORD, TABLE, WORD, TABLE, NUMBERS, NUMBERS, NUMBERS, WORD, WORD, WORD, WORD, WORD, NUMBERS
    )  # fmt: skip

    def typed(  # noqa: PLR0913 -- a kernel
        typing_context: Any, x: Any, step: Any, rows: Any, row_count: Any, columns: Any, weights: Any, start: Any,
        y: Any, y_step: Any, pixels: Any, relu: Any, low: Any, high: Any, zeros: Any,
    ) -> Any:  # fmt: skip
        return signature, generator(
            _TileWriter, SimdGroups(1, 1), lambda writer, arguments: writer.write_tile(row, arguments)
        )

    return intrinsic(typed)


@cache
def phased_kernel(taps: int, gap: int) -> Kernel:
    """The kernel of a `PhasedGradient` whose phases have so many taps in a row, or one less."""
    sums, sums_less = row_tile(Row(taps, 1, gap)), row_tile(Row(max(1, taps - 1), 1, gap))

    def phased_rows(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, row_starts: Words, rows_table: Words, y_rows: Words, rows: Int,
        phases: Words, phase_count: Int, most: Int, columns: Words, tiles: Words, packed: Floats, filters: Int,
        start: Floats, y: Floats, y_image: Int, y_step: Int, vectors: Int, vector: Int, channels: Int, zeros: Floats,
    ) -> None:  # fmt: skip
        """Items are the rows (n, h) of y. `phases` has for each of a row where it starts in x and in y, its taps (0:
        all, 1: one less, 2: none), its columns and tiles in their tables, and the end of its tiles.
        """
        for item in range(begin, end):
            n, r = item // rows, item % rows
            own, met = table_at(rows_table, 2 * row_starts[r]), row_starts[r + 1] - row_starts[r]
            target = ahead(y, n * y_image + y_rows[r])
            for tile in range(most):  # of each phase, so that a part of the row is written after the other
                for phase in range(0, 6 * phase_count, 6):
                    kind, column = phases[phase + 2], table_at(columns, 2 * phases[phase + 3])
                    number, reached = phases[phase + 4] + tile, met if kind < 2 else 0
                    if number >= phases[phase + 5]:
                        continue
                    first, pixels = tiles[4 * number], tiles[4 * number + 1]
                    low, high = tiles[4 * number + 2], tiles[4 * number + 3]
                    a = ahead(x, n * x_image + phases[phase] + first * channels)
                    c = ahead(target, phases[phase + 1] + first * y_step)
                    for v in range(vectors):
                        w, at = ahead(packed, v * filters), min(v * vector, channels - vector)  # those overlap
                        if kind == 0:
                            sums(
                                ahead(a, at), channels, own, reached, column, w, start, ahead(c, at), y_step, pixels, 0,
                                low, high, zeros,
                            )  # fmt: skip
                        else:
                            sums_less(
                                ahead(a, at), channels, own, reached, column, w, start, ahead(c, at), y_step, pixels, 0,
                                low, high, zeros,
                            )  # fmt: skip

    return named_kernel(phased_rows, [taps, gap])


def channel_order(channels: int, taps: int) -> Any:
    """For each element (vector, tap, lane) of packed weights, which of the weights of a depthwise layer it is.

    The last vector ends with the last channel, so it lies over the one before and needs no mask.
    """
    v, k, lane = np.ix_(range(-(-channels // WIDTH)), range(taps), range(WIDTH))
    return (np.minimum(v * WIDTH, channels - WIDTH) + lane) * taps + k


def _phases(shape: ConvolutionShape) -> list[list[Axis]]:
    return [axis_phases(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]


def is_phased(shape: ConvolutionShape) -> bool:
    """Whether the gradient of the image is computed in this way."""
    g = shape.geometry
    depthwise = g.group == shape.channels == shape.outputs and shape.channels >= WIDTH and shape.channels % APART
    if not depthwise or not 1 < g.stride[-1] <= MAX_STRIDE:
        return False
    columns = _phases(shape)[-1]
    return max(len(axis.taps) for axis in columns) in TAPS and min(len(axis.pixels) for axis in columns) >= PIXELS


class PhasedGradient:
    """The gradient of images, planned.

    Args:
        shape: of a depthwise convolution.
    """

    def __init__(self, shape: ConvolutionShape) -> None:
        *axes, columns = _phases(shape)
        self._channels, self._kernel = shape.channels, shape.geometry.kernel
        self._sizes = shape.out, shape.sizes
        self._plan_rows([list(parts) for parts in itertools.product(*axes)])
        self._plan_columns(columns)
        self._vectors = -(-shape.channels // WIDTH)
        self._filters = math.prod(self._kernel)
        self._images = math.prod(shape.out) * shape.channels, math.prod(shape.sizes) * shape.channels
        self._work = shape.sizes[-1] * self._vectors * self._filters // max(1, shape.geometry.stride[-1])

    def _plan_rows(self, phases: Sequence[Sequence[Axis]]) -> None:
        """Of each row of the image the taps that exist, and where it lies."""
        (source, target), width = self._sizes, self._kernel[-1]
        rows: dict[int, Any] = {}
        for axes in phases:
            at, valid, taps = row_taps(axes, source[:-1], self._kernel[:-1])
            weights = np.broadcast_to(taps * width * WIDTH, valid.shape)
            entries = np.stack([at * source[-1] * self._channels, weights], axis=-1)
            pixels = merged([axis.pixels for axis in axes], target[:-1])
            rows |= {int(pixel): entries[i][valid[i]] for i, pixel in enumerate(pixels)}
        ordered = [rows[pixel] for pixel in sorted(rows)]
        self._rows = len(ordered)
        self._row_starts = table_of(np.cumsum([0, *map(len, ordered)]))
        self._row_taps = table_of(np.concatenate(ordered))
        self._y_rows = table_of(np.array(sorted(rows)) * target[-1] * self._channels)

    def _plan_columns(self, columns: Sequence[Axis]) -> None:
        """Of each phase of a row where it starts, its taps and tiles; see `phased_rows`."""
        channels, width = self._channels, self._sizes[0][-1]
        self._taps = max(len(axis.taps) for axis in columns)
        self._gap = max(step_of(axis.shifts) for axis in columns)
        phases: list[tuple[int, ...]] = []
        taps: list[tuple[int, int]] = []
        tiles: list[tuple[int, ...]] = []
        for axis in columns:
            own = row_tiles(axis if len(axis.taps) else _met_by_none(axis), width)
            kind = self._taps - len(axis.taps) if len(axis.taps) else 2
            starts = int(axis.indices[0]) * channels, int(axis.pixels[0]) * channels
            phases.append((*starts, kind, len(taps), len(tiles), len(tiles) + len(own)))
            pairs = list(zip(axis.shifts * channels, axis.taps * WIDTH, strict=True))
            taps += pairs or [(0, 0)]
            tiles += own
        self._phases, self._phase_count = table_of(phases), len(phases)
        # A phase without taps reads those of the longest, for no row.
        self._columns, self._tiles = table_of(taps + [(0, 0)] * self._taps), table_of(tiles)
        self._most = max(phase[5] - phase[4] for phase in phases)
        self._y_step = step_of(columns[0].pixels) * channels

    @property
    def order(self) -> Any:
        """For each element of packed weights, which of the weights it is."""
        return channel_order(self._channels, self._filters)

    def run(self, threads: int, images: int, dy: Any, packed: Any, start: Any, dx: Any) -> None:
        """Compute dx; `start` are zeros."""
        phased_kernel(self._taps, self._gap).run(
            threads, images * self._rows, max(1, VECTOR_GRAIN // max(1, self._work)), dy, self._images[0],
            self._row_starts, self._row_taps, self._y_rows, self._rows, self._phases, self._phase_count, self._most,
            self._columns, self._tiles, packed, self._filters * WIDTH, start, dx, self._images[1], self._y_step,
            self._vectors, WIDTH, self._channels, ZEROS,
        )  # fmt: skip


def _met_by_none(axis: Axis) -> Axis:
    return Axis(axis.pixels, axis.indices, np.zeros(1, np.int64), np.zeros(1, np.int64))
