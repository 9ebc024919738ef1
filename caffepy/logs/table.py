"""Output of logs as CSV files with the columns of Caffe's `tools/extra/parse_log.py`."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path

from caffepy.errors import spreadsheet_text
from caffepy.files import atomic_write
from caffepy.logs.read import LogRow, TrainingLog

_NET = "TestNet"
_LOSS = "loss"


def write_tables(log: TrainingLog, folder: Path, delimiter: str = ",") -> list[Path]:
    """Write `<log>.train` and `<log>.test` to a folder. A table without rows is not written.

    The columns are NumIters, Seconds, LearningRate, with several test nets TestNet, and the net's outputs. A train net
    without outputs has the column loss.

    Args:
        log: the log.
        folder: of the files.
        delimiter: between columns.

    Returns:
        The paths of the written files.

    Raises:
        RunError: a file cannot be written.
    """
    paths = []
    for rows, ending in ((log.train, "train"), (log.test, "test")):
        path = folder / f"{log.path.name}.{ending}"
        if rows:
            with atomic_write(path) as file:
                file.write(_table(rows, delimiter).encode())
            paths.append(path)
    return paths


def _table(rows: Sequence[LogRow], delimiter: str) -> str:
    names = list(dict.fromkeys(name for row in rows for name in row.outputs))
    head = ["NumIters", "Seconds", "LearningRate"]
    several_nets = any(row.net for row in rows)
    head += [_NET] if several_nets else []
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow([*head, *(map(spreadsheet_text, names) if names else [_LOSS])])
    for row in rows:
        if names and not row.outputs:  # the loss after the last iteration
            continue
        cells: list[object] = [row.iteration, f"{row.seconds:.6f}", _rounded(row.learning_rate)]
        cells += [row.net] if several_nets else []
        writer.writerow([*cells, *_values(row, names)])
    return text.getvalue()


def _values(row: LogRow, names: Sequence[str]) -> Iterator[str]:
    if not names:
        yield _rounded(row.loss or 0.0)
    for name in names:
        yield _rounded(row.outputs[name]) if name in row.outputs else ""


def _rounded(value: float) -> str:
    return f"{value:.9g}"
