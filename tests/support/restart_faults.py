"""The faults of training again, over runs that `caffepy launch --restarts 1` has started: they must end trained.

Where the fault is a mistake in what was given, or a signal has stopped the run, nothing is started again: then the same
command goes on later. Either way what was trained is compared byte for byte with a run that never failed.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import psutil
from fault_case import FaultCase
from processes import ranks_of
from subprocess_training import LIMIT, NET, Outcome, SubprocessTraining
from training_faults import Place, Started

_ITERATIONS = 40
_FAR = 400
"""Further than data are read ahead."""
_EVERY = 5
"""Iterations between snapshots."""
_FIRST = 8
"""The iteration in which the fault comes in the first round; later ones move it within those that are trained."""
_TIMEOUT = "3"
_BACKOFF = 1.0
"""Seconds before a first restart."""
_AGAIN = 25.0
"""What the second run may take besides."""
_LOCK = threading.Lock()
_LOCKS: dict[tuple[int, int, SubprocessTraining, int], threading.Lock] = {}
"""Of each run that never fails."""

Check = Callable[[Place, SubprocessTraining, int], float]


def start(place: Place, training: SubprocessTraining, *options: str, **settings: Any) -> Started:
    """Start a run that saves often and ends."""
    usual: dict[str, Any] = {"iterations": _ITERATIONS, "snapshot": _EVERY, "launch": ["--restarts", "1"]}
    return place.start(training, *options, **{**usual, **settings})


def iteration(number: int) -> int:
    """When the fault of a round comes."""
    return _FIRST + number % (_ITERATIONS - _FIRST - 5)


def delay(number: int) -> float:
    """Seconds from the beginning of that iteration to the fault: other moments of it, and not after the last one."""
    return 0.004 * (number % 4)


def unfailing(place: Place, training: SubprocessTraining, iterations: int) -> Outcome:
    """A run with as many devices that never failed."""
    key = place.ranks, place.solvers, training, iterations
    with _LOCK:
        own = _LOCKS.setdefault(key, threading.Lock())
    with own:  # whoever wants the same waits; others do not
        return _unfailing(*key)


@cache
def _unfailing(ranks: int, solvers: int, training: SubprocessTraining, iterations: int) -> Outcome:
    outcome = training.finish(start(Place(0, ranks, solvers), training, iterations=iterations))
    assert outcome.status == 0 and "restart" not in outcome.log, outcome.log
    return outcome


def check_trained(place: Place, training: SubprocessTraining, outcome: Outcome, restarted: bool = True) -> None:
    """A run ended with what one without a fault would have learned."""
    assert outcome.status == 0, f"status {outcome.status}:\n{outcome.log}"
    assert ("restart 1 of 1 in 1 s, after " in outcome.log) == restarted, outcome.log
    last = outcome.snapshots()[-1]
    assert last >= _ITERATIONS, outcome.log
    wanted = unfailing(place, training, last)
    assert outcome.contents(last) == wanted.contents(last), f"trained otherwise than without a fault:\n{outcome.log}"


def begins_again(kind: str, place: Place, training: SubprocessTraining, number: int, **settings: Any) -> float:
    """A fault of `program.py` that comes once."""
    later = delay(number) if kind == "kill" else 0.0
    fault = f"{kind} {place.device} {iteration(number)} {later:.4f}"
    return ends_trained(place, training, start(place, training, "--timeout", _TIMEOUT, FAULT=fault, **settings))


def begins_anew(kind: str, place: Place, training: SubprocessTraining, number: int) -> float:
    """A fault before there is a snapshot."""
    return ends_trained(place, training, start(place, training, FAULT=f"{kind} {place.device} start"))


def stalls(place: Place, training: SubprocessTraining, number: int) -> float:
    """What was read ahead is trained before anybody notices."""
    net = NET.replace("batch_size: %(batch)d", "batch_size: %(batch)d prefetch: 1")
    return begins_again("stall", place, training, number, net_text=net, iterations=_FAR)


def ends_trained(place: Place, training: SubprocessTraining, started: Started, fault: float | None = None) -> float:
    outcome = training.finish(started, fault=fault)
    check_trained(place, training, outcome)
    seconds = outcome.seconds_after_fault()
    limit = float(_TIMEOUT) + LIMIT + _BACKOFF + _AGAIN
    assert seconds < limit, f"trained {seconds:.1f} s after the fault:\n{outcome.log}"
    return seconds


def slow(place: Place, training: SubprocessTraining, *options: str, **settings: Any) -> Started:
    """A run that a fault from outside can meet before it ends, at its second snapshot."""
    started = start(place, training, *options, DELAY="0.05", **settings)
    training.wait_for_snapshot(started, 2 * _EVERY)
    return started


def stopped(place: Place, training: SubprocessTraining, number: int) -> float:
    started = slow(place, training, "--timeout", _TIMEOUT)
    fault = time.time()
    ranks_of(training.mark(started[1]))[place.rank].suspend()
    return ends_trained(place, training, started, fault)


def launcher_signalled(number_of_signal: int, place: Place, training: SubprocessTraining, number: int) -> float:
    """MPI's launcher ends below `caffepy launch`."""
    started = slow(place, training)
    fault = time.time()
    os.kill(psutil.Process(started[0].pid).children()[0].pid, number_of_signal)
    return ends_trained(place, training, started, fault)


def parent_signalled(number_of_signal: int, place: Place, training: SubprocessTraining, number: int) -> float:
    """Ctrl-C or SIGTERM: all ranks save and stop."""
    started = slow(place, training)
    fault = time.time()
    os.kill(started[0].pid, number_of_signal)
    outcome = training.finish(started, fault=fault)
    (advice,) = outcome.logged("To resume training")
    assert re.search(rf": caffepy launch .*--nproc-per-node {place.ranks} .*-- train .*--snapshot run", advice), advice
    return stops_and_goes_on(place, training, outcome)


def rank_signalled(name: str, place: Place, training: SubprocessTraining, number: int) -> float:
    """A signal to one rank alone stops all of them."""
    fault = f"{name} {place.device} {iteration(number)} {delay(number):.4f}"
    started = start(place, training, FAULT=fault, DELAY="0.01")
    return stops_and_goes_on(place, training, training.finish(started))


def stops_and_goes_on(place: Place, training: SubprocessTraining, outcome: Outcome) -> float:
    assert outcome.status == 0 and not outcome.errors(), f"status {outcome.status}:\n{outcome.log}"
    assert "Optimization stopped early." in outcome.log and outcome.snapshots()[-1] < _ITERATIONS, outcome.log
    goes_on(place, training, outcome)
    return check_end_in_time(outcome)


def goes_on(place: Place, training: SubprocessTraining, outcome: Outcome) -> None:
    """A run that ended early is trained to its end by the same command with ``--snapshot auto``."""
    again = training.finish(start(place, training, "--snapshot", "auto", prefix=outcome.prefix))
    check_trained(place, training, again, restarted=False)


def saves(place: Place, training: SubprocessTraining, number: int) -> float:
    """SIGHUP: a snapshot, and training goes on as if nothing had been asked."""
    fault = f"SIGHUP {place.device} {_EVERY * (1 + number % 6) + 1}"  # not where a snapshot is due anyway
    outcome = training.finish(start(place, training, FAULT=fault))
    check_trained(place, training, outcome, restarted=False)
    assert any(saved % _EVERY for saved in outcome.snapshots()), f"no snapshot was asked for:\n{outcome.log}"
    return outcome.seconds_after_fault()


def suspended(place: Place, training: SubprocessTraining, number: int) -> float:
    """Ctrl-Z and `fg`: the time in which all were suspended counts for no timeout."""
    started = slow(place, training, "--timeout", _TIMEOUT)
    fault = time.time()
    os.kill(started[0].pid, signal.SIGTSTP)
    time.sleep(float(_TIMEOUT) + 1.0)
    os.kill(started[0].pid, signal.SIGCONT)
    outcome = training.finish(started, fault=fault)
    check_trained(place, training, outcome, restarted=False)
    return outcome.seconds_after_fault()


def interrupted_twice(parent: bool, place: Place, training: SubprocessTraining, number: int) -> float:
    """The second Ctrl-C, at `caffepy launch` or at a rank, does not wait for a rank that sleeps."""
    started = start(place, training, FAULT=f"sleep {place.device} {iteration(number)}")
    training.wait_for_fault(started)
    process = started[0].pid if parent else ranks_of(training.mark(started[1]))[place.rank].pid
    fault = time.time()
    for _ in range(2):
        os.kill(process, signal.SIGINT)
        time.sleep(0.3)
    outcome = training.finish(started, fault=fault)
    assert outcome.status == 130, f"status {outcome.status}:\n{outcome.log}"
    assert "interrupted again: ending at once" in outcome.log and "restart 1" not in outcome.log, outcome.log
    goes_on(place, training, outcome)
    return check_end_in_time(outcome)


def parent_killed(place: Place, training: SubprocessTraining, number: int) -> float:
    """Nobody outlives the parent."""
    started = slow(place, training)
    fault = time.time()
    started[0].kill()
    outcome = training.finish(started, fault=fault)
    assert outcome.status == -signal.SIGKILL
    goes_on(place, training, outcome)
    return check_end_in_time(outcome)


def reads_cut_record(place: Place, training: SubprocessTraining, number: int) -> float:
    """Damaged data are a mistake in what was given: another start would meet them again."""
    cut = 1 + iteration(number) % 9  # record 0 is read before training, for its shape
    data = training.cut_data(64 * cut)
    fault = f"mark 0 {cut - 1}"
    started = start(place, training, net_text=NET.replace("train_lmdb", data), FAULT=fault)
    return ends_by_a_mistake(place, training, training.finish(started))


def loses_its_data(place: Place, training: SubprocessTraining, number: int) -> float:
    """The file is cut off while it is read, which is a mistake of whoever did it."""
    folder = training.new_folder() / "lmdb"
    shutil.copytree(training.folder / "train_lmdb", folder)
    started = slow(place, training, net_text=NET.replace("train_lmdb", str(folder)))
    fault = time.time()
    os.truncate(folder / "data.mdb", (folder / "data.mdb").stat().st_size // 2)
    return ends_by_a_mistake(place, training, training.finish(started, fault=fault))


def ends_by_a_mistake(place: Place, training: SubprocessTraining, outcome: Outcome) -> float:
    """Nothing is started again; with whole data the same command goes on."""
    assert outcome.status == 2 and "restart 1" not in outcome.log, f"status {outcome.status}:\n{outcome.log}"
    assert "not started again: another start would meet the same mistake" in outcome.log, outcome.log
    goes_on(place, training, outcome)
    return check_end_in_time(outcome)


def check_end_in_time(outcome: Outcome) -> float:
    seconds = outcome.seconds_after_fault()
    assert seconds < LIMIT, f"ended {seconds:.1f} s after the fault:\n{outcome.log}"
    return seconds


_KINDS: dict[str, tuple[Check, list[Place], list[Place]]] = {
    "raise": (partial(begins_again, "raise"), [], [Place(1, 2), Place(2, 0, 3), Place(1, 2, 2)]),
    "raise at the start": (partial(begins_anew, "raise"), [], [Place(1, 2)]),
    "kill": (partial(begins_again, "kill"), [Place(1, 2)], [Place(0, 2), Place(1, 3), Place(3, 2, 2)]),
    "kill while saving": (partial(begins_again, "kill", snapshot=1), [], [Place(0, 2)]),
    "kill at the start": (partial(begins_anew, "kill"), [], [Place(1, 2)]),
    "sleep": (partial(begins_again, "sleep"), [], [Place(1, 0, 2), Place(1, 2)]),
    "stop": (stopped, [], [Place(0, 2), Place(1, 2)]),
    "stall": (stalls, [], [Place(0), Place(1, 2)]),
    "cut record": (reads_cut_record, [], [Place(0, 2)]),
    "truncate": (loses_its_data, [], [Place(0), Place(0, 2)]),
    "SIGINT": (partial(rank_signalled, "SIGINT"), [], [Place(1, 2), Place(0, 3), Place(2, 2, 2)]),
    "SIGINT twice": (partial(interrupted_twice, False), [], [Place(1, 2)]),
    "SIGTERM": (partial(rank_signalled, "SIGTERM"), [], [Place(1, 2), Place(0, 0, 2)]),
    "SIGHUP": (saves, [], [Place(0, 2), Place(1, 2)]),
    "launcher SIGINT": (partial(launcher_signalled, signal.SIGINT), [], [Place(0, 2)]),
    "launcher SIGTERM": (partial(launcher_signalled, signal.SIGTERM), [], [Place(0, 2)]),
    "launcher SIGKILL": (partial(launcher_signalled, signal.SIGKILL), [], [Place(0, 2)]),
    "parent SIGINT": (partial(parent_signalled, signal.SIGINT), [Place(0, 2)], []),
    "parent SIGINT twice": (partial(interrupted_twice, True), [], [Place(1, 2)]),
    "parent SIGTERM": (partial(parent_signalled, signal.SIGTERM), [], [Place(0, 2)]),
    "parent SIGTSTP": (suspended, [], [Place(0, 2)]),
    "parent SIGKILL": (parent_killed, [Place(0, 2)], []),
}
"""Each kind's check, where the tests make it happen, and where `endurance.py` does as well."""
RESTART_FAULTS = [
    FaultCase(kind, str(place), partial(check, place), mpi=True, further=place in further)
    for kind, (check, tested, further) in _KINDS.items()
    for place in (*tested, *further)
]
