"""A loss that is not finite: where it began, and training that goes on."""

from __future__ import annotations

import pytest
from training import CPU, PLAIN, TINY, build_solver

from caffepy.errors import NonFiniteError
from caffepy.training.solver import Solver
from caffepy.utils.options import ExecutionOptions


def poison(solver: Solver) -> None:
    CPU.fill(solver.net.layers[1].blobs[0].data, float("nan"))


@pytest.mark.parametrize("share", [False, True])
def test_a_loss_that_is_not_finite_names_iteration_and_layer(share: bool) -> None:
    with build_solver(PLAIN, TINY, engine=ExecutionOptions(share=share)) as solver:
        solver.step(1)
        poison(solver)
        where = "in another forward pass " if share else ""
        message = rf"iteration 1: the loss is nan; {where}the first layer whose output is not finite is 'ip' \(Inner"
        with pytest.raises(NonFiniteError, match=message):
            solver.step(1)


def test_keep_going_only_warns(caplog: pytest.LogCaptureFixture) -> None:
    with build_solver(PLAIN, TINY, keep_going=True) as solver:
        poison(solver)
        solver.step(2)
        assert solver.iteration == 2
    assert "iteration 1: the loss is nan" in caplog.text
