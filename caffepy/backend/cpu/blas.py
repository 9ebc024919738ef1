"""The number of threads of the BLAS that NumPy brings.

caffepy's own products do not use it, but users' Python layers may, and its threads must not crowd those of the kernels.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import threadpoolctl

from caffepy.forks import free_after_fork


class Blas:
    """The BLAS of this process. Its number of threads is the process's, so several backends share one setting."""

    def __init__(self) -> None:
        self._lock = free_after_fork(threading.Lock())
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


BLAS = Blas()
