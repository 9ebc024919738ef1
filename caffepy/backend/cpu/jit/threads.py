"""The threads that kernels run on: one compiled parallel loop over any kernel, and numba's threading layers."""

from __future__ import annotations

import ctypes
import os
import platform
import threading
from functools import cache
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.core import cgutils

from caffepy.backend.cpu.jit.cache import compile_c_function, compile_loop
from caffepy.backend.cpu.jit.intrinsics import intrinsic, words

CHUNKS = 4
"""Chunks of a call for each thread: what a thread that is late leaves to the others."""
LINE_WORDS = 8
"""Words of a cache line."""
LOOKS = 1000
"""How often a thread looks whether the others are done before it lets other programs have its core."""
Command = tuple[int, int, int, int]
"""A kernel call: function, argument block, items, pieces."""
KERNEL_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)
"""Of the C function that each kernel is: argument block, begin, end."""


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


@intrinsic
def _add(typing_context: Any, address: Any, number: Any) -> Any:
    """Add to a word that several threads change; what was there before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _look(typing_context: Any, address: Any) -> Any:
    """A word that other threads change, and all that they wrote before."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Leave a shared core to its other thread for some cycles, where the processor has an instruction for that."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_constant(types.int64, 0)

    return types.int64(), generate


def _make_calls(commands: int, count: int, state: int, threads: int, me: int, rest: int) -> None:
    """Make the calls together with the other threads.

    Each thread begins with the chunks of its own share, whose results of the call before are in its caches, then takes
    what others have not begun. It waits only for chunks that another thread is computing: threads that have no core, or
    come one after another, hold nobody up.
    """
    table = words(commands)
    line = 8 * LINE_WORDS
    for i in range(count):
        function, block, items, pieces = table[4 * i], table[4 * i + 1], table[4 * i + 2], table[4 * i + 3]
        chunks = 1 if pieces == 1 else min(items, pieces * CHUNKS)
        counters = state + i * (threads + 1) * line
        done = counters + threads * line
        for other in range(threads):
            owner = (me + other) % threads
            first, stop = (owner * chunks + threads - 1) // threads, ((owner + 1) * chunks + threads - 1) // threads
            chunk = first + _add(counters + owner * line, 1)
            while chunk < stop:
                _call(function, block, chunk * items // chunks, (chunk + 1) * items // chunks)
                _add(done, 1)
                chunk = first + _add(counters + owner * line, 1)
        looks = 0
        while _look(done) < chunks:
            _pause()
            looks += 1
            if looks > LOOKS and rest != 0:
                _call(rest, 0, 0, 0)


_together: Any = numba.njit(inline="never")(_make_calls)


def _program(commands: int, count: int, state: int, threads: int, rest: int) -> None:
    for me in numba.prange(threads):
        _together(commands, count, state, threads, me, rest)


def _nothing(block: Any, begin: int, end: int) -> None:
    """A kernel that does nothing, to start the threads with."""


def cpu_count() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SPINS = 20000
"""How often an idle thread looks for work before it sleeps, about 0.2 ms: longer than the pause between two kernels."""


class _Threads:
    """Numba's thread pool, started at the first parallel loop.

    Solver threads call kernels at the same time. Numba's `omp` and `tbb` layers allow that; its own
    work queue aborts the process, so where neither library can be loaded a lock lets one loop run at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_loop: threading.Lock | None = None
        self._loop: Any = None
        self._program: Any = None

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
        nothing = compile_c_function(_nothing, KERNEL_SIGNATURE, {})
        loop(nothing.address, 0, 0, 1)
        if numba.threading_layer() == "workqueue":
            self._one_loop = threading.Lock()
        self._program = compile_loop(_program, types.void(*[types.int64] * 5))
        self._loop = loop

    def _started(self, pieces: int) -> int:
        """Start the threads and let the calling one use `pieces` of them, or as many as there are: the result."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._start()
        pieces = min(pieces, numba.config.NUMBA_NUM_THREADS)
        if numba.get_num_threads() != pieces:  # this thread's own setting
            numba.set_num_threads(pieces)
        return pieces

    def run(self, function: int, block: int, items: int, pieces: int) -> None:
        """Call function(block, begin, end) on `pieces` threads that share out `items`."""
        pieces = self._started(pieces)
        if self._one_loop is None:
            self._loop(function, block, items, pieces)
            return
        with self._one_loop:
            self._loop(function, block, items, pieces)

    def run_program(self, commands: Any, state: Any, threads: int) -> None:
        """Make the calls that the rows of an int64 array (calls, 4) name, one after another; see `Command`.

        `state` has `state_words` int64, all 0.
        """
        self._started(threads)
        addresses = (array.__array_interface__["data"][0] for array in (commands, state))
        arguments = (next(addresses), len(commands), next(addresses), threads, _rest_address())
        if self._one_loop is None:
            self._program(*arguments)
            return
        with self._one_loop:
            self._program(*arguments)


def state_words(calls: int, threads: int) -> int:
    """How many words `run_program` counts in: lines of a cache for each thread's chunks, and for those done."""
    return calls * (threads + 1) * LINE_WORDS


@cache
def _rest_address() -> int:
    """Where the C library's function is that lets other programs have the core; 0 where there is none.

    It is called with a kernel's arguments, which it does not look at.
    """
    try:
        return int(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)
    except (AttributeError, OSError, TypeError):
        return 0


THREADS = _Threads()
