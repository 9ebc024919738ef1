"""The update: steps that are left out, loss scales, parameters in one flat buffer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from training import CLASSIFIER, build_solver, solver_param, weights_of

import caffepy
from caffepy.errors import NonFiniteError
from caffepy.formats.caffemodel import read_weights
from caffepy.net.graph import Node
from caffepy.training.solver import Solver

SOLVER = 'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01 '
RULES = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


@pytest.fixture(autouse=True)
def bvlc(monkeypatch: pytest.MonkeyPatch) -> None:
    """A loss scale, which only NVIDIA Caffe has, would make `delta` larger."""
    monkeypatch.setenv("CAFFEPY_DIALECT", "bvlc")


def loss_scale(solver: Solver) -> float:
    return float(solver.update.guard.loss_scale)


@pytest.mark.parametrize("scale", ["global_grad_scale: 128 ", "global_grad_scale_adaptive: true "])
@pytest.mark.parametrize("rule", RULES)
def test_the_loss_scale_is_taken_out_again(rule: str, scale: str) -> None:
    found = []
    momentum = "" if rule in ("AdaGrad", "RMSProp") else "momentum: 0.9 "
    text = SOLVER.replace("momentum: 0.9 ", momentum) + f'type: "{rule}"'
    for net in (CLASSIFIER, scale + CLASSIFIER):
        with build_solver(text, net) as solver:
            solver.step(4)
            found.append(weights_of(solver.net))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("rule", RULES)
def test_a_skipped_update_changes_neither_parameters_nor_history(rule: str) -> None:
    momentum = "" if rule in ("AdaGrad", "RMSProp") else "momentum: 0.9 "
    text = SOLVER.replace("momentum: 0.9 ", momentum) + f'type: "{rule}"'
    with build_solver(text, CLASSIFIER, guard=True) as solver:
        solver.step(2)
        arrays = [solver.net.parameters.data, *solver.history]
        before = [array.copy() for array in arrays]
        solver.net.parameters.gradients[...] = 1.0
        solver.net.parameters.gradients[3] = np.nan
        solver.apply_update()
        for array, values in zip(arrays, before, strict=True):
            np.testing.assert_array_equal(array, values)
        solver.net.parameters.gradients[...] = 1.0
        solver.apply_update()
        for array, values in zip(arrays, before, strict=True):
            assert (array != values).any()


def test_a_step_that_overflows_is_left_out_and_the_scale_is_halved() -> None:
    with build_solver(SOLVER, "global_grad_scale: 1024 global_grad_scale_adaptive: true " + CLASSIFIER) as solver:
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
    text = CLASSIFIER.replace('top: "ip" param', 'top: "ip" loss_weight: 2 param').replace(
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
    with build_solver(SOLVER, "global_grad_scale_adaptive: true " + CLASSIFIER) as solver:
        assert loss_scale(solver) == 4096
        solver.backend.fill(solver.update.guard._good, 998)
        solver.step(1)
        assert loss_scale(solver) == 4096
        solver.step(1)
        assert loss_scale(solver) == 8192


def test_snapshots_hold_the_adaptive_scale(tmp_path: Path) -> None:
    text, net = SOLVER + f'snapshot_prefix: "{tmp_path}/x"', "global_grad_scale_adaptive: true " + CLASSIFIER
    with build_solver(text, net) as solver:
        solver.update.guard.restore_loss_scale(64, 0)
        solver.step(1)
        state = solver.snapshot()
    with build_solver(text, net) as solver:
        solver.restore(state)
        assert loss_scale(solver) == 64


def test_what_is_not_learned_lies_behind_what_is() -> None:
    with build_solver(SOLVER, CLASSIFIER.replace("lr_mult: 1", "lr_mult: 0")) as solver:
        parameters = solver.net.parameters
        weights, bias = parameters.parameters
        assert (bias.start, bias.stop, parameters.learned) == (0, 3, 64)
        assert weights.start == 128
        lr_mult, decay_mult = parameters.multipliers()
        assert (lr_mult.tolist(), decay_mult.tolist()) == ([2.0], [0.0])


# -- loss scales and snapshots ---------------------------------------------------------------------------

ADAPTIVE = "global_grad_scale_adaptive: true " + CLASSIFIER


@pytest.mark.parametrize("form", ["BINARYPROTO", "HDF5"])
def test_snapshots_hold_the_count_of_good_steps(tmp_path: Path, form: str) -> None:
    text = SOLVER + f'snapshot_prefix: "{tmp_path}/x" snapshot_format: {form}'
    with build_solver(text, ADAPTIVE) as solver:
        solver.backend.fill(solver.update.guard._good, 997)
        solver.step(1)
        state = solver.snapshot()
    with build_solver(text, ADAPTIVE) as solver:
        solver.restore(state)
        solver.step(1)
        assert loss_scale(solver) == 4096
        solver.step(1)
        assert loss_scale(solver) == 8192


@pytest.mark.parametrize(("net", "wanted"), [("", 1.0), ("global_grad_scale: 128 ", 128.0)])
def test_a_snapshots_scale_is_for_nets_that_adapt_it(tmp_path: Path, net: str, wanted: float) -> None:
    text = SOLVER + f'snapshot_prefix: "{tmp_path}/x"'
    with build_solver(text, ADAPTIVE) as solver:
        solver.step(1)
        state = solver.snapshot()
        solver.step(1)
        expected = weights_of(solver.net)
    with build_solver(text, net + CLASSIFIER) as solver:
        solver.restore(state)
        assert loss_scale(solver) == wanted
        solver.step(1)
        for name, values in weights_of(solver.net).items():
            np.testing.assert_allclose(values, expected[name], rtol=1e-4, atol=1e-6)


def messages(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    return [record.getMessage() for record in caplog.records if words in record.getMessage()]


def test_clipping_shows_the_norm_without_the_loss_scale(caplog: pytest.LogCaptureFixture) -> None:
    shown = []
    for net in (CLASSIFIER, "global_grad_scale: 128 " + CLASSIFIER, ADAPTIVE):
        caplog.clear()
        with build_solver(SOLVER + "clip_gradients: 0.01 display: 1", net) as solver, caplog.at_level("INFO"):
            solver.backend.fill(solver.update.guard._good, 998)  # the adaptive scale is doubled in the second step
            solver.step(3)
        shown.append([re.sub(r"(\d\.\d{3})\d*", r"\1", line) for line in messages(caplog, "Gradient clipping")])
    assert len(shown[0]) == 3
    assert shown[1] == shown[2] == shown[0]


# -- steps that are left out -----------------------------------------------------------------------------


def overflow(solver: Solver, parameter: int, iterations: Callable[[int], bool]) -> None:
    """Let a parameter's gradient and all that come behind it in the backward pass be infinite in some iterations."""
    backward_node, last = solver.net.backward_node, solver.net.schedule[1]

    def overflowing(node: Node) -> None:
        backward_node(node)
        if node is last and iterations(solver.iteration):
            for one in solver.net.parameters.parameters[: parameter + 1]:
                one.blob.diff.reshape(-1)[0] = np.inf

    solver.net.backward_node = overflowing  # type: ignore[method-assign]


DEEP = CLASSIFIER.replace(
    'layer { name: "loss"',
    'layer { name: "last" type: "InnerProduct" bottom: "ip" top: "last"'
    ' inner_product_param { num_output: 3 weight_filler { type: "xavier" } } } layer { name: "loss"',
).replace('bottom: "ip" bottom: "label"', 'bottom: "last" bottom: "label"')


@pytest.mark.parametrize("net", ["global_grad_scale: 2 ", "global_grad_scale_adaptive: true "])
def test_skipped_updates_are_counted_at_each_display(net: str, caplog: pytest.LogCaptureFixture) -> None:
    with build_solver(SOLVER + "display: 4", net + CLASSIFIER) as solver, caplog.at_level("INFO"):
        overflow(solver, 0, lambda iteration: iteration in (0, 2, 3, 9))
        solver.step(13)
    shown = messages(caplog, "skipped")
    assert shown == [
        f"Iteration {iteration}, {count} since the last display, because gradients were not finite"
        for iteration, count in ((0, "1 update skipped"), (4, "2 updates skipped"), (12, "1 update skipped"))
    ]


def test_updates_skipped_since_the_last_display_are_counted_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    text = SOLVER + "max_iter: 40 snapshot_after_train: false"
    with build_solver(text, "global_grad_scale: 2 " + CLASSIFIER) as solver, caplog.at_level("INFO"):
        overflow(solver, 0, lambda iteration: True)
        before = weights_of(solver.net)
        solver.solve()
        assert all(np.array_equal(values, before[name]) for name, values in weights_of(solver.net).items())
    assert messages(caplog, "Iteration 40, 40 updates skipped since the last display")


@pytest.mark.parametrize(("parameter", "layer"), [(1, "ip"), (2, "last"), (3, "last")])
def test_too_many_skipped_updates_in_a_row_end_training_and_name_the_layer(parameter: int, layer: str) -> None:
    with build_solver(SOLVER, "global_grad_scale: 2 " + DEEP, max_skipped=5) as solver:
        overflow(solver, parameter, lambda iteration: iteration != 4)
        message = (
            rf"iteration 9: 5 updates in a row were skipped, because gradients are not finite; in the backward pass "
            rf"that begins in layer '{layer}' \(InnerProduct\); lower global_grad_scale or set global_grad_scale_adapt"
        )
        with pytest.raises(NonFiniteError, match=message):
            solver.step(20)


@pytest.mark.parametrize("scale", ["1e25", "1e37"])
@pytest.mark.parametrize("settings", ["", "clip_gradients: 0.2 ", "clip_gradients: 1e9 "])
def test_gradients_whose_squares_overflow_train_as_others(settings: str, scale: str) -> None:
    found = []
    for factor in (1.0, float(scale)):
        with build_solver(SOLVER + settings, f"global_grad_scale: {factor} " + DEEP, max_skipped=1) as solver:
            solver.step(6)
            found.append(weights_of(solver.net))
    for name, values in found[0].items():
        np.testing.assert_allclose(found[1][name], values, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("large", [1e-3, 2.0**40, 2e12, 1e19, 3e19, 1e30, 3e38])
def test_clipping_scales_gradients_of_any_norm(large: float) -> None:
    """Also the sum of the largest numbers that there are, whose norm float32 does not hold."""
    with build_solver(SOLVER + "clip_gradients: 1e-4", CLASSIFIER, guard=True) as solver:
        gradients = solver.net.parameters.gradients
        gradients[...] = 0
        gradients[:8] = np.linspace(0.5, 1, 8) * large
        scale, found_inf = solver.update.guard.run(1.0)
        assert float(found_inf) == 0
        clipped = np.linalg.norm(gradients.astype(np.float64) * float(scale))
        assert clipped == pytest.approx(1e-4, rel=1e-3 if large < 1e38 else 0.5)


@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("others", [0.0, 1.0, 1e30, 3e38])
def test_what_is_not_finite_is_found_beside_gradients_of_any_size(value: float, others: float) -> None:
    with build_solver(SOLVER, CLASSIFIER, guard=True) as solver:
        gradients = solver.net.parameters.gradients
        for index in (0, 17, len(gradients) - 1):
            gradients[...] = others
            assert float(solver.update.guard.run(1.0)[1]) == 0
            gradients[index] = value
            assert float(solver.update.guard.run(1.0)[1]) == 1


def test_too_many_skipped_updates_that_are_over_are_an_error_too() -> None:
    """A device that works behind the host is looked at now and then."""
    with build_solver(SOLVER, "global_grad_scale: 2 " + CLASSIFIER, max_skipped=3) as solver:
        solver.step(1)
        solver.backend.fill(solver.update.guard._bad, 3)
        with pytest.raises(NonFiniteError, match="3 updates in a row .* so that the layer is not known"):
            solver.step(1)


def test_a_net_in_float_is_guarded_where_gradients_are_compressed() -> None:
    with build_solver(SOLVER, CLASSIFIER, guard=True, max_skipped=4) as solver:
        overflow(solver, 0, lambda iteration: iteration == 2)
        solver.step(5)
        assert all(np.isfinite(values).all() for values in weights_of(solver.net).values())
        overflow(solver, 0, lambda iteration: True)
        with pytest.raises(NonFiniteError, match=r"iteration 8: 4 updates in a row .* --compression bf16"):
            solver.step(20)


def test_the_guard_of_compressed_gradients_changes_no_bits() -> None:
    found = []
    for guard in (False, True):
        with build_solver(SOLVER, CLASSIFIER, guard=guard) as solver:
            solver.step(5)
            found.append(weights_of(solver.net))
    assert all(np.array_equal(values, found[1][name]) for name, values in found[0].items())


TWO_LAYERS = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 dim: 3 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "gaussian" std: 1 } } }
layer { name: "first" type: "InnerProduct" bottom: "data" top: "first" param { lr_mult: 0 } param { lr_mult: 2 }
  inner_product_param { num_output: 4 weight_filler { type: "xavier" } bias_filler { value: 0.2 } } }
layer { name: "last" type: "InnerProduct" bottom: "first" top: "last"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } bias_filler { value: 0.2 } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "last" bottom: "label" top: "loss" }
"""


@pytest.mark.parametrize("more", ["", "clip_gradients: 0.1 iter_size: 2", 'regularization_type: "WD"'])
@pytest.mark.parametrize("rule", [*RULES, "SAG"])
def test_snapshot_diff_saves_what_the_last_update_subtracted(rule: str, more: str, tmp_path: Path) -> None:
    """As Caffe, whose ComputeUpdateValue writes it over the gradient (`sgd_solver.cpp`)."""
    if "WD" in more and rule not in ("SGD", "SAG"):
        pytest.skip("decoupled weight decay is SGD's and SAG's")
    momentum = "" if rule in ("RMSProp", "AdaGrad") else "momentum: 0.9"
    text = (
        f'type: "{rule}" base_lr: 0.01 lr_policy: "fixed" weight_decay: 0.01 {momentum} {more} random_seed: 3 '
        f'snapshot_diff: true snapshot_prefix: "{tmp_path}/x"'
    )
    with build_solver(text, TWO_LAYERS) as solver:
        solver.step(3)
        before = solver.backend.to_host(solver.net.parameters.data)
        solver.step(1)
        solver.snapshot()
        saved = read_weights(tmp_path / "x_iter_4.caffemodel")
        after, history = solver.backend.to_host(solver.net.parameters.data), solver.backend.to_host(solver.history[0])
        stored = {layer.name: [np.array(blob.diff, np.float32) for blob in layer.blobs] for layer in saved.layer}
        for parameter in solver.net.parameters.parameters:
            part, found = slice(parameter.start, parameter.stop), stored[parameter.layer.name][parameter.index]
            rounding = 2**-22 * np.abs(before[part]).max()
            np.testing.assert_allclose(found, before[part] - after[part], atol=rounding, rtol=0)
            assert found.any() == (parameter.lr_mult != 0)
            if rule == "SGD" and "WD" not in more:
                np.testing.assert_array_equal(found, history[part])


def test_a_skipped_update_leaves_the_gradients_in_snapshot_diff() -> None:
    with build_solver('base_lr: 0.1 lr_policy: "fixed" clip_gradients: 1 snapshot_diff: true', TWO_LAYERS) as solver:
        overflow(solver, 1, lambda iteration: iteration == 1)
        for finite in (True, False):
            solver.step(1)
            assert np.isfinite(solver.backend.to_host(solver.net.parameters.gradients)).all() == finite


UNREACHED = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 4 dim: 3 } shape { dim: 4 dim: 2 } data_filler { value: 1 } data_filler { value: -0.5 } } }
layer { name: "frozen" type: "InnerProduct" bottom: "data" top: "frozen" param { lr_mult: 0 }
  inner_product_param { num_output: 3 bias_term: false weight_filler { value: 0.4 } } }
layer { name: "ip" type: "InnerProduct" bottom: "frozen" top: "ip"
  inner_product_param { num_output: 2 bias_term: false weight_filler { value: 0.3 } } }
layer { name: "aside" type: "InnerProduct" bottom: "data" top: "aside" param { lr_mult: 1 } param { decay_mult: 0 }
  inner_product_param { num_output: 2 weight_filler { value: 1 } bias_filler { value: 1 } } }
layer { name: "silence" type: "Silence" bottom: "aside" }
layer { name: "cut" type: "InnerProduct" bottom: "data" top: "cut" param { lr_mult: 2 decay_mult: 0.5 }
  inner_product_param { num_output: 2 bias_term: false weight_filler { value: -1 } } }
layer { name: "behind" type: "Power" bottom: "cut" top: "behind" propagate_down: false power_param { scale: 0 } }
layer { name: "sum" type: "Eltwise" bottom: "ip" bottom: "behind" top: "sum" }
layer { name: "loss" type: "EuclideanLoss" bottom: "sum" bottom: "label" top: "loss" }
"""
"""`ip` has a gradient; `aside` and `cut` are learned, but no loss reaches them."""


def caffes_weights(iterations: int, passes: int, clip: float) -> dict[str, np.ndarray]:
    """The weights of UNREACHED after SGD as in Caffe's `solver.cpp` and `sgd_solver.cpp`, in NumPy.

    Each iteration clears all diffs. The update then stays in them.
    """
    weights = {"frozen": np.full((3, 3), 0.4), "ip": np.full((2, 3), 0.3), "cut": np.full((2, 3), -1.0)}
    weights |= {"aside": np.ones((2, 3)), "aside bias": np.ones(2)}
    multipliers = {"frozen": (0, 1), "ip": (1, 1), "cut": (2, 0.5), "aside": (1, 1), "aside bias": (1, 0)}
    history = {name: np.zeros_like(values) for name, values in weights.items()}
    for _ in range(iterations):
        diff = {name: np.zeros_like(values) for name, values in weights.items()}
        for _ in range(passes):
            bottom = np.ones((4, 3)) @ weights["frozen"].T
            diff["ip"] += (bottom @ weights["ip"].T + 0.5).T @ bottom / 4
        norm = np.sqrt(sum((values**2).sum() for values in diff.values()))
        for name, (lr_mult, decay_mult) in multipliers.items():
            gradient = diff[name] * (clip / norm if 0 <= clip < norm else 1) / passes
            gradient += 0.5 * decay_mult * weights[name]
            history[name] = 0.1 * lr_mult * gradient + 0.9 * history[name]
            weights[name] = weights[name] - history[name]
    return weights


UNREACHED_SOLVER = (
    'base_lr: 0.1 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.5 max_iter: 4 random_seed: 1 '
    "snapshot_after_train: false snapshot_diff: "
)


@pytest.mark.parametrize("clip", [-1, 0.05])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("stored", ["false", "true"])
@pytest.mark.parametrize("devices", [1, 2])
def test_snapshot_diff_changes_nothing_where_no_loss_reaches(
    devices: int, stored: str, passes: int, clip: float
) -> None:
    """Caffe clears all diffs in each iteration, also those that no backward pass writes (`net.cpp`, ClearParamDiffs).

    Otherwise the stored update would be the next iteration's gradient, and a part of the norm that is clipped.
    """
    param = solver_param(f"{UNREACHED_SOLVER}{stored} iter_size: {passes} clip_gradients: {clip}", UNREACHED)
    with caffepy.train(param, cpu_solvers=devices, threads=1, callbacks=()) as trained:
        found = weights_of(trained.net)
    for name, values in caffes_weights(4, passes, clip).items():
        key = f"{name.removesuffix(' bias')}_{int(name.endswith('bias'))}"
        np.testing.assert_allclose(found[key], values, rtol=1e-5, err_msg=name)
