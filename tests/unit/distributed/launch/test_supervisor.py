"""The parent of a job, with processes that play launchers and ranks."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from processes import program_environment

from caffepy.distributed.launch import supervisor
from caffepy.distributed.launch.supervisor import Command, ExitReport, Supervisor, shell_status


def shell(text: str) -> Command:
    return Command(["/bin/sh", "-c", text], dict(os.environ))


class Ranks:
    """Takes what a supervisor delivers."""

    def __init__(self, ready_after: int = 0, act: Callable[[int], object] = lambda number: None) -> None:
        self.got: list[int] = []
        self.asked = 0
        self._ready_after = ready_after
        self._act = act

    def __call__(self, number: int) -> bool:
        self.asked += 1
        if self.asked <= self._ready_after:
            return False
        self.got.append(number)
        self._act(number)
        return True


def flagging(flag: Path, count: int = 1, **settings: int) -> Ranks:
    """Ranks that make a file when they have got so many signals."""
    ranks = Ranks(act=lambda number: flag.touch() if len(ranks.got) >= count else None, **settings)
    return ranks


def until(flag: Path) -> str:
    """What a shell does until the file is there."""
    return f"while [ ! -e '{flag}' ]; do sleep 0.02; done"


def signals_after(*moments: tuple[float, int]) -> threading.Thread:
    """Send this process signals, each so many seconds after the one before."""

    def send() -> None:
        for seconds, number in moments:
            time.sleep(seconds)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


def run(ranks: Ranks, *commands: Command, signals: tuple[tuple[float, int], ...] = (), **options: bool) -> ExitReport:
    parent = Supervisor(ranks, **options)  # type: ignore[arg-type]
    with parent.signals():
        sender = signals_after(*signals)
        ending = parent.run(commands)
        sender.join()
    return ending


@pytest.mark.parametrize(
    ("text", "ending"),
    [
        ("true", ExitReport(0)),
        ("exit 3", ExitReport(3)),
        ("kill -9 $$", ExitReport(137)),
        ("echo 'caffepy: error: no such file' >&2; exit 2", ExitReport(2, "no such file")),
        (
            "echo 'E1122 08:33:01.919039  4905 failures.py:12] [rank 0] rank 1 ended' >&2; "
            "echo 'caffepy: error: another' >&2; exit 1",
            ExitReport(1, "rank 1 ended"),
        ),
        ("printf 'caffepy: error: cut off' >&2; exit 1", ExitReport(1, "cut off")),
    ],
)
def test_how_a_process_ended(text: str, ending: ExitReport, capfd: pytest.CaptureFixture[str]) -> None:
    assert run(Ranks(), shell(text)) == ending
    if ending.error:
        assert ending.error in capfd.readouterr().err  # handed on


def test_signals_reach_the_ranks_and_not_the_launcher(tmp_path: Path) -> None:
    """The launcher ends when its ranks have: by itself, because it has heard of no signal."""
    marker = signal.SIGTERM
    ranks = flagging(tmp_path / "got", ready_after=2)
    text = f"trap 'exit 9' INT TERM HUP; {until(tmp_path / 'got')}; exit 0"
    ending = run(ranks, shell(text), signals=((0.1, marker),))
    assert ending == ExitReport(0, stopped=True)
    assert ranks.got == [marker] and ranks.asked == 3  # two attempts came before there were ranks


def test_sighup_asks_for_a_snapshot_and_stops_nothing(tmp_path: Path) -> None:
    ranks = flagging(tmp_path / "got")
    assert run(ranks, shell(until(tmp_path / "got")), signals=((0.1, signal.SIGHUP),)) == ExitReport(0)
    assert ranks.got == [signal.SIGHUP]


def test_where_ctrl_c_asks_for_a_snapshot_it_may_come_often(tmp_path: Path) -> None:
    ranks = flagging(tmp_path / "got", 2)
    twice = ((0.1, signal.SIGINT), (0.2, signal.SIGINT))
    assert run(ranks, shell(until(tmp_path / "got")), signals=twice, interrupt_stops=False) == ExitReport(0)
    assert ranks.got == [signal.SIGINT] * 2


def test_a_second_ctrl_c_ends_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in ("_AGAIN_SECONDS", "_TERM_SECONDS", "_DRAIN_SECONDS"):
        monkeypatch.setattr(supervisor, patience, 0.2)
    begin = time.monotonic()
    ranks = Ranks()
    twice = ((0.1, signal.SIGINT), (0.2, signal.SIGINT))
    ending = run(ranks, shell("trap '' INT TERM; sleep 600 & wait; sleep 600"), signals=twice)
    assert ending.status == 130 and ending.stopped
    assert time.monotonic() - begin < 300
    assert ranks.got == [signal.SIGINT] * 2


def test_a_launcher_whose_ranks_never_come_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "_START_SECONDS", 0.2)
    ending = run(Ranks(ready_after=1000), shell("exec sleep 600"), signals=((0.1, signal.SIGTERM),))
    assert ending == ExitReport(143, stopped=True)


def test_where_one_process_fails_the_others_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "END_SECONDS", 0.2)
    begin = time.monotonic()
    assert run(Ranks(), shell("exec sleep 600"), shell("exit 5")).status == 5
    assert time.monotonic() - begin < 300


def test_what_is_left_of_a_failed_job_is_cleared() -> None:
    cleared: list[bool] = []
    parent = Supervisor(lambda number: True, lambda: cleared.append(True) or 1)
    assert parent.run([shell("exit 1")]).status == 1
    assert cleared == [True]
    assert parent.run([shell("true")]).status == 0
    assert cleared == [True]


def test_a_program_that_cannot_be_started() -> None:
    with pytest.raises(FileNotFoundError, match="nowhere"):
        Supervisor(lambda number: True).run([Command(["/nowhere/mpirun"], {})])


def test_a_pause_ends_with_a_signal() -> None:
    parent = Supervisor(lambda number: True)
    with parent.signals():
        sender = signals_after((0.1, signal.SIGTERM))
        begin = time.monotonic()
        parent.pause(600)
        sender.join()
    assert parent.stopping and time.monotonic() - begin < 300


@pytest.mark.parametrize("last_signal", [signal.SIGTERM, signal.SIGKILL])
def test_nobody_outlives_the_parent(tmp_path: Path, last_signal: int) -> None:
    program = f"""
        import os
        from caffepy.distributed.launch.supervisor import Command
        from caffepy.distributed.launch.supervisor import Supervisor
        line = ["/bin/sh", "-c", "echo $$ > pid.new; mv pid.new pid; exec sleep 600"]
        Supervisor(lambda number: True).run([Command(line, dict(os.environ), {int(last_signal)})])
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program)], cwd=tmp_path, env=program_environment({})
    )
    try:
        wait_until((tmp_path / "pid").exists)
        child = psutil.Process(int((tmp_path / "pid").read_text()))
    finally:
        parent.kill()
        parent.wait()
    wait_until(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE)


def wait_until(come: Callable[[], bool], seconds: float = 300.0) -> None:
    end = time.monotonic() + seconds
    while not come():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_statuses_are_a_shells() -> None:
    assert [shell_status(code) for code in (0, 1, -9, -15)] == [0, 1, 137, 143]
