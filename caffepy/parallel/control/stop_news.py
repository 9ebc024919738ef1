"""Stop requests of any process, for devices that wait for their data.

Requests travel with the gradients, but a device that waits for data keeps the others from exchanging any.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection

from caffepy.awake import awake_seconds
from caffepy.errors import PeerError
from caffepy.parallel.store.store import ControlChannel
from caffepy.solvers.callbacks import Action

_KEY = "stop"
_ASK_SECONDS = 0.5
"""Between two questions to the store."""


class StopNews:
    """What a signal that stops training asks for, in this process or another.

    Args:
        own: what those of this process ask for; nothing before there was one.
        channel: to the other processes.
    """

    def __init__(self, own: Callable[[], Collection[Action]], channel: ControlChannel) -> None:
        self._own = own
        self._channel = channel
        self._heard: tuple[Action, ...] = ()
        self._told = False
        self._lock = threading.Lock()
        self._asked = -_ASK_SECONDS

    def tell(self) -> None:
        """Tell the other processes what this one was asked for; called again and again by the watchdog."""
        own = self._own()
        if not own or self._told:
            return
        try:
            self._channel.put(_KEY, ",".join(action.name for action in own).encode())
            self._told = True
        except PeerError:  # the monitor hears of the failure
            return

    def wanted(self) -> Collection[Action]:
        """What is asked for; asks the store at most twice a second. Callable from any thread."""
        if own := self._own():
            return own
        with self._lock:
            if not self._heard and awake_seconds() >= self._asked + _ASK_SECONDS:
                self._heard = self._ask()
                self._asked = awake_seconds()
            return self._heard

    def _ask(self) -> tuple[Action, ...]:
        try:
            value = self._channel.take(_KEY, 0.0)
        except PeerError:  # as in `tell`
            value = None
        return () if value is None else tuple(Action[name] for name in bytes(value).decode().split(","))
