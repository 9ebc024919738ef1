"""Depthwise convolutions with wide windows whose pixels lie a power of two apart.

All pixels of a vector of channels then map to a few sets of the first cache, and a wide window reads each of them many
times. So one vector's pixels of an image are brought together first.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.depthwise.phased import APART, ZEROS, channel_order, row_tile
from caffepy.backend.cpu.convolution.lanes import Row
from caffepy.backend.cpu.convolution.lanes_kernels import named_kernel
from caffepy.backend.cpu.convolution.lanes_tables import row_of, row_tables, row_tiles, step_of, table_of
from caffepy.backend.cpu.convolution.phases import Axis, merged
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.jit.kernel import Floats, Int, Kernel, Words
from caffepy.backend.cpu.jit.threads import VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, copy_vectors, table_at
from caffepy.backend.cpu.workspace import Workspace

MIN_TAPS = 25
"""Of a window: those of fewer read too little again."""
MAX_TAPS = 32
"""Of its row."""
PIXELS = 2048
"""Of an image, so that one vector of each stays in the second cache."""


@cache
def panel_kernel(row: Row) -> Kernel:
    """The kernel of a `PanelPass`."""
    sums = row_tile(row)

    def panel_rows(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, size: Int, row_starts: Words, rows_table: Words, y_rows: Words,
        rows: Int, columns: Words, tiles: Words, tile_count: Int, x_from: Int, x_step: Int, packed: Floats,
        filters: Int, start: Floats, y: Floats, y_image: Int, y_step: Int, vectors: Int, vector: Int, channels: Int,
        relu: Int, zeros: Floats, panels: Floats, count: Int, items: Int,
    ) -> None:  # fmt: skip
        """Items are parts of the `count` pairs (n, vector of channels)."""
        for item in range(begin, end):
            panel = ahead(panels, item * size * vector)
            for pair in range(item * count // items, (item + 1) * count // items):
                n, v = pair // vectors, pair % vectors
                at = min(v * vector, channels - vector)  # the last one may lie over the one before
                image, target = ahead(x, n * x_image + at), ahead(y, n * y_image + at)
                for pixel in range(size):
                    copy_vectors(ahead(image, pixel * channels), ahead(panel, pixel * vector), 1)
                for r in range(rows):
                    own, met = table_at(rows_table, 2 * row_starts[r]), row_starts[r + 1] - row_starts[r]
                    for number in range(0, 4 * tile_count, 4):
                        first, pixels = tiles[number], tiles[number + 1]
                        sums(
                            ahead(panel, x_from + first * x_step), vector, own, met, columns,
                            ahead(packed, v * filters), ahead(start, at), ahead(target, y_rows[r] + first * y_step),
                            y_step, pixels, relu, tiles[number + 2], tiles[number + 3], zeros,
                        )  # fmt: skip

    return named_kernel(panel_rows, [row.taps, row.step, row.gap])


def is_panels(shape: ConvolutionShape, axes: Sequence[Axis], sizes: Sequence[int]) -> bool:
    """Whether results at the pixels of these axes, read from images of these sizes, are computed in this way."""
    g, row = shape.geometry, row_of(axes[-1], 1)
    if not g.group == shape.channels == shape.outputs or row is None:
        return False
    taps = math.prod(g.kernel)
    apart = shape.channels % APART == 0 and math.prod(sizes) <= PIXELS
    return apart and taps >= MIN_TAPS and row.taps <= MAX_TAPS


class PanelPass:
    """Results at the pixels of some axes, planned.

    Args:
        shape: of a depthwise convolution.
        axes: what is computed and what it reads, for each spatial axis.
        sizes: of the spatial axes of what is read and of what is computed.
        workspace: of the backend.
    """

    def __init__(
        self, shape: ConvolutionShape, axes: Sequence[Axis], sizes: tuple[tuple[int, ...], tuple[int, ...]],
        workspace: Workspace,
    ) -> None:  # fmt: skip
        (source, target), kernel, column = sizes, shape.geometry.kernel, axes[-1]
        self._workspace, self._channels = workspace, shape.channels
        row = row_of(column, 1)
        assert row is not None
        self._row, self._tiles = row, row_tiles(column, source[-1])
        self._row_starts, self._row_taps = row_tables(axes[:-1], source, kernel, WIDTH, WIDTH)
        self._columns = table_of(np.stack([column.shifts * WIDTH, column.taps * WIDTH], axis=-1))
        self._tile_table = table_of(self._tiles)
        self._from, self._step = int(column.indices[0]) * WIDTH, step_of(column.indices) * WIDTH
        rows = merged([axis.pixels for axis in axes[:-1]], target[:-1])
        self._y_rows = table_of((rows * target[-1] + column.pixels[0]) * shape.channels)
        self._y_step = step_of(column.pixels) * shape.channels
        self._rows, self._sizes, self._taps = len(rows), (math.prod(source), math.prod(target)), math.prod(kernel)
        self._vectors = -(-shape.channels // WIDTH)

    @property
    def order(self) -> Any:
        """For each element of packed weights, which of the weights it is."""
        return channel_order(self._channels, self._taps)

    def run(
        self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any, relu: bool = False
    ) -> None:  # fmt: skip
        """Compute y of some images, perhaps rectified."""
        count = images * self._vectors
        items = min(4 * threads, count) if threads > 1 else 1
        work = count * self._taps * self._sizes[1]
        panel_kernel(self._row).run(
            threads, items, max(1, VECTOR_GRAIN * items // max(1, work)), x, self._sizes[0] * self._channels,
            self._sizes[0], self._row_starts, self._row_taps, self._y_rows, self._rows, self._columns, self._tile_table,
            len(self._tiles), self._from, self._step, packed, self._taps * WIDTH, start, y,
            self._sizes[1] * self._channels, self._y_step, self._vectors, WIDTH, self._channels, int(relu), ZEROS,
            self._workspace.take("panels", items * self._sizes[0] * WIDTH), count, items,
        )  # fmt: skip
