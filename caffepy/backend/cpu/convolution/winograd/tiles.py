"""The transforms of Winograd's convolution F(2x2, 3x3), written in LLVM's language, a vector of channels at a time.

With B, G and A of Lavin and Gray, "Fast Algorithms for Convolutional Neural Networks" (CVPR 2016), a tile y of 2x2
outputs is A^T [(G g G^T) * (B^T d B)] A for the 4x4 pixels d around it and the 3x3 weights g, where * multiplies
element by element. The gradient of g is therefore G^T [(A dy A^T) * (B^T d B)] G. B and A have elements 0, 1 and -1,
G has 1/2 as well. The 16 elements of what is transformed are kept in planes of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer

Line = Sequence[Any]
"""Vectors along one axis of a tile."""
_FLOATS = types.CPointer(types.float32)
_HALF = ir.Constant(VECTOR, [0.5] * WIDTH)


class _Transforms(Writer):
    """Writes a transform of squares of vectors: along one axis, then along the other."""

    def plus(self, x: Any, y: Any) -> Any:
        return self.builder.fadd(x, y)

    def minus(self, x: Any, y: Any) -> Any:
        return self.builder.fsub(x, y)

    def half(self, x: Any) -> Any:
        return self.builder.fmul(x, _HALF)

    def image(self, d: Line) -> Line:
        """B^T d."""
        return self.minus(d[0], d[2]), self.plus(d[1], d[2]), self.minus(d[2], d[1]), self.minus(d[1], d[3])

    def filters(self, g: Line) -> Line:
        """G g."""
        outer = self.plus(g[0], g[2])
        return g[0], self.half(self.plus(outer, g[1])), self.half(self.minus(outer, g[1])), g[2]

    def gradient(self, dy: Line) -> Line:
        """A dy."""
        return dy[0], self.plus(dy[0], dy[1]), self.minus(dy[0], dy[1]), self.builder.fneg(dy[1])

    def output(self, m: Line) -> Line:
        """A^T m."""
        return self.plus(self.plus(m[0], m[1]), m[2]), self.minus(self.minus(m[1], m[2]), m[3])

    def filters_gradient(self, m: Line) -> Line:
        """G^T m."""
        both = self.half(self.plus(m[1], m[2]))
        return self.plus(m[0], both), self.half(self.minus(m[1], m[2])), self.plus(both, m[3])

    def square(self, transform: Callable[[Line], Line], values: Sequence[Line]) -> list[Any]:
        """The transform of all columns, then of all rows, in order of rows."""
        columns = [transform(column) for column in zip(*values, strict=True)]
        return [value for row in zip(*columns, strict=True) for value in transform(row)]

    def load(self, pointer: Any, offset: Any) -> Any:
        return self.builder.load(self.vector_at(pointer, offset), align=4)

    def inside(self, first: Any, size: Any, count: int) -> list[Any]:
        """For each of `count` positions from `first` on whether it is one of 0 ... size - 1."""
        at = [self.builder.add(first, self.word(i)) for i in range(count)]
        return [self.builder.icmp_unsigned("<", one, size) for one in at]

    def pixels(self, image: Any, other: Any, place: Sequence[Any], count: int) -> list[list[Any]]:
        """Pointers to `count` x `count` pixels, to `other` where there is none.

        `place` is the first row and column, which may be negative, the image's height and width, and its channels.
        """
        h, w, height, width, channels = place
        b = self.builder
        result: list[list[Any]] = []
        columns = self.inside(w, width, count)
        for i, row_there in enumerate(self.inside(h, height, count)):
            row = b.mul(b.add(h, self.word(i)), width)
            result.append([])
            for j, column_there in enumerate(columns):
                at = b.mul(b.add(row, b.add(w, self.word(j))), channels)
                there = b.and_(row_there, column_there)
                result[-1].append(b.select(there, b.gep(image, [at]), other))
        return result

    def each_vector(self, count: Any, start: Any, body: Callable[[Any], None]) -> Any:
        """body(offset) for `count` vectors from the offset `start` on; the offset behind them."""

        def step(_: Any, at: list[Any], sums: list[Any]) -> list[Any]:
            body(at[0])
            return [self.builder.add(at[0], self.word(WIDTH))]

        self.loop(count, [], [start], step)
        return self.builder.add(start, self.builder.mul(count, self.word(WIDTH)))

    def write_planes(self, values: list[Any], target: Any, at: Any, plane: Any) -> None:
        for index, value in enumerate(values):
            offset = self.builder.add(at, self.builder.mul(plane, self.word(index)))
            self.builder.store(value, self.vector_at(target, offset), align=4)

    def read_planes(self, source: Any, at: Any, plane: Any) -> list[list[Any]]:
        """The 4x4 elements at an offset of each plane."""
        values = [self.load(source, self.builder.add(at, self.builder.mul(plane, self.word(i)))) for i in range(16)]
        return [values[row : row + 4] for row in range(0, 16, 4)]


def _written(write: Callable[..., None], signature: str) -> Any:
    """A function for kernels; `signature` has a `p` for each pointer to float32 and a `w` for each int64."""
    kinds = [_FLOATS if kind == "p" else types.int64 for kind in signature]

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        write(_Transforms(builder), *arguments)
        return context.get_dummy_value()

    def typed() -> Any:
        return types.void(*kinds), generate

    names = ", ".join(f"a{i}" for i in range(len(kinds)))
    scope: dict[str, Any] = {"typed": typed}
    # Numba takes the number of parameters from the function's own.
    exec(f"def transform(typing_context, {names}):\n    return typed()\n", scope)
    return intrinsic(scope["transform"])


def _from_image(name: str, count: int) -> Callable[..., None]:
    """Transforms `count` x `count` pixels; panels of so many vectors lie `panel` elements apart."""

    def write(  # noqa: PLR0913 -- a kernel
        t: _Transforms, image: Any, zeros: Any, h: Any, w: Any, height: Any, width: Any, channels: Any, target: Any,
        plane: Any, panels: Any, panel: Any, vectors: Any,
    ) -> None:  # fmt: skip
        pixels = t.pixels(image, zeros, (h, w, height, width, channels), count)

        def body(index: Any, at: list[Any], sums: list[Any]) -> list[Any]:
            start, to = at
            shift = t.builder.sub(to, start)

            def vector(c: Any) -> None:
                values = [[t.load(pixel, c) for pixel in row] for row in pixels]
                t.write_planes(t.square(getattr(t, name), values), target, t.builder.add(c, shift), plane)

            return [t.each_vector(vectors, start, vector), t.builder.add(to, panel)]

        t.loop(panels, [], [t.word(0), t.word(0)], body)

    return write


image_tile = _written(_from_image("image", 4), "ppwwwwwpwwww")
"""B^T d B of one tile: (image, zeros, row, column, height, width, channels, target, plane, panels, panel, vectors)."""
gradient_tile = _written(_from_image("gradient", 2), "ppwwwwwpwwww")
"""A dy A^T of one tile, of the same arguments."""


def _write_filters(t: _Transforms, source: Any, tap: Any, target: Any, plane: Any) -> None:
    values = [t.load(source, t.builder.mul(tap, t.word(i))) for i in range(9)]
    square = [values[row : row + 3] for row in range(0, 9, 3)]
    t.write_planes(t.square(t.filters, square), target, t.word(0), plane)


filter_tile = _written(_write_filters, "pwpw")
"""G g G^T of one vector of filters: (source, elements from one tap to the next, target, plane)."""


def _write_output(  # noqa: PLR0913 -- a kernel
    t: _Transforms, source: Any, plane: Any, start: Any, y: Any, rest: Any, h: Any, w: Any, height: Any, width: Any,
    channels: Any, vectors: Any, addend: Any, adds: Any, relu: Any,
) -> None:  # fmt: skip
    place = (h, w, height, width, channels)
    targets = [one for row in t.pixels(y, rest, place, 2) for one in row]
    addends = [one for row in t.pixels(addend, rest, place, 2) for one in row]
    some, rectifies = (t.builder.icmp_signed("!=", flag, t.word(0)) for flag in (adds, relu))

    def vector(c: Any) -> None:
        first = t.load(start, c)
        values = [t.plus(value, first) for value in t.square(t.output, t.read_planes(source, c, plane))]

        def added() -> list[Any]:
            return [t.plus(value, t.load(one, c)) for value, one in zip(values, addends, strict=True)]

        total = t.choose(some, added, lambda: values)
        total = t.choose(rectifies, lambda: [t.rectified(value) for value in total], lambda: total)
        for value, target in zip(total, targets, strict=True):
            t.builder.store(value, t.vector_at(target, c), align=4)

    t.each_vector(vectors, t.word(0), vector)


output_tile = _written(_write_output, "pwpppwwwwwwpww")
"""A^T m A + start (+ addend), perhaps rectified, of one tile.

Of (source, plane, start, y, scratch for pixels outside, row, column, height, width, channels, vectors, addend, adds,
relu).
"""


def _write_filters_gradient(t: _Transforms, source: Any, plane: Any, target: Any, tap: Any, accumulate: Any) -> None:
    values = t.square(t.filters_gradient, t.read_planes(source, t.word(0), plane))
    offsets = [t.builder.mul(tap, t.word(i)) for i in range(9)]

    def added() -> list[Any]:
        return [t.plus(t.load(target, at), value) for at, value in zip(offsets, values, strict=True)]

    total = t.choose(t.builder.icmp_signed("!=", accumulate, t.word(0)), added, lambda: values)
    for at, value in zip(offsets, total, strict=True):
        t.builder.store(value, t.vector_at(target, at), align=4)


filter_gradient_tile = _written(_write_filters_gradient, "pwpww")
"""target (+)= G^T m G of one vector of filters: (source, plane, target, elements between taps, accumulate)."""
