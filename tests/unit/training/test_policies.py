"""Learning-rate, momentum and weight-decay policies against their formulas."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from training import build_solver, solver_param, weights_of

from caffepy.errors import ConfigError
from caffepy.training import policies
from caffepy.training.policies import Plateau, StepEarly, learning_rate, momentum, weight_decay


def rate(text: str, iteration: int, current_step: int = 0) -> float:
    return learning_rate(solver_param("base_lr: 0.5 max_iter: 100 " + text), iteration, current_step)[0]


@given(iteration=st.integers(0, 100))
def test_formulas(iteration: int) -> None:
    wanted = {
        'lr_policy: "fixed"': 0.5,
        'lr_policy: "step" gamma: 0.5 stepsize: 10': 0.5 * 0.5 ** (iteration // 10),
        'lr_policy: "exp" gamma: 0.75': 0.5 * 0.75**iteration,
        'lr_policy: "inv" gamma: 0.25 power: 0.75': 0.5 * (1 + 0.25 * iteration) ** -0.75,
        'lr_policy: "poly" power: 2': 0.5 * (1 - iteration / 100) ** 2,
        'lr_policy: "poly" power: 2 min_lr: 0.125': 0.375 * (1 - iteration / 100) ** 2 + 0.125,
        'lr_policy: "sigmoid" gamma: -0.5 stepsize: 50': 0.5 / (1 + math.exp(0.5 * (iteration - 50))),
    }
    for text, value in wanted.items():
        assert rate(text, iteration) == pytest.approx(value, rel=1e-6), text


def test_step_tells_its_step() -> None:
    param = solver_param('base_lr: 1 lr_policy: "step" gamma: 0.5 stepsize: 10')
    assert learning_rate(param, 35, 0) == (0.125, 3)


def test_multistep_goes_on_from_the_step_it_is_in() -> None:
    param = solver_param('base_lr: 1 lr_policy: "multistep" gamma: 0.5 stepvalue: 3 stepvalue: 5')
    step, rates = 0, []
    for iteration in range(8):
        value, step = learning_rate(param, iteration, step)
        rates.append(value)
    assert rates == [1, 1, 1, 0.5, 0.5, 0.25, 0.25, 0.25]


def test_ramp_up_is_quadratic_and_comes_before_the_policy() -> None:
    text = 'lr_policy: "step" gamma: 0.5 stepsize: 2 rampup_interval: 4 rampup_lr: 0.125'
    assert [rate(text, i) for i in range(4)] == pytest.approx([0.125 + 0.375 * (i / 4) ** 2 for i in range(4)])
    assert rate(text, 4) == 0.125


def test_min_lr_is_the_least_rate() -> None:
    assert rate('lr_policy: "exp" gamma: 0.5 min_lr: 0.25', 10) == 0.25


def test_poly_ends_at_its_last_value() -> None:
    assert rate('lr_policy: "poly" power: 0.5', 101) == 0


def test_a_far_sigmoid_does_not_overflow() -> None:
    assert rate('lr_policy: "sigmoid" gamma: -1 stepsize: 1', 100_000) == pytest.approx(0)


def test_an_unknown_policy_offers_the_nearest() -> None:
    with pytest.raises(ConfigError, match="unknown lr_policy 'stepp'; did you mean 'step'"):
        rate('lr_policy: "stepp"', 0)


def test_momentum_policies() -> None:
    text = "momentum: 0.5 max_iter: 10 "
    assert momentum(solver_param(text), 5, 0.1) == 0.5
    poly = solver_param(text + 'momentum_policy: "poly" max_momentum: 0.75 momentum_power: 2')
    assert momentum(poly, 5, 0.1) == pytest.approx(0.5 + 0.25 * 0.25)
    opt = 'momentum_policy: "opt"'
    assert momentum(solver_param(opt), 5, 0.04) == pytest.approx(0.81)
    assert momentum(solver_param(opt + " max_momentum: 0.5"), 5, 0.04) == 0.5


def test_weight_decay_policies() -> None:
    text = "weight_decay: 0.25 max_iter: 10 "
    assert weight_decay(solver_param(text), 5) == 0.25
    poly = solver_param(text + 'weight_decay_policy: "poly" max_weight_decay: 0.75 weight_decay_power: 1')
    assert weight_decay(poly, 5) == pytest.approx(0.5)


# -- policies of forks -----------------------------------------------------------------------------------


def test_multifixed_has_a_rate_for_each_stage() -> None:
    text = 'lr_policy: "multifixed" stagelr: 0.25 stagelr: 1 stagelr: 0.5 stageiter: 2 stageiter: 3 stageiter: 6'
    assert [rate(text, i) for i in range(9)] == [0.25] * 3 + [1] + [0.5] * 5


def test_warm_up_is_straight_and_comes_before_the_policy() -> None:
    text = 'lr_policy: "step" gamma: 0.5 stepsize: 2 warmup_iter: 4 warmup_start_lr: 0.125'
    assert [rate(text, i) for i in range(4)] == pytest.approx([0.125 + 0.375 * i / 4 for i in range(4)])
    assert rate(text, 4) == 0.125


def test_momentum_follows_the_rate_in_the_warm_up() -> None:
    """Intel Caffe's momentum correction, for SGD."""
    text = 'base_lr: 0.5 max_iter: 9 lr_policy: "fixed" momentum: 0.75 warmup_iter: 4 warmup_start_lr: 0.125'
    param = solver_param(text)
    rates = [0.125, *(learning_rate(param, i, 0)[0] for i in range(4))]
    for iteration in range(4):
        wanted = 0.75 * rates[iteration + 1] / rates[iteration]
        assert momentum(param, iteration, rates[iteration + 1]) == pytest.approx(wanted)
    assert momentum(param, 4, 0.5) == 0.75
    assert momentum(solver_param(text + ' type: "Nesterov"'), 2, 0.3) == 0.75
    assert momentum(solver_param(text.replace("0.125", "0")), 1, 0.125) == 0.75


def test_step_early_waits_for_better_tests() -> None:
    early, step, steps = StepEarly(), 0, []
    for score in (0.1, 0.5, 0.4, 0.5, 0.6, 0.2, 0.3, 0.4, 0.5):
        step = early.next_step(score, step, 2)
        steps.append(step)
    assert steps == [0, 0, 0, 1, 1, 1, 2, 2, 3]
    assert early.best == 0.6
    assert rate('lr_policy: "stepearly" gamma: 0.5 stepearly: 2', 7, current_step=2) == 0.125


# -- plateau ---------------------------------------------------------------------------------------------


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


def test_power_is_that_of_c() -> None:
    assert policies.power(1e300, 2) == math.inf
    assert policies.power(0.0, -1) == math.inf
    assert policies.power(2.0, -1) == 0.5
