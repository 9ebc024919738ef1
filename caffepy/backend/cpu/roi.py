"""Pooling of regions of interest and stochastic pooling on the CPU, over channels-last arrays."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, device_function, kernel
from caffepy.backend.types import Geometry

GRAIN = 2048
"""Elements below which a second thread costs more than it saves."""

BLOCK = 32
"""Channels that one item of a sum over regions takes."""
HALF = np.float32(0.5)
ONE = np.float32(1)
MIN_SIDE = np.float32(0.1)
"""The least height and width of a region of R-FCN, in pixels."""


@device_function
def rounded(value: Any) -> Any:
    """C's roundf: halves away from 0."""
    return np.float32(math.floor(value + HALF)) if value >= 0 else np.float32(math.ceil(value - HALF))


@device_function
def max_bin(first: Any, last: Any, number: Any, bins: Any, size: Any) -> Any:
    """Where bin `number` of `bins` begins and ends within [0, size), of a region of the pixels [first, last]."""
    length = np.float32(max(last - first + 1, 1)) / np.float32(bins)
    begin = int(math.floor(np.float32(number) * length)) + first
    end = int(math.ceil(np.float32(number + 1) * length)) + first
    return min(max(begin, 0), size), min(max(end, 0), size)


@device_function
def mean_bin(first: Any, last: Any, number: Any, bins: Any, size: Any) -> Any:
    """The same of a region [first, last) that need not begin at a whole pixel."""
    length = max(last - first, MIN_SIDE) / np.float32(bins)
    begin = int(math.floor(np.float32(number) * length + first))
    end = int(math.ceil(np.float32(number + 1) * length + first))
    return min(max(begin, 0), size), min(max(end, 0), size)


@kernel
def max_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, rois: Floats, y: Floats, mask: Ints, bad: Ints, scale: Float,
    samples: Int, channels: Int, height: Int, width: Int, rows: Int, columns: Int,
) -> None:  # fmt: skip
    """Items are bins (region, row, column); `bad` gets the number of a region whose sample does not exist."""
    for item in range(begin, end):
        roi = item // (rows * columns)
        named = rois[roi * 5]
        known = named > np.float32(-1) and named < np.float32(samples)
        sample = int(named) if known else -1
        if not known:
            bad[0] = roi
        h0, h1 = max_bin(
            int(rounded(rois[roi * 5 + 2] * scale)), int(rounded(rois[roi * 5 + 4] * scale)),
            item // columns % rows, rows, height,
        )  # fmt: skip
        w0, w1 = max_bin(
            int(rounded(rois[roi * 5 + 1] * scale)), int(rounded(rois[roi * 5 + 3] * scale)),
            item % columns, columns, width,
        )  # fmt: skip
        empty = h1 <= h0 or w1 <= w0 or not known
        to, first = item * channels, h0 * width + w0
        origin = sample * height * width * channels
        for c in range(channels):
            y[to + c] = np.float32(0) if empty else x[origin + first * channels + c]
            mask[to + c] = np.int32(-1 if empty else first)
        for h in range(h0, h0 if empty else h1):
            for pixel in range(h * width + w0, h * width + w1):
                for c in range(channels):
                    value = x[origin + pixel * channels + c]
                    best = y[to + c]
                    where = mask[to + c]
                    y[to + c] = value if value > best else best
                    mask[to + c] = np.int32(pixel) if value > best else where


@kernel
def max_backward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, dy: Floats, rois: Floats, mask: Ints, dx: Floats,
    blocks: Int, channels: Int, pixels: Int, regions: Int, bins: Int,
) -> None:  # fmt: skip
    """Items are (sample, block of channels), so that no two threads add to one element."""
    for item in range(begin, end):
        sample, first = item // blocks, item % blocks * BLOCK
        last = min(channels, first + BLOCK)
        base = sample * pixels * channels
        for p in range(pixels):
            for c in range(first, last):
                dx[base + p * channels + c] = 0
        for roi in range(regions):
            if int(rois[roi * 5]) == sample:
                for number in range(roi * bins, (roi + 1) * bins):
                    for c in range(first, last):
                        where = mask[number * channels + c]
                        if where >= 0:
                            dx[base + where * channels + c] += dy[number * channels + c]


@kernel
def average_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, rois: Floats, y: Floats, scale: Float,
    samples: Int, channels: Int, height: Int, width: Int, outputs: Int, group: Int,
) -> None:  # fmt: skip
    """Items are bins (region, row, column)."""
    for item in range(begin, end):
        roi = item // (group * group)
        row = item // group % group
        column = item % group
        sample = int(rois[roi * 5])
        h0, h1 = mean_bin(
            rounded(rois[roi * 5 + 2]) * scale, (rounded(rois[roi * 5 + 4]) + ONE) * scale, row, group, height
        )
        w0, w1 = mean_bin(
            rounded(rois[roi * 5 + 1]) * scale, (rounded(rois[roi * 5 + 3]) + ONE) * scale, column, group, width
        )
        empty = h1 <= h0 or w1 <= w0 or sample < 0 or sample >= samples
        for d in range(outputs):
            total = 0.0
            if not empty:
                c = (d * group + row) * group + column
                for h in range(h0, h1):
                    for w in range(w0, w1):
                        total += x[((sample * height + h) * width + w) * channels + c]
                total /= (h1 - h0) * (w1 - w0)
            y[item * outputs + d] = total


@kernel
def average_backward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, dy: Floats, rois: Floats, dx: Floats, scale: Float,
    channels: Int, height: Int, width: Int, outputs: Int, group: Int, regions: Int,
) -> None:  # fmt: skip
    """Items are samples, so that no two threads add to one element."""
    for item in range(begin, end):
        for i in range(height * width * channels):
            dx[item * height * width * channels + i] = 0
        for number in range(regions * group * group):
            roi = number // (group * group)
            row = number // group % group
            column = number % group
            if int(rois[roi * 5]) == item:
                h0, h1 = mean_bin(
                    rounded(rois[roi * 5 + 2]) * scale, (rounded(rois[roi * 5 + 4]) + ONE) * scale, row, group, height
                )
                w0, w1 = mean_bin(
                    rounded(rois[roi * 5 + 1]) * scale, (rounded(rois[roi * 5 + 3]) + ONE) * scale, column, group, width
                )
                for h in range(h0, h1):
                    for w in range(w0, w1):
                        for d in range(outputs):
                            c = (d * group + row) * group + column
                            at = ((item * height + h) * width + w) * channels + c
                            dx[at] += dy[number * outputs + d] / np.float32((h1 - h0) * (w1 - w0))


@kernel
def stochastic_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, chance: Floats, y: Floats, mask: Ints,
    channels: Int, height: Int, width: Int, out_height: Int, out_width: Int,
    kernel_h: Int, kernel_w: Int, stride_h: Int, stride_w: Int,
) -> None:  # fmt: skip
    """Items are windows (n, row, column)."""
    for item in range(begin, end):
        h0 = (item // out_width % out_height) * stride_h
        w0 = (item % out_width) * stride_w
        h1 = min(h0 + kernel_h, height)
        w1 = min(w0 + kernel_w, width)
        base = item // (out_width * out_height) * height
        for c in range(channels):
            total = np.float32(0.0)
            for h in range(h0, h1):
                for w in range(w0, w1):
                    total += x[((base + h) * width + w) * channels + c]
            limit = chance[item * channels + c] * total
            running = np.float32(0.0)
            where = -1
            for h in range(h0, h1):
                for w in range(w0, w1):
                    running += x[((base + h) * width + w) * channels + c]
                    if where < 0 and running >= limit:
                        where = h * width + w
            if where < 0:
                where = (h1 - 1) * width + w1 - 1
            y[item * channels + c] = x[(base * width + where) * channels + c]
            mask[item * channels + c] = where


def _note_bad(rois: Any, samples: int, bad: Any) -> None:
    """`bad` gets the number of a region whose sample does not exist."""
    named = np.ascontiguousarray(rois).reshape(-1, 5)[:, 0]
    wrong = np.flatnonzero(~((named > -1) & (named < samples)))
    if wrong.size:
        bad[0] = wrong[0]


def _grain(x: Any) -> int:
    return max(1, GRAIN // max(1, int(x.shape[1])))


def roi_max_forward(threads: int, x: Any, rois: Any, y: Any, mask: Any, scale: float, bad: Any) -> None:
    """See `IndexingPrimitives.roi_max_forward`."""
    regions, _, rows, columns = y.shape
    shapes = (*x.shape, rows, columns)
    max_forward.run(threads, regions * rows * columns, _grain(x), x, rois, y, mask, bad, scale, *shapes)


def roi_max_backward(threads: int, dy: Any, rois: Any, mask: Any, dx: Any) -> None:
    """See `IndexingPrimitives.roi_max_backward`."""
    samples, channels, height, width = dx.shape
    bins = dy.shape[2] * dy.shape[3]
    blocks = -(-channels // BLOCK)
    shapes = (blocks, channels, height * width, dy.shape[0], bins)
    max_backward.run(threads, samples * blocks, 1, dy, rois, mask, dx, *shapes)


def roi_average_forward(threads: int, x: Any, rois: Any, y: Any, scale: float, bad: Any) -> None:
    """See `IndexingPrimitives.roi_average_forward`."""
    _note_bad(rois, x.shape[0], bad)
    regions, outputs, group, _ = y.shape
    average_forward.run(threads, regions * group * group, _grain(x), x, rois, y, scale, *x.shape, outputs, group)


def roi_average_backward(threads: int, dy: Any, rois: Any, dx: Any, scale: float) -> None:
    """See `IndexingPrimitives.roi_average_backward`."""
    regions, outputs, group, _ = dy.shape
    average_backward.run(threads, dx.shape[0], 1, dy, rois, dx, scale, *dx.shape[1:], outputs, group, regions)


def pool_stochastic_forward(threads: int, x: Any, chance: Any, y: Any, mask: Any, geometry: Geometry) -> None:
    """See `IndexingPrimitives.pool_stochastic_forward`."""
    items = y.shape[0] * y.shape[2] * y.shape[3]
    shapes = (*x.shape[1:], *y.shape[2:], *geometry.kernel, *geometry.stride)
    stochastic_forward.run(threads, items, _grain(x), x, chance, y, mask, *shapes)
