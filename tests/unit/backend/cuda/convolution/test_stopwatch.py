"""Runs are timed behind an idling device, and again where the host was too slow for it."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st


@pytest.fixture(scope="module")
def timing(cupy_or_mock: None) -> ModuleType:
    return importlib.import_module("caffepy.backend.cuda.convolution.autotune")


class Device:
    """A device and a host of which each launch takes as long as `launches` says, in nanoseconds.

    Args:
        run: nanoseconds of a run on the device.
        launches: of the first runs that are launched; all later ones take the last one's time.
    """

    def __init__(self, run: int, launches: list[int]) -> None:
        self.run = run
        self.launches = launches
        self.waits: list[int] = []

    def timed(self, launch: Any, runs: int, wait: int) -> tuple[float, list[int]]:
        self.waits.append(wait)
        moment, free, moments = 0, wait, []
        for _ in range(runs):
            moment += self.launches.pop(0) if len(self.launches) > 1 else self.launches[0]
            moments.append(moment)
            free = max(free, moment) + self.run
        return (free - wait) / 1e3 / runs, moments


def watch_on(timing: ModuleType, monkeypatch: pytest.MonkeyPatch, device: Device) -> Any:
    monkeypatch.setattr(timing, "_timed", device.timed)
    return timing.Stopwatch(lambda: None)


def test_runs_longer_than_their_launches_need_no_long_idling(
    timing: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(50_000, [10_000])
    watch = watch_on(timing, monkeypatch, device)
    assert watch.elapsed(1) == watch.elapsed(10, 50.0) == 50.0
    assert device.waits == [timing.FIRST_LAUNCH + timing.MARGIN, 10_000 + timing.MARGIN]


def test_short_runs_wait_for_their_launches(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(4_000, [10_000])
    watch = watch_on(timing, monkeypatch, device)
    assert watch.elapsed(1) == watch.elapsed(10, 4.0) == 4.0
    assert device.waits[1] == 10_000 + timing.MARGIN + 9 * 6_000


def test_a_host_that_is_held_up_is_noticed(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(20_000, [10_000, 10_000, 500_000, 10_000])
    watch = watch_on(timing, monkeypatch, device)
    assert watch.elapsed(1) == 20.0
    assert watch.elapsed(10, 20.0) == 20.0
    assert len(device.waits) == 3, "the first ten runs had a gap"


def test_a_host_that_stays_slow_ends_it(timing: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(1_000, [50_000_000])
    assert watch_on(timing, monkeypatch, device).elapsed(3) > 0
    assert len(device.waits) == timing.MAX_TRIES
    assert max(device.waits) == timing.LONGEST_IDLING


@given(
    run=st.integers(1_000, 200_000),
    launches=st.lists(st.integers(2_000, 200_000), min_size=1, max_size=12),
    wait=st.integers(1_000, 300_000),
)
def test_every_gap_shows(timing: ModuleType, run: int, launches: list[int], wait: int) -> None:
    time, moments = Device(run, list(launches)).timed(None, len(launches), wait)
    if time * 1e3 > run + 1:
        assert timing.lateness(moments, wait, time) > 0
