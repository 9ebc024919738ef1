"""Whoever reaches rank 0's port while two ranks train changes nothing; afterwards a stopped rank is still named."""

from __future__ import annotations

import re
import threading
import time

import psutil
import pytest
from fault_case import FaultCase, Trials, parameters
from processes import ranks_of
from strangers import connect, control_port, introduction, send_garbage, send_slowly, silent_connections
from subprocess_training import LIMIT, LONG, Outcome, SubprocessTraining

TIMEOUT = 3.0
pytestmark = pytest.mark.mpi


def start(
    training: SubprocessTraining, *options: str, iterations: int
) -> tuple[object, psutil.Process, psutil.Process]:
    """Two ranks with few descriptors that train already."""
    started = training.start(
        *options, ranks=2, batch=32, iterations=iterations, snapshot=5, DELAY="0.02", DESCRIPTORS="256"
    )
    training.wait_for_snapshot(started, 5)
    ranks = ranks_of(training.mark(started[1]))
    return started, ranks[0], ranks[1]


def attack(port: int) -> None:
    """All that strangers can do, for some seconds: garbage, silence, wrong proofs, oversized and slow answers."""
    with silent_connections(port, 400), connect(port) as slow:
        send_garbage(port)
        with connect(port) as line:
            answer = introduction(line.recv(40), "guess")
            for _ in range(3):  # replayed
                with connect(port) as again:
                    again.recv(40)
                    again.sendall(answer)
        send_slowly(slow, answer, 0.02)


def descriptors(process: psutil.Process, stop: threading.Event, seen: list[int]) -> None:
    while not stop.wait(0.05):
        seen.append(process.num_fds())


def check_training(training: SubprocessTraining, _: int) -> float:
    """Training that strangers attack ends as without them."""
    started, root, _ = start(training, iterations=250)
    port = control_port(root)
    stop, seen = threading.Event(), [0]
    watching = threading.Thread(target=descriptors, args=(root, stop, seen))
    before = root.num_fds()
    begin = time.monotonic()
    watching.start()
    try:
        attack(port)
    finally:
        stop.set()
        watching.join()
    outcome: Outcome = training.finish(started)  # type: ignore[arg-type]
    assert outcome.status == 0 and not outcome.errors(), outcome.log
    assert outcome.snapshots()[-1] == 250 and "Optimization Done." in outcome.log, outcome.log
    assert max(seen) <= before + 48, f"{before} descriptors, {max(seen)} under attack"
    return time.monotonic() - begin


def check_stopped_rank(training: SubprocessTraining, _: int) -> float:
    """A rank that is stopped after an attack is named."""
    started, root, other = start(training, "--timeout", f"{TIMEOUT:g}", iterations=LONG)
    attack(control_port(root))
    fault = time.time()
    other.suspend()
    outcome: Outcome = training.finish(started, fault=fault)  # type: ignore[arg-type]
    assert outcome.status != 0, outcome.log
    (message,) = outcome.errors()
    assert re.search(r"^rank 0 on .* has waited \d+ s in .* for rank 1 on", message), outcome.log
    seconds = outcome.seconds_after_fault()
    assert seconds < TIMEOUT + LIMIT, outcome.log
    return seconds


ATTACKS = [
    FaultCase("strangers", "training ends as without them", check_training, mpi=True),
    FaultCase("strangers", "a rank that is stopped afterwards is named", check_stopped_rank, mpi=True),
]


@pytest.mark.parametrize("case", parameters(ATTACKS))
def test_strangers_change_nothing(trials: Trials, case: FaultCase) -> None:
    trials[case].result()
