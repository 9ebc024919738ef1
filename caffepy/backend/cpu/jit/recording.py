"""Kernel calls that are written down, to be made again without Python.

Between two kernels of a net Python needs about 40 us, as long as the kernels of small layers, and one thread only.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.threads import THREADS, Command, state_words


class Recording:
    """The kernel calls of some work.

    Attributes:
        commands: function, argument block, items and pieces of each call.
        kept: what lies at the addresses in the argument blocks, and the blocks.
        host_work: whether something else than kernels did a part of the work.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.kept: list[Any] = []
        self.host_work = False


class _Current(threading.local):
    recording: Recording | None = None


CURRENT = _Current()
"""What this thread's kernel calls are written to."""


def note_host_work() -> None:
    """Say that something else than kernels works on arrays: it is not made again by a program."""
    if CURRENT.recording is not None:
        CURRENT.recording.host_work = True


class Program:
    """The kernel calls of some recordings, made again in one call; arrays must not have moved."""

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._kept = [one.kept for one in recordings]
        commands = [command for one in recordings for command in one.commands]
        self._table = np.array(commands, np.int64).reshape(-1, 4)
        self._threads = int(self._table[:, 3].max(initial=1))
        self._state = np.zeros(state_words(len(commands), self._threads), np.int64)
        self._lock = threading.Lock()

    @property
    def calls(self) -> int:
        """How many kernel calls it makes."""
        return len(self._table)

    def launch(self) -> None:
        """Make the calls in order."""
        if self.calls:
            with self._lock:
                self._state[:] = 0
                THREADS.run_program(self._table, self._state, self._threads)


def record(work: Callable[[], None]) -> Recording:
    """The kernel calls of `work`, which is done."""
    CURRENT.recording = recording = Recording()
    try:
        work()
    finally:
        CURRENT.recording = None
    return recording


def record_all(works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    """Do all works in order; returns calls that do the same again, neighbours that are kernels alone as one program."""
    calls: list[Callable[[], None]] = []
    pure: list[Recording] = []
    for work in works:
        recording = record(work)
        if not recording.host_work:
            pure.append(recording)
            continue
        calls += [Program(pure).launch] * bool(pure) + [work]
        pure = []
    return calls + [Program(pure).launch] * bool(pure)
