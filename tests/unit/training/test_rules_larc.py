"""LARC, SAG and decoupled weight decay against the formulas of NVIDIA Caffe's GPU mode in float64.

`tests/golden/test_nvidia_solvers.py` compares the formulas of its CPU mode.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import CLASSIFIER, build_solver, solver_param, weights_of

from caffepy.errors import ConfigError
from caffepy.training.solver import Solver
from caffepy.training.solver_check import check_solver

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01 '
Arrays = dict[str, np.ndarray]
LR, DECAY = {"ip_0": 1.0, "ip_1": 2.0}, {"ip_0": 0.01, "ip_1": 0.0}


class Reference:
    """The update of one solver in float64, parameter by parameter."""

    def __init__(self, sag: bool, decoupled: bool, policy: str, turbo: bool, eta: float = 0.05) -> None:
        self.sag, self.decoupled, self.policy, self.turbo, self.eta = sag, decoupled, policy, turbo, eta
        self.history: dict[str, np.ndarray | float] = {"ip_0": 0.0, "ip_1": 0.0}
        self.correlation = {"ip_0": 0.0, "ip_1": 0.0}

    def rate(self, name: str, w: np.ndarray, g: np.ndarray, iteration: int) -> float:
        norms = [np.sqrt(np.sum(np.square(x))) for x in (w, g, self.history[name] + 0 * g)]
        data, gradient, history = map(float, norms)
        along, factor = (history, 1.0) if self.sag else (gradient, 1 - 0.9)
        local = factor * self.eta * data / along if data > 0 and along > 0 else 1.0
        if self.turbo and iteration >= (2 if self.sag else 0):
            both = gradient > 0 and history > 0
            cosine = float(np.sum(g * self.history[name])) / (gradient * history) if both else 0.0
            self.correlation[name] = 0.95 * self.correlation[name] + 0.05 * cosine
            local = local * (1 - 0.9 * self.correlation[name]) if self.sag else local - 0.9 * self.correlation[name]
        return min(0.1, local) if self.policy == "clip" else 0.1 * local if self.policy else 0.1 * LR[name]

    def step(self, weights: Arrays, gradients: Arrays, iteration: int) -> Arrays:
        changed = {}
        for name, w in weights.items():
            rate, g, decay = self.rate(name, w, gradients[name], iteration), gradients[name], DECAY[name]
            whole = g if self.decoupled else g + decay * w
            new = 0.9 * self.history[name] + (0.1 * whole if self.sag else rate * whole)
            changed[name] = w - (rate * new if self.sag else new) - (rate * decay * w if self.decoupled else 0)
            self.history[name] = new
        return changed


def gradients_of(solver: Solver) -> Arrays:
    return {
        f"{layer.name}_{i}": blob.host_diff().astype(np.float64)
        for layer in solver.net.layers
        for i, blob in enumerate(layer.blobs)
    }


@pytest.mark.parametrize("turbo", [False, True])
@pytest.mark.parametrize("policy", ["", "scale", "clip"])
@pytest.mark.parametrize("regularization", ["L2", "WD"])
@pytest.mark.parametrize("rule", ["SGD", "SAG"])
def test_formulas(rule: str, regularization: str, policy: str, turbo: bool) -> None:
    larc = f'larc: true larc_policy: "{policy}" larc_eta: 0.05 larc_turbo: {str(turbo).lower()}' if policy else ""
    reference = Reference(rule == "SAG", regularization == "WD", policy, turbo and bool(policy))
    with build_solver(SOLVER + f'type: "{rule}" regularization_type: "{regularization}" {larc}', CLASSIFIER) as solver:
        for iteration in range(5):
            before = {name: values.astype(np.float64) for name, values in weights_of(solver.net).items()}
            solver.step(1)
            wanted = reference.step(before, gradients_of(solver), iteration)
            for name, values in weights_of(solver.net).items():
                np.testing.assert_allclose(values, wanted[name], rtol=2e-5, atol=1e-7, err_msg=f"{name} {iteration}")


def test_resuming_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    text = SOLVER + f'larc: true larc_turbo: true larc_eta: 0.05 snapshot_prefix: "{tmp_path}/x"'
    with build_solver(text, CLASSIFIER) as solver:
        solver.step(3)
        state = solver.snapshot()
        solver.step(3)
        wanted = weights_of(solver.net)
    with build_solver(text, CLASSIFIER) as solver:
        solver.restore(state)
        solver.step(3)
        for name, values in weights_of(solver.net).items():
            np.testing.assert_array_equal(values, wanted[name])


def test_other_rules_say_that_larc_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    with build_solver(SOLVER + 'type: "Nesterov" larc: true', CLASSIFIER):
        assert "larc has no effect on a solver of type Nesterov" in caplog.text


def test_decoupled_decay_is_for_sgd_and_sag() -> None:
    param = solver_param(SOLVER + 'max_iter: 1 type: "Adam" regularization_type: "WD"', CLASSIFIER)
    with pytest.raises(ConfigError, match='regularization_type "WD" is for solvers of type SGD and SAG'):
        check_solver(param)
