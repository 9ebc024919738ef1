"""Whatever fails, every process ends soon, and one message names the culprit."""

from __future__ import annotations

import re
import time
from functools import partial

import pytest
from fault_case import FaultCase, Trials, parameters
from processes import find_mpirun, processes_of
from start_faults import START_FAULTS
from subprocess_training import NET, SubprocessTraining
from training_faults import TRAINING_FAULTS, check_message


@pytest.mark.parametrize("case", parameters(TRAINING_FAULTS))
def test_a_fault_ends_all_in_time_and_names_the_culprit(trials: Trials, case: FaultCase) -> None:
    trials[case].result()


def test_sighup_writes_a_snapshot_and_training_goes_on(training: SubprocessTraining) -> None:
    outcome = training.train("--cpu-solvers", "2", iterations=30, FAULT="SIGHUP 0 12", DELAY="0.01")
    assert outcome.status == 0, outcome.log
    states = {path.name for path in training.folder.glob(f"{outcome.prefix}_iter_*.solverstate")}
    assert len(states) == 2 and f"{outcome.prefix}_iter_30.solverstate" in states


def check_suspension(training: SubprocessTraining, _: int, ranks: int, solvers: int) -> float:
    """Suspended for longer than any wait may last, training goes on; the last device keeps the first one waiting."""
    options = ("--cpu-solvers", str(solvers), "--timeout", "3")
    started = training.start(
        *options, ranks=ranks, batch=64 // max(ranks, 1), iterations=20, snapshot=5, DELAY="0,0.2", PATIENCE="0.2"
    )
    training.wait_for_snapshot(started, 5)
    time.sleep(0.3)  # the first device waits for the last one
    begin = time.monotonic()
    processes = processes_of(training.mark(started[1]))
    for process in processes:
        process.suspend()
    time.sleep(4.0)
    for process in processes:
        process.resume()
    outcome = training.finish(started)
    assert outcome.status == 0 and not outcome.errors(), outcome.log
    assert outcome.snapshots()[-1] == 20
    return time.monotonic() - begin


SUSPENSIONS = [
    FaultCase("all suspended", "threads", partial(check_suspension, ranks=0, solvers=2)),
    FaultCase("all suspended", "ranks", partial(check_suspension, ranks=2, solvers=1), mpi=True),
]


@pytest.mark.parametrize("case", parameters(SUSPENSIONS))
def test_time_in_which_all_were_suspended_does_not_count(trials: Trials, case: FaultCase) -> None:
    trials[case].result()


def test_a_mistake_that_all_ranks_find_is_reported_once(training: SubprocessTraining) -> None:
    outcome = training.train("--snapshot", "nowhere.solverstate", ranks=2, batch=32)
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert "nowhere.solverstate" in message and "ended unexpectedly" not in outcome.log


@pytest.mark.mpi
@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--gpus", "x"], r"^argument --gpus: 'x' is neither"),
        (["--cpu", "--bogus"], r"^unknown option '--bogus'"),
        (["--cpu", "--trace-iterations", "1:3"], r"^--trace-iterations says what --trace FILE shows"),
        (["{--cpu|--gpus=x}"], r"^rank 1 on \S+: argument --gpus: 'x' is neither"),
    ],
    ids=["value", "unknown", "together", "one rank"],
)
def test_a_mistake_in_the_options_is_reported_once(
    training: SubprocessTraining, options: list[str], message: str
) -> None:
    outcome = training.train(*options, devices=(), ranks=2, batch=32)
    check_message(outcome, message, 2)


@pytest.mark.mpi
@pytest.mark.parametrize("solvers", [1, 2])
def test_a_loss_that_is_not_finite_names_rank_device_and_iteration_once(
    training: SubprocessTraining, solvers: int
) -> None:
    net = NET.replace("scale: 0.00390625", "scale: 1e38")
    outcome = training.train("--cpu-solvers", str(solvers), ranks=2, batch=32, net_text=net)
    check_message(outcome, r"^rank \d on \S+, device CPU( \d)?, iteration 0: the loss is (nan|inf)", 1)


def test_ranks_with_different_devices_are_refused(training: SubprocessTraining) -> None:
    outcome = training.train("--cpu-solvers", "{rank+1}", ranks=2, batch=32)
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert re.search(
        r"ranks have different devices: rank 0 on \S+ has 1 CPU solver, rank 1 on \S+ has 2 CPU solvers; give", message
    )


def test_an_mpirun_of_another_mpi_is_noticed(training: SubprocessTraining) -> None:
    """A launcher whose variables the MPI library does not know: it starts alone."""
    find_mpirun()
    outcome = training.train(iterations=2, PMI_RANK="0", PMI_SIZE="2")
    assert outcome.status == 2
    (message,) = outcome.errors()
    assert "mpiexec started 2 processes, but " in message and "different MPIs" in message


def test_one_process_needs_no_mpi(training: SubprocessTraining) -> None:
    outcome = training.train(iterations=2, FORBID="mpi4py")
    assert outcome.status == 0, outcome.log


def test_several_ranks_without_mpi4py_are_told_what_to_install(training: SubprocessTraining) -> None:
    outcome = training.train(iterations=2, FORBID="mpi4py", PMI_RANK="0", PMI_SIZE="2")
    assert outcome.status == 2
    assert (
        "mpi4py is not installed and is needed to train on several ranks: " in outcome.log and "[mpi]'" in outcome.log
    )


@pytest.mark.parametrize("case", parameters(START_FAULTS))
def test_a_rank_that_falls_out_at_any_moment_ends_all(trials: Trials, case: FaultCase) -> None:
    trials[case].result()
