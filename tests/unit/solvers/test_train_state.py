"""The parts of a solver over a `TrainState`, without a solver."""

from __future__ import annotations

import ast
import logging
from pathlib import Path

import numpy as np
import pytest
from training import CPU, TINY, build_net, build_solver, solver_param, weights_of

import caffepy.solvers
from caffepy.config.paths import PathResolver
from caffepy.data.schedule import Shard
from caffepy.errors import NonFiniteError
from caffepy.net.forward_runner import ForwardRunner
from caffepy.report import Performance
from caffepy.snapshot.solverstate import read_solverstate
from caffepy.solvers import Action, SingleDevice
from caffepy.solvers.clock import Clock
from caffepy.solvers.eager import EagerIteration
from caffepy.solvers.graph_runner import CudaGraphRunner
from caffepy.solvers.hyperparameters import Hyperparameters
from caffepy.solvers.io.display import Display
from caffepy.solvers.io.state import adopt_state, write_snapshot
from caffepy.solvers.io.testing import run_test
from caffepy.solvers.iteration import IterationSteps
from caffepy.solvers.loss import LossWindow
from caffepy.solvers.loss_check import LossCheck
from caffepy.solvers.requests import Requests
from caffepy.solvers.rules.sgd import sgd_update
from caffepy.solvers.rules.update import Update
from caffepy.solvers.train_state import RootLog, TrainState
from caffepy.trace import NO_TRACE

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 display: 2 test_iter: 2 test_interval: 100 random_seed: 1 '


def train_state(text: str = SOLVER) -> TrainState:
    net, param, callback = build_net(TINY, seed=1), solver_param(text), SingleDevice()
    history = [net.parameters.new_history()]
    net.prepare()
    return TrainState(
        param=param,
        backend=CPU,
        shard=Shard(),
        resolve=PathResolver(None),
        callback=callback,
        trace=NO_TRACE,
        log=RootLog(callback.is_root),
        requests=Requests(None),
        losses=LossWindow(1),
        net=net,
        tests=[ForwardRunner(net)],
        history=history,
        update=Update(net, sgd_update, history, -1.0, False, 1),
    )


class Parts:
    """Runs iterations over a state."""

    def __init__(self, state: TrainState, keep_going: bool = False) -> None:
        self.state = state
        self.hyperparameters = Hyperparameters(state, lambda rate, momentum: (rate, momentum))
        steps = IterationSteps(state, self.hyperparameters)
        runner = CudaGraphRunner(state, steps, eager=True)
        self.loss_check = LossCheck(state, runner, keep_going, shares_memory=False)
        display = Display(state, Clock(Performance(batch=4), CPU), self.hyperparameters)
        self.eager = EagerIteration(state, steps, display, self.loss_check)

    def step(self, iterations: int) -> None:
        for _ in range(iterations):
            self.hyperparameters.send()
            self.eager.run(self.state.iteration % 2 == 0, True)
            self.state.iteration += 1


def test_iterations_without_a_solver_give_the_solvers_weights(caplog: pytest.LogCaptureFixture) -> None:
    with CPU.activate(), caplog.at_level(logging.INFO):
        parts = Parts(train_state())
        parts.step(3)
    lines = [record.getMessage() for record in caplog.records]
    assert [line for line in lines if ", lr" in line] == [f"Iteration {i}, lr = 0.1" for i in (0, 2)]
    with build_solver(SOLVER + "test_initialization: false", TINY) as solver:
        solver.step(3)
        for name, values in weights_of(solver.net).items():
            np.testing.assert_array_equal(values, weights_of(parts.state.net)[name])


def test_the_loss_check_names_the_iteration_of_its_state(caplog: pytest.LogCaptureFixture) -> None:
    with CPU.activate():
        state = train_state()
        state.iteration = 7
        with pytest.raises(NonFiniteError, match="iteration 7: the loss is inf; lower base_lr"):
            Parts(state).loss_check.check(float("inf"))
        Parts(state, keep_going=True).loss_check.check(float("nan"))
    assert "iteration 7: the loss is nan" in caplog.text


def test_a_test_asks_before_every_batch_whether_to_end() -> None:
    answers = iter([False, True])
    with CPU.activate():
        state = train_state()
        assert run_test(state, 0, lambda: next(answers)) is None
        assert state.net.context.passes.number == 1
        scores = run_test(state, 0, lambda: False)
    assert scores is not None and scores["loss"] > 0


def test_layers_without_records_have_no_position_in_a_snapshot(tmp_path: Path) -> None:
    with CPU.activate():
        state = train_state(SOLVER + f'snapshot_prefix: "{tmp_path}/x"')
        state.iteration = 5
        saved = read_solverstate(write_snapshot(state)).message
        assert not saved.data_position
        resumed = train_state()
        adopt_state(resumed, saved)
        with pytest.raises(NotImplementedError):
            state.net.layers[0].seek(3)
    assert resumed.iteration == 5


def test_only_the_root_of_solvers_and_the_rules_know_the_solver() -> None:
    """Parts that import `Solver`, for type checking included, close a circle of imports."""
    folder = Path(caffepy.solvers.__path__[0])
    importing = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module == "caffepy.solvers.base":
                importing.add(path.relative_to(folder).as_posix())
    rules = {f"rules/{rule}.py" for rule in ("adadelta", "adagrad", "adam", "nesterov", "rmsprop", "sag", "sgd")}
    assert importing == {"__init__.py"} | rules


def test_requests_of_a_device_alone_are_known_at_once() -> None:
    asked = [Action.STOP]
    requests = Requests(lambda: asked.pop() if asked else Action.NONE)
    requests.poll()
    assert Action.STOP in requests
