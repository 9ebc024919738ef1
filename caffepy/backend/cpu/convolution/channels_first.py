"""Convolutions over one, three or more spatial axes, with arrays stored as (N, C, spatial...).

Arrays are transposed to channels last, where all convolutions are computed, and back. The weight gradient of short
kernels over one axis is a few matrix products of the images in place.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.gemm import Gemm
from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, transpose_square
from caffepy.backend.cpu.memory import Workspace
from caffepy.backend.types import Geometry

BLOCK = 64
"""Rows and columns to transpose at a time, so that source and target stay in the L1 cache."""
CHUNK = 384 * 1024
"""Elements of images per thread and chunk."""
MAX_TAPS = 2
"""Maximum taps of a kernel over one axis: each tap is a product that rereads both factors."""
MIN_PRODUCT = 2**20
"""Minimum multiplications of such a product."""


@kernel
def turn(
    begin: Int,
    end: Int,
    source: Floats,
    target: Floats,
    rows: Int,
    columns: Int,
    row_blocks: Int,
    column_blocks: Int,
    block: Int,
    width: Int,
    accumulate: Int,
) -> None:
    """target[n, column, row] (+)= source[n, row, column]. Items are (n, block of rows, block of columns)."""
    for item in range(begin, end):
        base = item // (row_blocks * column_blocks) * rows * columns
        r0 = item // column_blocks % row_blocks * block
        j0 = item % column_blocks * block
        r1, j1 = min(r0 + block, rows), min(j0 + block, columns)
        if accumulate == 0 and rows >= width and columns >= width:
            for r in range(r0, r1, width):
                for j in range(j0, j1, width):
                    at, to = min(r, rows - width), min(j, columns - width)  # overlapping squares write equal values
                    first, second = base + at * columns + to, base + to * rows + at
                    transpose_square(ahead(source, first), columns, ahead(target, second), rows)
        else:
            for j in range(j0, j1):
                for r in range(r0, r1):
                    value = source[base + r * columns + j]
                    at = base + j * rows + r
                    target[at] = target[at] + value if accumulate == 1 else value


class PlainConvolution:
    """A planned convolution of arrays with the channels before the spatial axes: one axis, or more than three.

    Args:
        threads: the backend's threads.
        workspace: the backend's workspace.
        x_shape: (N, C, spatial...).
        weights_shape: (num_output, C / group, kernel...).
        geometry: window geometry.
        plan: class of the channels-last convolution over two or more axes that computes it.
    """

    gives_sums = False
    forward_normalised = None
    backward_normalised = None

    def __init__(
        self,
        threads: int,
        workspace: Workspace,
        x_shape: tuple[int, ...],
        weights_shape: tuple[int, ...],
        geometry: Geometry,
        plan: type[TileConvolution],
    ) -> None:
        self._threads, self._workspace = threads, workspace
        self._shifts = _product_shifts(x_shape, weights_shape, geometry)
        if len(x_shape) == 3:
            g = geometry
            x_shape, weights_shape = (*x_shape[:2], 1, x_shape[2]), (*weights_shape[:2], 1, weights_shape[2])
            geometry = replace(
                g, kernel=(1, *g.kernel), stride=(1, *g.stride), pad=(0, *g.pad), dilation=(1, *g.dilation)
            )
        self._plan = plan(threads, workspace, x_shape, weights_shape, geometry)

    def _turn(self, source: Any, target: Any, sizes: tuple[int, int, int], accumulate: bool = False) -> None:
        count, rows, columns = sizes
        blocks = -(-rows // BLOCK), -(-columns // BLOCK)
        turn.run(
            self._threads,
            count * math.prod(blocks),
            max(1, GRAIN // max(1, min(rows, BLOCK) * min(columns, BLOCK))),
            source,
            target,
            rows,
            columns,
            *blocks,
            BLOCK,
            WIDTH,
            int(accumulate),
        )

    def _buffer(self, array: Any, purpose: str) -> Any:
        return self._workspace.take(purpose, array.size)[: array.size].reshape(array.shape[0], -1)

    def _last(self, array: Any, purpose: str) -> Any:
        """Return an array (N, C, ...) transposed to channels last."""
        result = self._buffer(array, purpose)
        self._turn(array, result, (array.shape[0], array.shape[1], math.prod(array.shape[2:])))
        return result

    def _first(self, result: Any, array: Any, accumulate: bool = False) -> None:
        """Transpose a channels-last result back to its array."""
        self._turn(result, array, (array.shape[0], math.prod(array.shape[2:]), array.shape[1]), accumulate)

    def _chunks(self, source: Any, target: Any, threads: int) -> list[slice]:
        """Return batch slices whose images, in both orders, stay in the threads' caches between passes."""
        images = source.shape[0]
        step = max(1, threads * CHUNK // max(1, (source.size + target.size) // max(1, images)))
        return [slice(first, first + step) for first in range(0, images, step)]

    def forward(self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None) -> None:
        weights, chunks = self._last(weights, "weights last"), self._chunks(x, y, self._threads)
        # Chunks share the weights, so they are packed once for all of them.
        if len(chunks) > 1:
            self._plan.keep(weights)
        for part in chunks:
            out = self._buffer(y[part], "y last")
            self._plan.forward(self._last(x[part], "x last"), weights, bias, out, relu, sums)
            self._first(out, y[part])

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        weights = self._last(weights, "weights last")
        for part in self._chunks(dy, dx, self._threads):
            result = self._buffer(dx[part], "x last")
            self._plan.backward_data(self._last(dy[part], "y last"), weights, result)
            self._first(result, dx[part])

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        result = self._buffer(dweights, "weights last")
        if self._shifts:
            self._multiply(x, dy, result.reshape(dweights.shape[0], len(self._shifts), -1))
            self._first(result, dweights, accumulate)
            return
        for part in self._chunks(x, dy, 1):  # the summation order does not depend on threads
            images = self._last(x[part], "x last"), self._last(dy[part], "y last")
            self._plan.backward_weights(*images, result, accumulate=part.start > 0)
        self._first(result, dweights, accumulate)

    def _multiply(self, x: Any, dy: Any, result: Any) -> None:
        """Compute the weight gradient (output, tap, channel) from images in place."""
        gemm, width, out_width = Gemm(self._threads, self._workspace), x.shape[2], dy.shape[2]
        for n in range(x.shape[0]):
            for tap, shift in enumerate(self._shifts):
                first = min(out_width, max(0, -shift))
                stop = max(first, min(out_width, width - shift))
                slopes, pixels = dy[n][:, first:stop], x[n][:, first + shift : stop + shift]
                # Images one after another: their order in the sum is fixed.
                gemm(slopes, pixels.T, result[:, tap], accumulate=n > 0)


def _product_shifts(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> list[int]:
    """Return each tap's offset from an output pixel for a short kernel over one axis; empty for other convolutions."""
    g = geometry
    if len(x_shape) != 3 or g.group > 1 or g.stride[0] > 1 or g.kernel[0] > MAX_TAPS:
        return []
    if weights_shape[0] * weights_shape[1] * x_shape[2] < MIN_PRODUCT:
        return []
    return [tap * g.dilation[0] - g.pad[0] for tap in range(g.kernel[0])]
