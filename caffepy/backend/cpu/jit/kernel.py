"""Compiled CPU kernels.

A kernel is a plain function over a range of items, with raw pointers and numbers as arguments:

    @kernel
    def scale(begin: Int, end: Int, x: Floats, y: Floats, factor: Float) -> None:
        for i in range(begin, end):
            y[i] = factor * x[i]

    scale.run(threads, items=n, grain=4096, x, y, 2.0)

The first call compiles it to a C function of one common signature (argument block, begin, end) and caches it on disk
(cache.py). All kernels share one parallel loop (threads.py). The functions that a kernel calls are compiled with it,
once (pipeline.py). This makes a cold kernel far cheaper to compile than a separate function with `parallel=True`.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import struct
import threading
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cached_property
from types import FunctionType
from typing import Any

import numpy as np
from numba import types

from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.cache import compile_c_function, compile_kernel, file_stamp, kernels_stamp
from caffepy.backend.cpu.jit.intrinsics import as_double, doubles, floats, ints, octets, words
from caffepy.backend.cpu.jit.kernel_graph import CURRENT
from caffepy.backend.cpu.jit.pipeline import NotKeptError, PartDispatcher
from caffepy.backend.cpu.jit.threads import KERNEL_SIGNATURE, THREADS
from caffepy.utils.process_fork import free_after_fork

Int = Any
"""Annotation: a 64-bit integer."""
Float = Any
"""Annotation: a float32 number."""
Floats = Any
"""Annotation: the first element of a float32 array."""
Doubles = Any
"""Annotation: the first element of a float64 array."""
Ints = Any
"""Annotation: the first element of an int32 array."""
Words = Any
"""Annotation: the first element of an int64 array."""
Bytes = Any
"""Annotation: the first element of a uint8 array."""

_KINDS = {
    "Bytes": types.CPointer(types.uint8),
    "Int": types.int64,
    "Float": types.float32,
    "Floats": types.CPointer(types.float32),
    "Doubles": types.CPointer(types.float64),
    "Ints": types.CPointer(types.int32),
    "Words": types.CPointer(types.int64),
}
_OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}}


class ConstantTable(int):
    """The address of a constant table, which it keeps alive; cheaper to pass to a kernel than the array."""

    array: Any

    def __new__(cls, array: Any) -> ConstantTable:
        """The array must be C-contiguous and immutable."""
        assert array.flags.c_contiguous
        table = super().__new__(cls, address_of(array))
        table.array = array
        return table


class Entry:
    """A C function void(argument block, begin, end), compiled at first use and cached on disk.

    Args:
        name: for the cache's file names and profilers.
        file: its source file, whose content is part of the cache key.
        text: body of the function as Python lines; `_a` is the block of 64-bit words, `_begin` and `_end` the range.
        namespace: globals of the text.
        fmt: `struct` format of the block.
    """

    def __init__(self, name: str, file: str, text: list[str], namespace: dict[str, Any], fmt: str) -> None:
        self.file = file
        self._namespace = namespace
        body = "\n".join(f"    {line}" for line in text)
        stamp = zlib.crc32(f"{kernels_stamp()} {file_stamp(file)} {sorted(_OPTIONS.items())} {body}".encode())
        # numba's cache key covers the byte code but not its constants, so the name must identify the text.
        self.name = f"{name}_{stamp:08x}"
        self._source = f"def {self.name}(_a, _begin, _end):\n{body}\n"
        self._pack = struct.Struct("=" + fmt).pack
        self._block = ctypes.c_int64 * len(fmt)
        self._lock = free_after_fork(threading.Lock())

    @cached_property
    def _compiled(self) -> Any:
        with self._lock:
            if "_compiled" in self.__dict__:
                return self.__dict__["_compiled"]
            return self._compile()

    def _compile(self) -> Any:
        scope: dict[str, Any] = {**_NAMESPACE, **self._namespace}
        exec(compile(self._source, self.file, "exec"), scope)
        function = scope[self.name]
        function.__module__ = __name__
        return compile_c_function(function, KERNEL_SIGNATURE, _OPTIONS)

    @cached_property
    def address(self) -> int:
        return int(self._compiled.address)

    @cached_property
    def _serial(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self.address)

    def run(self, threads: int, items: int, grain: int, *arguments: Any) -> None:
        """Run over all items, on at most `threads` threads with at least `grain` items each."""
        if items <= 0:
            return
        pieces = min(threads, max(1, items // max(1, grain)))
        calls = CURRENT.calls
        words = [address_of(argument) if type(argument) is np.ndarray else argument for argument in arguments]
        block = self._block.from_buffer_copy(self._pack(*words))
        address = ctypes.addressof(block)
        if calls is not None:
            calls.commands.append((self.address, address, items, pieces))
            calls.kept.append((self, block, arguments))
        elif pieces == 1:
            self._serial(address, 0, items)
        else:
            THREADS.run(self.address, address, items, pieces)


class Kernel(Entry):
    """An `Entry` made from a function with parameters annotated Int, Float, Floats, Doubles, Ints, Words, Bytes."""

    def __init__(self, function: Callable[..., None]) -> None:
        kinds = [str(p.annotation) for p in inspect.signature(function).parameters.values()][2:]
        fmt = "".join("d" if kind == "Float" else "q" for kind in kinds)
        super().__init__(function.__name__, inspect.getfile(function), [function.__qualname__, *kinds], {}, fmt)
        self._function = function
        self._kinds = [_KINDS[kind] for kind in kinds]
        self._asked = 0
        self.__doc__ = function.__doc__

    def should_compile(self, items: int, compiling: int) -> bool:
        """Return whether to run this work as machine code, for callers that have an alternative.

        True if the kernel is cached, or once the requested work would have paid for the compilation.

        Args:
            items: items of this work.
            compiling: items whose interpretation takes as long as the compilation.
        """
        if "_compiled" in self.__dict__:
            return True
        with self._lock:
            first, self._asked = self._asked == 0, self._asked + items
            if first and self._asked <= compiling:
                with suppress(NotKeptError):
                    self.__dict__.setdefault("_compiled", self._compile(kept=True))
            return self._asked > compiling or "_compiled" in self.__dict__

    def _compile(self, kept: bool = False) -> Any:
        function = self._function
        code = function.__code__.replace(co_name=self.name)
        named = FunctionType(code, function.__globals__, self.name, function.__defaults__, function.__closure__)
        named.__module__, named.__qualname__ = function.__module__, self.name
        return compile_kernel(named, self._kinds, _OPTIONS, kept)


kernel = Kernel
"""Decorator that makes a kernel of a function."""

_NAMESPACE = {
    "as_double": as_double,
    "doubles": doubles,
    "float32": np.float32,
    "floats": floats,
    "ints": ints,
    "math": math,
    "np": np,
    "octets": octets,
    "words": words,
}


def device_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function callable by kernels; LLVM inlines it."""
    compiled: Callable[..., Any] = PartDispatcher(function, _OPTIONS)
    return compiled


def exact_function(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a `device_function` without fused or reassociated operations: each product and sum is rounded.

    For values that are compared with thresholds or with each other.
    """
    # Without fastmath=False it would inherit the calling kernel's option.
    compiled: Callable[..., Any] = PartDispatcher(function, {"error_model": "numpy", "fastmath": False})
    return compiled
