"""Stop requests of any process, sent over the control channel beside the gradients.

Requests travel with the gradients. A device that waits for data, or a process that is suspended, keeps the others from
exchanging any: the first asks here whether it is to stop, and the watchdog whom it may no longer wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection
from contextlib import suppress

from caffepy.errors import PeerError
from caffepy.monotonic_clock import suspend_aware_seconds
from caffepy.parallel.store.store import ControlChannel
from caffepy.solvers.callbacks import Action

_KEY = "stop"
_ASK_SECONDS = 0.5
"""Between two questions to the store."""


class StopNews:
    """What a signal that stops training asks for, in this process or another.

    Args:
        own: what signals of this process ask for; empty before there was one.
        channel: to the other processes.
    """

    def __init__(self, own: Callable[[], Collection[Action]], channel: ControlChannel) -> None:
        self._own = own
        self._channel = channel
        self._heard: tuple[Action, ...] = ()
        self._since: float | None = None
        self._answered = 0.0
        self._lock = threading.Lock()
        self._asked = -_ASK_SECONDS

    def tell(self) -> None:
        """Tell the other processes what this one was asked for; called again and again by the watchdog.

        It is told every time, because the store's answer shows that rank 0 is alive.
        """
        own = self._own()
        if not own:
            return
        if self._since is None:
            self._since = self._answered = suspend_aware_seconds()
        with suppress(PeerError):  # the monitor hears of the failure, or `unanswered` grows
            self._channel.put(_KEY, ",".join(action.name for action in own).encode())
            self._answered = suspend_aware_seconds()

    @property
    def unanswered(self) -> float:
        """Seconds for which rank 0 has not answered `tell`; 0.0 where this process has nothing to tell."""
        return 0.0 if self._since is None else suspend_aware_seconds() - self._answered

    @property
    def age(self) -> float:
        """Seconds since this process has known that some process was asked to stop; 0.0 before."""
        if self._since is None and self.wanted():
            self._since = self._answered = suspend_aware_seconds()
        return 0.0 if self._since is None else suspend_aware_seconds() - self._since

    def wanted(self) -> Collection[Action]:
        """What is asked for; asks the store at most twice a second. Callable from any thread."""
        if own := self._own():
            return own
        with self._lock:
            if not self._heard and suspend_aware_seconds() >= self._asked + _ASK_SECONDS:
                self._heard = self._ask()
                self._asked = suspend_aware_seconds()
            return self._heard

    def _ask(self) -> tuple[Action, ...]:
        try:
            value = self._channel.take(_KEY, 0.0)
        except PeerError:  # as in `tell`
            value = None
        return () if value is None else tuple(Action[name] for name in bytes(value).decode().split(","))
