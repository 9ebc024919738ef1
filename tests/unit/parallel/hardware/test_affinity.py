from __future__ import annotations

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.parallel.hardware import affinity
from caffepy.parallel.hardware.affinity import format_cores, parse_cores, share, take_cores


@given(st.sets(st.integers(0, 200)))
def test_core_lists_are_written_as_linux_writes_them(cores: set[int]) -> None:
    ordered = tuple(sorted(cores))
    assert parse_cores(format_cores(ordered)) == ordered


def test_runs_are_joined() -> None:
    assert format_cores((0, 1, 2, 8, 10, 11)) == "0-2,8,10-11"


@given(st.integers(1, 70), st.integers(1, 9))
def test_shares_are_disjoint_and_complete(cores: int, ranks: int) -> None:
    parts = [share(tuple(range(cores)), i, ranks) for i in range(ranks)]
    assert sum(parts, ()) == tuple(range(cores))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_narrowed_process_gets_its_cores_back() -> None:
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(before)})
        cores = take_cores(0, 1, divide=True)
        assert set(cores.numbers) == os.sched_getaffinity(0) >= before
        assert 1 <= cores.count <= len(cores.numbers)
    finally:
        os.sched_setaffinity(0, before)


def test_a_quota_limits_the_threads_and_forbids_sharing_by_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(affinity, "_affinity", lambda: tuple(range(8)))
    monkeypatch.setattr(affinity, "_set_affinity", lambda cores: None)
    monkeypatch.setattr(affinity, "_within_quota", lambda cores: min(cores, 4))
    assert take_cores(1, 2, divide=True) == affinity.Cores(tuple(range(8)), 2)
    monkeypatch.setattr(affinity, "_within_quota", lambda cores: cores)
    assert take_cores(1, 2, divide=True) == affinity.Cores((4, 5, 6, 7), 4)
    assert take_cores(1, 2, divide=False) == affinity.Cores(tuple(range(8)), 8)
