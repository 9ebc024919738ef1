"""Sums in memory that ranks share; threads play the ranks."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from process_groups import run_threads

from caffepy.distributed.communicators import hierarchical as shared_memory
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator, SharedSums
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup

FOLDER = Path("/dev/shm")
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="only Linux has files that are memory")


def maker(size: int) -> Callable[[int], SharedSums]:
    """Makes the sums of each of `size` ranks."""
    groups = [ThreadGroup(size, 300) for _ in range(3)]
    return lambda rank: SharedSums(*(LocalCommunicator(group, rank) for group in groups))


def numbers(rank: int, count: int, turn: int) -> Any:
    return np.random.default_rng([rank, turn]).standard_normal(count, np.float32)


@settings(max_examples=25)
@given(st.integers(2, 4), st.integers(1, 100_000), st.integers(1, 5), st.integers(0, 9))
def test_every_rank_gets_the_same_sums_whoever_is_late(size: int, count: int, parts: int, seed: int) -> None:
    make, turns = maker(size), 3
    cuts = [count * part // parts for part in range(parts + 1)]

    def work(rank: int) -> list[Any]:
        sums, late, found = make(rank), random.Random(seed * 10 + rank), []
        memory = sums.allocate(count)
        assert memory is not None and not memory.any()
        for turn in range(turns):
            memory[...] = numbers(rank, count, turn)
            works = []
            for start, stop in zip(cuts, cuts[1:], strict=False):
                time.sleep(late.choice([0.0, 0.0, 0.002]))
                ended = [work.wait(0.0) for work in works]
                works = [work for work, done in zip(works, ended, strict=True) if not done]
                works.append(sums.start(memory[start:stop], 0.25))
            for one in works:
                one.synchronize()
            found.append(memory.copy())
        return found

    results = run_threads(size, work)
    for turn in range(turns):
        expected = numbers(0, count, turn)
        for rank in range(1, size):
            expected = expected + numbers(rank, count, turn)
        for found in results:
            np.testing.assert_array_equal(found[turn], expected * np.float32(0.25))


def test_nothing_stays_behind() -> None:
    make = maker(2)
    before = set(os.listdir(FOLDER))
    run_threads(2, lambda rank: make(rank).allocate(1000))
    assert not [name for name in set(os.listdir(FOLDER)) - before if name.startswith("caffepy-")]


def test_only_its_own_memory_is_held() -> None:
    make = maker(2)

    def work(rank: int) -> list[bool]:
        sums = make(rank)
        early = sums.holds(np.zeros(4, np.float32))
        memory = sums.allocate(100)
        return [early, sums.holds(memory[10:20]), sums.holds(np.zeros(100, np.float32))]

    assert run_threads(2, work) == [[False, True, False]] * 2


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("fault", ["full", "no folder", "not reached"])
def test_where_there_is_no_such_memory_all_do_without(
    fault: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if fault == "full":
        monkeypatch.setattr(os, "posix_fallocate", _full)
    elif fault == "no folder":
        monkeypatch.setattr(shared_memory, "_FOLDER", tmp_path / "missing")
    else:  # another rank sees another /dev/shm
        monkeypatch.setattr(shared_memory, "_opened", lambda name: None)
    make = maker(2)
    with caplog.at_level("INFO"):
        assert run_threads(2, lambda rank: make(rank).allocate(2**20)) == [None, None]
    (message,) = caplog.messages
    folder = tmp_path / "missing" if fault == "no folder" else FOLDER
    assert message == f"{folder} has no 12 MiB for gradients that all ranks see: they are sent"


@pytest.mark.parametrize("threads", [1, 2])
def test_ranks_times_threads_average_in_shared_memory(threads: int) -> None:
    make, size, count = maker(2), 2 * threads, 1000
    ranks = ThreadGroup(2, 300)
    locals_ = [ThreadGroup(threads, 300) for _ in range(2)]
    sums = [None, None]

    def work(number: int) -> Any:
        rank, thread = divmod(number, threads)
        if thread == 0:
            sums[rank] = make(rank)  # type: ignore[call-overload]
        shared = sums[rank] if thread == 0 else None
        communicator = HierarchicalCommunicator(
            LocalCommunicator(locals_[rank], thread), LocalCommunicator(ranks, rank), inter_node=False, shared=shared
        )
        memory = communicator.allocate_gradients(count)
        assert (memory is None) == (thread > 0)
        array = np.zeros(count, np.float32) if memory is None else memory
        found = [communicator.overlaps]
        for average in (False, True):
            array[...] = numbers(number, count, 0)
            communicator.all_reduce(array, average)
            found.append(array.copy())
        array[...] = numbers(number, count, 0)
        halves = (slice(300), slice(300, count))
        works = [communicator.all_reduce_async(array[half], nullcontext()) for half in halves]
        for work in works:
            work.poll()
        for work in works:
            work.synchronize()
        return [*found, array.copy()]

    total = np.sum([numbers(number, count, 0) for number in range(size)], axis=0, dtype=np.float64)
    for favours, whole, average, parts in run_threads(size, work):
        assert favours == (threads == 1)
        np.testing.assert_allclose(whole, total, rtol=0, atol=1e-5)
        np.testing.assert_allclose(average, total / size, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(parts, average)
