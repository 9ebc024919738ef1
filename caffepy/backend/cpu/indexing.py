"""Indexed access on the CPU: row gather and scatter, sparse pixel maps, top-k, unpooling, regions of interest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, Words, device_function, kernel, note_host_work
from caffepy.backend.cpu.memory import CpuMemory, is_whole
from caffepy.backend.interface import IndexingPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, SparseMatrix, memory_order

GRAIN = 4096
"""Minimum elements for a second thread."""

BLOCK = 64
"""Columns per item of a scattered sum."""
CHANNELS = 16
"""Channels per item of unpooling."""


LEAST, MOST = np.float32(-1), np.float32(2**31)
"""Exclusive bounds of float32 values that, rounded towards 0, are valid non-negative 32-bit integers."""


def _rows(array: Any) -> Any:
    """Return an array as a (rows, elements of a row) view."""
    return memory_order(array).reshape(array.shape[0], math.prod(array.shape[1:]))


def _numbers(index: Any, limit: int, bad: Any | None) -> Any:
    """Return an index as integers, -1 if outside [0, limit); `bad` receives the position of an invalid one."""
    with np.errstate(invalid="ignore"):
        numbers = np.ascontiguousarray(index).reshape(-1).astype(np.int64)
    wrong = (numbers < 0) | (numbers >= limit)
    if wrong.any():
        numbers[wrong] = -1
        if bad is not None:
            bad[0] = np.flatnonzero(wrong)[0]
    return numbers


@kernel
def take_rows(
    begin: Int, end: Int, source: Floats, index: Floats, destination: Floats, bad: Ints, limit: Int, size: Int
) -> None:
    """Items are rows of the destination; rows with an invalid index become 0."""
    for item in range(begin, end):
        number = index[item]
        # Compared as floats, since converting NaN or a number beyond the integers is undefined. NaN fails both
        # comparisons.
        inside = number > LEAST and number < MOST
        row = int(number) if inside else limit
        if row < limit:
            for i in range(size):
                destination[item * size + i] = source[row * size + i]
        else:
            bad[0] = item
            for i in range(size):
                destination[item * size + i] = 0


@kernel
def scatter_add(
    begin: Int, end: Int, source: Floats, numbers: Words, destination: Floats, count: Int, size: Int, block: Int
) -> None:
    """Items are blocks of columns, so no two threads add to the same element."""
    for item in range(begin, end):
        for i in range(count):
            row = numbers[i]
            if row >= 0:
                for c in range(item * block, min(size, (item + 1) * block)):
                    destination[row * size + c] += source[i * size + c]


@kernel
def product(
    begin: Int,
    end: Int,
    begins: Ints,
    columns: Ints,
    weights: Floats,
    x: Floats,
    y: Floats,
    rows: Int,
    width: Int,
    inner: Int,
) -> None:
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


@kernel
def put_at_mask(
    begin: Int,
    end: Int,
    x: Floats,
    mask: Floats,
    y: Floats,
    bad: Ints,
    channels: Int,
    pixels: Int,
    out_pixels: Int,
    block: Int,
    blocks: Int,
) -> None:
    """Items are (sample, block of channels), so the last duplicate of a pixel wins."""
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
def take_at_mask(
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


ROI_GRAIN = 2048
"""Minimum elements for a second thread."""

ROI_BLOCK = 32
"""Channels per item of a sum over regions."""
HALF = np.float32(0.5)
ONE = np.float32(1)
LIMIT = np.float32(2**30)
"""Exclusive bound of the samples of regions."""
MIN_SIDE = np.float32(0.1)
"""Minimum height and width of an R-FCN region, in pixels."""


@device_function
def rounded(value: Any) -> Any:
    """C's roundf: round half away from 0."""
    return np.float32(math.floor(value + HALF)) if value >= 0 else np.float32(math.ceil(value - HALF))


@device_function
def max_bin(first: Any, last: Any, number: Any, bins: Any, size: Any) -> Any:
    """Return begin and end of bin `number` of `bins`, clipped to [0, size), of a region of the pixels [first, last]."""
    length = np.float32(max(last - first + 1, 1)) / np.float32(bins)
    begin = int(math.floor(np.float32(number) * length)) + first
    end = int(math.ceil(np.float32(number + 1) * length)) + first
    return min(max(begin, 0), size), min(max(end, 0), size)


@device_function
def mean_bin(first: Any, last: Any, number: Any, bins: Any, size: Any) -> Any:
    """As `max_bin` for a region [first, last) with fractional ends."""
    length = max(last - first, MIN_SIDE) / np.float32(bins)
    begin = int(math.floor(np.float32(number) * length + first))
    end = int(math.ceil(np.float32(number + 1) * length + first))
    return min(max(begin, 0), size), min(max(end, 0), size)


@kernel
def roi_max(
    begin: Int,
    end: Int,
    x: Floats,
    rois: Floats,
    y: Floats,
    mask: Ints,
    bad: Ints,
    scale: Float,
    samples: Int,
    channels: Int,
    height: Int,
    width: Int,
    rows: Int,
    columns: Int,
) -> None:
    """Items are bins (region, row, column); `bad` receives the number of a region with an invalid sample."""
    for item in range(begin, end):
        roi = item // (rows * columns)
        named = rois[roi * 5]
        known = named > np.float32(-1) and named < np.float32(samples)
        sample = int(named) if known else -1
        if not known:
            bad[0] = roi
        h0, h1 = max_bin(
            int(rounded(rois[roi * 5 + 2] * scale)),
            int(rounded(rois[roi * 5 + 4] * scale)),
            item // columns % rows,
            rows,
            height,
        )
        w0, w1 = max_bin(
            int(rounded(rois[roi * 5 + 1] * scale)),
            int(rounded(rois[roi * 5 + 3] * scale)),
            item % columns,
            columns,
            width,
        )
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
def roi_max_gradient(
    begin: Int,
    end: Int,
    dy: Floats,
    rois: Floats,
    mask: Ints,
    dx: Floats,
    blocks: Int,
    channels: Int,
    pixels: Int,
    regions: Int,
    bins: Int,
) -> None:
    """Items are (sample, block of channels), so no two threads add to the same element."""
    for item in range(begin, end):
        sample, first = item // blocks, item % blocks * ROI_BLOCK
        last = min(channels, first + ROI_BLOCK)
        base = sample * pixels * channels
        for p in range(pixels):
            for c in range(first, last):
                dx[base + p * channels + c] = 0
        for roi in range(regions):
            # Every item reads all regions and takes its own sample's. They are few, and their order fixes the order of
            # additions.
            if int(rois[roi * 5]) == sample:
                for number in range(roi * bins, (roi + 1) * bins):
                    for c in range(first, last):
                        where = mask[number * channels + c]
                        if where >= 0:
                            dx[base + where * channels + c] += dy[number * channels + c]


@kernel
def roi_average(
    begin: Int,
    end: Int,
    x: Floats,
    rois: Floats,
    y: Floats,
    scale: Float,
    samples: Int,
    channels: Int,
    height: Int,
    width: Int,
    outputs: Int,
    group: Int,
) -> None:
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
def roi_average_gradient(
    begin: Int,
    end: Int,
    dy: Floats,
    rois: Floats,
    dx: Floats,
    scale: Float,
    channels: Int,
    height: Int,
    width: Int,
    outputs: Int,
    group: Int,
    regions: Int,
) -> None:
    """Items are samples, so no two threads add to the same element."""
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


@device_function
def inside(at: Any, size: Any) -> Any:
    """Return a coordinate moved into [0, size - 1]; -1 if it is more than half a pixel outside."""
    if at >= -HALF and at <= np.float32(size) - HALF:
        return min(max(at, np.float32(0)), np.float32(size - 1))
    return np.float32(-1)


@kernel
def roi_bilinear(
    begin: Int,
    end: Int,
    x: Floats,
    named: Floats,
    rows: Floats,
    columns: Floats,
    y: Floats,
    bad: Ints,
    samples: Int,
    channels: Int,
    height: Int,
    width: Int,
    outputs: Int,
    high: Int,
    wide: Int,
    group: Int,
) -> None:
    """Items are points (region, row, column)."""
    for item in range(begin, end):
        region = item // (high * wide)
        row = item // wide % high
        column = item % wide
        sample = int(named[region]) if named[region] > LEAST and named[region] < samples else -1
        if sample < 0:
            bad[0] = region
        h = inside(rows[region * high + row], height)
        w = inside(columns[region * wide + column], width)
        if sample < 0 or h < 0 or w < 0:
            for d in range(outputs):
                y[item * outputs + d] = 0
        else:
            top = int(h)
            left = int(w)
            below = min(top + 1, height - 1)
            right = min(left + 1, width - 1)
            part = row * group // high * group + column * group // wide
            step = group * group
            first = ((sample * height + top) * width + left) * channels + part
            second = ((sample * height + top) * width + right) * channels + part
            third = ((sample * height + below) * width + left) * channels + part
            fourth = ((sample * height + below) * width + right) * channels + part
            a = h - np.float32(top)
            b = w - np.float32(left)
            for d in range(outputs):
                upper = (ONE - b) * x[first + d * step] + b * x[second + d * step]
                lower = (ONE - b) * x[third + d * step] + b * x[fourth + d * step]
                y[item * outputs + d] = (ONE - a) * upper + a * lower


@kernel
def roi_bilinear_gradient(
    begin: Int,
    end: Int,
    dy: Floats,
    named: Floats,
    rows: Floats,
    columns: Floats,
    dx: Floats,
    blocks: Int,
    channels: Int,
    height: Int,
    width: Int,
    outputs: Int,
    high: Int,
    wide: Int,
    regions: Int,
    group: Int,
) -> None:
    """Items are (sample, block of outputs), so no two threads add to the same element."""
    step = group * group
    for item in range(begin, end):
        sample, from_output = item // blocks, item % blocks * ROI_BLOCK
        to_output = min(outputs, from_output + ROI_BLOCK)
        base = sample * height * width * channels
        for p in range(height * width):
            for c in range(from_output * step, to_output * step):
                dx[base + p * channels + c] = 0
        for number in range(regions * high * wide):
            region = number // (high * wide)
            row = number // wide % high
            column = number % wide
            h = inside(rows[region * high + row], height)
            w = inside(columns[region * wide + column], width)
            belongs = named[region] > LEAST and named[region] < LIMIT and int(named[region]) == sample
            if belongs and h >= 0 and w >= 0:
                top = int(h)
                left = int(w)
                below = min(top + 1, height - 1)
                right = min(left + 1, width - 1)
                part = base + row * group // high * group + column * group // wide
                first = (top * width + left) * channels + part
                second = (top * width + right) * channels + part
                third = (below * width + left) * channels + part
                fourth = (below * width + right) * channels + part
                a = h - np.float32(top)
                b = w - np.float32(left)
                for d in range(from_output, to_output):
                    slope = dy[number * outputs + d]
                    dx[first + d * step] += (ONE - a) * (ONE - b) * slope
                    dx[second + d * step] += (ONE - a) * b * slope
                    dx[third + d * step] += a * (ONE - b) * slope
                    dx[fourth + d * step] += a * b * slope


def _note_bad(rois: Any, samples: int, bad: Any) -> None:
    """Write the number of a region with an invalid sample to `bad`."""
    named = np.ascontiguousarray(rois).reshape(-1, 5)[:, 0]
    wrong = np.flatnonzero(~((named > -1) & (named < samples)))
    if wrong.size:
        bad[0] = wrong[0]


def _grain(x: Any) -> int:
    return max(1, ROI_GRAIN // max(1, int(x.shape[1])))


class CpuIndexing(IndexingPrimitives, CpuMemory):
    """`IndexingPrimitives` of the CPU."""

    def gather_rows(self, source: Array, index: Array, destination: Array, bad: Array) -> None:
        if is_whole(source, "float32") and is_whole(index, "float32") and is_whole(destination, "float32"):
            size = math.prod(source.shape[1:])
            take_rows.run(
                self.threads,
                len(destination),
                max(1, 4 * GRAIN // max(size, 1)),
                source,
                index,
                destination,
                bad,
                source.shape[0],
                size,
            )
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

    def scatter_add_rows(self, source: Array, index: Array, destination: Array) -> None:
        size = math.prod(source.shape[1:])
        numbers = _numbers(index, destination.shape[0], None)
        grain = max(1, GRAIN // (BLOCK * max(len(numbers), 1)))
        scatter_add.run(self.threads, -(-size // BLOCK), grain, source, numbers, destination, len(numbers), size, BLOCK)

    def one_hot(self, labels: Array, out: Array, bad: Array) -> None:
        numbers = _numbers(labels, out.shape[1], bad)
        out[...] = 0
        found = np.flatnonzero(numbers >= 0)
        out[found, numbers[found]] = 1

    def spatial_product(self, matrix: SparseMatrix, x: Array, y: Array) -> None:
        rows, width = matrix.shape
        last = x.ndim in CHANNELS_LAST
        outer, inner = (x.shape[0], x.shape[1]) if last else (x.shape[0] * x.shape[1], 1)
        grain = max(1, GRAIN // max(inner, 1))
        product.run(
            self.threads, outer * rows, grain, matrix.begins, matrix.columns, matrix.weights, x, y, rows, width, inner
        )

    def largest(self, x: Array, axis: int, indices: Array, values: Array) -> None:
        wanted = indices.shape[axis]
        # Reversing a stable rising order puts the larger index first among equals, as Caffe does.
        falling = np.flip(np.argsort(x, axis=axis, kind="stable"), axis=axis)
        first = np.take(falling, np.arange(wanted), axis=axis)
        indices[...] = first
        values[...] = np.take_along_axis(x, first, axis=axis)

    def unpool_forward(self, x: Array, mask: Array, y: Array, bad: Array) -> None:
        samples, channels = x.shape[:2]
        pixels, blocks = math.prod(x.shape[2:]), -(-channels // CHANNELS)
        clear.run(self.threads, y.size, 4 * GRAIN, y)
        put_at_mask.run(
            self.threads,
            samples * blocks,
            max(1, GRAIN // max(1, pixels * CHANNELS)),
            x,
            mask,
            y,
            bad,
            channels,
            pixels,
            math.prod(y.shape[2:]),
            CHANNELS,
            blocks,
        )

    def unpool_backward(self, dy: Array, mask: Array, dx: Array) -> None:
        samples, channels = dx.shape[:2]
        pixels = math.prod(dx.shape[2:])
        take_at_mask.run(
            self.threads,
            samples * pixels,
            max(1, GRAIN // max(1, channels)),
            dy,
            mask,
            dx,
            channels,
            pixels,
            math.prod(dy.shape[2:]),
        )

    def roi_max_forward(self, x: Array, rois: Array, y: Array, mask: Array, scale: float, bad: Array) -> None:
        regions, _, rows, columns = y.shape
        shapes = (*x.shape, rows, columns)
        roi_max.run(self.threads, regions * rows * columns, _grain(x), x, rois, y, mask, bad, scale, *shapes)

    def roi_max_backward(self, dy: Array, rois: Array, mask: Array, dx: Array, scale: float) -> None:
        samples, channels, height, width = dx.shape
        bins = dy.shape[2] * dy.shape[3]
        blocks = -(-channels // ROI_BLOCK)
        shapes = (blocks, channels, height * width, dy.shape[0], bins)
        roi_max_gradient.run(self.threads, samples * blocks, 1, dy, rois, mask, dx, *shapes)

    def roi_average_forward(self, x: Array, rois: Array, y: Array, scale: float, bad: Array) -> None:
        _note_bad(rois, x.shape[0], bad)
        regions, outputs, group, _ = y.shape
        roi_average.run(self.threads, regions * group * group, _grain(x), x, rois, y, scale, *x.shape, outputs, group)

    def roi_average_backward(self, dy: Array, rois: Array, dx: Array, scale: float) -> None:
        regions, outputs, group, _ = dy.shape
        roi_average_gradient.run(
            self.threads, dx.shape[0], 1, dy, rois, dx, scale, *dx.shape[1:], outputs, group, regions
        )

    def roi_bilinear_forward(
        self, x: Array, samples: Array, rows: Array, columns: Array, y: Array, group: int, bad: Array
    ) -> None:
        regions, outputs, high, wide = y.shape
        roi_bilinear.run(
            self.threads,
            regions * high * wide,
            _grain(y),
            x,
            samples,
            rows,
            columns,
            y,
            bad,
            *x.shape,
            outputs,
            high,
            wide,
            group,
        )

    def roi_bilinear_backward(
        self, dy: Array, samples: Array, rows: Array, columns: Array, dx: Array, group: int
    ) -> None:
        regions, outputs, high, wide = dy.shape
        blocks = -(-outputs // ROI_BLOCK)
        roi_bilinear_gradient.run(
            self.threads,
            dx.shape[0] * blocks,
            1,
            dy,
            samples,
            rows,
            columns,
            dx,
            blocks,
            *dx.shape[1:],
            outputs,
            high,
            wide,
            regions,
            group,
        )
