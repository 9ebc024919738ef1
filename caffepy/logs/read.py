"""Reading of training logs: losses, scores and learning rates.

A record is the text after a glog prefix. Lines into which two threads wrote are split at the prefixes. The reader
parses the lines of `solver.cpp` and `sgd_solver.cpp` of both Caffes:

    I0625 18:30:07.380233   173 solver.cpp:302] Iteration 100 (6.20402 iter/s, 15.7962s/100 iter), loss = 6.88429
    I0625 18:30:07.380303   173 solver.cpp:324]     Train net output #2: loss = 6.88429 (* 1 = 6.88429 loss)
    I0625 18:30:07.380308   173 sgd_solver.cpp:137] Iteration 100, lr = 0.19992, m = 0.9

Output of logs as CSV files with the columns of Caffe's `tools/extra/parse_log.py`.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
from calendar import isleap
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import IO

from caffepy.errors import DataError, spreadsheet_text
from caffepy.utils.files import atomic_write, open_regular

_PREFIX = re.compile(
    r"[IWEF](?P<year>20\d\d)?(?P<month>[01]\d)(?P<day>[0-3]\d) (?P<time>\d\d:\d\d:\d\d\.\d{1,6}) +(?P<thread>\d+) "
    r"[^\s\]]+:\d+\] ?"
)
_FEBRUARY = 2
_HALF = 6
"""In months: a larger step back means that a new year began."""


@dataclass(frozen=True)
class Record:
    """A message of a log.

    Args:
        thread: number of the thread, as text; "" without a prefix.
        seconds: since the log's first record; without a prefix those of the preceding record.
        message: text after the prefix.
    """

    thread: str
    seconds: float
    message: str


class Clock:
    """Parses times. BVLC's prefix has no year: the clock takes the year that is nearest to the preceding record.

    Args:
        year: of the log's first record, if its prefix has no year.
    """

    def __init__(self, year: int) -> None:
        self._year = year
        self._first: datetime | None = None
        self._last: datetime | None = None

    def seconds(self, match: re.Match[str]) -> float | None:
        """Return the seconds since the first record; None if date or time are invalid."""
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
    """Return the year of a log's first record, derived from the year of its end and from any 29 February."""
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
    """Yield the records of a log.

    Args:
        lines: of the log.
        year: of the first record.
    """
    clock, seconds = Clock(year), 0.0
    for line in lines:
        matches = list(_PREFIX.finditer(line))
        begins = [match.start() for match in matches]
        if head := line[: begins[0] if begins else None].strip():
            yield Record("", seconds, head)
        for match, end in zip(matches, [*begins, len(line)][1:], strict=True):
            now = clock.seconds(match)
            seconds = seconds if now is None else now
            yield Record(match["thread"], seconds, line[match.end() : end].rstrip())


_NUMBER = r"([-+]?(?:\d+(?:\.\d*)?(?:[eE][-+]?\d+)?|\.\d+|nan|inf))"
_ITERATION = re.compile(r"\bIteration (\d{1,10})\b")
_LOSS = re.compile(rf", loss = {_NUMBER}")
_RATE = re.compile(rf", lr = {_NUMBER}")
_TESTING = re.compile(r", Testing net \(#(\d{1,4})\)")
_OUTPUT = re.compile(r"\b(Train|Test) net output (?:mAP )?#\d{1,6}: (?=\S)")
_NAMED_VALUE = re.compile(rf"(\S.*?) = {_NUMBER}(?= |$)")
"""Behind `_OUTPUT`. One expression for both would search the rest of a line from each of its `_OUTPUT`s."""
_LONGEST_LINE = 1 << 16
"""In characters: longer lines are read in pieces."""


@dataclass
class LogRow:
    """One display of a training, or one test.

    Args:
        iteration: number of the iteration.
        seconds: since the start of solving.
        run: number of restarts before.
        net: number of the test net; 0 for the train net.
        learning_rate: of the iteration; NaN if the log does not contain it.
        loss: of the train net, averaged over `average_loss` iterations; None for a test.
        outputs: of the net, by name; outputs of equal name are numbered: `prob`, `prob[1]`.
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
    """The content of a training log.

    Args:
        path: of the file.
        train: the displays, in the order of the log.
        test: the tests, in the order of the log.
    """

    path: Path
    train: list[LogRow] = field(default_factory=list)
    test: list[LogRow] = field(default_factory=list)

    def latest(self) -> TrainingLog:
        """Return the log without rows that a later run, resumed from an earlier snapshot, repeated."""
        return TrainingLog(self.path, _latest(self.train), _latest(self.test))


def read_log(path: Path | str) -> TrainingLog:
    """Read a log. Other lines and incomplete lines are ignored.

    Raises:
        DataError: the file cannot be read, or contains no iteration.
    """
    path = Path(path)
    try:
        with open_regular(path) as file:
            changed = datetime.fromtimestamp(os.fstat(file.fileno()).st_mtime, UTC)
            reader = _Reader(path)
            year = first_year(_lines(file), changed.year)
            file.seek(0)
            for record in records(_lines(file), year):
                reader.add(record)
    except OSError as error:
        raise DataError(f"log '{path}' cannot be read: {error.strerror}") from error
    log = reader.finish()
    if not log.train and not log.test:
        raise DataError(f"log '{path}' has no line such as 'Iteration 100, loss = 0.5'; is it a training log?")
    return log


def _lines(file: IO[bytes]) -> Iterator[str]:
    while line := file.readline(_LONGEST_LINE):
        yield line.decode("utf-8", "replace")


def _latest(rows: Iterable[LogRow]) -> list[LogRow]:
    latest: list[LogRow] = []
    run = 0
    for row in rows:
        if row.run > run:
            run = row.run
            latest = [other for other in latest if other.iteration < row.iteration]
        latest.append(row)
    return latest


class _Reader:
    """Builds a TrainingLog from records. Each thread continues its own current row."""

    def __init__(self, path: Path) -> None:
        self._log = TrainingLog(path)
        self._start: float | None = None
        self._run = -1
        self._last_iteration = -1
        self._current: dict[str, tuple[LogRow, Counter[str]]] = {}
        """The row of each thread, and how often its outputs have each name."""
        self._rates: dict[tuple[int, int], float] = {}

    def add(self, record: Record) -> None:
        """Add a record."""
        if re.match(r"\s*(\[rank 0\] |\S* )?Solving \S", record.message):
            self._begin_run(record.seconds)
        head = _OUTPUT.search(record.message)
        if head and (value := _NAMED_VALUE.match(record.message, head.end())):
            self._add_output(record, head[1], value)
        elif match := _ITERATION.search(record.message):
            self._add_iteration(record, int(match[1]))

    def finish(self) -> TrainingLog:
        """Return the log, with learning rates and without empty rows."""
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
        """Handle a line "Solving NAME". Each device of a run prints one before the first iteration."""
        self._start = seconds if self._start is None else self._start
        if self._run < 0 or self._last_iteration >= 0:
            self._run += 1
            self._last_iteration = -1
            self._current.clear()

    def _add_iteration(self, record: Record, iteration: int) -> None:
        loss, rate = _LOSS.search(record.message), _RATE.search(record.message)
        testing = _TESTING.search(record.message)
        if not (loss or rate or testing):
            return
        if self._last_iteration > iteration:  # a restart without a "Solving" line
            self._last_iteration = -1 if self._run < 0 else self._last_iteration
            self._begin_run(record.seconds)
        self._last_iteration = iteration
        if rate:
            self._rates[max(self._run, 0), iteration] = float(rate[1])
        elif loss:
            self._log.train.append(self._new_row(record, iteration, loss=float(loss[1])))
        elif testing:
            self._log.test.append(self._new_row(record, iteration, net=int(testing[1])))

    def _new_row(self, record: Record, iteration: int, net: int = 0, loss: float | None = None) -> LogRow:
        self._start = start = record.seconds if self._start is None else self._start
        row = LogRow(iteration, record.seconds - start, self._run, net, loss=loss)
        self._current[record.thread] = row, Counter()
        return row

    def _add_output(self, record: Record, kind: str, value: re.Match[str]) -> None:
        """Add an output to this thread's current row, or to the newest row if the thread has none."""
        current = self._current.get(record.thread) or (next(reversed(self._current.values()), None))
        if current is None or (current[0].loss is None) != (kind == "Test"):
            return
        (row, counts), name = current, value[1]
        key = f"{name}[{counts[name]}]" if counts[name] else name
        while key in row.outputs:
            counts[name] += 1
            key = f"{name}[{counts[name]}]"
        counts[name] += 1
        row.outputs[key] = float(value[2])

    def _fill_rates(self, rows: list[LogRow]) -> None:
        """Fill missing learning rates from the preceding row, or else from the next."""
        for ordered in (rows, rows[::-1]):
            last = math.nan
            for row in ordered:
                if math.isnan(row.learning_rate):
                    row.learning_rate = last
                last = row.learning_rate


_NET = "TestNet"
_LOSS_COLUMN = "loss"


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
    writer.writerow([*head, *(map(spreadsheet_text, names) if names else [_LOSS_COLUMN])])
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
