"""Pooling windows over channels-last images: memory (N, H, W, C), all channels of a pixel next to each other."""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, device_function, kernel
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer, ahead, ahead_int
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.types import Geometry

GRAIN = 8192
"""Elements below which a second thread costs more than it saves."""


class _WindowWriter(Writer):
    """Writes the search for the maxima of a window in WIDTH channels at once."""

    def write(  # noqa: PLR0913 -- a kernel
        self, x: Any, rows: Any, row: Any, columns: Any, column: Any, index: Any, width: Any, y: Any, mask: Any,
        wanted: Any,
    ) -> None:  # fmt: skip
        lanes = self.lanes(wanted)
        best, where = self._better(None, self.masked_load(self.vector_at(x, self.word(0)), lanes), index)

        def over_rows(h: Any, _: Any, best: list[Any]) -> list[Any]:
            def over_columns(w: Any, _: Any, inner: list[Any]) -> list[Any]:
                offset = self.builder.add(self.builder.mul(h, row), self.builder.mul(w, column))
                value = self.masked_load(self.vector_at(x, offset), lanes)
                at = self.builder.add(index, self.builder.add(self.builder.mul(h, width), w))
                return self._better(inner, value, at)

            return self.loop(columns, best, [], over_columns)

        best, where = self.loop(rows, [best, where], [], over_rows)
        self.store(best, self.vector_at(y, self.word(0)), wanted, lanes)
        self.store(self.builder.bitcast(where, VECTOR), self.vector_at(mask, self.word(0)), wanted, lanes)

    def _better(self, best: list[Any] | None, value: Any, at: Any) -> list[Any]:
        """The larger of what was best and `value` at index `at`, and its index; the first one or first NaN wins."""
        where = self.splat(self.builder.trunc(at, ir.IntType(32)))
        if best is None:
            return [value, where]
        number = self.builder.fcmp_ordered("==", best[0], best[0])
        larger = self.builder.and_(self.builder.fcmp_unordered(">", value, best[0]), number)
        return [self.builder.select(larger, value, best[0]), self.builder.select(larger, where, best[1])]


@intrinsic
def window_maximum(  # noqa: PLR0913 -- a kernel
    typing_context: Any, x: Any, rows: Any, row: Any, columns: Any, column: Any, index: Any, width: Any, y: Any,
    mask: Any, wanted: Any,
) -> Any:  # fmt: skip
    """Maxima of a window whose elements are `row` and `column` apart, and their indices `index + h * width + w`."""
    word, numbers = types.int64, types.CPointer(types.float32)
    signature = types.void(
        numbers, word, word, word, word, word, word, numbers, types.CPointer(types.int32), word
    )  # fmt: skip

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _WindowWriter(builder).write(*arguments)
        return context.get_dummy_value()

    return signature, generate


@kernel
def max_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, mask: Ints,
    channels: Int, height: Int, width: Int, out_height: Int, out_width: Int,
    kernel_h: Int, kernel_w: Int, stride_h: Int, stride_w: Int, pad_h: Int, pad_w: Int, vector: Int,
) -> None:  # fmt: skip
    """Items are the rows (n, oh) of the output."""
    for item in range(begin, end):
        n = item // out_height
        h0 = (item % out_height) * stride_h - pad_h
        h1 = min(h0 + kernel_h, height)
        h0 = max(h0, 0)
        for ow in range(out_width):
            w0 = ow * stride_w - pad_w
            w1 = min(w0 + kernel_w, width)
            w0 = max(w0, 0)
            out = (item * out_width + ow) * channels
            index = h0 * width + w0
            source = (n * height * width + index) * channels
            for c in range(0, channels, vector):
                window_maximum(
                    ahead(x, source + c), h1 - h0, width * channels, w1 - w0, channels, index, width,
                    ahead(y, out + c), ahead_int(mask, out + c), channels - c,
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


@device_function
def _add_pixels(source: Any, at: Any, step: Any, count: Any, channels: Any, target: Any, to: Any) -> None:
    """target[to + c] = the sum over `count` pixels, `step` elements apart, of source[at + c]."""
    if channels == 1:
        total = np.float32(0)
        for i in range(count):
            total += source[at + i * step]
        target[to] = total
    else:
        for c in range(channels):
            target[to + c] = 0
        for i in range(count):
            for c in range(channels):
                target[to + c] += source[at + i * step + c]


@device_function
def _add_to_pixels(source: Any, at: Any, channels: Any, target: Any, to: Any, count: Any) -> None:
    """target[to + c] += source[at + c] for `count` pixels that lie next to each other."""
    if channels == 1:
        for i in range(count):
            target[to + i] += source[at]
    else:
        for i in range(count):
            for c in range(channels):
                target[to + i * channels + c] += source[at + c]


@kernel
def average_forward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, lines: Floats, rows: Int, items: Int,
    channels: Int, height: Int, width: Int, out_height: Int, out_width: Int,
    kernel_h: Int, kernel_w: Int, stride_h: Int, stride_w: Int, pad_h: Int, pad_w: Int,
) -> None:  # fmt: skip
    """Items are parts of the rows (n, oh) of the output: first the rows of a window are added up, then its columns."""
    size = width * channels
    for item in range(begin, end):
        line = ahead(lines, item * size)
        for row in range(item * rows // items, (item + 1) * rows // items):
            n = row // out_height
            h0 = (row % out_height) * stride_h - pad_h
            h1 = min(h0 + kernel_h, height + pad_h)
            high = h1 - h0
            h0, h1 = max(h0, 0), min(h1, height)
            source = (n * height + h0) * size
            apart = stride_w >= kernel_w and channels > 1  # then no column is read twice, and a line would cost more
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
                        for w in range(w0, w1):
                            for c in range(channels):
                                y[out + c] += x[source + h * size + w * channels + c]
                else:
                    _add_pixels(line, w0 * channels, channels, w1 - w0, channels, y, out)
                for c in range(channels):
                    y[out + c] /= area


@kernel
def average_backward(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, dy: Floats, dx: Floats, lines: Floats, rows: Int, items: Int,
    channels: Int, height: Int, width: Int, out_height: Int, out_width: Int,
    kernel_h: Int, kernel_w: Int, stride_h: Int, stride_w: Int, pad_h: Int, pad_w: Int,
) -> None:  # fmt: skip
    """Items are parts of the rows (n, h) of the image: first the windows' rows that cover it are added up."""
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
                    if channels == 1:
                        line[at] += dy[source + at] / area
                    else:
                        for c in range(channels):
                            line[at + c] += dy[source + at + c] / area
            target = row * width * channels
            for i in range(target, target + width * channels):
                dx[i] = 0
            for ow in range(out_width):
                w0 = ow * stride_w - pad_w
                w1 = min(w0 + kernel_w, width)
                _add_to_pixels(line, ow * channels, channels, dx, target + max(w0, 0) * channels, w1 - max(w0, 0))


def _window(x: Any, y: Any, geometry: Geometry) -> tuple[int, ...]:
    _, channels, height, width = x.shape
    return (channels, height, width, *y.shape[2:], *geometry.kernel, *geometry.stride, *geometry.pad)


def _rows(array: Any) -> tuple[int, int]:
    """Items and grain of a kernel whose items are the rows of (N, C, H, W)."""
    samples, channels, height, width = array.shape
    return samples * height, max(1, GRAIN // max(1, channels * width))


def pool_max_forward(threads: int, x: Any, y: Any, mask: Any, geometry: Geometry) -> None:
    """See `Backend.pool_max_forward`."""
    max_forward.run(threads, *_rows(y), x, y, mask, *_window(x, y, geometry), WIDTH)


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


def _parts(threads: int, array: Any, line: int, workspace: Workspace) -> tuple[int, int, Any, int, int]:
    """Items, grain, the items' lines, rows and items of a kernel whose items are parts of the rows of (N, C, H, W)."""
    rows, grain = _rows(array)
    items = max(1, min(4 * threads, rows // grain))
    return items, 1, workspace.take("lines", items * line), rows, items


def pool_average_forward(threads: int, workspace: Workspace, x: Any, y: Any, geometry: Geometry) -> None:
    """See `Backend.pool_average_forward`."""
    items, grain, *lines = _parts(threads, y, x.shape[1] * x.shape[3], workspace)
    average_forward.run(threads, items, grain, x, y, *lines, *_window(x, y, geometry))


def pool_average_backward(threads: int, workspace: Workspace, dy: Any, dx: Any, geometry: Geometry) -> None:
    """See `Backend.pool_average_backward`."""
    items, grain, *lines = _parts(threads, dx, dy.shape[1] * dy.shape[3], workspace)
    average_backward.run(threads, items, grain, dy, dx, *lines, *_window(dx, dy, geometry))
