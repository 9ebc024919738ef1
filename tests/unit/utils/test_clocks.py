"""The clock that stands still while the process is suspended."""

from __future__ import annotations

import os
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.utils.clocks import SuspendAwareClock, suspend_aware_seconds


class System:
    """A system's clock that goes on when the test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def test_time_between_two_looks_counts_unless_it_is_long() -> None:
    system = System()
    clock = SuspendAwareClock(system)
    for passed, read in ((0.0, 0.0), (0.5, 0.5), (2.4, 2.9)):
        system.seconds += passed
        assert abs(clock.read() - read) < 1e-9
    system.seconds += 3600
    after = clock.read()
    assert 2.9 <= after < 4
    system.seconds += 0.1
    assert abs(clock.read() - after - 0.1) < 1e-9


@given(st.lists(st.tuples(st.floats(0, 20), st.booleans()), max_size=60))
def test_it_never_runs_backward_nor_faster_than_the_systems(steps: list[tuple[float, bool]]) -> None:
    system = System()
    clock = SuspendAwareClock(system)
    last = clock.read()
    for passed, looks in steps:
        system.seconds += passed
        if looks:
            now = clock.read()
            assert last <= now <= system.seconds - 100.0 + 1e-9
            last = now


def test_a_process_that_is_not_suspended_has_the_systems_seconds() -> None:
    begin, first = time.monotonic(), suspend_aware_seconds()
    time.sleep(0.7)  # longer than between two looks of the thread
    assert 0.5 <= suspend_aware_seconds() - first <= time.monotonic() - begin
    assert any(thread.name == "clock" for thread in threading.enumerate())


# From Python 3.12 on; what the thread does in the child is what is tested.
@pytest.mark.filterwarnings("ignore:.*is multi-threaded, use of fork:DeprecationWarning")
def test_a_forked_process_has_a_clock_of_its_own() -> None:
    suspend_aware_seconds()
    child = os.fork()
    if child == 0:
        first = suspend_aware_seconds()
        ticking = any(thread.name == "clock" and thread.is_alive() for thread in threading.enumerate())
        os._exit(0 if ticking and 0 <= suspend_aware_seconds() - first < 1 else 1)
    assert os.waitpid(child, 0)[1] == 0
