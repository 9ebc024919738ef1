"""Kernel calls that are recorded, to be made again without Python.

Between two kernels of a net Python needs about 40 us, as long as the kernels of small layers, and one thread only.
"""

from __future__ import annotations

import ctypes
import math
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from statistics import median
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.threads import THREADS, Command, JointCalls, call_in_turn


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


TRIALS = 5
"""How often a program is timed on one thread and on all before one of the two is chosen."""
WARMING = 3
"""Passes before these: those after a pause find threads asleep and weights gone from the caches, or other programs'
idle threads still awake; the autoencoder's trials in turns with another program then chose one thread each time."""
LONG = 0.002
"""Seconds from which a program is not tried on one thread: that gains a twentieth at most beside a busy program, and
chosen in a bad moment it takes twice the time until the next trial."""
TRUSTED, MAX_TRUSTED = 10, 160
"""For how many times the time of its trials a choice holds, as what else the machine does may change: at first, and at
most after it was confirmed again and again. Pauses between passes do not count: trials would all come after them."""


class Program:
    """The kernel calls of some recordings, made again in one call; arrays must not have moved.

    Waking another thread takes as long as a small net's whole pass, so some launches are timed, now and then, to see
    whether one thread is faster than all. Results do not depend on that: a kernel computes its items by themselves.
    """

    def __init__(self, recordings: Sequence[Recording]) -> None:
        self._kept = [one.kept for one in recordings]
        commands = [command for one in recordings for command in one.commands]
        self._alone = _table(commands)
        self._parts = [_table(part) for part in _serial_parts(commands)]
        self._table = _table([_joined(part) for part in self._parts])
        self._threads = int(self._table[:, 3].max(initial=1))
        self._joint = JointCalls(self._table, self._threads)
        self._lock = threading.Lock()
        self._times: tuple[list[float], list[float]] = ([], [])
        self._on_one, self._trusted = self._threads == 1, TRUSTED
        self._left = math.inf if self._on_one else 0.0

    @property
    def calls(self) -> int:
        """How many kernel calls it makes."""
        return len(self._alone)

    @property
    def steps(self) -> int:
        """How often threads that share the work wait for each other."""
        return len(self._table)

    def launch(self) -> None:
        """Make the calls in order."""
        if self.calls:
            with self._lock:
                begin = time.perf_counter()
                if self._left > 0:
                    self._run(self._on_one)
                    self._left -= time.perf_counter() - begin
                else:
                    self._try(begin)

    def _run(self, on_one: bool) -> None:
        if on_one:
            _serial()(self._alone.ctypes.data, 0, self.calls)
        else:
            THREADS.run_program(self._joint)

    def _try(self, begin: float) -> None:
        """Run some passes on all threads, whose idle ones then stay awake in between, and as many on one; choose."""
        all_threads, one = self._times
        on_one = len(all_threads) == WARMING + TRIALS
        self._run(on_one)
        self._times[on_one].append(time.perf_counter() - begin)
        if len(one) == WARMING + TRIALS:
            self._choose(median(all_threads[WARMING:]), median(one[WARMING:]))
            self._times = ([], [])
        elif len(all_threads) == WARMING + TRIALS and min(all_threads) > LONG:  # the first may have compiled
            self._on_one, self._times = False, ([], [])
            self._left = MAX_TRUSTED * sum(all_threads)

    def _choose(self, all_threads: float, one: float) -> None:
        confirmed, self._on_one = self._on_one == (one < all_threads), one < all_threads
        self._trusted = min(2 * self._trusted, MAX_TRUSTED) if confirmed else TRUSTED
        self._left = self._trusted * TRIALS * (all_threads + one)


@cache
def _serial() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(call_in_turn())


def _table(commands: Sequence[Command]) -> Any:
    return np.array(commands, np.int64).reshape(-1, 4)


def _serial_parts(commands: Sequence[Command]) -> list[list[Command]]:
    """The commands in parts: neighbours that are for one thread each together, the others by themselves."""
    parts: list[list[Command]] = []
    for command in commands:
        if parts and command[3] == parts[-1][-1][3] == 1:
            parts[-1].append(command)
        else:
            parts.append([command])
    return parts


def _joined(part: Any) -> Command:
    """A part's only command, or one that makes all of them on one thread."""
    if len(part) == 1:
        return tuple(part[0].tolist())
    return call_in_turn(), int(part.ctypes.data), len(part), 1


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
