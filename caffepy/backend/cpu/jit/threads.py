"""The threads that kernels run on: one compiled parallel loop over any kernel, and numba's threading layers."""

from __future__ import annotations

import ctypes
import importlib
import os
import threading
from contextlib import nullcontext
from typing import Any

import numba
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.cache import compile_c_function
from caffepy.backend.cpu.jit.intrinsics import intrinsic, words

KERNEL_SIGNATURE = types.void(types.CPointer(types.int64), types.int64, types.int64)
"""Of the C function that each kernel is: argument block, begin, end."""


_TASK = ctypes.c_int64 * 7
"""What `_parallel_loop` needs, and the one array that the pool is told of: address, length, distance of elements."""
_POOL = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 5, ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int)
"""The type of numba's `parallel_for`: function, arrays, lengths, steps, data, inner dimensions, arrays, threads."""


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


def cpu_count() -> int:
    """How many CPUs this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


SPINS = 20000
"""How often an idle thread looks for work before it sleeps, about 0.2 ms: longer than the pause between two kernels."""


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
        parallel._launch_threads()
        layer = numba.threading_layer()
        if layer == "workqueue":
            self._one_loop = threading.Lock()
        word = types.int64
        self._address = compile_c_function(_parallel_loop, types.void(word, word, word, word), {}).address
        pool = importlib.import_module(f"numba.np.ufunc.{_POOLS[layer]}")
        self._loop = _POOL(pool.parallel_for)

    def run(self, function: int, block: int, items: int, pieces: int) -> None:
        """Call function(block, begin, end) on `pieces` threads that share out `items`."""
        if self._loop is None:
            with self._lock:
                if self._loop is None:
                    self._start()
        pieces = min(pieces, numba.config.NUMBA_NUM_THREADS)
        task = _TASK(function, block, items, (items + pieces - 1) // pieces, 0, pieces, 1)
        at = ctypes.addressof(task)
        with self._one_loop or nullcontext():
            self._loop(self._address, at + 32, at + 40, at + 48, at, 0, 1, pieces)


THREADS = _Threads()
