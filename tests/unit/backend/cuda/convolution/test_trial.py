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
def autotune(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """caffepy.backend.cuda.convolution.autotune; CuPy need not be installed. Candidates are what `_attempt` gives."""
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


def test_a_last_resort_is_left_where_there_is_something(autotune: ModuleType) -> None:
    trial = new_trial(autotune)
    assert add(autotune, trial, [FAILS], last_resort=True) == 1
    assert add(autotune, trial, [9.0, FAILS, 8.0]) == 3
    assert add(autotune, trial, [0.5], last_resort=True) == 0
    assert [time for time, _ in trial._times] == [9.0, 8.0]


def test_the_first_few_are_timed_once_more(autotune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "measure", lambda candidate, operands, about: candidate.again)
    trial = new_trial(autotune)
    candidates = [SimpleNamespace(again=again) for again in (5.0, 4.0, 3.0, 6.0, 1.0)]
    trial._times = list(zip([10.0, 10.1, 10.2, 10.3, 10.4], candidates, strict=True))
    trial._trusted = list(candidates)
    assert trial.best() == (candidates[2], 3.0)


def test_a_wrong_winner_gives_way_to_the_next(autotune: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    trial = new_trial(autotune)
    wrong, right = SimpleNamespace(), SimpleNamespace()
    trial._times = [(1.0, wrong), (9.0, right)]
    monkeypatch.setattr(trial, "_is_right", lambda candidate: candidate is right)
    monkeypatch.setattr(autotune, "measure", lambda candidate, operands, about: about)
    assert trial.best() == (right, 9.0)
