"""--check: what it runs, what it finds, and that it writes nothing."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
from training import TESTED, TINY, solver_param

import caffepy
from caffepy.errors import ConfigError
from caffepy.training.callbacks.check_run import shortened
from caffepy.training.solver import Solver

SNAPSHOTS = 'snapshot: 1 snapshot_prefix: "x" '


class Events:
    """Counts what a training does."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def after_iteration(self, solver: Solver) -> None:
        self.seen.append("iteration")

    def after_test(self, solver: Solver, scores: Any) -> None:
        self.seen.append("test")

    def after_snapshot(self, solver: Solver, path: Path) -> None:
        self.seen.append("snapshot")


@pytest.mark.parametrize("devices", [1, 2])
def test_it_makes_an_iteration_and_a_test_and_writes_nothing(
    devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    caplog.set_level(logging.INFO, "caffepy")
    events = Events()
    param = solver_param(TESTED.replace("snapshot_after_train: false", "") + SNAPSHOTS, TINY)
    caffepy.train(param, check_only=True, threads=1, cpu_solvers=devices, callbacks=events).close()
    assert events.seen == ["iteration", "test"]
    assert list(tmp_path.iterdir()) == []
    said = "\n".join(caplog.messages)
    for word in ("accuracy", "snapshots can be written", "training can begin"):
        assert word in said
    assert "Solver performance" not in said


def test_it_goes_on_from_a_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    param = solver_param(TESTED + SNAPSHOTS, TINY)
    caffepy.train(param, max_iter=2, threads=1).close()
    files = sorted(tmp_path.iterdir())
    events = Events()
    with caffepy.train(param, check_only=True, threads=1, callbacks=events, snapshot="auto", max_iter=4) as checked:
        assert checked.iteration == 3
    assert events.seen == ["iteration", "test"]
    assert sorted(tmp_path.iterdir()) == files


def test_it_finds_a_folder_that_does_not_exist() -> None:
    param = solver_param(TESTED + SNAPSHOTS.replace('"x"', '"absent/x"'), TINY)
    with pytest.raises(ConfigError, match="absent"):
        caffepy.train(param, check_only=True, threads=1)


def test_a_short_test_has_a_batch_for_each_device() -> None:
    param = solver_param("test_iter: [1, 5, 100] test_interval: 7 test_and_snapshot_last_epochs: 2")
    assert list(shortened(param, 4).test_iter) == [1, 4, 4]
    assert not shortened(param, 4).HasField("test_and_snapshot_last_epochs")
    assert list(param.test_iter) == [1, 5, 100]
