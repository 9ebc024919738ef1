"""Training with MultiBoxLoss, whose matching runs on the host between captured graphs."""

from __future__ import annotations

import logging

import detection_net
import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend
from training import build_solver, solver_param, weights_of

from caffepy.training.solver import create_solver
from caffepy.utils.options import ExecutionOptions


def _train(text: str = "") -> tuple[list[float], dict[str, np.ndarray]]:
    with build_solver(detection_net.SOLVER + text, detection_net.NET) as solver:
        detection_net.fill(solver)
        losses = []
        for _ in range(12):
            solver.step(1)
            losses.append(solver.net.loss())
        return losses, weights_of(solver.net)


def test_it_learns() -> None:
    losses, _ = _train()
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("iter_size", [1, 2])
def test_graphs_around_the_host_give_what_eager_iterations_give(iter_size: int) -> None:
    _, wanted = _train(f"iter_size: {iter_size}")
    backend = FakeGraphBackend()
    param = solver_param(detection_net.SOLVER + f"iter_size: {iter_size}", detection_net.NET)
    with backend.activate():
        solver = create_solver(param, backend, engine=ExecutionOptions())
        detection_net.fill(solver)
        solver.step(12)
        found = weights_of(solver.net)
        solver.close()
    assert backend.launches > 12 * iter_size, "an iteration is several graphs"
    for name, values in wanted.items():
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_reader_of_what_changes_its_shape_is_not_captured(caplog: pytest.LogCaptureFixture) -> None:
    more = """
    layer { name: "out" type: "DetectionOutput" bottom: "loc" bottom: "conf" bottom: "prior" top: "out"
      detection_output_param { num_classes: 3 code_type: CENTER_SIZE } }
    layer { name: "twice" type: "Power" bottom: "out" top: "twice" power_param { scale: 2 } }
    """
    backend = FakeGraphBackend()
    with backend.activate(), caplog.at_level(logging.DEBUG, "caffepy"):
        solver = create_solver(solver_param(detection_net.SOLVER, detection_net.NET + more), backend)
        detection_net.fill(solver)
        solver.step(3)
        assert solver.net.blobs["twice"].shape == solver.net.blobs["out"].shape
        np.testing.assert_allclose(
            solver.net.blobs["twice"].host_data(), 2 * solver.net.blobs["out"].host_data(), rtol=1e-6
        )
        solver.close()
    assert backend.launches > 0
    line = "the shapes change from pass to pass behind layer 'out'"
    assert any(line in record.getMessage() for record in caplog.records)
