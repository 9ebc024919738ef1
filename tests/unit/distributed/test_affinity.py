from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.distributed.placement import Cores, bind_near_gpu, cores_near, format_cores, parse_cores, share, take_cores


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
    files, read = {"cpu.max": "400000 100000\n"}, Path.read_text
    monkeypatch.setattr(Path, "read_text", lambda path: files[path.name] if path.name in files else read(path))
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(8)), raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda thread, cores: None, raising=False)
    assert take_cores(1, 2, divide=True) == Cores(tuple(range(8)), 2)
    files["cpu.max"] = "max 100000\n"
    assert take_cores(1, 2, divide=True) == Cores((4, 5, 6, 7), 4)
    assert take_cores(1, 2, divide=False) == Cores(tuple(range(8)), 8)


def linux(folder: Path, near: str) -> Path:
    """What Linux shows of a GPU and the cores near it."""
    device = folder / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "local_cpulist").write_text(f"{near}\n")
    return folder


def test_cores_near_a_gpu(tmp_path: Path) -> None:
    system = linux(tmp_path, "0-1,63-64,130")
    assert cores_near("0000:1B:00.0", system) == (0, 1, 63, 64, 130)
    assert cores_near("0000:99:00.0", system) == ()


def in_thread(system: Path) -> tuple[tuple[int, ...], set[int]]:
    """What a thread was bound to, and what it may use then."""
    found: list[Any] = []

    def run() -> None:
        found.append(bind_near_gpu("0000:1B:00.0", "0", system))
        found.append(os.sched_getaffinity(0))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join(300)
    return found[0], found[1]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
def test_a_thread_stays_near_its_gpu(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("INFO", "caffepy")
    before = os.sched_getaffinity(0)
    first = min(before)
    assert in_thread(linux(tmp_path, f"{first},1000")) == ((first,), {first})
    assert os.sched_getaffinity(0) == before
    assert f"GPU 0 (0000:1B:00.0): its thread runs on the CPU cores near it, {first}" in caplog.text


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs Linux")
@pytest.mark.parametrize("near", ["", "1000-1001"], ids=["unknown", "not allowed"])
def test_a_thread_whose_gpu_has_no_core_to_use_stays_free(near: str, tmp_path: Path) -> None:
    assert in_thread(linux(tmp_path, near)) == ((), os.sched_getaffinity(0))


def test_where_linux_does_not_say_nothing_is_bound(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level("DEBUG", "caffepy")
    assert bind_near_gpu("0000:1B:00.0", "0", tmp_path) == ()
    assert "its thread is not bound; cores near it: ?" in caplog.text
