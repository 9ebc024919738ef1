"""Multithreaded kernel execution: one compiled parallel loop for all kernels, on numba's threading layers."""

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

from caffepy.backend.cpu.jit.compiler import compile_c_function
from caffepy.backend.cpu.jit.vector import intrinsic, words
from caffepy.errors import ConfigError

logger = logging.getLogger(__name__)

GRAIN = 16384
"""Minimum elements, read once, for a second thread."""
VECTOR_GRAIN = 8192
"""Minimum vector multiplications for a second thread."""
CHUNKS = 4
"""Chunks of a call per thread, for load balance."""
LINE_WORDS = 8
"""Words of a cache line."""
POLLS = 1000
"""Polls of other threads' completion before yielding the core."""
Command = tuple[int, int, int, int]
"""A kernel call: function, argument block, items, pieces."""
KERNEL_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)
"""Signature of every kernel's C function: argument block, begin, end."""
_OPTIONS = {"error_model": "numpy"}
_TASK, _PROGRAM = ctypes.c_int64 * 7, ctypes.c_int64 * 8
"""Arguments of `_parallel_loop` and `_make_calls`, followed by the pool's description of one array: address, length,
stride."""
_POOL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
"""Type of numba's `parallel_for`: function, arrays, lengths, steps, data, inner dimensions, arrays, threads."""
_LOOP = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)
"""Type of the functions that it calls: arrays, lengths, steps, data."""


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
    """Run by each thread of numba's pool: `count` pieces, starting at the piece number passed as the array's address.

    The task is the kernel's address, its block, its items and the items of a piece.
    """
    begin, size, items = words(first)[0], words(task)[3], words(task)[2]
    for piece in range(begin, begin + words(count)[0]):
        _call(words(task)[0], words(task)[1], piece * size, min(items, (piece + 1) * size))


@intrinsic
def _atomic_add(typing_context: Any, address: Any, number: Any) -> Any:
    """Atomically add to a shared word; return its previous value."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        word = builder.inttoptr(arguments[0], ir.IntType(64).as_pointer())
        return builder.atomic_rmw("add", word, arguments[1], "seq_cst")

    return types.int64(types.int64, types.int64), generate


@intrinsic
def _atomic_load(typing_context: Any, address: Any) -> Any:
    """Atomically load a shared word, sequentially consistent."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.load_atomic(builder.inttoptr(arguments[0], ir.IntType(64).as_pointer()), "seq_cst", 8)

    return types.int64(types.int64), generate


@intrinsic
def _pause(typing_context: Any) -> Any:
    """Execute the processor's spin-wait instruction, if it has one."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        if platform.machine().lower() in ("x86_64", "amd64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        return context.get_constant(types.int64, 0)

    return types.int64(), generate


def _make_calls(first: Any, count: Any, steps: Any, task: Any) -> None:
    """Run by each thread of numba's pool: make the calls together with the other threads."""
    # The task is the address of the calls, their number, the shared counters, the number of threads, and
    # `_yield_address`. Each thread starts with its own chunks, whose previous results are in its caches, then steals
    # chunks that no thread has started. It waits only for chunks that another thread is computing, so threads without a
    # core, or threads that run one after another, do not block the others.
    given = words(task)
    table, calls, state, threads, rest = words(given[0]), given[1], given[2], given[3], given[4]
    line = 8 * LINE_WORDS
    begin = words(first)[0]
    for me in range(begin, begin + words(count)[0]):
        for i in range(calls):
            function, block, items, pieces = table[4 * i], table[4 * i + 1], table[4 * i + 2], table[4 * i + 3]
            # A call for one thread is one chunk, which any thread may take.
            chunks = 1 if pieces == 1 else min(items, pieces * CHUNKS)
            # Counters lie a cache line apart; on a shared line, each increment would take the line from the other
            # threads' cores.
            counters = state + i * (threads + 1) * line
            done = counters + threads * line
            for other in range(threads):
                owner = (me + other) % threads
                share, stop = (owner * chunks + threads - 1) // threads, ((owner + 1) * chunks + threads - 1) // threads
                chunk = share + _atomic_add(counters + owner * line, 1)
                while chunk < stop:
                    _call(function, block, chunk * items // chunks, (chunk + 1) * items // chunks)
                    # Sequentially consistent: a thread that reads the new count also sees the chunk's results.
                    _atomic_add(done, 1)
                    chunk = share + _atomic_add(counters + owner * line, 1)
            polls = 0
            while _atomic_load(done) < chunks:
                _pause()
                polls += 1
                # The thread that computes the missing chunk may be waiting for this core.
                if polls > POLLS and rest != 0:
                    _call(rest, 0, 0, 0)


def _call_in_turn(block: Any, begin: Any, end: Any) -> None:
    """A kernel whose argument block is a table of calls: run those from `begin` to `end`, each completely."""
    for i in range(begin, end):
        _call(block[4 * i], block[4 * i + 1], 0, block[4 * i + 2])


SPINS = 4000
"""Polls of an idle thread before it sleeps, about 40 us, as long as the pause between two kernels.

Polling five times as long occupies a core that another program may have yielded to the thread it waits for: training
LeNet beside a busy program took 47 ms instead of 23; on an idle machine the time is equal.
"""


_POOLS = {"omp": "omppool", "tbb": "tbbpool", "workqueue": "workqueue"}
"""Numba's modules of its threading layers."""


class _Threads:
    """Numba's thread pool, started at the first parallel loop.

    Solver threads call kernels concurrently. Numba's `omp` and `tbb` layers support that. Its own work queue aborts the
    process, so if neither library can be loaded, a lock serialises the loops.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._one_loop: threading.Lock | None = None
        self._loop: Any = None
        self._address = 0
        self._program = 0

    def forked(self) -> None:
        """Reset in a forked child: the started threads do not exist there, and GNU's OpenMP would end the process."""
        self._lock = threading.Lock()
        if self._loop is not None:
            self._loop, self._one_loop = _serial_parallel_for, None

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
            # GNU's OpenMP reads this when it is loaded. By default its idle threads spin for milliseconds: on a loaded
            # machine they occupy the core of the thread that they wait for (LeNet: 100 ms, not 12).
            os.environ.setdefault("GOMP_SPINCOUNT", str(SPINS))

        if not getattr(parallel, "_is_initialized", False):
            # numba counts the CPUs of the affinity mask when it is imported, and never starts more threads. A
            # launcher's mask may have one core, and is widened (docs/decisions/0014-widen-the-cpu-mask.md). Each call
            # limits its own threads.
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
        # CFUNCTYPE releases the GIL during the call, so that other solver threads go on.
        self._loop = _POOL(pool.parallel_for)

    def _started(self, pieces: int) -> int:
        """Start the threads; return `pieces` limited to the number of threads."""
        if self._loop is None:
            # Looked at again under the lock: two solver threads may call their first kernels at once.
            with self._lock:
                if self._loop is None:
                    self._start()
        return min(pieces, int(numba.config.NUMBA_NUM_THREADS))

    def run(self, function: int, block: int, items: int, pieces: int) -> None:
        """Call function(block, begin, end) on `pieces` threads that divide `items`."""
        pieces = self._started(pieces)
        # The pool divides arrays, and gives each thread the address of its part. The last three words describe an array
        # at address 0 with `pieces` elements of one byte, so that the address of a part is the number of its first
        # piece.
        task = _TASK(function, block, items, (items + pieces - 1) // pieces, 0, pieces, 1)
        at = ctypes.addressof(task)
        with self._one_loop or nullcontext():
            self._loop(self._address, at + 32, at + 40, at + 48, at, 0, 1, pieces)

    def run_program(self, calls: JointCalls) -> None:
        """Run the calls one after another on all threads."""
        pieces = self._started(calls.threads)
        if not self._program:
            with self._lock:
                self._program = compile_c_function(_make_calls, types.void(*[types.int64] * 4), _OPTIONS).address
        # Every launch takes all chunks once more.
        calls.state.fill(0)
        if self._one_loop is None:
            self._loop(self._program, *calls.arguments, pieces)
        else:
            with self._one_loop:
                self._loop(self._program, *calls.arguments, pieces)


class JointCalls:
    """Kernel calls for `run_program`, used by one program at a time; the pool's arguments are built once.

    Attributes:
        threads: threads that divide each call.
        state: shared counters: cache lines for each thread's chunks, and for the chunks done, of each call.
        arguments: arguments of the pool's `parallel_for` after the first.
    """

    def __init__(self, commands: Any, threads: int) -> None:
        """commands: int64 array (calls, 4); see `Command`."""
        self.threads = threads
        self.state = np.zeros(len(commands) * (threads + 1) * LINE_WORDS, np.int64)
        table, counts = (array.__array_interface__["data"][0] for array in (commands, self.state))
        self._kept = commands, _PROGRAM(table, len(commands), counts, threads, _yield_address(), 0, threads, 1)
        at = ctypes.addressof(self._kept[1])
        self.arguments = at + 40, at + 48, at + 56, at, 0, 1


@cache
def call_in_turn() -> int:
    """Return the address of a kernel that runs the calls of a table on one thread.

    Its argument block is a table as in `JointCalls`, its items are the calls.
    """
    return int(compile_c_function(_call_in_turn, KERNEL_SIGNATURE, _OPTIONS).address)


@cache
def _yield_address() -> int:
    """Return the address of the C library's sched_yield, or 0."""
    # It is called with a kernel's arguments, which it ignores.
    try:
        return int(ctypes.cast(ctypes.CDLL(None).sched_yield, ctypes.c_void_p).value or 0)
    except (AttributeError, OSError, TypeError):
        return 0


def _serial_parallel_for(function: int, arrays: int, lengths: int, steps: int, data: int, *_: int) -> None:
    """Replacement of the pool's `parallel_for` that runs all pieces one after another."""
    _log_fork()
    _LOOP(function)(arrays, lengths, steps, data)


@cache
def _log_fork() -> None:
    logger.info(
        "Process %d was forked from a multithreaded process and computes on one thread; start processes by "
        "'spawn' or 'forkserver' for threads in each process",
        os.getpid(),
    )


THREADS = _Threads()
os.register_at_fork(after_in_child=THREADS.forked)
