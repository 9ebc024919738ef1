"""Tables of what the rows of a convolution with narrow groups read, and of the tiles that cover them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.phases import Axis, merged, taps_inside
from caffepy.backend.cpu.convolution.simd_groups import PIXELS, Row
from caffepy.backend.cpu.jit.kernel import ConstantTable


def table_of(values: Any) -> ConstantTable:
    """A table as int64; an empty one has an entry, as it has to lie somewhere."""
    flat = np.asarray(values, np.int64).reshape(-1)
    return ConstantTable(np.ascontiguousarray(flat if flat.size else np.zeros(1, np.int64)))


def row_taps(axes: Sequence[Axis], sizes: Sequence[int], kernel: Sequence[int]) -> tuple[Any, Any, Any]:
    """Of these axes taken as one: the row that each row and tap reads, whether it exists, and the taps' numbers."""
    at = merged([axis.indices for axis in axes], sizes)[:, None] + merged([axis.shifts for axis in axes], sizes)
    return at, taps_inside(axes, sizes), merged([axis.taps for axis in axes], kernel)


def row_tables(
    axes: Sequence[Axis], sizes: tuple[int, ...], kernel: tuple[int, ...], channels: int, tap: int
) -> tuple[ConstantTable, ConstantTable]:
    """Where the taps of each row begin in a table of those that exist: (offset in what is read, in the weights)."""
    at, valid, taps = row_taps(axes, sizes[:-1], kernel[:-1])
    weights = np.broadcast_to(taps * kernel[-1] * tap, valid.shape)
    starts = np.concatenate([[0], np.cumsum(valid.sum(axis=1))])
    return table_of(starts), table_of(np.stack([at[valid] * sizes[-1] * channels, weights[valid]], axis=-1))


def new_rows(axes: Sequence[Axis]) -> int:
    """How many rows of a window, the last ones, the window above does not have."""
    if len(axes) == 1:
        return 1
    step, gap = step_of(axes[-2].indices), step_of(axes[-2].shifts)
    return min(max(1, len(axes[-2].taps)), step // math.gcd(step, gap))


def next_rows(starts: ConstantTable, taps: ConstantTable) -> ConstantTable:
    """From what the last taps of each row of `row_tables` read to what those of the next row do."""
    last = np.maximum(starts.array[1:] - 1, 0)
    read = taps.array[0::2] if len(taps.array) > 1 else np.zeros(1, np.int64)
    return table_of(np.diff(read[last], append=read[last[-1]]))


def tiles(axis: Axis, size: int) -> list[tuple[int, int, int, int]]:
    """(first pixel, pixels, first tap, last tap + 1) of tiles that cover a row; those that overlap write the same."""
    at = axis.indices[:, None] + axis.shifts[None, :]
    first, stop = (at < 0).sum(axis=1), (at < size).sum(axis=1)
    whole = np.flatnonzero((first == 0) & (stop == len(axis.shifts)))
    begin, end = (int(whole[0]), int(whole[-1]) + 1) if len(whole) else (0, 0)
    tiles = [(m, 1, int(first[m]), max(int(first[m]), int(stop[m]))) for m in [*range(begin), *range(end, len(at))]]
    least = begin
    while begin < end:
        pixels = next(p for p in (8, 4, 1) if end - p >= least and 2 * (end - begin) > p)
        place = min(begin, end - pixels)
        tiles.append((place, pixels, 0, len(axis.shifts)))
        begin = place + pixels
    return tiles


def step_of(indices: Any) -> int:
    """From one entry to the next."""
    return int(indices[1] - indices[0]) if len(indices) > 1 else 1


def row_of(axis: Axis, share: float) -> Row | None:
    """The taps along the last axis if tiles of pixels read at most this share of what each of them reads, else None."""
    row, pixels = Row(len(axis.taps), step_of(axis.indices), step_of(axis.shifts)), 2 * PIXELS
    shares = row.taps > 1 and len(row.columns(pixels)) <= share * pixels * row.taps
    return row if shares and len(axis.indices) >= PIXELS else None


def tile_height(count: int) -> int:
    """Pixels of the tiles of a row of `count`: seven where they leave none over and tiles of eight would overlap."""
    return 7 if count % 7 == 0 and count % 8 > 4 else 8


def row_tiles(axis: Axis, size: int, high: int = 8) -> list[tuple[int, int, int, int]]:
    """(first pixel, pixels, first column in the image, end) of tiles that cover a row; columns as for `row_sums`."""
    count, tiles, begin = len(axis.indices), [], 0
    while begin < count:
        pixels = 4 if count - begin <= 4 or count < high else high
        place = min(begin, count - pixels)
        column = int(axis.indices[place] + axis.shifts[0])
        tiles.append((place, pixels, -column, size - column))
        begin = place + pixels
    return tiles
