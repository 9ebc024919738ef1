"""Profile, cost and simulation together: what a plan says, and what it cannot say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.scaling.model import ALGORITHMS, AUTO, Cluster, Link
from caffepy.scaling.predict import Exchange, Prediction, cut_into_buckets, predict, sweep
from caffepy.scaling.profile import Gradient, LayerProfile, Profile

MILLION = 10**6
FAST, SLOW = Link(0.0, 1e9), Link(0.0, 1e8)

PROFILE = Profile(
    net="small", device="CPU", on_cpu=True, batch=50, passes=1, iteration_ms=110.0, update_ms=4.0, reduce_buckets=2,
    layer_wise_reduce=True,
    layers=(LayerProfile("data", 1, 0), LayerProfile("conv", 25, 40), LayerProfile("ip", 10, 20)),
    gradients=(Gradient(2, 3 * MILLION), Gradient(1, MILLION)),
)  # fmt: skip
"""Other: 10 ms. ip's gradients are there after 66 ms, conv's after 106."""


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    times = st.floats(0, 100)
    layers = draw(st.lists(st.builds(LayerProfile, st.text(max_size=3), times, times), min_size=1, max_size=6))
    places = sorted(draw(st.lists(st.integers(0, len(layers) - 1), max_size=5)), reverse=True)
    sizes = st.integers(1, 10**8)
    return Profile(
        "net", "device", draw(st.booleans()), draw(st.integers(1, 512)), draw(st.integers(1, 3)),
        draw(st.floats(0.001, 1000)), draw(times), draw(st.integers(0, 8)), draw(st.booleans()),
        tuple(layers), tuple(Gradient(place, draw(sizes)) for place in places),
    )  # fmt: skip


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
