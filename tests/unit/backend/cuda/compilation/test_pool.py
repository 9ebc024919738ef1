"""Processes that compile ahead: what they make, what happens when they cannot, and that none is left."""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ANSWERING = """
import sys, time
while key := sys.stdin.buffer.readline().decode().strip():
    options, size = sys.stdin.buffer.readline(), int(sys.stdin.buffer.readline())
    text = sys.stdin.buffer.read(size).decode()
    if text == "die":
        sys.exit(1)
    time.sleep(float(text))
    print(f"{key} of {options.decode().strip()}", flush=True)
"""


@pytest.fixture
def pool(cupy_or_mock: None) -> Any:
    """The module."""
    return importlib.import_module("caffepy.backend.cuda.compilation.pool")


@pytest.fixture
def made(pool: Any) -> Iterator[list[Any]]:
    """Pools that are closed afterwards."""
    pools: list[Any] = []
    yield pools
    for one in pools:
        one.close()


def start(pool: Any, made: list[Any], most: int = 2, command: list[str] | None = None) -> Any:
    made.append(pool.Pool(command or [sys.executable, "-I", "-S", "-c", ANSWERING], most))
    return made[-1]


def job(pool: Any, key: str, text: str) -> Any:
    return pool.Job(key, text.encode(), ("-a", "-b"))


def wait_until(condition: Any, seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it did not come"
        time.sleep(0.005)


def gone(process: Any) -> bool:
    return process.poll() is not None


def test_results_come_from_the_processes(pool: Any, made: list[Any]) -> None:
    several = start(pool, made)
    jobs = [job(pool, str(number), "0") for number in range(6)]
    for one in jobs:
        several.add(one)
    wait_until(lambda: all(one.done.is_set() for one in jobs))
    assert [several.result(one.key) for one in jobs] == [f"{number} of -a -b" for number in range(6)]
    assert several.result("never added") == ""


def test_who_needs_what_is_being_compiled_waits_for_it(pool: Any, made: list[Any]) -> None:
    one = start(pool, made, most=1)
    long, behind = job(pool, "long", "0.3"), job(pool, "behind", "0.1")
    one.add(long)
    wait_until(lambda: not one._waiting)
    one.add(behind)
    assert one.result("behind") == "", "nobody has begun it: whoever needs it compiles it"
    assert one.result("long") == "long of -a -b"


def test_a_wait_ends(pool: Any, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "WAIT", 0.05)
    one = start(pool, made, most=1)
    one.add(job(pool, "endless", "600"))
    wait_until(lambda: not one._waiting)
    assert one.result("endless") == ""


def test_a_process_that_ends_leaves_the_rest_to_who_needs_it(pool: Any, made: list[Any]) -> None:
    one = start(pool, made, most=1)
    fatal, behind = job(pool, "fatal", "die"), job(pool, "behind", "0")
    one.add(fatal)
    one.add(behind)
    assert fatal.done.wait(300.0)
    assert behind.done.wait(300.0)
    assert (one.result("fatal"), one.result("behind")) == ("", "")
    wait_until(lambda: not one._processes)


@pytest.mark.parametrize(("command", "most"), [(["/no/such/program"], 2), ([], 0)])
def test_without_processes_there_are_no_results(pool: Any, made: list[Any], command: list[str], most: int) -> None:
    none = start(pool, made, most, command or ["x"])
    wanted = job(pool, "wanted", "0")
    none.add(wanted)
    assert most == 0 or wanted.done.wait(300.0)
    assert none.result("wanted") == ""


def test_processes_without_work_end(pool: Any, made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "IDLE", 0.05)
    one = start(pool, made)
    one.add(job(pool, "only", "0"))
    assert one.result("only") in ("", "only of -a -b")
    wait_until(lambda: not one._processes and not one._threads)
    one.add(job(pool, "later", "0.1"))
    wait_until(lambda: not one._waiting)
    assert one.result("later") == "later of -a -b"


def test_closing_ends_processes_that_work(pool: Any, made: list[Any]) -> None:
    several = start(pool, made)
    jobs = [job(pool, str(number), "600") for number in range(3)]
    for one in jobs:
        several.add(one)
    wait_until(lambda: len(several._processes) == 2)
    processes = list(several._processes)
    several.close()
    assert all(gone(process) for process in processes)
    assert all(one.done.wait(300.0) and one.made == "" for one in jobs)
    several.add(job(pool, "after", "0"))
    assert several.result("after") == ""


def test_the_number_of_processes_follows_the_cores(pool: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for cores, expected in ((1, 0), (2, 1), (9, 8), (64, 8)):
        monkeypatch.setattr(pool.os, "sched_getaffinity", lambda _, n=cores: set(range(n)))
        assert pool.most_processes() == expected


def test_worker_is_a_program_of_its_own(pool: Any) -> None:
    worker = Path(pool.__file__).with_name("worker.py")
    assert pool.worker_command(str(worker), "libnvrtc.so", "folder")[1:] == [
        "-I",
        "-S",
        str(worker),
        "libnvrtc.so",
        "folder",
    ]
    imported = {line.split()[1] for line in worker.read_text().splitlines() if line.startswith(("import ", "from "))}
    assert imported <= set(sys.stdlib_module_names)
