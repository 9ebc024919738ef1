"""What the kernels do with one vector of numbers, in LLVM's language, and how their loops around it are written.

Arrays are flat and seen as rows of `period` numbers, a whole number of pixels and of vectors, so that a column always
belongs to the same channel. The array may end within a row: its last vector may be a part of one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import llvmlite.binding
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.intrinsics import intrinsic

LANES = 16
"""Numbers in a step; LLVM makes two vectors of eight of them where there are none of sixteen."""

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)
_INDICES = ir.VectorType(ir.IntType(32), LANES)
_WORD = ir.IntType(64)
_POINTER = "p0" if llvmlite.binding.llvm_version_info[0] >= 15 else f"p0v{LANES}f32"
_CONTRACT = ("contract",)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


class Step:
    """Writes instructions on vectors at offsets of arrays.

    Args:
        builder: of the function.
        count: how many lanes there are, a value of LLVM's; None: all.
    """

    def __init__(self, builder: Any, count: Any | None) -> None:
        self.builder = builder
        self._mask = None if count is None else self._first(count)

    def _first(self, count: Any) -> Any:
        narrow = self.builder.trunc(count, ir.IntType(32))
        empty = ir.Constant(_INDICES, ir.Undefined)
        one = self.builder.insert_element(empty, narrow, ir.Constant(ir.IntType(32), 0))
        counts = self.builder.shuffle_vector(one, empty, ir.Constant(_INDICES, [0] * LANES))
        return self.builder.icmp_signed("<", ir.Constant(_INDICES, list(range(LANES))), counts)

    def _at(self, pointer: Any, offset: Any, kind: Any = _VECTOR) -> Any:
        return self.builder.bitcast(self.builder.gep(pointer, [offset]), kind.as_pointer())

    def row(self, pointer: Any, offset: Any) -> Any:
        """Numbers of which there may be only some; 0 for the others."""
        if self._mask is None:
            return self.whole(pointer, offset)
        kind = ir.FunctionType(_VECTOR, [_VECTOR.as_pointer(), ir.IntType(32), _BITS, _VECTOR])
        arguments = [self._at(pointer, offset), ir.Constant(ir.IntType(32), 4), self._mask, _ZERO]
        return self.builder.call(self._intrinsic("load", kind), arguments)

    def whole(self, pointer: Any, offset: Any) -> Any:
        """Numbers of a row that is there to its end."""
        return self.builder.load(self._at(pointer, offset), align=4)

    def store(self, value: Any, pointer: Any, offset: Any) -> None:
        """Write what there is."""
        address = self._at(pointer, offset)
        if self._mask is None:
            self.builder.store(value, address, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), ir.IntType(32), _BITS])
        self.builder.call(self._intrinsic("store", kind), [value, address, ir.Constant(ir.IntType(32), 4), self._mask])

    def _intrinsic(self, name: str, kind: Any) -> Any:
        module = self.builder.module
        name = f"llvm.masked.{name}.v{LANES}f32.{_POINTER}"
        return module.globals.get(name) or ir.Function(module, kind, name)

    def keep(self, value: Any, pointer: Any, offset: Any) -> None:
        """Write to a row that is there to its end."""
        self.builder.store(value, self._at(pointer, offset), align=4)

    def bits(self, pointer: Any, offset: Any) -> Any:
        """One bit for each lane from a mask, at an offset in bits."""
        word = self.builder.load(self._bits_at(pointer, offset), align=1)
        return self.builder.bitcast(word, _BITS)

    def store_bits(self, value: Any, pointer: Any, offset: Any) -> None:
        """Write a bit for each lane, 0 where there is none."""
        value = value if self._mask is None else self.builder.and_(value, self._mask)
        self.builder.store(self.builder.bitcast(value, ir.IntType(LANES)), self._bits_at(pointer, offset), align=1)

    def _bits_at(self, pointer: Any, offset: Any) -> Any:
        bytes_ = self.builder.lshr(offset, ir.Constant(_WORD, 3))
        return self._at(pointer, bytes_, ir.IntType(LANES))

    def positive(self, value: Any) -> Any:
        return self.builder.fcmp_ordered(">", value, _ZERO)

    def rectified(self, value: Any) -> Any:
        """max(value, 0); NaN stays NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", value, _ZERO), _ZERO, value)

    def where(self, condition: Any, value: Any) -> Any:
        """The value or 0."""
        return self.builder.select(condition, value, _ZERO)

    def there(self, value: Any) -> Any:
        """The value, 0 in lanes that are not there."""
        return value if self._mask is None else self.where(self._mask, value)

    def plus(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_CONTRACT)

    def minus(self, a: Any, b: Any) -> Any:
        return self.builder.fsub(a, b, flags=_CONTRACT)

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=_CONTRACT)

    def after(self, at: Any, rows: int, period: Any) -> Any:
        """The position some rows further."""
        return self.builder.add(at, self.builder.mul(period, ir.Constant(_WORD, rows)))


Body = Callable[..., None]
"""What a step does: (step, position in the array, position in the row, period, pointer, pointer, ...)."""


def step_function(body: Body, pointers: Sequence[types.Type], partial: bool) -> Any:
    """A step that kernels call: (position in the array, position in the row, lanes, period, pointer, ...).

    Args:
        body: writes it.
        pointers: their types.
        partial: whether there may be fewer than LANES lanes.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        at, column, count, period, *rest = arguments
        body(Step(builder, count if partial else None), at, column, period, *rest)
        return context.get_dummy_value()

    def typed() -> Any:
        return types.void(*[types.int64] * 4, *pointers), generate

    names = ", ".join(f"p{i}" for i in range(len(pointers)))
    scope: dict[str, Any] = {"typed": typed}
    # Numba takes the number of parameters from the function's own.
    exec(f"def step(typing_context, at, column, count, period, {names}):\n    return typed()\n", scope)
    return intrinsic(scope["step"])
