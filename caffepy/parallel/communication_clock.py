"""How long a device's exchange of gradients takes, and how much of that it waits for.

Communication is the time from the begin of an iteration's first exchange to the end of its last, exposed time the part
of it in which the device has nothing left to compute. Where the exchange does not overlap with the backward pass, both
are the same. Waiting for devices that are late counts as communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.backend import Backend

_COMMUNICATION, _EXPOSED = 0, 1


class CommunicationClock:
    """Adds up what one device's exchanges took, on the device's own clock, captured or not.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._stopwatch = backend.stopwatch(2)
        self._begun = False

    def begin(self) -> None:
        """An iteration's first exchange begins."""
        self._begun = True
        self._stopwatch.start(_COMMUNICATION)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count a `with` block in which the device only communicates, or waits until it has; ends the exchange."""
        if not self._begun:
            self.begin()
        self._stopwatch.start(_EXPOSED)
        yield
        self._stopwatch.stop()
        self._begun = False

    def reset(self) -> None:
        """Forget what was counted: the first iterations compile and plan."""
        self._stopwatch.reset()

    def totals(self) -> tuple[float, float]:
        """Seconds of communication, and of those the exposed ones; waits for the device."""
        communication, exposed = self._stopwatch.totals()
        return communication, exposed
