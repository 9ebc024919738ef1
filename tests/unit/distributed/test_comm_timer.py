from __future__ import annotations

import pytest

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.types import HostTimer
from caffepy.distributed.reducer import CommTimer


class Device:
    """A device whose clock is set by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def device_timer(self, places: int) -> HostTimer:
        return HostTimer(places, lambda: self.now)


def make() -> tuple[CommTimer, Device]:
    device = Device()
    return CommTimer(device), device  # type: ignore[arg-type]


def exchange(clock: CommTimer, device: Device, seconds: float) -> None:
    with clock.exposed(), clock.exchanging():
        device.now += seconds


def test_what_is_hidden_is_communication_but_not_exposed() -> None:
    clock, device = make()
    for _ in range(20):
        with clock.exchanging():
            device.now += 0.25
        device.now += 1.0
        exchange(clock, device, 0.5)
        device.now += 3.0
    assert clock.totals() == (15.0, 10.0)
    assert clock.totals() == (15.0, 10.0)


def test_exchanges_that_go_on_together_are_counted_once() -> None:
    clock, device = make()
    for _ in range(3):
        first, second = clock.exchanging(), clock.exchanging()
        first.__enter__()
        device.now += 0.5
        second.__enter__()
        device.now += 1.0
        first.__exit__(None, None, None)
        device.now += 2.0
        second.__exit__(None, None, None)
        device.now += 4.0
    assert clock.totals() == (10.5, 0.0)


def test_an_exchange_that_fails_is_not_under_way_any_more() -> None:
    clock, device = make()
    with pytest.raises(KeyError), clock.exchanging():
        raise KeyError("lost")
    device.now += 7.0
    exchange(clock, device, 0.5)
    assert clock.totals() == (0.5, 0.5)


def test_without_overlap_all_is_exposed() -> None:
    clock, device = make()
    for _ in range(3):
        exchange(clock, device, 0.5)
        device.now += 1.0
    assert clock.totals() == (1.5, 1.5)


def test_a_wait_that_begins_early_is_no_more_than_what_it_waits_for() -> None:
    clock, device = make()
    with clock.exposed():
        device.now += 0.125
        with clock.exchanging():
            device.now += 0.5
        device.now += 0.125
    assert clock.totals() == (0.5, 0.5)


def test_what_came_before_a_reset_does_not_count() -> None:
    clock, device = make()
    exchange(clock, device, 1.0)
    clock.reset()
    exchange(clock, device, 0.5)
    assert clock.totals() == (0.5, 0.5)


def test_the_clock_of_a_cpu_goes_forward() -> None:
    backend = CpuBackend(1)
    clock = CommTimer(backend)
    with clock.exchanging(), clock.exposed():
        backend.zeros((1000,))
    communication, exposed = clock.totals()
    assert communication >= exposed > 0
