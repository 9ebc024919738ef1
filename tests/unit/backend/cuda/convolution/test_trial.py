"""Which candidates are timed, and which of them is chosen."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

FAILS = None


@pytest.fixture
def module(cupy_or_mock: None) -> ModuleType:
    """caffepy.backend.cuda.convolution.autotune; CuPy need not be installed."""
    return importlib.import_module("caffepy.backend.cuda.convolution.autotune")


@pytest.fixture
def autotune(module: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The same, where candidates take what they say."""

    def attempt(candidate: Any, operands: Any, best: float) -> Any:
        return None if candidate.time is FAILS else module.Contender(candidate, candidate.time, MagicMock())

    monkeypatch.setattr(module, "_attempt", attempt)
    return module


def add(autotune: ModuleType, trial: Any, times: Sequence[float | None], **family: Any) -> int:
    """How many candidates are looked at where they take so long."""
    seen = []

    def candidates() -> Any:
        for time in times:
            seen.append(time)
            yield SimpleNamespace(name="a", time=time)

    trial.add(autotune.AlgorithmFamily("a", candidates, **family))
    return len(seen)


def new_trial(autotune: ModuleType) -> Any:
    return autotune.Trial(MagicMock(), MagicMock())


def contender(autotune: ModuleType, time: float, again: Sequence[float], trusted: bool = True) -> Any:
    """One that was timed, and what is measured when it is timed again."""
    watch = MagicMock()
    watch.elapsed.side_effect = again
    return autotune.Contender(SimpleNamespace(), time, watch, trusted)


def test_a_last_resort_is_left_where_there_is_something(autotune: ModuleType) -> None:
    trial = new_trial(autotune)
    assert add(autotune, trial, [FAILS], last_resort=True) == 1
    assert add(autotune, trial, [9.0, FAILS, 8.0]) == 3
    assert add(autotune, trial, [0.5], last_resort=True) == 0
    assert [found.microseconds for found in trial._contenders] == [9.0, 8.0]


def test_the_first_few_that_are_close_are_timed_in_turn_once_more(autotune: ModuleType) -> None:
    trial = new_trial(autotune)
    again = [[5.0, 5.1, 5.2], [6.0, 3.0, 6.0], [4.0, 4.0, 4.0], [6.0] * 3]
    trial._contenders = [
        contender(autotune, time, own) for time, own in zip((10, 10.1, 10.2, 10.3), again, strict=True)
    ]
    trial._contenders += [contender(autotune, 10.4, []), contender(autotune, 10.9, [])]
    assert trial.best() == (trial._contenders[1].candidate, 3.0)


def test_the_second_is_timed_again_however_far_it_is_behind(autotune: ModuleType) -> None:
    trial = new_trial(autotune)
    trial._contenders = [
        contender(autotune, 19.0, []),
        contender(autotune, 18.0, [13.0] * 3),
        contender(autotune, 14.0, [14.0] * 3),
    ]
    assert trial.best() == (trial._contenders[1].candidate, 13.0)


def test_a_wrong_winner_gives_way_to_the_next(autotune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = new_trial(autotune)
    trial._contenders = [contender(autotune, time, [time] * 3, trusted=False) for time in (1.0, 2.0, 9.0)]
    right = trial._contenders[2].candidate
    monkeypatch.setattr(trial, "_is_right", lambda candidate: candidate is right)
    assert trial.best() == (right, 9.0)


@pytest.mark.parametrize(
    ("first_run", "times", "found"),
    [
        (10.0, [10.0, 9.0], 9.0),  # the second is that of several runs
        (10.0, [30.0], None),
        (10.0, [15.0, 14.5], None),
        (10.0, [19.0, 11.0, 10.5], 10.5),  # the first was disturbed
        (20031.0, [], None),
        (20029.0, [12.4, 12.0], 12.0),
    ],
)
def test_candidates_that_are_behind_the_best_one_of_10_us(
    module: ModuleType, monkeypatch: pytest.MonkeyPatch, first_run: float, times: list[float], found: float | None
) -> None:
    """Times within 4 us, or a quarter, of the best are taken; up to twice as long, the run is repeated."""
    watch = MagicMock()
    watch.elapsed.side_effect = times
    monkeypatch.setattr(module, "Stopwatch", lambda run: watch)
    monkeypatch.setattr(module, "_first_run", lambda candidate, operands: first_run)
    contender = module._attempt(MagicMock(), MagicMock(), 10.0)
    assert (None if contender is None else contender.microseconds) == found
    assert watch.elapsed.call_count == len(times)
