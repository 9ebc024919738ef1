"""Elements moved by index on the CPU: rows, one-hot rows, sparse maps of pixels, the largest elements, unpooling."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu import roi
from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, Words, kernel
from caffepy.backend.layout import CHANNELS_LAST, memory_order
from caffepy.backend.row_primitives import RowPrimitives, SparseMatrix
from caffepy.backend.types import Array, Geometry

GRAIN = 4096
"""Elements below which a second thread costs more than it saves."""

BLOCK = 64
"""Columns that one item of a scattered sum takes."""


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


def gather_rows(source: Any, index: Any, destination: Any, bad: Any) -> None:
    """See `RowPrimitives.gather_rows`."""
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
    """See `RowPrimitives.scatter_add_rows`."""
    size = math.prod(source.shape[1:])
    numbers = _numbers(index, destination.shape[0], None)
    grain = max(1, GRAIN // (BLOCK * max(len(numbers), 1)))
    scatter_add.run(threads, -(-size // BLOCK), grain, source, numbers, destination, len(numbers), size, BLOCK)


def one_hot(labels: Any, out: Any, bad: Any) -> None:
    """See `RowPrimitives.one_hot`."""
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
    """See `RowPrimitives.spatial_product`."""
    rows, width = matrix.shape
    last = x.ndim in CHANNELS_LAST
    outer, inner = (x.shape[0], x.shape[1]) if last else (x.shape[0] * x.shape[1], 1)
    grain = max(1, GRAIN // max(inner, 1))
    product.run(threads, outer * rows, grain, matrix.begins, matrix.columns, matrix.weights, x, y, rows, width, inner)


def largest(x: Any, axis: int, indices: Any, values: Any) -> None:
    """See `RowPrimitives.largest`."""
    wanted = indices.shape[axis]
    falling = np.flip(np.argsort(x, axis=axis, kind="stable"), axis=axis)
    first = np.take(falling, np.arange(wanted), axis=axis)
    indices[...] = first
    values[...] = np.take_along_axis(x, first, axis=axis)


def _planes(array: Any) -> Any:
    """(N, C, H, W) as (N * C, H * W) in logical order."""
    n, c, h, w = array.shape
    return np.ascontiguousarray(array).reshape(n * c, h * w)


def unpool_forward(x: Any, mask: Any, y: Any, bad: Any) -> None:
    """See `RowPrimitives.unpool_forward`."""
    pixels = y.shape[2] * y.shape[3]
    numbers = _numbers(mask, pixels, bad).reshape(x.shape[0] * x.shape[1], x.shape[2] * x.shape[3])
    planes = np.zeros((len(numbers), pixels + 1), np.float32)
    # Bad entries go behind the plane.
    np.put_along_axis(planes, np.where(numbers < 0, pixels, numbers), _planes(x), axis=1)
    y[...] = planes[:, :pixels].reshape(y.shape)


def unpool_backward(dy: Any, mask: Any, dx: Any) -> None:
    """See `RowPrimitives.unpool_backward`."""
    pixels = dy.shape[2] * dy.shape[3]
    numbers = _numbers(mask, pixels, None).reshape(dx.shape[0] * dx.shape[1], dx.shape[2] * dx.shape[3])
    found = np.take_along_axis(_planes(dy), np.maximum(numbers, 0), axis=1)
    dx[...] = np.where(numbers < 0, 0, found).reshape(dx.shape)


class CpuRows(RowPrimitives):
    """Rows, regions and unpooling in the host's memory."""

    threads: int

    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        gather_rows(source, index, destination, bad)

    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        scatter_add_rows(self.threads, source, index, destination)

    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        one_hot(labels, out, bad)

    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        spatial_product(self.threads, matrix, x, y)

    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        largest(x, axis, indices, values)

    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        unpool_forward(x, mask, y, bad)

    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        unpool_backward(dy, mask, dx)

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
