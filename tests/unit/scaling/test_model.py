"""The cost of an all-reduce: what the formulas promise, for clusters of all kinds."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.scaling.model import ALGORITHMS, AUTO, CHOICES, Cluster, Link, all_reduce, ring

links = st.builds(Link, st.floats(1e-7, 1e-3), st.floats(1e8, 1e12))
clusters = st.builds(Cluster, st.integers(1, 600), st.integers(1, 16), links, links)
sizes = st.integers(0, 2**31)
algorithms = st.sampled_from(sorted(ALGORITHMS))

SLOW, FAST = Link(10e-6, 10e9), Link(1e-6, 100e9)


def cost(name: str, size: float, cluster: Cluster) -> float:
    return ALGORITHMS[name](size, cluster)


@given(algorithms, sizes, links, links)
def test_one_device_has_no_communication(name: str, size: int, inside: Link, between: Link):
    cluster = Cluster(1, 1, inside, between)
    assert cost(name, size, cluster) == 0
    assert all_reduce(size, cluster, name) == (0.0, "none")


@given(algorithms, sizes, sizes, clusters)
def test_cost_is_linear_in_the_bytes(name: str, first: int, second: int, cluster: Cluster):
    latency = cost(name, 0, cluster)
    together = cost(name, first, cluster) + cost(name, second, cluster) - latency
    if name == "hierarchical":  # the faster of a ring and two trees: linear in pieces, and never above a line
        assert cost(name, first + second, cluster) <= together * (1 + 1e-9)
    else:
        assert math.isclose(cost(name, first + second, cluster), together, rel_tol=1e-9)


@given(algorithms, sizes, clusters)
def test_more_bytes_take_longer_and_no_algorithm_beats_the_bound(name: str, size: int, cluster: Cluster):
    """Every device has to send 2 (p - 1) / p of its bytes; a node has to send 2 (N - 1) / N of them."""
    assert cost(name, size, cluster) <= cost(name, size + 1000, cluster)
    nodes, devices = cluster.nodes, cluster.devices_per_node
    bound = 2 * (nodes - 1) / nodes * size / cluster.between.bandwidth
    if name == "recursive-doubling":  # sends all at once instead of a part twice
        bound /= 2
    if nodes == 1:
        bound = (1 if name == "recursive-doubling" else 2 * (devices - 1) / devices) * size / cluster.inside.bandwidth
        bound *= devices > 1
    assert cost(name, size, cluster) >= bound * (1 - 1e-9)


def test_the_rings_figures():
    """Patarasuk and Yuan: 2 (p - 1) messages, 2 (p - 1) / p of the data."""
    assert ring(8e9, Cluster(1, 4, FAST, SLOW)) == pytest.approx(6 * 1e-6 + 1.5 * 0.08)
    assert ring(8e9, Cluster(4, 1, FAST, SLOW)) == pytest.approx(6 * 10e-6 + 1.5 * 0.8)
    # Two nodes of two: two messages cross the network, two stay in a node, the network sets the pace.
    assert ring(8e9, Cluster(2, 2, FAST, SLOW)) == pytest.approx(4 * 1e-6 + 2 * 10e-6 + 1.5 * 0.8)


@pytest.mark.parametrize(
    "name, seconds",
    [
        ("tree", 2 * (7 * 1e-6 + 6 * 10e-6) + 2 * 0.1),
        # 1 GB inside, twice 7/8 of it; then 64 nodes: two trees (12 messages, 2 GB) or a ring (126, 63/64 of that)
        ("hierarchical", 14e-6 + 1.75 * 0.01 + 126 * 10e-6 + 2 * 63 / 64 * 0.1),
        ("recursive-doubling", 3 * (1e-6 + 0.01) + 6 * (10e-6 + 0.8)),
        ("recursive-halving", 6e-6 + 1.75 * 0.01 + 12 * 10e-6 + 2 * 63 / 64 * 0.1),
    ],
)
def test_figures_of_64_nodes_of_8(name: str, seconds: float):
    assert cost(name, 1e9, Cluster(64, 8, FAST, SLOW)) == pytest.approx(seconds)


def test_numbers_that_are_no_power_of_two_cost_two_messages_more():
    four, five = (Cluster(n, 1, FAST, SLOW) for n in (4, 5))
    for name in ("recursive-doubling", "recursive-halving"):
        assert cost(name, 1e6, five) - cost(name, 1e6, four) == pytest.approx(2 * (10e-6 + 1e6 / 10e9))


@given(sizes, clusters)
def test_auto_takes_the_fastest(size: int, cluster: Cluster):
    seconds, name = all_reduce(size, cluster, AUTO)
    assert seconds == min(cost(choice, size, cluster) for choice in CHOICES) or cluster.devices == 1
    assert name in (*CHOICES, "none")


def test_what_auto_takes():
    """Short messages over many nodes go through trees; long ones are reduced in each node first."""
    many = Cluster(512, 8, FAST, SLOW)
    assert all_reduce(1000, many)[1] in ("tree", "hierarchical")
    assert all_reduce(1000, many)[0] < ring(1000, many) / 20
    assert all_reduce(1e9, Cluster(1, 8, FAST, SLOW))[1] == "ring"
