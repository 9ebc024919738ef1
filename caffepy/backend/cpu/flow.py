"""Comparison of two images at displacements, and bilinear sampling at positions, on the CPU."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, device_function, kernel
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import FlowPrimitives
from caffepy.backend.types import Array, Border, CorrelationWindow

GRAIN = 16384
"""Minimum products for a second thread."""

BLOCK = 16
"""Channels per item of a scattered sum."""

ZERO, HALF, ONE = np.float32(0), np.float32(0.5), np.float32(1)
INSIDE, REPEAT = int(Border.INSIDE), int(Border.REPEAT)


# -- correlation ---------------------------------------------------------------------------------------


@device_function
def product_sum(a: Any, i: Any, b: Any, j: Any, count: Any) -> Any:
    """The sum of a[i + k] * b[j + k], in eight partial sums that become one vector."""
    # A single sum is a chain of additions that the compiler must not reorder. Eight sums, one per lane, need no
    # reordering.
    s0, s1, s2, s3 = ZERO, ZERO, ZERO, ZERO
    s4, s5, s6, s7 = ZERO, ZERO, ZERO, ZERO
    whole = count - count % 8
    for k in range(0, whole, 8):
        s0 += a[i + k] * b[j + k]
        s1 += a[i + k + 1] * b[j + k + 1]
        s2 += a[i + k + 2] * b[j + k + 2]
        s3 += a[i + k + 3] * b[j + k + 3]
        s4 += a[i + k + 4] * b[j + k + 4]
        s5 += a[i + k + 5] * b[j + k + 5]
        s6 += a[i + k + 6] * b[j + k + 6]
        s7 += a[i + k + 7] * b[j + k + 7]
    for k in range(whole, count):
        s0 += a[i + k] * b[j + k]
    return ((s0 + s4) + (s2 + s6)) + ((s1 + s5) + (s3 + s7))


@device_function
def difference_sum(a: Any, i: Any, in_a: Any, b: Any, j: Any, in_b: Any, count: Any) -> Any:
    """The sum of |a[i + k] - b[j + k]|; elements outside their image are 0."""
    total = ZERO
    for k in range(count):
        left = a[i + k] if in_a else ZERO
        right = b[j + k] if in_b else ZERO
        total += abs(left - right)
    return total


@kernel
def correlate(
    begin: Int,
    end: Int,
    a: Floats,
    b: Floats,
    y: Floats,
    channels: Int,
    height: Int,
    width: Int,
    rows: Int,
    columns: Int,
    size: Int,
    stride: Int,
    top: Int,
    left: Int,
    first_row: Int,
    first_column: Int,
    shift_rows: Int,
    shift_columns: Int,
    step: Int,
    subtract: Int,
    scale: Float,
) -> None:
    """Items are the top's rows (sample, row)."""
    for item in range(begin, end):
        base = item // rows * height
        for place in range(columns * shift_rows * shift_columns):
            shift = place % (shift_rows * shift_columns)
            corner_h = item % rows * stride + top
            corner_w = place // (shift_rows * shift_columns) * stride + left
            down = first_row + shift // shift_columns * step
            right = first_column + shift % shift_columns * step
            total = ZERO
            for number in range(size * size):
                h = corner_h + number // size
                w = corner_w + number % size
                in_a = h >= 0 and h < height and w >= 0 and w < width
                in_b = h + down >= 0 and h + down < height and w + right >= 0 and w + right < width
                i = ((base + h) * width + w) * channels
                j = i + (down * width + right) * channels
                # Outside its image an element counts as 0: a difference remains, while a product vanishes and is
                # skipped.
                if subtract != 0:
                    total += difference_sum(a, i, in_a, b, j, in_b, channels)
                elif in_a and in_b:
                    total += product_sum(a, i, b, j, channels)
            y[item * columns * shift_rows * shift_columns + place] = total * scale


@kernel
def correlate_gradient(
    begin: Int,
    end: Int,
    dy: Floats,
    own: Floats,
    other: Floats,
    gradient: Floats,
    channels: Int,
    height: Int,
    width: Int,
    rows: Int,
    columns: Int,
    size: Int,
    stride: Int,
    top: Int,
    left: Int,
    first_row: Int,
    first_column: Int,
    shift_rows: Int,
    shift_columns: Int,
    step: Int,
    subtract: Int,
    scale: Float,
    second: Int,
) -> None:
    """Items are pixels (sample, row, column) of `own`, the first image, or the second if `second` is 1."""
    shifts = shift_rows * shift_columns
    for item in range(begin, end):
        sample = item // (height * width)
        at = item * channels
        for c in range(channels):
            gradient[at + c] = ZERO
        for shift in range(shifts):
            down = first_row + shift // shift_columns * step
            right = first_column + shift % shift_columns * step
            # The pixel of the first image, and the one in the other image that belongs to `item`.
            h = item // width % height - second * down
            w = item % width - second * right
            other_h = h + (1 - second) * down
            other_w = w + (1 - second) * right
            inside = other_h >= 0 and other_h < height and other_w >= 0 and other_w < width
            total = ZERO
            for number in range(size * size):
                below = h - top - number // size
                beyond = w - left - number % size
                # A gather: the pixel looks for the windows that contain it, so that an item writes to its own pixel
                # only.
                hit = below >= 0 and beyond >= 0 and below % stride == 0 and beyond % stride == 0
                if hit and below // stride < rows and beyond // stride < columns:
                    place = (sample * rows + below // stride) * columns + beyond // stride
                    total += dy[place * shifts + shift]
            total *= scale
            source = ((sample * height + other_h) * width + other_w) * channels
            if subtract != 0:
                for c in range(channels):
                    distance = own[at + c] - (other[source + c] if inside else ZERO)
                    gradient[at + c] += total if distance > ZERO else (-total if distance < ZERO else ZERO)
            elif inside:
                for c in range(channels):
                    gradient[at + c] += total * other[source + c]


# -- sampling ------------------------------------------------------------------------------------------


@device_function
def taps(position: Any, size: Any, border: Any) -> Any:
    """Return how a position along one axis reads the pixels.

    Returns:
        Whether the position has a value, the pixel at or before it, the weights of this and of the next pixel, and the
        derivatives of the weights of the previous, of this and of the next pixel.
    """
    low = -ONE if border == 0 else ZERO
    known = position > low if border == 0 else position >= low
    known = known and (position <= np.float32(size - 1) if border == INSIDE else position < np.float32(size))
    first = int(math.floor(position)) if known else 0
    fraction = position - np.float32(first) if known else ZERO
    has_this = known and first >= 0
    has_next = known and first + 1 < size
    this = (ONE - fraction) if has_this else ZERO
    after = fraction if has_next else ZERO
    if border == REPEAT and known and not has_next:
        this = ONE
    if border == 0:
        return known, first, this, after, ZERO, -ONE if has_this else ZERO, ONE if has_next else ZERO
    next_slope = ONE if has_next else ZERO
    if border == INSIDE and fraction == ZERO:
        last_slope = HALF if known and first > 0 else ZERO
        return known, first, this, after, -last_slope, last_slope - HALF * next_slope, HALF * next_slope
    return known, first, this, after, ZERO, -next_slope, next_slope


@device_function
def clipped(index: Any, size: Any) -> Any:
    return min(max(index, 0), size - 1)


@kernel
def sample(
    begin: Int,
    end: Int,
    x: Floats,
    positions: Floats,
    y: Floats,
    channels: Int,
    height: Int,
    width: Int,
    pixels: Int,
    border: Int,
    fill: Float,
) -> None:
    """Items are the top's pixels."""
    for item in range(begin, end):
        in_width, w, left, right, _, _, _ = taps(positions[2 * item], width, border)
        in_height, h, up, down, _, _, _ = taps(positions[2 * item + 1], height, border)
        base = item // pixels * height
        # A pixel outside the image has weight 0; clipping keeps its address inside, without a branch in the loop.
        w0, w1 = clipped(w, width), clipped(w + 1, width)
        row0 = (base + clipped(h, height)) * width
        row1 = (base + clipped(h + 1, height)) * width
        if in_width and in_height:
            for c in range(channels):
                y[item * channels + c] = up * (
                    left * x[(row0 + w0) * channels + c] + right * x[(row0 + w1) * channels + c]
                ) + down * (left * x[(row1 + w0) * channels + c] + right * x[(row1 + w1) * channels + c])
        else:
            for c in range(channels):
                y[item * channels + c] = fill


@kernel
def sample_gradient(
    begin: Int,
    end: Int,
    positions: Floats,
    dy: Floats,
    dx: Floats,
    channels: Int,
    height: Int,
    width: Int,
    pixels: Int,
    border: Int,
    blocks: Int,
) -> None:
    """Items are (sample, block of channels), so no two threads add to the same element."""
    for item in range(begin, end):
        first = item % blocks * BLOCK
        last = min(channels, first + BLOCK)
        base = item // blocks * height
        for p in range(base * width, (base + height) * width):
            for c in range(first, last):
                dx[p * channels + c] = ZERO
        for p in range(item // blocks * pixels, (item // blocks + 1) * pixels):
            in_width, w, left, right, _, _, _ = taps(positions[2 * p], width, border)
            in_height, h, up, down, _, _, _ = taps(positions[2 * p + 1], height, border)
            if in_width and in_height:
                w0, w1 = clipped(w, width), clipped(w + 1, width)
                row0 = (base + clipped(h, height)) * width
                row1 = (base + clipped(h + 1, height)) * width
                for c in range(first, last):
                    d = dy[p * channels + c]
                    dx[(row0 + w0) * channels + c] += up * left * d
                    dx[(row0 + w1) * channels + c] += up * right * d
                    dx[(row1 + w0) * channels + c] += down * left * d
                    dx[(row1 + w1) * channels + c] += down * right * d


@kernel
def position_gradient(
    begin: Int,
    end: Int,
    x: Floats,
    positions: Floats,
    dy: Floats,
    gradient: Floats,
    channels: Int,
    height: Int,
    width: Int,
    pixels: Int,
    border: Int,
) -> None:
    """Items are the top's pixels."""
    for item in range(begin, end):
        in_width, w, left, right, before_w, this_w, after_w = taps(positions[2 * item], width, border)
        in_height, h, up, down, before_h, this_h, after_h = taps(positions[2 * item + 1], height, border)
        base = item // pixels * height
        by_x, by_y = ZERO, ZERO
        if in_width and in_height:
            w_, w0, w1 = clipped(w - 1, width), clipped(w, width), clipped(w + 1, width)
            row_ = (base + clipped(h - 1, height)) * width
            row0 = (base + clipped(h, height)) * width
            row1 = (base + clipped(h + 1, height)) * width
            for c in range(channels):
                d = dy[item * channels + c]
                top = x[(row0 + w0) * channels + c]
                top_next = x[(row0 + w1) * channels + c]
                bottom = x[(row1 + w0) * channels + c]
                bottom_next = x[(row1 + w1) * channels + c]
                top_before = x[(row0 + w_) * channels + c]
                bottom_before = x[(row1 + w_) * channels + c]
                above = x[(row_ + w0) * channels + c]
                above_next = x[(row_ + w1) * channels + c]
                by_x += d * (
                    up * (before_w * top_before + this_w * top + after_w * top_next)
                    + down * (before_w * bottom_before + this_w * bottom + after_w * bottom_next)
                )
                by_y += d * (
                    before_h * (left * above + right * above_next)
                    + this_h * (left * top + right * top_next)
                    + after_h * (left * bottom + right * bottom_next)
                )
        gradient[2 * item] = by_x
        gradient[2 * item + 1] = by_y


class CpuFlow(FlowPrimitives, CpuMemory):
    """`FlowPrimitives` of the CPU."""

    def correlate_forward(self, a: Array, b: Array, y: Array, window: CorrelationWindow) -> None:
        samples, channels, _, _ = a.shape
        rows, columns = y.shape[2:]
        scale = 1 / (window.kernel**2 * max(channels, 1))
        grain = max(1, GRAIN // max(1, columns * math.prod(window.count) * channels))
        sizes = (*a.shape[1:], rows, columns)
        correlate.run(self.threads, samples * rows, grain, a, b, y, *sizes, *window.numbers, scale)

    def correlate_backward(
        self, dy: Array, a: Array, b: Array, da: Array | None, db: Array | None, window: CorrelationWindow
    ) -> None:
        samples, channels, height, width = a.shape
        scale = 1 / (window.kernel**2 * max(channels, 1))
        grain = max(1, GRAIN // max(1, math.prod(window.count) * channels))
        for second, (own, other, gradient) in enumerate(((a, b, da), (b, a, db))):
            if gradient is not None:
                correlate_gradient.run(
                    self.threads,
                    samples * height * width,
                    grain,
                    dy,
                    own,
                    other,
                    gradient,
                    channels,
                    height,
                    width,
                    *dy.shape[2:],
                    *window.numbers,
                    scale,
                    second,
                )

    def sample_forward(self, x: Array, positions: Array, y: Array, border: Border, fill: float) -> None:
        pixels = math.prod(y.shape[2:])
        grain = max(1, GRAIN // max(1, 4 * x.shape[1]))
        sizes = (*x.shape[1:], pixels, int(border))
        sample.run(self.threads, y.shape[0] * pixels, grain, x, positions, y, *sizes, fill)

    def sample_backward(
        self, x: Array, positions: Array, dy: Array, dx: Array | None, d_positions: Array | None, border: Border
    ) -> None:
        samples, channels, _, _ = x.shape
        pixels = math.prod(dy.shape[2:])
        sizes = (*x.shape[1:], pixels, int(border))
        if dx is not None:
            blocks = -(-channels // BLOCK)
            sample_gradient.run(self.threads, samples * blocks, 1, positions, dy, dx, *sizes, blocks)
        if d_positions is not None:
            grain = max(1, GRAIN // max(1, 8 * channels))
            position_gradient.run(self.threads, samples * pixels, grain, x, positions, dy, d_positions, *sizes)
