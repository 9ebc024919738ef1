"""Profile, cost and simulation together: what a plan says, and what it cannot say."""

from __future__ import annotations

import csv
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.errors import ConfigError, RunError
from caffepy.scaling.model import ALGORITHMS, AUTO, Cluster, Link
from caffepy.scaling.predict import (
    Bucket,
    Exchange,
    Prediction,
    Timeline,
    cut_into_buckets,
    describe,
    format_table,
    predict,
    simulate,
    sweep,
    write_csv,
    write_plot,
)
from caffepy.scaling.profile import Gradient, LayerProfile, Profile
from caffepy.utils.installation import MissingExtraError

MILLION = 10**6
FAST, SLOW = Link(0.0, 1e9), Link(0.0, 1e8)

PROFILE = Profile(
    net="small",
    device="CPU",
    on_cpu=True,
    batch=50,
    passes=1,
    iteration_ms=110.0,
    update_ms=4.0,
    reduce_buckets=2,
    layer_wise_reduce=True,
    layers=(LayerProfile("data", 1, 0), LayerProfile("conv", 25, 40), LayerProfile("ip", 10, 20)),
    gradients=(Gradient(2, 3 * MILLION), Gradient(1, MILLION)),
)
"""Other: 10 ms. ip's gradients are there after 66 ms, conv's after 106."""


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    times = st.floats(0, 100)
    layers = draw(st.lists(st.builds(LayerProfile, st.text(max_size=3), times, times), min_size=1, max_size=6))
    places = sorted(draw(st.lists(st.integers(0, len(layers) - 1), max_size=5)), reverse=True)
    sizes = st.integers(1, 10**8)
    return Profile(
        "net",
        "device",
        draw(st.booleans()),
        draw(st.integers(1, 512)),
        draw(st.integers(1, 3)),
        draw(st.floats(0.001, 1000)),
        draw(times),
        draw(st.integers(0, 8)),
        draw(st.booleans()),
        tuple(layers),
        tuple(Gradient(place, draw(sizes)) for place in places),
    )


links = st.builds(Link, st.floats(0, 1e-3), st.floats(1e8, 1e12))
clusters = st.builds(Cluster, st.integers(1, 100), st.integers(1, 8), links, links)
exchanges = st.builds(
    Exchange,
    overlap=st.sampled_from([None, True, False]),
    bucket_bytes=st.none() | st.floats(1, 1e9),
    wire_bytes=st.sampled_from([2, 4]),
    algorithm=st.sampled_from([AUTO, *ALGORITHMS]),
    contention=st.floats(0, 1),
)


@given(profiles(), clusters, exchanges)
def test_efficiency_and_times_stay_within_their_bounds(profile: Profile, cluster: Cluster, exchange: Exchange):
    found = predict(profile, cluster, exchange)
    assert 0 < found.efficiency <= 1
    assert found.step_ms >= found.compute_ms > 0
    assert found.compute_ms == pytest.approx(profile.iteration_ms)
    assert 0 <= found.exposed_ms <= found.communication_ms + 1e-9 * found.step_ms
    alone = 1e3 * profile.batch / found.compute_ms
    assert found.images_per_second == pytest.approx(alone * cluster.devices * found.efficiency)


@given(profiles(), links, links, exchanges)
def test_one_device_trains_as_it_was_measured(profile: Profile, inside: Link, between: Link, exchange: Exchange):
    found = predict(profile, Cluster(1, 1, inside, between), exchange)
    assert found.communication_ms == 0 and found.exposed_ms <= 1e-9 * found.step_ms and found.algorithm == "none"
    assert found.step_ms == pytest.approx(profile.iteration_ms)


@given(profiles(), clusters, st.floats(0, 1))
def test_overlap_helps_where_the_buckets_are_the_same(profile: Profile, cluster: Cluster, contention: float):
    """One bucket that holds everything is complete at the end of the backward pass in either case."""
    one = Exchange(True, 10**12, contention=contention)
    apart = replace(one, overlap=False, bucket_bytes=None)
    assert predict(profile, cluster, one).step_ms <= predict(profile, cluster, apart).step_ms * (1 + 1e-9)


def test_figures_of_overlapped_buckets():
    """Two nodes: 3 MB take 30 ms from 66 on, 1 MB takes 10 from 106 on, the update 4."""
    found = predict(PROFILE, Cluster(2, 1, FAST, SLOW), Exchange())
    expected = Prediction(2, 2, 120.0, 110.0, 40.0, 10.0, 1e5 / 120, 110 / 120, "ring")
    assert vars(found) == pytest.approx(vars(expected))


@pytest.mark.parametrize(
    "exchange, step",
    [
        (Exchange(overlap=False), 110 + 40),
        (Exchange(overlap=False, wire_bytes=2), 110 + 20),
        (Exchange(bucket_bytes=4 * MILLION), 110 + 40),
        (Exchange(contention=1.0), 110 + 40),
        (Exchange(wire_bytes=2), 110 + 5),
        (Exchange(bucket_bytes=1), 110 + 10),
    ],
)
def test_figures_of_other_exchanges(exchange: Exchange, step: float):
    assert predict(PROFILE, Cluster(2, 1, FAST, SLOW), exchange).step_ms == pytest.approx(step)


def test_the_profile_says_how_gradients_are_exchanged():
    cluster = Cluster(2, 1, FAST, SLOW)
    late = replace(PROFILE, layer_wise_reduce=False)
    assert predict(late, cluster, Exchange()).step_ms == pytest.approx(150)
    assert predict(late, cluster, Exchange(overlap=True)).step_ms == pytest.approx(120)
    one, each = replace(PROFILE, reduce_buckets=1), replace(PROFILE, reduce_buckets=0)
    assert not Exchange().overlaps(one) and len(Exchange().buckets(one)) == 1
    assert Exchange(bucket_bytes=1).overlaps(one)
    assert Exchange().overlaps(each) and len(Exchange().buckets(each)) == len(PROFILE.gradients) > 1


def test_several_passes_reduce_in_the_last_one_only():
    twice = replace(PROFILE, passes=2, iteration_ms=206.0)
    assert predict(twice, Cluster(2, 1, FAST, SLOW), Exchange()).step_ms == pytest.approx(206 + 10)


def test_nothing_to_learn_is_nothing_to_exchange():
    found = predict(replace(PROFILE, gradients=()), Cluster(8, 8, FAST, SLOW), Exchange())
    assert found.communication_ms == 0 and found.step_ms == 110


def test_sweep():
    found = sweep(PROFILE, [1, 4, 16], Cluster(1, 2, FAST, SLOW), Exchange(overlap=False))
    assert [(row.nodes, row.devices) for row in found] == [(1, 2), (4, 8), (16, 32)]
    assert found[0].communication_ms == pytest.approx(4)
    assert found[0].efficiency > found[1].efficiency > found[2].efficiency


@given(st.lists(st.tuples(st.just(0), st.integers(1, 1000)), max_size=20), st.floats(0, 3000))
def test_buckets_hold_everything_in_order(sizes: list[tuple[int, int]], threshold: float):
    gradients = [(step, size) for step, (_, size) in enumerate(sizes)]
    cut = cut_into_buckets(gradients, threshold)
    assert sum(size for _, size in cut) == sum(size for _, size in gradients)
    assert [last for last, _ in cut] == sorted({last for last, _ in cut})
    assert not cut or cut[-1][0] == len(gradients) - 1
    assert all(size >= threshold for _, size in cut[:-1])


def test_buckets_by_hand():
    assert cut_into_buckets([(0, 5), (0, 1), (2, 9), (5, 2)], 6) == [(0, 6), (2, 9), (5, 2)]
    assert cut_into_buckets([(0, 5), (3, 1)], 0) == [(0, 5), (3, 1)]
    assert cut_into_buckets([], 6) == []


# -- the simulated iteration -----------------------------------------------------------------------------


times = st.floats(0, 1000)


@st.composite
def iterations(draw: st.DrawFn) -> tuple[float, list[float], list[Bucket]]:
    """Time before the backward pass, its steps, and buckets in the order in which they are ready."""
    backward = draw(st.lists(times, min_size=1, max_size=12))
    places = sorted(draw(st.lists(st.integers(0, len(backward) - 1), max_size=8)))
    return draw(times), backward, [Bucket(place, draw(times)) for place in places]


def test_buckets_are_hidden_behind_the_rest_of_the_backward_pass():
    found = simulate(10, [5, 5, 5], [Bucket(0, 4), Bucket(2, 3)], update=2)
    assert found == Timeline(step=30, compute=27, communication=7, reductions=((15, 19), (25, 28)))
    assert found.exposed == 3 and found.efficiency == pytest.approx(27 / 30)


def test_a_bucket_waits_for_the_one_before_it():
    found = simulate(0, [1, 1, 1], [Bucket(0, 10), Bucket(1, 10), Bucket(2, 10)])
    assert found.reductions == ((1, 11), (11, 21), (21, 31))
    assert found.step == 31 and found.exposed == 28


def test_without_overlap_all_comes_after_the_backward_pass():
    found = simulate(1, [2, 3], [Bucket(0, 4), Bucket(1, 5)], overlap=False, update=2)
    assert found.reductions == ((6, 10), (10, 15)) and found.step == 17


@pytest.mark.parametrize("contention, step", [(0.0, 21), (0.5, 25), (1.0, 29)])
def test_communication_takes_its_part_of_the_device(contention: float, step: float):
    """Eight units run beside ten of computing: none, a half or all of them is taken from it."""
    assert simulate(0, [10, 10], [Bucket(0, 8), Bucket(1, 1)], contention=contention).step == pytest.approx(step)


def test_contention_stretches_the_last_steps():
    """One unit of work is left when the reduction, which took half of the device, is over."""
    found = simulate(0, [1, 3, 3], [Bucket(0, 10)], contention=0.5)
    assert found.reductions == ((1, 11),) and found.step == pytest.approx(12)


@given(iterations(), st.floats(0, 1), times)
def test_overlap_is_never_slower(iteration: tuple[float, list[float], list[Bucket]], contention: float, last: float):
    overlapped = simulate(*iteration, True, contention, last)
    apart = simulate(*iteration, False, contention, last)
    assert overlapped.step <= apart.step * (1 + 1e-9) + 1e-9
    assert overlapped.compute == apart.compute and overlapped.communication == apart.communication


@given(iterations(), st.booleans(), st.floats(0, 1), times)
def test_bounds(iteration: tuple[float, list[float], list[Bucket]], overlap: bool, contention: float, last: float):
    found = simulate(*iteration, overlap, contention, last)
    slack = 1e-9 * (found.step + 1)
    assert found.compute <= found.step <= found.compute + found.communication + slack
    assert 0 <= found.exposed <= found.communication + slack
    assert 0 < found.efficiency <= 1 or found.compute == 0
    ends = [end for _, end in found.reductions]
    assert ends == sorted(ends)


@given(iterations(), st.floats(0, 1), st.floats(0, 1))
def test_more_contention_is_never_faster(
    iteration: tuple[float, list[float], list[Bucket]], first: float, second: float
):
    less, more = sorted((first, second))
    assert simulate(*iteration, True, less).step <= simulate(*iteration, True, more).step * (1 + 1e-9) + 1e-9


@given(times, st.lists(times, min_size=1))
def test_alone_there_is_nothing_to_wait_for(before: float, backward: list[float]):
    found = simulate(before, backward, [])
    assert found.step == pytest.approx(before + sum(backward)) and found.exposed <= 1e-6


# -- tables, CSV and plots -------------------------------------------------------------------------------


PREDICTIONS = [
    Prediction(1, 8, 22.1758, 21.281, 0.895, 0.8948, 23088.2, 0.9597, "ring"),
    Prediction(64, 512, 222.48, 21.281, 1.2, 201.2, 999.44, 0.0946, "hierarchical"),
]
LENET = Profile(
    "LeNet", "CPU, 1 thread", True, 64, 1, 20.0, 0.5, 6, True, (LayerProfile("ip", 6.0, 12.0),), (Gradient(0, 2**20),)
)


def test_table():
    assert format_table(PREDICTIONS) == [
        "nodes  devices  step ms  compute ms  communication ms  exposed ms  images/s  efficiency",
        "    1        8   22.176      21.281             0.895       0.895    23,088       0.960",
        "   64      512  222.480      21.281             1.200     201.200     999.4       0.095",
    ]


def test_description():
    cluster = Cluster(1, 8, Link(2e-6, 350e9, ((2.0**20, Link(0.0, 1e9)),)), Link(1e-5, float("inf")))
    assert list(describe(LENET, cluster, Exchange())) == [
        "LeNet, batch 64 per device, CPU, 1 thread: 3,200.0 images/s alone",
        "An iteration: 20.000 ms = (forward 6.000 + backward 12.000) + update 0.500 + other 1.500",
        "Gradients: 1.00 MiB in 1 bucket, reduced during the backward pass",
        "Inside a node: 350 GB/s, 2 us; from 1 MiB on 1 GB/s, 0 us",
    ]
    network = replace(cluster, between=Link(1e-5, 5e10))
    *_, exchange, _, between = describe(replace(LENET, passes=2), network, Exchange(overlap=False, wire_bytes=2))
    assert exchange == "Gradients: 0.50 MiB in 1 bucket, reduced after the backward pass"
    assert between == "Between nodes: 50 GB/s, 10 us"


def test_csv(tmp_path: Path):
    write_csv(tmp_path / "plan.csv", PREDICTIONS)
    with (tmp_path / "plan.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["devices"] for row in rows] == ["8", "512"]
    assert float(rows[0]["step_ms"]) == 22.1758 and rows[1]["algorithm"] == "hierarchical"
    with pytest.raises(RunError, match="absent/plan.csv: cannot be written"):
        write_csv(tmp_path / "absent" / "plan.csv", PREDICTIONS)


def test_plot(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_plot(tmp_path / "plan.png", PREDICTIONS, "LeNet")
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ConfigError, match=r"--plot .*plan.docx: .*not supported"):
        write_plot(tmp_path / "plan.docx", PREDICTIONS, "LeNet")
    with pytest.raises(RunError, match="absent/plan.png: cannot be written"):
        write_plot(tmp_path / "absent" / "plan.png", PREDICTIONS, "LeNet")


def test_a_plot_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"matplotlib is not installed .* install .*\[plot\]'"):
        write_plot(tmp_path / "plan.png", PREDICTIONS, "LeNet")
