"""Whatever fails, every process ends soon, and one message names the culprit."""

from __future__ import annotations

import os
import re
import signal
import time

import psutil
import pytest
from laboratory import LIMIT, LONG, Laboratory


def ranks_of(pid: int) -> dict[int, psutil.Process]:
    """The processes that mpirun started, by their rank."""
    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        rank = child.environ().get("OMPI_COMM_WORLD_RANK", child.environ().get("PMI_RANK"))
        if rank is not None:
            found[int(rank)] = child
    return found


def test_an_exception_in_one_rank_ends_all(laboratory: Laboratory) -> None:
    outcome = laboratory.train(ranks=2, batch=32, iterations=LONG, FAULT="raise 1 5")
    assert outcome.status == 1
    assert outcome.seconds_after_fault() < LIMIT
    (message,) = outcome.errors()
    assert re.fullmatch(
        r"rank 1 on \S+, device CPU, iteration 5: layer 'fault' \(Fault\): ValueError: injected", message
    )
    assert "Traceback" not in outcome.log


def test_an_exception_in_one_thread_ends_the_process(laboratory: Laboratory) -> None:
    outcome = laboratory.train("--cpu-solvers", "3", iterations=LONG, FAULT="raise 2 5")
    assert outcome.status == 1
    assert outcome.seconds_after_fault() < LIMIT
    assert outcome.errors() == ["device CPU 2, iteration 5: layer 'fault' (Fault): ValueError: injected"]


@pytest.mark.parametrize(("victim", "ranks"), [(0, 2), (1, 2), (1, 3)])
def test_a_killed_rank_is_named(laboratory: Laboratory, victim: int, ranks: int) -> None:
    outcome = laboratory.train(ranks=ranks, batch=32, iterations=LONG, FAULT=f"kill {victim} 8")
    assert outcome.status not in (0, None)
    assert outcome.seconds_after_fault() < LIMIT
    reports = [message for message in outcome.errors() if "ended unexpectedly" in message]
    assert len(reports) == len(outcome.errors()) == 1, outcome.log
    assert re.match(rf"rank {victim} on \S+( \(process \d+\))? at iteration \d+ ended unexpectedly", reports[0])


def test_a_rank_that_sleeps_is_named(laboratory: Laboratory) -> None:
    outcome = laboratory.train("--timeout", "2", ranks=2, batch=32, iterations=LONG, FAULT="sleep 1 5")
    assert outcome.status == 1
    assert outcome.seconds_after_fault() < 2 + LIMIT
    (message,) = outcome.errors()
    where = r"(part \d of \d of )?the gradients' all-reduce of iteration 5"
    assert re.search(rf"has waited \d s in {where} for rank 1 on \S+, process \d+", message)


def test_a_thread_that_sleeps_is_named(laboratory: Laboratory) -> None:
    outcome = laboratory.train("--cpu-solvers", "2", "--timeout", "2", iterations=LONG, FAULT="sleep 1 5")
    assert outcome.status == 1
    assert outcome.seconds_after_fault() < 2 + LIMIT
    (message,) = outcome.errors()
    assert re.search(r"device CPU 0 has waited .* iteration 5 for rank 0 on \S+, process \d+, device CPU 1", message)


def test_a_stopped_process_is_named(laboratory: Laboratory) -> None:
    """SIGSTOP also stops the rank's own watchdog, and here rank 0, which watches over all."""
    started = laboratory.start("--timeout", "2", ranks=2, batch=32, iterations=LONG, snapshot=10)
    laboratory.wait_for_snapshot(started, 10)
    stopped = ranks_of(started[0].pid)[0]
    stopped.suspend()
    outcome = laboratory.finish(started)
    assert outcome.status != 0
    (message,) = outcome.errors()
    assert re.search(r"rank 1 on .* has waited .* for rank 0 on", message)


@pytest.mark.parametrize("culprit", [0, 1])
def test_sigint_to_one_rank_stops_all_with_a_snapshot(laboratory: Laboratory, culprit: int) -> None:
    outcome = laboratory.train(ranks=2, batch=32, iterations=LONG, FAULT=f"SIGINT {culprit} 12", DELAY="0.01")
    assert outcome.status == 0, outcome.log
    assert outcome.seconds_after_fault() < LIMIT
    assert "Optimization stopped early." in outcome.log
    assert not outcome.errors()
    (state,) = laboratory.folder.glob(f"{outcome.prefix}_iter_*.solverstate")
    assert outcome.weights(int(state.stem.split("_iter_")[1]))


def test_sigterm_to_one_rank_writes_a_snapshot_and_ends_well(laboratory: Laboratory) -> None:
    started = laboratory.start(ranks=2, batch=32, iterations=LONG, snapshot=10, DELAY="0.01")
    laboratory.wait_for_snapshot(started, 10)
    ranks_of(started[0].pid)[1].send_signal(signal.SIGTERM)
    outcome = laboratory.finish(started)
    assert outcome.status == 0, outcome.log
    assert not outcome.errors()
    assert "To go on from here" in outcome.log


def test_sighup_writes_a_snapshot_and_training_goes_on(laboratory: Laboratory) -> None:
    outcome = laboratory.train("--cpu-solvers", "2", iterations=30, FAULT="SIGHUP 0 12", DELAY="0.01")
    assert outcome.status == 0, outcome.log
    states = {path.name for path in laboratory.folder.glob(f"{outcome.prefix}_iter_*.solverstate")}
    assert len(states) == 2 and f"{outcome.prefix}_iter_30.solverstate" in states


def test_a_second_sigint_ends_at_once(laboratory: Laboratory) -> None:
    started = laboratory.start(iterations=LONG, snapshot=10, FAULT="sleep 0 15")
    laboratory.wait_for_snapshot(started, 10)
    time.sleep(0.5)
    for _ in range(2):
        os.kill(started[0].pid, signal.SIGINT)
        time.sleep(0.3)
    outcome = laboratory.finish(started)
    assert outcome.status == 130
    assert outcome.errors() == ["interrupted again: ending at once"]


def test_a_mistake_that_all_ranks_find_is_reported_once(laboratory: Laboratory) -> None:
    outcome = laboratory.train("--snapshot", "nowhere.solverstate", ranks=2, batch=32)
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert "nowhere.solverstate" in message and "ended unexpectedly" not in outcome.log


def test_ranks_with_different_devices_are_refused(laboratory: Laboratory) -> None:
    outcome = laboratory.train("--cpu-solvers", "{rank+1}", ranks=2, batch=32)
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert re.search(
        r"ranks have different devices: rank 0 on \S+ has 1 CPU solver, rank 1 on \S+ has 2 CPU solvers; give", message
    )


def test_an_mpirun_of_another_mpi_is_noticed(laboratory: Laboratory) -> None:
    """A launcher whose variables the MPI library does not know: it starts alone."""
    pytest.importorskip("mpi4py")
    outcome = laboratory.train(iterations=2, PMI_RANK="0", PMI_SIZE="2")
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert "mpiexec started 2 processes, but " in message and "different MPIs" in message


def test_one_process_needs_no_mpi(laboratory: Laboratory) -> None:
    outcome = laboratory.train(iterations=2, FORBID="mpi4py")
    assert outcome.status == 0, outcome.log


def test_several_ranks_without_mpi4py_are_told_what_to_install(laboratory: Laboratory) -> None:
    outcome = laboratory.train(iterations=2, FORBID="mpi4py", PMI_RANK="0", PMI_SIZE="2")
    assert outcome.status == 2
    assert "mpi4py is not installed and is needed to train on several ranks: pip install 'caffepy[mpi]'" in outcome.log
