"""How many candidates of a family are timed."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

FAILS, TOO_SLOW = None, float("inf")


@pytest.fixture
def autotune(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """caffepy.backend.cuda.convolution.autotune; CuPy need not be installed. Candidates are what `_attempt` gives."""
    try:
        importlib.import_module("cupy")
    except ImportError:
        monkeypatch.setitem(sys.modules, "cupy", MagicMock())
    module = importlib.import_module("caffepy.backend.cuda.convolution.autotune")
    monkeypatch.setattr(module, "_attempt", lambda candidate, operands, best: candidate.time)
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


def test_a_family_ends_where_several_in_a_row_were_not_faster(autotune: ModuleType) -> None:
    trial, losers = new_trial(autotune), autotune.LOSERS
    assert add(autotune, trial, [9.0, 8.0, *[8.5] * losers, 1.0]) == 2 + losers
    assert min(time for time, _ in trial._times) == 8.0


def test_those_that_fail_do_not_count_and_those_that_are_too_slow_do(autotune: ModuleType) -> None:
    trial, losers = new_trial(autotune), autotune.LOSERS
    assert add(autotune, trial, [9.0, *[FAILS] * 9, *[TOO_SLOW] * losers, 1.0]) == 1 + 9 + losers
    assert [time for time, _ in trial._times] == [9.0]


def test_a_faster_one_begins_the_count_anew(autotune: ModuleType) -> None:
    trial, losers = new_trial(autotune), autotune.LOSERS
    assert add(autotune, trial, [9.0, *[9.0] * (losers - 1), 8.0, *[9.0] * (losers - 1), 7.0]) == 2 * losers + 1


def test_families_are_counted_apart(autotune: ModuleType) -> None:
    trial, losers = new_trial(autotune), autotune.LOSERS
    add(autotune, trial, [2.0])
    assert add(autotune, trial, [9.0, 8.0, 7.0, 6.0, 5.0, 4.0, 3.0, 1.0][: losers + 3], checked=True) == 8
    assert min(time for time, _ in trial._times) == 1.0
    assert add(autotune, trial, [0.5], last_resort=True) == 0


@pytest.mark.parametrize(
    ("first", "again", "chosen", "timed"),
    [
        ([10.0, 11.0, 12.0, 20.0], {0: 12.0, 1: 10.0, 2: 11.0}, 1, {0, 1, 2}),
        ([10.0, 13.0, 14.0], {}, 0, set()),
        ([10.0, 10.1, 10.2, 10.3, 10.4], {0: 5.0, 1: 4.0, 2: 3.0, 3: 6.0}, 2, {0, 1, 2, 3}),
    ],
    ids=["close ones", "one that is far ahead", "the first few"],
)
def test_only_what_is_close_is_timed_once_more(
    autotune: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    first: list[float],
    again: dict[int, float],
    chosen: int,
    timed: set[int],
) -> None:
    asked = set()

    def measure(candidate: Any, _: Any, about: float) -> float:
        assert about == first[candidate.number]
        asked.add(candidate.number)
        return again[candidate.number]

    monkeypatch.setattr(autotune, "measure", measure)
    trial = new_trial(autotune)
    candidates = [SimpleNamespace(number=number) for number in range(len(first))]
    trial._times = list(zip(first, candidates, strict=True))
    trial._trusted = list(candidates)
    assert trial.best() == (candidates[chosen], again.get(chosen, first[chosen]))
    assert asked == timed


def test_a_wrong_winner_gives_way_to_the_next(autotune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = new_trial(autotune)
    wrong, right = SimpleNamespace(), SimpleNamespace()
    trial._times = [(1.0, wrong), (9.0, right)]
    monkeypatch.setattr(trial, "_is_right", lambda candidate: candidate is right)
    assert trial.best() == (right, 9.0)
