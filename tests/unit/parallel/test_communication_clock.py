from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

from caffepy.parallel.communication_clock import CommunicationClock


class Device:
    """A device whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0
        self.looks = 0

    def stamp(self) -> SimpleNamespace:
        time = self.now

        def seconds_since(earlier: SimpleNamespace) -> float:
            self.looks += 1
            return time - earlier.time

        return SimpleNamespace(time=time, seconds_since=seconds_since)


def exchange(clock: CommunicationClock, device: Device, seconds: float) -> None:
    with clock.exposed():
        device.now += seconds


def make(counting: Callable[[], bool] = lambda: True) -> tuple[CommunicationClock, Device]:
    device = Device()
    return CommunicationClock(device, counting), device  # type: ignore[arg-type]


def test_what_is_hidden_is_communication_but_not_exposed() -> None:
    clock, device = make()
    for _ in range(20):
        clock.hidden(0.25)
        exchange(clock, device, 0.5)
        device.now += 3.0
    assert clock.totals() == (15.0, 10.0)
    assert clock.totals() == (15.0, 10.0)


def test_the_device_is_not_waited_for_while_it_works() -> None:
    clock, device = make()
    for count in range(1, 20):
        exchange(clock, device, 1.0)
        assert device.looks == max(0, count - 8)


def test_only_what_is_timed_counts() -> None:
    counting = [False]
    clock, device = make(lambda: counting[0])
    exchange(clock, device, 1.0)
    clock.hidden(1.0)
    counting[0] = True
    exchange(clock, device, 0.5)
    assert clock.totals() == (0.5, 0.5)
