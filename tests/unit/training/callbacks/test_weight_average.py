"""--ema: the average of the parameters is the formula's, is tested, is saved, and goes on with a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import FORMATS, NET, SOLVER
from training import solver_param

import caffepy
from caffepy.errors import ConfigError
from caffepy.training.solver import Solver

DECAY = 0.3


class Parameters:
    """Records the flat parameters after each iteration and after each test, and what tests saw."""

    def __init__(self) -> None:
        self.after: list[np.ndarray] = []
        self.tested: dict[int, np.ndarray] = {}

    def after_iteration(self, solver: Solver) -> None:
        self.after.append(solver.backend.to_host(solver.net.parameters.data).copy())

    def before_test(self, solver: Solver) -> None:
        self.tested[solver.iteration] = solver.backend.to_host(solver.net.parameters.data).copy()

    def after_test(self, solver: Solver, scores: Any) -> None:
        if self.after:  # the parameters themselves again; a test averages running statistics of several devices
            learned = slice(solver.net.parameters.learned)
            present = solver.backend.to_host(solver.net.parameters.data)
            np.testing.assert_array_equal(present[learned], self.after[-1][learned])


def run(max_iter: int, text: str = "", **options: Any) -> Parameters:
    seen = Parameters()
    param = solver_param(f"{SOLVER} max_iter: {max_iter} {text}", NET)
    options = {"ema": DECAY, "threads": 1, "callbacks": seen, **options}
    caffepy.train(param, **options).close()
    return seen


def averages(after: list[np.ndarray], start: np.ndarray) -> list[np.ndarray]:
    """The average after each iteration."""
    result = [start]
    for made, values in enumerate(after):
        share = 1 - min(DECAY, (1 + made) / (10 + made))
        result.append(result[-1] + np.float32(share) * (values - result[-1]))
    return result


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_tests_see_the_average(folder: Path) -> None:
    seen = run(6)
    expected = averages(seen.after, seen.tested[0])
    assert sorted(seen.tested) == [0, 2, 4, 6]
    for iteration, values in seen.tested.items():
        np.testing.assert_allclose(values, expected[iteration], rtol=1e-5, atol=1e-6)
    assert not np.allclose(seen.tested[6], seen.after[-1], rtol=1e-3)


@pytest.mark.parametrize("form", FORMATS)
def test_it_goes_on_with_a_snapshot(folder: Path, form: str) -> None:
    whole = run(6, f"{form} snapshot: 3")
    last, ending = whole.tested[6], ".h5" if form else ""
    (folder / f"x_iter_6.ema.caffemodel{ending}").unlink()
    resumed = run(6, f"{form} snapshot: 3", snapshot=f"x_iter_3.solverstate{ending}")
    np.testing.assert_array_equal(resumed.tested[6], last)
    assert (folder / f"x_iter_6.ema.caffemodel{ending}").exists()


def test_the_file_has_the_tested_average(folder: Path) -> None:
    seen = run(2, "snapshot: 2 snapshot_after_train: false")
    started = Parameters()
    param = solver_param(f"{SOLVER} max_iter: 0 snapshot_after_train: false", NET)
    weights = folder / "x_iter_2.ema.caffemodel"
    caffepy.train(param, threads=1, weights=weights, callbacks=started).close()
    np.testing.assert_array_equal(started.tested[0], seen.tested[2])


def test_without_its_file_it_begins_with_the_weights(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    run(2, "snapshot: 2", ema=0.0)
    assert not list(folder.glob("*.ema.*"))
    seen = run(2, snapshot="x_iter_2.solverstate", overwrite=True)
    assert "x_iter_2.ema.caffemodel does not exist" in caplog.text
    assert seen.after == []


def test_devices_have_the_same_average(folder: Path) -> None:
    """A resumed second device has the root's average: the scores, to which both add, go on as before."""
    text, scores = "snapshot: 4 snapshot_after_train: false", []
    for start in (None, "x_iter_4.solverstate"):
        param = solver_param(f"{SOLVER} max_iter: 6 {text}", NET)
        settings = {"ema": 0.9, "threads": 1, "cpu_solvers": 2, "snapshot": start}
        with caffepy.train(param, **settings) as trained:
            scores.append(float(trained.scores[6][0]["loss"]))
    assert scores[0] == scores[1]


def test_old_averages_go_with_their_snapshots(folder: Path) -> None:
    run(6, "snapshot: 2", keep_last=1)
    assert sorted(path.name for path in folder.glob("x_*")) == [
        "x_iter_6.caffemodel",
        "x_iter_6.ema.caffemodel",
        "x_iter_6.solverstate",
    ]


@pytest.mark.parametrize("decay", [1, 1.5, -0.1, "much"])
def test_the_decay_lies_between_0_and_1(decay: Any) -> None:
    with pytest.raises(ConfigError, match="ema: "):
        run(1, ema=decay)
