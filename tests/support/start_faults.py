"""Signals and errors at fifty moments of the life of a rank, from its first import to its exit."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from fault_case import FaultCase
from processes import REPOSITORY, ranks_of
from subprocess_training import LIMIT, SubprocessTraining

PROGRAM = REPOSITORY / "tests" / "parallel" / "struck.py"
MOMENTS = 50
_STEP = 17
"""Between the moments of two rounds, so that few rounds are far apart."""
_WAYS: dict[str, dict[str, Any]] = {
    "mpirun": {},
    "launch with MPI": {"launch": ()},
    "launch": {"mpi": False, "launch": ()},
}
_LAUNCHER_SECONDS = 10.0
"""Time for mpirun to end after its ranks."""
_counting = threading.Lock()
_functions: WeakKeyDictionary[SubprocessTraining, int] = WeakKeyDictionary()


def functions_of_a_run(training: SubprocessTraining) -> int:
    """How many functions a rank enters in a run; counted once."""
    with _counting:
        if training not in _functions:
            outcome = training.train(ranks=2, batch=32, iterations=2, program=PROGRAM, STRIKE="count 0 0")
            found = re.search(r"entered (\d+) functions", outcome.log)
            assert outcome.status == 0 and found, outcome.log
            _functions[training] = int(found[1])
        return _functions[training]


def struck(kind: str, way: str, first: int, training: SubprocessTraining, number: int) -> float:
    """A fault at any moment ends both ranks; even moments are rank 1's, odd ones rank 0's."""
    part = (first + _STEP * number) % MOMENTS
    moment = round(functions_of_a_run(training) * (part + 0.5) / MOMENTS)
    settings: dict[str, Any] = {"ranks": 2, "batch": 32, "iterations": 2, "program": PROGRAM, **_WAYS[way]}
    started = training.start(**settings, STRIKE=f"{kind} {1 - part % 2} {moment}")
    if way == "mpirun":
        _end_hung_launcher(training, started)
    outcome = training.finish(started, LIMIT)
    trained = "Optimization Done." in outcome.log or "Optimization stopped early." in outcome.log
    assert outcome.status != 0 or trained, f"status 0 without training:\n{outcome.log}"
    if "fault at " not in outcome.log:  # this way enters fewer functions
        assert outcome.status == 0, outcome.log
        return 0.0
    return outcome.seconds_after_fault()


def _end_hung_launcher(training: SubprocessTraining, started: tuple[subprocess.Popen[str], str]) -> None:
    """Wait for a run's end, and kill its mpirun if it hangs although all ranks have ended.

    Open MPI's launcher waits for ever if a rank ends in the middle of its first connection, and says PMIX_ERR_UNREACH.
    """
    process, prefix = started
    end, without_ranks = time.monotonic() + LIMIT, None
    while process.poll() is None and time.monotonic() < end:
        if ranks_of(training.mark(prefix)):
            without_ranks = None
        else:
            without_ranks = without_ranks or time.monotonic()
            log = training.log(prefix).read_text(errors="replace")
            if time.monotonic() > without_ranks + _LAUNCHER_SECONDS and "PMIX_ERR_UNREACH" in log:
                process.kill()
                return
        time.sleep(0.1)


_TESTED = {
    ("SIGINT", "mpirun"): (10, 12),  # before the ranks have joined, and after
    ("SIGINT", "launch"): (12,),
    ("MemoryError", "mpirun"): (12,),
    ("MemoryError", "launch"): (11,),
}
"""The moments that the tests try. In fifty rounds `endurance.py` tries all fifty."""
START_FAULTS = [
    FaultCase(
        f"start {kind}",
        f"from moment {first}, {way}",
        partial(struck, kind, way, first),
        mpi=True,
        further=(kind, way) not in _TESTED,
    )
    for kind in ("SIGINT", "SIGTERM", "MemoryError")
    for way in _WAYS
    for first in _TESTED.get((kind, way), (0,))
]
