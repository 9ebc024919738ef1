"""Suspends Python's garbage collection for the whole process, while any thread needs that."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.utils.process_fork import free_after_fork

_lock = free_after_fork(threading.Lock())
_suspensions = 0
_was_enabled = False


@contextmanager
def suspended_garbage_collection() -> Iterator[None]:
    """Suspend garbage collection within a `with` block; it goes on when the last of several blocks ends."""
    global _suspensions, _was_enabled
    with _lock:
        if _suspensions == 0:
            _was_enabled = gc.isenabled()
            gc.disable()
        _suspensions += 1
    try:
        yield
    finally:
        with _lock:
            _suspensions -= 1
            if _suspensions == 0 and _was_enabled:
                gc.enable()
