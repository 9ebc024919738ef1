"""What an all-reduce costs: the alpha-beta model of the algorithms that NCCL and MPI use.

A message of n bytes takes alpha + n * beta between two devices: alpha is the latency, beta the time a byte takes, the
reduction of that byte included. Devices send and receive at the same time (full duplex). Devices stand in nodes: one
kind of link inside, another one between them, which all devices of a node share. Pure functions, seconds and bytes.

Letters of the formulas: N nodes of g devices, p = N * g, alpha_l and beta_l inside a node, alpha_n and beta_n between
nodes, n bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import ceil, floor, log2

from caffepy.registry import suggest


@dataclass(frozen=True)
class Link:
    """One kind of connection.

    Args:
        latency: alpha, seconds a message.
        bandwidth: 1 / beta, bytes a second in each direction.
        longer: (bytes, link), ascending: what holds for all-reduces of so many bytes and more. Libraries change their
            protocol with the length, and long messages do not stay in caches.
    """

    latency: float
    bandwidth: float
    longer: tuple[tuple[float, Link], ...] = ()

    def for_size(self, size: float) -> Link:
        """The link as all-reduces of `size` bytes find it."""
        return next((link for least, link in reversed(self.longer) if size >= least), self)

    def cost(self, messages: float, size: float) -> float:
        """messages * alpha + size * beta."""
        return messages * self.latency + size / self.bandwidth


@dataclass(frozen=True)
class Cluster:
    """Devices and what connects them.

    Args:
        nodes: N.
        devices_per_node: g.
        inside: between the devices of a node; each device has one.
        between: between nodes; each node has one.
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
        """The cluster as all-reduces of `size` bytes find it."""
        return replace(self, inside=self.inside.for_size(size), between=self.between.for_size(size))

    @property
    def bottleneck(self) -> float:
        """The least bandwidth among the links that are used at all."""
        used = [self.inside.bandwidth] if self.devices_per_node > 1 else []
        used += [self.between.bandwidth] if self.nodes > 1 else []
        return min(used, default=float("inf"))


def ring(size: float, cluster: Cluster) -> float:
    """A reduce-scatter and an all-gather around one ring that visits node after node; pipelined.

    2 (p - N) alpha_l + 2 (N - 1) alpha_n + 2 (p - 1) / p * n * max(beta_l, beta_n)

    Each device sends 2 (p - 1) / p * n bytes, the least that is possible; the slowest link sets the pace. Of the
    2 (p - 1) steps of a piece 2 (N - 1) cross the network.

    P. Patarasuk, X. Yuan: Bandwidth optimal all-reduce algorithms for clusters of workstations. Journal of Parallel
    and Distributed Computing 69(2), 2009.
    """
    p, nodes = cluster.devices, cluster.nodes
    latency = 2 * (p - nodes) * cluster.inside.latency + 2 * (nodes - 1) * cluster.between.latency
    return latency + 2 * (p - 1) / p * size / cluster.bottleneck


def tree(size: float, cluster: Cluster) -> float:
    """Two binary trees over the nodes, each for one half of the data, and a chain inside each node; pipelined.

    2 (g - 1) alpha_l + 2 ceil(log2 N) alpha_n + 2 n * max(beta_l, beta_n)

    A node that is inner in one tree is a leaf in the other, so that each sends and receives 2 n bytes. Latency grows
    with the logarithm of the nodes.

    P. Sanders, J. Speck, J. L. Traeff: Two-tree algorithms for full bandwidth broadcast, reduction and scan. Parallel
    Computing 35(12), 2009; as NCCL has it since 2.4: S. Jeaugey: Massively scale your deep learning training with NCCL
    2.4, NVIDIA, 2019.
    """
    latency = 2 * (cluster.devices_per_node - 1) * cluster.inside.latency
    latency += 2 * _levels(cluster.nodes) * cluster.between.latency
    return latency + (2 * size / cluster.bottleneck if cluster.devices > 1 else 0.0)


def hierarchical(size: float, cluster: Cluster) -> float:
    """A reduce-scatter in each node, an all-reduce of each part among the nodes, an all-gather in each node.

    2 (g - 1) alpha_l + 2 (g - 1) / g * n * beta_l
    + min(2 (N - 1) alpha_n + 2 (N - 1) / N * n * beta_n,  2 ceil(log2 N) alpha_n + 2 n * beta_n)

    Device i of each node reduces the i-th part with its peers, by a ring or by two trees. The g parts share the node's
    network, so that n bytes pass there, not g * n.

    R. Thakur, R. Rabenseifner, W. Gropp: Optimization of collective communication operations in MPICH. International
    Journal of High Performance Computing Applications 19(1), 2005, from whose reduce-scatter and all-gather it is
    composed.
    """
    g, nodes = cluster.devices_per_node, cluster.nodes
    inside = cluster.inside.cost(2 * (g - 1), 2 * (g - 1) / g * size)
    if nodes == 1:
        return inside
    by_ring = cluster.between.cost(2 * (nodes - 1), 2 * (nodes - 1) / nodes * size)
    by_trees = cluster.between.cost(2 * _levels(nodes), 2 * size)
    return inside + min(by_ring, by_trees)


def recursive_doubling(size: float, cluster: Cluster) -> float:
    """Pairs exchange all of their data, at twice the distance in each step; for short messages.

    ceil(log2 g) (alpha_l + n * beta_l) + ceil(log2 N) (alpha_n + g * n * beta_n)

    All g devices of a node cross the network at once. Where g or N is no power of two, the devices beyond it hand
    their data to others first and get the result back: floor instead of ceil, and two messages of n bytes more.

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
    """A reduce-scatter by halving distances and amounts, then an all-gather by doubling them (Rabenseifner).

    2 log2 g * alpha_l + 2 (g - 1) / g * n * beta_l + 2 log2 N * alpha_n + 2 (N - 1) / N * n * beta_n

    The nearest devices exchange first, so that the network carries n bytes a node. Where g or N is no power of two:
    the next lower one, and two messages of n bytes more, as in `recursive_doubling`.

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
"""What `auto` takes the fastest of for each message, as NCCL does. MPI's recursive ones have to be asked for."""


def all_reduce(size: float, cluster: Cluster, algorithm: str = AUTO) -> tuple[float, str]:
    """Seconds that `size` bytes take, and the algorithm; a single device has nothing to do.

    Args:
        size: bytes of each device.
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
    """Height of a binary tree over `count` nodes."""
    return ceil(log2(count))


def _powers_of_two(count: int) -> tuple[int, int]:
    """Steps among the largest power of two within `count`, and messages more that the rest costs."""
    steps = floor(log2(count))
    return steps, 0 if 2**steps == count else 2


LINKS = {
    "nvlink": Link(2.5e-6, 350e9),
    "pcie": Link(5e-6, 20e9),
    "shm": Link(5e-6, 4e9),
}
"""Inside a node. nvlink: NVLink 4, what NCCL's ring reaches on four H200 (450 GB/s nominal); pcie: version 4, through
the host; shm: ranks on CPUs, through shared memory. --calibrate is better than any of them."""
NETWORK_LATENCY = 10e-6
"""Seconds a message between nodes, InfiniBand or RoCE with NCCL."""

_PREFIXES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_BANDWIDTH = re.compile(r"(?:(\d+) ?[xX*] ?)?(\d+\.?\d*|\.\d+) ?([kMGT]?)(b|B|bit|byte|Bytes?)(?:/s|ps|E)?")
_LATENCY = re.compile(r"(\d+\.?\d*|\.\d+) ?(ns|us|µs|ms|s)?")
_SECONDS = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0}


def parse_bandwidth(text: str) -> float:
    """Bytes a second of ``400Gb`` (bits), ``50GB`` (bytes) or ``8x400Gb`` (eight adapters).

    Raises:
        ValueError: it is none of these.
    """
    match = _BANDWIDTH.fullmatch(text.strip())
    if match is None or not float(match[2]) or match[1] == "0":
        raise ValueError(f"'{text}' is no bandwidth such as 400Gb (bits a second), 50GB (bytes) or 8x400Gb")
    bits = 8 if match[4] in ("b", "bit") else 1
    return int(match[1] or 1) * float(match[2]) * _PREFIXES[match[3]] / bits


def parse_latency(text: str) -> float:
    """Seconds of ``5us``, ``0.01ms`` or ``5``, which are microseconds.

    Raises:
        ValueError: it is none of these.
    """
    match = _LATENCY.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"'{text}' is no latency such as 5us, or 5, which means the same")
    return float(match[1]) * _SECONDS[match[2] or "us"]


def parse_link(text: str) -> Link:
    """A link inside nodes by its name, or by its bandwidth, plain numbers being GB/s; of unknown latency as pcie's.

    Raises:
        ValueError: neither.
    """
    if text in LINKS:
        return LINKS[text]
    plain = re.fullmatch(r"\d+\.?\d*|\.\d+", text.strip())
    try:
        return Link(LINKS["pcie"].latency, parse_bandwidth(f"{text}GB" if plain else text))
    except ValueError as error:
        raise ValueError(f"{error}, nor a link; {suggest(text, list(LINKS))}") from error
