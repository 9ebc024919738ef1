"""Autotuning's memory: kept in a file, shared by threads, never a reason to fail."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from caffepy.backend.cuda_decisions import Decision, Decisions, cache_file


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "caffepy" / "autotune.json"


def test_what_was_decided_outlives_the_process(path: Path) -> None:
    Decisions(path).put("task", Decision("cuDNN eng1", 12.5))
    assert Decisions(path).get("task") == Decision("cuDNN eng1", 12.5)
    assert Decisions(path).get("other") is None
    assert [p.name for p in path.parent.iterdir()] == [path.name], "no temporary file is left"


def test_what_other_processes_wrote_is_kept(path: Path) -> None:
    first, second = Decisions(path), Decisions(path)
    first.put("a", Decision("x", 1.0))
    second.put("b", Decision("y", 2.0))
    assert Decisions(path).get("a") == Decision("x", 1.0)
    assert Decisions(path).get("b") == Decision("y", 2.0)


@pytest.mark.parametrize("text", ["", "[1, 2", "[]", "3", '{"task": 5}', '{"task": [7, 1.0]}', '{"task": ["a", "b"]}'])
def test_a_foreign_file_is_ignored(path: Path, text: str, caplog: pytest.LogCaptureFixture) -> None:
    path.parent.mkdir()
    path.write_text(text)
    with caplog.at_level(logging.WARNING):
        known = Decisions(path)
    assert known.get("task") is None
    assert "not a file of autotuning decisions" in caplog.text
    known.put("task", Decision("x", 1.0))
    assert Decisions(path).get("task") == Decision("x", 1.0)


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


def test_the_file_is_in_the_cache_folder() -> None:
    assert cache_file({"XDG_CACHE_HOME": "/caches"}).parent == Path("/caches/caffepy")
    assert cache_file({}).parent == Path.home() / ".cache" / "caffepy"


def test_without_a_file_decisions_hold_for_the_process() -> None:
    known = Decisions(None)
    known.put("task", Decision("x", 1.0))
    assert known.get("task") == Decision("x", 1.0)
