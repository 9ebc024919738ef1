"""Training on a GPU against BVLC Caffe 1.0's numbers, and against itself."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from training import open_solver, relative_error, weights_of

from caffepy.backend import Backend
from caffepy.data.conversion.mnist_cifar import SUBSET, build_lmdbs, folder_reader

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = sorted(path.name.removesuffix("_solver.prototxt") for path in (GOLDEN / "solvers").glob("*_solver.prototxt"))


@pytest.fixture
def lenet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """LeNet's solver in a folder of its own, with LMDBs of the digits that ship with caffepy."""
    for name in ("solver.prototxt", "train_test.prototxt", "init.caffemodel"):
        shutil.copy(GOLDEN / "lenet" / name, tmp_path / name)
    build_lmdbs(tmp_path, folder_reader(SUBSET))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "solver.prototxt"


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_is_caffes(backend: Backend, case: str) -> None:
    folder = GOLDEN / "solvers"
    golden = np.load(folder / f"{case}.npz")
    with open_solver(folder / f"{case}_solver.prototxt", backend) as solver:
        solver.load_weights([folder / "init.caffemodel"])
        while solver.iteration < 12:
            solver.step(1)
            for name, values in weights_of(solver.net).items():
                wanted = golden[f"it{solver.iteration:02d}_{name}"]
                assert relative_error(values, wanted) < 2e-5, f"{name} after iteration {solver.iteration}"


def test_lenets_losses_are_caffes(backend: Backend, lenet: Path) -> None:
    """Differences of rounding grow a hundredfold in some sixty iterations, so the later losses can only be near."""
    golden = np.load(GOLDEN / "lenet" / "trajectory.npz")["losses"]
    losses = []
    with open_solver(lenet, backend, test_initialization=False) as solver:
        solver.load_weights([lenet.with_name("init.caffemodel")])
        for _ in range(130):
            solver.step(1)
            losses.append(float(solver.net.blobs["loss"].host_data()))
        assert solver.test_all()[0]["accuracy"] > 0.85
    np.testing.assert_allclose(losses[:50], golden[:50], rtol=0, atol=1e-3)
    np.testing.assert_allclose(losses, golden[:130], rtol=0, atol=0.05)


@pytest.mark.parametrize("kind", ["FLOAT", "FLOAT16", "BFLOAT16"])
def test_lenet_reaches_the_same_accuracy_in_every_storage(backend: Backend, lenet: Path, kind: str) -> None:
    net = lenet.with_name("train_test.prototxt")
    net.write_text(f"default_forward_type: {kind} default_backward_type: {kind}\n" + net.read_text())
    with open_solver(lenet, backend, test_initialization=False) as solver:
        solver.load_weights([lenet.with_name("init.caffemodel")])
        solver.step(200)
        assert solver.graph_executor.captured
        assert solver.test_all()[0]["accuracy"] == pytest.approx(0.958, abs=0.015)


def _train(backend: Backend, path: Path, stops: list[int]) -> dict[str, np.ndarray]:
    """The weights after training up to each stop in turn, with a snapshot and a new solver between."""
    state = None
    for stop in stops:
        with open_solver(path, backend, test_initialization=False) as solver:
            if state is None:
                solver.load_weights([path.with_name("init.caffemodel")])
            else:
                solver.restore(state)
            solver.step(stop - solver.iteration)
            state = solver.snapshot()
            weights = weights_of(solver.net)
    return weights


def test_a_resumed_run_gives_the_same_bits(backend: Backend, lenet: Path) -> None:
    whole, resumed = _train(backend, lenet, [40]), _train(backend, lenet, [20, 40])
    for name, values in whole.items():
        assert np.array_equal(values, resumed[name]), name
