"""Process groups of real processes: every operation against NumPy, and every way in which a rank can fall out."""

from __future__ import annotations

import re
import socket
import sys
from pathlib import Path

import pytest
from fault_case import FaultCase, Trials, parameters
from group_faults import GROUP_FAULTS, PROGRAM, RANKS, Ended, by_hand, environment, run, with_mpirun


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


@pytest.mark.parametrize("case", parameters(GROUP_FAULTS))
def test_a_rank_that_falls_out_ends_the_others_waits(trials: Trials, case: FaultCase) -> None:
    trials[case].result()


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
