"""Autotuning's memory: kept in a file, shared by threads, never a reason to fail."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from caffepy.backend.cuda.convolution.cache import Decision, Decisions, cache_file, decisions


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "caffepy" / "autotune.json"


def test_what_was_decided_outlives_the_process(path: Path) -> None:
    Decisions(path).put("task", Decision("cuDNN eng1", 12.5))
    assert Decisions(path).get("task") == Decision("cuDNN eng1", 12.5)
    assert Decisions(path).get("other") is None
    left = sorted(p.name for p in path.parent.iterdir())
    assert left == [path.name, f"{path.name}.lock"], "no temporary file is left"


def test_threads_that_come_at_the_same_time_share_one_object(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of their own would not keep them from looking into one task at once, and deciding differently."""
    began = threading.Barrier(4)

    def read(_: Decisions) -> dict[str, Decision]:
        time.sleep(0.2)
        return {}

    def get(_: int) -> Decisions:
        began.wait(300)
        return decisions(path)

    monkeypatch.setattr(Decisions, "_read", read)
    with ThreadPoolExecutor(4) as threads:
        assert len(set(map(id, threads.map(get, range(4))))) == 1


def test_what_other_processes_wrote_is_kept(path: Path) -> None:
    first, second = Decisions(path), Decisions(path)
    first.put("a", Decision("x", 1.0))
    second.put("b", Decision("y", 2.0))
    assert Decisions(path).get("a") == Decision("x", 1.0)
    assert Decisions(path).get("b") == Decision("y", 2.0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1, 2",
        "[]",
        "3",
        '{"task": 5}',
        '{"task": [7, 1.0]}',
        '{"task": ["a", "b"]}',
        "[" * 100_000,
        '{"task": ["a", 1' + "0" * 400 + "]}",
    ],
)
def test_a_foreign_file_is_ignored(path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        known = Decisions(path)
    assert known.get("task") is None
    assert "not a file of autotuning decisions" in caplog.text
    known.put("task", Decision("x", 1.0))
    assert Decisions(path).get("task") == Decision("x", 1.0)


def test_a_link_at_a_temporary_name_is_not_followed(path: Path) -> None:
    path.parent.mkdir()
    other = path.with_name("other")
    path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}").symlink_to(other)
    Decisions(path).put("task", Decision("x", 1.0))
    assert Decisions(path).get("task") == Decision("x", 1.0)
    assert not other.exists()


def test_a_device_is_not_read(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert Decisions(Path("/dev/zero")).get("task") is None
    assert "it is a device, not a regular file" in caplog.text


def test_a_folder_that_cannot_be_written_is_no_reason_to_stop(tmp_path: Path) -> None:
    (tmp_path / "caffepy").write_text("a file where the folder should be")
    known = Decisions(tmp_path / "caffepy" / "autotune.json")
    known.put("task", Decision("x", 1.0))
    assert known.get("task") == Decision("x", 1.0)


def test_one_thread_at_a_time_looks_into_a_task(path: Path) -> None:
    known, tried = Decisions(path), []
    together = threading.Barrier(4)

    def look() -> None:
        together.wait()
        with known.turn("task"):
            if known.get("task") is None:
                tried.append(threading.get_ident())
                known.put("task", Decision("x", 1.0))

    threads = [threading.Thread(target=look) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tried) == 1


def test_what_came_into_the_file_first_holds(path: Path) -> None:
    """Two that have looked all the same, because one waited for too long."""
    first, second = Decisions(path), Decisions(path)
    assert first.put("task", Decision("x", 2.0)).name == "x"
    assert second.put("task", Decision("y", 1.0)).name == "x"
    assert second.get("task") == Decision("x", 2.0)
    assert Decisions(path).get("task") == Decision("x", 2.0)


def test_a_decision_on_what_is_not_there_any_more_is_replaced_once(path: Path) -> None:
    Decisions(path).put("task", Decision("gone", 1.25))
    first, second = Decisions(path), Decisions(path)
    assert first.put("task", Decision("x", 2.0), instead="gone").name == "x"
    assert second.put("task", Decision("y", 2.0), instead="gone").name == "x"
    assert first.get("task") == second.get("task") == Decision("x", 2.0)


def test_a_passing_decision_holds_for_all_threads_of_its_process_alone(path: Path) -> None:
    known = Decisions(path)
    assert known.put("task", Decision("x", 1.0), lasting=False).name == "x"
    assert known.put("task", Decision("y", 1.0), lasting=False).name == "x"
    assert known.get("task") == Decision("x", 1.0)
    assert Decisions(path).get("task") is None


RANK = """
import sys, time
from pathlib import Path
from caffepy.backend.cuda.convolution import cache as cuda_decisions
from caffepy.backend.cuda.convolution.cache import Decision, Decisions

path, rank, wait = Path(sys.argv[1]), sys.argv[2], float(sys.argv[3])
cuda_decisions.WAIT = wait
known = Decisions(path)
print("ready", flush=True)
sys.stdin.readline()
for task in range(6):
    with known.turn(f"task {task}"):
        if known.get(f"task {task}") is None:
            time.sleep(0.05)  # trying takes its time
            print("tried", task, flush=True)
            known.put(f"task {task}", Decision(f"candidate {rank}", 1.0))
    print("uses", task, known.get(f"task {task}").name, flush=True)
"""
"""A rank whose device finds another candidate to be the fastest than any other rank's."""


@pytest.mark.parametrize("wait", [60.0, 0.0])
def test_ranks_of_a_machine_decide_alike_at_their_first_run(path: Path, wait: float) -> None:
    """Also where ranks that wait for too long look for themselves."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(path), str(rank), str(wait)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(3)
    ]
    for rank in ranks:
        assert rank.stdout is not None and rank.stdout.readline() == "ready\n"
    said = []
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write("\n")
        rank.stdin.flush()
    for rank in ranks:
        said.append(rank.communicate(timeout=300)[0].splitlines())
        assert rank.returncode == 0
    used = [[line for line in lines if line.startswith("uses")] for lines in said]
    assert used[0] == used[1] == used[2] and len(used[0]) == 6
    found = Decisions(path)
    assert [f"uses {task} {found.get(f'task {task}').name}" for task in range(6)] == used[0]  # type: ignore[union-attr]
    tried = [line for lines in said for line in lines if line.startswith("tried")]
    assert (len(tried) == 6) if wait else (len(tried) >= 6)


def test_the_file_is_in_the_cache_folder() -> None:
    assert cache_file({"XDG_CACHE_HOME": "/caches"}).parent == Path("/caches/caffepy")
    assert cache_file({}).parent == Path.home() / ".cache" / "caffepy"


def test_without_a_file_decisions_hold_for_the_process() -> None:
    known = Decisions(None)
    known.put("task", Decision("x", 1.0))
    assert known.get("task") == Decision("x", 1.0)
