"""Calibration: alpha and beta of a link from all-reduces measured by `caffepy bench allreduce`."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from pathlib import Path

import numpy as np

from caffepy.errors import ConfigError
from caffepy.scaling.model import ALGORITHMS, AUTO, Cluster, Link
from caffepy.utils.files import read_regular


@dataclass(frozen=True)
class Measurements:
    """Measured times of all-reduces.

    Args:
        devices: the number of devices.
        samples: (bytes, seconds) of each all-reduce.
    """

    devices: int
    samples: tuple[tuple[float, float], ...]


@dataclass(frozen=True)
class Fit:
    """A fitted link and its error.

    Args:
        link: alpha and beta.
        error: the largest relative difference between measured and modelled time.
    """

    link: Link
    error: float


MAX_SAMPLES = 100
"""Limit on the number of sizes; the number of divisions into ranges grows with its square."""
RANGES = 3
"""Maximum number of size ranges with separate alpha and beta."""
MIN_POINTS = 3
"""Minimum number of sizes in a range, if there are several ranges."""


def fit_link(measured: Measurements, algorithm: str, between: bool = False) -> Fit:
    """Fit alpha and beta by least squares of relative errors, so that short and long messages count equally.

    Every algorithm of the model costs a * alpha + b * n * beta among devices with one kind of link. The fit is thus a
    non-negative linear problem in two unknowns. One line does not fit all lengths: up to RANGES size ranges have
    separate lines, with the division of least error.

    Args:
        measured: at least two sizes.
        algorithm: the assumed algorithm of the all-reduces.
        between: one device in each of several nodes; else all devices in one node.

    Raises:
        ConfigError: fewer than two devices or sizes.
    """
    samples = sorted(measured.samples)
    if measured.devices < 2 or len({size for size, _ in samples}) < 2:
        raise ConfigError(
            f"all-reduces of {len(samples)} sizes among {measured.devices} devices do not determine a link; "
            "at least two sizes and two devices are needed"
        )
    if len(samples) > MAX_SAMPLES:
        raise ConfigError(f"all-reduces of {len(samples)} sizes are too many to fit lines to; keep {MAX_SAMPLES}")
    # Within a node, or with one device per node, the hierarchical algorithm equals a ring.
    name = "ring" if algorithm in (AUTO, "hierarchical") else algorithm
    lines = _Lines(samples, *_coefficients(name, measured.devices, between))
    cuts = min(_divisions(len(samples)), key=lines.error)
    links = [lines.link(*part) for part in pairwise(cuts)]
    longer = tuple((samples[start][0], link) for start, link in zip(cuts[1:-1], links[1:], strict=True))
    return Fit(replace(links[0], longer=longer), max(lines.largest(*part) for part in pairwise(cuts)))


def _divisions(count: int) -> Iterator[tuple[int, ...]]:
    """Yield divisions of `count` sizes into ranges: the start of each range, and the end."""
    for parts in range(1, RANGES + 1):
        for cuts in combinations(range(MIN_POINTS, count - MIN_POINTS + 1), parts - 1):
            if all(end - start >= MIN_POINTS for start, end in pairwise((0, *cuts, count))) or parts == 1:
                yield (0, *cuts, count)


class _Lines:
    """Line fits through ranges of the samples.

    Args:
        samples: (bytes, seconds), ascending.
        messages: factor of alpha.
        share: factor of bytes * beta.
    """

    def __init__(self, samples: Sequence[tuple[float, float]], messages: float, share: float) -> None:
        sizes, seconds = np.array(samples, np.float64).T
        self._columns = np.stack([np.full_like(sizes, messages), share * sizes], axis=1) / seconds[:, None]

    def solve(self, start: int, end: int) -> tuple[float, float]:
        """Return alpha and beta fitted to samples[start:end]."""
        return _non_negative(self._columns[start:end])

    def differences(self, start: int, end: int) -> np.ndarray:
        """Return modelled over measured times, minus 1."""
        errors: np.ndarray = self._columns[start:end] @ self.solve(start, end) - 1
        return errors

    def error(self, cuts: tuple[int, ...]) -> float:
        """Return the sum of squared relative errors of a division."""
        return sum(float((self.differences(*part) ** 2).sum()) for part in pairwise(cuts))

    def largest(self, start: int, end: int) -> float:
        """Return the largest absolute relative error."""
        return float(np.abs(self.differences(start, end)).max())

    def link(self, start: int, end: int) -> Link:
        """Return the link fitted to samples[start:end]."""
        alpha, beta = self.solve(start, end)
        return Link(alpha, 1 / beta if beta > 0 else math.inf)


def _coefficients(algorithm: str, devices: int, between: bool) -> tuple[float, float]:
    """Return the factors of alpha and of bytes * beta."""
    cost = ALGORITHMS[algorithm]

    def cluster(link: Link) -> Cluster:
        return Cluster(devices if between else 1, 1 if between else devices, link, link)

    return cost(1.0, cluster(Link(1.0, math.inf))), cost(1.0, cluster(Link(0.0, 1.0)))


def _non_negative(columns: np.ndarray) -> tuple[float, float]:
    """Return the x >= 0 that minimises |columns @ x - 1|: with both unknowns, else with the better single one."""
    ones = np.ones(len(columns))
    both = np.linalg.lstsq(columns, ones, rcond=None)[0]
    if both.min() >= 0:
        return float(both[0]), float(both[1])
    single = columns.sum(axis=0) / (columns**2).sum(axis=0)
    residuals = [float(((column * x - 1) ** 2).sum()) for column, x in zip(columns.T, single, strict=True)]
    return (float(single[0]), 0.0) if residuals[0] < residuals[1] else (0.0, float(single[1]))


MAX_BYTES = 2**24
"""Size limit of a file of measurements."""
_SIZE = re.compile(r"(\d{1,18})(?: ?(B|KiB|MiB|GiB))?")
_UNITS = {None: 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
_DEVICES = re.compile(r"\b(\d{1,9}) (?:devices?|ranks?|GPUs?|threads?)\b", re.IGNORECASE)
_TIMES = {"us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def read_measurements(path: Path) -> Measurements:
    """Parse the output of `caffepy bench allreduce`: the number of devices, a header, and a line for each size.

    Columns are separated by two spaces. One is named size or bytes, one time, with an optional unit (default us).

    Raises:
        ConfigError: the file cannot be read or is invalid.
    """
    try:
        lines = [line.strip().lstrip("#").strip() for line in read_regular(path, MAX_BYTES).decode().splitlines()]
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"{path}: cannot be read: {reason}; save the output of caffepy bench allreduce") from error
    devices = next((int(match[1]) for line in lines if (match := _DEVICES.search(line))), None)
    head = next((i for i, line in enumerate(lines) if _columns(line) is not None), None)
    if devices is None or head is None:
        lacks = "the number of devices" if devices is None else "a header with columns for size and time"
        raise ConfigError(f"{path}: lacks {lacks}; save the whole output of caffepy bench allreduce")
    columns = _columns(lines[head])
    assert columns is not None
    samples = tuple(sample for line in lines[head + 1 :] if (sample := _sample(line, *columns)))
    return Measurements(devices, samples)


def _columns(line: str) -> tuple[int, int, float] | None:
    """Return the columns of size and time, and the time unit in seconds; None if the line is not a header."""
    cells = [cell.lower() for cell in re.split(r"\s{2,}|\t", line)]
    sizes = [i for i, cell in enumerate(cells) if re.match(r"size|bytes", cell)]
    times = [i for i, cell in enumerate(cells) if cell.startswith("time")]
    if not sizes or not times:
        return None
    unit = re.search(r"\b(us|µs|ms|s)\b", cells[times[0]])
    return sizes[0], times[0], _TIMES[unit[1] if unit else "us"]


def _sample(line: str, size: int, time: int, unit: float) -> tuple[float, float] | None:
    """Return bytes and seconds of a table row; None for other lines."""
    cells = re.split(r"\s{2,}|\t", line)
    if len(cells) <= max(size, time):
        return None
    matched = _SIZE.fullmatch(cells[size].replace(",", ""))
    try:
        seconds = float(cells[time].replace(",", "")) * unit
    except ValueError:
        return None
    return (float(int(matched[1]) * _UNITS[matched[2]]), seconds) if matched and seconds > 0 else None
