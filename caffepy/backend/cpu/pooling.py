"""Maximum, average and stochastic pooling on the CPU, over channels-last images.

The innermost loops keep the maximum or sum of a window for several channel vectors in registers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir

from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Ints, Kernel, Words, device_function, kernel
from caffepy.backend.cpu.jit.vector import INDICES, VECTOR, WIDTH, Writer, ahead, ahead_int, emitted
from caffepy.backend.cpu.memory import CpuMemory, Workspace
from caffepy.backend.interface import PoolingPrimitives
from caffepy.backend.types import Array, Geometry

GRAIN = 8192
"""Minimum elements for a second thread."""
STOCHASTIC_GRAIN = 2048
"""Minimum elements for a second thread in stochastic pooling."""
MIN_STRIPED_CHANNELS = 512
"""Minimum channels for processing windows in column strips: a window's pixels are then far apart, and the hardware
prefetcher needs sequential reads."""
COLUMNS = 8
"""Columns per strip."""


class WindowWriter(Writer):
    """Emits the work of a window for several channel vectors at once.

    Args:
        builder: the function's IR builder.
        vectors: 4, 2 or 1.
        resumes: whether to start from the previous result.
        left: channels from the first vector to the last channel: at least four vectors' for four, and one vector's for
            two, where the second overlaps the first.
    """

    def __init__(self, builder: Any, vectors: int, resumes: bool, left: Any) -> None:
        super().__init__(builder)
        self._resumes, self._left, self._mask = resumes, left, self.lanes(left) if vectors == 1 else None
        self._offsets = [self.word(v * WIDTH) for v in range(vectors)]
        if vectors == 2:
            # The second vector steps back to end at the last channel. The two then share channels and write equal
            # values to them, so this case needs no masks.
            last = builder.sub(left, self._offsets[1])
            self._offsets[1] = builder.select(builder.icmp_signed("<", last, self._offsets[1]), last, self._offsets[1])

    def write_maximum(self, arguments: Sequence[Any]) -> None:
        """See `window_maximum`."""
        x, rows, row, columns, column, index, width, y, mask = arguments
        builder, numbers = self.builder, ir.FloatType().as_pointer()
        x, y, mask = (self._starts(start) for start in (x, y, self.builder.bitcast(mask, numbers)))

        def over_rows(h: Any, _: Any, best: list[Any]) -> list[Any]:
            def over_columns(w: Any, _: Any, inner: list[Any]) -> list[Any]:
                found = self._values(x, builder.add(builder.mul(h, row), builder.mul(w, column)))
                at = builder.add(index, builder.add(builder.mul(h, width), w))
                pairs = [self._better(inner[2 * v : 2 * v + 2], value, at) for v, value in enumerate(found)]
                return [number for pair in pairs for number in pair]

            return self.loop(columns, best, [], over_columns)

        # An index travels as the bits of a float: the pair's loads and stores are then of one vector type.
        def kept() -> list[Any]:
            where = [builder.bitcast(value, INDICES) for value in self._values(mask, self.word(0))]
            return [n for pair in zip(self._values(y, self.word(0)), where, strict=True) for n in pair]

        # Starting from the window's first element rather than from -inf gives a window of -inf the index of an element.
        def first() -> list[Any]:
            where = self.splat(builder.trunc(index, ir.IntType(32)))
            return [number for value in self._values(x, self.word(0)) for number in (value, where)]

        best = self.loop(rows, kept() if self._resumes else first(), [], over_rows)
        self._write(y, best[::2])
        self._write(mask, [builder.bitcast(where, VECTOR) for where in best[1::2]])

    def write_sums(self, arguments: Sequence[Any]) -> None:
        """See `window_sums`."""
        x, rows, row, columns, column, high, wide, step, y = arguments
        builder, zeros = self.builder, [ir.Constant(VECTOR, [0.0] * WIDTH)] * len(self._offsets)
        x, y = self._starts(x), self._starts(y)

        def share(table: Any, index: Any) -> Any:
            return self.splat(builder.load(builder.gep(table, [builder.mul(index, step)]), align=4))

        def scaled_sum(totals: list[Any], values: list[Any], factor: Any) -> list[Any]:
            return [self.multiply_add(value, factor, total) for value, total in zip(values, totals, strict=True)]

        def over_rows(h: Any, _: Any, totals: list[Any]) -> list[Any]:
            def over_columns(w: Any, _: Any, sums: list[Any]) -> list[Any]:
                values = self._values(x, builder.add(builder.mul(h, row), builder.mul(w, column)))
                return scaled_sum(sums, values, share(wide, w))

            return scaled_sum(totals, self.loop(columns, zeros, [], over_columns), share(high, h))

        start = self._values(y, self.word(0)) if self._resumes else zeros
        self._write(y, self.loop(rows, start, [], over_rows))

    def _starts(self, pointer: Any) -> list[Any]:
        """Return the vectors' offsets within a pixel."""
        return [self.builder.gep(pointer, [offset]) for offset in self._offsets]

    def _values(self, starts: list[Any], offset: Any) -> list[Any]:
        addresses = [self.vector_at(start, offset) for start in starts]
        if self._mask is None:
            return [self.builder.load(address, align=4) for address in addresses]
        return [self.masked_load(address, self._mask) for address in addresses]

    def _write(self, starts: list[Any], values: list[Any]) -> None:
        for start, value in zip(starts, values, strict=True):
            address = self.vector_at(start, self.word(0))
            if self._mask is None:
                self.builder.store(value, address, align=4)
            else:
                self.store(value, address, self._left, self._mask)

    def _better(self, best: list[Any], value: Any, at: Any) -> list[Any]:
        """Return the larger of `best` and `value` at index `at`, with its index; the first maximum or NaN wins."""
        where = self.splat(self.builder.trunc(at, ir.IntType(32)))
        # The unordered comparison is also true for a NaN: a NaN replaces a number, and `number` then keeps the first
        # NaN.
        number = self.builder.fcmp_ordered("==", best[0], best[0])
        larger = self.builder.and_(self.builder.fcmp_unordered(">", value, best[0]), number)
        return [self.builder.select(larger, value, best[0]), self.builder.select(larger, where, best[1])]


def _window(write: Callable[[WindowWriter, Sequence[Any]], None], more: str, vectors: int, resumes: bool) -> Any:
    """Return an intrinsic for a window of x: `rows` x `columns` elements at distances `row` and `column`."""

    def emit(builder: Any, *arguments: Any) -> None:
        write(WindowWriter(builder, vectors, resumes, arguments[-1]), arguments[:-1])

    return emitted(f"pwwww{more}w", emit)


def _window_maximum(vectors: int, resumes: bool = False) -> Any:
    return _window(WindowWriter.write_maximum, "wwpi", vectors, resumes)


def _window_sums(vectors: int, resumes: bool = False) -> Any:
    return _window(WindowWriter.write_sums, "ppwp", vectors, resumes)


window_maximum, window_maximum2, window_maximum4 = (_window_maximum(vectors) for vectors in (1, 2, 4))
"""Maxima of a window and their indices `index + h * width + w`. Arguments: index, width, y, mask."""
window_sums, window_sums2, window_sums4 = (_window_sums(vectors) for vectors in (1, 2, 4))
"""Sums of a window, each element times high[h * step] and wide[w * step]. Arguments: high, wide, step, y."""
more_maximum, more_maximum4 = (_window_maximum(vectors, resumes=True) for vectors in (1, 4))
more_sums, more_sums4 = (_window_sums(vectors, resumes=True) for vectors in (1, 4))
"""The same, starting from the contents of y and mask."""


@device_function
def window_bounds(number: Any, stride: Any, pad: Any, kernel: Any, size: Any) -> Any:
    """Return begin and end of a window along an axis, clipped to the image."""
    first = number * stride - pad
    end = min(first + kernel, size)
    return max(first, 0), end


def rows_and_grain(shape: tuple[int, ...]) -> tuple[int, int]:
    """Return items and grain of a kernel whose items are the rows of (N, C, H, W)."""
    samples, channels, height, width = shape
    return samples * height, max(1, GRAIN // max(1, channels * width))


@kernel
def max_forward(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    mask: Ints,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    kernel_h: Int,
    kernel_w: Int,
    stride_h: Int,
    stride_w: Int,
    pad_h: Int,
    pad_w: Int,
    vector: Int,
) -> None:
    """Items are the rows (n, oh) of the output."""
    size = width * channels
    for item in range(begin, end):
        n = item // out_height
        h0, h1 = window_bounds(item % out_height, stride_h, pad_h, kernel_h, height)
        for ow in range(out_width):
            w0, w1 = window_bounds(ow, stride_w, pad_w, kernel_w, width)
            out = (item * out_width + ow) * channels
            index = h0 * width + w0
            source = (n * height * width + index) * channels
            window = h1 - h0, size, w1 - w0, channels, index, width
            c = 0
            while c < channels:
                left = channels - c
                if left >= 4 * vector:
                    window_maximum4(ahead(x, source + c), *window, ahead(y, out + c), ahead_int(mask, out + c), left)
                    c += 4 * vector
                elif left > vector:
                    window_maximum2(ahead(x, source + c), *window, ahead(y, out + c), ahead_int(mask, out + c), left)
                    c += 2 * vector
                else:
                    # Like the second vector of a pair, the last vector steps back to whole lanes; a mask remains for
                    # images with fewer channels than lanes.
                    at = min(c, max(0, channels - vector))
                    window_maximum(
                        ahead(x, source + at), *window, ahead(y, out + at), ahead_int(mask, out + at), channels - at
                    )
                    c += vector


@kernel
def max_of_parts(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    mask: Ints,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    kernel_h: Int,
    kernel_w: Int,
    stride_h: Int,
    stride_w: Int,
    pad_h: Int,
    pad_w: Int,
    part: Int,
    vector: Int,
) -> None:
    """As `max_forward` for many channels, in strips of `part` columns of a row of windows."""
    many = channels // (4 * vector) * 4 * vector
    for item in range(begin, end):
        n = item // out_height
        h0, h1 = window_bounds(item % out_height, stride_h, pad_h, kernel_h, height)
        for ow in range(out_width):
            w0, w1 = window_bounds(ow, stride_w, pad_w, kernel_w, width)
            out, index = (item * out_width + ow) * channels, h0 * width + w0
            for c in range(channels):
                y[out + c], mask[out + c] = x[(n * height * width + index) * channels + c], index
            for h in range(h0, h1):
                for w in range(w0, w1, part):
                    index = h * width + w
                    window = 1, 0, min(part, w1 - w), channels, index, width
                    source = (n * height * width + index) * channels
                    for c in range(0, many, 4 * vector):
                        more_maximum4(
                            ahead(x, source + c), *window, ahead(y, out + c), ahead_int(mask, out + c), channels - c
                        )
                    for c in range(many, channels, vector):
                        more_maximum(
                            ahead(x, source + c), *window, ahead(y, out + c), ahead_int(mask, out + c), channels - c
                        )


@kernel
def max_backward(
    begin: Int,
    end: Int,
    dy: Floats,
    mask: Ints,
    dx: Floats,
    channels: Int,
    block: Int,
    blocks: Int,
    pixels: Int,
    out_pixels: Int,
) -> None:
    """Items are (n, block of channels), so no two threads add to the same element."""
    for item in range(begin, end):
        n = item // blocks
        c0 = (item % blocks) * block
        c1 = min(c0 + block, channels)
        # All channels of a sample are contiguous: one loop over its memory instead of a short loop per pixel.
        if c1 - c0 == channels:
            for i in range(n * pixels * channels, (n + 1) * pixels * channels):
                dx[i] = 0
        else:
            for p in range(pixels):
                for c in range(c0, c1):
                    dx[(n * pixels + p) * channels + c] = 0
        if channels == 1:  # a loop over one channel has too much overhead
            for q in range(n * out_pixels, (n + 1) * out_pixels):
                dx[n * pixels + mask[q]] += dy[q]
        else:
            for q in range(out_pixels):
                source = (n * out_pixels + q) * channels
                for c in range(c0, c1):
                    dx[(n * pixels + mask[source + c]) * channels + c] += dy[source + c]


MAX_DIRECT_WINDOW = 9
"""Maximum window elements for recomputing each window's sum."""
FEW_CHANNELS = 4
"""Maximum channels that leave most lanes idle; the lanes then hold the elements of a row."""


@device_function
def _add_pixels(source: Any, at: Any, step: Any, count: Any, channels: Any, target: Any, to: Any) -> None:
    """target[to + c] = the sum over `count` pixels, `step` elements apart, of source[at + c]."""
    for c in range(channels):
        target[to + c] = 0
    for i in range(count):
        for c in range(channels):
            target[to + c] += source[at + i * step + c]


@device_function
def _add_row(source: Any, at: Any, count: Any, channels: Any, target: Any, to: Any) -> None:
    """target[to + c] += the sum over `count` contiguous pixels of source[at + c]."""
    # Four pixels for each load and store of the target.
    four = count // 4 * 4
    for i in range(0, four, 4):
        a = at + i * channels
        b, c, d = a + channels, a + 2 * channels, a + 3 * channels
        for j in range(channels):
            target[to + j] += (source[a + j] + source[b + j]) + (source[c + j] + source[d + j])
    for i in range(four, count):
        for j in range(channels):
            target[to + j] += source[at + i * channels + j]


@device_function
def _add_to_pixels(source: Any, at: Any, channels: Any, target: Any, to: Any, count: Any) -> None:
    """target[to + c] += source[at + c] for `count` contiguous pixels."""
    for i in range(count):
        for c in range(channels):
            target[to + i * channels + c] += source[at + c]


@kernel
def average_forward(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    lines: Floats,
    rows: Int,
    items: Int,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    kernel_h: Int,
    kernel_w: Int,
    stride_h: Int,
    stride_w: Int,
    pad_h: Int,
    pad_w: Int,
) -> None:
    """Items are parts of the output's rows (n, oh). Sums a window's rows first, then its columns."""
    size = width * channels
    for item in range(begin, end):
        line = ahead(lines, item * size)
        for row in range(item * rows // items, (item + 1) * rows // items):
            n = row // out_height
            h0 = (row % out_height) * stride_h - pad_h
            h1 = min(h0 + kernel_h, height + pad_h)
            # As in Caffe, the divisor counts the padding of the window, up to the far edge of the padding. The window
            # is clipped to the image after its area is known.
            high = h1 - h0
            h0, h1 = max(h0, 0), min(h1, height)
            source = (n * height + h0) * size
            # If no column is read twice, a line buffer does not pay.
            apart = stride_w >= kernel_w or out_width == 1
            # Windows of one row of the output share their rows of x, and neighbours share columns: with the rows summed
            # once, a window adds kernel_w sums instead of kernel_h * kernel_w elements.
            for h in range(0 if apart else h1 - h0):
                for i in range(size):
                    line[i] = x[source + h * size + i] + (line[i] if h > 0 else 0)
            for ow in range(out_width):
                w0 = ow * stride_w - pad_w
                w1 = min(w0 + kernel_w, width + pad_w)
                area = high * (w1 - w0)
                w0, w1 = max(w0, 0), min(w1, width)
                out = (row * out_width + ow) * channels
                if apart:
                    for c in range(channels):
                        y[out + c] = 0
                    for h in range(h1 - h0):
                        _add_row(x, source + h * size + w0 * channels, w1 - w0, channels, y, out)
                else:
                    _add_pixels(line, w0 * channels, channels, w1 - w0, channels, y, out)
                for c in range(channels):
                    y[out + c] /= area


@kernel
def average_backward(
    begin: Int,
    end: Int,
    dy: Floats,
    dx: Floats,
    lines: Floats,
    rows: Int,
    items: Int,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    kernel_h: Int,
    kernel_w: Int,
    stride_h: Int,
    stride_w: Int,
    pad_h: Int,
    pad_w: Int,
) -> None:
    """Items are parts of the image's rows (n, h). Sums the covering windows' rows first."""
    size = out_width * channels
    for item in range(begin, end):
        line = ahead(lines, item * size)
        for row in range(item * rows // items, (item + 1) * rows // items):
            n = row // height
            h = row % height + pad_h
            for i in range(size):
                line[i] = 0
            for oh in range(max(0, (h - kernel_h) // stride_h + 1), min(out_height, h // stride_h + 1)):
                high = min(oh * stride_h + kernel_h, height + 2 * pad_h) - oh * stride_h
                source = (n * out_height + oh) * size
                for ow in range(out_width):
                    area = high * (min(ow * stride_w + kernel_w, width + 2 * pad_w) - ow * stride_w)
                    at = ow * channels
                    for c in range(channels):
                        line[at + c] += dy[source + at + c] / area
            target = row * width * channels
            for i in range(target, target + width * channels):
                dx[i] = 0
            for ow in range(out_width):
                w0 = ow * stride_w - pad_w
                w1 = min(w0 + kernel_w, width)
                _add_to_pixels(line, ow * channels, channels, dx, target + max(w0, 0) * channels, w1 - max(w0, 0))


@device_function
def _clear(target: Any, count: Any) -> None:
    for i in range(count):
        target[i] = 0


@device_function
def _multiply(target: Any, at: Any, factors: Any, count: Any) -> None:
    for i in range(count):
        target[at + i] *= factors[i]


@device_function
def _sum_elements(line: Any, starts: Any, counts: Any, step: Any, target: Any, at: Any, count: Any) -> None:
    """target[at + i] = the sum of counts[i] elements of a line, `step` apart, starting at starts[i]."""
    for i in range(count):
        total = np.float32(0)
        for k in range(starts[i], starts[i] + counts[i] * step, step):
            total += line[k]
        target[at + i] = total


@device_function
def _copy(source: Any, at: Any, count: Any, target: Any, to: Any) -> None:
    for i in range(count):
        target[to + i] = source[at + i]


@device_function
def _repeats(rows: Any, row: Any) -> Any:
    """Return whether a row reads the same rows as the row before it."""
    return row > 0 and rows[2 * row] == rows[2 * row - 2] and rows[2 * row + 1] == rows[2 * row - 1]


@kernel
def average_windows(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    rows: Words,
    columns: Words,
    high: Floats,
    wide: Floats,
    step: Int,
    vector: Int,
) -> None:
    """Sums of small windows, in registers. Items are the rows (n, oh) of y.

    `rows` and `columns` give for each row and column of y the first row or column of x and their number. `high` and
    `wide` are the factors: one per element of y with `step` 0, of x with 1.
    """
    size, out_size = width * channels, out_width * channels
    for item in range(begin, end):
        oh = item % out_height
        # In a gradient, rows that the same windows cover are equal: the sums are made once and copied. The first row of
        # an item is never a copy, since another thread may not have written the row before it.
        if step == 1 and item > begin and _repeats(rows, oh):
            _copy(y, (item - 1) * out_size, out_size, y, item * out_size)
            continue
        h, met = rows[2 * oh], rows[2 * oh + 1]
        line = (item // out_height * height + h) * size
        a = ahead(high, oh if step == 0 else h)
        for ow in range(out_width):
            w, count = columns[2 * ow], columns[2 * ow + 1]
            b = ahead(wide, ow if step == 0 else w)
            source, out = line + w * channels, item * out_size + ow * channels
            c = 0
            while c < channels:
                left = channels - c
                if left >= 4 * vector:
                    window_sums4(ahead(x, source + c), met, size, count, channels, a, b, step, ahead(y, out + c), left)
                    c += 4 * vector
                elif left > vector:
                    window_sums2(ahead(x, source + c), met, size, count, channels, a, b, step, ahead(y, out + c), left)
                    c += 2 * vector
                else:
                    at = min(c, max(0, channels - vector))
                    window_sums(
                        ahead(x, source + at),
                        met,
                        size,
                        count,
                        channels,
                        a,
                        b,
                        step,
                        ahead(y, out + at),
                        channels - at,
                    )
                    c += vector


@kernel
def average_of_parts(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    rows: Words,
    columns: Words,
    high: Floats,
    wide: Floats,
    part: Int,
    vector: Int,
) -> None:
    """As `average_windows` with step 0 for many channels, in strips of `part` columns of a row."""
    size = width * channels
    many = channels // (4 * vector) * 4 * vector
    for item in range(begin, end):
        oh = item % out_height
        a, first = ahead(high, oh), item // out_height * height + rows[2 * oh]
        for ow in range(out_width):
            w0, met = columns[2 * ow], columns[2 * ow + 1]
            out, b = (item * out_width + ow) * channels, ahead(wide, ow)
            _clear(ahead(y, out), channels)
            for row in range(first, first + rows[2 * oh + 1]):
                for w in range(0, met, part):
                    source, count = row * size + (w0 + w) * channels, min(part, met - w)
                    for c in range(0, many, 4 * vector):
                        more_sums4(
                            ahead(x, source + c), 1, 0, count, channels, a, b, 0, ahead(y, out + c), channels - c
                        )
                    for c in range(many, channels, vector):
                        more_sums(ahead(x, source + c), 1, 0, count, channels, a, b, 0, ahead(y, out + c), channels - c)


@kernel
def average_few(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    lines: Floats,
    rows_of_y: Int,
    items: Int,
    channels: Int,
    height: Int,
    size: Int,
    out_height: Int,
    out_size: Int,
    rows: Words,
    high: Floats,
    starts: Words,
    counts: Words,
    wide: Floats,
    step: Int,
    most: Int,
) -> None:
    """Averages for images with few channels. Items are parts of the rows (n, oh) of y.

    First sums the rows of x for a row of y, as vectors of their `size` elements; then, for each of `out_size` elements,
    the `counts` pixels from `starts` on. `most` is the largest count. `high` and `wide` are the factors of rows and
    elements: one per element of y with `step` 0, of x with 1.
    """
    for item in range(begin, end):
        line = ahead(lines, item * (size + 1))
        # An element of y that no pixel reaches reads this one, so the loops need no test for it.
        line[size] = 0
        begun = item * rows_of_y // items
        for row in range(begun, (item + 1) * rows_of_y // items):
            oh, out = row % out_height, row * out_size
            if step == 1 and row > begun and _repeats(rows, oh):
                _copy(y, out - out_size, out_size, y, out)
                continue
            h0, met = rows[2 * oh], rows[2 * oh + 1]
            _clear(line, size)
            for h in range(h0, h0 + met):
                factor, source = high[oh if step == 0 else h], (row // out_height * height + h) * size
                for i in range(size):
                    line[i] += x[source + i] * factor
            if step == 1:
                _multiply(line, 0, wide, size)
            # With at most one pixel per element the sum is one load, without a loop of variable length.
            if most == 1:
                for i in range(out_size):
                    y[out + i] = line[starts[i]]
            else:
                _sum_elements(line, starts, counts, channels, y, out, out_size)
            if step == 0:
                _multiply(y, out, wide, out_size)


def _axis(size: int, out: int, kernel: int, stride: int, pad: int, down: bool) -> tuple[ConstantTable, ConstantTable]:
    """Return for each position of y along an axis (first, count) of x, and the reciprocal window lengths."""
    # With `down`, x and y are exchanged: each image element maps to the windows that cover it.
    begins = np.arange(out) * stride - pad
    lengths = np.minimum(begins + kernel, size + pad) - begins
    if down:
        at = np.arange(size) + pad
        first = np.maximum(0, (at - kernel) // stride + 1)
        stop = np.minimum(out, at // stride + 1)
    else:
        first, stop = np.maximum(begins, 0), np.minimum(begins + kernel, size)
    # A window in the padding has no elements, but kernels still form its address: it stays inside the image.
    met = np.stack([np.minimum(first, (out if down else size) - 1), np.maximum(0, stop - first)], axis=-1)
    return ConstantTable(np.ascontiguousarray(met, np.int64)), ConstantTable((1 / lengths).astype(np.float32))


def _elements(
    columns: ConstantTable, wide: ConstantTable, channels: int, nothing: int
) -> tuple[ConstantTable, ConstantTable, ConstantTable, int]:
    """Return for each element of y's row the first element of x's row (or `nothing`) and the number of pixels."""
    # Also return the factor of each element and the largest number of pixels.
    first, count = np.repeat(columns.array, channels, axis=0).T
    starts = np.where(count > 0, first * channels + np.arange(len(first)) % channels, nothing)
    begins, counts = (ConstantTable(np.ascontiguousarray(table)) for table in (starts, count))
    return begins, counts, ConstantTable(np.repeat(wide.array, channels)), int(count.max())


@dataclass(frozen=True)
class _Average:
    """The average computation of one shape.

    Args:
        kernel: reads x and writes y.
        items: number of items.
        grain: minimum items per thread.
        line: workspace elements per item.
        settings: kernel arguments after x, y and the workspace.
    """

    kernel: Kernel
    items: int
    grain: int
    line: int
    settings: tuple[Any, ...]

    def run(self, threads: int, workspace: Workspace, x: Any, y: Any) -> None:
        lines = (workspace.take("lines", self.items * self.line),) if self.line else ()
        self.kernel.run(threads, self.items, self.grain, x, y, *lines, *self.settings)


@lru_cache(maxsize=1024)
def _plan(threads: int, image: tuple[int, ...], pooled: tuple[int, ...], geometry: Geometry, down: bool) -> _Average:
    """Plan the window averages of images of a shape, or with `down` their gradient."""
    g, (x, y) = geometry, (pooled, image) if down else (image, pooled)
    rows, columns = (_axis(image[2 + i], pooled[2 + i], g.kernel[i], g.stride[i], g.pad[i], down) for i in range(2))
    channels, size = x[1], x[1] * x[3]
    number, grain = rows_and_grain(y)
    items = max(1, min(4 * threads, number // grain))
    settings: tuple[Any, ...]
    if channels <= FEW_CHANNELS:
        starts, counts, wide, most = _elements(*columns, channels, size)
        settings = (channels, x[2], size, y[2], channels * y[3], *rows, starts, counts, wide, int(down), most)
        return _Average(average_few, items, 1, size + 1, (number, items, *settings))
    most = math.prod(int(met.array[:, 1].max()) for met, _ in (rows, columns))
    apart = math.prod(y[2:]) == 1 or all(kernel <= stride for kernel, stride in zip(g.kernel, g.stride, strict=True))
    # Sums of rows pay only for large windows that share elements. Smaller ones are summed in registers, without a
    # buffer.
    if most > MAX_DIRECT_WINDOW and (down or not apart):
        settings = (channels, *image[2:], *pooled[2:], *g.kernel, *g.stride, *g.pad)
        return _Average(average_backward if down else average_forward, items, 1, size, (number, items, *settings))
    settings = (channels, *x[2:], *y[2:], rows[0], columns[0], rows[1], columns[1])
    if channels >= MIN_STRIPED_CHANNELS and most > COLUMNS and not down:
        return _Average(average_of_parts, number, grain, 0, (*settings, COLUMNS, WIDTH))
    return _Average(average_windows, number, grain, 0, (*settings, int(down), WIDTH))


@kernel
def stochastic_forward(
    begin: Int,
    end: Int,
    x: Floats,
    chance: Floats,
    y: Floats,
    mask: Ints,
    channels: Int,
    height: Int,
    width: Int,
    out_height: Int,
    out_width: Int,
    kernel_h: Int,
    kernel_w: Int,
    stride_h: Int,
    stride_w: Int,
) -> None:
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
            # If the sum is NaN, no running sum compares as having reached the limit: the last element is the window's
            # draw.
            if where < 0:
                where = (h1 - 1) * width + w1 - 1
            y[item * channels + c] = x[(base * width + where) * channels + c]
            mask[item * channels + c] = where


class CpuPooling(PoolingPrimitives, CpuMemory):
    """`PoolingPrimitives` of the CPU."""

    def pool_max_forward(self, x: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        self._check_dense(x, y, mask)
        _, channels, height, width = x.shape
        g = geometry
        sizes = channels, height, width, *y.shape[2:], *g.kernel, *g.stride, *g.pad
        if channels >= MIN_STRIPED_CHANNELS and min(g.kernel[0], height) * min(g.kernel[1], width) > COLUMNS:
            max_of_parts.run(self.threads, *rows_and_grain(y.shape), x, y, mask, *sizes, COLUMNS, WIDTH)
        else:
            max_forward.run(self.threads, *rows_and_grain(y.shape), x, y, mask, *sizes, WIDTH)

    def pool_max_backward(self, dy: Array, mask: Array, dx: Array, geometry: Geometry) -> None:
        self._check_dense(dy, mask, dx)
        samples, channels, height, width = dx.shape
        # Windows overlap, so items are split where no two write to one element: by samples, and by channels if there
        # are too few samples for the threads.
        block = channels if samples >= 4 * self.threads or self.threads == 1 else 16
        blocks = -(-channels // block)
        out_pixels = dy.shape[2] * dy.shape[3]
        grain = max(1, GRAIN // max(1, block * height * width))
        max_backward.run(
            self.threads, samples * blocks, grain, dy, mask, dx, channels, block, blocks, height * width, out_pixels
        )

    def pool_average_forward(self, x: Array, y: Array, geometry: Geometry) -> None:
        self._check_dense(x, y)
        _plan(self.threads, x.shape, y.shape, geometry, False).run(self.threads, self._workspace, x, y)

    def pool_average_backward(self, dy: Array, dx: Array, geometry: Geometry) -> None:
        self._check_dense(dy, dx)
        _plan(self.threads, dx.shape, dy.shape, geometry, True).run(self.threads, self._workspace, dy, dx)

    def pool_stochastic_forward(self, x: Array, chance: Array, y: Array, mask: Array, geometry: Geometry) -> None:
        items = y.shape[0] * y.shape[2] * y.shape[3]
        shapes = (*x.shape[1:], *y.shape[2:], *geometry.kernel, *geometry.stride)
        stochastic_forward.run(
            self.threads, items, max(1, STOCHASTIC_GRAIN // max(1, int(x.shape[1]))), x, chance, y, mask, *shapes
        )
