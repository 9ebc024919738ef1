"""The threads that kernels run on: one compiled parallel loop over any kernel, and numba's threading layers."""

from __future__ import annotations

import os
import threading
from typing import Any

import numba
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.cache import compile_c_function, compile_loop
from caffepy.backend.cpu.jit.intrinsics import intrinsic

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
        if self._one_loop is None:
            self._loop(function, block, items, pieces)
            return
        with self._one_loop:
            self._loop(function, block, items, pieces)


THREADS = _Threads()
