"""The CPU backend: NumPy manages memory, numba-compiled kernels compute."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

import threadpoolctl

from caffepy.backend.cpu.convolution.choose import CpuConvolution
from caffepy.backend.cpu.expression import CpuElementwise, CpuReduction
from caffepy.backend.cpu.flow import CpuFlow
from caffepy.backend.cpu.gemm import CpuDense, Gemm
from caffepy.backend.cpu.indexing import CpuIndexing
from caffepy.backend.cpu.jit.compile_helper import Passes, compile_helper
from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.backend.cpu.jit.kernel import KernelGraph
from caffepy.backend.cpu.memory import CpuCopy, CpuInput, Workspace, give_back_memory
from caffepy.backend.cpu.normalisation import CpuNormalisation
from caffepy.backend.cpu.pooling import CpuPooling
from caffepy.backend.cpu.random import CpuRandom
from caffepy.backend.cpu.recurrent import CpuRecurrent
from caffepy.backend.cpu.softmax import CpuSoftmax
from caffepy.backend.interface import Backend
from caffepy.backend.types import Array, AsyncCopy, Graph, HostAsyncCopy, Synchronous
from caffepy.errors import DeviceError
from caffepy.utils.process_fork import free_after_fork


class Blas:
    """The thread count of NumPy's BLAS, a process-wide setting shared by all backends.

    caffepy's own products do not use BLAS. Users' Python layers may, and its threads must not compete with the
    kernels'.
    """

    def __init__(self) -> None:
        self._lock = free_after_fork(threading.Lock())
        self._users = 0
        self._before: Any = None

    @cached_property
    def _controller(self) -> threadpoolctl.ThreadpoolController:
        return threadpoolctl.ThreadpoolController().select(user_api="blas")

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Use `count` BLAS threads; the last user's exit restores the previous setting."""
        with self._lock:
            if self._users == 0:
                self._before = self._controller.limit(limits=count)
            self._users += 1
        try:
            yield
        finally:
            with self._lock:
                self._users -= 1
                if self._users == 0:
                    self._before.restore_original_limits()


_BLAS = Blas()


class CpuBackend(
    Synchronous,
    CpuCopy,
    CpuElementwise,
    CpuReduction,
    CpuDense,
    CpuConvolution,
    CpuPooling,
    CpuNormalisation,
    CpuSoftmax,
    CpuRandom,
    CpuIndexing,
    CpuFlow,
    CpuRecurrent,
    CpuInput,
    Backend,
):
    """The CPU backend of one solver thread.

    Args:
        threads: number of threads; None: all that the process may use (its CPU affinity).

    Raises:
        DeviceError: fewer than one thread.
    """

    name = "cpu"
    asynchronous = False
    captures_inference = True

    def __init__(self, threads: int | None = None) -> None:
        if threads is not None and threads < 1:
            raise DeviceError(f"{threads} CPU threads: specify at least 1")
        self.threads = threads or cpu_count()
        self._workspace = Workspace()
        self._gemm = Gemm(self.threads, self._workspace)

    @contextlib.contextmanager
    def activate(self) -> Iterator[None]:
        with _BLAS.threads(self.threads):
            yield

    def close(self) -> None:
        """Release the workspace; the thread pool belongs to the process."""
        self._workspace.clear()

    def copy_to_host_async(self, array: Array) -> AsyncCopy:
        return HostAsyncCopy(array)

    def compile_helper(self, passes: Passes) -> contextlib.AbstractContextManager[None]:
        # On one core a helper would only take time from this process.
        return compile_helper(passes) if self.threads > 1 else contextlib.nullcontext()

    def capture(self, *works: Callable[[], None]) -> Graph:
        self.capturing = True
        try:
            return KernelGraph(works)
        finally:
            self.capturing = False

    def trim(self) -> None:
        give_back_memory()
