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
_SAID = {
    Action.STOP: "training stops after this iteration",
    Action.SNAPSHOT: "a snapshot is written after this iteration",
}


class SignalRequests:
    """What signals asked for; calling the object takes the oldest request.

    Args:
        effects: what each signal does: stop, snapshot or none; SIGTERM's stop writes a snapshot first, since whoever
            sends it (a batch system) wants the machine back and the work kept.
        interrupted_again: called at a SIGINT after one that asked for a stop. Where SIGINT asks for a snapshot every
            one of them does, and none ends the run.
        failed: whether training ends anyway; then signals are ignored: mpirun sends SIGTERM when a rank has died.
    """

    def __init__(
        self, effects: Mapping[int, str], interrupted_again: Callable[[], None], failed: Callable[[], bool]
    ) -> None:
        self._effects = effects
        self._interrupted_again = interrupted_again
        self._failed = failed
        self._interrupted = False
        """Whether a SIGINT has asked for a stop."""
        self._requests: deque[Action] = deque()
        self._before: dict[int, Any] = {}

    def __call__(self) -> Action:
        return self._requests.popleft() if self._requests else Action.NONE

    def install(self) -> None:
        """Take the signals over; Python lets the main thread alone do it, so elsewhere nothing happens."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number, effect in self._effects.items():
            if effect != "none":
                self._before[number] = signal.signal(number, self._handle)

    def restore(self) -> None:
        """Give the signals back."""
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

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
            # What waits to be taken already is not asked for twice: a stop would wait behind many snapshots.
            if request not in self._requests:
                self._requests.append(request)
        logger.info("%s: %s", signal.Signals(number).name, " and ".join(_SAID[request] for request in requests))
