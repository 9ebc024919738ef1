"""`caffepy.train`: what it takes, what it calls, what it returns, and that it trains as the solver alone does."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from training import build_solver, solver_param, weights_of

import caffepy
from caffepy.errors import ConfigError, DeviceError, RunError
from caffepy.formats.proto.caffe_pb2 import FLOAT16, NetParameter, SolverParameter
from caffepy.pycaffe.net_spec import NetSpec, layers
from caffepy.training.solver import Solver
from caffepy.utils.installation import MissingExtraError

NET = """
name: "small"
layer { name: "data" type: "DummyData" top: "data" top: "target" dummy_data_param {
  shape { dim: [8, 5] } shape { dim: [8, 2] } data_filler { type: "gaussian" } data_filler { type: "uniform" } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
        inner_product_param { num_output: 2 weight_filler { type: "xavier" } } }
layer { name: "loss" type: "EuclideanLoss" bottom: "ip" bottom: "target" top: "loss" }
"""
SOLVER = (
    'base_lr: 0.05 lr_policy: "fixed" momentum: 0.9 max_iter: 6 random_seed: 3 snapshot_after_train: false '
    "test_iter: 2 test_interval: 3 "
)


@pytest.fixture
def solver_file(tmp_path: Path) -> Path:
    (tmp_path / "net.prototxt").write_text(NET)
    path = tmp_path / "solver.prototxt"
    path.write_text(f'net: "{tmp_path}/net.prototxt" snapshot_prefix: "{tmp_path}/small" {SOLVER}')
    return path


def message() -> SolverParameter:
    return solver_param(SOLVER, NET)


def net_spec() -> NetSpec:
    spec = NetSpec()
    spec.data, spec.target = layers.DummyData(
        ntop=2,
        shape=[{"dim": [8, 5]}, {"dim": [8, 2]}],
        data_filler=[{"type": "gaussian"}, {"type": "uniform"}],
    )
    spec.ip = layers.InnerProduct(spec.data, num_output=2, weight_filler={"type": "xavier"})
    spec.loss = layers.EuclideanLoss(spec.ip, spec.target)
    return spec


FIELDS: dict[str, Any] = {
    "base_lr": 0.05,
    "lr_policy": "fixed",
    "momentum": 0.9,
    "max_iter": 6,
    "random_seed": 3,
    "test_iter": [2],
    "test_interval": 3,
}


def alone() -> dict[str, np.ndarray]:
    with build_solver(SOLVER, NET) as solver:
        solver.solve()
        return weights_of(solver.net)


@pytest.fixture(scope="module")
def expected() -> dict[str, np.ndarray]:
    return alone()


def assert_same(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    assert found.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_array_equal(found[name], values)


@pytest.mark.parametrize("kind", ["path", "text", "message", "fields with a spec", "fields with a message"])
def test_every_kind_of_solver_trains_alike(kind: str, solver_file: Path, expected: dict[str, np.ndarray]) -> None:
    param = message()
    given: dict[str, tuple[Any, Any]] = {
        "path": (solver_file, None),
        "text": (str(solver_file), None),
        "message": (param, None),
        "fields with a spec": (FIELDS, net_spec()),
        "fields with a message": (FIELDS, param.net_param),
    }
    solver, net = given[kind]
    with caffepy.train(solver, net=net, threads=1, share=False) as trained:
        assert trained.iteration == 6
        assert not trained.stopped_early
        assert_same(weights_of(trained.net), expected)
        assert sorted(trained.losses) == list(range(6))
        assert list(trained.scores) == [0, 3, 6]
        assert list(trained.scores[6][0]) == ["loss"]
    assert param == message(), "the caller's message was changed"


def test_the_trained_solver_goes_on_as_if_it_had_never_stopped(expected: dict[str, np.ndarray]) -> None:
    with caffepy.train(message(), max_iter=4, threads=1) as trained:
        assert trained.iteration == 4
        trained.solver.step(2)
        assert_same(weights_of(trained.net), expected)


def test_two_devices_train_and_give_one_solver() -> None:
    heard: list[tuple[str, int]] = []

    class Both(caffepy.Callback):
        def after_iteration(self, solver: Solver) -> None:
            heard.append(("iteration", solver.iteration))

        def after_test(self, solver: Solver, scores: list[dict[str, np.ndarray]]) -> None:
            heard.append(("test", solver.iteration))

    with caffepy.train(message(), cpu_solvers=2, callbacks=Both(), threads=1) as trained:
        assert [number for kind, number in heard if kind == "iteration"] == [1, 2, 3, 4, 5, 6]
        assert [number for kind, number in heard if kind == "test"] == [0, 3, 6]
        before = weights_of(trained.net)
        trained.solver.step(1)
        assert any((weights_of(trained.net)[name] != before[name]).any() for name in before)


@pytest.mark.parametrize("solvers", [1, 2])
@pytest.mark.parametrize("event", ["after_iteration", "after_test", "after_snapshot", "function"])
def test_each_event_can_stop_training(event: str, solvers: int, tmp_path: Path) -> None:
    calls: list[int] = []

    def stop(solver: Solver, *_: Any) -> bool:
        calls.append(solver.iteration)
        return solver.iteration >= 2

    param = message()
    param.max_iter, param.snapshot, param.snapshot_prefix = 50, 2, str(tmp_path / "s")
    callback = stop if event == "function" else type("Stop", (), {event: staticmethod(stop)})()
    with caffepy.train(param, callbacks=[callback, lambda solver: None], cpu_solvers=solvers, threads=1) as trained:
        assert trained.stopped_early
        assert 2 <= trained.iteration <= 4
        assert calls
        assert all(path.exists() for path in trained.snapshots)


def test_a_callback_is_called_at_its_interval() -> None:
    class Seldom(caffepy.Callback):
        interval = 4
        heard: list[int]

        def after_iteration(self, solver: Solver) -> None:
            self.heard.append(solver.iteration)

    seldom = Seldom()
    seldom.heard = []
    caffepy.train(message(), callbacks=[seldom], max_iter=9, threads=1)
    assert seldom.heard == [4, 8]


def test_a_solver_calls_its_callbacks_too() -> None:
    heard: list[int] = []
    with build_solver(SOLVER, NET) as solver:
        solver.add_callback(lambda solver: heard.append(solver.iteration))
        solver.add_callback(lambda solver: solver.iteration == 2)
        solver.step(5)
        assert (heard, solver.stopped_early) == ([1, 2], True)
        solver.step(1)
        assert heard == [1, 2, 3]


@pytest.mark.parametrize("solvers", [1, 2])
def test_an_error_of_a_callback_ends_training(solvers: int) -> None:
    def fail(solver: Solver) -> None:
        raise ConfigError("the callback has had enough")

    with pytest.raises(ConfigError, match="the callback has had enough"):
        caffepy.train(message(), callbacks=fail, cpu_solvers=solvers, threads=1)


def test_snapshots_and_weights_are_started_from(tmp_path: Path, solver_file: Path, expected: Any) -> None:
    with caffepy.train(solver_file, max_iter=4, threads=1, callbacks=()) as half:
        state = half.solver.snapshot()
        half.save(tmp_path / "half.caffemodel")
    for snapshot in (state, "auto"):
        with caffepy.train(solver_file, snapshot=snapshot, threads=1) as trained:
            assert_same(weights_of(trained.net), expected)
            assert sorted(trained.losses) == [4, 5]
    with caffepy.train(solver_file, weights=tmp_path / "half.caffemodel", max_iter=0, threads=1) as same:
        assert_same(weights_of(same.net), weights_of(half.net))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"solver": 3}, "a solver is a prototxt's path, a SolverParameter or a mapping of fields; int is none of"),
        ({"solver": NetParameter()}, "NetParameter is none of these"),
        ({"solver": {"base_lrr": 1}}, "solver: unknown field 'base_lrr'; did you mean 'base_lr'"),
        ({"solver": {"base_lr": "high"}}, "solver: base_lr is 'high': .*; use the form of a solver's prototxt"),
        ({"solver": {**FIELDS, "snapshot": 2}}, "snapshots are enabled and snapshot_prefix is missing"),
        ({"solver": FIELDS}, "solver: no net to train"),
        ({"solver": FIELDS, "net": 5}, "a net is a prototxt's path, a NetParameter or a NetSpec; int is none"),
        ({"max_iter": -1}, "max_iter is -1; it must be at least 0"),
        ({"max_itr": 1}, r"train has no option 'max_itr'; .*max_iter"),
        ({"weights": "a", "snapshot": "b"}, "snapshot and weights exclude each other"),
        ({"devices": "first"}, "devices is 'first'; give a list of GPU indices, 'all', or None"),
        ({"devices": [-1]}, r"devices is \[-1\]; give a list"),
        ({"cpu_solvers": 0}, "there is nothing to train on"),
        ({"trace_iterations": 3, "trace": "t"}, r"trace_iterations is 3; give a range such as range\(20, 40\)"),
        ({"compression": "fp8"}, "compression cannot be 'fp8'; known: none, fp16, bf16"),
        ({"keep_last": -1}, "keep_last: '-1' is not a whole number of at least 1"),
        ({"callbacks": 7}, "a callback is a function, or has one of the methods after_iteration, .*; 7 is neither"),
    ],
)
def test_mistakes_are_said_in_one_line(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        caffepy.train(**{"solver": message(), **arguments})
    assert "\n" not in str(caught.value)


def test_options_of_the_command_are_keywords(tmp_path: Path) -> None:
    """Also those of nets and traces, which the command reads from text."""
    net = NET.replace('name: "loss"', 'name: "loss" include { stage: "learns" min_level: 2 }')
    found = solver_param(SOLVER, net)
    trace = str(tmp_path / "trace.json")
    with caffepy.train(
        found, stage="learns", level=2, trace=trace, trace_iterations=range(1, 3), eager=True, keep_last=1, threads=1
    ) as trained:
        assert [layer.name for layer in trained.net.layers] == ["data", "ip", "loss"]
    assert Path(trace).stat().st_size > 0


def test_a_missing_gpu_is_said() -> None:
    with pytest.raises((DeviceError, MissingExtraError), match="GPU 99|CuPy is not installed|no NVIDIA driver"):
        caffepy.train(message(), devices=[99])


def test_the_result_describes_itself() -> None:
    with caffepy.train(message(), threads=1) as trained:
        assert re.fullmatch(r"<caffepy training: 6 iterations; loss [\d.]+; loss [\d.]+>", repr(trained))
        html = trained._repr_html_()
        assert "<table>" in html
        assert "InnerProduct" in html
    with pytest.raises(RunError, match="cannot be written: No such file"):
        trained.save("/nowhere/at/all.caffemodel")


def test_a_snapshot_of_another_net_is_not_replaced(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fields = {**FIELDS, "snapshot_prefix": str(tmp_path / "x"), "snapshot": 6}
    net = message().net_param
    caffepy.train(fields, net=net, threads=1).close()
    assert "--snapshot auto" not in caplog.text
    caffepy.train(fields, net=net, threads=1).close()
    assert f"{tmp_path}/x_iter_6.solverstate is the newest of the snapshots" in caplog.text
    caplog.clear()
    caffepy.train({**fields, "max_iter": 12}, net=net, threads=1, snapshot="auto").close()
    assert "is the newest of the snapshots" not in caplog.text
    net.layer[1].name = "other"
    with pytest.raises(ConfigError, match=r"x_iter_6\.caffemodel is of another net .* would be replaced"):
        caffepy.train(fields, net=net, threads=1)
    caffepy.train(fields, net=net, threads=1, overwrite=True).close()


def test_set_fields_are_trained_with_and_saved_beside_the_snapshots(solver_file: Path) -> None:
    given = {"set": ["base_lr=0.5", "net.layer[ip].inner_product_param.bias_term=false"], "max_iter": 2, "seed": 8}
    with caffepy.train(solver_file, threads=1, **given, dtype="FLOAT16", cpu_solvers=2) as trained:
        assert trained.iteration == 2
        assert [blob.shape for blob in trained.net.layers[1].blobs] == [(2, 5)]
        assert trained.net.param.default_forward_type == trained.net.param.default_backward_type == FLOAT16
    saved = solver_file.with_name("small_solver.prototxt")
    assert not saved.exists()  # nor are there snapshots
    given["set"].append("snapshot_after_train=true")
    with caffepy.train(solver_file, threads=1, **given) as trained:
        first = weights_of(trained.net)
    with caffepy.train(saved, threads=1, overwrite=True) as again:
        assert again.iteration == 2
        assert_same(weights_of(again.net), first)
