"""Which candidates are timed, and which of them is chosen, on a device whose time stands still between runs."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

FAILS: list[float] = []
"""The times of a candidate that cannot be prepared."""


class Device:
    """Runs take as long as the candidates say; launched work is done when the device is waited for."""

    def __init__(self) -> None:
        self.now = self.launched = 0.0

    def wait(self) -> float:
        """Microseconds that the device still took."""
        taken, self.launched = self.launched, 0.0
        self.now += taken
        return taken

    def watch(self, run: Any) -> Any:
        """A stopwatch of one run, whatever number of runs is asked for."""

        def elapsed(runs: int, about: float = 0.0) -> float:
            run()
            return self.wait()

        return SimpleNamespace(elapsed=elapsed)


class Candidate:
    """One whose first run, and then its measurements, take these microseconds; the last time is repeated."""

    def __init__(self, device: Device, times: Sequence[float]) -> None:
        self.name, self.runs, self.seen = f"takes {times}", 0, False
        self._device, self._times = device, times

    def prepare(self) -> bool:
        self.seen = True
        return bool(self._times)

    def run(self, operands: Any) -> None:
        self._device.launched += self._times[min(self.runs, len(self._times) - 1)]
        self.runs += 1


class Trials:
    """A trial on a fake device."""

    def __init__(self, module: ModuleType) -> None:
        self.device, self._module = Device(), module
        self.trial = module.Trial(MagicMock(), MagicMock())

    def add(self, *times: Sequence[float], **family: Any) -> list[Candidate]:
        candidates = [Candidate(self.device, own) for own in times]
        self.trial.add(self._module.AlgorithmFamily("a", lambda: candidates, **family))
        return candidates


@pytest.fixture
def trials(cupy_or_mock: None, monkeypatch: pytest.MonkeyPatch) -> Trials:
    module = importlib.import_module("caffepy.backend.cuda.convolution.autotune")
    made = Trials(module)
    stream = SimpleNamespace(synchronize=made.device.wait)
    monkeypatch.setattr(module, "cupy", SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream)))
    monkeypatch.setattr(module, "Stopwatch", made.device.watch)
    monkeypatch.setattr(module, "monotonic", lambda: made.device.now / 1e6)
    return made


def test_a_last_resort_is_left_where_there_is_something(trials: Trials) -> None:
    (failing,) = trials.add(FAILS, last_resort=True)
    slow, absent, fast = trials.add([9.0], FAILS, [8.0])
    (unwanted,) = trials.add([0.5], last_resort=True)
    assert failing.seen and slow.seen and absent.seen and not unwanted.seen
    assert trials.trial.best() == (fast, 8.0)


def test_the_first_few_that_are_close_are_timed_in_turn_once_more(trials: Trials) -> None:
    again = [[5.0, 5.1, 5.2], [6.0, 3.0, 6.0], [4.0, 4.0, 4.0], [6.0] * 3, [0.1], [0.1]]
    first = (10, 10.1, 10.2, 10.3, 10.4, 10.9)
    candidates = trials.add(*([time, time, time, *own] for time, own in zip(first, again, strict=True)))
    assert trials.trial.best() == (candidates[1], 3.0)


def test_the_second_is_timed_again_however_far_it_is_behind(trials: Trials) -> None:
    _, second, _ = trials.add([19.0] * 3 + [1.0], [18.0] * 3 + [13.0], [14.0])
    assert trials.trial.best() == (second, 13.0)


@pytest.mark.parametrize(
    ("times", "kept"),
    [
        ([10.0, 10.0, 9.0], True),
        ([10.0, 30.0], False),
        ([10.0, 15.0, 14.5], False),
        ([10.0, 19.0, 11.0, 10.5], True),  # the first was disturbed
        ([20031.0], False),
        ([20029.0, 12.4, 12.0], True),
    ],
)
def test_candidates_that_are_behind_the_best_one_of_10_us(trials: Trials, times: list[float], kept: bool) -> None:
    """Times within 4 us, or a quarter, of the best are taken; up to twice as long, the run is repeated."""
    trials.add([10.0])
    (other,) = trials.add(times)
    assert other.runs == len(times)
    trials.trial.best()
    assert (other.runs > len(times)) == kept, "the finalists are timed again"


@pytest.mark.parametrize(
    ("times", "tried"),
    [
        ([10.0, 40.0, 10.6, 40.0, 40.0, 1.0], 5),  # four in a row are behind
        ([10.0, 40.0, 40.0, 40.0, 10.4, 40.0, 40.0, 40.0, 40.0, 1.0], 9),
        ([40.0, 40.0, 20.0, 10.0, 9.0], 5),
    ],
)
def test_a_family_ends_after_four_candidates_that_are_not_close(trials: Trials, times: list[float], tried: int) -> None:
    """Those that cannot be prepared do not count, and the next family begins anew."""
    family = [FAILS, *([time] for time in times[:2]), FAILS, FAILS, *([time] for time in times[2:])]
    candidates = trials.add(*family)
    assert sum(candidate.runs > 0 for candidate in candidates) == tried
    (other,) = trials.add([2.0])
    assert trials.trial.best()[0] is other
