"""The maxima of pooling windows."""

from __future__ import annotations

from typing import Any

from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, kernel
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, ahead_int
from caffepy.backend.cpu.pooling.windows import (
    COLUMNS,
    GRAIN,
    MIN_STRIPED_CHANNELS,
    more_maximum,
    more_maximum4,
    rows_and_grain,
    window_bounds,
    window_maximum,
    window_maximum2,
    window_maximum4,
)
from caffepy.backend.types import Geometry


@kernel
def max_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, mask: Ints,
    channels: Int, height: Int, width: Int, out_height: Int, out_width: Int,
    kernel_h: Int, kernel_w: Int, stride_h: Int, stride_w: Int, pad_h: Int, pad_w: Int, vector: Int,
) -> None:  # fmt: skip
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
            c = 0
            while c < channels:
                left = channels - c
                if left >= 4 * vector:
                    window_maximum4(
                        ahead(x, source + c), h1 - h0, size, w1 - w0, channels, index, width, ahead(y, out + c),
                        ahead_int(mask, out + c), left,
                    )  # fmt: skip
                    c += 4 * vector
                elif left > vector:
                    window_maximum2(
                        ahead(x, source + c), h1 - h0, size, w1 - w0, channels, index, width, ahead(y, out + c),
                        ahead_int(mask, out + c), left,
                    )  # fmt: skip
                    c += 2 * vector
                else:
                    at = min(c, max(0, channels - vector))
                    window_maximum(
                        ahead(x, source + at), h1 - h0, size, w1 - w0, channels, index, width, ahead(y, out + at),
                        ahead_int(mask, out + at), channels - at,
                    )  # fmt: skip
                    c += vector


@kernel
def max_of_parts(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, mask: Ints,
    channels: Int, height: Int, width: Int, out_height: Int, out_width: Int,
    kernel_h: Int, kernel_w: Int, stride_h: Int, stride_w: Int, pad_h: Int, pad_w: Int, part: Int, vector: Int,
) -> None:  # fmt: skip
    """As `max_forward`, for many channels: those of `part` columns of a window's row before the next ones."""
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
                    index, columns = h * width + w, min(part, w1 - w)
                    source = (n * height * width + index) * channels
                    for c in range(0, many, 4 * vector):
                        more_maximum4(
                            ahead(x, source + c), 1, 0, columns, channels, index, width, ahead(y, out + c),
                            ahead_int(mask, out + c), channels - c,
                        )  # fmt: skip
                    for c in range(many, channels, vector):
                        more_maximum(
                            ahead(x, source + c), 1, 0, columns, channels, index, width, ahead(y, out + c),
                            ahead_int(mask, out + c), channels - c,
                        )  # fmt: skip


@kernel
def max_backward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, dy: Floats, mask: Ints, dx: Floats, channels: Int, block: Int, blocks: Int, pixels: Int,
    out_pixels: Int,
) -> None:  # fmt: skip
    """Items are (n, block of channels), so that no two threads add to one element."""
    for item in range(begin, end):
        n = item // blocks
        c0 = (item % blocks) * block
        c1 = min(c0 + block, channels)
        if c1 - c0 == channels:
            for i in range(n * pixels * channels, (n + 1) * pixels * channels):
                dx[i] = 0
        else:
            for p in range(pixels):
                for c in range(c0, c1):
                    dx[(n * pixels + p) * channels + c] = 0
        if channels == 1:  # a loop over one channel takes longer than what it does
            for q in range(n * out_pixels, (n + 1) * out_pixels):
                dx[n * pixels + mask[q]] += dy[q]
        else:
            for q in range(out_pixels):
                source = (n * out_pixels + q) * channels
                for c in range(c0, c1):
                    dx[(n * pixels + mask[source + c]) * channels + c] += dy[source + c]


def pool_max_forward(threads: int, x: Any, y: Any, mask: Any, geometry: Geometry) -> None:
    """See `Backend.pool_max_forward`."""
    _, channels, height, width = x.shape
    g = geometry
    sizes = channels, height, width, *y.shape[2:], *g.kernel, *g.stride, *g.pad
    if channels >= MIN_STRIPED_CHANNELS and min(g.kernel[0], height) * min(g.kernel[1], width) > COLUMNS:
        max_of_parts.run(threads, *rows_and_grain(y.shape), x, y, mask, *sizes, COLUMNS, WIDTH)
    else:
        max_forward.run(threads, *rows_and_grain(y.shape), x, y, mask, *sizes, WIDTH)


def pool_max_backward(threads: int, dy: Any, mask: Any, dx: Any) -> None:
    """See `Backend.pool_max_backward`."""
    samples, channels, height, width = dx.shape
    block = channels if samples >= 4 * threads or threads == 1 else 16
    blocks = -(-channels // block)
    out_pixels = dy.shape[2] * dy.shape[3]
    grain = max(1, GRAIN // max(1, block * height * width))
    max_backward.run(
        threads, samples * blocks, grain, dy, mask, dx, channels, block, blocks, height * width, out_pixels
    )
