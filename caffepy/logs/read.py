"""Reads a training's log: its records, and from these losses, scores and learning rates.

A record is a line behind glog's prefix; lines that ran together are divided. The lines that are understood are those of
Caffe's `solver.cpp` and `sgd_solver.cpp`, BVLC's or NVIDIA's:

    I0625 18:30:07.380233   173 solver.cpp:302] Iteration 100 (6.20402 iter/s, 15.7962s/100 iter), loss = 6.88429
    I0625 18:30:07.380303   173 solver.cpp:324]     Train net output #2: loss = 6.88429 (* 1 = 6.88429 loss)
    I0625 18:30:07.380308   173 sgd_solver.cpp:137] Iteration 100, lr = 0.19992, m = 0.9
"""

from __future__ import annotations

import math
import os
import re
from calendar import isleap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import IO

from caffepy.errors import DataError
from caffepy.files import open_regular

_PREFIX = re.compile(
    r"[IWEF](?P<year>20\d\d)?(?P<month>[01]\d)(?P<day>[0-3]\d) (?P<time>\d\d:\d\d:\d\d\.\d{1,6}) +(?P<thread>\d+) "
    r"[^\s\]]+:\d+\] ?"
)
_FEBRUARY = 2
_HALF = 6
"""Months; who goes back by more has gone on to the next year."""


@dataclass(frozen=True)
class Record:
    """A message of a log.

    Args:
        thread: its number, as text; "" without a prefix.
        seconds: since the log's first record; that of the record before without a prefix.
        message: what follows the prefix.
    """

    thread: str
    seconds: float
    message: str


class Clock:
    """Times of a log whose prefix has no year: of the possible years, the one nearest to the record before is meant.

    Args:
        year: of the log's first record, where its prefix does not say it.
    """

    def __init__(self, year: int) -> None:
        self._year = year
        self._first: datetime | None = None
        self._last: datetime | None = None

    def seconds(self, match: re.Match[str]) -> float | None:
        """Seconds since the first record; None if there is no such date or time."""
        if match["year"]:
            time = _time(int(match["year"]), match)
        elif self._last is None:
            time = _time(self._year, match)
        else:
            time = self._nearest(self._last, match)
        if time is None:
            return None
        self._first = self._first or time
        self._last = time
        return (time - self._first).total_seconds()

    def _nearest(self, last: datetime, match: re.Match[str]) -> datetime | None:
        years = (last.year, last.year + 1, last.year - 1)
        times = [time for year in years if (time := _time(year, match)) is not None]
        return min(times, key=lambda time: abs(time - last), default=None)


def _time(year: int, match: re.Match[str]) -> datetime | None:
    if match["month"] + match["day"] == "0229" and not isleap(year):
        return None
    try:
        return datetime.strptime(f"{year}{match['month']}{match['day']} {match['time']}", "%Y%m%d %H:%M:%S.%f")
    except ValueError:
        return None


def first_year(lines: Iterable[str], last: int) -> int:
    """The year of a log's first record, from the year of its end, and from a 29 February, which only leap years have.

    Args:
        lines: the log.
        last: the year in which the file was changed last.
    """
    month, years, leap = 0, 0, None
    for line in lines:
        if (match := _PREFIX.match(line)) is None:
            continue
        now = int(match["month"])
        years += (month - now > _HALF) - (now - month > _HALF and month > 0)
        month = now
        if match["day"] == "29" and month == _FEBRUARY:
            leap = years
    year = last - years
    while leap is not None and not isleap(year + leap):
        year -= 1
    return year


def records(lines: Iterable[str], year: int) -> Iterator[Record]:
    """The records of a log; what threads wrote into one line is divided at the prefixes.

    Args:
        lines: the log.
        year: of its first record.
    """
    clock, seconds = Clock(year), 0.0
    for line in lines:
        matches = list(_PREFIX.finditer(line))
        begins = [match.start() for match in matches]
        if head := line[: begins[0] if begins else None].strip():
            yield Record("", seconds, head)
        for match, end in zip(matches, [*begins, len(line)][1:], strict=True):
            found = clock.seconds(match)
            seconds = seconds if found is None else found
            yield Record(match["thread"], seconds, line[match.end() : end].rstrip())


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
