"""Pooling windows over channels-last images: memory (N, H, W, C), all channels of a pixel next to each other."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Ints, Words, device_function, kernel
from caffepy.backend.cpu.jit.vector import NAME, VECTOR, WIDTH, Writer, ahead, ahead_int
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.types import Geometry

GRAIN = 8192
"""Elements below which a second thread costs more than it saves."""
FEW = 9
"""Elements whose sums are made anew for each window."""


class _WindowWriter(Writer):
    """Writes the search for the maxima of a window in some vectors of channels at once."""

    def write(  # noqa: PLR0913 -- a kernel
        self, vectors: int, x: Any, rows: Any, row: Any, columns: Any, column: Any, index: Any, width: Any, y: Any,
        mask: Any, wanted: Any,
    ) -> None:  # fmt: skip
        lanes = self.lanes(wanted) if vectors == 1 else None

        def over_rows(h: Any, _: Any, best: list[Any]) -> list[Any]:
            def over_columns(w: Any, _: Any, inner: list[Any]) -> list[Any]:
                offset = self.builder.add(self.builder.mul(h, row), self.builder.mul(w, column))
                found = self._values(x, offset, vectors, lanes)
                at = self.builder.add(index, self.builder.add(self.builder.mul(h, width), w))
                pairs = [self._better(inner[2 * v : 2 * v + 2], value, at) for v, value in enumerate(found)]
                return [number for pair in pairs for number in pair]

            return self.loop(columns, best, [], over_columns)

        best = [
            number
            for value in self._values(x, self.word(0), vectors, lanes)
            for number in self._better(None, value, index)
        ]
        best = self.loop(rows, best, [], over_rows)
        for v in range(vectors):
            at, where = self.word(v * WIDTH), self.builder.bitcast(best[2 * v + 1], VECTOR)
            for value, target in ((best[2 * v], self.vector_at(y, at)), (where, self.vector_at(mask, at))):
                if lanes is None:
                    self.builder.store(value, target, align=4)
                else:
                    self.store(value, target, wanted, lanes)

    def write_sums(  # noqa: PLR0913 -- a kernel
        self, vectors: int, x: Any, rows: Any, row: Any, columns: Any, column: Any, high: Any, wide: Any, step: Any,
        y: Any, wanted: Any,
    ) -> None:  # fmt: skip
        """See `window_sums`."""
        lanes = self.lanes(wanted) if vectors == 1 else None
        zeros = [ir.Constant(VECTOR, [0.0] * WIDTH)] * vectors

        def share(table: Any, index: Any) -> Any:
            address = self.builder.gep(table, [self.builder.mul(index, step)])
            return self.splat(self.builder.load(address, align=4))

        def over_rows(h: Any, _: Any, totals: list[Any]) -> list[Any]:
            def over_columns(w: Any, _: Any, sums: list[Any]) -> list[Any]:
                offset = self.builder.add(self.builder.mul(h, row), self.builder.mul(w, column))
                values = self._values(x, offset, vectors, lanes)
                return [
                    self._multiply_add(value, share(wide, w), total) for value, total in zip(values, sums, strict=True)
                ]

            sums = self.loop(columns, zeros, [], over_columns)
            return [self._multiply_add(value, share(high, h), total) for value, total in zip(sums, totals, strict=True)]

        for v, total in enumerate(self.loop(rows, zeros, [], over_rows)):
            address = self.vector_at(y, self.word(v * WIDTH))
            if lanes is None:
                self.builder.store(total, address, align=4)
            else:
                self.store(total, address, wanted, lanes)

    def _multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        kind = ir.FunctionType(VECTOR, [VECTOR] * 3)
        return self.call(f"llvm.fmuladd.{NAME}", kind, [x, y, total])

    def _values(self, x: Any, offset: Any, vectors: int, lanes: Any) -> list[Any]:
        places = [self.vector_at(x, self.builder.add(offset, self.word(v * WIDTH))) for v in range(vectors)]
        return [self.builder.load(p, align=4) if lanes is None else self.masked_load(p, lanes) for p in places]

    def _better(self, best: list[Any] | None, value: Any, at: Any) -> list[Any]:
        """The larger of what was best and `value` at index `at`, and its index; the first one or first NaN wins."""
        where = self.splat(self.builder.trunc(at, ir.IntType(32)))
        if best is None:
            return [value, where]
        number = self.builder.fcmp_ordered("==", best[0], best[0])
        larger = self.builder.and_(self.builder.fcmp_unordered(">", value, best[0]), number)
        return [self.builder.select(larger, value, best[0]), self.builder.select(larger, where, best[1])]


def _window_maximum(vectors: int) -> Any:
    word, numbers = types.int64, types.CPointer(types.float32)
    signature = types.void(
        numbers, word, word, word, word, word, word, numbers, types.CPointer(types.int32), word
    )  # fmt: skip

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _WindowWriter(builder).write(vectors, *arguments)
        return context.get_dummy_value()

    def typed(  # noqa: PLR0913 -- a kernel
        typing_context: Any, x: Any, rows: Any, row: Any, columns: Any, column: Any, index: Any, width: Any, y: Any,
        mask: Any, wanted: Any,
    ) -> Any:  # fmt: skip
        return signature, generate

    return intrinsic(typed)


window_maximum, window_maximum4 = _window_maximum(1), _window_maximum(4)
"""Maxima of a window whose elements are `row` and `column` apart, and their indices `index + h * width + w`: in
`wanted` channels of a vector, or in four whole vectors."""


def _window_sums(vectors: int) -> Any:
    word, numbers = types.int64, types.CPointer(types.float32)
    signature = types.void(numbers, word, word, word, word, numbers, numbers, word, numbers, word)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _WindowWriter(builder).write_sums(vectors, *arguments)
        return context.get_dummy_value()

    def typed(  # noqa: PLR0913 -- a kernel
        typing_context: Any, x: Any, rows: Any, row: Any, columns: Any, column: Any, high: Any, wide: Any, step: Any,
        y: Any, wanted: Any,
    ) -> Any:  # fmt: skip
        return signature, generate

    return intrinsic(typed)


window_sums, window_sums4 = _window_sums(1), _window_sums(4)
"""Sums of a window whose elements are `row` and `column` apart, each times high[h * step] and wide[w * step]: in
`wanted` channels of a vector, or in four whole vectors."""


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
            many = channels // (4 * vector) * 4 * vector
            for c in range(0, many, 4 * vector):
                window_maximum4(
                    ahead(x, source + c), h1 - h0, width * channels, w1 - w0, channels, index, width,
                    ahead(y, out + c), ahead_int(mask, out + c), channels - c,
                )  # fmt: skip
            for c in range(many, channels, vector):
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
def _add_row(source: Any, at: Any, count: Any, channels: Any, target: Any, to: Any) -> None:
    """target[to + c] += the sum over `count` pixels that lie next to each other of source[at + c]."""
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
            # Where no column is read twice a line would cost more.
            apart = (stride_w >= kernel_w or out_width == 1) and channels > 1
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


@kernel
def average_windows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, y: Floats, channels: Int, height: Int, width: Int, out_height: Int,
    out_width: Int, rows: Words, columns: Words, high: Floats, wide: Floats, step: Int, vector: Int,
) -> None:  # fmt: skip
    """Sums of small windows, in registers. Items are the rows (n, oh) of y.

    `rows` and `columns` have for each row and column of y the first that it meets in x, and how many; `high` and
    `wide` what these are multiplied with: one for each of y with `step` 0, of x with 1.
    """
    for item in range(begin, end):
        oh = item % out_height
        h = rows[2 * oh]
        line = (item // out_height * height + h) * width
        a = ahead(high, oh if step == 0 else h)
        for ow in range(out_width):
            w, count = columns[2 * ow], columns[2 * ow + 1]
            b = ahead(wide, ow if step == 0 else w)
            source, out = (line + w) * channels, (item * out_width + ow) * channels
            many = channels // (4 * vector) * 4 * vector
            for c in range(0, many, 4 * vector):
                window_sums4(
                    ahead(x, source + c), rows[2 * oh + 1], width * channels, count, channels, a, b, step,
                    ahead(y, out + c), channels - c,
                )  # fmt: skip
            for c in range(many, channels, vector):
                window_sums(
                    ahead(x, source + c), rows[2 * oh + 1], width * channels, count, channels, a, b, step,
                    ahead(y, out + c), channels - c,
                )  # fmt: skip


@lru_cache(maxsize=256)
def _axis(size: int, out: int, kernel: int, stride: int, pad: int, down: bool) -> tuple[ConstantTable, ConstantTable]:
    """Along one axis what each of y meets in x (first, how many), and one over each window's length.

    With `down` each element of the image meets the windows that cover it.
    """
    begins = np.arange(out) * stride - pad
    lengths = np.minimum(begins + kernel, size + pad) - begins
    if down:
        at = np.arange(size) + pad
        first = np.maximum(0, (at - kernel) // stride + 1)
        stop = np.minimum(out, at // stride + 1)
    else:
        first, stop = np.maximum(begins, 0), np.minimum(begins + kernel, size)
    met = np.stack([np.minimum(first, (out if down else size) - 1), np.maximum(0, stop - first)], axis=-1)
    return ConstantTable(np.ascontiguousarray(met, np.int64)), ConstantTable((1 / lengths).astype(np.float32))


def _averages_in_registers(geometry: Geometry, channels: int, out: tuple[int, ...], down: bool) -> bool:
    """Whether few elements are added up, or each of them once, so that sums over lines would not save anything."""
    moves = list(zip(geometry.kernel, geometry.stride, strict=True))
    if down:
        return channels > 1 and math.prod(-(-kernel // stride) for kernel, stride in moves) <= FEW
    return (
        math.prod(geometry.kernel) <= FEW or all(kernel <= stride for kernel, stride in moves) or math.prod(out) == 1
    )  # fmt: skip


def _average_windows(threads: int, image: Any, pooled: Any, geometry: Geometry, down: bool) -> None:
    """Averages of the image's windows, or with `down` the gradient of the image."""
    g, x, y = geometry, *((pooled, image) if down else (image, pooled))
    axes = [
        _axis(size, out, g.kernel[i], g.stride[i], g.pad[i], down)
        for i, (size, out) in enumerate(zip(image.shape[2:], pooled.shape[2:], strict=True))
    ]
    average_windows.run(
        threads, *_rows(y), x, y, x.shape[1], *x.shape[2:], *y.shape[2:], axes[0][0], axes[1][0], axes[0][1],
        axes[1][1], int(down), WIDTH,
    )  # fmt: skip


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
    if _averages_in_registers(geometry, y.shape[1], y.shape[2:], down=False):
        _average_windows(threads, x, y, geometry, down=False)
        return
    items, grain, *lines = _parts(threads, y, x.shape[1] * x.shape[3], workspace)
    average_forward.run(threads, items, grain, x, y, *lines, *_window(x, y, geometry))


def pool_average_backward(threads: int, workspace: Workspace, dy: Any, dx: Any, geometry: Geometry) -> None:
    """See `Backend.pool_average_backward`."""
    if _averages_in_registers(geometry, dy.shape[1], dy.shape[2:], down=True):
        _average_windows(threads, dx, dy, geometry, down=True)
        return
    items, grain, *lines = _parts(threads, dx, dy.shape[1] * dy.shape[3], workspace)
    average_backward.run(threads, items, grain, dy, dx, *lines, *_window(dx, dy, geometry))
