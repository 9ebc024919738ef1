"""The update: steps that are left out, loss scales, parameters in one flat buffer."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import build_solver, weights_of

from caffepy.solvers import Solver

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01 '
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1 } param { lr_mult: 2 decay_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""
RULES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


def loss_scale(solver: Solver) -> float:
    return float(solver.updating.loss_scale)


@pytest.mark.parametrize("scale", ["global_grad_scale: 128 ", "global_grad_scale_adaptive: true "])
@pytest.mark.parametrize("rule", RULES)
def test_the_loss_scale_is_taken_out_again(rule: str, scale: str) -> None:
    found = []
    momentum = "" if rule in ("AdaGrad", "RMSProp") else "momentum: 0.9 "
    text = SOLVER.replace("momentum: 0.9 ", momentum) + f'type: "{rule}"'
    for net in (NET, scale + NET):
        with build_solver(text, net) as solver:
            solver.step(4)
            found.append(weights_of(solver.net))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-6)


def test_a_step_that_overflows_is_left_out_and_the_scale_is_halved() -> None:
    with build_solver(SOLVER, "global_grad_scale: 1024 global_grad_scale_adaptive: true " + NET) as solver:
        solver.step(2)
        before = weights_of(solver.net), solver.history[0].copy()
        backward = solver.net.backward

        def overflowing() -> None:
            backward()
            solver.net.parameters.diff[3] = np.inf

        solver.net.backward = overflowing  # type: ignore[method-assign]
        solver.step(1)
        after = weights_of(solver.net), solver.history[0]
        assert loss_scale(solver) == 512
        assert all(np.array_equal(before[0][name], after[0][name]) for name in before[0])
        np.testing.assert_array_equal(before[1], after[1])
        solver.net.backward = backward  # type: ignore[method-assign]
        solver.step(1)
        assert any(not np.array_equal(before[0][name], values) for name, values in weights_of(solver.net).items())
        assert loss_scale(solver) == 512


def test_the_loss_scale_reaches_every_loss_weight() -> None:
    """Also that of another layer than a loss, and that of a loss that is read elsewhere."""
    text = NET.replace('top: "ip" param', 'top: "ip" loss_weight: 2 param').replace(
        'top: "loss" }',
        """top: "loss"
        loss_weight: 0.5 }
        layer { name: "double" type: "Power" bottom: "loss" top: "double" loss_weight: 1 power_param { scale: 2 } }""",
    )
    found = []
    for scale in ("", "global_grad_scale: 128 "):
        with build_solver(SOLVER, scale + text) as solver:
            solver.step(3)
            found.append(weights_of(solver.net))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-5, atol=1e-6)


def test_an_adaptive_scale_grows_after_many_good_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    with build_solver(SOLVER, "global_grad_scale_adaptive: true " + NET) as solver:
        assert loss_scale(solver) == 4096
        solver.backend.fill(solver.updating._good, 998)
        solver.step(1)
        assert loss_scale(solver) == 4096
        solver.step(1)
        assert loss_scale(solver) == 8192


def test_snapshots_hold_the_adaptive_scale(tmp_path: Path) -> None:
    text, net = SOLVER + f'snapshot_prefix: "{tmp_path}/x"', "global_grad_scale_adaptive: true " + NET
    with build_solver(text, net) as solver:
        solver.updating.restore_loss_scale(64)
        solver.step(1)
        state = solver.snapshot()
    with build_solver(text, net) as solver:
        solver.restore(state)
        assert loss_scale(solver) == 64


def test_what_is_not_learned_lies_behind_what_is() -> None:
    with build_solver(SOLVER, NET.replace("lr_mult: 1", "lr_mult: 0")) as solver:
        parameters = solver.net.parameters
        weights, bias = parameters.parameters
        assert (bias.start, bias.stop, parameters.learned) == (0, 3, 64)
        assert weights.start == 128
        lr_mult, decay_mult = parameters.multipliers()
        assert (lr_mult.tolist(), decay_mult.tolist()) == ([2.0], [0.0])
