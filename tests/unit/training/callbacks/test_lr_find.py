"""--lr-find: the rates that are tried, the rate that is chosen, the end, and the picture."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import TESTED, solver_param

import caffepy
from caffepy.errors import ConfigError
from caffepy.training.callbacks import lr_find
from caffepy.training.callbacks.lr_find import FIRST_RATE, LAST_RATE, rising_rates, running_means, steepest_rate
from caffepy.training.solver import Solver

NET = """
layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: [8, 5] } shape { dim: [8, 1] } data_filler { type: "gaussian" }
  data_filler { type: "constant" value: 3 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" inner_product_param { num_output: 1 } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "loss" }
"""
SNAPSHOTS = 'snapshot: 1 snapshot_prefix: "x" '


def find(path: Path, **options: Any) -> tuple[list[float], caffepy.TrainResult]:
    """The rates that were trained with, and the result."""
    rates: list[float] = []

    def note(solver: Solver) -> None:
        rates.append(solver.hyperparameters.rate)

    param = solver_param(TESTED.replace("snapshot_after_train: false", "") + SNAPSHOTS, NET)
    with caffepy.train(param, lr_find=path, threads=1, callbacks=note, **options) as result:
        return rates, result


def test_rates_rise_until_the_loss_diverges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "caffepy")
    monkeypatch.chdir(tmp_path)
    rates, result = find(tmp_path / "lr.png")
    assert result.stopped_early
    assert 20 < len(rates) < lr_find.ITERATIONS
    ratios = np.array(rates[1:]) / np.array(rates[:-1])
    np.testing.assert_allclose(ratios, (LAST_RATE / FIRST_RATE) ** (1 / (lr_find.ITERATIONS - 1)), rtol=1e-5)
    assert rates[0] == pytest.approx(FIRST_RATE)
    assert not result.scores
    assert [path.name for path in tmp_path.iterdir()] == ["lr.png"]
    chosen = next(line for line in caplog.messages if "base_lr=" in line).partition("base_lr=")[2]
    assert 1e-4 < float(chosen) < rates[-1]


def test_max_iter_is_the_number_of_rates(tmp_path: Path) -> None:
    param = solver_param(TESTED, NET)
    rising_rates(param, 40)
    assert param.base_lr * param.gamma**39 == pytest.approx(LAST_RATE, rel=1e-4)
    rates, result = find(tmp_path / "lr.svg", max_iter=5, cpu_solvers=2)
    assert result.iteration == 5
    assert rates[-1] == pytest.approx(LAST_RATE, rel=1e-4)
    assert (tmp_path / "lr.svg").read_text().startswith("<?xml")


def test_the_rate_is_that_of_the_steepest_fall() -> None:
    rates = list(np.logspace(-6, 1, 200))
    noise = np.random.default_rng(1).normal(0, 0.02, 200)
    losses = [1 / (1 + (rate / 0.01) ** 2) + max(0, rate - 1) + 1 for rate in rates]
    chosen = steepest_rate(rates, running_means(list(losses + noise)))
    assert chosen is not None
    assert 0.003 < chosen < 0.06  # the mean lags behind


@pytest.mark.parametrize("losses", [[], [1.0] * 30, list(np.linspace(1, 5, 30)), [2.0, 1.0]])
def test_no_rate_is_chosen_where_the_loss_does_not_fall(losses: list[float]) -> None:
    assert steepest_rate(list(np.logspace(-6, 1, len(losses))), losses) is None


def test_a_loss_that_is_not_finite_ends_the_test(tmp_path: Path) -> None:
    class Broken:
        """What the callback reads of a solver."""

        class losses:  # noqa: N801 -- an attribute of a solver
            @staticmethod
            def values() -> list[float]:
                return [math.nan]

        iteration = 1

    finder = lr_find.LearningRateFinder(tmp_path / "lr.png")
    assert finder.after_iteration(Broken())  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"lr_find": "lr.txt"}, r"lr\.txt"),
        ({"lr_find": "absent/lr.png"}, "there is no folder absent"),
        ({"lr_find": "lr.png", "snapshot": "auto"}, "--lr-find"),
        ({"lr_find": "lr.png", "max_iter": 0}, "--lr-find without an iteration"),
    ],
)
def test_mistakes_are_found_before_training(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        caffepy.train(solver_param(TESTED, NET), threads=1, **options)
