"""CSV and JSON Lines: rows, new columns, what a resumed training keeps, and files that are something else."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import numpy as np
import pytest

from caffepy.errors import ConfigError, RunError
from caffepy.training.callbacks.loggers import CsvLogger, JsonLinesLogger, Logger, Run


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
