"""How long a device's all-reduces of gradients take, and how much of that is exposed.

Communication is the time in which at least one all-reduce is pending, exposed time that in which the device has nothing
left to compute. Without overlap with the backward pass, both are about the same. Waiting for stragglers counts as
communication. That the device computes more slowly during an all-reduce is in neither.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from caffepy.backend import Backend

_COMMUNICATION, _EXPOSED = 0, 1


class CommTimer:
    """Adds up what one device's all-reduces took, on the device's own clock, captured or not.

    Args:
        backend: the device.
    """

    def __init__(self, backend: Backend) -> None:
        self._timer = backend.device_timer(2)
        self._pending = 0

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Count a `with` block as communication; time in which several are open is counted once."""
        if not self._pending:
            self._timer.start(_COMMUNICATION)
        self._pending += 1
        try:
            yield
        finally:
            self._pending -= 1
        if not self._pending:
            self._timer.stop(_COMMUNICATION)

    @contextmanager
    def exposed(self) -> Iterator[None]:
        """Count a `with` block in which the device only communicates, or waits until it has."""
        self._timer.start(_EXPOSED)
        yield
        self._timer.stop(_EXPOSED)

    def reset(self) -> None:
        """Forget what was counted: the first iterations compile and plan."""
        self._timer.reset()

    def totals(self) -> tuple[float, float]:
        """Seconds of communication, and of those the exposed ones; synchronizes the device."""
        communication, waited = self._timer.totals()
        return communication, min(waited, communication)  # a wait begins a little earlier than what it waits for
