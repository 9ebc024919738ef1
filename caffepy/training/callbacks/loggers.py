"""Loggers, to which `--log` hands the values of a training: CSV, JSON Lines, TensorBoard, Weights & Biases and MLflow.

`make_loggers` makes them from texts such as `csv:run.csv`, or takes objects of a program's own `Logger`. The library of
a logger is imported when a run asks for it. `logger_callback.py` collects the values of rank 0's first solver; loggers
know no solver.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import math
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from caffepy.errors import ConfigError, RunError, spreadsheet_text
from caffepy.utils.files import atomic_write, open_regular, read_regular
from caffepy.utils.installation import MissingExtraError

if TYPE_CHECKING:
    import numpy as np

_MOST_BYTES = 1 << 16
"""Largest file of identifiers that is read."""


@dataclass(frozen=True)
class Run:
    """Facts of the training that a logger gets before its first iteration.

    Args:
        iteration: the first iteration; above 0 if training resumes from a snapshot. Values of this iteration and of
            later ones replace the values that an earlier process has logged.
        settings: the net's name, the fields of the solver, the samples of an iteration and the number of devices.
        identifiers: a file beside the snapshots for the identifiers that servers give; None: there is no such folder.
    """

    iteration: int
    settings: Mapping[str, bool | int | float | str]
    identifiers: Path | None = None

    def recall(self, logger: str) -> str | None:
        """The identifier that `remember` stored, if training resumes."""
        identifier = self._stored().get(logger) if self.iteration else None
        return identifier if isinstance(identifier, str) else None

    def remember(self, logger: str, identifier: str) -> None:
        """Store an identifier for a process that resumes this training.

        Raises:
            RunError: the file cannot be written.
        """
        if self.identifiers is not None:
            with atomic_write(self.identifiers) as file:
                file.write(json.dumps({**self._stored(), logger: identifier}, indent=1).encode())

    def _stored(self) -> dict[str, object]:
        if self.identifiers is None:
            return {}
        try:
            stored = json.loads(read_regular(self.identifiers, _MOST_BYTES))
        except (OSError, ValueError, RecursionError):
            return {}
        return stored if isinstance(stored, dict) else {}


class Logger:
    """Takes the values of a training. The methods do nothing; subclasses override what they need.

    The methods are called on rank 0, in the thread of the first device. An exception in `start` ends a training that
    begins with iteration 0. Other exceptions become a warning, and the logger is not called any more; a
    `caffepy.UserError` in `start` always ends training.
    """

    def start(self, run: Run) -> None:
        """Called before the first iteration."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        """Called with the values of an iteration, at most once for each iteration and in their order.

        Args:
            iteration: its number, as in the log.
            values: `loss`, `train/OUTPUT`, `test0/OUTPUT`, `learning_rate` and others; may be NaN or infinite.
        """

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """Called with the finite values of parameters and gradients, one float32 array (K,) for each."""

    def close(self, failed: bool) -> None:
        """Called after the last iteration, or when training has `failed`."""


# -- MLflow --------------------------------------------------------------------------------------------


_REQUEST = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "10", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2"}
"""Training waits while a request is made; MLflow's own limits add up to many minutes."""
_REFUSED = re.compile(r"[^\w.\-/ ]")
"""Characters that MLflow refuses in names."""


class MlflowLogger(Logger):
    """Logs into a run of the experiment that MLFLOW_EXPERIMENT_NAME names, by default ``caffepy``. No histograms.

    A training that resumes continues its run. MLflow cannot replace values: those of iterations that the run has
    already are not logged again.

    Args:
        uri: of the tracking server, or ``sqlite:///FILE``.

    Raises:
        ImportError: mlflow is not installed.
    """

    def __init__(self, uri: str) -> None:
        from mlflow import entities, exceptions, tracking

        self._entities, self._exceptions, self._tracking = entities, exceptions, tracking
        self._uri = uri
        self._id = ""
        self._last = -1
        """The run's last iteration."""

    def start(self, run: Run) -> None:
        """Begin or continue a run."""
        for name, value in _REQUEST.items():
            os.environ.setdefault(name, value)
        self._client = self._tracking.MlflowClient(tracking_uri=self._uri)
        name = f"mlflow:{self._uri}"
        known = run.recall(name)
        if known is None or not self._continue(known):
            self._begin(run)
            run.remember(name, self._id)

    def _continue(self, known: str) -> bool:
        try:
            metrics = self._client.get_run(known).data.metrics
        except self._exceptions.MlflowException:
            return False  # it was removed
        for name in metrics:
            self._last = max([self._last, *(metric.step for metric in self._client.get_metric_history(known, name))])
        self._id = known
        self._client.update_run(known, status="RUNNING")
        return True

    def _begin(self, run: Run) -> None:
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME", "caffepy")
        experiment = self._client.get_experiment_by_name(name)
        number = self._client.create_experiment(name) if experiment is None else experiment.experiment_id
        self._id = self._client.create_run(number).info.run_id
        params = [self._entities.Param(name, str(value)) for name, value in run.settings.items()]
        self._client.log_batch(self._id, params=params)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        if iteration <= self._last:
            return
        now = round(1000 * time.time())
        metric = self._entities.Metric
        metrics = [metric(_REFUSED.sub("_", name), value, now, iteration) for name, value in values.items()]
        self._client.log_batch(self._id, metrics=metrics)

    def close(self, failed: bool) -> None:
        if self._id:
            self._client.set_terminated(self._id, "FAILED" if failed else "FINISHED")


# -- CSV and JSON Lines --------------------------------------------------------------------------------


BINS = 64
"""Bins of a histogram."""

Row = dict[str, Any]


class RowFile(Logger, ABC):
    """A text file of rows, each with its iteration and the time in seconds since 1970.

    A training that resumes keeps the rows of the iterations before its first one. A training that begins renames an
    earlier file to ``NAME.bak``.

    Args:
        path: the file; its folder is made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: TextIO | None = None

    def start(self, run: Run) -> None:
        """Open the file.

        Raises:
            ConfigError: the file is not a log of this kind, or cannot be read.
            RunError: it cannot be written.
        """
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            rows = self._read() if self._path.exists() else []
            if rows and run.iteration == 0:
                os.replace(self._path, self._path.with_name(f"{self._path.name}.bak"))
            self._rewrite([row for row in rows if int(row["iteration"]) < run.iteration])
        except OSError as error:
            raise RunError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def close(self, failed: bool) -> None:
        if self._file is not None:
            self._file.close()

    def _append(self, row: Row) -> None:
        assert self._file is not None
        self._file.write(self._line(row))
        self._file.flush()

    def _rewrite(self, rows: Iterable[Row]) -> None:
        """Replace the file by one with these rows, and open it for further ones."""
        if self._file is not None:
            self._file.close()
        with atomic_write(self._path) as file:
            file.writelines(line.encode() for line in (self._head(), *map(self._line, rows)))
        self._file = self._path.open("a", encoding="utf-8", newline="")

    def _read(self) -> list[Row]:
        """The file's whole rows."""
        try:
            with open_regular(self._path) as file:
                rows = self._rows(line.decode() for line in file)
        except OSError as error:
            raise ConfigError(f"{self._path}: cannot be read: {error.strerror or error}") from error
        except (ValueError, KeyError, csv.Error, RecursionError) as error:
            raise ConfigError(f"{self._path} exists and is no such log of a training; name another file") from error
        return rows

    @abstractmethod
    def _rows(self, lines: Iterable[str]) -> list[Row]:
        """The whole rows among lines; raises ValueError, KeyError or csv.Error if they are of another file."""

    @abstractmethod
    def _line(self, row: Row) -> str:
        """A row as a line of text."""

    def _head(self) -> str:
        """The line before the rows."""
        return ""


class CsvLogger(RowFile):
    """CSV with a column for each value; a cell is empty if the iteration has no such value."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns = ["iteration", "time"]

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        values = {spreadsheet_text(name): value for name, value in values.items()}
        known = set(self._columns)
        if new := [name for name in values if name not in known]:
            rows = self._read()
            self._columns += new
            self._rewrite(rows)
        numbers = {name: f"{value:.9g}" for name, value in values.items()}
        self._append({"iteration": iteration, "time": f"{time.time():.3f}", **numbers})

    def _rows(self, lines: Iterable[str]) -> list[Row]:
        reader = csv.reader(lines)
        columns = next(reader, self._columns)
        if columns[:2] != self._columns[:2]:
            raise ValueError("another file")
        self._columns = columns
        # A killed process may have left part of a row.
        return [
            dict(zip(columns, row, strict=True)) for row in reader if len(row) == len(columns) and row[0].isdecimal()
        ]

    def _line(self, row: Row) -> str:
        return _csv_line([row.get(name, "") for name in self._columns])

    def _head(self) -> str:
        return _csv_line(self._columns)


def _csv_line(cells: list[Any]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


class JsonLinesLogger(RowFile):
    """JSON Lines: an object for each row. A value that is not finite is null."""

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        numbers = {name: value if math.isfinite(value) else None for name, value in values.items()}
        self._append({"iteration": iteration, "time": round(time.time(), 3), **numbers})

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        """An object with `histograms`: for each array the counts of `BINS` bins of equal width, and their edges."""
        import numpy as np

        histograms = {}
        for name, array in values.items():
            counts, edges = np.histogram(array, BINS)
            histograms[name] = {"counts": counts.tolist(), "edges": edges.tolist()}
        self._append({"iteration": iteration, "time": round(time.time(), 3), "histograms": histograms})

    def _rows(self, lines: Iterable[str]) -> list[Row]:
        rows: list[Row] = []
        for number, line in enumerate(lines):
            try:
                row = json.loads(line)
                rows.append({**row, "iteration": int(row["iteration"])})
            except (ValueError, TypeError, KeyError):
                if number == 0:
                    raise ValueError("another file") from None  # later lines: a killed process left part of a row
        return rows

    def _line(self, row: Row) -> str:
        return json.dumps(row) + "\n"


# -- TensorBoard ---------------------------------------------------------------------------------------


class TensorBoardLogger(Logger):
    """Writes an event file into a folder.

    Its first event is the start of a session at the run's first iteration: TensorBoard then hides what earlier files of
    the folder have from this iteration on.

    Args:
        folder: the folder, which is made.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str) -> None:
        from tensorboardX import event_file_writer, record_writer, summary
        from tensorboardX.proto import event_pb2, summary_pb2

        self._files, self._folders, self._summary = event_file_writer, record_writer, summary
        self._event, self._content = event_pb2, summary_pb2.Summary
        self._folder = folder
        self._writer: Any = None

    def start(self, run: Run) -> None:
        """Open the file.

        Raises:
            RunError: it cannot be written.
        """
        try:
            self._folders.directory_check(self._folder)
            # A process that resumes within the second would otherwise write the same file.
            name = os.path.join(self._folder, "events")
            self._writer = self._files.EventsWriter(name, f".{os.getpid()}.{run.iteration}")
            log = self._event.SessionLog
            self._write(run.iteration, session_log=log(status=log.START))
        except OSError as error:
            raise RunError(f"{self._folder}: cannot be written: {error.strerror or error}") from error

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._write_values(iteration, [{"tag": name, "simple_value": value} for name, value in values.items()])

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        make = self._summary.make_histogram
        histograms = [{"tag": name, "histo": make(array.astype(float), BINS)} for name, array in values.items()]
        self._write_values(iteration, histograms)

    def close(self, failed: bool) -> None:
        if self._writer is not None:
            self._writer.close()

    def _write_values(self, iteration: int, values: list[dict[str, Any]]) -> None:
        self._write(iteration, summary=self._content(value=[self._content.Value(**one) for one in values]))

    def _write(self, iteration: int, **content: Any) -> None:
        self._writer.write_event(self._event.Event(step=iteration, wall_time=time.time(), **content))
        self._writer.flush()


# -- Weights & Biases ----------------------------------------------------------------------------------


class WandbLogger(Logger):
    """Logs into a run of a project; wandb's environment variables (WANDB_MODE, WANDB_RUN_ID, ...) act.

    A training that resumes continues its run. The server keeps the values of iterations that it has already.

    Args:
        project: ``PROJECT`` or ``ENTITY/PROJECT``.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, project: str) -> None:
        import wandb

        self._wandb = wandb
        self._project = project
        self._run: Any = None

    def start(self, run: Run) -> None:
        """Begin or continue a run."""
        entity, _, project = self._project.rpartition("/")
        name = f"wandb:{self._project}"
        known = run.recall(name)
        self._run = self._wandb.init(
            entity=entity or None,
            project=project,
            config=dict(run.settings),
            id=known,
            resume="allow" if known else None,
            reinit="create_new",
        )
        run.remember(name, self._run.id)

    def scalars(self, iteration: int, values: Mapping[str, float]) -> None:
        self._log(iteration, dict(values))

    def histograms(self, iteration: int, values: Mapping[str, np.ndarray]) -> None:
        self._log(iteration, {name: self._wandb.Histogram(array) for name, array in values.items()})

    def close(self, failed: bool) -> None:
        if self._run is not None:
            self._run.finish(exit_code=int(failed))

    def _log(self, iteration: int, values: dict[str, Any]) -> None:
        if iteration >= self._run.step:
            self._run.log(values, step=iteration)


# -- the choice ----------------------------------------------------------------------------------------


KINDS = {"tensorboard": "DIR", "csv": "FILE", "jsonl": "FILE", "wandb": "PROJECT", "mlflow": "URI"}
"""The kinds of loggers and what follows their colon."""
_WRITES_THERE = ("tensorboard", "csv", "jsonl")
"""Kinds whose target is a file or folder."""
_LIBRARIES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow"}
"""By kind, which is the name of the extra too."""


def logger_list(text: str) -> list[str]:
    """``KIND:TARGET``, divided by commas."""
    parts = [part.strip() for part in text.split(",") if part.strip()]
    for part in parts or [text]:
        kind, _, target = part.partition(":")
        if kind not in KINDS or not target:
            known = ", ".join(f"{kind}:{target}" for kind, target in KINDS.items())
            raise argparse.ArgumentTypeError(f"'{part}' is no logger; known: {known}")
    targets: dict[str, str] = {}
    for part in parts:
        kind, _, target = part.partition(":")
        other = targets.setdefault(os.path.realpath(target) if kind in _WRITES_THERE else part, part)
        if other is not part:
            raise argparse.ArgumentTypeError(f"'{other}' and '{part}' write to the same place; name another")
    return parts


def make_loggers(given: Any) -> list[tuple[str, Logger]]:
    """Return loggers with their names in messages.

    Args:
        given: texts such as ``csv:run.csv``, or objects, one or a sequence of them.

    Raises:
        ConfigError: one is neither such a text nor a logger, or two write to the same file.
        MissingExtraError: the library of an adapter is not installed.
    """
    parts = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    if texts := [part for part in parts if isinstance(part, str)]:
        _parsed(",".join(texts))
    return [named for part in parts for named in _make(part)]


def _make(given: Any) -> list[tuple[str, Logger]]:
    if isinstance(given, str):
        return [(text, _adapter(*text.split(":", 1))) for text in _parsed(given)]
    if not isinstance(given, Logger):
        raise ConfigError(f"loggers: {given!r} is no logger; give a text such as 'csv:run.csv' or a caffepy.Logger")
    return [(type(given).__name__, given)]


def _parsed(given: str) -> list[str]:
    try:
        return logger_list(given)
    except argparse.ArgumentTypeError as error:
        raise ConfigError(f"loggers: {error}") from error


def _adapter(kind: str, target: str) -> Logger:
    if kind == "csv":
        return CsvLogger(Path(target))
    if kind == "jsonl":
        return JsonLinesLogger(Path(target))
    kinds = {"tensorboard": TensorBoardLogger, "wandb": WandbLogger, "mlflow": MlflowLogger}
    try:
        return kinds[kind](target)
    except ImportError as error:
        raise MissingExtraError(_LIBRARIES[kind], kind, f"for --log {kind}:{KINDS[kind]}") from error
