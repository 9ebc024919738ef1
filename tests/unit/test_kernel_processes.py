"""Kernels that other processes compile are waited for, as long as somebody works on them and no longer."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from caffepy.phases import kernel_processes
from caffepy.phases.kernel_processes import KernelProcesses

LONG = 300.0
"""Seconds: less than a wait that is given up lasts, and more than anything else takes on a loaded machine."""
SLEEP = "import time; time.sleep(600)"


def program(*lines: str) -> list[str]:
    """A program that reads its input and then does some lines."""
    return [sys.executable, "-I", "-S", "-c", "\n".join(("import sys", "nets = sys.stdin.read()", *lines))]


def say(*lines: str) -> str:
    return "; ".join(f"print({line!r}, flush=True)" for line in lines)


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[KernelProcesses]:
    monkeypatch.setattr(kernel_processes, "WAIT", 2 * LONG)
    monkeypatch.setattr(kernel_processes, "NAMES_WAIT", 2 * LONG)
    made = KernelProcesses()
    yield made
    made.close()


def started(processes: KernelProcesses, *lines: str) -> KernelProcesses:
    processes.start(program(*lines))
    processes.foresee("net")
    processes.submit()
    return processes


def seconds(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def wait_until(condition: Callable[[], object]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_kernel_is_waited_for_until_it_is_done(processes: KernelProcesses, tmp_path: Path):
    flag = tmp_path / "flag"
    slow = f"import os, time\nwhile not os.path.exists({str(flag)!r}): time.sleep(0.01)"
    started(processes, say("list a b", "done a"), slow, say("done b"), SLEEP)
    processes.wait("a")
    waiting = threading.Thread(target=processes.wait, args=("b",))
    waiting.start()
    waiting.join(0.2)
    assert waiting.is_alive()
    flag.touch()
    waiting.join(300)
    assert not waiting.is_alive()


def test_the_program_is_told_about_the_nets(processes: KernelProcesses, tmp_path: Path):
    told = tmp_path / "told"
    processes.start(program(f"open({str(told)!r}, 'w').write(nets)", say("list a", "done a")))
    processes.foresee("first")
    processes.foresee("second")
    assert processes.wanted
    processes.submit()
    processes.wait("a")
    assert told.read_text() == "first\nsecond\n"
    assert not processes.wanted


@pytest.mark.parametrize(
    "lines", [(say("list a"),), (say("list a"), "import os; os.kill(os.getpid(), 9)"), ("raise SystemExit(3)",), ("?",)]
)
def test_nobody_waits_for_a_program_that_has_ended(processes: KernelProcesses, lines: tuple[str, ...]):
    started(processes, *lines)
    assert seconds(lambda: processes.wait("a")) < LONG
    assert seconds(lambda: processes.wait("a")) < LONG


def test_nobody_waits_for_kernels_that_are_not_its_own(processes: KernelProcesses):
    started(processes, say("list a b"), SLEEP)
    assert seconds(lambda: processes.wait("c")) < LONG
    assert seconds(lambda: processes.wait("c")) < LONG


def test_every_wait_has_an_end(processes: KernelProcesses, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(kernel_processes, "WAIT", 0.2)
    monkeypatch.setattr(kernel_processes, "NAMES_WAIT", 0.2)
    started(processes, SLEEP)
    assert 0.2 <= seconds(lambda: processes.wait("a")) < LONG
    processes._note("list a\n")
    assert 0.2 <= seconds(lambda: processes.wait("a")) < LONG


def test_nobody_waits_before_the_nets_are_described(processes: KernelProcesses):
    processes.start(program(SLEEP))
    assert seconds(lambda: processes.wait("a")) < LONG


def test_a_program_that_cannot_be_started_is_no_fault(processes: KernelProcesses, tmp_path: Path):
    processes.start([str(tmp_path / "absent")])
    processes.submit()
    assert seconds(lambda: processes.wait("a")) < LONG


def test_where_it_may_be_started_a_missing_kernel_starts_it(processes: KernelProcesses, tmp_path: Path):
    told = tmp_path / "told"
    processes.missed()
    processes.allow(program(f"open({str(told)!r}, 'w').close()", say("list a", "done a")))
    processes.missed()
    processes.foresee("net")
    assert processes._process is None
    processes.submit()
    processes.missed()
    processes.missed()
    assert seconds(lambda: processes.wait("a")) < LONG, "who compiles himself does not wait for names"
    wait_until(told.exists)


def test_without_nets_nothing_is_started(processes: KernelProcesses):
    processes.allow(program())
    processes.submit()
    processes.missed()
    assert processes._process is None


def test_its_end_ends_the_processes_that_it_has_forked(processes: KernelProcesses, tmp_path: Path):
    numbers = tmp_path / "numbers"
    fork = f"import os\nos.fork()\nopen({str(numbers)!r}, 'a').write(f'{{os.getpid()}} ')"
    started(processes, fork, SLEEP)
    wait_until(lambda: numbers.exists() and len(numbers.read_text().split()) == 2)
    processes.close()
    for number in map(int, numbers.read_text().split()):
        wait_until(lambda number=number: _has_ended(number))


def _has_ended(number: int) -> bool:
    try:
        os.kill(number, 0)
        return "Z" in Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except (ProcessLookupError, FileNotFoundError):
        return True


def test_without_a_thread_for_it_there_is_no_program(processes: KernelProcesses, monkeypatch: pytest.MonkeyPatch):
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        started(processes, say("list a"), SLEEP)
    assert seconds(lambda: processes.wait("a")) < LONG
    assert processes._process is not None
    assert processes._process.wait(300)
    processes.close()
