"""Kernel calls that are captured, to be made again without Python.

Between two kernels of a net Python needs about 40 us, as long as the kernels of small layers, and one thread only.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from functools import cache
from itertools import groupby
from statistics import median
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.threads import THREADS, Command, JointCalls, call_in_turn
from caffepy.errors import RunError


class HostWorkError(RunError):
    """While kernel calls are captured, something else than a kernel has to work on arrays."""


class KernelCalls:
    """The kernel calls of some work, which are noted and not made.

    Attributes:
        commands: function, argument block, items and pieces of each call.
        kept: what lies at the addresses in the argument blocks, and the blocks.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.kept: list[Any] = []


class _Current(threading.local):
    calls: KernelCalls | None = None


CURRENT = _Current()
"""What this thread's kernel calls are written to."""


def note_host_work() -> None:
    """Called before something else than a kernel works on arrays.

    Raises:
        HostWorkError: kernel calls are being captured.
    """
    if CURRENT.calls is not None:
        raise HostWorkError("not done by kernels alone")


class KernelGraph:
    """A `Graph` on the CPU: works that are done by kernels become one program; the others are called in their turn.

    Args:
        works: in order; none of them is done now. Kernels are called again with the same arrays, which must not move.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self.kernel_calls = 0
        """How many kernel calls a launch makes without Python."""
        self.host_works = 0
        """How many of the works are called."""
        self._steps: list[Callable[[], None]] = []
        captured = [(work, _kernel_calls(work)) for work in works]
        for by_kernels, group in groupby(captured, key=lambda pair: pair[1] is not None):
            pairs = list(group)
            if by_kernels:
                calls = [calls for _, calls in pairs if calls is not None and calls.commands]
                self.kernel_calls += sum(len(each.commands) for each in calls)
                self._steps += [_Program(calls).launch] if calls else []
            else:
                self.host_works += len(pairs)
                self._steps += [work for work, _ in pairs]

    def launch(self) -> None:
        """Do the works."""
        for step in self._steps:
            step()


def _kernel_calls(work: Callable[[], None]) -> KernelCalls | None:
    """The kernel calls of a work, which are not made; None if kernels alone do not do it."""
    CURRENT.calls = calls = KernelCalls()
    try:
        work()
    except HostWorkError:
        return None
    finally:
        CURRENT.calls = None
    return calls


class _Program:
    """Kernel calls that are made in one call, by one thread or by all; the results are the same.

    Args:
        calls: of one work or more, in order, not empty.
    """

    def __init__(self, calls: Sequence[KernelCalls]) -> None:
        self._kept = [one.kept for one in calls]
        commands = [command for one in calls for command in one.commands]
        self._alone = _table(commands)
        self._parts = [_table(part) for part in _serial_parts(commands)]
        self._table = _table([_joined(part) for part in self._parts])
        threads = int(self._table[:, 3].max())
        self._joint = JointCalls(self._table, threads)
        self._choice = ThreadChoice() if threads > 1 else None
        self._lock = threading.Lock()

    def launch(self) -> None:
        """Make the calls in order."""
        with self._lock:
            if self._choice is None:
                self._run(True)
                return
            begin, on_one = time.perf_counter(), self._choice.on_one
            self._run(on_one)
            self._choice.took(time.perf_counter() - begin)

    def _run(self, on_one: bool) -> None:
        if on_one:
            _serial()(self._alone.ctypes.data, 0, len(self._alone))
        else:
            THREADS.run_program(self._joint)


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


class ThreadChoice:
    """Whether the passes of a program run on one thread or on all.

    Waking another thread takes as long as a small net's whole pass, so some passes are timed on all threads, whose idle
    ones then stay awake in between, and as many on one. The faster way holds for a while, then both are timed again.
    """

    def __init__(self) -> None:
        self._all_threads: list[float] = []
        self._one: list[float] = []
        self._chosen, self._trusted = False, TRUSTED
        self._left = 0.0
        """Seconds of passes for which the choice holds."""

    @property
    def on_one(self) -> bool:
        """Whether the next pass runs on one thread."""
        return self._chosen if self._left > 0 else len(self._all_threads) == WARMING + TRIALS

    def took(self, seconds: float) -> None:
        """Take note of the duration of a pass that ran as `on_one` said."""
        if self._left > 0:
            self._left -= seconds
            return
        all_threads, one = self._all_threads, self._one
        (one if self.on_one else all_threads).append(seconds)
        if len(one) == WARMING + TRIALS:
            self._choose(median(all_threads[WARMING:]), median(one[WARMING:]))
        elif len(all_threads) == WARMING + TRIALS and min(all_threads) > LONG:  # the first may have compiled
            self._hold(False, MAX_TRUSTED * sum(all_threads))

    def _choose(self, all_threads: float, one: float) -> None:
        on_one = one < all_threads
        self._trusted = min(2 * self._trusted, MAX_TRUSTED) if self._chosen == on_one else TRUSTED
        self._hold(on_one, self._trusted * TRIALS * (all_threads + one))

    def _hold(self, on_one: bool, seconds: float) -> None:
        self._chosen, self._left = on_one, seconds
        self._all_threads, self._one = [], []


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
