"""Process groups of real processes: every operation against NumPy, and every way in which a rank can fall out."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from laboratory import LIMIT, REPOSITORY, find_mpirun, program_environment

PROGRAM = Path(__file__).with_name("distributed_program.py")
RANKS = 3


@dataclass
class Ended:
    """How processes ended: their exit statuses, what they wrote, and when the last was gone."""

    statuses: list[int]
    log: str
    seconds_after_fault: float


def environment(**changes: str) -> dict[str, str]:
    found = program_environment(changes)
    found["PYTHONPATH"] = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "tests"), found["PYTHONPATH"]))
    return found


def run(commands: list[tuple[list[str], dict[str, str]]], folder: Path, timeout: float = 60.0) -> Ended:
    """Run commands at the same time; what still runs after the timeout is killed and fails the test."""
    logs = [folder / f"log{i}.txt" for i in range(len(commands))]
    processes = []
    for log, (command, variables) in zip(logs, commands, strict=True):
        with log.open("wb") as file:
            processes.append(
                subprocess.Popen(
                    command, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file, start_new_session=True
                )
            )
    deadline = time.monotonic() + timeout
    late = False
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            late = True
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    ended = time.time()
    text = "\n".join(log.read_text(errors="replace") for log in logs)
    assert not late, f"still running after {timeout} s:\n{text}"
    fault = re.search(r"fault at (\d+\.\d+)", text)
    return Ended([process.returncode for process in processes], text, ended - float(fault[1]) if fault else 0.0)


def with_mpirun(folder: Path, *action: str, ranks: int = 2, **variables: str) -> Ended:
    command = [find_mpirun(), "-np", str(ranks), sys.executable, str(PROGRAM), *action]
    return run([(command, environment(**variables))], folder)


def by_hand(folder: Path, *action: str, ranks: int = RANKS, **variables: str) -> Ended:
    """As many processes as ranks, which nothing but the environment tells of each other."""
    return run(
        [
            (
                [sys.executable, str(PROGRAM), *action],
                environment(RANK=str(rank), WORLD_SIZE=str(ranks), **variables),
            )
            for rank in range(ranks)
        ],
        folder,
    )


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def assert_checked(ended: Ended, ranks: int, backend: str) -> None:
    assert set(ended.statuses) == {0}, ended.log
    found = re.findall(rf"rank (\d) of {ranks} over {backend}: (\d+) checks", ended.log)
    assert sorted(rank for rank, _ in found) == [str(rank) for rank in range(ranks)], ended.log
    assert all(int(checks) > 500 for _, checks in found)


@pytest.mark.mpi
def test_every_operation_over_mpi(tmp_path: Path) -> None:
    assert_checked(with_mpirun(tmp_path, "check"), 2, "mpi")


@pytest.mark.mpi
@pytest.mark.slow
def test_every_operation_over_mpi_with_three_ranks(tmp_path: Path) -> None:
    assert_checked(with_mpirun(tmp_path, "check", ranks=3), 3, "mpi")


@pytest.mark.mpi
def test_tcp_under_mpirun(tmp_path: Path) -> None:
    assert_checked(with_mpirun(tmp_path, "check", BACKEND="tcp"), 2, "tcp")


@pytest.mark.parametrize("method", ["tcp", "env", "file"])
def test_every_operation_without_mpi(tmp_path: Path, method: str) -> None:
    port = str(free_port())
    variables = {
        "tcp": {"INIT": f"tcp://127.0.0.1:{port}"},
        "env": {"MASTER_ADDR": "localhost", "MASTER_PORT": port},
        "file": {"INIT": f"file://{tmp_path}/meet"},
    }[method]
    assert_checked(by_hand(tmp_path, "check", **variables), RANKS, "tcp")
    assert not (tmp_path / "meet").exists()


FAULTS = {
    "kill": "ended unexpectedly: it was killed",
    "raise": "ValueError: injected",
    "exit": "left",
    "leave": "left",
    "sleep": "which has begun 3 of 4 collectives and waits for nobody",
    "differ": "calls 'broadcast from rank 0 of 3 float64'",
    "size": "calls 'all_reduce SUM of 5 float32'",
}
"""What the others say of the victim, by what it did."""


def assert_blamed(ended: Ended, action: str, victim: int, others: tuple[int, ...]) -> None:
    """Each of the others ended soon, with one error that names the victim."""
    name = rf"rank {victim}( on \S+ \(process \d+\))?"
    for rank in others:
        own = rf"(PeerError|UserError): rank {rank} on \S+ \(process \d+\): all_reduce (SUM|MAX) of 4 float32: "
        assert re.search(rf"{own}.*{name}.*{FAULTS[action]}", ended.log), ended.log
    assert ended.seconds_after_fault < LIMIT


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("action", ["kill", "raise", "exit", "sleep"])
def test_a_rank_that_falls_out_ends_the_others_waits(tmp_path: Path, action: str, victim: int) -> None:
    ended = by_hand(tmp_path, action, str(victim), INIT=f"file://{tmp_path}/meet", TIMEOUT="2")
    others = tuple(rank for rank in range(RANKS) if rank != victim)
    assert all(ended.statuses[rank] == 1 for rank in others), ended.log
    assert_blamed(ended, action, victim, others)


@pytest.mark.parametrize("action", ["leave", "differ", "size"])
def test_a_rank_that_does_something_else_is_named(tmp_path: Path, action: str) -> None:
    ended = by_hand(tmp_path, action, "1", INIT=f"file://{tmp_path}/meet", TIMEOUT="5")
    assert ended.statuses[0] == ended.statuses[2] == 1, ended.log
    assert_blamed(ended, action, 1, (0, 2))


@pytest.mark.mpi
@pytest.mark.parametrize("victim", [1])
@pytest.mark.parametrize("action", ["kill", "raise", "exit", "sleep"])
def test_a_rank_of_mpirun_that_falls_out_ends_all(tmp_path: Path, action: str, victim: int) -> None:
    ended = with_mpirun(tmp_path, action, str(victim), TIMEOUT="3")
    assert ended.statuses[0] != 0, ended.log
    assert_blamed(ended, action, victim, (1 - victim,))


def test_a_rank_that_never_comes_is_named(tmp_path: Path) -> None:
    variables = environment(RANK="0", WORLD_SIZE="2", INIT=f"file://{tmp_path}/meet", TIMEOUT="1")
    ended = run([([sys.executable, str(PROGRAM), "check"], variables)], tmp_path)
    assert ended.statuses == [1]
    assert re.search(
        r"PeerError: rank 0 on \S+ .*: init_process_group at file://\S+: has waited 1 s for rank 1 to join", ended.log
    )


def test_an_mpi_group_without_mpirun_is_refused(tmp_path: Path) -> None:
    variables = environment(RANK="0", WORLD_SIZE="2", INIT=f"file://{tmp_path}/meet", BACKEND="mpi", TIMEOUT="20")
    second = {**variables, "RANK": "1"}
    ended = run([([sys.executable, str(PROGRAM), "check"], each) for each in (variables, second)], tmp_path)
    assert ended.statuses == [1, 1]
    assert len(re.findall(r"UserError: rank \d .*: init_process_group: backend 'mpi' needs mpirun", ended.log)) >= 1
