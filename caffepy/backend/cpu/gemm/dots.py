"""Products of a matrix and a few vectors, both contiguous in depth: an inner product layer's for one to four images.

    c[j, v] (+)= sum over k of w[j, k] * x[v, k]

The tile of `microkernel.py` has results in its lanes and would leave all lanes but one empty for one image; here the
lanes share the depth. What is left is the time to read the weights once.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer, ahead

ROWS = 4
"""Rows of the matrix that are read side by side."""
MAX_VECTORS = 4
"""Vectors up to which this is faster than tiles."""
_SPAN = 2
"""Vector registers of a row in each step: sums enough to hide the latency of multiply-adds."""


class _DotsWriter(Writer):
    """Writes the instructions of four rows' dots with one vector."""

    def __init__(self, builder: Any, arguments: list[Any]) -> None:
        super().__init__(builder)
        self.w, self.w_step, self.count, self.x, self.depth, self.c, self.c_step, self.accumulate = arguments

    def _row(self, row: int) -> Any:
        """Address of a row; of the first for those beyond the count."""
        there = self.builder.icmp_signed("<", self.word(row), self.count)
        index = self.builder.select(there, self.word(row), self.word(0))
        return self.builder.gep(self.w, [self.builder.mul(index, self.w_step)])

    def _step(self, rows: list[Any], sums: list[Any], begin: Any, load: Any) -> list[Any]:
        result = []
        for span in range(len(sums) // ROWS):
            at = self.builder.add(begin, self.word(span * WIDTH))
            x = load(self.vector_at(self.x, at))
            for row in range(ROWS):
                result.append(self.multiply_add(load(self.vector_at(rows[row], at)), x, sums[span * ROWS + row]))
        return result

    def _total(self, vector: Any) -> Any:
        """The sum of the lanes, halves added to halves."""
        half = WIDTH // 2
        while half:
            moved = [lane + half if lane < half else 0 for lane in range(WIDTH)]
            mask = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), moved)
            vector = self.builder.fadd(vector, self.builder.shuffle_vector(vector, vector, mask))
            half //= 2
        return self.builder.extract_element(vector, ir.Constant(ir.IntType(32), 0))

    def write(self) -> None:
        builder = self.builder
        rows = [self._row(row) for row in range(ROWS)]
        zeros = [ir.Constant(VECTOR, [0.0] * WIDTH)] * (ROWS * _SPAN)
        step = _SPAN * WIDTH

        def whole(index: Any, _: list[Any], sums: list[Any]) -> list[Any]:
            begin = builder.mul(index, self.word(step))
            return self._step(rows, sums, begin, lambda address: builder.load(address, align=4))

        steps = builder.sdiv(self.depth, self.word(step))
        sums = self.loop(steps, zeros, [], whole)
        sums = [builder.fadd(sums[row], sums[ROWS + row]) for row in range(ROWS)]

        def rest(index: Any, _: list[Any], sums: list[Any]) -> list[Any]:
            begin = builder.add(builder.mul(steps, self.word(step)), builder.mul(index, self.word(WIDTH)))
            mask = self.lanes(builder.sub(self.depth, begin))
            return self._step(rows, sums, begin, lambda address: self.masked_load(address, mask))

        left = builder.sub(self.depth, builder.mul(steps, self.word(step)))
        count = builder.sdiv(builder.add(left, self.word(WIDTH - 1)), self.word(WIDTH))
        for row, total in enumerate(self.loop(count, sums, [], rest)):
            with builder.if_then(builder.icmp_signed("<", self.word(row), self.count)):
                self._store(row, self._total(total))

    def _store(self, row: int, total: Any) -> None:
        address = self.builder.gep(self.c, [self.builder.mul(self.word(row), self.c_step)])
        adds = self.builder.icmp_signed("!=", self.accumulate, self.word(0))
        zero = ir.Constant(ir.FloatType(), 0.0)
        [before] = self.choose(adds, lambda: [self.builder.load(address, align=4)], lambda: [zero])
        self.builder.store(self.builder.fadd(before, total), address, align=4)


@intrinsic
def _four_dots(  # noqa: PLR0913 -- a kernel
    typing_context: Any, w: Any, w_step: Any, count: Any, x: Any, depth: Any, c: Any, c_step: Any, accumulate: Any
) -> Any:
    """c[r * c_step] (+)= the dot of row r and x, for up to four rows."""
    numbers, word = types.CPointer(types.float32), types.int64

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _DotsWriter(builder, list(arguments)).write()
        return context.get_dummy_value()

    return types.void(numbers, word, word, numbers, word, numbers, word, word), generate


@kernel
def dots(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, w: Floats, w_step: Int, rows: Int, x: Floats, x_step: Int, vectors: Int, depth: Int,
    c: Floats, c_row: Int, c_vector: Int, accumulate: Int, items: Int,
) -> None:  # fmt: skip
    """c (+)= w @ x transposed. Items are parts of the rows."""
    groups = (rows + 3) // 4
    for item in range(begin, end):
        for group in range(item * groups // items, (item + 1) * groups // items):
            row = 4 * group
            for v in range(vectors):
                _four_dots(
                    ahead(w, row * w_step), w_step, min(4, rows - row), ahead(x, v * x_step), depth,
                    ahead(c, row * c_row + v * c_vector), c_row, accumulate,
                )  # fmt: skip
