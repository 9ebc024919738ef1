"""How long a device's exchange of gradients takes, and how much of that it waits for.

Communication is the time in which at least one exchange is under way, exposed time that in which the device has nothing
left to compute. Where the exchange does not overlap with the backward pass, both are about the same. Waiting for
devices that are late counts as communication. That the device computes more slowly beside an exchange is in neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.backend import Backend

_COMMUNICATION, _EXPOSED = 0, 1


class CommTimer:
    """Adds up what one device's exchanges took, on the device's own clock, captured or not.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._stopwatch = backend.device_timer(2)
        self._under_way = 0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count a `with` block as an exchange; several may be open at once, and are counted once."""
        if not self._under_way:
            self._stopwatch.start(_COMMUNICATION)
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
        if not self._under_way:
            self._stopwatch.stop(_COMMUNICATION)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count a `with` block in which the device only communicates, or waits until it has."""
        self._stopwatch.start(_EXPOSED)
        yield
        self._stopwatch.stop(_EXPOSED)

    def reset(self) -> None:
        """Forget what was counted: the first iterations compile and plan."""
        self._stopwatch.reset()

    def totals(self) -> tuple[float, float]:
        """Seconds of communication, and of those the exposed ones; waits for the device."""
        communication, waited = self._stopwatch.totals()
        return communication, min(waited, communication)  # a wait begins a little earlier than what it waits for
