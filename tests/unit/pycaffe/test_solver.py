"""`caffe.SGDSolver` and its like."""

from __future__ import annotations

import gc
import math
import re
import weakref
from pathlib import Path

import numpy as np
import pytest
from fake_graph_backend import FakeGraphBackend

from caffepy import pycaffe as caffe
from caffepy.errors import ConfigError
from caffepy.formats.load import read_net, read_solver
from caffepy.training.solver import create_solver

SOLVERS = ("SGD", "Nesterov", "AdaGrad", "RMSProp", "AdaDelta", "Adam")


def fill(net: caffe.Net) -> None:
    random = np.random.default_rng(0)
    net.blobs["data"].data[...] = random.normal(size=net.blobs["data"].shape)
    net.blobs["label"].data[...] = np.arange(5)


@pytest.fixture
def solver(solver_file: Path) -> caffe.SGDSolver:
    solver = caffe.SGDSolver(str(solver_file))
    for net in (solver.net, *solver.test_nets):
        fill(net)
    return solver


def weights(net: caffe.Net) -> list[np.ndarray]:
    return [blob.data.copy() for blobs in net.params.values() for blob in blobs]


def test_what_it_is_made_of(solver: caffe.SGDSolver) -> None:
    assert solver.iter == 0 and solver.net is solver.net and len(solver.test_nets) == 1
    assert (solver.param.max_iter, solver.param.display, solver.param.layer_wise_reduce) == (3, 0, True)
    assert solver.lr == pytest.approx(0.01)
    solver.param.base_lr = 0.1
    assert solver.lr == pytest.approx(0.1)
    assert "accuracy" in solver.test_nets[0].blobs and "accuracy" not in solver.net.blobs
    assert repr(solver) == "<caffe.SGDSolver of 'small', iteration 0, cpu>"


def test_training_is_that_of_caffepy(solver: caffe.SGDSolver, solver_file: Path) -> None:
    own = create_solver(read_solver(solver_file), solver.device.backend)
    for name in ("data", "label"):
        own.net.blobs[name].data[...] = solver.net.blobs[name].data
    own.step(3)
    losses = []
    for _ in range(3):
        solver.step(1)
        losses.append(float(solver.net.blobs["loss"].data))
    assert solver.iter == 3 and losses[2] < losses[0] and solver.lr == pytest.approx(0.001)
    for mine, theirs in zip(solver.net.params["conv"], own.net.layers[2].blobs, strict=True):
        # Convolution and ReLU as one layer add up the bias's gradient in another order.
        np.testing.assert_allclose(mine.data, theirs.data, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", SOLVERS)
def test_every_rule(solver_file: Path, write, name: str) -> None:
    momentum = 0 if name in ("AdaGrad", "RMSProp") else 0.9
    text = solver_file.read_text().replace("momentum: 0.9", f"momentum: {momentum}")
    path = write("rule.prototxt", f"{text} type: '{name}'")
    by_type, by_class = caffe.get_solver(path), getattr(caffe, f"{name}Solver")(write("sgd.prototxt", text))
    assert type(by_type) is type(by_class) and isinstance(by_type, caffe.SGDSolver)
    before = weights(by_type.net)
    for solver in (by_type, by_class):
        fill(solver.net)
        solver.step(2)
    for old, one, other in zip(before, weights(by_type.net), weights(by_class.net), strict=True):
        assert (old != one).any() and (one == other).all()


def test_apply_update(solver: caffe.SGDSolver) -> None:
    blob = solver.net.layers[2].blobs[0]
    held = blob.data
    held[...] = 0
    blob.diff[...] = 1
    solver.apply_update()
    np.testing.assert_allclose(held, -0.01, rtol=1e-6)
    assert solver.iter == 1
    solver.apply_update()
    np.testing.assert_allclose(held, -0.01 - 0.019, rtol=1e-6)


def test_a_loop_of_the_programs_own_is_a_step(solver: caffe.SGDSolver, solver_file: Path) -> None:
    by_hand = caffe.SGDSolver(solver_file)
    fill(by_hand.net)
    for _ in range(2):
        by_hand.net.clear_param_diffs()
        by_hand.net.forward()
        by_hand.net.backward()
        by_hand.apply_update()
    solver.step(2)
    for one, other in zip(weights(solver.net), weights(by_hand.net), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def test_weights_written_between_steps_count(solver: caffe.SGDSolver) -> None:
    solver.step(1)
    for blobs in solver.net.params.values():
        for blob in blobs:
            blob.data[...] = 0
    solver.net.forward()
    np.testing.assert_allclose(solver.net.blobs["loss"].data, np.log(13), rtol=1e-6)
    assert not solver.test_nets[0].params["ip"][0].data.any()  # the same memory


def test_solve_runs_to_max_iter_and_resumes(solver: caffe.SGDSolver, solver_file: Path) -> None:
    folder = solver_file.parent
    solver.step(1)
    solver.snapshot()
    assert {"model_iter_1.caffemodel", "model_iter_1.solverstate"} <= {path.name for path in folder.iterdir()}
    solver.solve()
    assert solver.iter == 3
    solve, restore = caffe.SGDSolver(solver_file), caffe.SGDSolver(solver_file)
    fill(solve.net)
    solve.solve(str(folder / "model_iter_1.solverstate"))
    fill(restore.net)
    restore.restore(str(folder / "model_iter_1.solverstate"))
    assert restore.iter == 1
    restore.step(2)
    for other in (solve, restore):
        for one, two in zip(weights(solver.net), weights(other.net), strict=True):
            np.testing.assert_array_equal(one, two)


def test_callbacks_are_called_in_turn_and_may_change_gradients(solver: caffe.SGDSolver) -> None:
    calls: list[str] = []
    held = solver.net.params["ip"][0].diff

    def clear() -> None:
        calls.append("ready")
        assert held.any()
        for blobs in solver.net.params.values():
            for blob in blobs:
                blob.diff[...] = 0

    before = weights(solver.net)
    solver.add_callback(lambda: calls.append("start"), clear)
    solver.add_callback(lambda: calls.append("start 2"), lambda: calls.append("ready 2"))
    solver.step(2)
    assert calls == ["start", "start 2", "ready", "ready 2"] * 2
    for old, new in zip(before, weights(solver.net), strict=True):
        np.testing.assert_array_equal(old, new)
    calls.clear()
    solver.solve()
    assert calls == ["start", "start 2", "ready", "ready 2"]


def test_tests_do_not_call_the_start_again(solver_file: Path, write) -> None:
    text = solver_file.read_text().replace("test_interval: 1000 test_initialization: false", "test_interval: 1")
    solver = caffe.SGDSolver(write("tests.prototxt", text.replace("test_iter: 1", "test_iter: 3")))
    starts: list[int] = []
    solver.add_callback(lambda: starts.append(solver.iter), lambda: None)
    solver.step(2)
    assert starts == [0, 1]


@pytest.mark.parametrize("where", ["on_gradients_ready", "after_backward"])
def test_diffs_that_a_callback_writes_last_for_one_iteration(net_file: Path, solver_file: Path, where: str) -> None:
    """As Caffe clears them in each iteration (`solver.cpp`, Step), also those that no backward pass computes."""
    aside = (
        "layer { name: 'aside' type: 'InnerProduct' bottom: 'data' top: 'aside' param { decay_mult: 0 } "
        "inner_product_param { num_output: 1 bias_term: false } } layer { name: 's' type: 'Silence' bottom: 'aside' }"
    )
    net_file.write_text(net_file.read_text().replace("force_backward: true", "") + aside)
    solver = caffe.SGDSolver(str(solver_file))
    held, found = solver.net.params["aside"][0].diff, []

    def add(*_: object) -> None:
        held[...] += 1
        found.append(float(held.max()))

    if where == "on_gradients_ready":
        solver.add_callback(lambda: None, add)
    else:
        solver.net.after_backward(lambda layer: add() if layer == 0 else None)
    solver.step(3)
    assert found == [1, 1, 1]


def test_an_exchange_object_is_a_callback(solver: caffe.SGDSolver) -> None:
    class Exchange:
        calls = 0

        def on_gradients_ready(self) -> None:
            self.calls += 1

    exchange = Exchange()
    solver.add_callback(exchange)
    solver.step(2)
    assert exchange.calls == 2
    with pytest.raises(RuntimeError, match="add_callback needs on_start and on_gradients_ready, or one NCCL object"):
        solver.add_callback(lambda: None)


def test_what_a_callback_raises_comes_out(solver: caffe.SGDSolver) -> None:
    def fail() -> None:
        raise LookupError("mine")

    solver.add_callback(lambda: None, fail)
    with pytest.raises(LookupError, match="mine"):
        solver.step(1)


def test_net_callbacks_are_called_in_steps(solver: caffe.SGDSolver) -> None:
    layers: list[int] = []
    solver.net.before_forward(layers.append)
    solver.net.after_backward(lambda layer: layers.append(-layer))
    solver.step(1)
    assert layers == [0, 1, 2, 3, 4, 5, -5, -4, -3, -2, -1, 0]


def test_share_weights(solver: caffe.SGDSolver, net_file: Path) -> None:
    net = caffe.Net(net_file, caffe.TEST)
    solver.share_weights(net)
    solver.step(1)
    for one, other in zip(weights(net), weights(solver.net), strict=True):
        np.testing.assert_array_equal(one, other)


def trained_beside_a_copy(solver: caffe.Solver, twin: caffe.Solver, steps: int) -> None:
    """Train both; their parameters stay equal."""
    for _ in range(steps):
        solver.step(1)
        twin.step(1)
        for one, other in zip(weights(solver.net), weights(twin.net), strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("stepped", [0, 2])
@pytest.mark.parametrize("phase", [caffe.TRAIN, caffe.TEST])
def test_a_solvers_net_shares_another_nets_values_and_keeps_its_diffs(
    stepped: int, phase: int, solver_file: Path, net_file: Path
) -> None:
    """It trains as if the values had been copied; the other net and the tests have them after each step."""
    solver, twin = caffe.SGDSolver(solver_file), caffe.SGDSolver(solver_file)
    other = caffe.Net(net_file, phase)
    for net in (*(net for each in (solver, twin) for net in (each.net, *each.test_nets)), other):
        fill(net)
    for each in (solver, twin):
        each.step(stepped)
    other.forward()
    other.backward()  # gradients that are not the solver's
    diffs = [blob.diff.copy() for blobs in other.params.values() for blob in blobs]
    solver.net.share_with(other)
    for name, blobs in twin.net.params.items():
        for mine, theirs in zip(blobs, other.params[name], strict=True):
            mine.data[...] = theirs.data
    trained_beside_a_copy(solver, twin, 3)
    for one, theirs in zip(weights(other), weights(twin.net), strict=True):
        np.testing.assert_array_equal(one, theirs)
    for diff, blob in zip(diffs, (blob for blobs in other.params.values() for blob in blobs), strict=True):
        np.testing.assert_array_equal(diff, blob.diff)
    scores = [each.solver.test_all()[0]["loss"] for each in (solver, twin)]
    np.testing.assert_array_equal(*scores)
    other.params["ip"][0].data[...] *= 0.5
    twin.net.params["ip"][0].data[...] *= 0.5
    trained_beside_a_copy(solver, twin, 2)


def test_two_solvers_train_the_same_values(solver: caffe.SGDSolver, solver_file: Path) -> None:
    other, twin = caffe.SGDSolver(solver_file), caffe.SGDSolver(solver_file)
    for net in (other.net, twin.net):
        fill(net)
    solver.net.share_with(other.net)
    for _ in range(3):
        for each in (solver, other):
            before = weights(solver.net)
            for name, blobs in twin.net.params.items():
                for index, blob in enumerate(blobs):
                    blob.data[...] = other.net.params[name][index].data
            each.step(1)
            assert all((one != new).any() for one, new in zip(before, weights(other.net), strict=True))
        for one, theirs in zip(weights(solver.net), weights(other.net), strict=True):
            np.testing.assert_array_equal(one, theirs)


def test_what_is_shared_now_is_shared_though_the_other_net_shares_with_a_third(net_file: Path) -> None:
    first, second, third = (caffe.Net(net_file, caffe.TEST) for _ in range(3))
    for number, net in enumerate((first, second, third)):
        net.params["ip"][1].data[...] = number
    first.share_with(second)
    second.share_with(third)
    assert [net.params["ip"][1].data[0] for net in (first, second, third)] == [1, 2, 2]
    first.clear_param_diffs()
    third.params["ip"][1].data[...] = 7
    assert [net.params["ip"][1].data[0] for net in (first, second, third)] == [1, 7, 7]
    del third
    gc.collect()
    second.params["ip"][1].data[...] = 8
    assert [net.params["ip"][1].data[0] for net in (first, second)] == [1, 8]


def test_memory_that_a_solver_has_left_is_not_written_by_it(solver: caffe.SGDSolver, net_file: Path) -> None:
    """Another net and an array that the program holds stay with the values of before."""
    first, second = caffe.Net(net_file, caffe.TEST), caffe.Net(net_file, caffe.TEST)
    first.share_with(solver.net)
    held = solver.net.params["ip"][0].data
    before = held.copy()
    solver.net.share_with(second)
    solver.step(2)
    np.testing.assert_array_equal(held, before)
    np.testing.assert_array_equal(first.params["ip"][0].data, before)
    assert (second.params["ip"][0].data == solver.net.params["ip"][0].data).all()


def test_a_step_clears_diffs_that_no_backward_pass_reaches(tmp_path: Path) -> None:
    """As Caffe's ClearParamDiffs: what a program has written there must not become an update."""
    (tmp_path / "net.prototxt").write_text(
        "layer { name: 'x' type: 'Input' top: 'x' input_param { shape { dim: 2 dim: 3 } } } "
        "layer { name: 'side' type: 'InnerProduct' bottom: 'x' top: 's' inner_product_param { num_output: 2 } } "
        "layer { name: 'ip' type: 'InnerProduct' bottom: 'x' top: 'y' inner_product_param { num_output: 2 } } "
        "layer { name: 'loss' type: 'Reduction' bottom: 'y' top: 'l' loss_weight: 1 }"
    )
    settings = tmp_path / "solver.prototxt"
    settings.write_text("train_net: 'net.prototxt' base_lr: 1 lr_policy: 'fixed' snapshot_after_train: false")
    solver = caffe.get_solver(settings)
    for blobs in solver.net.params.values():
        blobs[0].diff[...] = 1
    solver.step(1)
    assert not solver.net.params["side"][0].data.any() and not solver.net.params["side"][0].diff.any()


def test_a_written_diff_of_the_loss_is_used_in_steps(solver: caffe.SGDSolver, solver_file: Path) -> None:
    """Caffe writes the loss weight there once, when the net is made."""
    twin = caffe.SGDSolver(solver_file)
    fill(twin.net)
    twin.step(1)
    solver.net.reshape()
    solver.net.blobs["loss"].diff[...] *= 0.5
    solver.net.reshape()
    solver.step(1)
    assert float(solver.net.blobs["loss"].diff) == 0.5
    for name, blobs in solver.net.params.items():
        for mine, theirs in zip(blobs, twin.net.params[name], strict=True):
            np.testing.assert_allclose(mine.diff, 0.5 * theirs.diff, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("scale", ["", "global_grad_scale: 64"])
def test_graphs_are_made_anew_where_the_diff_of_the_loss_is_written(scale: str, solver_file: Path) -> None:
    param = read_solver(solver_file)
    param.net = ""
    param.ClearField("net")
    param.net_param.CopyFrom(read_net(solver_file.parent / "net.prototxt"))
    if scale:
        param.net_param.global_grad_scale = 64
    solvers = [create_solver(param, FakeGraphBackend()) for _ in range(2)]
    updates = []
    for factor, each in zip((1, 0.5), solvers, strict=True):
        each.net.blobs["data"].data[...] = 0.5
        each.param.momentum = 0
        each.step(2)
        top = each.net.blobs["loss"]
        if factor != 1:
            each.net.let_program_write_diff(top)
            assert not each.graph_executor.captured
            top.diff[...] = factor
        before = each.net.parameters.data.copy()
        each.step(1)
        updates.append(each.net.parameters.data - before)
    np.testing.assert_allclose(updates[1], 0.5 * updates[0], rtol=1e-3, atol=1e-6)


def test_parameters_that_another_net_has_as_one_get_the_updates_of_both(tmp_path: Path) -> None:
    """As in Caffe, whose update of the one is added to that of the other."""
    inner = """layer { name: '%s' type: 'InnerProduct' bottom: '%s' top: '%s' %s
      inner_product_param { num_output: 3 bias_term: false weight_filler { type: 'gaussian' std: 0.5 } } } """
    texts = []
    for spec in ("", "param { name: 'w' }"):
        text = "layer { name: 'x' type: 'Input' top: 'x' input_param { shape { dim: 2 dim: 3 } } } "
        text += inner % ("a", "x", "a", spec) + inner % ("b", "a", "b", spec)
        texts.append(text + "layer { name: 'sum' type: 'Reduction' bottom: 'b' top: 'sum' loss_weight: 1 }")
    own, joint, settings = (tmp_path / name for name in ("own.prototxt", "joint.prototxt", "solver.prototxt"))
    for path, text in zip((own, joint), texts, strict=True):
        path.write_text(text)
    settings.write_text(f"train_net: '{own}' base_lr: 0.1 lr_policy: 'fixed' max_iter: 9 snapshot_after_train: false")
    solver, other = caffe.get_solver(settings), caffe.Net(joint, caffe.TRAIN)
    x = solver.net.blobs["x"].data
    x[...] = np.arange(6).reshape(2, 3)
    solver.net.share_with(other)
    for _ in range(2):
        before = other.params["a"][0].data.copy()
        solver.step(1)
        gradients = solver.net.params["a"][0].diff + solver.net.params["b"][0].diff
        np.testing.assert_allclose(other.params["b"][0].data, before - 0.1 * gradients, rtol=1e-5, atol=1e-6)


def test_graphs_are_made_anew_where_the_net_shares(solver_file: Path) -> None:
    param = read_solver(solver_file)
    solver, other = (create_solver(param, FakeGraphBackend()) for _ in range(2))
    for each in (solver, other):
        for net in (each.net, *each.test_nets):
            net.blobs["data"].data[...] = 0.5
    solver.step(2)
    solver.test_all()
    solver.test_all()
    assert solver.graph_executor.captured and solver.tests[0].captured
    solver.net.share_data_with(other.net)
    assert not solver.graph_executor.captured
    first = solver.test_all()
    np.testing.assert_array_equal(first[0]["loss"], other.test_all()[0]["loss"])
    solver.step(2)
    assert solver.graph_executor.captured
    np.testing.assert_array_equal(solver.test_all()[0]["loss"], other.test_all()[0]["loss"])


def test_nets_survive_the_solver(solver_file: Path) -> None:
    solver = caffe.get_solver(solver_file)
    nets = [solver.net, *solver.test_nets]
    del solver
    gc.collect()
    for net in nets:
        fill(net)
        assert np.isfinite(net.forward()["loss"])
        assert np.isfinite(sum(blob.data.sum() + blob.diff.sum() for blobs in net.params.values() for blob in blobs))


def test_a_loss_that_is_not_finite_does_not_end_the_training(solver: caffe.SGDSolver) -> None:
    solver.net.params["ip"][0].data[...] = np.nan
    solver.step(2)
    assert solver.iter == 2 and np.isnan(solver.net.blobs["loss"].data)


def test_processes_take_turns_and_the_root_alone_tests_and_writes(solver_file: Path, caplog) -> None:
    caffe.set_solver_count(2)
    caffe.set_multiprocess(True)
    shards = []
    for rank in range(2):
        caffe.set_solver_rank(rank)
        solver = caffe.SGDSolver(solver_file)
        shards.append((solver.net.net.context.shard.rank, solver.net.net.context.shard.world_size))
        solver.snapshot()
        assert (solver_file.parent / "model_iter_0.caffemodel").exists() is (rank == 0)
        (solver_file.parent / "model_iter_0.caffemodel").unlink(missing_ok=True)
        assert solver.test_nets[0].net.context.shard.world_size == 1
        assert solver.param.test_interval == (0 if rank else 1000)
    assert shards == [(0, 2), (1, 2)]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda path: caffe.SGDSolver("absent.prototxt"), RuntimeError, r"Could not open file absent\.prototxt"),
        (lambda path: caffe.get_solver("absent.prototxt"), RuntimeError, r"Could not open file absent\.prototxt"),
        (
            lambda path: caffe.SGDSolver(path).restore("no.solverstate"),
            RuntimeError,
            "Could not open file no.solverstate",
        ),
        (
            lambda path: caffe.SGDSolver(path).solve("no.solverstate"),
            RuntimeError,
            "Could not open file no.solverstate",
        ),
        (lambda path: caffe.SGDSolver(path).step(-1), ConfigError, r"step\(-1\): give a number of 0 or more"),
        (lambda path: caffe.SGDSolver(3), TypeError, "3 is no file name"),
        (lambda path: caffe.SGDSolver(path).net.share_with(None), TypeError, r"share_with\(None\)"),
        (lambda path: caffe.SGDSolver(path).step(2.5), ConfigError, r"step\(2\.5\): give a whole number"),
        (lambda path: caffe.SGDSolver(path).step(math.nan), ConfigError, r"step\(nan\): give a whole number"),
    ],
)
def test_mistakes(solver_file: Path, call, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        call(solver_file)


def test_a_solver_that_has_trained_goes_when_the_program_drops_it(solver_file: Path) -> None:
    solver = caffe.SGDSolver(str(solver_file))
    fill(solver.net)
    solver.step(1)
    left = weakref.ref(solver), weakref.ref(solver.solver.net)
    del solver
    gc.collect()
    gc.collect()
    assert [ref() for ref in left] == [None, None]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ("iter_size: 0", "iter_size is 0; it must be at least 1"),
        ("stepsize: -3", "stepsize is -3; it must be at least 1"),
        ('regularization_type: "L3"', "unknown regularization_type 'L3'"),
        ("gamma: -1", "gamma is -1; it must be at least 0"),
    ],
)
def test_settings_that_caffe_refuses_are_errors(solver_file: Path, more: str, message: str) -> None:
    text = re.sub(more.split(":")[0] + r": \S+", "", solver_file.read_text())
    solver_file.write_text(f"{text} {more}")
    with pytest.raises(ConfigError, match=message):
        caffe.get_solver(str(solver_file))


def test_snapshots_of_another_net_are_replaced_as_in_caffe(solver: caffe.SGDSolver, solver_file: Path) -> None:
    path = Path(solver.solver.snapshot())
    size = path.with_suffix(".caffemodel").stat().st_size
    net = Path(read_solver(solver_file).net)
    net.write_text(net.read_text().replace("num_output: 11", "num_output: 30"))
    other = caffe.SGDSolver(str(solver_file))
    other.snapshot()
    assert path.with_suffix(".caffemodel").stat().st_size > size
