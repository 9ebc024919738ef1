"""The loss that is shown: the mean over `average_loss` iterations and all devices."""

from __future__ import annotations

from collections import deque

import numpy as np

from caffepy.solvers.callbacks import SolverCallback


class LossWindow:
    """The losses of the last iterations of this device.

    Args:
        length: the solver's `average_loss`.
    """

    def __init__(self, length: int) -> None:
        self._losses: deque[float] = deque(maxlen=max(length, 1))
        self.added = 0
        """How many losses were entered, those included that have left the window."""

    def add(self, loss: float) -> None:
        """Enter the loss of one iteration."""
        self._losses.append(loss)
        self.added += 1

    def mean(self) -> float:
        """The mean of what is in the window; 0 before the first loss."""
        return sum(self._losses) / max(len(self._losses), 1)

    def averaged(self, callback: SolverCallback) -> list[float]:
        """The window averaged over all devices, the oldest loss first; every device must call it."""
        values = callback.sum_over_devices(np.array(self._losses, np.float64))
        return [float(value) for value in values / callback.world_size]

    def values(self) -> list[float]:
        """This device's losses, the oldest first."""
        return list(self._losses)

    def restore(self, losses: list[float]) -> None:
        """Fill the window from a snapshot."""
        self._losses.clear()
        self._losses.extend(losses)
