"""The cost of all-reduces: the alpha-beta model of the algorithms of NCCL and MPI, and its calibration.

A message of n bytes between two devices takes alpha + n * beta: alpha is the latency, beta the time per byte including
its reduction. Devices send and receive at the same time (full duplex). Nodes have one kind of link inside and another
between them, which all devices of a node share. The functions of the model are pure; units are seconds and bytes.

Symbols: N nodes of g devices, p = N * g, alpha_l and beta_l inside a node, alpha_n and beta_n between
nodes, n bytes.

The calibration fits alpha and beta of a link to all-reduces measured by `caffepy bench allreduce`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import ceil, floor, log2
from pathlib import Path

import numpy as np

from caffepy.errors import ConfigError
from caffepy.utils.files import read_regular
from caffepy.utils.registry import suggest

# -- the model -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Link:
    """One kind of connection.

    Args:
        latency: alpha, seconds per message.
        bandwidth: 1 / beta, bytes per second in each direction.
        longer: (bytes, link), ascending: the link for all-reduces of at least that size. Libraries change their
            protocol with the length, and long messages do not fit into caches.
    """

    latency: float
    bandwidth: float
    longer: tuple[tuple[float, Link], ...] = ()

    def for_size(self, size: float) -> Link:
        """Return the link that applies to all-reduces of `size` bytes."""
        return next((link for least, link in reversed(self.longer) if size >= least), self)

    def cost(self, messages: float, size: float) -> float:
        """Return messages * alpha + size * beta."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Devices and their links.

    Args:
        nodes: N.
        devices_per_node: g.
        inside: the link of each device inside a node.
        between: the link of each node to the network.
    """

    nodes: int
    devices_per_node: int
    inside: Link
    between: Link

    @property
    def devices(self) -> int:
        """p = N * g."""
        return self.nodes * self.devices_per_node

    def for_size(self, size: float) -> Cluster:
        """Return the cluster with the links that apply to all-reduces of `size` bytes."""
        return replace(self, inside=self.inside.for_size(size), between=self.between.for_size(size))

    @property
    def bottleneck(self) -> float:
        """The lowest bandwidth among the links in use."""
        used = [self.inside.bandwidth] if self.devices_per_node > 1 else []
        used += [self.between.bandwidth] if self.nodes > 1 else []
        return min(used, default=float("inf"))


def ring(size: float, cluster: Cluster) -> float:
    """Return the cost of a pipelined reduce-scatter and all-gather around one ring through all nodes.

    2 (p - N) alpha_l + 2 (N - 1) alpha_n + 2 (p - 1) / p * n * max(beta_l, beta_n)

    Each device sends 2 (p - 1) / p * n bytes, the minimum; the slowest link limits the speed. Of the 2 (p - 1) steps of
    a chunk, 2 (N - 1) cross the network.

    P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. Journal of Parallel
    and Distributed Computing 69(2), 2009.
    """
    p, nodes = cluster.devices, cluster.nodes
    latency = 2 * (p - nodes) * cluster.inside.latency + 2 * (nodes - 1) * cluster.between.latency
    return latency + 2 * (p - 1) / p * size / cluster.bottleneck


def tree(size: float, cluster: Cluster) -> float:
    """Return the cost of two pipelined binary trees over the nodes, one per half of the data, with a chain in each
    node.

    2 (g - 1) alpha_l + 2 ceil(log2 N) alpha_n + 2 n * max(beta_l, beta_n)

    An inner node of one tree is a leaf of the other, so that each sends and receives 2 n bytes. Latency grows with log
    N.

    P. Sanders, J. Speck, J. L. Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan. Parallel
    Computing 35(12), 2009; in NCCL since 2.4: S. Jeaugey: Massively scale your deep learning training with NCCL
    2.4, NVIDIA, 2019.
    """
    latency = 2 * (cluster.devices_per_node - 1) * cluster.inside.latency
    latency += 2 * _levels(cluster.nodes) * cluster.between.latency
    return latency + (2 * size / cluster.bottleneck if cluster.devices > 1 else 0.0)


def hierarchical(size: float, cluster: Cluster) -> float:
    """Return the cost of reduce-scatter in each node, all-reduce of each part between nodes, all-gather in each node.

    2 (g - 1) alpha_l + 2 (g - 1) / g * n * beta_l
    + min(2 (N - 1) alpha_n + 2 (N - 1) / N * n * beta_n,  2 ceil(log2 N) alpha_n + 2 n * beta_n)

    Device i of each node reduces the i-th part with its peers, by a ring or by two trees. The g parts share the node's
    network link, which transfers n bytes, not g * n.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. International
    Journal of High Performance Computing Applications 19(1), 2005, whose reduce-scatter and all-gather are combined
    here.
    """
    g, nodes = cluster.devices_per_node, cluster.nodes
    inside = cluster.inside.cost(2 * (g - 1), 2 * (g - 1) / g * size)
    if nodes == 1:
        return inside
    by_ring = cluster.between.cost(2 * (nodes - 1), 2 * (nodes - 1) / nodes * size)
    by_trees = cluster.between.cost(2 * _levels(nodes), 2 * size)
    return inside + min(by_ring, by_trees)


def recursive_doubling(size: float, cluster: Cluster) -> float:
    """Return the cost of recursive doubling: pairs at doubling distances exchange all data; for short messages.

    ceil(log2 g) (alpha_l + n * beta_l) + ceil(log2 N) (alpha_n + g * n * beta_n)

    All g devices of a node use the network at once. If g or N is not a power of two, the excess devices send their data
    to others first and receive the result: floor instead of ceil, and two more messages of n bytes.

    Thakur, Rabenseifner, Gropp 2005.
    """
    g = cluster.devices_per_node
    return sum(
        link.cost(steps + extra, share * (steps + extra) * size)
        for link, (steps, extra), share in (
            (cluster.inside, _powers_of_two(g), 1),
            (cluster.between, _powers_of_two(cluster.nodes), g),
        )
    )


def recursive_halving(size: float, cluster: Cluster) -> float:
    """Return the cost of reduce-scatter by recursive halving and all-gather by recursive doubling (Rabenseifner).

    2 log2 g * alpha_l + 2 (g - 1) / g * n * beta_l + 2 log2 N * alpha_n + 2 (N - 1) / N * n * beta_n

    The nearest devices exchange first, so that the network carries n bytes per node. If g or N is not a power of two:
    the next lower one, and two more messages of n bytes, as in `recursive_doubling`.

    Thakur, Rabenseifner, Gropp 2005.
    """
    total = 0.0
    for link, count in ((cluster.inside, cluster.devices_per_node), (cluster.between, cluster.nodes)):
        steps, extra = _powers_of_two(count)
        total += link.cost(2 * steps + extra, (2 * (1 - 0.5**steps) + extra) * size)
    return total


Algorithm = Callable[[float, Cluster], float]

ALGORITHMS: dict[str, Algorithm] = {
    "ring": ring,
    "tree": tree,
    "hierarchical": hierarchical,
    "recursive-doubling": recursive_doubling,
    "recursive-halving": recursive_halving,
}
AUTO = "auto"
CHOICES = ("ring", "tree", "hierarchical")
"""Candidates of `auto`, which selects the fastest per message, as NCCL does. MPI's recursive algorithms must be
selected explicitly."""


def all_reduce(size: float, cluster: Cluster, algorithm: str = AUTO) -> tuple[float, str]:
    """Return the seconds for `size` bytes and the algorithm; 0 for a single device.

    Args:
        size: bytes per device.
        cluster: the devices.
        algorithm: one of ALGORITHMS, or AUTO.
    """
    if cluster.devices == 1:
        return 0.0, "none"
    cluster = cluster.for_size(size)
    names = CHOICES if algorithm == AUTO else (algorithm,)
    costs = [(ALGORITHMS[name](size, cluster), name) for name in names]
    return min(costs, key=lambda cost: cost[0])


def _levels(count: int) -> int:
    """Return the height of a binary tree over `count` nodes."""
    return ceil(log2(count))


def _powers_of_two(count: int) -> tuple[int, int]:
    """Return the steps for the largest power of two within `count`, and the additional messages for the rest."""
    steps = floor(log2(count))
    return steps, 0 if 2**steps == count else 2


# -- links ---------------------------------------------------------------------------------------------

LINKS = {
    "nvlink": Link(2.5e-6, 350e9),
    "pcie": Link(5e-6, 20e9),
    "shm": Link(5e-6, 4e9),
}
"""Default links inside a node. nvlink: NVLink 4, as measured with NCCL's ring on four H200 (450 GB/s nominal); pcie:
version 4, through the host; shm: CPU ranks, through shared memory. --calibrate is more accurate."""
NETWORK_LATENCY = 10e-6
"""Seconds per message between nodes, for InfiniBand or RoCE with NCCL."""

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"(?:(\d+) ?[xX*] ?)?(\d+\.?\d*|\.\d+) ?([kMGT]?)(b|B|bit|byte|Bytes?)(?:/s|ps|E)?")
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+) ?(ns|us|µs|ms|s)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str) -> float:
    """Parse ``400Gb`` (bits), ``50GB`` (bytes) or ``8x400Gb`` (eight adapters) to bytes per second.

    Raises:
        ValueError: the text has another form.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or not float(match[2]) or match[1] == "0":
        raise ValueError(f"'{text}' is no bandwidth such as 400Gb (bits a second), 50GB (bytes) or 8x400Gb")
    bits = 8 if match[4] in ("b", "bit") else 1
    return int(match[1] or 1) * float(match[2]) * _PREFIXES[match[3]] / bits


def parse_latency(text: str) -> float:
    """Parse ``5us``, ``0.01ms`` or ``5`` (microseconds) to seconds.

    Raises:
        ValueError: the text has another form.
    """
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is no latency such as 5us, or 5, which means the same")
    return float(match[1]) * _SECONDS[match[2] or "us"]


def parse_link(text: str) -> Link:
    """Parse a link's name or bandwidth (plain numbers are GB/s; the latency is then that of pcie).

    Raises:
        ValueError: the text is neither.
    """
    if text in LINKS:
        return LINKS[text]
    plain = re.fullmatch(r"\d+\.?\d*|\.\d+", text.strip())
    try:
        return Link(LINKS["pcie"].latency, parse_bandwidth(f"{text}GB" if plain else text))
    except ValueError as error:
        raise ValueError(f"{error}, nor a link; {suggest(text, list(LINKS))}") from error


# -- calibration ---------------------------------------------------------------------------------------


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
