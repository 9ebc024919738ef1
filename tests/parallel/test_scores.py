"""Printed scores are those of the model that is saved, however many devices train a net with BatchNorm."""

from __future__ import annotations

import pytest
from processes import find_mpirun
from subprocess_training import NORMALISED_NET, SubprocessTraining, scores_of_snapshot

ITERATIONS = 25
"""When the only test falls due, so that it begins with the first sample as `caffepy test` does."""
TESTED_ONCE = "test_initialization: false"


@pytest.mark.parametrize(("ranks", "threads"), [(0, 1), (0, 4), (2, 1)])
def test_a_printed_score_is_that_of_the_snapshot(training: SubprocessTraining, ranks: int, threads: int) -> None:
    if ranks:
        find_mpirun()
    outcome = training.train(
        "--cpu-solvers",
        str(threads),
        ranks=ranks,
        batch=64 // max(ranks, 1),
        iterations=ITERATIONS,
        net_text=NORMALISED_NET,
        solver_text=TESTED_ONCE,
    )
    assert outcome.status == 0, outcome.log
    printed = [score.split(": ", 1)[1] for score in outcome.scores()]
    assert len(printed) == 2
    assert scores_of_snapshot(outcome, ITERATIONS) == printed


def test_statistics_that_were_averaged_are_resumed_to_the_same_bytes(training: SubprocessTraining) -> None:
    options = ("--cpu-solvers", "3")
    whole = training.train(*options, iterations=50, batch=24, snapshot=25, net_text=NORMALISED_NET)
    state = f"{whole.prefix}_iter_25.solverstate"
    part = training.train(*options, "--snapshot", state, iterations=50, batch=24, net_text=NORMALISED_NET)
    assert whole.status == part.status == 0, part.log
    for name, values in whole.weights(50).items():
        assert part.weights(50)[name].tobytes() == values.tobytes(), name
    assert part.scores() == whole.scores()[2:]
