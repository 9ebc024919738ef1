"""The policy "plateau": when it steps, and that a resumed run goes on with what it remembers."""

from __future__ import annotations

from pathlib import Path

import pytest
from training import build_solver, weights_of

from caffepy.training.policies import Plateau

SOLVER = """base_lr: 0.5 lr_policy: "plateau" gamma: 0.1 plateau_winsize: 1 plateau_winsize: 2 display: 1
    average_loss: 2 random_seed: 3 """
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip" param { lr_mult: 1e-9 } param { lr_mult: 0 }
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }
"""


def test_steps_when_the_loss_has_not_fallen_for_a_window():
    plateau, step, steps = Plateau(), 0, []
    losses = [None, 5.0, 4.0, 4.5, 4.2, 4.1, 3.0, 3.5, 3.5, 3.5, 3.5, 3.5]
    for iteration, loss in enumerate(losses):
        step = plateau.next_step(iteration, loss, step, [3, 2])
        steps.append(step)
    assert steps == [0, 0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2]
    assert plateau.minimum_loss == 3.0


def rates(caplog: pytest.LogCaptureFixture) -> list[str]:
    messages = [record.getMessage() for record in caplog.records]
    return [message.split("lr = ")[1].split(",")[0] for message in messages if ", lr = " in message]


def test_a_resumed_run_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level("INFO")
    text = SOLVER + f'snapshot_prefix: "{tmp_path}/x"'
    with build_solver(text, NET) as solver:
        solver.step(4)
        state = solver.snapshot()
        caplog.clear()
        solver.step(8)
        wanted, wanted_rates = weights_of(solver.net), rates(caplog)
    caplog.clear()
    with build_solver(text, NET) as solver:
        solver.restore(state)
        solver.step(8)
        assert rates(caplog) == wanted_rates
        assert len(set(wanted_rates)) > 1
        for name, values in weights_of(solver.net).items():
            assert (values == wanted[name]).all()
