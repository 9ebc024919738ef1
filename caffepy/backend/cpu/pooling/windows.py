"""The innermost loops of pooling: the maximum or the sum over a window for some vectors of channels, in registers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.kernel import device_function
from caffepy.backend.cpu.jit.vector import INDICES, VECTOR, WIDTH, Writer

GRAIN = 8192
"""Elements below which a second thread costs more than it saves."""
MIN_STRIPED_CHANNELS = 512
"""Channels from which the pixels of a window lie so far apart that those of a few columns, with all their channels, are
passed over before the next ones: memory is fetched ahead where it is read in order."""
COLUMNS = 8
"""Columns that are passed over together then."""
WORD, NUMBERS, INTEGERS = types.int64, types.CPointer(types.float32), types.CPointer(types.int32)


class WindowWriter(Writer):
    """Writes what is done with a window in some vectors of channels at once.

    Args:
        builder: of the instructions.
        vectors: 4, 2 or 1.
        goes_on: whether to start from what was found before.
        left: channels from the first of these vectors to the last of the image: at least four vectors of them for four,
            and one for two, of which the second then lies over the first.
    """

    def __init__(self, builder: Any, vectors: int, goes_on: bool, left: Any) -> None:
        super().__init__(builder)
        self._goes_on, self._left, self._mask = goes_on, left, self.lanes(left) if vectors == 1 else None
        self._offsets = [self.word(v * WIDTH) for v in range(vectors)]
        if vectors == 2:
            last = builder.sub(left, self._offsets[1])
            self._offsets[1] = builder.select(builder.icmp_signed("<", last, self._offsets[1]), last, self._offsets[1])

    def write_maximum(self, arguments: list[Any]) -> None:
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

        def kept() -> list[Any]:
            where = [builder.bitcast(value, INDICES) for value in self._values(mask, self.word(0))]
            return [n for pair in zip(self._values(y, self.word(0)), where, strict=True) for n in pair]

        def first() -> list[Any]:
            where = self.splat(builder.trunc(index, ir.IntType(32)))
            return [number for value in self._values(x, self.word(0)) for number in (value, where)]

        best = self.loop(rows, kept() if self._goes_on else first(), [], over_rows)
        self._write(y, best[::2])
        self._write(mask, [builder.bitcast(where, VECTOR) for where in best[1::2]])

    def write_sums(self, arguments: list[Any]) -> None:
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

        start = self._values(y, self.word(0)) if self._goes_on else zeros
        self._write(y, self.loop(rows, start, [], over_rows))

    def _starts(self, pointer: Any) -> list[Any]:
        """Where the vectors lie in a pixel."""
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
        """The larger of what was best and `value` at index `at`, and its index; the first one or first NaN wins."""
        where = self.splat(self.builder.trunc(at, ir.IntType(32)))
        number = self.builder.fcmp_ordered("==", best[0], best[0])
        larger = self.builder.and_(self.builder.fcmp_unordered(">", value, best[0]), number)
        return [self.builder.select(larger, value, best[0]), self.builder.select(larger, where, best[1])]


def _window(
    write: Callable[[WindowWriter, list[Any]], None], more: tuple[Any, ...], vectors: int, goes_on: bool
) -> Any:
    """An intrinsic for a window of x, `rows` times `columns` elements that are `row` and `column` apart.

    Args:
        write: writes it.
        more: types of four arguments beyond these; the channels that are left follow.
        vectors: of channels.
        goes_on: whether to start from what was found before.
    """
    signature = types.void(NUMBERS, WORD, WORD, WORD, WORD, *more, WORD)

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        write(WindowWriter(builder, vectors, goes_on, arguments[-1]), list(arguments[:-1]))
        return context.get_dummy_value()

    def typed(  # noqa: PLR0913 -- a kernel
        typing_context: Any, x: Any, rows: Any, row: Any, columns: Any, column: Any, first: Any, second: Any,
        third: Any, fourth: Any, left: Any,
    ) -> Any:  # fmt: skip
        return signature, generate

    return intrinsic(typed)


def _window_maximum(vectors: int, goes_on: bool = False) -> Any:
    return _window(WindowWriter.write_maximum, (WORD, WORD, NUMBERS, INTEGERS), vectors, goes_on)


def _window_sums(vectors: int, goes_on: bool = False) -> Any:
    return _window(WindowWriter.write_sums, (NUMBERS, NUMBERS, WORD, NUMBERS), vectors, goes_on)


window_maximum, window_maximum2, window_maximum4 = (_window_maximum(vectors) for vectors in (1, 2, 4))
"""Maxima of a window and their indices `index + h * width + w`. Arguments: index, width, y, mask."""
window_sums, window_sums2, window_sums4 = (_window_sums(vectors) for vectors in (1, 2, 4))
"""Sums of a window, each element times high[h * step] and wide[w * step]. Arguments: high, wide, step, y."""
more_maximum, more_maximum4 = (_window_maximum(vectors, goes_on=True) for vectors in (1, 4))
more_sums, more_sums4 = (_window_sums(vectors, goes_on=True) for vectors in (1, 4))
"""As these, from what y and mask hold."""


@device_function
def window_bounds(number: Any, stride: Any, pad: Any, kernel: Any, size: Any) -> Any:
    """The first element of a window along an axis that lies within the image, and the end of those that do."""
    first = number * stride - pad
    end = min(first + kernel, size)
    return max(first, 0), end


def rows_and_grain(shape: tuple[int, ...]) -> tuple[int, int]:
    """Items and grain of a kernel whose items are the rows of (N, C, H, W)."""
    samples, channels, height, width = shape
    return samples * height, max(1, GRAIN // max(1, channels * width))
