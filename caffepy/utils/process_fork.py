"""After a fork: locks are free in the child, and objects drop the threads of the parent.

`multiprocessing` forks by default on Linux before Python 3.14. The child has only the thread that forked. A lock that
another thread held would stay locked there, and work that was queued for another thread would never be done.

Locks that only a program's own threads hold (of a blob, a device, a net) are not freed: a program forks while none of
its other threads uses caffepy.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol, TypeVar

L = TypeVar("L")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


class Forked(Protocol):
    """An object that owns threads or queues work for them."""

    def forked(self) -> None:
        """Called in the child, which has none of the parent's threads."""


def free_after_fork(lock: L) -> L:
    """Register a Lock, RLock or Condition of `threading` that a fork frees in the child, and return it."""
    _locks.add(lock)
    return lock


def tell_after_fork(listener: Forked) -> None:
    """Call `forked` in each child while the object lives."""
    _objects.add(listener)


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()
    for listener in list(_objects):
        listener.forked()


os.register_at_fork(after_in_child=_in_child)
