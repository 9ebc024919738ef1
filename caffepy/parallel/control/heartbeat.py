"""What one device's thread says of itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from caffepy.data.prefetch import awaited_data
from caffepy.monotonic_clock import suspend_aware_seconds
from caffepy.parallel.store.records import DeviceStatus


class Heartbeat:
    """What one solver thread, or process group, is doing; read by the control plane's thread.

    Args:
        device: what the device is called.
        iteration: asks the solver for its iteration.
        begun: the first iteration is over; else it is when the iteration changes after `begin` was called.
    """

    def __init__(self, device: str, iteration: Callable[[], int] = lambda: 0, begun: bool = True) -> None:
        self.device = device
        self.iteration = iteration
        self.collectives = 0
        """How many operations that need all devices were begun."""
        self._first: int | None = -1 if begun else None
        # One tuple, replaced whole: the reader needs no lock to see values that belong together.
        self._now: tuple[str | Callable[[], str], float] = ("", suspend_aware_seconds())
        self._thread = 0

    def begin(self) -> None:
        """The first iteration begins."""
        self._first = self.iteration()

    @contextmanager
    def collective(self, what: str | Callable[[], str]) -> Iterator[None]:
        """Mark an operation that waits for all devices: what it is, or who says how far it has come.

        Called by the solver thread.
        """
        self.collectives += 1
        self._mark(what)
        yield  # an operation that raised stays marked: the thread ends
        self._mark("")

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark the wait for an operation that was begun, and counted, before."""
        self._mark(what)
        try:
            yield
        finally:
            self._mark("")

    def status(self, rank: int, host: str) -> DeviceStatus:
        """A snapshot, for a process's rank and host."""
        waiting, begun = self._now
        data = None if waiting else awaited_data(self._thread)
        reading, begun = data or ("", begun)
        seconds = suspend_aware_seconds() - begun
        what = waiting if isinstance(waiting, str) else waiting()
        iteration = self.iteration()
        starting = self._first is None or iteration == self._first
        return DeviceStatus(
            rank, host, os.getpid(), self.device, iteration, self.collectives, what, seconds, reading, starting
        )

    def _mark(self, waiting: str | Callable[[], str]) -> None:
        self._thread = threading.get_ident()
        self._now = waiting, suspend_aware_seconds()
