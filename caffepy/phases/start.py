"""What a process does before its first iteration: how often and how long; a line of the log where that is silent.

`phase("tuning")` marks such work wherever it is done, in any thread. Times are inclusive: what a phase does within
another counts in both. Until `begun` is called, a thread of `announced` looks at the log and, where nothing came for
more than a second, says what is being done.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from caffepy.forks import free_after_fork

logger = logging.getLogger(__name__)

SILENCE = 1.0
"""Seconds without a line of the log after which there is one."""
_LOOK = 0.1
"""Seconds between two looks."""
SWITCH_INTERVAL = 0.0005
"""Seconds after which Python lets another thread run at the start, for its usual 0.005: each of a start's many short
calls of CUDA would wait so long for the threads that read data."""


@dataclass
class Phase:
    """One kind of work.

    Args:
        name: for the table.
        number: how often it was done.
        seconds: how long, in all threads together.
        ended: when it was done last, in seconds since the process began.
        doing: what the log calls it; empty where it is not worth a line.
        active: how many threads do it now.
    """

    name: str
    number: int = 0
    seconds: float = 0.0
    ended: float = 0.0
    doing: str = ""
    active: int = 0

    def describe(self) -> str:
        """``Compiling CPU kernels (12 so far)``."""
        return f"{self.doing} ({self.number} so far)" if self.number else self.doing


class Phases:
    """The phases of a process.

    Args:
        now: seconds since the process began.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self.now = now
        self.is_over = False
        """Whether the first iteration was made; later work is not counted."""
        self.level = logging.DEBUG
        """Of the table in the log."""
        self._lock = free_after_fork(threading.Lock())
        self._phases: dict[str, Phase] = {}
        self._latest: Phase | None = None

    @contextmanager
    def phase(self, name: str, doing: str = "") -> Iterator[None]:
        """Count and time what a `with` block does; arguments as in `Phase`."""
        if self.is_over:
            yield
            return
        begin = self.now()
        with self._lock:
            entry = self._phases.setdefault(name, Phase(name))
            entry.doing = doing
            entry.active += 1
            self._latest = entry if doing else self._latest
        try:
            yield
        finally:
            with self._lock:
                entry.active -= 1
                self._add(entry, begin)

    def add(self, name: str, begin: float) -> None:
        """Count something that began at `begin` and ends now."""
        if not self.is_over:
            with self._lock:
                self._add(self._phases.setdefault(name, Phase(name)), begin)

    def _add(self, entry: Phase, begin: float) -> None:
        entry.ended = self.now()
        entry.number += 1
        entry.seconds += entry.ended - begin

    def doing(self) -> str:
        """What is being done, or was until a moment ago, in words; empty if nothing that has any."""
        with self._lock:
            latest = self._latest
            if latest is None or not (latest.active or self.now() - latest.ended < SILENCE):
                active = [entry for entry in self._phases.values() if entry.active and entry.doing]
                latest = active[-1] if active else None
        return "" if latest is None else latest.describe()

    def begun(self) -> None:
        """The first iteration is done: log the table."""
        if self.is_over:
            return
        with self._lock:
            if self.is_over:
                return
            self.is_over = True
            entries = sorted(self._phases.values(), key=lambda entry: entry.ended)
        for entry in entries:
            row = (entry.name, entry.number, entry.seconds, entry.ended)
            logger.log(self.level, "Start: %s: %d, %.3f s, ended at %.3f s", *row)
        logger.log(self.level, "Start: the first iteration ended at %.3f s", self.now())


class _LastLine(logging.Handler):
    """Notes when the log had its last line.

    Args:
        now: the clock.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        super().__init__(logging.INFO)
        self._now = now
        self.time = now()

    def emit(self, record: logging.LogRecord) -> None:
        self.time = self._now()


@contextmanager
def announcing(phases: Phases, switch_interval: float | None = None) -> Iterator[None]:
    """Until the first iteration is done or a `with` block is left, say what is being done where the log is silent.

    Args:
        phases: what is being done.
        switch_interval: Python's until then (`sys.setswitchinterval`), in seconds; None: as it is.
    """
    stop = threading.Event()
    package = logging.getLogger("caffepy")
    last = _LastLine(phases.now)

    def look() -> None:
        while not phases.is_over and not stop.wait(_LOOK):
            doing = phases.doing() if phases.now() - last.time >= SILENCE else ""
            if doing:
                logger.info("%s ...", doing)
        sys.setswitchinterval(interval)

    package.addHandler(last)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(switch_interval or interval)
    thread = threading.Thread(target=look, name="announcing", daemon=True)
    try:
        thread.start()
        yield
    finally:
        stop.set()
        if thread.ident is not None:
            thread.join()
        sys.setswitchinterval(interval)  # where no thread could be started
        package.removeHandler(last)


def _age() -> float:
    """Seconds since the system started this process; 0 where it does not say (Linux's proc(5), field 22)."""
    try:
        text = Path("/proc/self/stat").read_text(encoding="ascii", errors="replace")
        started = int(text.rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - started)
    except (OSError, ValueError, IndexError, AttributeError):
        return 0.0


_ORIGIN = time.monotonic() - _age()

START = Phases(lambda: time.monotonic() - _ORIGIN)
"""This process's phases."""

phase = START.phase
