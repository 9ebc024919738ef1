"""The primitives of batch normalisation and ReLU's gradient: lays out arrays for the kernels and combines sums.

Owns how an array is dealt out to blocks of rows. Arrays whose channels are not neighbours in memory, as those of three
axes, are left to `Composite`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from caffepy.backend.composite import Composite
from caffepy.backend.cpu.jit.recording import note_host_work
from caffepy.backend.cpu.normalise.kernels import (
    MOST_GRADIENTS,
    Gate,
    forward_kernel,
    gradient_kernel,
    gradient_sums_kernel,
    measure_kernel,
)
from caffepy.backend.cpu.normalise.steps import LANES
from caffepy.backend.layout import CHANNELS_LAST
from caffepy.backend.types import Array, BatchNormState

LEAST_PERIOD = 256
"""Numbers in a row, where so many make sense: enough for the loop over them to run at full speed."""
BLOCK = 65536
"""Least numbers of a block of a sum."""
MOST_BLOCKS = 64
"""Blocks of a sum."""
GRAIN = 16384
"""Numbers below which a second thread costs more than it saves."""


@dataclass(frozen=True)
class Rows:
    """An array of channels as rows of whole pixels and whole vectors; the last row may be shorter.

    Args:
        channels: neighbours in memory.
        size: numbers in the array.
        period: numbers in a row.
    """

    channels: int
    size: int
    period: int

    @property
    def whole(self) -> int:
        """Rows that are not shorter."""
        return self.size // self.period

    @property
    def block(self) -> int:
        """Rows in a block of a sum: a function of the shape alone, so that sums do not depend on the threads."""
        return max(1, -(-BLOCK // self.period), -(-self.whole // MOST_BLOCKS))

    @property
    def blocks(self) -> int:
        return max(1, -(-self.whole // self.block))

    @property
    def grain(self) -> int:
        """Rows from which on there may be a second thread."""
        return -(-GRAIN // self.period)

    def spread(self, values: Any) -> Any:
        """One number for each column of a row."""
        note_host_work()
        return np.tile(np.asarray(values, np.float32), self.period // self.channels)

    def counts(self) -> Any:
        """How many numbers each block has in each column, float64 (blocks, period)."""
        blocks = self.blocks
        counts = np.full((blocks, self.period), float(self.block))
        counts[-1] = self.whole - (blocks - 1) * self.block
        counts[-1, : self.size % self.period] += 1
        return counts


def rows_of(array: Array) -> Rows | None:
    """How kernels see a matrix (N, C) or images; None: not at all."""
    if not (array.ndim == 2 or array.ndim in CHANNELS_LAST) or array.size == 0:
        return None
    channels = array.shape[1]
    pixels = LANES // math.gcd(channels, LANES)
    period = channels * pixels
    return Rows(channels, array.size, period * -(-LEAST_PERIOD // period))


class CpuNormalisation(Composite):
    """Batch normalisation and ReLU's gradient in the host's memory."""

    threads: int

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        """Each block takes squares around the mean of its first rows; blocks are joined as in Chan et al. (1979)."""
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_measure(x, n)
            return
        shape = (rows.blocks, rows.period)
        sums, totals = self._sum_arrays(rows, 2)
        shift = np.zeros(shape, np.float32)
        self._run_sums(measure_kernel(), rows, sums, totals, shift, x)
        counts, channels = rows.counts(), rows.channels
        first, second = totals[:, 0], totals[:, 1]
        there = np.maximum(counts, 1)
        means = shift + first / there
        squares = second - first * first / there
        mean = (counts * means).reshape(-1, channels).sum(axis=0) * (channels / rows.size)
        distances = means.reshape(-1, channels) - mean
        around = counts.reshape(-1, channels) * distances * distances + squares.reshape(-1, channels)
        elements = rows.size // channels
        n.mean[...] = mean
        self.batch_norm_finish((around.sum(axis=0) / elements).astype(np.float32), elements, n)

    def _sum_arrays(self, rows: Rows, sums: int) -> tuple[Any, Any]:
        note_host_work()  # who asks combines what blocks have
        shape = (rows.blocks, sums, rows.period)
        return np.zeros(shape, np.float32), np.zeros(shape)

    def _run_sums(self, kernel: Any, rows: Rows, *arrays: Any) -> None:
        numbers = (rows.period, rows.size, rows.whole, rows.block)
        kernel.run(self.threads, rows.blocks, 1, *arrays, *numbers)

    def batch_norm_forward(
        self, x: Array, n: BatchNormState, y: Array, residual: Array | None = None, relu: bool = False,
        mask: Array | None = None,
    ) -> None:  # fmt: skip
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_forward(x, n, y, residual, relu, mask)
            return
        per_column = (rows.spread(n.mean), rows.spread(n.inverse * n.scale), rows.spread(n.bias))
        other, bits = (y if array is None else array for array in (residual, mask))
        kernel = forward_kernel(residual is not None, relu, mask is not None)
        self._run_each(kernel, rows, x, *per_column, other, y, bits)

    def _run_each(self, kernel: Any, rows: Rows, *arrays: Any) -> None:
        kernel.run(self.threads, -(-rows.size // rows.period), rows.grain, *arrays, rows.period, rows.size)

    def batch_norm_backward_sums(
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool = False,
        mask: Array | None = None, total: Array | None = None,
    ) -> None:  # fmt: skip
        rows = rows_of(x)
        if rows is None or len(dys) > MOST_GRADIENTS:
            super().batch_norm_backward_sums(x, dys, n, sums, relu, mask, total)
            return
        assert total is not None or len(dys) == 1, "several gradients need an array for their sum"
        gate: Gate = "none" if not relu else "normal" if mask is None else "bits"
        if len(dys) == 1 and total is dys[0] and not relu:
            total = None
        per_column = (rows.spread(n.mean), rows.spread(n.inverse * n.scale), rows.spread(n.bias))
        g, g_x = self._gradient_sums(rows, gate, x, mask, dys, total, per_column)
        sums[0][...] = g_x * n.inverse
        sums[1][...] = g

    def _gradient_sums(
        self, rows: Rows, gate: Gate, x: Array, mask: Array | None, dys: Sequence[Array], total: Array | None,
        per_column: Sequence[Any],
    ) -> Any:  # fmt: skip
        """Sums for each channel, float64 (1 or 2, C)."""
        weighted = gate != "output"
        sources = [*dys, *[dys[0]] * (MOST_GRADIENTS - len(dys))]
        kernel = gradient_sums_kernel(len(dys), gate, total is not None, weighted)
        partial, totals = self._sum_arrays(rows, 1 + weighted)
        bits, out = (x if array is None else array for array in (mask, total))
        self._run_sums(kernel, rows, partial, totals, x, bits, *sources, out, *per_column)
        return totals.sum(axis=0).reshape(1 + weighted, -1, rows.channels).sum(axis=1)

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_backward_data(x, dy, n, sums, dx, relu)
            return
        per_element = np.float32(rows.channels / rows.size)
        channels = (n.mean, n.inverse * n.scale, n.bias, sums[1] * per_element, sums[0] * n.inverse * per_element)
        self._run_each(gradient_kernel(relu), rows, x, dy, *map(rows.spread, channels), dx)

    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        rows = rows_of(y)
        if rows is None or dbias is None:
            super().relu_backward(y, dy, dx, dbias, accumulate)
            return
        (total,) = self._gradient_sums(rows, "output", y, None, [dy], dx, (y, y, y))
        dbias[...] = dbias + total if accumulate else total
