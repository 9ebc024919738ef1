"""Finds alpha and beta of a link from measured all-reduces, as `caffepy bench allreduce` prints them."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from caffepy.errors import ConfigError
from caffepy.files import read_regular
from caffepy.plan.model import ALGORITHMS, AUTO, Cluster, Link


@dataclass(frozen=True)
class Measurements:
    """Measured times of all-reduces.

    Args:
        devices: how many took part.
        samples: (bytes, seconds) of each.
    """

    devices: int
    samples: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Fit:
    """A link, and how well it tells the times that it was made from.

    Args:
        link: alpha and beta.
        error: the largest relative difference between a measured time and the model's.
    """

    link: Link
    error: float


MAX_SAMPLES = 100
"""Sizes of a file; ways to divide them into ranges grow with their square."""
RANGES = 3
"""Most ranges of sizes that get an alpha and a beta of their own."""
MIN_POINTS = 3
"""Fewest sizes in a range, where there is more than one."""


def fit_link(measured: Measurements, algorithm: str, between: bool = False) -> Fit:
    """Find alpha and beta by least squares of the relative errors, so that short messages count as much as long ones.

    Every algorithm of the model costs a * alpha + b * n * beta among devices with one kind of link, so that this is
    a linear problem in two unknowns; none may be negative. No straight line holds for all lengths: up to RANGES ranges
    of sizes have one each, divided where that leaves the least error.

    Args:
        measured: at least two sizes.
        algorithm: the algorithm that the all-reduces are assumed to have used.
        between: devices of different nodes, one in each; else all in one node.

    Raises:
        ConfigError: one device, or one size.
    """
    samples = sorted(measured.samples)
    if measured.devices < 2 or len({size for size, _ in samples}) < 2:
        raise ConfigError(
            f"all-reduces of {len(samples)} sizes among {measured.devices} devices say nothing about a link; "
            "at least two sizes and two devices are needed"
        )
    if len(samples) > MAX_SAMPLES:
        raise ConfigError(f"all-reduces of {len(samples)} sizes are too many to fit lines to; keep {MAX_SAMPLES}")
    # The hierarchical one sends in a node, or between nodes, what a ring sends.
    name = "ring" if algorithm in (AUTO, "hierarchical") else algorithm
    lines = _Lines(samples, *_coefficients(name, measured.devices, between))
    cuts = min(_divisions(len(samples)), key=lines.error)
    links = [lines.link(*part) for part in pairwise(cuts)]
    longer = tuple((samples[start][0], link) for start, link in zip(cuts[1:-1], links[1:], strict=True))
    return Fit(replace(links[0], longer=longer), max(lines.largest(*part) for part in pairwise(cuts)))


def _divisions(count: int) -> Iterator[tuple[int, ...]]:
    """Ways to divide `count` sizes into ranges: where each begins, and the end."""
    for parts in range(1, RANGES + 1):
        for cuts in combinations(range(MIN_POINTS, count - MIN_POINTS + 1), parts - 1):
            if all(end - start >= MIN_POINTS for start, end in pairwise((0, *cuts, count))) or parts == 1:
                yield (0, *cuts, count)


class _Lines:
    """Straight lines through parts of the samples.

    Args:
        samples: (bytes, seconds), ascending.
        messages: times that alpha counts.
        share: times that the bytes are sent.
    """

    def __init__(self, samples: Sequence[tuple[float, float]], messages: float, share: float) -> None:
        sizes, seconds = np.array(samples, np.float64).T
        self._columns = np.stack([np.full_like(sizes, messages), share * sizes], axis=1) / seconds[:, None]

    def solve(self, start: int, end: int) -> tuple[float, float]:
        """alpha and beta of samples from `start` to before `end`."""
        return _non_negative(self._columns[start:end])

    def differences(self, start: int, end: int) -> np.ndarray:
        """The model's times over the measured ones, less 1."""
        errors: np.ndarray = self._columns[start:end] @ self.solve(start, end) - 1
        return errors

    def error(self, cuts: tuple[int, ...]) -> float:
        """The sum of all squares."""
        return sum(float((self.differences(*part) ** 2).sum()) for part in pairwise(cuts))

    def largest(self, start: int, end: int) -> float:
        """The largest difference."""
        return float(np.abs(self.differences(start, end)).max())

    def link(self, start: int, end: int) -> Link:
        """The link that the samples tell of."""
        alpha, beta = self.solve(start, end)
        return Link(alpha, 1 / beta if beta > 0 else math.inf)


def _coefficients(algorithm: str, devices: int, between: bool) -> tuple[float, float]:
    """Messages, and times that the data are sent."""
    cost = ALGORITHMS[algorithm]

    def cluster(link: Link) -> Cluster:
        return Cluster(devices if between else 1, 1 if between else devices, link, link)

    return cost(1.0, cluster(Link(1.0, math.inf))), cost(1.0, cluster(Link(0.0, 1.0)))


def _non_negative(columns: np.ndarray) -> tuple[float, float]:
    """The x >= 0 that brings columns @ x nearest to 1: with both unknowns, or else the better one alone."""
    ones = np.ones(len(columns))
    both = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    single = columns.sum(axis=0) / (columns**2).sum(axis=0)
    residuals = [float(((column * x - 1) ** 2).sum()) for column, x in zip(columns.T, single, strict=True)]
    return (float(single[0]), 0.0) if residuals[0] < residuals[1] else (0.0, float(single[1]))


MAX_BYTES = 2**24
"""Of a file of measurements."""
_SIZE = re.compile(r"(\d{1,18})(?: ?(B|KiB|MiB|GiB))?")
_UNITS = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DEVICES = re.compile(r"\b(\d{1,9}) (?:devices?|ranks?|GPUs?|threads?)\b", re.IGNORECASE)
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def read_measurements(path: Path) -> Measurements:
    """What `caffepy bench allreduce` printed: a line that says how many devices, a head, a line for each size.

    Columns stand two spaces apart. One is called size or bytes, one time, with its unit (us if none is given).

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    try:
        lines = [line.strip().lstrip("#").strip() for line in read_regular(path, MAX_BYTES).decode().splitlines()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}; save what caffepy bench allreduce prints") from error
    devices = next((int(match[1]) for line in lines if (match := _DEVICES.search(line))), None)
    head = next((i for i, line in enumerate(lines) if _columns(line) is not None), None)
    if devices is None or head is None:
        lacks = "how many devices took part" if devices is None else "a head with columns for size and time"
        raise ConfigError(f"{path}: does not say {lacks}; save all that caffepy bench allreduce prints")
    columns = _columns(lines[head])
    assert columns is not None
    samples = tuple(sample for line in lines[head + 1 :] if (sample := _sample(line, *columns)))
    return Measurements(devices, samples)


def _columns(line: str) -> tuple[int, int, float] | None:
    """Where size and time stand, and the time's unit in seconds; None if this is no head."""
    cells = [cell.lower() for cell in re.split(r"\s{2,}|\t", line)]
    sizes = [i for i, cell in enumerate(cells) if re.match(r"size|bytes", cell)]
    times = [i for i, cell in enumerate(cells) if cell.startswith("time")]
    if not sizes or not times:
        return None
    unit = re.search(r"\b(us|µs|ms|s)\b", cells[times[0]])
    return sizes[0], times[0], _TIMES[unit[1] if unit else "us"]


def _sample(line: str, size: int, time: int, unit: float) -> tuple[float, float] | None:
    """Bytes and seconds of a line, None if it is no line of the table."""
    cells = re.split(r"\s{2,}|\t", line)
    if len(cells) <= max(size, time):
        return None
    matched = _SIZE.fullmatch(cells[size].replace(",", ""))
    try:
        seconds = float(cells[time].replace(",", "")) * unit
    except ValueError:
        return None
    return (float(int(matched[1]) * _UNITS[matched[2]]), seconds) if matched and seconds > 0 else None
