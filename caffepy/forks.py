"""What a forked process finds: free locks, and objects that know that the threads of its parent are not there.

`multiprocessing` forks by default on Linux before Python 3.14. Only the thread that forks goes on in the child. A lock
that another thread held would stay locked there, and work that another thread was asked to do would not be done.

Locks that only a program's own threads hold (of a blob, a device, a net) are not freed: a program forks while no other
thread of its own uses caffepy.
"""

from __future__ import annotations

import os
import weakref
from typing import Any, Protocol, TypeVar

L = TypeVar("L")
_locks: weakref.WeakSet[Any] = weakref.WeakSet()
_objects: weakref.WeakSet[Forked] = weakref.WeakSet()


class Forked(Protocol):
    """An object with threads or with work for threads."""

    def forked(self) -> None:
        """Called in the child: none of the parent's threads is there."""


def free_after_fork(lock: L) -> L:
    """Returns a Lock, RLock or Condition of `threading` that is free in a child, also if a thread held it."""
    _locks.add(lock)
    return lock


def tell_after_fork(listener: Forked) -> None:
    """Have `forked` called in a child as long as the object lives."""
    _objects.add(listener)


def _in_child() -> None:
    for lock in list(_locks):
        lock._at_fork_reinit()
    for listener in list(_objects):
        listener.forked()


os.register_at_fork(after_in_child=_in_child)
