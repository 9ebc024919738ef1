"""The cost of all-reduces: the alpha-beta model of the algorithms of NCCL and MPI.

A message of n bytes between two devices takes alpha + n * beta: alpha is the latency, beta the time per byte including
its reduction. Devices send and receive at the same time (full duplex). Nodes have one kind of link inside and another
between them, which all devices of a node share. The functions are pure; units are seconds and bytes.

Symbols: N nodes of g devices, p = N * g, alpha_l and beta_l inside a node, alpha_n and beta_n between
nodes, n bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, log2

from caffepy.utils.registry import suggest


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
