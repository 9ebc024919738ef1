"""The threads that kernels run on: one compiled parallel loop over any kernel, and numba's threading layers."""

from __future__ import annotations

import ctypes
import importlib
import logging
import os
import platform
import threading
from contextlib import nullcontext
from functools import cache
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils

from caffepy.backend.cpu.jit.cache import compile_c_function
from caffepy.backend.cpu.jit.intrinsics import intrinsic, words
from caffepy.errors import ConfigError

logger = logging.getLogger(__name__)

GRAIN = 16384
"""Elements, passed over once, below which a second thread costs more than it saves."""
VECTOR_GRAIN = 8192
"""Multiplications of vectors below which it does."""
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
_OPTIONS = {"error_model": "numpy"}
_TASK, _PROGRAM = ctypes.c_int64 * 7, ctypes.c_int64 * 8
"""What `_parallel_loop` and `_make_calls` need, and behind it the one array that the pool is told of: address, length,
distance of elements."""
_POOL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
"""The type of numba's `parallel_for`: function, arrays, lengths, steps, data, inner dimensions, arrays, threads."""
_LOOP = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)
"""The type of the functions that it calls: arrays, lengths, steps, data."""


@intrinsic
def _call(typing_context: Any, function: Any, block: Any, begin: Any, end: Any) -> Any:
    """Call the compiled kernel at an address."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = ir.IntType(64)
        kind = ir.FunctionType(ir.VoidType(), [word, word, word])
        builder.call(builder.inttoptr(arguments[0], kind.as_pointer()), arguments[1:])
        return context.get_constant(types.int64, 0)

    return types.int64(types.int64, types.int64, types.int64, types.int64), generate


def _parallel_loop(first: Any, count: Any, steps: Any, task: Any) -> None:
    """What numba's pool calls in each thread: `count` pieces from the one that stands in place of an array's address.

    The task is the kernel's address, its block, its items and the items of a piece.
    """
    begin, size, items = words(first)[0], words(task)[3], words(task)[2]
    for piece in range(begin, begin + words(count)[0]):
        _call(words(task)[0], words(task)[1], piece * size, min(items, (piece + 1) * size))


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


def _make_calls(first: Any, count: Any, steps: Any, task: Any) -> None:
    """What numba's pool calls in each thread: makes the calls together with the other threads.

    The task is the address of the calls, their number, where they are counted, the threads, and `_rest_address`. Each
    thread begins with the chunks of its own share, whose results of the call before are in its caches, then takes what
    others have not begun. It waits only for chunks that another thread is computing: threads that have no core, or
    come one after another, hold nobody up.
    """
    given = words(task)
    table, calls, state, threads, rest = words(given[0]), given[1], given[2], given[3], given[4]
    line = 8 * LINE_WORDS
    begin = words(first)[0]
    for me in range(begin, begin + words(count)[0]):
        for i in range(calls):
            function, block, items, pieces = table[4 * i], table[4 * i + 1], table[4 * i + 2], table[4 * i + 3]
            chunks = 1 if pieces == 1 else min(items, pieces * CHUNKS)
            counters = state + i * (threads + 1) * line
            done = counters + threads * line
            for other in range(threads):
                owner = (me + other) % threads
                share, stop = (owner * chunks + threads - 1) // threads, ((owner + 1) * chunks + threads - 1) // threads
                chunk = share + _add(counters + owner * line, 1)
                while chunk < stop:
                    _call(function, block, chunk * items // chunks, (chunk + 1) * items // chunks)
                    _add(done, 1)
                    chunk = share + _add(counters + owner * line, 1)
            looks = 0
            while _look(done) < chunks:
                _pause()
                looks += 1
                if looks > LOOKS and rest != 0:
                    _call(rest, 0, 0, 0)


def _call_in_turn(block: Any, begin: Any, end: Any) -> None:
    """A kernel whose argument block is a table of calls: makes those from `begin` to `end`, each whole."""
    for i in range(begin, end):
        _call(block[4 * i], block[4 * i + 1], 0, block[4 * i + 2])


SPINS = 4000
"""How often an idle thread looks for work before it sleeps, about 40 us, as long as the pause between two kernels.

A thread that looks five times as long holds a core that another program may have left to the thread it waits for:
training LeNet beside a busy program took 47 ms instead of 23, on an idle machine as long."""


_POOLS = {"omp": "omppool", "tbb": "tbbpool", "workqueue": "workqueue"}
"""Numba's modules of its threading layers."""


class _Threads:
    """Numba's thread pool, started at the first parallel loop.

    Solver threads call kernels at the same time. Numba's `omp` and `tbb` layers allow that; its own
    work queue aborts the process, so where neither library can be loaded a lock lets one loop run at a time.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_loop: threading.Lock | None = None
        self._loop: Any = None
        self._address = 0
        self._program = 0

    def forked(self) -> None:
        """In a process that was forked: threads that were started are not there; GNU's OpenMP would end the process."""
        self._lock = threading.Lock()
        if self._loop is not None:
            self._loop, self._one_loop = _on_this_thread, None

    def _choose_layer(self) -> str:
        if numba.config.THREADING_LAYER != "default":  # the user's choice, NUMBA_THREADING_LAYER
            return str(numba.config.THREADING_LAYER)
        for layer in ("omp", "tbb"):
            try:
                importlib.import_module(f"numba.np.ufunc.{_POOLS[layer]}")
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
        try:
            parallel._launch_threads()
        except ValueError as error:
            raise ConfigError(
                f"NUMBA_THREADING_LAYER is '{numba.config.THREADING_LAYER}': {' '.join(str(error).split())}; unset it"
            ) from error
        layer = numba.threading_layer()
        if layer == "workqueue":
            self._one_loop = threading.Lock()
        self._address = int(compile_c_function(_parallel_loop, types.void(*[types.int64] * 4), {}).address)
        pool = importlib.import_module(f"numba.np.ufunc.{_POOLS[layer]}")
        self._loop = _POOL(pool.parallel_for)

    def _started(self, pieces: int) -> int:
        """Start the threads; `pieces`, or how many threads there are if that is less."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._start()
        return min(pieces, int(numba.config.NUMBA_NUM_THREADS))

    def run(self, function: int, block: int, items: int, pieces: int) -> None:
        """Call function(block, begin, end) on `pieces` threads that share out `items`."""
        pieces = self._started(pieces)
        task = _TASK(function, block, items, (items + pieces - 1) // pieces, 0, pieces, 1)
        at = ctypes.addressof(task)
        with self._one_loop or nullcontext():
            self._loop(self._address, at + 32, at + 40, at + 48, at, 0, 1, pieces)

    def run_program(self, calls: JointCalls) -> None:
        """Make the calls one after another, all threads together."""
        pieces = self._started(calls.threads)
        if not self._program:
            with self._lock:
                self._program = compile_c_function(_make_calls, types.void(*[types.int64] * 4), _OPTIONS).address
        calls.state.fill(0)
        if self._one_loop is None:
            self._loop(self._program, *calls.arguments, pieces)
        else:
            with self._one_loop:
                self._loop(self._program, *calls.arguments, pieces)


class JointCalls:
    """Kernel calls for `run_program`, in one program at a time; what it hands to the pool is made once.

    Attributes:
        threads: that share out each call.
        state: where they count: lines of a cache for each thread's chunks, and for those done, of each call.
        arguments: of the pool's `parallel_for` behind its first.
    """

    def __init__(self, commands: Any, threads: int) -> None:
        """The rows of an int64 array (calls, 4) name the calls; see `Command`."""
        self.threads = threads
        self.state = np.zeros(len(commands) * (threads + 1) * LINE_WORDS, np.int64)
        table, counts = (array.__array_interface__["data"][0] for array in (commands, self.state))
        self._kept = commands, _PROGRAM(table, len(commands), counts, threads, _rest_address(), 0, threads, 1)
        at = ctypes.addressof(self._kept[1])
        self.arguments = at + 40, at + 48, at + 56, at, 0, 1


@cache
def call_in_turn() -> int:
    """The address of a kernel that makes the calls of a table, like that of `run_program`, on one thread.

    A table as of `JointCalls` is its argument block, the calls its items.
    """
    return int(compile_c_function(_call_in_turn, KERNEL_SIGNATURE, _OPTIONS).address)


@cache
def _rest_address() -> int:
    """Where the C library's function is that lets other programs have the core; 0 where there is none.

    It is called with a kernel's arguments, which it does not look at.
    """
    try:
        return int(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)
    except (AttributeError, OSError, TypeError):
        return 0


def _on_this_thread(function: int, arrays: int, lengths: int, steps: int, data: int, *_: int) -> None:
    """What the pool does, in place of its `parallel_for`: all pieces one after another."""
    _say_forked()
    _LOOP(function)(arrays, lengths, steps, data)


@cache
def _say_forked() -> None:
    logger.info(
        "Process %d was forked from one that had computed by several threads: it computes by one; start processes by "
        "'spawn' or 'forkserver' to let each have its own",
        os.getpid(),
    )


THREADS = _Threads()
os.register_at_fork(after_in_child=THREADS.forked)
