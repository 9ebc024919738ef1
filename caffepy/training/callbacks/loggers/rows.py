"""Loggers that write a row for each iteration into a text file: CSV and JSON Lines."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from caffepy.errors import ConfigError, RunError, spreadsheet_text
from caffepy.training.callbacks.loggers.contract import Logger, Run
from caffepy.utils.files import atomic_write, open_regular

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
        """The file's whole rows.

        Raises:
            ConfigError: it is another file.
        """
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
