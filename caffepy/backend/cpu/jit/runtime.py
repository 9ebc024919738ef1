"""Compiled CPU kernels and the threads that run them.

A kernel is a plain function over a range of items, with raw pointers and numbers as arguments:

    @kernel
    def scale(begin: Int, end: Int, x: Floats, y: Floats, factor: Float) -> None:
        for i in range(begin, end):
            y[i] = factor * x[i]

    scale.run(threads, items=n, grain=4096, x, y, 2.0)

It is compiled on its first call to a C function of one signature (argument block, begin, end), kept on disk
(cpu/jit/cache.py), and all kernels share one compiled parallel loop. That makes a cold kernel six times
cheaper to compile than a `parallel=True` function each, and leaves one place that knows numba's threading layers.
"""

from __future__ import annotations

import ctypes
import inspect
import math
import os
import struct
import sys
import threading
import zlib
from collections.abc import Callable
from functools import cached_property
from types import CodeType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from caffepy.backend.cpu.jit.cache import compile_c_function, compile_loop, file_stamp, kernels_stamp

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

_UNPACK = {
    "Bytes": "octets(_a[{}])",
    "Int": "_a[{}]",
    "Float": "float32(as_double(_a[{}]))",
    "Floats": "floats(_a[{}])",
    "Doubles": "doubles(_a[{}])",
    "Ints": "ints(_a[{}])",
    "Words": "words(_a[{}])",
}
_OPTIONS = {"error_model": "numpy", "fastmath": {"contract"}}


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
    """The float64 that an int64 holds the bits of."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.bitcast(arguments[0], ir.DoubleType())

    return types.float64(types.int64), generate


@intrinsic
def copy_bytes(typing_context: Any, destination: Any, source: Any, count: Any) -> Any:
    """C's memcpy, between addresses."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        to, at, size = arguments
        cgutils.raw_memcpy(
            builder, builder.inttoptr(to, cgutils.voidptr_t), builder.inttoptr(at, cgutils.voidptr_t), size, 1
        )
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64), generate


@intrinsic
def _call(typing_context: Any, function: Any, block: Any, begin: Any, end: Any) -> Any:
    """Call the compiled kernel at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word, word, word])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_constant(types.int64, 0)

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


def _parallel_loop(function: int, block: int, items: int, pieces: int) -> None:
    size = (items + pieces - 1) // pieces
    for piece in numba.prange(pieces):
        _call(function, block, piece * size, min(items, (piece + 1) * size))


def cpu_count() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SPINS = 20000
"""Looks of an idle thread for more work before it sleeps, about 0.2 ms: longer than the pause between two kernels."""


class _Threads:
    """Numba's threads, set up at the first parallel loop.

    Solver threads call kernels at the same time. Numba's `omp` and `tbb` layers allow that; its own
    work queue aborts the process, so where neither library can be loaded the loops take turns.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._turn: threading.Lock | None = None
        self._loop: Any = None

    def _choose_layer(self) -> str:
        if numba.config.THREADING_LAYER != "default":  # the user's choice, NUMBA_THREADING_LAYER
            return str(numba.config.THREADING_LAYER)
        for layer, module in (("omp", "omppool"), ("tbb", "tbbpool")):
            try:
                __import__(f"numba.np.ufunc.{module}")
            except ImportError:
                continue
            return layer
        return "workqueue"

    def _start(self) -> None:
        from numba.np.ufunc import parallel

        if "OMP_WAIT_POLICY" not in os.environ:
            # GNU's OpenMP reads this when it is loaded. By default its idle threads spin for milliseconds: on a machine
            # with other things to do they hold the core that the thread they wait for needs (LeNet: 100 ms, not 12).
            os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))

        if not getattr(parallel, "_is_initialized", False):
            numba.config.NUMBA_NUM_THREADS = max(os.cpu_count() or 1, numba.config.NUMBA_NUM_THREADS)
            numba.config.THREADING_LAYER = self._choose_layer()
        loop = compile_loop(_parallel_loop, types.void(types.int64, types.int64, types.int64, types.int64))
        # The first call starts numba's threads, which is not safe from two threads at once.
        loop(_nothing.address, 0, 0, 1)
        if numba.threading_layer() == "workqueue":
            self._turn = threading.Lock()
        self._loop = loop

    def run(self, function: int, block: int, items: int, pieces: int) -> None:
        """Call function(block, begin, end) on `pieces` threads that share out `items`."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._start()
        pieces = min(pieces, numba.config.NUMBA_NUM_THREADS)
        if numba.get_num_threads() != pieces:  # this thread's own setting
            numba.set_num_threads(pieces)
        if self._turn is None:
            self._loop(function, block, items, pieces)
            return
        with self._turn:
            self._loop(function, block, items, pieces)


THREADS = _Threads()


_HEADER = object.__basicsize__


def _field_address(array: Any) -> int:
    """Where an array's elements are: the first field of NumPy's array object."""
    return ctypes.c_ssize_t.from_address(id(array) + _HEADER).value


def _documented_address(array: Any) -> int:
    return int(array.__array_interface__["data"][0])


def _choose_address() -> Callable[[Any], int]:
    # The documented way takes 2 us, as much as a small kernel, and a kernel has up to ten arrays.
    probes = [np.zeros(3), np.zeros((4, 5))[1:, 2:], np.zeros(())]
    try:
        same = all(_field_address(probe) == _documented_address(probe) for probe in probes)
    except ValueError:
        same = False
    return _field_address if same and sys.implementation.name == "cpython" else _documented_address


address_of: Callable[[Any], int] = _choose_address()
"""The address of an array's first element."""


class ConstantTable(int):
    """The address of a constant table, which it keeps alive; cheaper to hand to a kernel than the array."""

    array: Any

    def __new__(cls, array: Any) -> ConstantTable:
        """Pin a C-contiguous array that nobody else changes."""
        assert array.flags.c_contiguous
        pinned = super().__new__(cls, address_of(array))
        pinned.array = array
        return pinned


class Entry:
    """A C function void(argument block, begin, end), compiled on first use and cached on disk.

    Args:
        name: for the cache's file names and profilers.
        file: the source file that it belongs to; its content is part of the cache's key.
        text: body of the function as Python lines; `_a` is the block of 64-bit words, `_begin` and `_end` the range.
        namespace: what the text refers to.
        fmt: `struct` format of the block.
    """

    def __init__(self, name: str, file: str, text: list[str], namespace: dict[str, Any], fmt: str) -> None:
        self._file = file
        self._namespace = namespace
        body = "\n".join(f"    {line}" for line in text)
        stamp = zlib.crc32(f"{kernels_stamp()} {file_stamp(file)} {sorted(_OPTIONS.items())} {body}".encode())
        # numba's cache key covers the byte code but not the constants in it, so the name must tell texts apart.
        self.name = f"{name}_{stamp:08x}"
        self._source = f"def {self.name}(_a, _begin, _end):\n{body}\n"
        self._pack = struct.Struct("=" + fmt).pack
        self._block = ctypes.c_int64 * len(fmt)
        self._lock = threading.Lock()

    def _code(self) -> CodeType:
        return compile(self._source, self._file, "exec")

    @cached_property
    def _compiled(self) -> Any:
        with self._lock:
            if "_compiled" in self.__dict__:
                return self.__dict__["_compiled"]
            scope: dict[str, Any] = {**_NAMESPACE, **self._namespace}
            exec(self._code(), scope)
            function = scope[self.name]
            function.__module__ = "caffepy.backend.cpu.jit.runtime"
            signature = types.void(types.CPointer(types.int64), types.int64, types.int64)
            return compile_c_function(function, signature, _OPTIONS)

    @cached_property
    def address(self) -> int:
        """Where the machine code is."""
        return int(self._compiled.address)

    @cached_property
    def _serial(self) -> Any:
        return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(self.address)

    def run(self, threads: int, items: int, grain: int, *arguments: Any) -> None:
        """Run over all items, on as many of `threads` as get at least `grain` of them."""
        if items <= 0:
            return
        words = [address_of(argument) if type(argument) is np.ndarray else argument for argument in arguments]
        block = self._block.from_buffer_copy(self._pack(*words))
        address = ctypes.addressof(block)
        pieces = min(threads, max(1, items // max(1, grain)))
        if pieces == 1:
            self._serial(address, 0, items)
        else:
            THREADS.run(self.address, address, items, pieces)


class Kernel(Entry):
    """An `Entry` made of a function whose parameters are annotated Int, Float, Floats, Doubles, Ints, Words, Bytes."""

    def __init__(self, function: Callable[..., None]) -> None:
        kinds = [str(p.annotation) for p in inspect.signature(function).parameters.values()][2:]
        unpacked = ", ".join(_UNPACK[kind].format(i) for i, kind in enumerate(kinds))
        body = numba.njit(inline="never", **_OPTIONS)(function)
        fmt = "".join("d" if kind == "Float" else "q" for kind in kinds)
        super().__init__(
            function.__name__, inspect.getfile(function), [f"body(_begin, _end, {unpacked})"], {"body": body}, fmt
        )
        self.__doc__ = function.__doc__


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


@kernel
def _nothing(begin: Int, end: Int) -> None:
    for _ in range(begin, end):
        pass


def device_function(function: Callable[..., Any]) -> Any:
    """A function that kernels may call; it is inlined into them."""
    return numba.njit(inline="never", **_OPTIONS)(function)
