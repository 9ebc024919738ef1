"""The loops of convolutions with narrow groups over rows, tiles and vectors of channels, compiled for each width."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from caffepy.backend.cpu.convolution.simd_groups import (
    LINE,
    Row,
    SimdGroups,
    pixel_sums,
    row_sums,
    row_tap_sums,
    tap_sums,
)
from caffepy.backend.cpu.jit.kernel import Floats, Int, Kernel, Words, kernel
from caffepy.backend.cpu.jit.vector import ahead, table_at


@kernel
def gather(begin: Int, end: Int, source: Floats, order: Words, target: Floats) -> None:
    """target[i] = source[order[i]], 0 where that is -1."""
    for i in range(begin, end):
        target[i] = source[order[i]] if order[i] >= 0 else 0


@kernel
def add_blocks(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, totals: Floats, blocks: Int, size: Int, positions: Words, target: Floats, accumulate: Int
) -> None:  # fmt: skip
    """target[i] (+)= the sum of all blocks' totals[positions[i]]."""
    for i in range(begin, end):
        total = 0.0
        for block in range(blocks):
            total += totals[block * size + positions[i]]
        target[i] = target[i] + total if accumulate == 1 else total


@cache
def fold_kernel(many: int) -> Kernel:
    """Adds up the gradients that `many` outputs of each channel make apart (narrow.py)."""

    zero = np.float32(0)

    def fold(begin: Int, end: Int, source: Floats, target: Floats, run: Int) -> None:
        """target[i] = the sum of `many` elements of source that lie next to each other. Items are `run` of them."""
        for i in range(begin * run, end * run):
            first = second = third = fourth = zero
            at, four = i * many, many // 4 * 4
            for j in range(at, at + four, 4):
                first, second = first + source[j], second + source[j + 1]
                third, fourth = third + source[j + 2], fourth + source[j + 3]
            for j in range(at + four, at + many):
                first += source[j]
            target[i] = (first + second) + (third + fourth)

    return named_kernel(fold, [many])


@kernel
def repeat_channels(begin: Int, end: Int, source: Floats, target: Floats, many: Int) -> None:
    """Write each element `many` times."""
    for i in range(begin, end):
        for j in range(i * many, (i + 1) * many):
            target[j] = source[i]


def _named(lanes: SimdGroups, function: Callable[..., None], row: Row | None = None, many: int = 0) -> Kernel:
    return named_kernel(
        function, [lanes.made, lanes.read, *([] if row is None else [row.taps, row.step, row.gap, many])]
    )


def named_kernel(function: Callable[..., None], numbers: list[int]) -> Kernel:
    """A kernel whose names, by which its machine code is kept and linked, tell these numbers apart.

    Machine code that several processes have kept is linked by qualified names: of two alike the first would be called.
    """
    function.__name__ = function.__qualname__ = "_".join([function.__name__, *map(str, numbers)])
    return Kernel(function)


@cache
def pixel_kernel(lanes: SimdGroups) -> Kernel:
    """The kernel of a `_Pass` (narrow.py)."""
    sums8, sums4, sums1 = (pixel_sums(lanes, pixels, False) for pixels in (8, 4, 1))
    whole8 = pixel_sums(lanes, 8, lanes.fills)

    def narrow_pixels(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, x_from: Int, x_step: Int, row_starts: Words, row_taps: Words,
        columns: Words, tiles: Words, tile_count: Int, parts: Int, packed: Floats, filters: Int, start: Floats,
        y: Floats, y_image: Int, y_rows: Words, y_step: Int, rows: Int, vectors: Int, sources: Int, used: Int,
        inputs: Int, outputs: Int, relu: Int,
    ) -> None:  # fmt: skip
        """Items are (image, row, part of the tiles)."""
        for item in range(begin, end):
            part, line = item % parts, item // parts
            n, r = line // rows, line % rows
            row = table_at(row_taps, 2 * row_starts[r])
            row_count = row_starts[r + 1] - row_starts[r]
            for number in range(part * tile_count // parts, (part + 1) * tile_count // parts):
                first, pixels = tiles[4 * number], tiles[4 * number + 1]
                column = table_at(columns, 2 * tiles[4 * number + 2])
                count = tiles[4 * number + 3] - tiles[4 * number + 2]
                source = ahead(x, n * x_image + x_from + first * x_step)
                target = ahead(y, n * y_image + y_rows[r] + first * y_step)
                for v in range(vectors):
                    a, c = ahead(source, v * sources), ahead(target, v * used)
                    w, b = ahead(packed, v * filters), ahead(start, v * used)
                    read, made = min(sources, inputs - v * sources), min(used, outputs - v * used)
                    if pixels == 8 and made == used and read == sources:
                        whole8(a, x_step, row, row_count, column, count, w, b, c, y_step, read, made, relu)
                    elif pixels == 8:
                        sums8(a, x_step, row, row_count, column, count, w, b, c, y_step, read, made, relu)
                    elif pixels == 4:
                        sums4(a, x_step, row, row_count, column, count, w, b, c, y_step, read, made, relu)
                    else:
                        sums1(a, x_step, row, row_count, column, count, w, b, c, y_step, read, made, relu)

    return _named(lanes, narrow_pixels)


@cache
def row_kernel(lanes: SimdGroups, row: Row, high: int) -> Kernel:
    """As `pixel_kernel`, for rows of taps as in `row`: tiles are of (first pixel, `high` or 4, first column, end)."""
    inside, edge = (row_sums(lanes, row, high, lanes.fills, edges) for edges in (False, True))
    any_high, any4 = (row_sums(lanes, row, pixels, False, True) for pixels in (high, 4))
    span, tile, shared = row.span(high), high, max(1, LINE // lanes.sources)

    def narrow_rows(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, x_from: Int, x_step: Int, row_starts: Words, row_taps: Words,
        columns: Words, tiles: Words, tile_count: Int, parts: Int, packed: Floats, filters: Int, start: Floats,
        y: Floats, y_image: Int, y_rows: Words, y_step: Int, rows: Int, vectors: Int, sources: Int, used: Int,
        inputs: Int, outputs: Int, relu: Int, zeros: Floats, next_rows: Words,
        depth: Int, fetched: Int,
    ) -> None:  # fmt: skip
        """Items are (image, row, part of the tiles). Of `fetched` rows what lies `depth` vectors ahead is fetched;
        `next_rows`: from a row's last taps to those of the next one.
        """
        for item in range(begin, end):
            part, line = item % parts, item // parts
            n, r = line // rows, line % rows
            own = table_at(row_taps, 2 * row_starts[r])
            count = row_starts[r + 1] - row_starts[r]
            for number in range(part * tile_count // parts, (part + 1) * tile_count // parts):
                first, pixels = tiles[4 * number], tiles[4 * number + 1]
                low, high = tiles[4 * number + 2], tiles[4 * number + 3]
                source = ahead(x, n * x_image + x_from + first * x_step)
                target = ahead(y, n * y_image + y_rows[r] + first * y_step)
                more = tiles[4 * number + 4] if number + 1 < tile_count else tiles[0]
                beyond = (more - first) * x_step - vectors * sources  # from the last vector to the next tile's first
                beyond += next_rows[r] if number + 1 == tile_count else 0
                for v in range(vectors):
                    a, c = ahead(source, v * sources), ahead(target, v * used)
                    w, b = ahead(packed, v * filters), ahead(start, v * used)
                    read, made = min(sources, inputs - v * sources), min(used, outputs - v * used)
                    far = depth * sources + (beyond if v + depth >= vectors else 0)
                    near = fetched if v % shared == 0 else 0
                    if pixels < tile:
                        any4(
                            a, inputs, own, count, columns, w, b, c, y_step, read, made, relu, low, high, zeros, far,
                            near,
                        )  # fmt: skip
                    elif made < used or read < sources:
                        any_high(
                            a, inputs, own, count, columns, w, b, c, y_step, read, made, relu, low, high, zeros, far,
                            near,
                        )  # fmt: skip
                    elif low <= 0 and high >= span:
                        inside(
                            a, inputs, own, count, columns, w, b, c, y_step, read, made, relu, low, high, zeros, far,
                            near,
                        )  # fmt: skip
                    else:
                        edge(
                            a, inputs, own, count, columns, w, b, c, y_step, read, made, relu, low, high, zeros, far,
                            near,
                        )  # fmt: skip

    return _named(lanes, narrow_rows, row, high)


@cache
def row_tap_kernel(lanes: SimdGroups, row: Row, many: int) -> Kernel:
    """As `tap_kernel`, for rows of taps as in `row`, of which `many` are taken at a time."""
    sums_many, sums1 = row_tap_sums(lanes, row, many, False), row_tap_sums(lanes, row, 1, False)
    whole_many = row_tap_sums(lanes, row, many, lanes.fills)
    shared = max(1, LINE // lanes.sources)

    def narrow_row_taps(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, x_from: Int, x_step: Int, starts: Words, taps: Words,
        columns: Words, kernel_w: Int, dy: Floats, dy_line: Int, totals: Floats, filters: Int, size: Int, lines: Int,
        block: Int, rows: Int, vectors: Int, parts: Int, sources: Int, used: Int, inputs: Int, outputs: Int,
        width: Int, low: Int, high: Int, zeros: Floats, next_rows: Words, fetched: Int,
    ) -> None:  # fmt: skip
        """Items are (block of lines of the output, part of the vectors). While a vector is passed over, what the next
        one reads is fetched, in `fetched` rows of the window.
        """
        for item in range(begin, end):
            number, part = item // parts, item % parts
            first, stop = part * vectors // parts, (part + 1) * vectors // parts
            for i in range(number * size + first * filters, number * size + stop * filters):
                totals[i] = 0
            for line in range(number * block, min(lines, (number + 1) * block)):
                n, r = line // rows, line % rows
                count = starts[r + 1] - starts[r]
                for v in range(first, stop):
                    a = ahead(x, n * x_image + x_from + v * sources)
                    d = ahead(dy, line * dy_line + v * used)
                    sums = ahead(totals, number * size + v * filters)
                    read, made = min(sources, inputs - v * sources), min(used, outputs - v * used)
                    last = v + 1 == stop
                    far = (first - v) * sources + next_rows[r] if last else sources
                    far_d = (first - v) * used + dy_line if last else used
                    t = 0
                    while t < count:
                        entry = table_at(taps, 2 * (starts[r] + t))
                        if count - t >= many and made == used and read == sources:
                            whole_many(
                                a, inputs, entry, columns, d, outputs, width, sums, read, made, low, high, zeros, far,
                                far_d, min(fetched, many) if v % shared == 0 else 0,
                            )  # fmt: skip
                            t += many
                        elif count - t >= many:
                            sums_many(
                                a, inputs, entry, columns, d, outputs, width, sums, read, made, low, high, zeros, far,
                                far_d, min(fetched, many) if v % shared == 0 else 0,
                            )  # fmt: skip
                            t += many
                        else:
                            sums1(
                                a, inputs, entry, columns, d, outputs, width, sums, read, made, low, high, zeros, far,
                                far_d, 1 if v % shared == 0 and count - t <= fetched else 0,
                            )  # fmt: skip
                            t += 1

    return _named(lanes, narrow_row_taps, row, many)


@cache
def tap_kernel(lanes: SimdGroups) -> Kernel:
    """The kernel of a `_WeightsPass` (narrow.py)."""
    many = 3 if lanes.read <= 4 else 1
    sums_many, sums1 = tap_sums(lanes, many, False), tap_sums(lanes, 1, False)
    whole_many = tap_sums(lanes, many, lanes.fills)

    def narrow_taps(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, x_image: Int, x_from: Int, x_step: Int, starts: Words, taps: Words,
        columns: Words, kernel_w: Int, dy: Floats, dy_line: Int, totals: Floats, filters: Int, size: Int, lines: Int,
        block: Int, rows: Int, vectors: Int, parts: Int, sources: Int, used: Int, inputs: Int, outputs: Int,
    ) -> None:  # fmt: skip
        """Items are (block of lines of the output, part of the vectors)."""
        for item in range(begin, end):
            number, part = item // parts, item % parts
            first, stop = part * vectors // parts, (part + 1) * vectors // parts
            for i in range(number * size + first * filters, number * size + stop * filters):
                totals[i] = 0
            for line in range(number * block, min(lines, (number + 1) * block)):
                n, r = line // rows, line % rows
                count = starts[r + 1] - starts[r]
                for v in range(first, stop):
                    source = ahead(x, n * x_image + x_from + v * sources)
                    slope = ahead(dy, line * dy_line + v * used)
                    sums = ahead(totals, number * size + v * filters)
                    read, made = min(sources, inputs - v * sources), min(used, outputs - v * used)
                    for j in range(kernel_w):
                        w0, w1 = columns[4 * j], columns[4 * j + 1]
                        a, d = ahead(source, w0 * x_step + columns[4 * j + 2]), ahead(slope, w0 * outputs)
                        column = ahead(sums, columns[4 * j + 3])
                        t = 0
                        while t < count:
                            entry = table_at(taps, 2 * (starts[r] + t))
                            if count - t >= many and made == used and read == sources:
                                whole_many(a, x_step, entry, d, outputs, w1 - w0, column, read, made)
                                t += many
                            elif count - t >= many:
                                sums_many(a, x_step, entry, d, outputs, w1 - w0, column, read, made)
                                t += many
                            else:
                                sums1(a, x_step, entry, d, outputs, w1 - w0, column, read, made)
                                t += 1

    return _named(lanes, narrow_taps)
