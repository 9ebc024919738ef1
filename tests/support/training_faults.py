"""Everything that can go wrong while several devices train, each with all that must be true of the end."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from fault_case import FaultCase
from processes import ranks_of
from subprocess_training import LIMIT, LONG, NET, Outcome, SubprocessTraining

from caffepy.distributed.launch.supervisor import END_SECONDS

Started = tuple[subprocess.Popen[str], str]
_EVERY = 5
"""Iterations between snapshots."""
_FIRST = 8
"""The iteration in which the fault comes in the first round."""
_TIMEOUT = 3.0
"""What --timeout says where a test has to wait for it."""
_READS_ONE_AHEAD = NET.replace("batch_size: %(batch)d", "batch_size: %(batch)d prefetch: 1")


@dataclass(frozen=True)
class Place:
    """Where a fault comes over a run.

    Args:
        device: its number among all.
        ranks: processes of mpirun; 0: one process without it.
        solvers: devices a process.
        mpi: mpirun starts the processes; else `tests/parallel/ranks.py`.
    """

    device: int
    ranks: int = 0
    solvers: int = 1
    mpi: bool = True

    def __str__(self) -> str:
        return self._text if self.mpi else f"{self._text} without MPI"

    @property
    def _text(self) -> str:
        if not self.ranks:
            return "the only device" if self.solvers == 1 else f"thread {self.device} of {self.solvers}"
        if self.solvers == 1:
            return f"rank {self.device} of {self.ranks}"
        return f"device {self.device} of {self.ranks} x {self.solvers}"

    @property
    def rank(self) -> int:
        return self.device // self.solvers

    @property
    def label(self) -> str:
        """What messages call the device."""
        return f"CPU {self.device % self.solvers}" if self.solvers > 1 else "CPU"

    @property
    def error(self) -> str:
        """A pattern for how messages of an error begin that the device meets; a single one is not named."""
        if not self.ranks and self.solvers == 1:
            return ""
        rank = rf"rank {self.rank} on \S+, " if self.ranks else ""
        return rf"{rank}device {self.label}, iteration \d+: "

    @property
    def state(self) -> str:
        """A pattern for what messages call the device where others wait for it."""
        return rf"rank {self.rank} on \S+, process \d+, device {self.label}"

    def start(self, training: SubprocessTraining, *options: str, **settings: Any) -> Started:
        """Start a run that saves often."""
        if self.solvers > 1:
            options += ("--cpu-solvers", str(self.solvers))
        usual: dict[str, Any] = {
            "ranks": self.ranks,
            "mpi": self.mpi,
            "batch": 32 if self.ranks else 64,
            "iterations": LONG,
            "snapshot": _EVERY,
            "solver_text": "test_initialization: false",
        }
        return training.start(*options, **{**usual, **settings})

    def strike(
        self, training: SubprocessTraining, kind: str, number: int, *options: str, later: float = 0.0, **settings: Any
    ) -> Outcome:
        """A run over which a fault of `program.py` comes, in every round in another iteration."""
        fault = f"{kind} {self.device} {_FIRST + number} {later:.4f}"
        return training.finish(self.start(training, *options, FAULT=fault, **settings))


def check_end(outcome: Outcome, limit: float = LIMIT, saved: bool = True) -> float:
    """What holds for every fault: an end in time and whole snapshots."""
    seconds = outcome.seconds_after_fault()
    assert seconds < limit, f"ended {seconds:.1f} s after the fault:\n{outcome.log}"
    assert bool(outcome.snapshots()) == saved, f"snapshots of {outcome.snapshots()}:\n{outcome.log}"
    return seconds


MISTAKE = "this is a bug in caffepy, not in the net"


def check_message(outcome: Outcome, pattern: str, status: int | None = 1) -> None:
    """One error in all, in one line, that matches a pattern; any status but success where it is None."""
    right = outcome.status != 0 if status is None else outcome.status == status
    assert right, f"status {outcome.status}:\n{outcome.log}"
    errors = outcome.errors()
    assert len(errors) == 1 and re.search(pattern, errors[0]), f"wanted '{pattern}', found {errors}:\n{outcome.log}"
    assert f"caffepy: error: {errors[0]}" in outcome.log, outcome.log
    assert "Traceback" not in outcome.log, outcome.log


def raises(place: Place, training: SubprocessTraining, number: int) -> float:
    outcome = place.strike(training, "raise", number)
    check_message(outcome, rf"^{place.error}layer 'fault' \(Fault\): ValueError: injected; {MISTAKE}", 70)
    return check_end(outcome)


def raises_at_start(place: Place, training: SubprocessTraining, number: int) -> float:
    outcome = training.finish(place.start(training, FAULT=f"raise {place.device} start"))
    rank = rf"rank {place.rank} on \S+: " if place.ranks else ""
    check_message(outcome, rf"^{rank}layer 'fault' \(Fault\): ValueError: injected; {MISTAKE}", 70)
    return check_end(outcome, saved=False)


def killed(place: Place, training: SubprocessTraining, number: int) -> float:
    """Later rounds strike wherever the device is then: in an exchange, a test or a snapshot."""
    outcome = place.strike(training, "kill", number, later=0.004 * (number % 16))
    check_message(outcome, rf"^rank {place.rank} on \S+( \(process \d+\))? at iteration \d+ ended unexpectedly", None)
    return check_end(outcome)


def killed_while_saving(place: Place, training: SubprocessTraining, number: int) -> float:
    """With a snapshot after each iteration it is most likely one of them that is broken off."""
    outcome = place.strike(training, "kill", 0, later=0.003 * number, snapshot=1)
    check_message(outcome, rf"^rank {place.rank} on \S+( \(process \d+\))? at iteration \d+ ended unexpectedly", None)
    return check_end(outcome)


def killed_at_start(place: Place, training: SubprocessTraining, number: int) -> float:
    outcome = training.finish(place.start(training, FAULT=f"kill {place.device} start"))
    check_message(outcome, rf"^rank {place.rank} on \S+( \(process \d+\))? at iteration 0 ended unexpectedly", None)
    return check_end(outcome, saved=False)


def sleeps(place: Place, training: SubprocessTraining, number: int) -> float:
    outcome = place.strike(training, "sleep", number, "--timeout", f"{_TIMEOUT:g}")
    exchange = r"(the beginning of )?(part \d of \d of )?the gradients' all-reduce"
    where = rf"({exchange}|the sum of scores) of iteration {_FIRST + number}"
    check_message(outcome, rf"device CPU( \d)? has waited \d+ s in {where} for {place.state}, which is in iteration")
    return check_end(outcome, _TIMEOUT + LIMIT)


def stopped(place: Place, training: SubprocessTraining, number: int) -> float:
    """SIGSTOP also stops the rank's own watchdog, and that of rank 0 watches over all."""
    started = place.start(training, "--timeout", f"{_TIMEOUT:g}")
    wait_for_fault(training, started, number)
    fault = time.time()
    ranks_of(training.mark(started[1]))[place.rank].suspend()
    outcome = training.finish(started, fault=fault)
    check_message(outcome, rf"has waited \d+ s in .* for rank {place.rank} on", None)
    return check_end(outcome, _TIMEOUT + LIMIT)


def stopped_and_signalled(place: Place, training: SubprocessTraining, number: int, **settings: Any) -> float:
    """SIGTERM to another rank, or to `caffepy launch`: the stop waits for the suspended rank until the timeout."""
    started = place.start(training, "--timeout", f"{_TIMEOUT:g}", **settings)
    wait_for_fault(training, started, number)
    fault = time.time()
    ranks = ranks_of(training.mark(started[1]))
    ranks[place.rank].suspend()
    time.sleep(0.5)  # the others wait for it
    os.kill(started[0].pid if settings else ranks[1 - place.rank].pid, signal.SIGTERM)
    outcome = training.finish(started, fault=fault)
    check_message(outcome, rf"has waited \d+ s in .* for rank {place.rank} on", None)
    return check_end(outcome, _TIMEOUT + END_SECONDS + LIMIT)  # the launcher's patience with ranks that do not end


def stalls(place: Place, training: SubprocessTraining, number: int) -> float:
    outcome = place.strike(training, "stall", number, "--timeout", f"{_TIMEOUT:g}", net_text=_READS_ONE_AHEAD)
    check_message(outcome, rf"{place.state},? .* record \d+ of LMDB 'train_lmdb'")
    return check_end(outcome, _TIMEOUT + LIMIT)


def reads_cut_record(place: Place, training: SubprocessTraining, number: int) -> float:
    """Record 64 t + 32 d lies in the part of device d of two in iteration t."""
    iteration = _FIRST - 1 + number % 2
    record = 64 * iteration + 32 * place.device + number % 32
    data = training.cut_data(record)
    fault = f"mark {place.device} {iteration - 1}"
    outcome = training.finish(place.start(training, net_text=NET.replace("train_lmdb", data), FAULT=fault))
    check_message(outcome, rf"^{place.error}.*LMDB '{data}'.*record {record} \(key '{record:08}'\)", 2)
    return check_end(outcome)


def loses_its_data(place: Place, training: SubprocessTraining, number: int) -> float:
    """The file is cut off while it is read."""
    folder = training.new_folder() / "lmdb"
    shutil.copytree(training.folder / "train_lmdb", folder)
    started = place.start(training, net_text=NET.replace("train_lmdb", str(folder)), DELAY="0.002")
    wait_for_fault(training, started, number)
    fault = time.time()
    os.truncate(folder / "data.mdb", (folder / "data.mdb").stat().st_size // 2)
    outcome = training.finish(started, fault=fault)
    check_message(outcome, rf"LMDB '{folder}' was truncated during reading", 2)
    return check_end(outcome)


def interrupted(name: str, place: Place, training: SubprocessTraining, number: int) -> float:
    """A signal to a rank stops all of them, with a snapshot."""
    outcome = place.strike(training, name, number, later=0.004 * number)
    assert outcome.status == 0 and not outcome.errors(), f"status {outcome.status}:\n{outcome.log}"
    assert "Optimization stopped early." in outcome.log, outcome.log
    last = outcome.snapshots()[-1]
    assert f"{outcome.prefix}_iter_{last}.solverstate" in outcome.logged("To resume training")[0], outcome.log
    return check_end(outcome)


def interrupted_twice(place: Place, training: SubprocessTraining, number: int) -> float:
    """Whoever presses Ctrl-C again does not want to wait for a rank that sleeps."""
    fault = f"sleep {place.device} {_FIRST + number}"
    started = place.start(training, FAULT=fault)
    training.wait_for_fault(started)
    victim = ranks_of(training.mark(started[1]))[place.rank].pid if place.ranks else started[0].pid
    begin = time.time()
    for _ in range(2):
        os.kill(victim, signal.SIGINT)
        time.sleep(0.3)
    outcome = training.finish(started, fault=begin)
    check_message(outcome, "^interrupted again: ending at once$", 130)
    return check_end(outcome)


def wait_for_silence(log: Path) -> None:
    """Wait until nothing was written for a while."""
    size = -1
    while size != log.stat().st_size:
        size = log.stat().st_size
        time.sleep(1.0)


def stalls_and_is_stopped(place: Place, training: SubprocessTraining, number: int) -> float:
    """A signal ends the wait of the only device at once, with a snapshot; what goes on has learned the same."""
    outcome = stop_while_stalled(place, training, number)
    assert outcome.status == 0 and not outcome.errors(), f"status {outcome.status}:\n{outcome.log}"
    assert "Optimization stopped early." in outcome.log, outcome.log
    assert "waits for its data and is not made" in outcome.log, outcome.log
    check_resuming(place, training, outcome)
    return check_end(outcome)


def stalls_and_cannot_stop(place: Place, training: SubprocessTraining, number: int) -> float:
    """Of several devices one waits for data: a stop waits with it, until the timeout; training goes on as it was."""
    timeout = 4 * _TIMEOUT  # the signal comes before it ends
    outcome = stop_while_stalled(place, training, number, "--timeout", f"{timeout:g}")
    check_message(outcome, rf"{place.state},? .* record \d+ of LMDB 'train_lmdb'")
    assert "SIGTERM: " in outcome.log and "Optimization stopped early." not in outcome.log, outcome.log
    check_resuming(place, training, outcome)
    return check_end(outcome, timeout + LIMIT)


def stop_while_stalled(place: Place, training: SubprocessTraining, number: int, *options: str) -> Outcome:
    """A run whose device waits for data for ever when SIGTERM comes to its first rank."""
    fault = f"stall {place.device} {_FIRST + number}"
    started = place.start(training, *options, FAULT=fault, net_text=_READS_ONE_AHEAD)
    training.wait_for_fault(started)
    wait_for_silence(training.log(started[1]))  # what was read ahead is trained
    ranks = ranks_of(training.mark(started[1]))
    begin = time.time()
    os.kill(ranks[0].pid if ranks else started[0].pid, signal.SIGTERM)
    return training.finish(started, fault=begin)


def check_resuming(place: Place, training: SubprocessTraining, outcome: Outcome) -> None:
    """A run that goes on from the last snapshot of another one learns what a run learns that was never ended."""
    last = outcome.snapshots()[-1]
    settings: dict[str, Any] = {"net_text": _READS_ONE_AHEAD, "iterations": last + 7}
    snapshot = f"{outcome.prefix}_iter_{last}.solverstate"
    resumed = training.finish(place.start(training, "--snapshot", snapshot, **settings))
    whole = training.finish(place.start(training, **settings))
    assert resumed.contents(last + 7) == whole.contents(last + 7), f"trained otherwise:\n{resumed.log}"


def launcher_signalled(number_of_signal: int, place: Place, training: SubprocessTraining, number: int) -> float:
    """Open MPI's mpirun kills its ranks at SIGINT and SIGTERM; where it is killed itself, they notice."""
    started = place.start(training)
    wait_for_fault(training, started, number)
    fault = time.time()
    os.kill(started[0].pid, number_of_signal)
    outcome = training.finish(started, fault=fault)
    assert outcome.status != 0 and not outcome.errors(), f"status {outcome.status}:\n{outcome.log}"
    return check_end(outcome)


def wait_for_fault(training: SubprocessTraining, started: Started, number: int) -> None:
    """Let a run train for a moment, in every round for another one."""
    training.wait_for_snapshot(started, _EVERY)
    time.sleep(0.013 * number)


_KINDS: dict[str, tuple[Callable[[Place, SubprocessTraining, int], float], list[Place], list[Place]]] = {
    "raise": (raises, [Place(2, 0, 3), Place(1, 2), Place(1, 2, 2)], [Place(0), Place(2, 3), Place(1, 3, mpi=False)]),
    "raise at the start": (raises_at_start, [Place(1, 2)], [Place(1, 0, 2), Place(1, 2, mpi=False)]),
    "kill": (
        killed,
        [Place(0, 2), Place(1, 3), Place(3, 2, 2), Place(0, 3, mpi=False), Place(1, 3, mpi=False)],
        [Place(1, 2), Place(0, 3), Place(3, 2, 2, mpi=False)],
    ),
    "kill while saving": (killed_while_saving, [Place(0, 2)], []),
    "kill at the start": (killed_at_start, [Place(1, 2)], [Place(1, 2, mpi=False)]),
    "sleep": (sleeps, [Place(1, 0, 2), Place(3, 2, 2)], [Place(1, 2), Place(2, 3), Place(1, 2, mpi=False)]),
    "stop": (stopped, [Place(0, 2)], [Place(1, 2)]),
    "stop SIGTERM": (stopped_and_signalled, [Place(0, 2), Place(1, 2)], []),
    "stop parent SIGTERM": (
        partial(stopped_and_signalled, launch=()),
        [Place(0, 2), Place(1, 2, mpi=False)],
        [Place(1, 2)],
    ),
    "stall": (stalls, [Place(0), Place(1, 2)], [Place(1, 0, 2), Place(2, 2, 2), Place(1, 2, mpi=False)]),
    "stall SIGTERM": (stalls_and_is_stopped, [Place(0)], []),
    "stall SIGTERM timeout": (
        stalls_and_cannot_stop,
        [Place(1, 0, 2), Place(1, 2)],
        [Place(0, 2), Place(2, 2, 2), Place(1, 2, mpi=False)],
    ),
    "cut record": (reads_cut_record, [Place(1, 2)], [Place(1, 0, 2)]),
    "truncate": (loses_its_data, [Place(0)], [Place(0, 2)]),
    "SIGINT": (
        partial(interrupted, "SIGINT"),
        [Place(0, 2), Place(2, 2, 2)],
        [Place(0, 0, 2), Place(1, 2), Place(2, 3)],
    ),
    "SIGINT twice": (interrupted_twice, [Place(1, 2)], [Place(0), Place(0, 2), Place(1, 2, mpi=False)]),
    "SIGTERM": (
        partial(interrupted, "SIGTERM"),
        [Place(0, 0, 2), Place(1, 2), Place(1, 2, mpi=False)],
        [Place(0, 3), Place(2, 2, 2)],
    ),
    "launcher SIGINT": (partial(launcher_signalled, signal.SIGINT), [], [Place(0, 2)]),
    "launcher SIGTERM": (partial(launcher_signalled, signal.SIGTERM), [Place(0, 2)], []),
    "launcher SIGKILL": (partial(launcher_signalled, signal.SIGKILL), [Place(0, 2)], []),
}
"""Each kind's check, where the tests make it happen, and where `endurance.py` does as well."""
TRAINING_FAULTS = [
    FaultCase(kind, str(place), partial(check, place), mpi=place.ranks > 0 and place.mpi, further=place in further)
    for kind, (check, tested, further) in _KINDS.items()
    for place in (*tested, *further)
]
