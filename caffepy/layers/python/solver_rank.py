"""The rank of a solver and the number of solvers, which a user's Python layer asks for to divide its own data.

pycaffe's `solver_rank()` and `solver_count()` read them. Each solver thread has its own.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

Place = tuple[int, int]
"""Rank and number of solvers."""


class _Solver(threading.local):
    """What the calling thread is."""

    place: Place | None = None
    asked = False


_thread = _Solver()
_process: list[Place] = []
"""The place of a process with one solver, for threads that a user's code starts."""


@contextmanager
def acting_as(place: Place, whole_process: bool = False) -> Iterator[None]:
    """Let the calling thread be a solver within a `with` block.

    Args:
        place: its rank, and the number of solvers.
        whole_process: whether the process has no other solver; then its other threads have the place too.
    """
    before, _thread.place = _thread.place, place
    if whole_process:
        _process[:] = [place]
    try:
        yield
    finally:
        _thread.place = before
        if whole_process:
            _process.clear()


def ask_place() -> Place | None:
    """Return the calling thread's place, else the process's; None: neither has one. Notes the question."""
    _thread.asked = True
    return _thread.place or (_process[0] if _process else None)


def take_question() -> bool:
    """Return whether the calling thread has asked since the last call."""
    asked, _thread.asked = _thread.asked, False
    return asked
