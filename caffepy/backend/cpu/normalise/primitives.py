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
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.normalise.kernels import (
    MAX_GRADIENTS,
    Gate,
    forward_kernel,
    gradient_kernel,
    gradient_sums_kernel,
    measure_kernel,
)
from caffepy.backend.cpu.normalise.reduce_partials import (
    CHANNELS,
    join_gradients,
    join_statistics,
    spread_backward,
    spread_forward,
)
from caffepy.backend.cpu.normalise.steps import LANES
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.layout import CHANNELS_LAST
from caffepy.backend.types import Array, BatchNormState

MIN_PERIOD = 256
"""Numbers in a row, where so many make sense: enough for the loop over them to run at full speed."""
BLOCK = 65536
"""Least numbers of a block of a sum."""
MAX_BLOCKS = 64
"""Blocks of a sum."""


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
        return max(1, -(-BLOCK // self.period), -(-self.whole // MAX_BLOCKS))

    @property
    def blocks(self) -> int:
        return max(1, -(-self.whole // self.block))

    @property
    def grain(self) -> int:
        """Rows from which on there may be a second thread."""
        return -(-GRAIN // self.period)

    @property
    def joining_grain(self) -> int:
        """Items of `join_statistics` and `join_gradients` from which on there may be a second thread."""
        return max(1, GRAIN * self.channels // (self.blocks * self.period * CHANNELS))


def rows_of(array: Array) -> Rows | None:
    """How kernels see a matrix (N, C) or images; None: not at all."""
    if not (array.ndim == 2 or array.ndim in CHANNELS_LAST) or array.size == 0:
        return None
    channels = array.shape[1]
    pixels = LANES // math.gcd(channels, LANES)
    period = channels * pixels
    return Rows(channels, array.size, period * -(-MIN_PERIOD // period))


class CpuNormalisation(Composite):
    """Batch normalisation and ReLU's gradient in the host's memory."""

    threads: int
    _workspace: Workspace

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        """Each block takes squares around the mean of its first rows."""
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_measure(x, n)
            return
        channels, take = rows.channels, self._workspace.take
        sums, totals = self._sum_arrays(rows, 2)
        shift, variance = take("shift", rows.blocks * rows.period), take("variance", channels)[:channels]
        self._run_sums(measure_kernel(), rows, sums, totals, shift, x)
        join_statistics.run(
            self.threads, -(-channels // CHANNELS), rows.joining_grain, totals, shift, rows.blocks, rows.period,
            rows.size, rows.block, channels, take("joined", 4 * channels), n.mean, variance,
        )  # fmt: skip
        self.batch_norm_finish(variance, rows.size // channels, n)

    def _sum_arrays(self, rows: Rows, sums: int) -> tuple[Array, Array]:
        """Memory for sums of blocks, (blocks, sums, period) of float32 and of float64, which a kernel zeroes."""
        size = rows.blocks * sums * rows.period
        return self._workspace.take("sums", size), self._workspace.take("totals", 2 * size)

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
        per_column = self._columns(rows, n)
        other, bits = (y if array is None else array for array in (residual, mask))
        kernel = forward_kernel(residual is not None, relu, mask is not None)
        self._run_each(kernel, rows, x, *per_column, other, y, bits)

    def _columns(self, rows: Rows, n: BatchNormState) -> Sequence[Array]:
        """Mean, factor and bias for each column of a row."""
        period, count = rows.period, rows.period // rows.channels
        columns = self._workspace.take("columns", 3 * period)
        spread_forward.run(1, count, 1, n.mean, n.inverse, n.scale, n.bias, rows.channels, period, columns)
        return columns, columns[period:], columns[2 * period :]

    def _run_each(self, kernel: Any, rows: Rows, *arrays: Any) -> None:
        kernel.run(self.threads, -(-rows.size // rows.period), rows.grain, *arrays, rows.period, rows.size)

    def batch_norm_backward_sums(
        self, x: Array, dys: Sequence[Array], n: BatchNormState, sums: Sequence[Array], relu: bool = False,
        mask: Array | None = None, total: Array | None = None,
    ) -> None:  # fmt: skip
        rows = rows_of(x)
        if rows is None or len(dys) > MAX_GRADIENTS:
            super().batch_norm_backward_sums(x, dys, n, sums, relu, mask, total)
            return
        assert total is not None or len(dys) == 1, "several gradients need an array for their sum"
        gate: Gate = "none" if not relu else "normal" if mask is None else "bits"
        if len(dys) == 1 and total is dys[0] and not relu:
            total = None
        totals = self._gradient_sums(rows, gate, x, mask, dys, total, self._columns(rows, n))
        channels = rows.channels
        join_gradients.run(
            self.threads, -(-channels // CHANNELS), rows.joining_grain, totals, rows.blocks, rows.period, channels,
            self._workspace.take("joined", 4 * channels), n.inverse, *sums,
        )  # fmt: skip

    def _gradient_sums(
        self, rows: Rows, gate: Gate, x: Array, mask: Array | None, dys: Sequence[Array], total: Array | None,
        per_column: Sequence[Any],
    ) -> Array:  # fmt: skip
        """Sums of blocks as float64 (blocks, 1 or 2, period), in memory for float32."""
        weighted = gate != "output"
        sources = [*dys, *[dys[0]] * (MAX_GRADIENTS - len(dys))]
        kernel = gradient_sums_kernel(len(dys), gate, total is not None, weighted)
        partial, totals = self._sum_arrays(rows, 1 + weighted)
        bits, out = (x if array is None else array for array in (mask, total))
        self._run_sums(kernel, rows, partial, totals, x, bits, *sources, out, *per_column)
        return totals

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_backward_data(x, dy, n, sums, dx, relu)
            return
        period, channels = rows.period, rows.channels
        columns = self._workspace.take("gradient columns", 2 * period)
        spread_backward.run(
            1, period // channels, 1, n.inverse, *sums, channels / rows.size, channels, period, columns
        )  # fmt: skip
        per_column = (*self._columns(rows, n), columns, columns[period:])
        self._run_each(gradient_kernel(relu), rows, x, dy, *per_column, dx)

    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        rows = rows_of(y)
        if rows is None or dbias is None:
            super().relu_backward(y, dy, dx, dbias, accumulate)
            return
        note_host_work()  # adds up what blocks have
        sums = self._gradient_sums(rows, "output", y, None, [dy], dx, (y, y, y))
        totals = sums[: 2 * rows.blocks * rows.period].view(np.float64)
        total = totals.reshape(-1, rows.channels).sum(axis=0)
        dbias[...] = dbias + total if accumulate else total
