"""Indexed access on the GPU: launches kernels/rows.cu and kernels/roi.cu."""

from __future__ import annotations

import math

from caffepy.backend.cuda.compiler import MAX_BLOCKS, THREADS, c_type, defines, launch, launch_blocks, library_kernel
from caffepy.backend.cuda.index_arithmetic import MAX_INDEX
from caffepy.backend.cuda.memory import CudaMemory, copy, fill, in_c_order, raw
from caffepy.backend.interface import IndexingPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, SparseMatrix

MAX_COLUMN_BLOCKS = 64
"""Maximum blocks for the columns of one scattered row."""


def _run(file: str, name: str, items: int, *arguments: object, stored: str = "float") -> None:
    assert items <= MAX_INDEX, f"{name}: {items} elements are too many for one launch"
    kernel = library_kernel(file, name, defines(STORED=stored))
    launch(kernel, items, (*arguments, items))


class CudaIndexing(IndexingPrimitives, CudaMemory):
    """`IndexingPrimitives` of the GPU."""

    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        size = math.prod(destination.shape[1:])
        arrays = (raw(source), raw(index), raw(destination), bad)
        _run("rows", "gather_rows", destination.size, *arrays, source.shape[0], size)

    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        size, items = math.prod(source.shape[1:]), source.shape[0]
        if size == 0 or items == 0:
            return
        kernel = library_kernel("rows", "scatter_rows", defines(STORED="float"))
        grid = (items, min(-(-size // THREADS), MAX_COLUMN_BLOCKS))
        arrays = (raw(source), raw(index), raw(destination))
        launch_blocks(kernel, grid, (THREADS,), (*arrays, items, destination.shape[0], size))

    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        _run("rows", "one_hot", out.size, raw(labels), raw(out), bad, out.shape[1])

    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        inner = x.shape[1] if x.ndim in CHANNELS_LAST else 1
        arrays = (matrix.begins, matrix.columns, matrix.weights, raw(x), raw(y))
        assert x.dtype == y.dtype, "x and y must have the same dtype"
        _run("rows", "spatial_product", y.size, *arrays, *matrix.shape, inner, stored=c_type(x))

    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        inner = math.prod(x.shape[axis + 1 :])
        positions = math.prod(x.shape[:axis]) * inner
        if positions == 0 or indices.shape[axis] == 0:
            return
        results = [self._scratch.get(name, indices.size).reshape(indices.shape) for name in ("indices", "values")]
        kernel = library_kernel("rows", "largest", defines(STORED="float"))
        arrays = (in_c_order(x, self._scratch, "classes 0"), *results)
        numbers = (x.shape[axis], inner, indices.shape[axis], positions)
        launch_blocks(kernel, (min(positions, MAX_BLOCKS),), (THREADS,), (*arrays, *numbers))
        for result, out in zip(results, (indices, values), strict=True):
            copy(result, out)

    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        winners = self._scratch.get("winners", y.size, "int32")
        fill(winners, 0)
        sizes = (x.shape[1], x.shape[2] * x.shape[3], y.shape[2] * y.shape[3])
        _run("rows", "unpool_choose", x.size, raw(mask), winners, bad, *sizes)
        _run("rows", "unpool_put", y.size, raw(x), winners, raw(y), *sizes)

    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        sizes = (dx.shape[1], dx.shape[2] * dx.shape[3], dy.shape[2] * dy.shape[3])
        _run("rows", "unpool_take", dx.size, raw(dy), raw(mask), raw(dx), *sizes)

    def roi_max_forward(self, x: Array, rois: Array, y: Array, mask: Array, scale: float, bad: Array) -> None:
        arrays = (raw(x), raw(rois), raw(y), raw(mask), bad)
        _run("roi", "roi_max_forward", y.size, *arrays, float(scale), *x.shape, *y.shape[2:])

    def roi_max_backward(self, dy: Array, rois: Array, mask: Array, dx: Array, scale: float) -> None:
        arrays = (raw(dy), raw(rois), raw(mask), raw(dx))
        _run("roi", "roi_max_backward", dx.size, *arrays, float(scale), *dx.shape, *dy.shape[2:], dy.shape[0])

    def roi_average_forward(self, x: Array, rois: Array, y: Array, scale: float, bad: Array) -> None:
        arrays = (raw(x), raw(rois), raw(y), bad)
        _run("roi", "roi_average_forward", y.size, *arrays, float(scale), *x.shape, *y.shape[1:3])

    def roi_average_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        arrays = (raw(dy), raw(rois), raw(dx))
        _run("roi", "roi_average_backward", dx.size, *arrays, float(scale), *dx.shape, *dy.shape[1:3], dy.shape[0])

    def roi_bilinear_forward(
        self, x: Array, samples: Array, rows: Array, columns: Array, y: Array, group: int, bad: Array
    ) -> None:
        arrays = (raw(x), raw(samples), raw(rows), raw(columns), raw(y), bad)
        _run("roi", "roi_bilinear_forward", y.size, *arrays, *x.shape, *y.shape[1:], group)

    def roi_bilinear_backward(
        self, dy: Array, samples: Array, rows: Array, columns: Array, dx: Array, group: int
    ) -> None:
        arrays = (raw(dy), raw(samples), raw(rows), raw(columns), raw(dx))
        _run("roi", "roi_bilinear_backward", dx.size, *arrays, *dx.shape, *dy.shape[1:], dy.shape[0], group)
