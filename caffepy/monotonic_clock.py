"""A clock that stands still while this process is suspended, for waits that must have an end.

Ctrl-Z, `docker pause`, `scontrol suspend` and debuggers stop all threads of a process; when they go on, the system's
clock says that every wait has lasted for too long. A thread looks at that clock twice a second: where it comes much too
late, the time between two looks was not the process's own.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable

_TICK = 0.5
"""Seconds between two looks at the system's clock."""
_LATE = 2.5
"""Seconds after which a look comes so late that the process was suspended, and not only busy."""


class SuspendAwareClock:
    """Counts the seconds in which a process runs. Whoever reads it looks at the system's clock too.

    Args:
        now: the system's clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._looked = now()
        self._seconds = 0.0

    def read(self) -> float:
        """Seconds since the clock was made, without those in which the process was suspended."""
        with self._lock:
            now = self._now()
            passed = now - self._looked
            self._looked = now
            self._seconds += passed if passed < _LATE else _TICK
            return self._seconds


class _Looking:
    """The process's clock and the thread that looks at it, which is started by the first reader."""

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
                threading.Thread(target=self._look, name="clock", daemon=True).start()
                self._started = True

    def _look(self) -> None:
        while True:
            time.sleep(_TICK)
            self.clock.read()


_looking = _Looking()


def _look_anew() -> None:
    """In a process that was forked: it has no thread that looks."""
    global _looking
    _looking = _Looking()


os.register_at_fork(after_in_child=_look_anew)


def suspend_aware_seconds() -> float:
    """Seconds in which this process has run since this was first asked for; for differences, in any thread."""
    return _looking.seconds()
