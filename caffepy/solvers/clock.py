"""Times training: what the report calls the performance, and the seconds between displays."""

from __future__ import annotations

import time
from collections.abc import Callable

from caffepy.backend.interface import Backend
from caffepy.report import WARM_UP, Performance


class Clock:
    """Adds up the seconds of training iterations, without the first ones, tests and snapshots.

    Args:
        performance: where iterations and seconds are added.
        backend: made to finish before the clock is stopped.
        on_start: called once, when the first iterations are over and seconds begin to count.
    """

    def __init__(self, performance: Performance, backend: Backend, on_start: Callable[[], None] = lambda: None) -> None:
        self._performance = performance
        self._backend = backend
        self._seen = 0
        self._started: float | None = None
        self._active = False
        self._on_start = on_start
        self._shown = time.monotonic()
        self._shown_iteration: int | None = None

    @property
    def running(self) -> bool:
        """Whether seconds are being counted, or will be once the first iterations are over."""
        return self._active

    def tick(self) -> None:
        """One more iteration is done; it counts if the clock ran."""
        self._seen += 1
        if self._started is not None:
            self._performance.iterations += 1
        elif self._active:
            self.resume()

    def pause(self) -> None:
        """Stop for something that is not training."""
        self._active = False
        if self._started is not None:
            self._backend.synchronize()
            self._performance.seconds += time.monotonic() - self._started
            self._started = None

    def resume(self) -> None:
        """Count seconds again, once the first iterations are over."""
        self._active = True
        if self._seen >= WARM_UP and self._started is None:
            self._backend.synchronize()
            if self._performance.iterations == 0:
                self._on_start()
            self._started = time.monotonic()

    def lap(self, iteration: int) -> tuple[float, float]:
        """Iterations a second and seconds since the last call; (0, seconds) on the first one."""
        now = time.monotonic()
        seconds = now - self._shown
        done = iteration - self._shown_iteration if self._shown_iteration is not None else 0
        self._shown, self._shown_iteration = now, iteration
        return done / seconds if seconds > 0 else 0.0, seconds
