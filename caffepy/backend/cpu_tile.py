"""The innermost loop of matrix products and convolutions: one tile of the result held in vector registers.

    c[r, j] = start[r, j] + sum over o, i of a[a_rows[r] + a_outer[o] + i * a_inner] * b[b_outer[o] + i * b_inner + j]

A row's number of `a` is spread over a vector, which multiplies vectors of `b`. Because rows, outer and inner steps may lie
anywhere, the same loop computes matrix products, convolutions straight from the image (no im2col) and their gradients.
Numba cannot be brought to keep a tile in registers, so the loop is written in LLVM's own language; it is therefore good
for every processor that numba knows, and 80 to 90 % of the peak on those with AVX2.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from caffepy.backend.cpu_runtime import device_function

WIDTH = 8 if llvmlite.binding.get_host_cpu_features().get("avx", False) else 4
"""Numbers in a vector."""
ROWS = {1: 8, 2: 6, 3: 4}
"""Rows of a tile, given its vectors: 12 sums (8 for the narrow one) leave room in 16 registers for the factors."""

_WORD = ir.IntType(64)
_FLOAT = ir.FloatType()
_VECTOR = ir.VectorType(_FLOAT, WIDTH)
_NAME = f"v{WIDTH}f32"
_POINTER_NAME = "p0" if llvmlite.binding.llvm_version_info[0] >= 15 else f"p0{_NAME}"
_MASK = ir.VectorType(ir.IntType(1), WIDTH)


class _Writer:
    """Writes the tile's instructions."""

    def __init__(self, builder: Any, vectors: int, arguments: list[Any]) -> None:
        self.builder = builder
        self.rows = ROWS[vectors]
        self.vectors = vectors
        (
            self.a, self.a_rows, self.a_outer, self.a_inner, self.b, self.b_outer, self.b_inner, self.outer, self.inner,
            self.start, self.keep, self.c, self.c_rows, self.count, self.last,
        ) = arguments  # fmt: skip

    def _vector_at(self, pointer: Any, offset: Any) -> Any:
        place = self.builder.gep(pointer, [offset])
        return self.builder.bitcast(place, _VECTOR.as_pointer())

    def _table(self, pointer: Any, index: Any) -> Any:
        return self.builder.load(self.builder.gep(pointer, [index]))

    def _word(self, value: int) -> Any:
        return ir.Constant(_WORD, value)

    def _splat(self, scalar: Any) -> Any:
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), WIDTH), [0] * WIDTH)
        undefined = ir.Constant(_VECTOR, ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, undefined, zeros)

    def _lanes(self) -> Any:
        """Which lanes of the last vector are wanted."""
        words = ir.VectorType(ir.IntType(32), WIDTH)
        count = self.builder.trunc(self.last, ir.IntType(32))
        undefined = ir.Constant(words, ir.Undefined)
        first = self.builder.insert_element(undefined, count, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(words, [0] * WIDTH)
        counts = self.builder.shuffle_vector(first, undefined, zeros)
        return self.builder.icmp_signed("<", ir.Constant(words, list(range(WIDTH))), counts)

    def _call(self, name: str, kind: Any, arguments: list[Any]) -> Any:
        """Call one of LLVM's intrinsic functions."""
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, arguments)

    def _masked_load(self, place: Any, mask: Any) -> Any:
        pointer = _VECTOR.as_pointer()
        kind = ir.FunctionType(_VECTOR, [pointer, ir.IntType(32), _MASK, _VECTOR])
        zero = ir.Constant(_VECTOR, [0.0] * WIDTH)
        arguments = [place, ir.Constant(ir.IntType(32), 4), mask, zero]
        return self._call(f"llvm.masked.load.{_NAME}.{_POINTER_NAME}", kind, arguments)

    def _masked_store(self, value: Any, place: Any, mask: Any) -> None:
        pointer = _VECTOR.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, pointer, ir.IntType(32), _MASK])
        arguments = [value, place, ir.Constant(ir.IntType(32), 4), mask]
        self._call(f"llvm.masked.store.{_NAME}.{_POINTER_NAME}", kind, arguments)

    def _multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        kind = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
        return self._call(f"llvm.fmuladd.{_NAME}", kind, [x, y, total])

    def _starts(self, mask: Any) -> list[Any]:
        sums = []
        for row in range(self.rows):
            # Rows beyond the count read what the first row starts from: something that is there.
            there = self.builder.icmp_signed("<", self._word(row), self.count)
            index = self.builder.select(there, self._word(row), self._word(0))
            offset = self.builder.mul(self.keep, self._table(self.c_rows, index))
            for vector in range(self.vectors):
                place = self._vector_at(self.start, self.builder.add(offset, self._word(vector * WIDTH)))
                if vector == self.vectors - 1:
                    sums.append(self._masked_load(place, mask))
                else:
                    sums.append(self.builder.load(place, align=4))
        return sums

    def _step(self, a_places: list[Any], a_at: Any, b_at: Any, sums: list[Any]) -> list[Any]:
        columns = [
            self.builder.load(self._vector_at(self.b, self.builder.add(b_at, self._word(v * WIDTH))), align=4)
            for v in range(self.vectors)
        ]
        result = []
        for row in range(self.rows):
            factor = self._splat(self.builder.load(self.builder.gep(a_places[row], [a_at]), align=4))
            for vector in range(self.vectors):
                result.append(self._multiply_add(factor, columns[vector], sums[row * self.vectors + vector]))
        return result

    def _loop(self, count: Any, sums: list[Any], extra: list[Any], body: Callable[..., Any]) -> list[Any]:
        """for index in range(count): sums, extra = body(index, extra, sums), with everything in registers."""
        builder = self.builder
        before = builder.block
        head, inside, done = (builder.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.done"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(_WORD)
        index.add_incoming(self._word(0), before)
        carried = [builder.phi(value.type) for value in sums + extra]
        for phi, value in zip(carried, sums + extra, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, count), inside, done)
        builder.position_at_end(inside)
        result = body(index, carried[len(sums) :], carried[: len(sums)])
        index.add_incoming(builder.add(index, self._word(1)), builder.block)
        for phi, value in zip(carried, result, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        return carried[: len(sums)]

    def _inner(self, places: list[Any]) -> Callable[..., Any]:
        def body(index: Any, _: list[Any], sums: list[Any]) -> list[Any]:
            at = [self._table(self.a_outer, index), self._table(self.b_outer, index)]

            def step(_: Any, at: list[Any], inside: list[Any]) -> list[Any]:
                result = self._step(places, at[0], at[1], inside)
                return [*result, self.builder.add(at[0], self.a_inner), self.builder.add(at[1], self.b_inner)]

            return self._loop(self.inner, sums, at, step)

        return body

    def _store(self, row: int, sums: list[Any], mask: Any) -> None:
        offset = self._table(self.c_rows, self._word(row))
        for vector in range(self.vectors - 1):
            place = self._vector_at(self.c, self.builder.add(offset, self._word(vector * WIDTH)))
            self.builder.store(sums[row * self.vectors + vector], place, align=4)
        last = self._vector_at(self.c, self.builder.add(offset, self._word((self.vectors - 1) * WIDTH)))
        value = sums[(row + 1) * self.vectors - 1]
        full = self.builder.icmp_signed("==", self.last, self._word(WIDTH))
        with self.builder.if_else(full) as (whole, part):
            with whole:
                self.builder.store(value, last, align=4)
            with part:
                self._masked_store(value, last, mask)

    def write(self) -> None:
        """The whole tile."""
        mask = self._lanes()
        places = [self.builder.gep(self.a, [self._table(self.a_rows, self._word(row))]) for row in range(self.rows)]
        sums = self._loop(self.outer, self._starts(mask), [], self._inner(places))
        for row in range(self.rows):
            with self.builder.if_then(self.builder.icmp_signed("<", self._word(row), self.count)):
                self._store(row, sums, mask)


def _tile(vectors: int) -> Any:
    numbers, table, word = types.CPointer(types.float32), types.CPointer(types.int64), types.int64
    signature = types.void(
        numbers, table, table, word, numbers, table, word, word, word, numbers, word, numbers, table, word, word
    )

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _Writer(builder, vectors, list(arguments)).write()
        return context.get_dummy_value()

    def typed(
        typing_context: Any, a: Any, a_rows: Any, a_outer: Any, a_inner: Any, b: Any, b_outer: Any, b_inner: Any,
        outer: Any, inner: Any, start: Any, keep: Any, c: Any, c_rows: Any, count: Any, last: Any,
    ) -> Any:  # fmt: skip
        return signature, generate

    return intrinsic(typed)


tile1, tile2, tile3 = _tile(1), _tile(2), _tile(3)
"""Tiles of 1, 2 and 3 vectors. Tables are int64; `start` is added to c's row offset times `keep` (0 or 1), so that it is
either one row for all (zeros, bias) or c itself; `count` rows are written, and `last` lanes of the last vector."""


def _shift(element: types.Type) -> Any:
    pointer = types.CPointer(element)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    def typed(typing_context: Any, place: Any, offset: Any) -> Any:
        return pointer(pointer, types.int64), generate

    return intrinsic(typed)


ahead = _shift(types.float32)
"""The float32 `offset` elements further."""
table_at = _shift(types.int64)
"""The int64 `offset` elements further."""


@intrinsic
def copy_vectors(typing_context: Any, source: Any, target: Any, vectors: Any) -> Any:
    """Copy 1, 2 or 3 vectors."""
    pointer = types.CPointer(types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for vector in range(3):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(_WORD, vector), arguments[2])):
                offset = ir.Constant(_WORD, vector * WIDTH)
                source, target = (
                    builder.bitcast(builder.gep(arguments[i], [offset]), _VECTOR.as_pointer()) for i in (0, 1)
                )
                builder.store(builder.load(source, align=4), target, align=4)
        return context.get_dummy_value()

    return types.void(pointer, pointer, types.int64), generate


@device_function
def tile(
    vectors: Any, a: Any, a_rows: Any, a_outer: Any, a_inner: Any, b: Any, b_outer: Any, b_inner: Any, outer: Any,
    inner: Any, start: Any, keep: Any, c: Any, c_rows: Any, count: Any, last: Any,
) -> None:  # fmt: skip
    """A tile of 1, 2 or 3 vectors."""
    if vectors == 2:
        tile2(a, a_rows, a_outer, a_inner, b, b_outer, b_inner, outer, inner, start, keep, c, c_rows, count, last)
    elif vectors == 3:
        tile3(a, a_rows, a_outer, a_inner, b, b_outer, b_inner, outer, inner, start, keep, c, c_rows, count, last)
    else:
        tile1(a, a_rows, a_outer, a_inner, b, b_outer, b_inner, outer, inner, start, keep, c, c_rows, count, last)
