"""The simulated iteration: cases worked out by hand, and what holds for all."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.scaling.predict import Bucket, Timeline, simulate

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
