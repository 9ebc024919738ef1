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


def become_solver(rank: int, count: int, alone: bool) -> None:
    """Let the calling thread be a solver from now on.

    Args:
        rank: its rank among all.
        count: the number of solvers.
        alone: whether the process has no other solver.
    """
    _thread.place = rank, count
    if alone:
        _process[:] = [(rank, count)]


@contextmanager
def acting_as(place: Place) -> Iterator[None]:
    """Let the calling thread be another solver within a `with` block."""
    before, _thread.place = _thread.place, place
    try:
        yield
    finally:
        _thread.place = before


def ask_place() -> Place | None:
    """Return the calling thread's place, else the process's; None: neither has one. Notes the question."""
    _thread.asked = True
    return _thread.place or (_process[0] if _process else None)


def take_question() -> bool:
    """Return whether the calling thread has asked since the last call."""
    asked, _thread.asked = _thread.asked, False
    return asked
