"""The faults of training again, over runs that `caffepy launch --restarts 1` has started: they must end trained.

Where the fault is a mistake in what was given, nothing is started again; where a signal has stopped the run, the same
command goes on later. Either way what was trained is compared byte for byte with a run that never failed.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import psutil
from fault_case import FaultCase
from laboratory import LIMIT, NET, Laboratory, Outcome, write_lmdb
from processes import ranks_of
from training_faults import Place, Started

from caffepy.snapshot.files import read_state

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

Check = Callable[[Place, Laboratory, int], float]


def start(place: Place, laboratory: Laboratory, *options: str, **settings: Any) -> Started:
    """Start a run that saves often and ends."""
    usual: dict[str, Any] = {"iterations": _ITERATIONS, "snapshot": _EVERY, "launch": ["--restarts", "1"]}
    return place.start(laboratory, *options, **{**usual, **settings})


def iteration(number: int) -> int:
    """When the fault of a round comes."""
    return _FIRST + number % (_ITERATIONS - _FIRST - 5)


def unfailing(place: Place, laboratory: Laboratory, iterations: int) -> Outcome:
    """A run with as many devices that never failed."""
    with _LOCK:
        return _unfailing(place.ranks, place.solvers, laboratory, iterations)


@cache
def _unfailing(ranks: int, solvers: int, laboratory: Laboratory, iterations: int) -> Outcome:
    outcome = laboratory.finish(start(Place(0, ranks, solvers), laboratory, iterations=iterations))
    assert outcome.status == 0 and "restart" not in outcome.log, outcome.log
    return outcome


def check_trained(place: Place, laboratory: Laboratory, outcome: Outcome, restarted: bool = True) -> None:
    """A run ended with what one without a fault would have learned."""
    assert outcome.status == 0, f"status {outcome.status}:\n{outcome.log}"
    assert ("restart 1 of 1 in 1 s, after " in outcome.log) == restarted, outcome.log
    last = outcome.snapshots()[-1]
    assert last >= _ITERATIONS, outcome.log
    wanted = unfailing(place, laboratory, last)
    assert contents(outcome, last) == contents(wanted, last), f"trained otherwise than without a fault:\n{outcome.log}"


def contents(outcome: Outcome, iteration: int) -> tuple[bytes, bytes]:
    """All numbers of a snapshot, less the name of its file and the text of the net, which may differ."""
    stem = f"{outcome.prefix}_iter_{iteration}"
    state = read_state(outcome.folder / f"{stem}.solverstate")
    state.ClearField("learned_net")
    weights = b"".join(values.tobytes() for _, values in sorted(outcome.weights(iteration).items()))
    return weights, state.SerializeToString(deterministic=True)


def begins_again(kind: str, place: Place, laboratory: Laboratory, number: int, **settings: Any) -> float:
    """A fault of `program.py` that comes once."""
    later = 0.004 * number if kind == "kill" else 0.0
    fault = f"{kind} {place.device} {iteration(number)} {later:.4f}"
    return ends_trained(place, laboratory, start(place, laboratory, "--timeout", _TIMEOUT, FAULT=fault, **settings))


def begins_anew(kind: str, place: Place, laboratory: Laboratory, number: int) -> float:
    """A fault before there is a snapshot."""
    return ends_trained(place, laboratory, start(place, laboratory, FAULT=f"{kind} {place.device} start"))


def stalls(place: Place, laboratory: Laboratory, number: int) -> float:
    """What was read ahead is trained before anybody notices."""
    net = NET.replace("batch_size: %(batch)d", "batch_size: %(batch)d prefetch: 1")
    return begins_again("stall", place, laboratory, number, net_text=net, iterations=_FAR)


def ends_trained(place: Place, laboratory: Laboratory, started: Started, fault: float | None = None) -> float:
    outcome = laboratory.finish(started, fault=fault)
    check_trained(place, laboratory, outcome)
    seconds = outcome.seconds_after_fault()
    limit = float(_TIMEOUT) + LIMIT + _BACKOFF + _AGAIN
    assert seconds < limit, f"trained {seconds:.1f} s after the fault:\n{outcome.log}"
    return seconds


def slow(place: Place, laboratory: Laboratory, *options: str) -> Started:
    """A run that a fault from outside can meet before it ends, at its second snapshot."""
    started = start(place, laboratory, *options, DELAY="0.05")
    laboratory.wait_for_snapshot(started, 2 * _EVERY)
    return started


def stopped(place: Place, laboratory: Laboratory, number: int) -> float:
    started = slow(place, laboratory, "--timeout", _TIMEOUT)
    fault = time.time()
    ranks_of(laboratory.mark(started[1]))[place.rank].suspend()
    return ends_trained(place, laboratory, started, fault)


def launcher_signalled(number_of_signal: int, place: Place, laboratory: Laboratory, number: int) -> float:
    """MPI's launcher ends below `caffepy launch`."""
    started = slow(place, laboratory)
    fault = time.time()
    os.kill(psutil.Process(started[0].pid).children()[0].pid, number_of_signal)
    return ends_trained(place, laboratory, started, fault)


def parent_signalled(number_of_signal: int, place: Place, laboratory: Laboratory, number: int) -> float:
    """Ctrl-C or SIGTERM: all ranks save and stop; the same command with ``--snapshot auto`` goes on."""
    started = slow(place, laboratory)
    fault = time.time()
    os.kill(started[0].pid, number_of_signal)
    outcome = laboratory.finish(started, fault=fault)
    assert outcome.status == 0 and not outcome.errors(), f"status {outcome.status}:\n{outcome.log}"
    assert "Optimization stopped early." in outcome.log and outcome.snapshots()[-1] < _ITERATIONS, outcome.log
    seconds = outcome.seconds_after_fault()
    assert seconds < LIMIT, f"ended {seconds:.1f} s after the signal:\n{outcome.log}"
    again = laboratory.finish(start(place, laboratory, "--snapshot", "auto", prefix=outcome.prefix))
    check_trained(place, laboratory, again, restarted=False)
    return seconds


def parent_signalled_twice(place: Place, laboratory: Laboratory, number: int) -> float:
    """The second Ctrl-C does not wait for a rank that sleeps."""
    started = start(place, laboratory, FAULT=f"sleep {place.device} {iteration(number)}")
    laboratory.wait_for_fault(started)
    fault = time.time()
    for _ in range(2):
        os.kill(started[0].pid, signal.SIGINT)
        time.sleep(0.3)
    outcome = laboratory.finish(started, fault=fault)
    assert outcome.status == 130, f"status {outcome.status}:\n{outcome.log}"
    assert "interrupted again: ending at once" in outcome.log and "restart 1" not in outcome.log, outcome.log
    return check_end_in_time(outcome)


def parent_killed(place: Place, laboratory: Laboratory, number: int) -> float:
    """Nobody outlives the parent."""
    started = slow(place, laboratory)
    fault = time.time()
    started[0].kill()
    outcome = laboratory.finish(started, fault=fault)
    assert outcome.status == -signal.SIGKILL
    return check_end_in_time(outcome)


def cut_record(place: Place, laboratory: Laboratory, number: int) -> float:
    """Damaged data are a mistake in what was given: another start would meet them again."""
    record = 64 * (iteration(number) % 10)
    data = f"launched{record}_lmdb"
    if not (laboratory.folder / data).exists():
        write_lmdb(laboratory.folder / data, cut=record)
    fault = f"mark 0 {max(0, iteration(number) % 10 - 1)}"
    outcome = laboratory.finish(start(place, laboratory, net_text=NET.replace("train_lmdb", data), FAULT=fault))
    assert outcome.status == 2 and "restart 1" not in outcome.log, f"status {outcome.status}:\n{outcome.log}"
    assert "not started again: another start would meet the same mistake" in outcome.log, outcome.log
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
    "cut record": (cut_record, [], [Place(0, 2)]),
    "launcher SIGTERM": (partial(launcher_signalled, signal.SIGTERM), [], [Place(0, 2)]),
    "launcher SIGKILL": (partial(launcher_signalled, signal.SIGKILL), [], [Place(0, 2)]),
    "parent SIGINT": (partial(parent_signalled, signal.SIGINT), [Place(0, 2)], []),
    "parent SIGTERM": (partial(parent_signalled, signal.SIGTERM), [], [Place(0, 2)]),
    "parent SIGINT twice": (parent_signalled_twice, [], [Place(1, 2)]),
    "parent SIGKILL": (parent_killed, [Place(0, 2)], []),
}
"""Each kind's check, where the tests make it happen, and where `endurance.py` does as well."""
RESTART_FAULTS = [
    FaultCase(kind, str(place), partial(check, place), mpi=True, further=place in further)
    for kind, (check, tested, further) in _KINDS.items()
    for place in (*tested, *further)
]
