"""What is asked of a solver while it trains: by somebody outside, and by the devices that train with it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from caffepy.solvers.callbacks import Action

FLAGS = (Action.STOP, Action.SNAPSHOT)
"""The requests that devices tell each other, in the order of their flags."""


class Requests:
    """The requests that were not acted on yet.

    Args:
        ask: what somebody outside wants, one request at a time; None: nobody asks.
    """

    def __init__(self, ask: Callable[[], Action] | None) -> None:
        self._ask = ask
        self._wanted: set[Action] = set()

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
            self._wanted.add(action)

    def flags(self) -> list[float]:
        """1 for each of `FLAGS` that is wanted, else 0."""
        return [float(action in self._wanted) for action in FLAGS]

    def hear(self, flags: np.ndarray) -> None:
        """Want what any of the devices wants, and nothing else.

        Args:
            flags: as `flags` gives them, averaged over all devices; more may follow.
        """
        pairs = zip(FLAGS, flags[: len(FLAGS)], strict=True)
        self._wanted = {action for action, asked in pairs if asked > 0}

    def clear(self) -> None:
        """All was acted on, or is on its way to the other devices."""
        self._wanted.clear()
