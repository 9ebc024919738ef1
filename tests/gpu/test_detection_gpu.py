"""SSD's layers on a GPU: training with graphs around the host, and half precision."""

from __future__ import annotations

import detection_net
import numpy as np
import pytest
from training import build_solver, solver_param, weights_of

from caffepy.backend import Backend
from caffepy.solvers import create_solver
from caffepy.solvers.execution_options import ExecutionOptions


def _train(backend: Backend, text: str = "", eager: bool = False) -> tuple[float, dict[str, np.ndarray]]:
    param = solver_param(detection_net.SOLVER, text + detection_net.NET)
    solver = create_solver(param, backend, engine=ExecutionOptions(eager=eager))
    try:
        detection_net.fill(solver)
        solver.step(12)
        backend.synchronize()
        return solver.net.loss(), weights_of(solver.net)
    finally:
        solver.close()


def test_captured_and_eager_iterations_give_the_same(backend: Backend) -> None:
    _, captured = _train(backend)
    _, eager = _train(backend, eager=True)
    for name, values in eager.items():
        np.testing.assert_allclose(captured[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_gpu_trains_as_the_cpu(backend: Backend) -> None:
    with build_solver(detection_net.SOLVER, detection_net.NET) as solver:
        detection_net.fill(solver)
        solver.step(12)
        wanted = solver.net.loss()
    found, _ = _train(backend, eager=True)
    assert found == pytest.approx(wanted, rel=2e-2)


@pytest.mark.parametrize("kind", ["FLOAT16", "BFLOAT16"])
def test_half_precision_trains(backend: Backend, kind: str) -> None:
    text = f"default_forward_type: {kind} default_backward_type: {kind} "
    first, _ = _train(backend)
    found, _ = _train(backend, text)
    assert found == pytest.approx(first, rel=0.2)
