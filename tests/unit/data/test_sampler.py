import os
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.data.sampler import Sampler


def test_a_batch_over_the_end_goes_on_with_the_first_record():
    assert Sampler(10).records(8, 5).tolist() == [8, 9, 0, 1, 2]


@given(length=st.integers(1, 20), skip=st.integers(0, 30), first=st.integers(0, 100), count=st.integers(1, 50))
def test_records_wrap_and_skip(length, skip, first, count):
    expected = [(s + skip) % length for s in range(first, first + count)]
    assert Sampler(length, skip).records(first, count).tolist() == expected


@given(length=st.integers(3, 20), skip=st.integers(0, 5), seed=st.integers(0, 99), cut=st.integers(1, 60))
def test_shuffled_order_does_not_depend_on_how_it_is_asked_for(length, skip, seed, cut):
    whole = Sampler(length, skip, True, seed).records(0, 61).tolist()
    order = Sampler(length, skip, True, seed)
    later = order.records(cut, 61 - cut).tolist()
    assert order.records(0, cut).tolist() + later == whole


def test_every_epoch_has_every_record_once_in_an_order_of_its_own():
    records = Sampler(30, 0, True, 4).records(0, 90).reshape(3, 30)
    assert all(sorted(epoch.tolist()) == list(range(30)) for epoch in records)
    assert len({epoch.tobytes() for epoch in records}) == 3


def test_a_precomputed_order_equals_one_computed_on_demand():
    plain, prepared = Sampler(30, 0, True, 4), Sampler(30, 0, True, 4)
    for first in range(0, 200, 7):
        assert prepared.records(first, 7).tolist() == plain.records(first, 7).tolist()
        prepared.prepare_next_epoch()
    prepared.close()
    assert not any(t.name == "permutation" for t in threading.enumerate())


def test_samples_need_not_be_neighbours():
    order = Sampler(10, 3, True, 1)
    assert order.records_of(np.array([4, 25, 7])).tolist() == [int(order.records(s, 1)[0]) for s in (4, 25, 7)]
    assert order.copy().records(40, 9).tolist() == order.records(40, 9).tolist()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # a fork of a process with threads
def test_a_child_forked_during_the_start_of_the_thread_has_the_same_order(monkeypatch):
    plain, prepared = Sampler(30, 0, True, 4), Sampler(30, 0, True, 4)
    expected = plain.records(0, 90).tolist()
    statuses = []

    def fork_and_start(thread: threading.Thread) -> None:
        child = os.fork()
        if child == 0:
            found = []
            try:
                found = [*first, *prepared.records(30, 60).tolist()]
            finally:
                os._exit(0 if found == expected else 1)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        start(thread)

    first, start = prepared.records(0, 30).tolist(), threading.Thread.start
    monkeypatch.setattr(threading.Thread, "start", fork_and_start)
    prepared.prepare_next_epoch()
    prepared.close()
    assert statuses == [0]
