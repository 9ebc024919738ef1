"""Vector instructions for kernels where numba's vectoriser does not suffice: a small LLVM IR writer."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic

_FEATURES = llvmlite.binding.get_host_cpu_features()
WIDTH = 16 if _FEATURES.get("avx512f", False) else 8 if _FEATURES.get("avx", False) else 4
"""Elements of a vector."""
WORD = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
INDICES = ir.VectorType(ir.IntType(32), WIDTH)
NAME = f"v{WIDTH}f32"
_POINTER_NAME = "p0" if llvmlite.binding.llvm_version_info[0] >= 15 else f"p0{NAME}"


class Writer:
    """Emits vector instructions; vectors have `width` elements (default WIDTH)."""

    def __init__(self, builder: Any, width: int = WIDTH) -> None:
        self.builder, self.width = builder, width
        self.vector = ir.VectorType(ir.FloatType(), width)
        self.index_vector, self.bit_vector = (ir.VectorType(ir.IntType(bits), width) for bits in (32, 1))
        self.name = f"v{width}f32"
        self._pointer_name = "p0" if _POINTER_NAME == "p0" else f"p0{self.name}"

    def vector_at(self, pointer: Any, offset: Any) -> Any:
        """Return a pointer to the vector at `offset`."""
        address = self.builder.gep(pointer, [offset])
        return self.builder.bitcast(address, self.vector.as_pointer())

    def table(self, pointer: Any, index: Any) -> Any:
        """Load entry `index` of an int64 table."""
        return self.builder.load(self.builder.gep(pointer, [index]))

    def word(self, value: int) -> Any:
        return ir.Constant(WORD, value)

    def splat(self, scalar: Any) -> Any:
        """Broadcast one number (float32 or int32) to all lanes."""
        zeros = ir.Constant(self.index_vector, [0] * self.width)
        undefined = ir.Constant(ir.VectorType(scalar.type, self.width), ir.Undefined)
        first = self.builder.insert_element(undefined, scalar, ir.Constant(ir.IntType(32), 0))
        return self.builder.shuffle_vector(first, undefined, zeros)

    def opaque(self, value: Any) -> Any:
        """Return the word behind an optimisation barrier, so that LLVM does not hoist its uses out of a loop.

        LLVM would compute all loop invariants ahead of the loop and spill what exceeds the registers.
        """
        return self.builder.asm(ir.FunctionType(value.type, [value.type]), "", "=r,0", [value], False)

    def lanes(self, wanted: Any) -> Any:
        """Return a mask of the first `wanted` lanes."""
        counts = self.splat(self.builder.trunc(wanted, ir.IntType(32)))
        return self.builder.icmp_signed("<", ir.Constant(self.index_vector, list(range(self.width))), counts)

    def call(self, name: str, kind: Any, arguments: list[Any]) -> Any:
        module = self.builder.module
        function = module.globals.get(name) or ir.Function(module, kind, name)
        return self.builder.call(function, arguments)

    def multiply_add(self, x: Any, y: Any, total: Any) -> Any:
        """Return x * y + total, fused."""
        kind = ir.FunctionType(self.vector, [self.vector] * 3)
        return self.call(f"llvm.fmuladd.{self.name}", kind, [x, y, total])

    def rectified(self, value: Any) -> Any:
        """Return max(value, 0); NaN stays NaN."""
        zero = ir.Constant(self.vector, [0.0] * self.width)
        return self.builder.select(self.builder.fcmp_ordered("<", value, zero), zero, value)

    def masked_load(self, address: Any, mask: Any) -> Any:
        """Load the masked lanes of a vector; other lanes are zero."""
        pointer = self.vector.as_pointer()
        kind = ir.FunctionType(self.vector, [pointer, ir.IntType(32), self.bit_vector, self.vector])
        zero = ir.Constant(self.vector, [0.0] * self.width)
        arguments = [address, ir.Constant(ir.IntType(32), 4), mask, zero]
        return self.call(f"llvm.masked.load.{self.name}.{self._pointer_name}", kind, arguments)

    def masked_store(self, value: Any, address: Any, mask: Any) -> None:
        """Store the masked lanes."""
        pointer = self.vector.as_pointer()
        kind = ir.FunctionType(ir.VoidType(), [self.vector, pointer, ir.IntType(32), self.bit_vector])
        arguments = [value, address, ir.Constant(ir.IntType(32), 4), mask]
        self.call(f"llvm.masked.store.{self.name}.{self._pointer_name}", kind, arguments)

    def store(self, value: Any, address: Any, wanted: Any, mask: Any) -> None:
        """Store the first `wanted` lanes, given by `mask`; whole vectors by a plain store, which is faster."""
        whole = self.builder.icmp_signed(">=", wanted, self.word(self.width))
        with self.builder.if_else(whole) as (plain, part):
            with plain:
                self.builder.store(value, address, align=4)
            with part:
                if WIDTH == 16:
                    self.masked_store(value, address, mask)
                else:
                    self._store_parts(value, address, wanted)

    def _store_parts(self, value: Any, address: Any, wanted: Any) -> None:
        """As `masked_store`, by partial stores of a half vector, a quarter, ..., for each bit of `wanted`.

        Without AVX-512 a masked store takes dozens of instructions.
        """
        builder, lanes = self.builder, self.width // 2
        place = builder.bitcast(address, ir.FloatType().as_pointer())
        while lanes:
            parts = []
            for first in (0, lanes):
                taken = ir.Constant(ir.VectorType(ir.IntType(32), lanes), list(range(first, first + lanes)))
                parts.append(builder.shuffle_vector(value, ir.Constant(value.type, ir.Undefined), taken))
            wants = builder.icmp_signed("!=", builder.and_(wanted, self.word(lanes)), self.word(0))
            with builder.if_then(wants):
                builder.store(parts[0], builder.bitcast(place, parts[0].type.as_pointer()), align=4)
            value = builder.select(wants, parts[1], parts[0])
            place = builder.gep(place, [builder.select(wants, self.word(lanes), self.word(0))])
            lanes //= 2

    def prefetch(self, pointer: Any, offset: int) -> None:
        """Prefetch the cache line `offset` elements after `pointer` into L1, if the address is valid."""
        number, octet = ir.IntType(32), ir.IntType(8).as_pointer()
        address = self.builder.bitcast(self.builder.gep(pointer, [self.word(offset)]), octet)
        kind = ir.FunctionType(ir.VoidType(), [octet, number, number, number])
        name = "llvm.prefetch.p0" if _POINTER_NAME == "p0" else "llvm.prefetch.p0i8"
        self.call(name, kind, [address, number(0), number(3), number(1)])

    def choose(self, condition: Any, yes: Callable[[], list[Any]], no: Callable[[], list[Any]]) -> list[Any]:
        """Emit yes() if condition else no()."""
        with self.builder.if_else(condition) as (then, otherwise):
            with then:
                first, first_block = yes(), self.builder.block
            with otherwise:
                second, second_block = no(), self.builder.block
        merged = [self.builder.phi(value.type) for value in first]
        for phi, value, other in zip(merged, first, second, strict=True):
            phi.add_incoming(value, first_block)
            phi.add_incoming(other, second_block)
        return merged

    def loop(self, count: Any, sums: list[Any], extra: list[Any], body: Callable[..., Any]) -> list[Any]:
        """Emit for index in range(count): sums, extra = body(index, extra, sums), with all values in registers."""
        builder = self.builder
        before = builder.block
        head, inside, done = (builder.append_basic_block(name) for name in ("tile.head", "tile.body", "tile.done"))
        builder.branch(head)
        builder.position_at_end(head)
        index = builder.phi(WORD)
        index.add_incoming(self.word(0), before)
        carried = [builder.phi(value.type) for value in sums + extra]
        for phi, value in zip(carried, sums + extra, strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", index, count), inside, done)
        builder.position_at_end(inside)
        result = body(index, carried[len(sums) :], carried[: len(sums)])
        index.add_incoming(builder.add(index, self.word(1)), builder.block)
        for phi, value in zip(carried, result, strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(done)
        return carried[: len(sums)]


def _shift(element: types.Type) -> Any:
    pointer = types.CPointer(element)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.gep(arguments[0], [arguments[1]])

    def typed(typing_context: Any, address: Any, offset: Any) -> Any:
        return pointer(pointer, types.int64), generate

    return intrinsic(typed)


ahead = _shift(types.float32)
"""Return the float32 pointer advanced by `offset`."""
ahead_int = _shift(types.int32)
"""Return the int32 pointer advanced by `offset`."""
table_at = _shift(types.int64)
"""Return the int64 pointer advanced by `offset`."""


@intrinsic
def fetch(typing_context: Any, address: Any) -> Any:
    """Prefetch the cache line at an address into L1, if the address is valid."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        Writer(builder).prefetch(arguments[0], 0)
        return context.get_dummy_value()

    return types.void(types.CPointer(types.float32)), generate


@intrinsic
def copy_vectors(typing_context: Any, source: Any, target: Any, vectors: Any) -> Any:
    """Copy 1, 2 or 3 vectors."""
    pointer = types.CPointer(types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        for vector in range(3):
            with builder.if_then(builder.icmp_signed("<", ir.Constant(WORD, vector), arguments[2])):
                offset = ir.Constant(WORD, vector * WIDTH)
                source, target = (
                    builder.bitcast(builder.gep(arguments[i], [offset]), VECTOR.as_pointer()) for i in (0, 1)
                )
                builder.store(builder.load(source, align=4), target, align=4)
        return context.get_dummy_value()

    return types.void(pointer, pointer, types.int64), generate


def _transposed_square(builder: Any, rows: list[Any]) -> list[Any]:
    """Transpose a square of vectors: squares of 2, 4, ... elements by shuffles of two vectors."""
    size = 1
    while size < WIDTH:
        result = list(rows)
        for at in (at for at in range(WIDTH) if not at & size):
            low, high = rows[at], rows[at + size]
            takes = [[lane if lane & size == 0 else lane + WIDTH - size for lane in range(WIDTH)]]
            takes.append([lane + WIDTH if lane & size else lane + size for lane in range(WIDTH)])
            for place, lanes in zip((at, at + size), takes, strict=True):
                result[place] = builder.shuffle_vector(low, high, ir.Constant(INDICES, lanes))
        rows, size = result, 2 * size
    return rows


@intrinsic
def transpose_square(typing_context: Any, source: Any, source_step: Any, target: Any, target_step: Any) -> Any:
    """Transpose WIDTH vectors, `source_step` apart, into rows `target_step` apart."""
    pointer = types.CPointer(types.float32)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        writer = Writer(builder)
        source, source_step, target, target_step = arguments
        offsets = [writer.word(i) for i in range(WIDTH)]
        rows = [builder.load(writer.vector_at(source, builder.mul(i, source_step)), align=4) for i in offsets]
        for i, column in zip(offsets, _transposed_square(builder, rows), strict=True):
            builder.store(column, writer.vector_at(target, builder.mul(i, target_step)), align=4)
        return context.get_dummy_value()

    return types.void(pointer, types.int64, pointer, types.int64), generate


def _extreme(comparison: str) -> Any:
    """Return an intrinsic for the larger (">") or smaller ("<") float32, NaN if either is NaN, without a branch."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        first, second = arguments
        # One instruction if the second is a number; if it is NaN, the ordered comparison is false and selects it.
        better = builder.or_(
            builder.fcmp_ordered(comparison, first, second), builder.fcmp_unordered("uno", first, first)
        )
        return builder.select(better, first, second)

    def typed(typing_context: Any, first: Any, second: Any) -> Any:
        return types.float32(types.float32, types.float32), generate

    return intrinsic(typed)


larger_of = _extreme(">")
smaller_of = _extreme("<")


@intrinsic
def select(typing_context: Any, condition: Any, yes: Any, no: Any) -> Any:
    """Select one of two float32, both evaluated, without a branch."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.select(arguments[0], arguments[1], arguments[2])

    return types.float32(types.boolean, types.float32, types.float32), generate
