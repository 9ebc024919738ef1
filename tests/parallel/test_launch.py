"""`caffepy launch` over real launchers and ranks: faults that come once leave no trace in what is trained."""

from __future__ import annotations

import subprocess
import sys

import pytest
from fault_case import FaultCase, Trials, parameters
from processes import program_environment
from restart_faults import RESTART_FAULTS
from subprocess_training import NET, PROGRAM, SubprocessTraining, assert_same_weights

from caffepy.version import __version__


@pytest.mark.parametrize("case", parameters(RESTART_FAULTS))
def test_what_was_trained_is_that_of_a_run_without_a_fault(trials: Trials, case: FaultCase) -> None:
    trials[case].result()


@pytest.mark.mpi
def test_fewer_ranks_take_the_same_samples(training: SubprocessTraining) -> None:
    """One rank goes on for two: the same training, to rounding, where no random number is drawn."""
    net = "".join(line for line in NET.splitlines(keepends=True) if '"Dropout"' not in line)
    two = training.train(ranks=2, batch=32, iterations=20, snapshot=10, net_text=net)
    assert two.status == 0, two.log
    state = f"{two.prefix}_iter_10.solverstate"
    one = training.train("--snapshot", state, ranks=1, batch=32, iterations=20, net_text=net, CAFFEPY_BATCH_RANKS="2")
    assert one.status == 0 and "1 ranks train for 2: iter_size is 2" in one.log, one.log
    assert_same_weights(one, two, 20)


def test_a_run_is_made_again_from_its_log(training: SubprocessTraining) -> None:
    first = training.train(iterations=8)
    for line in (f"caffepy {__version__}, Python 3.", "Device 0: rank 0 on ", "Initializing solver from parameters, "):
        assert line in first.log
    wanted = first.weights(8)
    model = training.folder / f"{first.prefix}_iter_8.caffemodel"
    model.unlink()
    command = [sys.executable, str(PROGRAM), "train", "--cpu", "--from-log", str(training.log(first.prefix))]
    again = subprocess.run(
        command, cwd=training.folder, env=program_environment({}), capture_output=True, text=True, timeout=300
    )
    assert again.returncode == 0 and model.exists(), again.stderr
    assert {name: values.tobytes() for name, values in first.weights(8).items()} == {
        name: values.tobytes() for name, values in wanted.items()
    }
