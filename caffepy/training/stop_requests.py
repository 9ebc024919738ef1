"""Stops and snapshots that are requested while a solver trains, by signals of any device's process.

SIGINT, SIGHUP and SIGTERM become requests that the solver reads between iterations (Caffe's `signal_handler`). All
devices act on the same requests in the same iteration. Each sends its own as flags beside its gradients, and the
averaged flags say what any device requested. A device that replays graphs reads them only some iterations later, so all
devices wait that long, devices that run eagerly included.

A device that trains alone ends its wait for data when a stop is requested. Where several devices train, a stop takes
effect when the data come.
"""

from __future__ import annotations

import logging
import signal
import threading
from collections import deque
from collections.abc import Callable, Mapping
from types import FrameType
from typing import Any

import numpy as np

from caffepy.errors import AbortedError, StopRequestedError
from caffepy.training.callback import Action

logger = logging.getLogger(__name__)


FLAGS = (Action.STOP, Action.SNAPSHOT)
"""The requests that devices exchange, in the order of their flags."""


class StopRequests:
    """The pending requests; `in` and `bool` ask for requests that all devices know.

    Args:
        ask: gives this process's requests, one a call; None: there are none.
        alone: there are no other devices, so that requests are acted on at once.
    """

    def __init__(self, ask: Callable[[], Action] | None, alone: bool = True) -> None:
        self._ask = ask
        self._wanted: set[Action] = set()
        self._unsent: set[Action] = self._wanted if alone else set()
        """Requests of this device that were not sent to the others."""
        self._answers: deque[Callable[[], np.ndarray]] = deque()
        self._alone = alone
        self._cancelled = False

    def __contains__(self, action: Action) -> bool:
        return action in self._wanted

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def poll(self) -> None:
        """Take this process's requests: up to two, because a snapshot and a stop may both be waiting."""
        for _ in range(2):
            action = self._ask() if self._ask is not None else Action.NONE
            if action is Action.NONE:
                return
            self._unsent.add(action)

    def join_others(self) -> None:
        """Send requests to other devices from now on."""
        self._alone = False
        self._unsent = set()

    def ask_for(self, action: Action) -> None:
        """Request something, as a signal would; in the thread that trains."""
        self._unsent.add(action)

    def cancel(self) -> None:
        """End waits for data, now and later, with an AbortedError. Callable from any thread."""
        self._cancelled = True

    def check_wait(self) -> None:
        """End a wait for data where training has failed elsewhere, or a device that trains alone is to stop.

        Raises:
            AbortedError: `cancel` was called.
            StopRequestedError: a stop is requested, and there are no other devices.
        """
        if self._cancelled:
            raise AbortedError("training was stopped while it waited for data")
        if self.stop_at_once():
            raise StopRequestedError("a stop was requested while training waited for data")

    def stop_at_once(self) -> bool:
        """Whether this device trains alone and a stop is requested by now."""
        if self._alone:
            self.poll()
        return self._alone and Action.STOP in self._wanted

    def flags(self) -> list[float]:
        """1 for each of `FLAGS` that still has to be sent to the other devices, else 0."""
        return [float(action in self._unsent) for action in FLAGS]

    def mark_sent(self) -> None:
        """Note that `flags` was read for an iteration: they come back to this device too, with the averages."""
        self._unsent.clear()

    def expect(self, answer: Callable[[], np.ndarray]) -> None:
        """Note where an iteration's averaged flags will be; called once for each iteration.

        Args:
            answer: gives flags as `flags` does, averaged over all devices. It waits for the device.
        """
        self._answers.append(answer)

    def receive(self, behind: int = 0) -> None:
        """Take over what any device requested in all iterations but the last `behind`.

        Called by all devices at the same point with the same number.
        """
        while len(self._answers) > behind:
            flags = self._answers.popleft()()
            self._wanted |= {action for action, asked in zip(FLAGS, flags, strict=True) if asked > 0}

    def agree(self, total: Callable[[np.ndarray], np.ndarray]) -> None:
        """Take over what any device requests now; called by all devices at the same point.

        Args:
            total: sums an array over all devices.
        """
        flags = total(np.array(self.flags()))
        self._unsent.clear()
        self._wanted |= {action for action, asked in zip(FLAGS, flags, strict=True) if asked > 0}

    def clear(self) -> None:
        """Forget the requests that all devices know: they were acted on."""
        self._wanted.clear()


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
