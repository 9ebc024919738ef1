"""Matrix products and the number of threads of the BLAS that NumPy brings."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import numpy as np
import threadpoolctl

ROWS = 2**20
"""Elements of the largest temporary when a product is added to what is there."""


class Blas:
    """The BLAS of this process. Its number of threads is the process's, so several backends share one setting."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._before: Any = None

    @cached_property
    def _controller(self) -> threadpoolctl.ThreadpoolController:
        return threadpoolctl.ThreadpoolController().select(user_api="blas")

    @contextlib.contextmanager
    def threads(self, count: int) -> Iterator[None]:
        """Use `count` threads; what was set before is restored when the last user leaves."""
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

    def gemm(self, a: Any, b: Any, out: Any, accumulate: bool) -> None:
        """out (+)= a @ b."""
        if out.strides[1] != out.itemsize and out.strides[0] == out.itemsize:
            a, b, out = b.T, a.T, out.T
        if not accumulate:
            np.matmul(a, b, out=out)
            return
        step = max(1, ROWS // max(1, out.shape[1]))
        for row in range(0, out.shape[0], step):
            out[row : row + step] += a[row : row + step] @ b


BLAS = Blas()
