"""What a backend hands out whose primitives have finished when they return: the CPU's, and a dry run's."""

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
        """Let the next work see these."""
        self.array[:] = values
        self.values = list(values)


class HostAsyncCopy:
    """A copy of an array that was finished when it was asked for."""

    def __init__(self, array: Array) -> None:
        self._copy = np.array(array)

    def get(self) -> Array:
        """The array."""
        return self._copy


class HostTimedEvent:
    """A `TimedEvent` of work that is finished already."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: HostTimedEvent) -> float:
        """Seconds between the two."""
        return self._time - earlier._time


class HostTimer:
    """A `DeviceTimer` of work that is finished when it was asked for.

    Args:
        places: how many times are taken.
        now: the clock, in seconds.
    """

    def __init__(self, places: int, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = [now()] * places
        self._totals = [0.0] * places

    def start(self, place: int) -> None:
        """From here on time passes for a place."""
        self._started[place] = self._now()

    def stop(self, place: int) -> None:
        """Up to here it has passed."""
        self._totals[place] += self._now() - self._started[place]

    def reset(self) -> None:
        """Begin with totals of 0."""
        self._totals = [0.0] * len(self._totals)

    def totals(self) -> list[float]:
        """Seconds of each place."""
        return list(self._totals)

    def times(self) -> list[float]:
        """When each place was started last."""
        return list(self._started)


class Done:
    """A `Event` of work that is finished already."""

    def wait(self) -> None:
        """There is nothing to wait for."""


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

    def device_timer(self, places: int) -> DeviceTimer:
        return HostTimer(places)
