"""Elements moved by index on the CPU: rows, one-hot rows, sparse maps of pixels, the largest elements, unpooling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu import roi
from caffepy.backend.cpu.copying import is_whole
from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, Words, kernel
from caffepy.backend.cpu.jit.recording import note_host_work
from caffepy.backend.indexing_primitives import IndexingPrimitives, SparseMatrix
from caffepy.backend.layout import CHANNELS_LAST, memory_order
from caffepy.backend.types import Array, Geometry

GRAIN = 4096
"""Elements below which a second thread costs more than it saves."""

BLOCK = 64
"""Columns that one item of a scattered sum takes."""
CHANNELS = 16
"""Channels that one item of unpooling takes."""


LEAST, MOST = np.float32(-1), np.float32(2**31)
"""Between which, both left out, a float32 rounded towards 0 is a whole number from 0 on of 32 bits."""


def _rows(array: Any) -> Any:
    """An array as (rows, elements of a row), a view."""
    return memory_order(array).reshape(array.shape[0], math.prod(array.shape[1:]))


def _numbers(index: Any, limit: int, bad: Any | None) -> Any:
    """Whole numbers of an index, -1 for those outside [0, limit); `bad` gets the position of one of these."""
    with np.errstate(invalid="ignore"):
        numbers = np.ascontiguousarray(index).reshape(-1).astype(np.int64)
    wrong = (numbers < 0) | (numbers >= limit)
    if wrong.any():
        numbers[wrong] = -1
        if bad is not None:
            bad[0] = np.flatnonzero(wrong)[0]
    return numbers


@kernel
def take_rows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, index: Floats, destination: Floats, bad: Ints, limit: Int, size: Int
) -> None:
    """Items are rows of the destination; those that no row is named for become 0."""
    for item in range(begin, end):
        number = index[item]
        inside = number > LEAST and number < MOST
        row = int(number) if inside else limit
        if row < limit:
            for i in range(size):
                destination[item * size + i] = source[row * size + i]
        else:
            bad[0] = item
            for i in range(size):
                destination[item * size + i] = 0


def gather_rows(threads: int, source: Any, index: Any, destination: Any, bad: Any) -> None:
    """See `IndexingPrimitives.gather_rows`."""
    if is_whole(source, "float32") and is_whole(index, "float32") and is_whole(destination, "float32"):
        size = math.prod(source.shape[1:])
        take_rows.run(
            threads, len(destination), max(1, 4 * GRAIN // max(size, 1)), source, index, destination, bad,
            source.shape[0], size,
        )  # fmt: skip
        return
    note_host_work()
    numbers = _numbers(index, source.shape[0], bad)
    target = _rows(destination)
    found = numbers >= 0
    if found.all():
        np.take(_rows(source), numbers, axis=0, out=target, mode="clip")
    else:
        target[~found] = 0
        target[found] = _rows(source)[numbers[found]]


@kernel
def scatter_add(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, numbers: Words, destination: Floats, count: Int, size: Int, block: Int
) -> None:
    """Items are blocks of columns, so that no two threads add to one element."""
    for item in range(begin, end):
        for i in range(count):
            row = numbers[i]
            if row >= 0:
                for c in range(item * block, min(size, (item + 1) * block)):
                    destination[row * size + c] += source[i * size + c]


def scatter_add_rows(threads: int, source: Any, index: Any, destination: Any) -> None:
    """See `IndexingPrimitives.scatter_add_rows`."""
    size = math.prod(source.shape[1:])
    numbers = _numbers(index, destination.shape[0], None)
    grain = max(1, GRAIN // (BLOCK * max(len(numbers), 1)))
    scatter_add.run(threads, -(-size // BLOCK), grain, source, numbers, destination, len(numbers), size, BLOCK)


def one_hot(labels: Any, out: Any, bad: Any) -> None:
    """See `IndexingPrimitives.one_hot`."""
    numbers = _numbers(labels, out.shape[1], bad)
    out[...] = 0
    found = np.flatnonzero(numbers >= 0)
    out[found, numbers[found]] = 1


@kernel
def product(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, begins: Ints, columns: Ints, weights: Floats, x: Floats, y: Floats,
    rows: Int, width: Int, inner: Int,
) -> None:  # fmt: skip
    """Items are (outer, row)."""
    for item in range(begin, end):
        row = item % rows
        base = (item // rows) * width
        for i in range(inner):
            y[item * inner + i] = 0
        for k in range(begins[row], begins[row + 1]):
            source = (base + columns[k]) * inner
            weight = weights[k]
            for i in range(inner):
                y[item * inner + i] += weight * x[source + i]


def spatial_product(threads: int, matrix: SparseMatrix, x: Any, y: Any) -> None:
    """See `IndexingPrimitives.spatial_product`."""
    rows, width = matrix.shape
    last = x.ndim in CHANNELS_LAST
    outer, inner = (x.shape[0], x.shape[1]) if last else (x.shape[0] * x.shape[1], 1)
    grain = max(1, GRAIN // max(inner, 1))
    product.run(threads, outer * rows, grain, matrix.begins, matrix.columns, matrix.weights, x, y, rows, width, inner)


def largest(x: Any, axis: int, indices: Any, values: Any) -> None:
    """See `IndexingPrimitives.largest`."""
    wanted = indices.shape[axis]
    falling = np.flip(np.argsort(x, axis=axis, kind="stable"), axis=axis)
    first = np.take(falling, np.arange(wanted), axis=axis)
    indices[...] = first
    values[...] = np.take_along_axis(x, first, axis=axis)


@kernel
def put_at_mask(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, mask: Floats, y: Floats, bad: Ints, channels: Int, pixels: Int, out_pixels: Int,
    block: Int, blocks: Int,
) -> None:  # fmt: skip
    """Items are (sample, block of channels), so that the later of two values for one pixel stays."""
    for item in range(begin, end):
        sample, first = item // blocks, item % blocks * block
        last = min(channels, first + block)
        for p in range(pixels):
            at = (sample * pixels + p) * channels
            for c in range(first, last):
                number = mask[at + c]
                inside = number > LEAST and number < MOST
                pixel = int(number) if inside else out_pixels
                if pixel < out_pixels:
                    y[(sample * out_pixels + pixel) * channels + c] = x[at + c]
                else:
                    bad[0] = (sample * channels + c) * pixels + p


@kernel
def take_at_mask(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, dy: Floats, mask: Floats, dx: Floats, channels: Int, pixels: Int, out_pixels: Int
) -> None:
    """Items are the bottom's pixels (sample, pixel)."""
    for item in range(begin, end):
        base = item // pixels * out_pixels
        for c in range(channels):
            number = mask[item * channels + c]
            inside = number > LEAST and number < MOST
            pixel = int(number) if inside else out_pixels
            dx[item * channels + c] = dy[(base + pixel) * channels + c] if pixel < out_pixels else np.float32(0)


@kernel
def clear(begin: Int, end: Int, y: Floats) -> None:
    """Items are elements."""
    for i in range(begin, end):
        y[i] = 0


def unpool_forward(threads: int, x: Any, mask: Any, y: Any, bad: Any) -> None:
    """See `IndexingPrimitives.unpool_forward`."""
    samples, channels = x.shape[:2]
    pixels, blocks = math.prod(x.shape[2:]), -(-channels // CHANNELS)
    clear.run(threads, y.size, 4 * GRAIN, y)
    put_at_mask.run(
        threads, samples * blocks, max(1, GRAIN // max(1, pixels * CHANNELS)), x, mask, y, bad, channels, pixels,
        math.prod(y.shape[2:]), CHANNELS, blocks,
    )  # fmt: skip


def unpool_backward(threads: int, dy: Any, mask: Any, dx: Any) -> None:
    """See `IndexingPrimitives.unpool_backward`."""
    samples, channels = dx.shape[:2]
    pixels = math.prod(dx.shape[2:])
    take_at_mask.run(
        threads,
        samples * pixels,
        max(1, GRAIN // max(1, channels)),
        dy,
        mask,
        dx,
        channels,
        pixels,
        math.prod(dy.shape[2:]),
    )


class CpuRows(IndexingPrimitives):
    """Rows, regions and unpooling in the host's memory."""

    threads: int

    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        gather_rows(self.threads, source, index, destination, bad)

    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        scatter_add_rows(self.threads, source, index, destination)

    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        one_hot(labels, out, bad)

    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        spatial_product(self.threads, matrix, x, y)

    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        largest(x, axis, indices, values)

    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        unpool_forward(self.threads, x, mask, y, bad)

    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        unpool_backward(self.threads, dy, mask, dx)

    def pool_stochastic_forward(self, x: Array, chance: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        roi.pool_stochastic_forward(self.threads, x, chance, y, mask, geometry)

    def roi_max_forward(self, x: Array, rois: Array, y: Array, mask: Array, scale: float, bad: Array) -> None:
        roi.roi_max_forward(self.threads, x, rois, y, mask, scale, bad)

    def roi_max_backward(self, dy: Array, rois: Array, mask: Array, dx: Array, scale: float) -> None:
        roi.roi_max_backward(self.threads, dy, rois, mask, dx)

    def roi_average_forward(self, x: Array, rois: Array, y: Array, scale: float, bad: Array) -> None:
        roi.roi_average_forward(self.threads, x, rois, y, scale, bad)

    def roi_average_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        roi.roi_average_backward(self.threads, dy, rois, dx, scale)
