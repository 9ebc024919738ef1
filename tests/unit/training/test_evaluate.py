"""Tests during training on a CPU that plays a capturing device: folded, replayed, with the scores of eager ones."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend
from training import build_solver, solver_param, weights_of

from caffepy.net.fold import FoldedConvolution
from caffepy.training.callback import Action, SingleDevice
from caffepy.training.solver import Solver, create_solver
from caffepy.utils.options import ExecutionOptions

SOLVER = (
    'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 random_seed: 3 test_iter: 3 test_interval: 2 '
    "test_initialization: true "
)
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 dim: 6 dim: 6 } shape { dim: 4 } data_filler { type: "gaussian" }
  data_filler { type: "constant" value: 1 } } }
layer { name: "c" type: "Convolution" bottom: "data" top: "c"
  convolution_param { num_output: 5 kernel_size: 3 weight_filler { type: "msra" } } }
layer { name: "n" type: "BatchNorm" bottom: "c" top: "c" }
layer { name: "s" type: "Scale" bottom: "c" top: "c" scale_param { bias_term: true } }
layer { name: "r" type: "ReLU" bottom: "c" top: "c" }
layer { name: "ip" type: "InnerProduct" bottom: "c" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
layer { name: "accuracy" type: "Accuracy" bottom: "ip" bottom: "label" top: "accuracy" include { phase: TEST } }
"""


class Pair(SingleDevice):
    """A second device that does as this one, except that it may be unable to capture the test's passes."""

    world_size = 2

    def __init__(self) -> None:
        self.captures = True
        self.meetings: list[float] = []

    def sum_over_devices(self, values: np.ndarray) -> np.ndarray:
        return values * 2

    def min_over_devices(self, number: float, what: str) -> float:
        if "test graphs" not in what:
            return number
        self.meetings.append(number)
        return min(number, float(self.captures))


@contextmanager
def training(text: str = SOLVER, net: str = NET, callback: Pair | None = None, **engine: Any) -> Iterator[Solver]:
    backend = FakeGraphBackend()
    with backend.activate():
        options = ExecutionOptions(**engine)
        solver = create_solver(solver_param(text, net), backend, engine=options, callback=callback)
        try:
            yield solver
        finally:
            solver.close()


PLAIN = {"eager": True, "fuse": False, "share": False}
"""Layer by layer, nothing replayed."""


def score(solver: Solver) -> dict[str, float]:
    return {name: float(value.mean()) for name, value in solver.test_all()[0].items()}


def graphs(solver: Solver) -> bool:
    return solver.tests[0].captured


def test_scores_are_those_of_eager_and_unfused_tests() -> None:
    with training() as solver, training(**PLAIN) as plain:
        for _ in range(3):
            found, wanted = score(solver), score(plain)
            assert found == pytest.approx(wanted, rel=1e-4)
            assert (graphs(solver), graphs(plain)) == (True, False)
            for each in (solver, plain):
                each.step(3)
        folded, single = ([node.layer for node in each.test_nets[0].schedule] for each in (solver, plain))
        assert sum(isinstance(layer, FoldedConvolution) for layer in folded) == 1
        assert not any(isinstance(layer, FoldedConvolution) for layer in single)


def test_on_the_cpu_train_nets_are_fused_and_test_nets_folded() -> None:
    with build_solver(SOLVER, NET) as solver, build_solver(SOLVER, NET, engine=ExecutionOptions(fuse=False)) as plain:
        assert score(solver) == pytest.approx(score(plain), rel=1e-5)
        types = [[node.layer.type for node in net.schedule] for net in (solver.net, solver.test_nets[0])]
        assert "BatchNorm + Scale + ReLU" in types[0]
        assert "Convolution + BatchNorm + Scale + ReLU" in types[1]
        assert all(net.schedule is net.nodes for net in (plain.net, plain.test_nets[0]))


def test_all_passes_but_the_first_are_replayed() -> None:
    with training() as solver:
        assert isinstance(solver.backend, FakeGraphBackend)
        for launched in (2, 5, 8):
            solver.test_all()
            assert solver.backend.launches == launched


def test_training_is_the_same_with_tests_as_they_are(tmp_path: Path) -> None:
    """Folding and replaying the tests leave the parameters alone; a resumed run is the same to the bit."""
    text = SOLVER + f'snapshot: 4 snapshot_prefix: "{tmp_path}/x"'
    with training(text) as solver:
        solver.step(8)
        wanted, scored = weights_of(solver.net), score(solver)
    with training(text) as solver:
        solver.restore(tmp_path / "x_iter_4.solverstate")
        solver.step(4)
        assert score(solver) == scored
        for name, values in weights_of(solver.net).items():
            np.testing.assert_array_equal(values, wanted[name])


def test_a_restored_seed_drops_the_graphs(tmp_path: Path) -> None:
    with training(SOLVER + f'snapshot_prefix: "{tmp_path}/x"') as solver:
        solver.step(1)
        path = solver.snapshot()
        solver.test_all()
        assert graphs(solver)
        solver.restore(path)
        assert not graphs(solver)


def test_debug_info_shows_every_layer(caplog: pytest.LogCaptureFixture) -> None:
    with training(SOLVER + "debug_info: true ") as solver, caplog.at_level(logging.INFO):
        solver.test_all()
        assert not solver.tests[0].wanted
        assert "Layer n, top blob c" in caplog.text


def test_devices_capture_together_at_the_start_of_a_test() -> None:
    callback = Pair()
    with training(callback=callback) as solver:
        captured = []
        for _ in range(3):
            solver.test_all()
            captured.append(graphs(solver))
        assert captured == [False, True, True]
        assert callback.meetings == [1, 1, 1]


def test_nobody_captures_tests_where_one_device_cannot() -> None:
    callback = Pair()
    callback.captures = False
    with training(callback=callback) as solver:
        scores = [score(solver) for _ in range(3)]
        assert not graphs(solver)
        assert callback.meetings == [1], "after that nobody asks any more"
        assert len(scores) == 3


def test_a_device_alone_asks_before_every_batch_whether_to_end() -> None:
    asked = []

    def request() -> Action:
        asked.append(solver.test_nets[0].context.passes.number)
        return Action.STOP if asked[-1] == 1 else Action.NONE

    with build_solver(SOLVER, NET, request=request) as solver:
        assert solver.test_all() == []
        assert solver.test_nets[0].context.passes.number == 1
