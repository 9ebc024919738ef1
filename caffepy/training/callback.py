"""What a solver calls: the devices that train together with it, and the callbacks that a program has added."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np

from caffepy.backend.types import Array
from caffepy.errors import ConfigError


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
    """The callback of a solver that trains alone: averages and sums of one device, and no waits."""

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


EVENTS = ("after_iteration", "before_test", "after_test", "after_snapshot")
"""The methods that a program's callback may have; each returns True to stop training."""


class IterationCallbacks:
    """The callbacks that a program has added to a solver, called in the order in which they were added.

    Args:
        stop: called where a callback asks to stop training.
    """

    def __init__(self, stop: Callable[[], None]) -> None:
        self._stop = stop
        self._callbacks: list[Any] = []

    def add(self, callback: Any) -> None:
        """Call an object's methods among `EVENTS`, or a function after each iteration.

        Raises:
            ConfigError: it is neither a function nor has it such a method.
        """
        if not callable(callback) and not any(hasattr(callback, event) for event in EVENTS):
            raise ConfigError(
                f"a callback is a function, or has one of the methods {', '.join(EVENTS)}; {callback!r} is neither"
            )
        self._callbacks.append(callback)

    def after_iteration(self, solver: Any, wait: Callable[[], None]) -> None:
        """Call those whose `interval`, by default 1, divides the number of iterations made.

        Args:
            solver: what they are called with.
            wait: returns when the device has finished the iterations that were made; called where one of them `waits`.
        """
        waited = False
        for callback in self._callbacks:
            function = getattr(callback, "after_iteration", None) or _function(callback)
            if function is None or solver.iteration % getattr(callback, "interval", 1):
                continue
            if not waited and getattr(callback, "waits", True):
                wait()
                waited = True
            self._stop_if(function(solver))

    def tell(self, event: str, *arguments: Any) -> None:
        """Call a method of all that have it."""
        for callback in self._callbacks:
            if (function := getattr(callback, event, None)) is not None:
                self._stop_if(function(*arguments))

    def _stop_if(self, answer: Any) -> None:
        if answer is True:
            self._stop()


def _function(callback: Any) -> Callable[[Any], Any] | None:
    """A callback that is a function; an object with another event's method is none."""
    return None if any(hasattr(callback, event) for event in EVENTS) else callback
