"""What is asked of a solver while it trains: by somebody outside, and by the devices that train with it.

Owns when a request is acted on: all devices act on the same requests in the same iteration. Each tells the others with
its gradients, and learns from the averages what any of them wants; a device whose iterations are replayed knows that
only some iterations later, so that all wait as long, those that know it at once included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

import numpy as np

from caffepy.solvers.callbacks import Action

FLAGS = (Action.STOP, Action.SNAPSHOT)
"""The requests that devices tell each other, in the order of their flags."""


class Requests:
    """The requests that were not acted on yet; `in` and `bool` ask for those that all devices know.

    Args:
        ask: what somebody outside wants, one request at a time; None: nobody asks.
        alone: there are no other devices, so that what is asked for here is acted on at once.
    """

    def __init__(self, ask: Callable[[], Action] | None, alone: bool = True) -> None:
        self._ask = ask
        self._wanted: set[Action] = set()
        self._unsent: set[Action] = self._wanted if alone else set()
        """What was asked for here and the other devices do not know."""
        self._answers: deque[Callable[[], np.ndarray]] = deque()

    def __contains__(self, action: Action) -> bool:
        return action in self._wanted

    def __bool__(self) -> bool:
        return bool(self._wanted)

    def poll(self) -> None:
        """Take what was asked for outside; twice, because a snapshot and a stop may both be waiting."""
        for _ in range(2):
            action = self._ask() if self._ask is not None else Action.NONE
            if action is Action.NONE:
                return
            self._unsent.add(action)

    def flags(self) -> list[float]:
        """1 for each of `FLAGS` that still has to be sent to the other devices, else 0."""
        return [float(action in self._unsent) for action in FLAGS]

    def mark_sent(self) -> None:
        """The flags are on their way to all devices, this one included."""
        self._unsent.clear()

    def expect(self, answer: Callable[[], np.ndarray]) -> None:
        """Note where an iteration's answer will be; called once for each iteration.

        Args:
            answer: gives flags as `flags` does, averaged over all devices; more may follow. It waits for the device.
        """
        self._answers.append(answer)

    def receive(self, behind: int = 0) -> None:
        """Want what any of the devices wanted in all iterations but the last `behind`.

        Called by all devices at the same point with the same number.
        """
        while len(self._answers) > behind:
            flags = self._answers.popleft()()
            self._wanted |= {action for action, asked in zip(FLAGS, flags[: len(FLAGS)], strict=True) if asked > 0}

    def clear(self) -> None:
        """What all devices know was acted on."""
        self._wanted.clear()
