"""The loggers of --log: how they are chosen, what they write, and what wandb and MLflow are told."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

import caffepy
from caffepy.errors import ConfigError, RunError
from caffepy.training.callbacks.loggers import CsvLogger, JsonLinesLogger, Logger, Run, logger_list, make_loggers
from caffepy.utils.installation import MissingExtraError


def test_a_list_has_kinds_and_targets() -> None:
    assert logger_list("csv:a.csv, mlflow:http://host:5000,") == ["csv:a.csv", "mlflow:http://host:5000"]


@pytest.mark.parametrize("text", ["csv", "csv:", "excel:a", "csv:a,b", "", ","])
def test_another_text_is_refused_with_the_kinds(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"is no logger; known: tensorboard:DIR, csv:FILE"):
        logger_list(text)
    with pytest.raises(ConfigError, match="is no logger"):
        make_loggers([text])


@pytest.mark.parametrize("text", ["csv:X,csv:X", "csv:X,jsonl:./X", "tensorboard:X,csv:X", "wandb:p,mlflow:u,wandb:p"])
def test_two_loggers_do_not_share_a_target(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="' write to the same place; name another"):
        logger_list(text)
    with pytest.raises(ConfigError, match="' write to the same place"):
        make_loggers(text.split(","))
    assert logger_list("csv:X,jsonl:Y,wandb:X") == ["csv:X", "jsonl:Y", "wandb:X"]


def test_texts_and_objects_are_loggers_alone_or_in_a_list() -> None:
    own = caffepy.Logger()
    assert [name for name, _ in make_loggers(own)] == ["Logger"]
    named = make_loggers(["csv:a.csv,jsonl:b", own])
    assert [name for name, _ in named] == ["csv:a.csv", "jsonl:b", "Logger"]
    assert [type(logger) for _, logger in named] == [CsvLogger, JsonLinesLogger, caffepy.Logger]
    assert make_loggers([]) == []


@pytest.mark.parametrize("given", [3, None, caffepy.Logger, [object()]])
def test_another_object_is_refused(given: object) -> None:
    with pytest.raises(ConfigError, match="is no logger; give a text"):
        make_loggers(given)


@pytest.mark.parametrize(
    ("text", "package", "extra"),
    [("tensorboard:d", "tensorboardX", "tensorboard"), ("wandb:p", "wandb", "wandb"), ("mlflow:u", "mlflow", "mlflow")],
)
def test_a_missing_library_is_named_with_its_extra(
    text: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in [name for name in sys.modules if name.split(".")[0] == package]:
        monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"caffepy.training.callbacks.loggers.{extra}", raising=False)
    with pytest.raises(MissingExtraError, match=rf"{package} is not installed .*\[{extra}\]'"):
        make_loggers(text)


# -- CSV and JSON Lines ----------------------------------------------------------------------------------


def write(logger: Logger, first: int, *rows: dict[str, float]) -> None:
    """Log one row for each iteration from `first` on."""
    logger.start(Run(first, {}))
    for iteration, row in enumerate(rows, first):
        logger.scalars(iteration, row)
    logger.close(failed=False)


def csv_rows(path: Path) -> list[dict[str, str]]:
    with path.open() as file:
        return list(csv.DictReader(file))


def test_csv_gets_columns_as_values_come(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.csv"
    write(CsvLogger(path), 0, {"loss": 0.5}, {"loss": 0.25, 'a, "b"': 1e-20}, {"c": float("nan")})
    assert [{k: v for k, v in row.items() if k != "time"} for row in csv_rows(path)] == [
        {"iteration": "0", "loss": "0.5", 'a, "b"': "", "c": ""},
        {"iteration": "1", "loss": "0.25", 'a, "b"': "1e-20", "c": ""},
        {"iteration": "2", "loss": "", 'a, "b"': "", "c": "nan"},
    ]
    assert all(float(row["time"]) > 1e9 for row in csv_rows(path))


def test_json_lines_are_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    write(JsonLinesLogger(path), 0, {"loss": 0.5}, {"loss": float("inf"), "score": 1.0})
    first, second = map(json.loads, path.read_text().splitlines())
    assert (first["iteration"], first["loss"]) == (0, 0.5)
    assert (second["iteration"], second["loss"], second["score"]) == (1, None, 1)


def test_json_lines_have_histograms(tmp_path: Path) -> None:
    logger, values = JsonLinesLogger(tmp_path / "run.jsonl"), np.linspace(-1, 3, 1000, dtype=np.float32)
    logger.start(Run(0, {}))
    logger.histograms(7, {"w": values})
    logger.close(failed=False)
    row = json.loads((tmp_path / "run.jsonl").read_text())
    assert row["iteration"] == 7
    assert sum(row["histograms"]["w"]["counts"]) == 1000
    assert (row["histograms"]["w"]["edges"][0], row["histograms"]["w"]["edges"][-1]) == (-1, 3)


@pytest.mark.parametrize("kind", [CsvLogger, JsonLinesLogger])
def test_a_resumed_training_replaces_rows_from_its_first_iteration(
    tmp_path: Path, kind: type[CsvLogger | JsonLinesLogger]
) -> None:
    path = tmp_path / "run"
    write(kind(path), 0, {"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}, {"loss": 3.0})
    write(kind(path), 2, {"loss": 20.0, "new": 1.0})
    rows = csv_rows(path) if kind is CsvLogger else list(map(json.loads, path.read_text().splitlines()))
    assert [(int(row["iteration"]), float(row["loss"])) for row in rows] == [(0, 0.0), (1, 1.0), (2, 20.0)]
    assert not (tmp_path / "run.bak").exists()


@pytest.mark.parametrize("kind", [CsvLogger, JsonLinesLogger])
def test_a_row_that_a_killed_process_left_unfinished_is_dropped(
    tmp_path: Path, kind: type[CsvLogger | JsonLinesLogger]
) -> None:
    path = tmp_path / "run"
    write(kind(path), 0, {"loss": 0.5, "score": 1.0}, {"loss": 0.25, "score": 2.0})
    path.write_bytes(path.read_bytes()[:-8])
    write(kind(path), 2, {"loss": 0.125})
    text = path.read_text()
    assert text.count("\n") == (3 if kind is CsvLogger else 2)
    assert "0.5" in text
    assert "0.25" not in text


@pytest.mark.parametrize("kind", [CsvLogger, JsonLinesLogger])
def test_a_training_that_begins_keeps_the_earlier_file(tmp_path: Path, kind: type[CsvLogger | JsonLinesLogger]) -> None:
    path = tmp_path / "run"
    write(kind(path), 0, {"loss": 0.5})
    before = path.read_bytes()
    write(kind(path), 0, {"loss": 0.75})
    assert (tmp_path / "run.bak").read_bytes() == before
    assert b"0.75" in path.read_bytes()
    assert b"0.5," not in path.read_bytes()


@pytest.mark.parametrize("kind", [CsvLogger, JsonLinesLogger])
@pytest.mark.parametrize("content", [b"name,age\n1,2\n", b"[1]\n", b'{"a": 1}\n', b"\xff\xfe\n", b"[" * 100_000])
def test_another_file_is_refused_and_left_alone(
    tmp_path: Path, kind: type[CsvLogger | JsonLinesLogger], content: bytes
) -> None:
    path = tmp_path / "important.txt"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"important\.txt exists and is no such log of a training"):
        kind(path).start(Run(0, {}))
    assert path.read_bytes() == content


def test_a_folder_in_place_of_the_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        CsvLogger(tmp_path).start(Run(0, {}))
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="cannot be written: File exists"):
        CsvLogger(tmp_path / "file" / "run.csv").start(Run(0, {}))


# -- the servers, as small modules in place of the libraries ---------------------------------------------


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
        ("train/loss_1_", 0, 0),
        ("train/loss_1_", 100, 0),
        ("train/loss_1_", 200, 0),
        ("train/loss_1_", 300, 100),
    ]
    assert only.status == "FAILED"


def test_mlflow_begins_a_run_if_the_earlier_one_was_removed(
    tmp_path: Path, mlflow_runs: dict[str, SimpleNamespace]
) -> None:
    make_loggers("mlflow:sqlite:///runs.db")[0][1].start(run(tmp_path, 0))
    mlflow_runs["other"] = mlflow_runs.pop("caffepy0")
    make_loggers("mlflow:sqlite:///runs.db")[0][1].start(run(tmp_path, 100))
    assert list(mlflow_runs) == ["other", "caffepy1"]
