"""Update rules, LARC and policies on a GPU against both Caffes' numbers, eager and captured; Python layers too."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from training import CPU, build_solver, compare_weights, relative_error, weights_of

from caffepy.backend import Backend
from caffepy.formats.load import read_solver
from caffepy.formats.paths import PathResolver
from caffepy.formats.proto import caffe_pb2
from caffepy.training.solver import Solver, create_solver
from caffepy.utils.options import ExecutionOptions

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    (dialect, path.name.removesuffix("_solver.prototxt"))
    for dialect, folder in (("bvlc", GOLDEN / "solvers"), ("nvidia", GOLDEN / "nvidia" / "solvers"))
    for path in sorted(folder.glob("*_solver.prototxt"))
]
ITERATIONS = 12
ALLOWED = 2e-5
EAGER = pytest.mark.parametrize("eager", [False, True], ids=["captured", "eager"])


def folder_of(dialect: str) -> Path:
    return GOLDEN / "solvers" if dialect == "bvlc" else GOLDEN / "nvidia" / "solvers"


def first_weights(path: Path, dialect: str) -> Path:
    param = text_format.Parse(path.read_text(), caffe_pb2.SolverParameter())
    name = "init" if dialect == "bvlc" else f"{Path(param.net).stem.removesuffix('_net')}_init"
    return path.with_name(f"{name}.caffemodel")


@contextmanager
def opened(path: Path, backend: Backend, eager: bool) -> Iterator[Solver]:
    solver = create_solver(read_solver(path), backend, resolve=PathResolver(path), engine=ExecutionOptions(eager=eager))
    try:
        yield solver
    finally:
        solver.close()


@EAGER
@pytest.mark.parametrize(("dialect", "case"), CASES)
def test_every_iteration_is_caffes(
    backend: Backend, dialect: str, case: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compared = folder_of(dialect), 0
    monkeypatch.setenv("CAFFEPY_DIALECT", dialect)
    monkeypatch.chdir(folder)
    path, golden = folder / f"{case}_solver.prototxt", np.load(folder / f"{case}.npz")
    with opened(path, backend, eager) as solver:
        solver.load_weights([first_weights(path, dialect)])
        for _ in range(ITERATIONS):
            solver.step(1)
            compared += compare_weights(solver, golden, "it", ALLOWED)
        if backend.captures and not eager:
            assert solver.graph_executor.captured or any(layer.capture_blocker() for layer in solver.net.layers)
    assert compared


@EAGER
@pytest.mark.parametrize(("dialect", "case"), CASES)
def test_resuming_from_caffes_own_solverstate(
    backend: Backend, dialect: str, case: str, eager: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, compared = folder_of(dialect), 0
    monkeypatch.setenv("CAFFEPY_DIALECT", dialect)
    monkeypatch.chdir(folder)
    golden = np.load(folder / f"{case}.npz")
    with opened(folder / f"{case}_solver.prototxt", backend, eager) as solver:
        solver.restore(folder / f"{case}_iter_6.solverstate")
        while solver.iteration < ITERATIONS:
            solver.step(1)
            compared += compare_weights(solver, golden, "res", ALLOWED)
    assert compared


# -- what neither Caffe has numbers of -------------------------------------------------------------------

PLATEAU = """base_lr: 0.1 lr_policy: "plateau" gamma: 0.1 plateau_winsize: 1 plateau_winsize: 2 momentum: 0.9
    average_loss: 2 random_seed: 3 max_iter: 12 type: "{rule}" {more}"""
NET = """
layer { name: "data" type: "DummyData" top: "data" top: "label" dummy_data_param {
  shape { dim: 6 dim: 5 } shape { dim: 6 }
  data_filler { type: "gaussian" std: 1 } data_filler { type: "constant" value: 1 } } }
layer { name: "ip" type: "InnerProduct" bottom: "data" top: "ip"
  inner_product_param { num_output: 3 weight_filler { type: "xavier" } } }
%s
"""
LOSS = 'layer { name: "loss" type: "SoftmaxWithLoss" bottom: "ip" bottom: "label" top: "loss" }'
PYTHON = """
layer { name: "zero" type: "DummyData" top: "zero" dummy_data_param { shape { dim: 6 dim: 3 } } }
layer { name: "twice" type: "Python" bottom: "ip" top: "twice" python_param { module: "gpu_layers" layer: "Twice" } }
layer { name: "loss" type: "Python" bottom: "twice" bottom: "zero" top: "loss" loss_weight: 1
  python_param { module: "gpu_layers" layer: "Euclidean" } }
"""
MODULE = """
import numpy as np


class Twice:
    def setup(self, bottom, top):
        pass

    def reshape(self, bottom, top):
        top[0].reshape(*bottom[0].shape)

    def forward(self, bottom, top):
        top[0].data[...] = 2 * bottom[0].data

    def backward(self, top, propagate_down, bottom):
        bottom[0].diff[...] = 2 * top[0].diff


class Euclidean(Twice):
    def reshape(self, bottom, top):
        self.diff = np.zeros_like(bottom[0].data, dtype=np.float32)
        top[0].reshape(1)

    def forward(self, bottom, top):
        self.diff[...] = bottom[0].data - bottom[1].data
        top[0].data[...] = np.sum(self.diff**2) / bottom[0].num / 2.0

    def backward(self, top, propagate_down, bottom):
        if propagate_down[0]:
            bottom[0].diff[...] = top[0].diff[0] * self.diff / bottom[0].num
"""


def train(device: Backend, solver_text: str, net: str, eager: bool = False) -> dict[str, np.ndarray]:
    with build_solver(solver_text, net, device, engine=ExecutionOptions(eager=eager)) as solver:
        for _ in range(ITERATIONS):
            solver.step(1)
        return weights_of(solver.net)


def check_alike(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray]) -> None:
    for name, values in wanted.items():
        assert relative_error(found[name], values) < ALLOWED, name


@EAGER
@pytest.mark.parametrize(
    ("rule", "more"),
    [("SGD", ""), ("SAG", ""), ("SGD", 'larc: true larc_policy: "clip" larc_eta: 20'), ("Adam", "delta: 0.001")],
)
def test_plateau_is_the_cpus(backend: Backend, rule: str, more: str, eager: bool) -> None:
    """The rate steps down by the losses, which the device computes; the step is the same on both."""
    text = PLATEAU.format(rule=rule, more=more)
    wanted = train(CPU, text, NET % LOSS)
    check_alike(train(backend, text, NET % LOSS, eager), wanted)
    fixed = train(CPU, text.replace("plateau_winsize: 1 plateau_winsize: 2", "plateau_winsize: 99"), NET % LOSS)
    assert any((fixed[name] != wanted[name]).any() for name in wanted), "the rate has not stepped"


@EAGER
@pytest.mark.parametrize("rule", ["SGD", "Nesterov", "Adam"])
def test_snapshot_diff_leaves_the_update_in_the_diffs(backend: Backend, rule: str, eager: bool) -> None:
    text = f'type: "{rule}" base_lr: 0.01 lr_policy: "fixed" momentum: 0.9 weight_decay: 0.01 snapshot_diff: true'
    found = []
    for device in (CPU, backend):
        with build_solver(text, NET % LOSS, device, engine=ExecutionOptions(eager=eager)) as solver:
            for _ in range(ITERATIONS):
                solver.step(1)
            parameters = solver.net.parameters.parameters
            found.append({str(i): np.array(p.blob.host_diff()) for i, p in enumerate(parameters)})
    assert all(values.any() for values in found[0].values())
    check_alike(found[1], found[0])


@EAGER
def test_python_layers_train_as_on_the_cpu(
    backend: Backend, eager: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs before and behind them, since a "Python" layer computes on the host."""
    (tmp_path / "gpu_layers.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    text = 'type: "SGD" base_lr: 0.05 momentum: 0.9 lr_policy: "fixed" max_iter: 12 random_seed: 2'
    check_alike(train(backend, text, NET % PYTHON, eager), train(CPU, text, NET % PYTHON))
