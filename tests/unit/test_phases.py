"""What a process does before its first iteration: counted, timed, and said where the log is silent."""

from __future__ import annotations

import logging
import sys
import time

import pytest

from caffepy.phases import SWITCH_INTERVAL, Phases, announcing
from caffepy.phases.start import SILENCE


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.time = 10.0

    def __call__(self) -> float:
        return self.time


def test_phases_are_counted_and_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    phases = Phases(clock)
    for _ in range(2):
        with phases.phase("kernels", "Compiling"):
            clock.time += 1.5
    phases.add("options", 4.0)
    with caplog.at_level(logging.DEBUG, "caffepy"):
        phases.begun()
        phases.begun()
    assert [record.getMessage() for record in caplog.records] == [
        "Start: kernels: 2, 3.000 s, ended at 13.000 s",
        "Start: options: 1, 9.000 s, ended at 13.000 s",
        "Start: the first iteration ended at 13.000 s",
    ]


def test_a_phase_that_fails_ends(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    phases = Phases(clock)
    with pytest.raises(ValueError, match="no"), phases.phase("nets", "Building the nets"):
        raise ValueError("no")
    clock.time += SILENCE
    assert phases.doing() == ""


def test_what_is_being_done_has_its_numbers() -> None:
    clock = Clock()
    phases = Phases(clock)
    for _ in range(2):
        with phases.phase("kernels", "Compiling kernels"):
            clock.time += 0.1
    with phases.phase("inner"):
        assert phases.doing() == "Compiling kernels (2 so far)"
    with phases.phase("tuning", "Tuning"):
        assert phases.doing() == "Tuning"
        with phases.phase("kernels", "Compiling kernels"):
            assert phases.doing() == "Compiling kernels (2 so far)"
        clock.time += SILENCE
        assert phases.doing() == "Tuning"


def test_silence_is_broken_until_the_first_iteration(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    phases = Phases(clock)
    log = logging.getLogger("caffepy.test")

    def lines_after(seconds: float) -> int:
        clock.time += seconds
        before = len(caplog.records)
        end = time.monotonic() + 300
        while len(caplog.records) == before and seconds >= SILENCE and time.monotonic() < end and not phases.is_over:
            time.sleep(0.01)
        return len(caplog.records) - before

    turns = sys.getswitchinterval()
    with caplog.at_level(logging.INFO, "caffepy"), announcing(phases, SWITCH_INTERVAL):
        assert sys.getswitchinterval() < turns, "threads take short turns until the first iteration"
        with phases.phase("nets", "Building the nets"):
            assert lines_after(SILENCE + 0.1) == 1
            assert lines_after(SILENCE - 0.5) == 0
            log.info("a line of somebody else")
            assert lines_after(SILENCE - 0.1) == 0
            assert lines_after(0.2 + SILENCE) == 1
        phases.begun()
        assert lines_after(10.0) == 0
    said = [record.getMessage() for record in caplog.records if record.name == "caffepy.phases.start"]
    assert said[:2] == ["Building the nets ...", "Building the nets ..."]
    assert sys.getswitchinterval() == turns
