"""--early-stop ends training when a test's score has not become better."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import TESTED, TINY, build_solver, solver_param

import caffepy
from caffepy.errors import ConfigError
from caffepy.training.callbacks.early_stop import EarlyStop
from caffepy.utils.options import score_and_patience


class Tested:
    """What the callback reads of a solver after a test."""

    iteration = 0


def stops_after(given: str, values: list[float]) -> int | None:
    """The number of the test after which the callback stops training; None if it does not."""
    with build_solver(TESTED, TINY) as solver:
        stop = EarlyStop(given, solver)
        for number, value in enumerate(values, 1):
            scores: list[dict[str, Any]] = [{"accuracy": np.array(value), "loss": np.array(value)}]
            if stop.after_test(solver, scores):
                return number
    return None


@pytest.mark.parametrize(
    ("given", "values", "expected"),
    [
        ("accuracy:2", [0.5, 0.6, 0.6, 0.55, 0.7], 4),
        ("accuracy:2", [0.5, 0.6, 0.5, 0.7, 0.6, 0.7], 6),
        ("accuracy:3", [0.5, 0.4, 0.4], None),
        ("loss:1", [3, 2, 1, 1], 4),
        ("loss:2", [1, 2, 0.5, 0.4], None),
        ("loss:1", [float("nan")], 1),
    ],
)
def test_patience_counts_tests_without_a_better_score(given: str, values: list[float], expected: int | None) -> None:
    assert stops_after(given, values) == expected


def test_an_interrupted_test_counts_for_nothing() -> None:
    with build_solver(TESTED, TINY) as solver:
        assert not EarlyStop("accuracy:1", solver).after_test(solver, [])


@pytest.mark.parametrize(
    ("given", "text"), [("acuracy:2", "did you mean 'accuracy'"), ("accuracy", "accuracy:5"), ("loss:0", "loss:0")]
)
def test_mistakes_are_found_before_training(given: str, text: str) -> None:
    with build_solver(TESTED, TINY) as solver, pytest.raises(ConfigError, match=text):
        EarlyStop(given, solver)


def test_it_needs_tests() -> None:
    text = 'base_lr: 0.1 lr_policy: "fixed" max_iter: 4 snapshot_after_train: false'
    with build_solver(text, TINY) as solver, pytest.raises(ConfigError, match="--early-stop loss needs tests"):
        EarlyStop("loss:1", solver)


def test_a_name_may_contain_a_colon() -> None:
    assert score_and_patience("a:b:3") == "a:b:3"


def test_training_ends_early() -> None:
    """Without learning no score becomes better."""
    param = solver_param(TESTED.replace("max_iter: 4", "max_iter: 100"), TINY)
    with caffepy.train(param, early_stop="accuracy:2", set="base_lr=0", threads=1) as trained:
        assert trained.stopped_early
        assert trained.iteration < 100
        assert len(trained.scores) >= 3


@pytest.mark.parametrize("solvers", [1, 2])
def test_the_last_snapshot_is_of_the_net_that_was_tested_last(solvers: int, tmp_path: Path) -> None:
    """Also on several devices, whose other requests take effect after the next iteration."""
    text = TESTED.replace("max_iter: 4", "max_iter: 100").replace("snapshot_after_train: false", "")
    param = solver_param(f'{text} snapshot: 1000 snapshot_prefix: "{tmp_path / "s"}"', TINY)
    with caffepy.train(param, early_stop="accuracy:2", set="base_lr=0", cpu_solvers=solvers, threads=1) as trained:
        assert trained.stopped_early
        tested = max(trained.scores)
        assert trained.iteration == tested
        assert [path.name for path in trained.snapshots] == [f"s_iter_{tested}.solverstate"]
