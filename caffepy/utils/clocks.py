"""A clock that stands still while this process is suspended, for waits with a timeout.

Ctrl-Z, `docker pause`, `scontrol suspend` and debuggers stop all threads of a process; when they continue, every wait
has exceeded its timeout by the system's clock. A thread reads that clock twice a second: a reading that comes much too
late means that the process was suspended in between.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_TICK = 0.5
"""Seconds between two readings of the system's clock."""
_LATE = 2.5
"""Seconds between two readings above which the process was suspended, not merely busy."""


class SuspendAwareClock:
    """Counts the seconds in which a process runs; each read is a reading of the system's clock too.

    Args:
        now: the system's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._last = now()
        self._seconds = 0.0

    def read(self) -> float:
        """Seconds since the clock was made, without those in which the process was suspended."""
        with self._lock:
            now = self._now()
            passed = now - self._last
            self._last = now
            self._seconds += passed if passed < _LATE else _TICK
            return self._seconds


class _ProcessClock:
    """The process's clock and the thread that reads it, which the first caller starts."""

    def __init__(self) -> None:
        self.clock = SuspendAwareClock()
        self._lock = threading.Lock()
        self._started = False

    def seconds(self) -> float:
        if not self._started:
            self._start()
        return self.clock.read()

    def _start(self) -> None:
        with self._lock:
            if not self._started:
                self.clock = SuspendAwareClock()
                threading.Thread(target=self._tick, name="clock", daemon=True).start()
                self._started = True

    def _tick(self) -> None:
        while True:
            time.sleep(_TICK)
            self.clock.read()


_clock = _ProcessClock()


def _restart_after_fork() -> None:
    """In a forked process, which has not the thread that reads the clock."""
    global _clock
    _clock = _ProcessClock()


os.register_at_fork(after_in_child=_restart_after_fork)


def suspend_aware_seconds() -> float:
    """Seconds that this process has run since the first call; only differences mean anything. Thread-safe."""
    return _clock.seconds()
