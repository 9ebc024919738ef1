"""Intrinsics for compiled code: typed pointers, bit casts, and C library calls."""

from __future__ import annotations

from collections.abc import Callable
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, PROT_READ
from typing import Any

import numba.extending
from llvmlite import ir
from numba import types
from numba.core import cgutils


def intrinsic(function: Callable[..., Any]) -> Callable[..., Any]:
    """Typed wrapper of `numba.extending.intrinsic`."""
    compiled: Callable[..., Any] = numba.extending.intrinsic(function)
    return compiled


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
