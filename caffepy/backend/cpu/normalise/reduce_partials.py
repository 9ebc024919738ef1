"""What blocks of rows have added up, joined to statistics and gradients of channels, and channels laid out as rows.

NumPy would do this on one thread, in a dozen calls for each layer.
"""

from __future__ import annotations

from caffepy.backend.cpu.jit.kernel import Doubles, Float, Floats, Int, kernel

CHANNELS = 64
"""Channels that are joined together: a few lines of the caches."""


@kernel
def join_statistics(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, totals: Doubles, shift: Floats, blocks: Int, period: Int, size: Int, block: Int,
    channels: Int, centre: Doubles, mean: Floats, variance: Floats,
) -> None:  # fmt: skip
    """Mean and variance of each channel, from sums of x - shift and of its square. Items are `CHANNELS` channels.

    totals: (blocks, 2, period), shift (blocks, period). The last block has also what is left behind the last whole row.
    Squares are around each block's own mean, then around that of all (Chan et al., 1979).
    """
    rows, elements = size // period, size // channels
    for item in range(begin, end):
        first, stop = item * CHANNELS, min(channels, (item + 1) * CHANNELS)
        for c in range(first, stop):
            centre[c] = 0
            centre[channels + c] = 0
        for step in range(2):
            for b in range(blocks):
                inside = min(block, rows - b * block)
                left = size - rows * period if b == blocks - 1 else 0
                for at in range(0, period, channels):
                    whole, more = 2 * b * period + at, (2 * b + 1) * period + at
                    for c in range(first, stop):
                        count = inside + (1.0 if at + c < left else 0.0)
                        own = totals[whole + c] / max(count, 1.0)
                        around = shift[b * period + at + c] + own
                        if step == 0:
                            centre[c] += count * around
                        else:
                            away = around - centre[c]
                            centre[channels + c] += count * away * away + totals[more + c] - totals[whole + c] * own
            if step == 0:
                for c in range(first, stop):
                    centre[c] /= elements
        for c in range(first, stop):
            mean[c] = centre[c]
            variance[c] = centre[channels + c] / elements


@kernel
def join_gradients(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, totals: Doubles, blocks: Int, period: Int, channels: Int, joined: Doubles, inverse: Floats,
    of_scale: Floats, of_bias: Floats,
) -> None:  # fmt: skip
    """Sums of g * normal and of g for each channel. Items are `CHANNELS` channels.

    totals: sums of g and of g * (x - mean), (blocks, 2, period).
    """
    for item in range(begin, end):
        first, stop = item * CHANNELS, min(channels, (item + 1) * CHANNELS)
        for c in range(first, stop):
            joined[c] = 0
            joined[channels + c] = 0
        for b in range(blocks):
            for at in range(0, period, channels):
                whole, more = 2 * b * period + at, (2 * b + 1) * period + at
                for c in range(first, stop):
                    joined[c] += totals[whole + c]
                    joined[channels + c] += totals[more + c]
        for c in range(first, stop):
            of_scale[c] = joined[channels + c] * inverse[c]
            of_bias[c] = joined[c]


@kernel
def spread_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, mean: Floats, inverse: Floats, scale: Floats, bias: Floats, channels: Int, period: Int,
    columns: Floats,
) -> None:  # fmt: skip
    """Mean, factor and bias of each column of a row, (3, period). Items are repetitions of the channels."""
    for item in range(begin, end):
        at = item * channels
        for c in range(channels):
            columns[at + c] = mean[c]
            columns[period + at + c] = inverse[c] * scale[c]
            columns[2 * period + at + c] = bias[c]


@kernel
def spread_backward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, inverse: Floats, of_scale: Floats, of_bias: Floats, per_element: Float, channels: Int,
    period: Int, columns: Floats,
) -> None:  # fmt: skip
    """The means of g, and of g * normal / deviation, (2, period). Items are repetitions of the channels."""
    for item in range(begin, end):
        at = item * channels
        for c in range(channels):
            columns[at + c] = of_bias[c] * per_element
            columns[period + at + c] = of_scale[c] * inverse[c] * per_element
