"""How long a device's exchange of gradients takes, and how much of that it waits for.

Communication is the time from the begin of an exchange to its end, exposed time the part of it in which the device
computes nothing. Where the exchange does not overlap with the backward pass, both are the same. Waiting for devices
that are late counts as communication.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from caffepy.backend import Backend
from caffepy.backend.protocols import Stamp

_BEHIND = 8
"""Exchanges after which a device has surely done one: looking at its times then waits for nothing."""


class CommunicationClock:
    """Adds up what one device's exchanges took.

    Args:
        backend: the device.
        counting: whether training's seconds are being counted now; what happens at other times is left out.
    """

    def __init__(self, backend: Backend, counting: Callable[[], bool]) -> None:
        self._backend = backend
        self._counting = counting
        self._communication = 0.0
        self._exposed = 0.0
        self._pending: deque[tuple[Stamp, Stamp]] = deque()

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count a `with` block in which the device only communicates, or waits until it has; not within a capture."""
        if not self._counting():
            yield
            return
        begin = self._backend.stamp()
        yield
        self._pending.append((begin, self._backend.stamp()))
        while len(self._pending) > _BEHIND:
            self._take()

    def hidden(self, seconds: float) -> None:
        """Count communication that went on while the device computed."""
        if self._counting():
            self._communication += seconds

    def totals(self) -> tuple[float, float]:
        """Seconds of communication, and of those the exposed ones; waits for the device."""
        while self._pending:
            self._take()
        return self._communication + self._exposed, self._exposed

    def _take(self) -> None:
        begin, end = self._pending.popleft()
        self._exposed += end.seconds_since(begin)
