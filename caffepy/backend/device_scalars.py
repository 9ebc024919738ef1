"""What a backend hands out whose primitives have finished when they return: the CPU's, and the meta backend's."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from caffepy.backend.handles import DeviceScalars, DeviceTimer, Event, TimedEvent
from caffepy.backend.types import Array, Counter


class HostScalars:
    """A `DeviceScalars` in host memory.

    Args:
        values: how many numbers there are.
        counters: how many counters.
    """

    def __init__(self, values: int, counters: int) -> None:
        self.array = np.zeros(values, np.float32)
        self.values: Sequence[Array | float] = [0.0] * values
        self.counters: Sequence[Counter | None] = [None] * counters

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        """Set the numbers for the work that follows."""
        self.array[:] = values
        self.values = list(values)


class HostAsyncCopy:
    """A copy of an array that was finished when it was asked for."""

    def __init__(self, array: Array) -> None:
        self._copy = np.array(array)

    def get(self) -> Array:
        return self._copy


class HostTimedEvent:
    """A `TimedEvent` of work that is finished already."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: HostTimedEvent) -> float:
        return self._time - earlier._time


class HostTimer:
    """A `DeviceTimer` of work that is finished when it was asked for.

    Args:
        count: how many stopwatches.
        now: the clock, in seconds.
    """

    def __init__(self, count: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = [now()] * count
        self._totals = [0.0] * count

    def start(self, index: int) -> None:
        self._started[index] = self._now()

    def stop(self, index: int) -> None:
        self._totals[index] += self._now() - self._started[index]

    def reset(self) -> None:
        self._totals = [0.0] * len(self._totals)

    def totals(self) -> list[float]:
        return list(self._totals)

    def times(self) -> list[float]:
        return list(self._started)


class Done:
    """An `Event` of work that is finished already."""

    def wait(self) -> None:
        """Returns at once."""


class Synchronous:
    """Part of a `Backend` whose work is done, and whose time is the host's, when a primitive returns."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        return HostScalars(values, counters)

    def record_event(self) -> Event:
        return Done()

    def record_timed_event(self) -> TimedEvent:
        return HostTimedEvent()

    def device_timer(self, count: int) -> DeviceTimer:
        return HostTimer(count)
