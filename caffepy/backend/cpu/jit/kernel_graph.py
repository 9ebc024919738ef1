"""Captured kernel calls, replayed without Python.

Between two kernels of a net Python takes about 40 us on one thread, as long as the kernels of small layers.
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
    """Work other than kernels accesses arrays during a capture."""


class KernelCalls:
    """Recorded kernel calls.

    Attributes:
        commands: function, argument block, items and pieces of each call.
        kept: owners of the memory at the addresses in the argument blocks, and the blocks.
    """

    def __init__(self) -> None:
        self.commands: list[Command] = []
        self.kept: list[Any] = []


class _Current(threading.local):
    calls: KernelCalls | None = None


CURRENT = _Current()
"""The recorder of this thread's kernel calls."""


def note_host_work() -> None:
    """Announce array access outside kernels.

    Raises:
        HostWorkError: a capture is in progress.
    """
    if CURRENT.calls is not None:
        raise HostWorkError("the work is not done by kernels alone")


class KernelGraph:
    """A `Graph` on the CPU: work done by kernels alone becomes one program; other work is called in order.

    Args:
        works: functions, in order; they are not executed now. The arrays of their kernels must not move.
    """

    def __init__(self, works: Sequence[Callable[[], None]]) -> None:
        self.kernel_calls = 0
        """Kernel calls that a launch makes without Python."""
        self.host_works = 0
        """Number of works that a launch calls in Python."""
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
        """Run the works in order."""
        for step in self._steps:
            step()


def _kernel_calls(work: Callable[[], None]) -> KernelCalls | None:
    """Record a work's kernel calls without executing them; None if it is not done by kernels alone."""
    CURRENT.calls = calls = KernelCalls()
    try:
        work()
    except HostWorkError:
        return None
    finally:
        CURRENT.calls = None
    return calls


class _Program:
    """Kernel calls that run as one call, on one thread or on all, with equal results.

    Args:
        calls: of one or more works, in order, not empty.
    """

    def __init__(self, calls: Sequence[KernelCalls]) -> None:
        self._kept = [one.kept for one in calls]
        commands = [command for one in calls for command in one.commands]
        self._alone = _table(commands)
        self._parts = [_table(part) for part in _serial_parts(commands)]
        self._table = _table([_merged(part) for part in self._parts])
        threads = int(self._table[:, 3].max())
        self._joint = JointCalls(self._table, threads)
        self._choice = ThreadChoice() if threads > 1 else None
        self._lock = threading.Lock()

    def launch(self) -> None:
        """Run the calls in order."""
        with self._lock:
            if self._choice is None:
                self._run(True)
                return
            begin, on_one = time.perf_counter(), self._choice.on_one
            self._run(on_one)
            self._choice.record(time.perf_counter() - begin)

    def _run(self, on_one: bool) -> None:
        if on_one:
            _serial()(self._alone.ctypes.data, 0, len(self._alone))
        else:
            THREADS.run_program(self._joint)


TRIALS = 5
"""Timed passes on one thread and on all threads before a choice."""
WARMUP_PASSES = 3
"""Untimed passes before the trials. After a pause, threads are asleep and weights are out of the caches, or other
programs' idle threads still spin: without them, the autoencoder beside another program always chose one thread."""
LONG = 0.002
"""Seconds above which one thread is not tried. It gains at most 5 % beside a busy program, and a wrong choice doubles
the time until the next trial."""
TRUSTED, MAX_TRUSTED = 10, 160
"""Validity of a choice as a multiple of its trials' time, because the machine's load may change: initial, and maximum
after repeated confirmation. Pauses between passes do not count, else a trial would follow each pause."""


class ThreadChoice:
    """The choice between one thread and all threads for the passes of a program.

    Waking a thread takes as long as a small net's whole pass. Therefore some passes are timed on all threads, where
    idle threads keep spinning in between, and as many on one. The faster way is valid for some time, then both are
    timed again.
    """

    def __init__(self) -> None:
        self._all_threads: list[float] = []
        self._one: list[float] = []
        self._chosen, self._trusted = False, TRUSTED
        self._remaining = 0.0
        """Seconds of passes for which the choice remains valid."""

    @property
    def on_one(self) -> bool:
        """Return whether the next pass runs on one thread."""
        return self._chosen if self._remaining > 0 else len(self._all_threads) == WARMUP_PASSES + TRIALS

    def record(self, seconds: float) -> None:
        """Record the duration of a pass that ran as `on_one` returned."""
        if self._remaining > 0:
            self._remaining -= seconds
            return
        all_threads, one = self._all_threads, self._one
        (one if self.on_one else all_threads).append(seconds)
        if len(one) == WARMUP_PASSES + TRIALS:
            self._choose(median(all_threads[WARMUP_PASSES:]), median(one[WARMUP_PASSES:]))
        elif len(all_threads) == WARMUP_PASSES + TRIALS and min(all_threads) > LONG:  # the first pass may have compiled
            self._hold(False, MAX_TRUSTED * sum(all_threads))

    def _choose(self, all_threads: float, one: float) -> None:
        on_one = one < all_threads
        self._trusted = min(2 * self._trusted, MAX_TRUSTED) if self._chosen == on_one else TRUSTED
        self._hold(on_one, self._trusted * TRIALS * (all_threads + one))

    def _hold(self, on_one: bool, seconds: float) -> None:
        self._chosen, self._remaining = on_one, seconds
        self._all_threads, self._one = [], []


@cache
def _serial() -> Any:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)(call_in_turn())


def _table(commands: Sequence[Command]) -> Any:
    return np.array(commands, np.int64).reshape(-1, 4)


def _serial_parts(commands: Sequence[Command]) -> list[list[Command]]:
    """Split commands into parts: adjacent single-thread commands together, others separately."""
    parts: list[list[Command]] = []
    for command in commands:
        if parts and command[3] == parts[-1][-1][3] == 1:
            parts[-1].append(command)
        else:
            parts.append([command])
    return parts


def _merged(part: Any) -> Command:
    """Return a part's only command, or one that runs all of them on one thread."""
    if len(part) == 1:
        return tuple(part[0].tolist())
    return call_in_turn(), int(part.ctypes.data), len(part), 1
