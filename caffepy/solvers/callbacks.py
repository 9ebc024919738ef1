"""What a solver asks of those that train together with it, and the answer of one that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Protocol

import numpy as np

from caffepy.backend.types import Array

if TYPE_CHECKING:
    from caffepy.solvers.base import Solver


class Action(Enum):
    """What somebody outside (a signal) wants of the solver."""

    NONE = 0
    STOP = 1
    SNAPSHOT = 2


class SolverCallback(Protocol):
    """The solver's view of the parallel engine; every device calls each of these at the same point."""

    is_root: bool
    """Whether this device writes the log and the snapshots."""
    world_size: int
    """How many devices train together."""

    def on_start(self, solver: Solver) -> None:
        """Called before the first iteration of a `step`: give every device the root's parameters and history."""

    def on_iteration(self, solver: Solver) -> None:
        """Called after each iteration, which the device may not have done yet; `solver.iteration` is counted up."""

    def on_snapshot(self, solver: Solver) -> None:
        """Called before a snapshot is written, when the device has done all that it was asked for."""

    def on_gradients_ready(self, solver: Solver) -> None:
        """Make `parameters.diff`, flags included, the average over all devices; on a GPU, put that on the stream."""

    def capture_blocker(self) -> str:
        """Why `on_gradients_ready` cannot be captured into a graph; empty if it can."""

    def settle(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which lasts until the device has done work that the other devices may have a part in."""

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        """Make each array of the device the mean of all devices', with the same bits on each."""

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        """The elementwise sum of a small float64 array over all devices."""

    def least(self, number: float, what: str) -> float:
        """The smallest of all devices' numbers; `what` messages call the wait for it."""

    def barrier(self) -> None:
        """Wait until every device is here."""


class SingleDevice:
    """The callback of a solver that trains alone."""

    is_root = True
    world_size = 1

    def on_start(self, solver: Solver) -> None:
        """Nobody else needs the parameters."""

    def on_iteration(self, solver: Solver) -> None:
        """There is nobody to keep up with."""

    def on_snapshot(self, solver: Solver) -> None:
        """There are no other parameters to compare with."""

    def on_gradients_ready(self, solver: Solver) -> None:
        """The gradients are the average of one."""

    def capture_blocker(self) -> str:
        """There is nothing to capture."""
        return ""

    def settle(self, wait: Callable[[], None]) -> None:
        """Wait: there is nobody to watch over."""
        wait()

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        """They are the mean of one."""

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        """The values themselves."""
        return values

    def least(self, number: float, what: str) -> float:
        """The number itself."""
        return number

    def barrier(self) -> None:
        """Nobody to wait for."""
