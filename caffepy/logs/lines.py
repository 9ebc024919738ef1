"""The records of a log: glog's prefix taken apart, seconds since the first one, lines that ran together divided."""

from __future__ import annotations

import re
from calendar import isleap
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

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
