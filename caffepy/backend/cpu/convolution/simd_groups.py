"""The innermost loops of convolutions with small groups: one vector holds the channels of several groups.

Lane l of a result vector belongs to group l // made and reads the elements (l // made) * read + i, i < read, of a
pixel: one or two loads and a shuffle per i. Depthwise groups need no shuffle.

Defines tables of the source rows and of the tiles that cover them, and loops over rows, tiles and channel vectors,
compiled for each width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir

from caffepy.backend.cpu.convolution.correlation import AxisTaps, merged, taps_inside
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Kernel, Words, kernel
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer, ahead, emitted, table_at

PIXELS = 4
"""Pixels that the weight gradient processes at a time."""
OCTETS = ir.IntType(8).as_pointer()
LINE = 16
"""Elements of a cache line; the next vectors' lines are prefetched."""


@dataclass(frozen=True)
class SimdGroups:
    """Distribution of groups over vectors.

    Args:
        made: result channels of a group.
        read: source channels of a group.
    """

    made: int
    read: int

    @property
    def groups(self) -> int:
        """Groups of a vector, whose source fits two vectors."""
        return min(WIDTH // self.made, 2 * WIDTH // self.read)

    @property
    def used(self) -> int:
        """Active lanes."""
        return self.groups * self.made

    @property
    def sources(self) -> int:
        """Source elements of a pixel per vector."""
        return self.groups * self.read

    @property
    def fills(self) -> bool:
        """Whether vectors of results and sources have no idle lanes, given enough channels."""
        return self.used == WIDTH and self.sources % WIDTH == 0

    def shuffle(self, index: int) -> list[int]:
        """Return for each lane the index of its factor among the elements."""
        return [lane // self.made * self.read + index if lane < self.used else 0 for lane in range(WIDTH)]


@dataclass(frozen=True)
class Row:
    """The taps of a kernel row and the pixels that share loads: pixel p and tap k read column p step + k gap.

    Args:
        taps: number of taps.
        step: image columns between the windows of two pixels.
        gap: image columns between two taps.
    """

    taps: int
    step: int
    gap: int

    def columns(self, pixels: int) -> dict[int, list[tuple[int, int]]]:
        """Return for each source column, in order, the (pixel, tap) pairs that use it."""
        pairs = [(p * self.step + k * self.gap, (p, k)) for p in range(pixels) for k in range(self.taps)]
        return {column: [pair for at, pair in pairs if at == column] for column in sorted({at for at, _ in pairs})}

    def span(self, pixels: int) -> int:
        """Return the number of columns from the first to the last."""
        return (pixels - 1) * self.step + (self.taps - 1) * self.gap + 1


class SimdGroupsWriter(Writer):
    """Emits sums over taps for several pixels, or over pixels for several taps."""

    def __init__(self, builder: Any, lanes: SimdGroups) -> None:
        super().__init__(builder)
        self._lanes = lanes

    def masks(self, wanted: Any, whole: bool) -> list[Any]:
        """Return masks of the one or two vectors that hold `wanted` elements of a pixel; None for full vectors."""
        if whole:
            return [None] * (self._lanes.sources // WIDTH)
        counts = [wanted, self.builder.sub(wanted, self.word(WIDTH))]
        return [self.lanes(count) for count in counts[: 1 if self._lanes.sources <= WIDTH else 2]]

    def factors(self, pixel: Any, masks: list[Any]) -> list[Any]:
        """Return for each i the vector of the lanes' factors."""
        loaded = [self._load(pixel, v * WIDTH, mask) for v, mask in enumerate(masks)]
        if self._lanes == SimdGroups(1, 1):
            return loaded
        # A shuffle takes two vectors; with one, its mask never reaches into the second.
        second = loaded[1] if len(loaded) > 1 else loaded[0]
        return [self._shuffled(loaded[0], second, i) for i in range(self._lanes.read)]

    def _load(self, pointer: Any, offset: int, mask: Any) -> Any:
        """Load a vector; an unmasked load is folded into the instruction that uses it."""
        address = self.vector_at(pointer, self.word(offset))
        return self.builder.load(address, align=4) if mask is None else self.masked_load(address, mask)

    def _shuffled(self, first: Any, second: Any, index: int) -> Any:
        mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), self._lanes.shuffle(index))
        return self.builder.shuffle_vector(first, second, mask)

    def shifted(self, pointer: Any, offset: Any) -> Any:
        return self.builder.gep(pointer, [offset])

    def write_pixels(self, pixels: int, whole: bool, arguments: Sequence[Any]) -> None:
        """See `pixel_sums`."""
        x, x_step, rows, row_count, columns, column_count, weights, start, y, y_step, inputs, outputs, relu = arguments
        masks, mask, builder = self.masks(inputs, whole), self.lanes(outputs), self.builder
        first = self.masked_load(self.vector_at(start, self.word(0)), mask)
        rectifies = builder.icmp_signed("!=", relu, self.word(0))

        def over_rows(h: Any, _: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(h, self.word(2))
            row = self.shifted(x, self.table(rows, at))
            filters = self.shifted(weights, self.table(rows, builder.add(at, self.word(1))))

            def over_columns(w: Any, _: Any, inner: list[Any]) -> list[Any]:
                at = builder.mul(w, self.word(2))
                source = self.shifted(row, self.table(columns, at))
                tap = self.shifted(filters, self.table(columns, builder.add(at, self.word(1))))
                return self._tap(source, x_step, masks, tap, inner)

            return self.loop(column_count, sums, [], over_columns)

        for pixel, total in enumerate(self.loop(row_count, self.zeros(pixels), [], over_rows)):
            address = self.vector_at(y, builder.mul(y_step, self.word(pixel)))
            total = builder.fadd(total, first)
            self.store(builder.select(rectifies, self.rectified(total), total), address, outputs, mask)

    def _tap(self, source: Any, step: Any, masks: list[Any], tap: Any, sums: list[Any]) -> list[Any]:
        # Loaded once for all pixels of the tile.
        filters = [
            self.builder.load(self.vector_at(tap, self.word(i * WIDTH)), align=4) for i in range(self._lanes.read)
        ]
        result = []
        for pixel, total in enumerate(sums):
            place = self.shifted(source, self.builder.mul(step, self.word(pixel)))
            for factor, weight in zip(self.factors(place, masks), filters, strict=True):
                total = self.multiply_add(factor, weight, total)
            result.append(total)
        return result

    def places(self, line: Any, step: Any, columns: Iterable[int]) -> dict[int, Any]:
        """Return addresses of these columns of a line, `step` bytes apart.

        Uses base addresses three columns apart; addressing modes reach one and two steps further.
        """
        builder, base, at, result = self.builder, self.builder.bitcast(line, OCTETS), 0, {}
        three = builder.mul(step, self.word(3))
        for column in columns:
            while column - at > 2:
                base, at = builder.gep(base, [three]), at + 3
            place = base if column == at else builder.gep(base, [builder.mul(step, self.word(column - at))])
            result[column] = builder.bitcast(place, ir.FloatType().as_pointer())
        return result

    def _tap_places(
        self, line: Any, step: Any, columns: Iterable[int], together: bool, fetch: bool = False
    ) -> dict[int, Any]:
        """As `places`, `step` elements apart; separate addresses unless `together`. `fetch`: prefetch ahead."""
        if together:
            result = self.places(line, self.opaque(self.builder.mul(step, self.word(4))), columns)
        else:
            result = {column: self.shifted(line, self.builder.mul(step, self.word(column))) for column in columns}
        for place in result.values() if fetch else ():
            self.prefetch(place, LINE)
        return result

    def _fetch_taps(self, row: Row, lines: list[Any], step: Any, slope: Any, dy_step: Any, fetched: Any) -> None:
        """If `fetched`, prefetch the pixels of dy at `slope` and the new columns of the last `fetched` lines."""
        with self.builder.if_then(self.builder.icmp_signed("!=", fetched, self.word(0))):
            self._fetch(self._tap_places(slope, dy_step, range(PIXELS), True))
        for left, line in zip(reversed(range(len(lines))), lines, strict=True):
            with self.builder.if_then(self.builder.icmp_signed("<", self.word(left), fetched)):
                self._fetch(self._tap_places(line, step, [*row.columns(PIXELS)][-row.step * PIXELS :], True))

    def _fetch(self, places: dict[int, Any]) -> None:
        """Prefetch the elements of these columns of a line."""
        for place in places.values():
            self.prefetch(place, 0)

    def zeros(self, count: int) -> list[Any]:
        return [ir.Constant(VECTOR, [0.0] * WIDTH)] * count

    def _inside(self, columns: Iterable[int], low: Any, high: Any) -> dict[int, Any]:
        """Return for each column whether it is inside the image, whose columns are `low` to `high`."""
        builder = self.builder
        return {
            column: builder.and_(
                builder.icmp_signed("<=", low, self.word(column)), builder.icmp_signed("<", self.word(column), high)
            )
            for column in columns
        }

    def write_row(self, row: Row, pixels: int, whole: bool, edges: bool, arguments: Sequence[Any]) -> None:
        """See `row_sums`."""
        x, step, rows, row_count, columns, weights, start, y, y_step, inputs, outputs, *others = arguments
        relu, low, high, zeros, distance, fetched = others
        masks, mask, builder = self.masks(inputs, whole), None if whole else self.lanes(outputs), self.builder
        meets = row.columns(pixels)
        inside = self._inside(meets, low, high) if edges else {}
        taps = [self.table(columns, self.word(2 * k + 1)) for k in range(row.taps)]
        begin, read = self.shifted(x, self.table(columns, self.word(0))), self._lanes.read

        octets, first_fetched = builder.mul(step, self.word(4)), builder.sub(row_count, fetched)

        def over_rows(h: Any, _: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(h, self.word(2))
            line = self.shifted(begin, self.table(rows, at))
            own = self.shifted(weights, self.table(rows, builder.add(at, self.word(1))))
            filters = [[self._load(self.shifted(own, tap), i * WIDTH, None) for i in range(read)] for tap in taps]
            own_step = self.opaque(octets)  # multiples of it are computed where they are used
            with builder.if_then(builder.icmp_signed(">=", h, first_fetched)):
                # The previous tile has prefetched the other columns.
                self._fetch(self.places(self.shifted(line, distance), own_step, [*meets][-row.step * pixels :]))
            places = self.places(line, own_step, meets)
            # Columns are outermost: each is loaded and shuffled once, for every pixel and tap that meets it.
            for column, pairs in meets.items():
                place = places[column]
                # A pointer to zeros in place of a branch or a mask; tiles inside the image are compiled without it.
                place = builder.select(inside[column], place, zeros) if edges else place
                factors = self.factors(place, masks)
                for pixel, tap in pairs:
                    for factor, weight in zip(factors, filters[tap], strict=True):
                        sums[pixel] = self.multiply_add(factor, weight, sums[pixel])
            return sums

        first = self._load(start, 0, mask)
        rectifies = builder.icmp_signed("!=", relu, self.word(0))
        for pixel, total in enumerate(self.loop(row_count, self.zeros(pixels), [], over_rows)):
            address = self.vector_at(y, builder.mul(y_step, self.word(pixel)))
            total = builder.fadd(total, first)
            total = builder.select(rectifies, self.rectified(total), total)
            if mask is None:
                builder.store(total, address, align=4)
            else:
                self.store(total, address, outputs, mask)

    def write_row_taps(self, row: Row, rows: int, whole: bool, arguments: Sequence[Any]) -> None:
        """See `row_tap_sums`."""
        x, step, entries, columns, dy, dy_step, count, totals, inputs, outputs, *others = arguments
        low, high, zeros, distance, dy_distance, fetched = others
        masks, mask, builder = self.masks(inputs, whole), None if whole else self.lanes(outputs), self.builder
        begin, meets, span = self.shifted(x, self.table(columns, self.word(2))), row.columns(PIXELS), row.span(PIXELS)
        lines = [self.shifted(begin, self.table(entries, self.word(2 * r))) for r in range(rows)]

        together = rows > 1 or WIDTH == 16
        ahead = together and self._lanes.made == self._lanes.read  # else cache lines of x and dy end apart

        def products(at: Any, sums: list[Any], inside: dict[int, Any], there: list[Any]) -> list[Any]:
            sums, slopes = list(sums), []
            slope = self.shifted(dy, builder.mul(dy_step, at))
            origin = builder.mul(builder.mul(at, self.word(row.step)), step)
            if ahead:
                sources = [self.shifted(line, builder.add(origin, distance)) for line in lines]
                self._fetch_taps(row, sources, step, self.shifted(slope, dy_distance), dy_step, fetched)
            for pixel, place in self._tap_places(slope, dy_step, range(PIXELS), together, not ahead).items():
                slopes.append(self._load(builder.select(there[pixel], place, zeros) if there else place, 0, mask))
            for r, line in enumerate(lines):
                fetch = not ahead and r == rows - 1  # earlier rows were prefetched with the previous line
                source = self.shifted(line, origin)
                for column, place in self._tap_places(source, step, meets, together, fetch).items():
                    place = builder.select(inside[column], place, zeros) if inside else place
                    for i, factor in enumerate(self.factors(place, masks)):
                        for pixel, tap in meets[column]:
                            number = (r * row.taps + tap) * self._lanes.read + i
                            sums[number] = self.multiply_add(factor, slopes[pixel], sums[number])
            return sums

        def over_pixels(block: Any, _: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(block, self.word(PIXELS))
            moved = builder.mul(at, self.word(row.step))
            first, stop, left = builder.sub(low, moved), builder.sub(high, moved), builder.sub(count, at)
            within = builder.and_(
                builder.icmp_signed("<=", first, self.word(0)), builder.icmp_signed(">=", stop, self.word(span))
            )
            within = builder.and_(within, builder.icmp_signed(">=", left, self.word(PIXELS)))

            def at_edge() -> list[Any]:
                there = [builder.icmp_signed("<", self.word(pixel), left) for pixel in range(PIXELS)]
                return products(at, sums, self._inside(meets, first, stop), there)

            # The body is emitted twice, so that blocks inside the image, which are most, pay nothing for the edge.
            return self.choose(within, lambda: products(at, sums, {}, []), at_edge)

        blocks = builder.sdiv(builder.add(count, self.word(PIXELS - 1)), self.word(PIXELS))
        # All taps' sums stay in registers over the whole line; they go to memory once, behind it.
        sums = self.loop(blocks, self.zeros(rows * row.taps * self._lanes.read), [], over_pixels)
        taps = [self.table(columns, self.word(4 * k + 3)) for k in range(row.taps)]
        for number, total in enumerate(sums):
            r, tap, i = np.unravel_index(number, (rows, row.taps, self._lanes.read))
            offset = builder.add(self.table(entries, self.word(2 * int(r) + 1)), taps[tap])
            address = self.vector_at(self.shifted(totals, offset), self.word(int(i) * WIDTH))
            builder.store(builder.fadd(builder.load(address, align=4), total), address, align=4)

    def write_taps(self, taps: int, whole: bool, arguments: Sequence[Any]) -> None:
        """See `tap_sums`."""
        x, x_step, tap_table, dy, dy_step, count, totals, inputs, outputs = arguments
        masks, mask, builder = self.masks(inputs, whole), None if whole else self.lanes(outputs), self.builder
        entries = [[self.table(tap_table, self.word(2 * tap + i)) for i in range(2)] for tap in range(taps)]

        def over_pixels(w: Any, _: Any, sums: list[Any]) -> list[Any]:
            slope = self._load(self.shifted(dy, builder.mul(w, dy_step)), 0, mask)
            place = self.shifted(x, builder.mul(w, x_step))
            factors = [f for at, _ in entries for f in self.factors(self.shifted(place, at), masks)]
            return [self.multiply_add(f, slope, total) for f, total in zip(factors, sums, strict=True)]

        sums = self.loop(count, self.zeros(taps * self._lanes.read), [], over_pixels)
        for number, total in enumerate(sums):
            tap, i = divmod(number, self._lanes.read)
            address = self.vector_at(self.shifted(totals, entries[tap][1]), self.word(i * WIDTH))
            builder.store(builder.fadd(builder.load(address, align=4), total), address, align=4)


@cache
def pixel_sums(lanes: SimdGroups, pixels: int, whole: bool) -> Any:
    """Return an intrinsic for one channel vector of `pixels` pixels: start + the sum over taps of x * weights.

    Arguments: x and the step between the pixels' windows; rows of taps as a table of (offset in x, in weights) and
    their number; columns of taps likewise; weights; the start vector; y and the step between its pixels; the elements
    of a pixel that are read and written; whether to rectify. `whole`: elements fill their vectors.
    """
    return _sums(lanes, "pwtwtwpppwwww", lambda writer, given: writer.write_pixels(pixels, whole, given))


@cache
def row_sums(lanes: SimdGroups, row: Row, pixels: int, whole: bool, edges: bool) -> Any:
    """As `pixel_sums`, for rows of taps as in `row`: each image column is loaded once for all pixels and taps.

    Arguments: x and the elements of its pixel; rows of taps and their number; columns of taps; weights; the start
    vector; y and the step between its pixels; the elements of a pixel that are read and written; whether to rectify;
    the first column inside the image, relative to the first pixel's first tap, and the end column; zeros to read for
    outside columns, used with `edges`; the prefetch distance in elements, and the number of (last) rows to prefetch.
    """
    return _sums(lanes, "pwtwtpppwwwwwwpww", lambda writer, given: writer.write_row(row, pixels, whole, edges, given))


@cache
def row_tap_sums(lanes: SimdGroups, row: Row, rows: int, whole: bool) -> Any:
    """Return an intrinsic: for the taps of several rows, totals += the sum over pixels of x * dy, for one channel
    vector.

    Arguments: x and the elements of its pixel; the rows as a table of (offset in x, in totals); the columns as a table
    of (unused, unused, offset in x, in totals); dy and the step between pixels; number of pixels; totals; the elements
    of a pixel of x and of dy; columns inside the image and zeros as for `row_sums`; the prefetch distances of x and of
    dy in elements, and the number of (last) rows to prefetch.
    """
    return _sums(lanes, "pwttpwwpwwwwpwww", lambda writer, given: writer.write_row_taps(row, rows, whole, given))


@cache
def tap_sums(lanes: SimdGroups, taps: int, whole: bool) -> Any:
    """Return an intrinsic: for each of several taps, totals += the sum over pixels of x * dy, for one channel vector.

    Arguments: x and the step between pixels' windows; the taps as a table of (offset in x, in totals); dy and the step
    between pixels; number of pixels; totals; the elements of a pixel of x and of dy. `whole`: they fill their vectors.
    """
    return _sums(lanes, "pwtpwwpww", lambda writer, given: writer.write_taps(taps, whole, given))


def _sums(lanes: SimdGroups, kinds: str, write: Callable[[SimdGroupsWriter, Sequence[Any]], None]) -> Any:
    """As `emitted`, with a writer for these lanes in place of the builder."""
    return emitted(kinds, lambda builder, *arguments: write(SimdGroupsWriter(builder, lanes), arguments))


def table_of(values: Any) -> ConstantTable:
    """Return a table as int64; an empty one gets an entry, because it needs an address."""
    flat = np.asarray(values, np.int64).reshape(-1)
    return ConstantTable(np.ascontiguousarray(flat if flat.size else np.zeros(1, np.int64)))


def row_taps(axes: Sequence[AxisTaps], sizes: Sequence[int], kernel: Sequence[int]) -> tuple[Any, Any, Any]:
    """For merged axes: return the source row of each row and tap, whether it exists, and the taps' numbers."""
    at = merged([axis.indices for axis in axes], sizes)[:, None] + merged([axis.shifts for axis in axes], sizes)
    return at, taps_inside(axes, sizes), merged([axis.taps for axis in axes], kernel)


def row_tables(
    axes: Sequence[AxisTaps], sizes: tuple[int, ...], kernel: tuple[int, ...], channels: int, tap: int
) -> tuple[ConstantTable, ConstantTable]:
    """Return each row's begin in a table of its existing taps: (offset in the source, in the weights)."""
    at, valid, taps = row_taps(axes, sizes[:-1], kernel[:-1])
    weights = np.broadcast_to(taps * kernel[-1] * tap, valid.shape)
    starts = np.concatenate([[0], np.cumsum(valid.sum(axis=1))])
    return table_of(starts), table_of(np.stack([at[valid] * sizes[-1] * channels, weights[valid]], axis=-1))


def new_rows(axes: Sequence[AxisTaps]) -> int:
    """Return the number of (last) rows of a window that the window above does not read."""
    if len(axes) == 1:
        return 1
    step, gap = step_of(axes[-2].indices), step_of(axes[-2].shifts)
    return min(max(1, len(axes[-2].taps)), step // math.gcd(step, gap))


def next_rows(starts: ConstantTable, taps: ConstantTable) -> ConstantTable:
    """Return the offsets from the last taps of each row of `row_tables` to those of the next row."""
    last = np.maximum(starts.array[1:] - 1, 0)
    read = taps.array[0::2] if len(taps.array) > 1 else np.zeros(1, np.int64)
    return table_of(np.diff(read[last], append=read[last[-1]]))


def tiles(axis: AxisTaps, size: int) -> list[tuple[int, int, int, int]]:
    """Return (first pixel, pixels, first tap, last tap + 1) of tiles that cover a row; they may overlap."""
    at = axis.indices[:, None] + axis.shifts[None, :]
    first, stop = (at < 0).sum(axis=1), (at < size).sum(axis=1)
    whole = np.flatnonzero((first == 0) & (stop == len(axis.shifts)))
    begin, end = (int(whole[0]), int(whole[-1]) + 1) if len(whole) else (0, 0)
    tiles = [(m, 1, int(first[m]), max(int(first[m]), int(stop[m]))) for m in [*range(begin), *range(end, len(at))]]
    least = begin
    while begin < end:
        pixels = next(p for p in (8, 4, 1) if end - p >= least and 2 * (end - begin) > p)
        # The last tile moves back over its neighbour and writes equal values again: cheaper than tiles of every height.
        place = min(begin, end - pixels)
        tiles.append((place, pixels, 0, len(axis.shifts)))
        begin = place + pixels
    return tiles


def step_of(indices: Any) -> int:
    """Return the distance of entries."""
    return int(indices[1] - indices[0]) if len(indices) > 1 else 1


def row_of(axis: AxisTaps, share: float) -> Row | None:
    """Return the taps along the last axis if sharing loads reduces them to at most this share, else None."""
    row, pixels = Row(len(axis.taps), step_of(axis.indices), step_of(axis.shifts)), 2 * PIXELS
    shares = row.taps > 1 and len(row.columns(pixels)) <= share * pixels * row.taps
    return row if shares and len(axis.indices) >= PIXELS else None


def tile_height(count: int) -> int:
    """Return the pixels per tile of a row of `count`: seven if it divides evenly and tiles of eight would overlap."""
    return 7 if count % 7 == 0 and count % 8 > 4 else 8


def row_tiles(axis: AxisTaps, size: int, high: int = 8) -> list[tuple[int, int, int, int]]:
    """Return (first pixel, pixels, first column in the image, end) of tiles of a row; columns as in `row_sums`."""
    count, tiles, begin = len(axis.indices), [], 0
    while begin < count:
        pixels = 4 if count - begin <= 4 or count < high else high
        # As in `tiles`: the last tile overlaps its neighbour.
        place = min(begin, count - pixels)
        column = int(axis.indices[place] + axis.shifts[0])
        tiles.append((place, pixels, -column, size - column))
        begin = place + pixels
    return tiles


@kernel
def gather(begin: Int, end: Int, source: Floats, order: Words, target: Floats) -> None:
    """target[i] = source[order[i]], or 0 if order[i] is -1."""
    for i in range(begin, end):
        target[i] = source[order[i]] if order[i] >= 0 else 0


@kernel
def add_blocks(
    begin: Int, end: Int, totals: Floats, blocks: Int, size: Int, positions: Words, target: Floats, accumulate: Int
) -> None:
    """target[i] (+)= the sum of all blocks' totals[positions[i]]."""
    for i in range(begin, end):
        # A float64, and the blocks in their order: the sum depends on no thread.
        total = 0.0
        for block in range(blocks):
            total += totals[block * size + positions[i]]
        target[i] = target[i] + total if accumulate == 1 else total


@cache
def fold_kernel(many: int) -> Kernel:
    """Return a kernel that sums the gradients of each channel's `many` outputs (grouped.py)."""

    zero = np.float32(0)

    def fold(begin: Int, end: Int, source: Floats, target: Floats, run: Int) -> None:
        """target[i] = the sum of `many` contiguous elements of source. Items are `run` of them."""
        for i in range(begin * run, end * run):
            # Four chains of additions, because one chain would wait for each addition; their order is fixed.
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
    """Return a kernel whose names contain these numbers; its cached machine code is stored and linked by name.

    Cached machine code of several processes is linked by qualified names: with equal names the first would be called.
    """
    function.__name__ = function.__qualname__ = "_".join([function.__name__, *map(str, numbers)])
    return Kernel(function)


@cache
def pixel_kernel(lanes: SimdGroups) -> Kernel:
    """Return the kernel of a `_Pass` (grouped.py)."""
    sums8, sums4, sums1 = (pixel_sums(lanes, pixels, False) for pixels in (8, 4, 1))
    whole8 = pixel_sums(lanes, 8, lanes.fills)

    def grouped_pixels(
        begin: Int,
        end: Int,
        x: Floats,
        x_image: Int,
        x_from: Int,
        x_step: Int,
        row_starts: Words,
        row_taps: Words,
        columns: Words,
        tiles: Words,
        tile_count: Int,
        parts: Int,
        packed: Floats,
        filters: Int,
        start: Floats,
        y: Floats,
        y_image: Int,
        y_rows: Words,
        y_step: Int,
        rows: Int,
        vectors: Int,
        sources: Int,
        used: Int,
        inputs: Int,
        outputs: Int,
        relu: Int,
    ) -> None:
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

    return _named(lanes, grouped_pixels)


@cache
def row_kernel(lanes: SimdGroups, row: Row, high: int) -> Kernel:
    """As `pixel_kernel`, for rows of taps as in `row`; tiles are (first pixel, `high` or 4, first column, end)."""
    inside, edge = (row_sums(lanes, row, high, lanes.fills, edges) for edges in (False, True))
    any_high, any4 = (row_sums(lanes, row, pixels, False, True) for pixels in (high, 4))
    span, tile, shared = row.span(high), high, max(1, LINE // lanes.sources)

    def grouped_rows(
        begin: Int,
        end: Int,
        x: Floats,
        x_image: Int,
        x_from: Int,
        x_step: Int,
        row_starts: Words,
        row_taps: Words,
        columns: Words,
        tiles: Words,
        tile_count: Int,
        parts: Int,
        packed: Floats,
        filters: Int,
        start: Floats,
        y: Floats,
        y_image: Int,
        y_rows: Words,
        y_step: Int,
        rows: Int,
        vectors: Int,
        sources: Int,
        used: Int,
        inputs: Int,
        outputs: Int,
        relu: Int,
        zeros: Floats,
        next_rows: Words,
        depth: Int,
        fetched: Int,
    ) -> None:
        """Items are (image, row, part of the tiles). Prefetches `depth` vectors ahead for `fetched` rows;
        `next_rows`: offsets from a row's last taps to the next row's."""
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
                    # Vectors that share a cache line prefetch it once.
                    near = fetched if v % shared == 0 else 0
                    if pixels < tile:
                        any4(
                            a,
                            inputs,
                            own,
                            count,
                            columns,
                            w,
                            b,
                            c,
                            y_step,
                            read,
                            made,
                            relu,
                            low,
                            high,
                            zeros,
                            far,
                            near,
                        )
                    elif made < used or read < sources:
                        any_high(
                            a,
                            inputs,
                            own,
                            count,
                            columns,
                            w,
                            b,
                            c,
                            y_step,
                            read,
                            made,
                            relu,
                            low,
                            high,
                            zeros,
                            far,
                            near,
                        )
                    elif low <= 0 and high >= span:
                        inside(
                            a,
                            inputs,
                            own,
                            count,
                            columns,
                            w,
                            b,
                            c,
                            y_step,
                            read,
                            made,
                            relu,
                            low,
                            high,
                            zeros,
                            far,
                            near,
                        )
                    else:
                        edge(
                            a,
                            inputs,
                            own,
                            count,
                            columns,
                            w,
                            b,
                            c,
                            y_step,
                            read,
                            made,
                            relu,
                            low,
                            high,
                            zeros,
                            far,
                            near,
                        )

    return _named(lanes, grouped_rows, row, high)


@cache
def row_tap_kernel(lanes: SimdGroups, row: Row, many: int) -> Kernel:
    """As `tap_kernel`, for rows of taps as in `row`, `many` rows at a time."""
    sums_many, sums1 = row_tap_sums(lanes, row, many, False), row_tap_sums(lanes, row, 1, False)
    whole_many = row_tap_sums(lanes, row, many, lanes.fills)
    shared = max(1, LINE // lanes.sources)

    def grouped_row_taps(
        begin: Int,
        end: Int,
        x: Floats,
        x_image: Int,
        x_from: Int,
        x_step: Int,
        starts: Words,
        taps: Words,
        columns: Words,
        kernel_w: Int,
        dy: Floats,
        dy_line: Int,
        totals: Floats,
        filters: Int,
        size: Int,
        lines: Int,
        block: Int,
        rows: Int,
        vectors: Int,
        parts: Int,
        sources: Int,
        used: Int,
        inputs: Int,
        outputs: Int,
        width: Int,
        low: Int,
        high: Int,
        zeros: Floats,
        next_rows: Words,
        fetched: Int,
    ) -> None:
        """Items are (block of output lines, part of the vectors). While a vector is processed, the next one's data is
        prefetched for `fetched` rows of the window."""
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
                                a,
                                inputs,
                                entry,
                                columns,
                                d,
                                outputs,
                                width,
                                sums,
                                read,
                                made,
                                low,
                                high,
                                zeros,
                                far,
                                far_d,
                                min(fetched, many) if v % shared == 0 else 0,
                            )
                            t += many
                        elif count - t >= many:
                            sums_many(
                                a,
                                inputs,
                                entry,
                                columns,
                                d,
                                outputs,
                                width,
                                sums,
                                read,
                                made,
                                low,
                                high,
                                zeros,
                                far,
                                far_d,
                                min(fetched, many) if v % shared == 0 else 0,
                            )
                            t += many
                        else:
                            sums1(
                                a,
                                inputs,
                                entry,
                                columns,
                                d,
                                outputs,
                                width,
                                sums,
                                read,
                                made,
                                low,
                                high,
                                zeros,
                                far,
                                far_d,
                                1 if v % shared == 0 and count - t <= fetched else 0,
                            )
                            t += 1

    return _named(lanes, grouped_row_taps, row, many)


@cache
def tap_kernel(lanes: SimdGroups) -> Kernel:
    """Return the kernel of a `_WeightsPass` (grouped.py)."""
    # Three taps of a column share the loads of dy; with more channels of a group their sums and factors exceed the
    # registers.
    many = 3 if lanes.read <= 4 else 1
    sums_many, sums1 = tap_sums(lanes, many, False), tap_sums(lanes, 1, False)
    whole_many = tap_sums(lanes, many, lanes.fills)

    def grouped_taps(
        begin: Int,
        end: Int,
        x: Floats,
        x_image: Int,
        x_from: Int,
        x_step: Int,
        starts: Words,
        taps: Words,
        columns: Words,
        kernel_w: Int,
        dy: Floats,
        dy_line: Int,
        totals: Floats,
        filters: Int,
        size: Int,
        lines: Int,
        block: Int,
        rows: Int,
        vectors: Int,
        parts: Int,
        sources: Int,
        used: Int,
        inputs: Int,
        outputs: Int,
    ) -> None:
        """Items are (block of output lines, part of the vectors)."""
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

    return _named(lanes, grouped_taps)
