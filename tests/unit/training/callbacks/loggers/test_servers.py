"""The adapters of wandb and MLflow, called with small modules in place of the libraries."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from caffepy.training.callbacks.loggers import Run, make_loggers

SETTINGS = {"base_lr": 0.1, "lr_policy": "fixed"}


def run(tmp_path: Path, iteration: int) -> Run:
    return Run(iteration, SETTINGS, tmp_path / "net_loggers.json")


# -- wandb ---------------------------------------------------------------------------------------------


class WandbRun:
    def __init__(self, id: str | None, project: str, entity: str | None, **given: Any) -> None:
        self.id = id or "new1"
        self.place = (entity, project)
        self.given = given
        self.step = 200 if id else 0
        self.logged: list[tuple[int, dict[str, Any]]] = []
        self.ended: int | None = None

    def log(self, values: dict[str, Any], step: int) -> None:
        self.logged.append((step, values))

    def finish(self, exit_code: int) -> None:
        self.ended = exit_code


@pytest.fixture
def wandb_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[WandbRun]]:
    runs: list[WandbRun] = []
    module = ModuleType("wandb")
    module.init = lambda **given: runs.append(WandbRun(**given)) or runs[-1]  # type: ignore[attr-defined]
    module.Histogram = np.histogram  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "wandb", module)
    monkeypatch.delitem(sys.modules, "caffepy.training.callbacks.loggers", raising=False)
    yield runs
    sys.modules.pop("caffepy.training.callbacks.loggers", None)


def test_wandb_gets_values_and_a_resumed_run(tmp_path: Path, wandb_runs: list[WandbRun]) -> None:
    ((_, logger),) = make_loggers("wandb:team/digits")
    logger.start(run(tmp_path, 0))
    logger.scalars(0, {"loss": 2.0})
    logger.histograms(0, {"w": np.ones(3)})
    logger.close(failed=True)
    (first,) = wandb_runs
    assert first.place == ("team", "digits")
    assert (first.given["config"], first.given["resume"]) == (SETTINGS, None)
    assert first.logged[0] == (0, {"loss": 2.0})
    assert [step for step, _ in first.logged] == [0, 0]
    assert first.ended == 1

    ((_, logger),) = make_loggers("wandb:team/digits")
    logger.start(run(tmp_path, 100))
    for iteration in (100, 200, 300):
        logger.scalars(iteration, {"loss": 1.0})
    second = wandb_runs[1]
    assert (second.id, second.given["resume"]) == ("new1", "allow")
    assert [step for step, _ in second.logged] == [200, 300]  # the server has the others


def test_wandb_begins_a_run_for_a_training_that_begins(tmp_path: Path, wandb_runs: list[WandbRun]) -> None:
    for _ in range(2):
        make_loggers("wandb:digits")[0][1].start(run(tmp_path, 0))
    assert [one.given["resume"] for one in wandb_runs] == [None, None]


# -- MLflow --------------------------------------------------------------------------------------------


class Client:
    """A tracking server in memory."""

    runs: dict[str, SimpleNamespace]

    def __init__(self, tracking_uri: str) -> None:
        assert tracking_uri == "sqlite:///runs.db"

    def get_experiment_by_name(self, name: str) -> None:
        return None

    def create_experiment(self, name: str) -> str:
        return name

    def create_run(self, experiment: str) -> SimpleNamespace:
        identifier = f"{experiment}{len(self.runs)}"
        self.runs[identifier] = SimpleNamespace(params={}, metrics=[], status="RUNNING")
        return SimpleNamespace(info=SimpleNamespace(run_id=identifier))

    def get_run(self, identifier: str) -> SimpleNamespace:
        if identifier not in self.runs:
            raise LookupError(identifier)
        return SimpleNamespace(data=SimpleNamespace(metrics={one.key for one in self.runs[identifier].metrics}))

    def get_metric_history(self, identifier: str, key: str) -> list[Any]:
        return [one for one in self.runs[identifier].metrics if one.key == key]

    def log_batch(self, identifier: str, metrics: Any = (), params: Any = ()) -> None:
        self.runs[identifier].metrics += metrics
        self.runs[identifier].params.update(params)

    def update_run(self, identifier: str, status: str) -> None:
        self.runs[identifier].status = status

    def set_terminated(self, identifier: str, status: str) -> None:
        self.runs[identifier].status = status


@pytest.fixture
def mlflow_runs(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, SimpleNamespace]]:
    def metric(key: str, value: float, timestamp: int, step: int) -> SimpleNamespace:
        return SimpleNamespace(key=key, value=value, step=step)

    client = type("Client", (Client,), {"runs": {}})
    modules = {
        "mlflow": {},
        "mlflow.entities": {"Metric": metric, "Param": lambda key, value: (key, value)},
        "mlflow.exceptions": {"MlflowException": LookupError},
        "mlflow.tracking": {"MlflowClient": client},
    }
    for name, names in modules.items():
        module = ModuleType(name)
        vars(module).update(names)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "caffepy.training.callbacks.loggers", raising=False)
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    yield client.runs
    sys.modules.pop("caffepy.training.callbacks.loggers", None)


def test_mlflow_gets_values_and_a_resumed_run(tmp_path: Path, mlflow_runs: dict[str, SimpleNamespace]) -> None:
    for start, iterations in ((0, (0, 100, 200)), (100, (100, 200, 300))):
        ((_, logger),) = make_loggers("mlflow:sqlite:///runs.db")
        logger.start(run(tmp_path, start))
        for iteration in iterations:
            logger.scalars(iteration, {"train/loss[1]": float(start)})
        logger.close(failed=start > 0)
    ((identifier, only),) = mlflow_runs.items()
    assert identifier == "caffepy0"
    assert only.params == {"base_lr": "0.1", "lr_policy": "fixed"}
    assert [(one.key, one.step, one.value) for one in only.metrics] == [
        ("train/loss_1_", 0, 0), ("train/loss_1_", 100, 0), ("train/loss_1_", 200, 0), ("train/loss_1_", 300, 100),
    ]  # fmt: skip
    assert only.status == "FAILED"


def test_mlflow_begins_a_run_if_the_earlier_one_was_removed(
    tmp_path: Path, mlflow_runs: dict[str, SimpleNamespace]
) -> None:
    make_loggers("mlflow:sqlite:///runs.db")[0][1].start(run(tmp_path, 0))
    mlflow_runs["other"] = mlflow_runs.pop("caffepy0")
    make_loggers("mlflow:sqlite:///runs.db")[0][1].start(run(tmp_path, 100))
    assert list(mlflow_runs) == ["other", "caffepy1"]
