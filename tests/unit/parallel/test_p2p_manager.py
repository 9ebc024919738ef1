"""How a training run ends."""

from __future__ import annotations

import pytest
from replaying import NET
from training import solver_param

from caffepy.errors import AbortedError, RunError
from caffepy.parallel.options import TrainOptions
from caffepy.parallel.p2p_manager import P2PManager
from caffepy.parallel.p2p_sync import P2PSync
from caffepy.solvers import Solver
from caffepy.solvers.callbacks import Action

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" random_seed: 3 snapshot_after_train: false max_iter: 5 '


def run(solvers: int) -> None:
    P2PManager(TrainOptions(solver_param(SOLVER, NET), cpu_solvers=solvers, threads=1, timeout=20)).run()


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_run_that_was_aborted_without_a_failure_is_an_error(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    """Whatever lets a wait go: nobody may take it for the end of training."""
    solve = Solver.solve

    def let_go(solver: Solver) -> None:
        solver.step(2)
        if solver.callback.is_root:
            raise AbortedError("another solver thread failed")
        solve(solver)

    monkeypatch.setattr(Solver, "solve", let_go)
    where = "device CPU 0, iteration 2: " if solvers > 1 else "^"
    text = r"training was stopped, and no device said why \(another solver thread failed\); go on from the last"
    with pytest.raises(RunError, match=where + text):
        run(solvers)


@pytest.mark.parametrize("solvers", [1, 2])
def test_a_run_that_ends_early_is_an_error(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    monkeypatch.setattr(Solver, "solve", lambda solver: solver.step(3))
    with pytest.raises(RunError, match="training has ended before max_iter, and no device said why; go on from"):
        run(solvers)


def test_a_thread_that_was_never_let_go_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(P2PSync, "go", lambda sync, state: sync.abort())
    with pytest.raises(RunError, match="training was stopped before it began"):
        run(1)


@pytest.mark.parametrize("solvers", [1, 2])
def test_the_end_of_training_and_a_stop_are_none(monkeypatch: pytest.MonkeyPatch, solvers: int) -> None:
    run(solvers)
    polls = iter([Action.NONE, Action.NONE, Action.STOP])
    monkeypatch.setattr("caffepy.parallel.signals.SignalRequests.__call__", lambda requests: next(polls, Action.NONE))
    run(solvers)
    assert next(polls, None) is None
