"""Links, and the cost of an all-reduce: what the formulas promise, for clusters of all kinds."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError
from caffepy.scaling.model import (
    ALGORITHMS,
    AUTO,
    CHOICES,
    LINKS,
    MAX_SAMPLES,
    Cluster,
    Link,
    Measurements,
    all_reduce,
    fit_link,
    parse_bandwidth,
    parse_latency,
    parse_link,
    read_measurements,
    ring,
)

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


# -- links found again in the times that they make -------------------------------------------------------


SIZES = [4.0**exponent for exponent in range(5, 15)]
UNUSED = Link(1.0, 1.0)


def measured(link: Link, devices: int, algorithm: str, between: bool) -> Measurements:
    """Times that a link makes, if the model is right."""
    cluster = Cluster(devices, 1, UNUSED, link) if between else Cluster(1, devices, link, UNUSED)
    return Measurements(devices, tuple((size, all_reduce(size, cluster, algorithm)[0]) for size in SIZES))


@given(
    st.floats(1e-7, 1e-3),
    st.floats(1e8, 1e12),
    st.integers(2, 16),
    st.sampled_from(["ring", "recursive-halving"]),
    st.booleans(),
)
def test_the_link_is_found_again(latency: float, bandwidth: float, devices: int, algorithm: str, between: bool):
    fit = fit_link(measured(Link(latency, bandwidth), devices, algorithm, between), algorithm, between)
    assert fit.error < 1e-6
    again = measured(fit.link, devices, algorithm, between)
    for (_, seconds), (_, expected) in zip(
        again.samples, measured(Link(latency, bandwidth), devices, algorithm, between).samples, strict=True
    ):
        assert seconds == pytest.approx(expected, rel=1e-5)


def test_alpha_and_beta():
    fit = fit_link(Measurements(4, ((0.0, 12e-6), (4e6, 12e-6 + 6e-3))), AUTO)
    assert fit.link.latency == pytest.approx(2e-6) and fit.link.bandwidth == pytest.approx(1e9)
    assert not fit.link.longer


def test_what_auto_predicts_for_the_devices_that_were_measured_is_what_was_measured():
    for between in (False, True):
        fit = fit_link(measured(Link(3e-6, 5e9), 4, "ring", between), AUTO, between)
        cluster = Cluster(4, 1, UNUSED, fit.link) if between else Cluster(1, 4, fit.link, UNUSED)
        assert all_reduce(1e6, cluster)[0] <= ALGORITHMS["ring"](1e6, cluster) == pytest.approx(18e-6 + 1.5e6 / 5e9)


def test_long_messages_have_a_line_of_their_own():
    """Bandwidth falls to a tenth beyond 1 MiB, as where messages no longer fit into a cache."""
    fast, slow = Link(1e-6, 1e10), Link(1e-6, 1e9)
    samples = [(size, (fast if size < 2**20 else slow).cost(2, size)) for size in SIZES]
    fit = fit_link(Measurements(2, tuple(samples)), "ring")
    assert fit.error < 1e-6
    assert fit.link.for_size(1000).bandwidth == pytest.approx(1e10)
    assert fit.link.for_size(2**28).bandwidth == pytest.approx(1e9)
    assert all_reduce(2.0**26, Cluster(1, 2, fit.link, UNUSED))[0] == pytest.approx(slow.cost(2, 2**26), rel=1e-6)


def test_noise_is_averaged():
    samples = [(size, Link(5e-6, 4e9).cost(2, size) * (1.1 if i % 2 else 0.9)) for i, size in enumerate(SIZES)]
    fit = fit_link(Measurements(2, tuple(samples)), "ring")
    assert fit.error < 0.2
    assert fit.link.for_size(2**28).bandwidth == pytest.approx(4e9, rel=0.15)


@pytest.mark.parametrize("times", [[5e-6, 4e-6, 3e-6], [1e-6, 1e-3, 1.0]])
def test_neither_is_ever_negative(times: list[float]):
    """Longer messages that are faster, and a line that would cross below 0."""
    fit = fit_link(Measurements(2, tuple(zip([1e3, 1e4, 1e5], times, strict=True))), "ring")
    assert fit.link.latency >= 0 and fit.link.bandwidth > 0
    assert math.isfinite(fit.error)


@pytest.mark.parametrize("devices, samples", [(1, ((1.0, 1.0), (2.0, 2.0))), (2, ((1.0, 1.0), (1.0, 2.0))), (2, ())])
def test_what_says_nothing(devices: int, samples: tuple[tuple[float, float], ...]):
    with pytest.raises(ConfigError, match="at least two sizes and two devices"):
        fit_link(Measurements(devices, samples), "ring")


TABLE = """\
# all-reduce over 4 devices: nccl, 2 ranks of 2 GPUs, median of 20
#    size (B)      elements         dtype     time (us)  algbw (GB/s)  busbw (GB/s)         wrong
         4096          1024       float32         10.50         0.390         0.585             0
      1048576        262144       float32         40.00        26.214        39.322             0
"""


def test_a_table_is_read(tmp_path: Path):
    (tmp_path / "a.txt").write_text("some line of a launcher\n" + TABLE + "done  in  a  moment  indeed\n")
    found = read_measurements(tmp_path / "a.txt")
    assert found.devices == 4
    assert found.samples == ((4096.0, pytest.approx(10.5e-6)), (1048576.0, pytest.approx(40e-6)))


@pytest.mark.parametrize(
    "head, cells, sample",
    [
        ("size  time", "64 KiB  3.5", (65536, 3.5e-6)),
        ("bytes  count  time ms", "1,000  250  2", (1000, 2e-3)),
        ("algbw  size (B)  time (s)", "9  8  7", (8, 7.0)),
    ],
)
def test_tables_with_other_columns_and_units(tmp_path: Path, head: str, cells: str, sample: tuple[float, float]):
    (tmp_path / "a.txt").write_text(f"2 ranks\n{head}\n{cells}\n")
    assert read_measurements(tmp_path / "a.txt").samples == (pytest.approx(sample),)


def test_a_table_that_is_not_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="absent.txt: cannot be read: .*caffepy bench allreduce"):
        read_measurements(tmp_path / "absent.txt")


# -- bandwidths and latencies as people write them -------------------------------------------------------


@pytest.mark.parametrize(
    "text, bytes_per_second",
    [
        ("400Gb", 50e9),
        ("400Gb/s", 50e9),
        ("100GbE", 12.5e9),
        ("100Gbps", 12.5e9),
        ("50GB", 50e9),
        ("50 GB/s", 50e9),
        ("8x400Gb", 400e9),
        ("2 x 12.5GB", 25e9),
        ("1.5Tbit", 187.5e9),
        ("800MB/s", 8e8),
        ("10kb", 1250),
        (".5GB", 5e8),
    ],
)
def test_bandwidths(text: str, bytes_per_second: float):
    assert parse_bandwidth(text) == pytest.approx(bytes_per_second)


@pytest.mark.parametrize("text", ["", "400", "fast", "-1GB", "0GB", "0x400Gb", "400 gb of it", "nanGB", "1e9GB"])
def test_what_is_no_bandwidth(text: str):
    with pytest.raises(ValueError, match="is no bandwidth such as 400Gb"):
        parse_bandwidth(text)


@pytest.mark.parametrize(
    "text, seconds", [("5", 5e-6), ("5us", 5e-6), ("2.5µs", 2.5e-6), ("0.01ms", 1e-5), ("80 ns", 8e-8), ("0", 0)]
)
def test_latencies(text: str, seconds: float):
    assert parse_latency(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "soon", "-1", "5 minutes", "inf"])
def test_what_is_no_latency(text: str):
    with pytest.raises(ValueError, match="is no latency such as 5us"):
        parse_latency(text)


def test_links():
    assert parse_link("nvlink") is LINKS["nvlink"]
    assert parse_link("25").bandwidth == 25e9  # plain numbers are GB/s
    assert parse_link("200Gb").bandwidth == 25e9
    with pytest.raises(ValueError, match="'nvlnk' is no .*did you mean 'nvlink'"):
        parse_link("nvlnk")


def test_more_sizes_than_can_be_divided_into_ranges_in_time() -> None:
    samples = tuple((float(size), 1e-6 * size) for size in range(1, MAX_SAMPLES + 2))
    with pytest.raises(ConfigError, match="all-reduces of 101 sizes are too many to fit lines to; keep 100"):
        fit_link(Measurements(2, samples), "auto")
