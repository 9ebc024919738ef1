from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_groups import run_threads

from caffepy.distributed.communicators import local as local_module
from caffepy.distributed.communicators.communicator import Communicator
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.communicators.local import LocalCommunicator, SharedScores, ThreadGroup
from caffepy.errors import AbortedError, PeerError
from caffepy.utils.clocks import SuspendAwareClock


def local(size: int) -> Callable[[int], Communicator]:
    group = ThreadGroup(size)
    return lambda i: LocalCommunicator(group, i)


def hierarchical(ranks: int, threads: int) -> Callable[[int], Communicator]:
    """Threads that stand for the threads of several processes: another local group plays MPI."""
    between = ThreadGroup(ranks)
    groups = [ThreadGroup(threads) for _ in range(ranks)]

    def make(i: int) -> Communicator:
        rank, thread = divmod(i, threads)
        return HierarchicalCommunicator(LocalCommunicator(groups[rank], thread), LocalCommunicator(between, rank))

    return make


worlds = st.sampled_from(
    [(local, (n,), n) for n in (1, 2, 3, 5)]
    + [(hierarchical, (r, t), r * t) for r, t in ((1, 1), (2, 1), (1, 3), (2, 2), (3, 2))]
)


@settings(max_examples=40)
@given(world=worlds, count=st.integers(0, 70), average=st.booleans(), seed=st.integers(0, 1000))
def test_all_reduce_is_numpys_sum_or_mean(world: Any, count: int, average: bool, seed: int) -> None:
    make, arguments, size = world
    inputs = np.random.default_rng(seed).standard_normal((size, count)).astype(np.float32)
    arrays = inputs.copy()
    connect = make(*arguments)
    run_threads(size, lambda i: connect(i).all_reduce(arrays[i], average))
    expected = inputs.astype(np.float64).mean(0) if average else inputs.astype(np.float64).sum(0)
    np.testing.assert_allclose(arrays, np.broadcast_to(expected, arrays.shape), rtol=1e-5, atol=1e-6)
    assert (arrays == arrays[0]).all(), "devices differ in the last bits"


@settings(max_examples=30)
@given(world=worlds, count=st.integers(0, 20), data=st.data())
def test_broadcast_gives_everybody_the_roots_array(world: Any, count: int, data: st.DataObject) -> None:
    make, arguments, size = world
    root = data.draw(st.integers(0, size - 1))
    inputs = np.arange(size * count, dtype=np.float32).reshape(size, count)
    arrays = inputs.copy()
    connect = make(*arguments)
    run_threads(size, lambda i: connect(i).broadcast(arrays[i], root))
    np.testing.assert_array_equal(arrays, np.broadcast_to(inputs[root], arrays.shape))


@settings(max_examples=30)
@given(world=worlds, count=st.integers(0, 20))
def test_sum_of_scores(world: Any, count: int) -> None:
    make, arguments, size = world
    values = np.random.default_rng(count).standard_normal((size, count))
    connect = make(*arguments)
    results = run_threads(size, lambda i: connect(i).sum(values[i]))
    for result in results:
        np.testing.assert_allclose(result, values.sum(0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("make", [local(3), hierarchical(3, 2)])
def test_ranks_count_through_all_devices(make: Callable[[int], Communicator]) -> None:
    size = make(0).size
    assert [make(i).rank for i in range(size)] == list(range(size))


def test_repeated_operations_do_not_mix() -> None:
    connect = local(3)

    def work(i: int) -> list[float]:
        communicator = connect(i)
        seen = []
        for step in range(50):
            array = np.full(5, float(step * 10 + i), np.float32)
            communicator.all_reduce(array, average=False)
            seen.append(float(array[0]))
        return seen

    assert run_threads(3, work) == [[30.0 * step + 3 for step in range(50)]] * 3


def test_summation_does_not_depend_on_timing() -> None:
    inputs = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)
    results = []
    for _ in range(5):
        arrays = inputs.copy()
        connect = local(4)
        run_threads(4, lambda i: connect(i).all_reduce(arrays[i]))  # noqa: B023
        results.append(arrays[0].tobytes())
    assert len(set(results)) == 1


@pytest.mark.parametrize("operation", ["all_reduce", "broadcast", "sum"])
@pytest.mark.parametrize("make", [local, lambda size: hierarchical(1, size)])
def test_abort_releases_those_who_wait(make: Any, operation: str) -> None:
    connect = make(3)

    def work(i: int) -> None:
        if i == 2:
            connect(i).abort()
        else:
            getattr(connect(i), operation)(np.zeros(4, np.float32))

    results = run_threads(3, work)
    assert [type(result) for result in results[:2]] == [AbortedError, AbortedError]


def test_after_an_abort_nothing_waits() -> None:
    communicator = local(2)(0)
    communicator.abort()
    with pytest.raises(AbortedError, match="another solver thread failed"):
        communicator.barrier()


class Suspended:
    """Plays a clock for `ThreadGroup`: time passes in steps, and in one leap where the process stands still."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 0.0
        self.clock = SuspendAwareClock(lambda: self.now)
        monkeypatch.setattr(local_module, "suspend_aware_seconds", self.clock.read)

    def pass_seconds(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1.0
            self.clock.read()


def waiting_thread(group: ThreadGroup) -> tuple[threading.Thread, list[BaseException]]:
    met: list[BaseException] = []

    def wait() -> None:
        try:
            group.wait()
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, met


def test_a_wait_ends_after_the_watchdogs_and_time_of_suspension_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended = Suspended(monkeypatch)
    thread, met = waiting_thread(ThreadGroup(2, 10.0))
    suspended.now += 100000.0
    suspended.pass_seconds(10 + 60 + 10)
    time.sleep(0.05)
    assert thread.is_alive() and not met, "the watchdog must have spoken before"
    suspended.pass_seconds(100)
    thread.join(300.0)
    assert [type(error) for error in met] == [PeerError]
    assert "has waited 130 s for the others of its process; allow more with --timeout" in str(met[0])


def test_threads_meet_after_a_suspension(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended = Suspended(monkeypatch)
    group = ThreadGroup(2, 10.0)
    thread, met = waiting_thread(group)
    suspended.now += 100000.0
    time.sleep(0.02)
    group.wait()
    thread.join(300.0)
    assert not thread.is_alive() and not met


def test_shared_scores_keep_copies_and_add_in_order() -> None:
    shared = SharedScores(2)
    scores = np.array([1.0, 2.0])
    shared.save(0, scores)
    scores[:] = 100.0
    shared.save(1, [0.5, 0.25])
    np.testing.assert_array_equal(shared.rank_scores(0), [1.0, 2.0])
    np.testing.assert_array_equal(shared.total(), [1.5, 2.25])
