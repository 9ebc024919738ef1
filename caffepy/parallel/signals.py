"""SIGINT, SIGHUP and SIGTERM become requests that the solver reads between iterations (Caffe's `signal_handler`)."""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

from caffepy.solvers.callbacks import Action

logger = logging.getLogger(__name__)

_REQUESTS: dict[str, tuple[Action, ...]] = {"stop": (Action.STOP,), "snapshot": (Action.SNAPSHOT,)}
_MESSAGES = {
    Action.STOP: "training stops after this iteration",
    Action.SNAPSHOT: "a snapshot is written after this iteration",
}


class SignalRequests:
    """Requests made by signals; a call returns and removes the oldest one, or `Action.NONE`.

    Args:
        effects: of each signal: stop, snapshot or none; SIGTERM's stop writes a snapshot first, because batch systems
            send SIGTERM before they take the machine back.
        interrupted_again: called at the second SIGINT if the effect of SIGINT is stop.
        failed: whether training has failed; signals are ignored then, as mpirun sends SIGTERM when a rank has died.
    """

    def __init__(
        self, effects: Mapping[int, str], interrupted_again: Callable[[], None], failed: Callable[[], bool]
    ) -> None:
        self._effects = effects
        self._interrupted_again = interrupted_again
        self._failed = failed
        self._interrupted = False
        """Whether a SIGINT has requested a stop."""
        self._requests: deque[Action] = deque()
        self._previous: dict[int, Any] = {}

    def __call__(self) -> Action:
        return self._requests.popleft() if self._requests else Action.NONE

    def install(self) -> None:
        """Install the handlers. Does nothing outside the main thread, where Python does not allow it."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, effect in self._effects.items():
            if effect != "none":
                self._previous[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Restore the previous handlers."""
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous.clear()

    def _handle(self, number: int, frame: FrameType | None) -> None:
        effect = self._effects[number]
        if number == signal.SIGINT and effect == "stop":
            if self._interrupted:
                self._interrupted_again()
            self._interrupted = True
        if self._failed():
            return
        requests = _REQUESTS[effect]
        if number == signal.SIGTERM and effect == "stop":
            requests = (Action.SNAPSHOT, Action.STOP)
        for request in requests:
            # A pending request is not queued again: a stop would wait behind many snapshots.
            if request not in self._requests:
                self._requests.append(request)
        logger.info("%s: %s", signal.Signals(number).name, " and ".join(_MESSAGES[request] for request in requests))
