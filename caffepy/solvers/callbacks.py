"""What a solver asks of the devices that train together with it, and the callback of one that trains alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Protocol

import numpy as np

from caffepy.backend.types import Array


class Action(Enum):
    """What a signal asks of the solver."""

    NONE = 0
    STOP = 1
    SNAPSHOT = 2


class SolverCallback(Protocol):
    """The solver's view of the parallel engine; every device calls each of these at the same point.

    A callback that needs its solver's net or state holds them itself.
    """

    is_root: bool
    """Whether this device writes the log and the snapshots."""
    world_size: int
    """How many devices train together."""

    def on_start(self) -> None:
        """Called before the first iteration of a `step`: give every device the root's parameters and history."""

    def on_clock_start(self) -> None:
        """Called once, when the first iterations are over and the seconds of training begin to count."""

    def on_iteration(self) -> None:
        """Called after each iteration, which the device may still be computing; it is counted in `Solver.iteration`."""

    def on_snapshot(self) -> None:
        """Called before a snapshot is written, when the device is idle."""

    def on_gradients_ready(self) -> None:
        """Make `parameters.diff`, flags included, the average over all devices; on a GPU, put that on the stream."""

    def capture_blocker(self) -> str | None:
        """Why `on_gradients_ready` cannot be captured into a graph; None if it can."""

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        """Call `wait`, which returns when the device has finished work that may include an all-reduce."""

    def average_over_devices(self, arrays: Sequence[Array]) -> None:
        """Make each array of the device the mean of all devices', with the same bits on each."""

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        """The elementwise sum of a small float64 array over all devices."""

    def min_over_devices(self, number: float, what: str) -> float:
        """The smallest of all devices' numbers; `what` messages call the wait for it."""

    def barrier(self) -> None:
        """Wait until every device has called this."""


class SingleDevice:
    """The callback of a solver that trains alone: averages and sums of one, and nobody to wait for."""

    is_root = True
    world_size = 1

    def on_start(self) -> None: ...

    def on_clock_start(self) -> None: ...

    def on_iteration(self) -> None: ...

    def on_snapshot(self) -> None: ...

    def on_gradients_ready(self) -> None: ...

    def capture_blocker(self) -> str | None:
        return None

    def wait_for_device(self, wait: Callable[[], None]) -> None:
        wait()

    def average_over_devices(self, arrays: Sequence[Array]) -> None: ...

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        return values

    def min_over_devices(self, number: float, what: str) -> float:
        return number

    def barrier(self) -> None: ...
