"""Returned objects of backends whose primitives finish before they return: the CPU backend and the meta backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import numpy as np

from caffepy.backend.handles import DeviceScalars, DeviceTimer, Event, TimedEvent
from caffepy.backend.types import Array, Counter


class HostScalars:
    """A `DeviceScalars` in host memory.

    Args:
        values: number of values.
        counters: number of counters.
    """

    def __init__(self, values: int, counters: int) -> None:
        self.array = np.zeros(values, np.float32)
        self.values: Sequence[Array | float] = [0.0] * values
        self.counters: Sequence[Counter | None] = [None] * counters

    def send(self, values: Sequence[float], counters: Sequence[tuple[int, int]]) -> None:
        self.array[:] = values
        self.values = list(values)


class HostAsyncCopy:
    """An `AsyncCopy` that is complete when created."""

    def __init__(self, array: Array) -> None:
        self._copy = np.array(array)

    def get(self) -> Array:
        return self._copy


class HostTimedEvent:
    """A `TimedEvent` of finished work."""

    def __init__(self) -> None:
        self._time = time.perf_counter()

    def seconds_since(self, earlier: HostTimedEvent) -> float:
        return self._time - earlier._time


class HostTimer:
    """A `DeviceTimer` on the host's clock.

    Args:
        count: number of stopwatches.
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
    """An `Event` of finished work."""

    def wait(self) -> None:
        """Return at once."""


class Synchronous:
    """Part of a `Backend` whose primitives finish before they return and whose clock is the host's."""

    def synchronize(self) -> None:
        """Return at once: no work is pending."""

    def device_scalars(self, values: int, counters: int) -> DeviceScalars:
        return HostScalars(values, counters)

    def record_event(self) -> Event:
        return Done()

    def record_timed_event(self) -> TimedEvent:
        return HostTimedEvent()

    def device_timer(self, count: int) -> DeviceTimer:
        return HostTimer(count)
