from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

from caffepy.distributed.launch.run import MARK, Process, find_processes, main, ranks_among, send, sending_command


def write(system: Path, pid: int, parent: int, **environment: str) -> None:
    folder = system / str(pid)
    folder.mkdir()
    (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environment.items()))
    (folder / "stat").write_text(f"{pid} (a) b ) c) S {parent} 1 1\n")


def test_ranks_are_told_from_launchers_and_from_what_ranks_start(tmp_path: Path) -> None:
    mine = {MARK: "mark"}
    write(tmp_path, 10, 1, **mine)  # mpirun
    write(tmp_path, 12, 10, **mine, PMI_RANK="1")
    write(tmp_path, 11, 10, **mine, PMI_RANK="0")
    write(tmp_path, 13, 12, **mine, PMI_RANK="1")  # a process that rank 1 has started
    write(tmp_path, 14, 1, **{MARK: "another"}, PMI_RANK="0")
    write(tmp_path, 15, 1, PMI_RANK="0")
    write(tmp_path, os.getpid(), 1, **mine, PMI_RANK="0")
    (tmp_path / "16").mkdir()  # it has just ended
    found = find_processes("mark", "PMI_RANK", tmp_path)
    assert sorted(each.pid for each in found) == [10, 11, 12, 13]
    assert ranks_among(found) == [Process(11, 10, 0), Process(12, 10, 1)]
    assert not ranks_among(find_processes("mark", "OMPI_COMM_WORLD_RANK", tmp_path))


def start(mark: str, rank: int | None) -> subprocess.Popen[bytes]:
    environment = {**os.environ, MARK: mark, **({} if rank is None else {"RANK": str(rank)})}
    return subprocess.Popen(["sleep", "60"], env=environment)


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_who_gets_a_signal() -> None:
    mark = f"test {os.getpid()}"
    launcher, *ranks = processes = [start(mark, rank) for rank in (None, 1, 0)]
    wait_until(lambda: len(find_processes(mark, "RANK")) == 3)  # before its exec a process has our environment
    try:
        assert send(signal.SIGTERM, mark, "RANK", "one") == 1
        assert ranks[1].wait(300) == -signal.SIGTERM and ranks[0].poll() is None
        assert send(signal.SIGINT, mark, "RANK", "all") == 1
        assert ranks[0].wait(300) == -signal.SIGINT and launcher.poll() is None
        assert send(signal.SIGTERM, mark, "RANK", "all") == 0
        line = sending_command(signal.SIGTERM, mark, "RANK", "all")
        assert line[1:4] == ["-m", "caffepy.distributed.launch.run", "15"]
        assert subprocess.run(line, timeout=300).returncode == 1  # nobody got it
        assert main(sending_command(signal.SIGKILL, mark, "RANK", "every")[3:]) == 0
        assert launcher.wait(300) == -signal.SIGKILL
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_one_who_is_stopped_gets_no_signal_for_all() -> None:
    mark = f"stopped {os.getpid()}"
    ranks = [start(mark, rank) for rank in (0, 1)]
    try:
        ranks[0].send_signal(signal.SIGSTOP)
        wait_until(lambda: [each.stopped for each in ranks_among(find_processes(mark, "RANK"))] == [True, False])
        assert send(signal.SIGTERM, mark, "RANK", "one") == 1
        assert ranks[1].wait(60) == -signal.SIGTERM
        assert send(signal.SIGTERM, mark, "RANK", "one") == 0  # it is tried again until one goes on
        ranks[0].send_signal(signal.SIGCONT)
        wait_until(lambda: send(signal.SIGTERM, mark, "RANK", "one") == 1)
        assert ranks[0].wait(60) == -signal.SIGTERM
    finally:
        for process in ranks:
            process.kill()
            process.wait()
