"""Update rules, policies and LARC against NVIDIA Caffe 0.17: 12 iterations of a small net, and a resume at 6."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from training import open_solver, relative_error, weights_of

from caffepy.proto import caffe_pb2
from caffepy.solvers import Solver

FOLDER = Path(__file__).parent / "nvidia" / "solvers"
CASES = sorted(path.name.removesuffix("_solver.prototxt") for path in FOLDER.glob("*_solver.prototxt"))
ITERATIONS = 12


@pytest.fixture(autouse=True)
def nvidia(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CAFFEPY_DIALECT", "nvidia")
    monkeypatch.chdir(FOLDER)


def initial_weights(case: str) -> Path:
    param = text_format.Parse((FOLDER / f"{case}_solver.prototxt").read_text(), caffe_pb2.SolverParameter())
    return FOLDER / f"{Path(param.net).stem.removesuffix('_net')}_init.caffemodel"


def check_weights(solver: Solver, golden: np.lib.npyio.NpzFile, prefix: str) -> int:
    compared = 0
    for name, values in weights_of(solver.net).items():
        key = f"{prefix}{solver.iteration:02d}_{name}"
        if key in golden:
            error = relative_error(values, golden[key]) if golden[key].any() else float(np.abs(values).max())
            assert error < 1e-5, f"{name} after iteration {solver.iteration}: {error:.2g}"
            compared += 1
    return compared


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_is_nvidias(case: str) -> None:
    golden = np.load(FOLDER / f"{case}.npz")
    compared = 0
    with open_solver(FOLDER / f"{case}_solver.prototxt") as solver:
        solver.load_weights([initial_weights(case)])
        for iteration in range(ITERATIONS):
            solver.step(1)
            if "losses" in golden:
                loss = float(solver.net.blobs["loss"].host_data())
                assert loss == pytest.approx(golden["losses"][iteration], rel=1e-5)
            compared += check_weights(solver, golden, "it")
    assert compared


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_nvidias_own_solverstate(case: str) -> None:
    golden = np.load(FOLDER / f"{case}.npz")
    compared = 0
    with open_solver(FOLDER / f"{case}_solver.prototxt") as solver:
        solver.restore(FOLDER / f"{case}_iter_6.solverstate")
        assert solver.iteration == 6
        while solver.iteration < ITERATIONS:
            solver.step(1)
            compared += check_weights(solver, golden, "res")
    assert compared
