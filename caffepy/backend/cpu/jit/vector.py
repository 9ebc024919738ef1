"""Vector instructions for kernels where numba's vectoriser does not suffice: a small LLVM IR writer.

The intrinsics give compiled code typed pointers, bit casts and C library calls.

exp, log1p and tanh of float32 are inline and without branches, so that loops over them are vectorised. The C library's
functions take 4 ns an element (tanh 18), more than the rest of a Sigmoid layer or a cross entropy. Range reduction and
polynomials are those of Cephes (Moshier 1989, `expf.c`, `logf.c` and `tanhf.c`). The error is at most 2 ulp.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ
from typing import Any

import llvmlite.binding
import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils

# -- intrinsics ----------------------------------------------------------------------------------------


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Typed wrapper of `numba.extending.intrinsic`."""
    compiled: Callable[..., Any] = numba.extending.intrinsic(function)
    return compiled


KINDS = {
    "p": types.CPointer(types.float32),
    "t": types.CPointer(types.int64),
    "i": types.CPointer(types.int32),
    "w": types.int64,
}
"""Meaning of a letter in `emitted`: a pointer to float32, a table of int64, a pointer to int32, an int64."""


def emitted(kinds: Sequence[str | types.Type], write: Callable[..., None]) -> Callable[..., Any]:
    """Return a function for kernels whose instructions `write` emits; it returns nothing.

    Args:
        kinds: a letter of `KINDS`, or numba's type, for each argument.
        write: takes the LLVM IR builder and the arguments.
    """
    signature = types.void(*(KINDS[kind] if isinstance(kind, str) else kind for kind in kinds))

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        write(builder, *arguments)
        return context.get_dummy_value()

    def typed(typing_context: Any, *arguments: Any) -> Any:
        return signature, generate

    # Numba takes the number of arguments from the function's own signature.
    names = ("typing_context", *(f"argument{i}" for i in range(len(kinds))))
    one_each = [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
    typed.__signature__ = Signature(one_each)  # type: ignore[attr-defined]
    return intrinsic(typed)


def _pointer_from_integer(element: types.Type) -> Any:
    pointer = types.CPointer(element)

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.inttoptr(arguments[0], context.get_value_type(pointer))

    def typed(typing_context: Any, address: Any) -> Any:
        return pointer(types.int64), generate

    return intrinsic(typed)


floats = _pointer_from_integer(types.float32)
doubles = _pointer_from_integer(types.float64)
ints = _pointer_from_integer(types.int32)
words = _pointer_from_integer(types.int64)
octets = _pointer_from_integer(types.uint8)


@intrinsic
def as_double(typing_context: Any, bits: Any) -> Any:
    """Return the float64 with the bits of an int64."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def copy_bytes(typing_context: Any, destination: Any, source: Any, count: Any) -> Any:
    """Call C's memcpy on addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at, size = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, cgutils.voidptr_t), builder.inttoptr(at, cgutils.voidptr_t), size, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def read_at(typing_context: Any, descriptor: Any, destination: Any, count: Any, offset: Any) -> Any:
    """Call POSIX's pread with an address: bytes read, fewer than `count` at the file's end, -1 on error."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(word, [number, cgutils.voidptr_t, word, word])
        pread = cgutils.get_or_insert_function(builder.module, kind, "pread")
        file, to, size, at = arguments
        return builder.call(pread, [builder.trunc(file, number), builder.inttoptr(to, cgutils.voidptr_t), size, at])

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


_MAP_FIXED = 0x10


@intrinsic
def map_zeros(typing_context: Any, address: Any, size: Any) -> Any:
    """Call POSIX's mmap to replace pages at an address with read-only zeros; -1 on error."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(word, [word, word, number, number, number, word])
        mmap = cgutils.get_or_insert_function(builder.module, kind, "mmap")
        settings = (PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS | _MAP_FIXED, -1)
        return builder.call(mmap, [*arguments, *(number(setting) for setting in settings), word(0)])

    return types.int64(types.int64, types.int64), generate


@intrinsic
def set_handler(typing_context: Any, signal: Any, action: Any) -> Any:
    """Call POSIX's sigaction: install the `struct sigaction` at an address for a signal; -1 on error."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word, number = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(number, [number, word, word])
        sigaction = cgutils.get_or_insert_function(builder.module, kind, "sigaction")
        return builder.call(sigaction, [*arguments, word(0)])

    return types.int32(types.int32, types.int64), generate


@intrinsic
def kept_word(typing_context: Any) -> Any:
    """Return the address of a word owned by the compiled function, initially zero."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kept = builder.module.globals.get("kept_word")
        if kept is None:
            kept = cgutils.add_global_variable(builder.module, word, "kept_word")
            kept.linkage, kept.initializer = "internal", word(0)
        return builder.ptrtoint(kept, word)

    return types.int64(), generate


# -- vectors -------------------------------------------------------------------------------------------

_FEATURES = llvmlite.binding.get_host_cpu_features()
WIDTH = 16 if _FEATURES.get("avx512f", False) else 8 if _FEATURES.get("avx", False) else 4
"""Elements of a vector."""
WORD = ir.IntType(64)
VECTOR = ir.VectorType(ir.FloatType(), WIDTH)
INDICES = ir.VectorType(ir.IntType(32), WIDTH)
NAME = f"v{WIDTH}f32"
# The names of intrinsics contain the types of their arguments; from version 15 on LLVM's pointers have no type.
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
        # LLVM's form of a broadcast; of a number in memory it makes one load instruction.
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
        """As `masked_store`, by partial stores of a half vector, a quarter, ..., for each bit of `wanted`."""
        # Without AVX-512 a masked store takes dozens of instructions.
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
                # The block at the end of the branch, not at its beginning: yes() may have emitted blocks of its own.
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
        # The values are phis, never memory: that is what keeps a tile's sums in registers (see microkernel.py).
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


# -- exp, log1p and tanh -------------------------------------------------------------------------------

_FLOAT, _INT = ir.FloatType(), ir.IntType(32)
_LOG2_E = 1.4426950408889634
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.1219444400547e-4
"""log(2) as a sum of a short constant, whose product with a small integer is exact, and the remainder."""
_EXP = (1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1)
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_TANH = (-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1)
_SMALL = 0.625
"""Below it tanh(x) is a polynomial, because 1 - 2 / (e^2x + 1) would cancel."""
_LEAST, _MOST = -104.0, 89.0
"""Inputs from which on e^x is 0 and infinite."""
_ROOT_HALF = 0x3F3504F3
"""The bits of sqrt(1/2)."""
_NAN, _INFINITE = float("nan"), float("inf")


def _number(value: float) -> Any:
    return ir.Constant(_FLOAT, value)


def _call(builder: Any, name: str, *arguments: Any) -> Any:
    function = builder.module.globals.get(name) or ir.Function(
        builder.module, ir.FunctionType(_FLOAT, [_FLOAT] * len(arguments)), name
    )
    return builder.call(function, arguments)


def _multiply_add(builder: Any, x: Any, y: Any, z: Any) -> Any:
    return _call(builder, "llvm.fmuladd.f32", x, y, z)


def _polynomial(builder: Any, x: Any, coefficients: Sequence[float]) -> Any:
    total = _number(coefficients[0])
    for coefficient in coefficients[1:]:
        total = _multiply_add(builder, total, x, _number(coefficient))
    return total


def _power_of_two(builder: Any, exponent: Any) -> Any:
    bits = builder.shl(builder.add(exponent, _INT(127)), _INT(23))
    return builder.bitcast(bits, _FLOAT)


def _write_exp(builder: Any, x: Any) -> Any:
    """2^n * e^r with x = n * log(2) + r; 2^n as two factors, because it may overflow or be subnormal."""
    # Limited first, because the exponent of a far larger number does not fit an int32. NaN takes a limit here, and is
    # restored at the end.
    inside = builder.select(builder.fcmp_ordered("<", x, _number(_MOST)), x, _number(_MOST))
    inside = builder.select(builder.fcmp_ordered(">", inside, _number(_LEAST)), inside, _number(_LEAST))
    n = _call(builder, "llvm.rint.f32", builder.fmul(inside, _number(_LOG2_E)))
    # The product with the short constant is exact, so the subtraction loses nothing; the remainder corrects it.
    r = _multiply_add(builder, n, _number(-_LN2_HIGH), inside)
    r = _multiply_add(builder, n, _number(-_LN2_LOW), r)
    tail = _multiply_add(builder, _polynomial(builder, r, _EXP), builder.fmul(r, r), r)
    whole = builder.fptosi(n, _INT)
    half = builder.ashr(whole, _INT(1))
    result = builder.fmul(builder.fadd(tail, _number(1)), _power_of_two(builder, half))
    result = builder.fmul(result, _power_of_two(builder, builder.sub(whole, half)))
    return builder.select(builder.fcmp_unordered("uno", x, x), x, result)


def _write_tanh(builder: Any, x: Any) -> Any:
    """|x| + |x|^3 P(x^2) for small |x|, else 1 - 2 / (e^(2|x|) + 1); with the sign of x."""
    square, size = builder.fmul(x, x), _call(builder, "llvm.fabs.f32", x)
    near = _multiply_add(builder, builder.fmul(square, size), _polynomial(builder, square, _TANH), size)
    power = builder.fadd(_write_exp(builder, builder.fadd(size, size)), _number(1))
    far = builder.fsub(_number(1), builder.fdiv(_number(2), power))
    result = builder.select(builder.fcmp_ordered("<", size, _number(_SMALL)), near, far)
    # Both branches compute with |x|; the sign at the end also keeps -0.
    return _call(builder, "llvm.copysign.f32", result, x)


def _write_log1p(builder: Any, x: Any) -> Any:
    """log(u) + (x - (u - 1)) / u with u the rounded 1 + x; u = 2^n * (1 + f), 1 + f around 1."""
    u = builder.fadd(x, _number(1))
    bits = builder.bitcast(u, _INT)
    n = builder.ashr(builder.sub(bits, _INT(_ROOT_HALF)), _INT(23))
    f = builder.fsub(builder.bitcast(builder.sub(bits, builder.shl(n, _INT(23))), _FLOAT), _number(1))
    n = builder.sitofp(n, _FLOAT)
    square = builder.fmul(f, f)
    # The rounding of 1 + x loses this part: for a small x nearly all of it.
    lost = builder.fdiv(builder.fsub(x, builder.fsub(u, _number(1))), u)
    tail = _multiply_add(builder, builder.fmul(f, square), _polynomial(builder, f, _LOG), lost)
    tail = _multiply_add(builder, n, _number(_LN2_LOW), tail)
    tail = _multiply_add(builder, square, _number(-0.5), tail)
    result = _multiply_add(builder, n, _number(_LN2_HIGH), builder.fadd(f, tail))
    return _outside(builder, x, result)


def _outside(builder: Any, x: Any, result: Any) -> Any:
    """Handle log(1 + x) for x <= -1 and for infinity."""
    least, most = _number(-1), _number(_INFINITE)
    result = builder.select(builder.fcmp_ordered(">", x, least), result, _number(_NAN))
    result = builder.select(builder.fcmp_ordered("==", x, least), _number(-_INFINITE), result)
    return builder.select(builder.fcmp_ordered("==", x, most), most, result)


def _function(write: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return write(builder, arguments[0])

    def typed(typing_context: Any, x: Any) -> Any:
        return types.float32(types.float32), generate

    return intrinsic(typed)


exponential, logarithm_plus_one = _function(_write_exp), _function(_write_log1p)
hyperbolic_tangent = _function(_write_tanh)
round_down = _function(lambda builder, x: _call(builder, "llvm.floor.f32", x))
"""floor as a float32; that of `math` returns an integer."""
