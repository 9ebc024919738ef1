"""What a training's log says of losses, scores and learning rates.

The lines are those of Caffe's `solver.cpp` and `sgd_solver.cpp`, BVLC's or NVIDIA's:

    I0625 18:30:07.380233   173 solver.cpp:302] Iteration 100 (6.20402 iter/s, 15.7962s/100 iter), loss = 6.88429
    I0625 18:30:07.380303   173 solver.cpp:324]     Train net output #2: loss = 6.88429 (* 1 = 6.88429 loss)
    I0625 18:30:07.380308   173 sgd_solver.cpp:137] Iteration 100, lr = 0.19992, m = 0.9
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from caffepy.errors import DataError
from caffepy.files import open_regular
from caffepy.logs.lines import Record, first_year, records

_NUMBER = r"([-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|\.\d+|nan|inf))"
_ITERATION = re.compile(r"\bIteration (\d{1,10})\b")
_LOSS = re.compile(rf", loss = {_NUMBER}")
_RATE = re.compile(rf", lr = {_NUMBER}")
_TESTING = re.compile(r", Testing net \(#(\d{1,4})\)")
_OUTPUT = re.compile(rf"\b(Train|Test) net output (?:mAP )?#(\d{{1,6}}): (\S.*?) = {_NUMBER}(?= |$)")
_LONGEST_LINE = 1 << 16
"""Characters of a line that are read at a time."""


@dataclass
class Row:
    """One display of a training, or one test.

    Args:
        iteration: its number.
        seconds: since the training began to solve.
        run: how often the training had been restarted before.
        net: number of the test net; 0 for the train net.
        learning_rate: of the iteration, NaN where the log does not say.
        loss: the train net's loss, averaged over `average_loss` iterations; None for a test.
        outputs: the net's outputs by name; of several of one name the later have a number: `prob`, `prob[1]`.
    """

    iteration: int
    seconds: float
    run: int
    net: int = 0
    learning_rate: float = math.nan
    loss: float | None = None
    outputs: dict[str, float] = field(default_factory=dict)


@dataclass
class TrainingLog:
    """A training's log.

    Args:
        path: the file.
        train: the displays, in the log's order.
        test: the tests.
    """

    path: Path
    train: list[Row] = field(default_factory=list)
    test: list[Row] = field(default_factory=list)

    def latest(self) -> TrainingLog:
        """Without the rows that a later run, from a snapshot before them, has made again."""
        return TrainingLog(self.path, _latest(self.train), _latest(self.test))


def read_log(path: Path | str) -> TrainingLog:
    """Read a log; lines that say nothing of the above, or only half of it, are passed over.

    Raises:
        DataError: it cannot be read, or says nothing of any iteration.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            changed = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, timezone.utc)
            reader = _Reader(path)
            year = first_year(_lines(file), changed.year)
            file.seek(0)
            for record in records(_lines(file), year):
                reader.take(record)
    except OSError as error:
        raise DataError(f"log '{path}' cannot be read: {error.strerror}") from error
    log = reader.finish()
    if not log.train and not log.test:
        raise DataError(f"log '{path}' has no line such as 'Iteration 100, loss = 0.5'; is it a training's log?")
    return log


def _lines(file: IO[bytes]) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE):
        yield line.decode("utf-8", "replace")


def _latest(rows: Iterable[Row]) -> list[Row]:
    kept: list[Row] = []
    run = 0
    for row in rows:
        if row.run > run:
            run = row.run
            kept = [other for other in kept if other.iteration < row.iteration]
        kept.append(row)
    return kept


class _Reader:
    """Takes records one after the other; each thread goes on with the row that it began."""

    def __init__(self, path: Path) -> None:
        self._log = TrainingLog(path)
        self._began: float | None = None
        self._run = -1
        self._last_iteration = -1
        self._current: dict[str, Row] = {}
        self._rates: dict[tuple[int, int], float] = {}

    def take(self, record: Record) -> None:
        """A record, of whatever kind."""
        if re.match(r"\s*(\[rank 0\] |\S* )?Solving \S", record.message):
            self._begin_run(record.seconds)
        if found := _OUTPUT.search(record.message):
            self._take_output(record, found)
        elif found := _ITERATION.search(record.message):
            self._take_iteration(record, int(found[1]))

    def finish(self) -> TrainingLog:
        """The rows with their learning rates, and without displays that say nothing."""
        self._log.train = [row for row in self._log.train if row.outputs or row.loss is not None]
        self._log.test = [row for row in self._log.test if row.outputs]
        for rows in (self._log.train, self._log.test):
            for row in rows:
                row.learning_rate = self._rates.get((max(row.run, 0), row.iteration), math.nan)
            self._fill_rates(rows)
            for row in rows:
                row.run = max(row.run, 0)
        return self._log

    def _begin_run(self, seconds: float) -> None:
        """A line "Solving NAME": all devices of a run print one before its first iteration."""
        self._began = seconds if self._began is None else self._began
        if self._run < 0 or self._last_iteration >= 0:
            self._run += 1
            self._last_iteration = -1
            self._current.clear()

    def _take_iteration(self, record: Record, iteration: int) -> None:
        loss, rate = _LOSS.search(record.message), _RATE.search(record.message)
        testing = _TESTING.search(record.message)
        if not (loss or rate or testing):
            return
        if self._last_iteration > iteration:  # a restart whose "Solving" is not there
            self._last_iteration = -1 if self._run < 0 else self._last_iteration
            self._begin_run(record.seconds)
        self._last_iteration = iteration
        if rate:
            self._rates[max(self._run, 0), iteration] = float(rate[1])
        elif loss:
            self._log.train.append(self._new_row(record, iteration, loss=float(loss[1])))
        elif testing:
            self._log.test.append(self._new_row(record, iteration, net=int(testing[1])))

    def _new_row(self, record: Record, iteration: int, net: int = 0, loss: float | None = None) -> Row:
        began = record.seconds if self._began is None else self._began
        self._began = began
        row = Row(iteration, record.seconds - began, self._run, net, loss=loss)
        self._current[record.thread] = row
        return row

    def _take_output(self, record: Record, found: re.Match[str]) -> None:
        """An output of the row that this thread has begun; a display without a loss line begins one here."""
        kind, _, name, value = found.groups()
        row = self._current.get(record.thread) or (next(reversed(self._current.values()), None))
        if row is None or (row.loss is None) != (kind == "Test"):
            return
        number = 0
        key = name
        while key in row.outputs:
            number += 1
            key = f"{name}[{number}]"
        row.outputs[key] = float(value)

    def _fill_rates(self, rows: list[Row]) -> None:
        """Where the log does not say the rate of an iteration, that of the iteration before holds, or of the next."""
        for ordered in (rows, rows[::-1]):
            last = math.nan
            for row in ordered:
                if math.isnan(row.learning_rate):
                    row.learning_rate = last
                last = row.learning_rate
