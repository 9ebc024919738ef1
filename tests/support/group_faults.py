"""Processes with a group of `caffepy.distributed`, and every way in which one of them can fall out."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from fault_case import FaultCase
from processes import (
    MARK,
    PATIENCE,
    REPOSITORY,
    WHOLE_LINES,
    find_mpirun,
    program_environment,
    time_of_fault,
    wait_for_end,
)
from subprocess_training import LIMIT, SubprocessTraining

PROGRAM = REPOSITORY / "tests" / "parallel" / "distributed_program.py"
RANKS = 3
_TIMEOUT = 2.0
"""The group's timeout where ranks wait for one that does not come."""


@dataclass
class Ended:
    """How processes ended: their exit statuses, what they wrote, and the seconds from a fault until all were gone."""

    statuses: list[int]
    log: str
    seconds_after_fault: float


def environment(**changes: str) -> dict[str, str]:
    """As all programs get it, with the tests' modules."""
    found = program_environment({**WHOLE_LINES, **changes})
    return {**found, "PYTHONPATH": os.pathsep.join((str(REPOSITORY / "tests" / "support"), found["PYTHONPATH"]))}


def run(commands: list[tuple[list[str], dict[str, str]]], folder: Path, timeout: float = PATIENCE) -> Ended:
    """Run commands at the same time; what still runs after the timeout is killed and fails the test."""
    logs = [folder / f"log{i}.txt" for i in range(len(commands))]
    processes = []
    for log, (command, variables) in zip(logs, commands, strict=True):
        with log.open("w") as file:
            processes.append(
                subprocess.Popen(
                    command,
                    env={**variables, MARK: str(folder)},
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                    text=True,
                    start_new_session=True,
                )
            )
    text, ended = wait_for_end(processes, str(folder), logs, timeout)
    return Ended([process.returncode for process in processes], text, ended - (time_of_fault(text) or ended))


def with_mpirun(folder: Path, *action: str, ranks: int = 2, **variables: str) -> Ended:
    """Ranks that mpirun starts."""
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


ACTIONS = {
    "kill": "ended unexpectedly: it was killed",
    "raise": "ValueError: injected",
    "exit": "left",
    "leave": "left",
    "sleep": "which has started 3 of 4 collectives and is not waiting",
    "differ": "calls 'broadcast from rank 0 of 3 float64'",
    "size": "calls 'all_reduce SUM of 5 float32'",
}
"""What the others say of the victim, by what it did."""


def check_blame(ended: Ended, action: str, victim: int, ranks: int) -> float:
    """Each of the others ended soon, with one error that names the victim; returns the seconds that it took."""
    name = rf"rank {victim}( on \S+ \(process \d+\))?"
    for rank in set(range(ranks)) - {victim}:
        own = rf"(PeerError|UserError): rank {rank} on \S+ \(process \d+\): all_reduce (SUM|MAX) of 4 float32: "
        found = re.findall(rf"{own}.*{name}.*{ACTIONS[action]}", ended.log)
        assert len(found) == 1, f"rank {rank} blames rank {victim} {len(found)} times:\n{ended.log}"
    assert ended.seconds_after_fault < LIMIT, f"ended {ended.seconds_after_fault:.1f} s after the fault:\n{ended.log}"
    return ended.seconds_after_fault


def falls_out_by_hand(action: str, victim: int, training: SubprocessTraining, number: int) -> float:
    folder = training.new_folder()
    ended = by_hand(folder, action, str(victim), INIT=f"file://{folder}/meet", TIMEOUT=f"{_TIMEOUT:g}")
    assert all(status == 1 for rank, status in enumerate(ended.statuses) if rank != victim), ended.log
    return check_blame(ended, action, victim, RANKS)


def falls_out_of_mpirun(action: str, victim: int, training: SubprocessTraining, number: int) -> float:
    ended = with_mpirun(training.new_folder(), action, str(victim), TIMEOUT=f"{_TIMEOUT + 1:g}")
    assert ended.statuses[0] != 0, ended.log
    return check_blame(ended, action, victim, 2)


def _by_hand() -> list[FaultCase]:
    victims = {"leave": (1,), "differ": (1,), "size": (1,)}
    return [
        FaultCase(f"group {action}", f"rank {victim} of {RANKS} by hand", partial(falls_out_by_hand, action, victim))
        for action in ACTIONS
        for victim in victims.get(action, (0, 1))
    ]


def _of_mpirun() -> list[FaultCase]:
    return [
        FaultCase(f"group {action}", "rank 1 of 2 of mpirun", partial(falls_out_of_mpirun, action, 1), mpi=True)
        for action in ("kill", "raise", "exit", "sleep")
    ]


GROUP_FAULTS = [*_by_hand(), *_of_mpirun()]
