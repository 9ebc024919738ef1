"""Update rules, policies and LARC against NVIDIA Caffe 0.17: 12 iterations of a small net, and a resume at 6."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from google.protobuf import text_format
from training import compare_weights, open_solver

from caffepy.formats.proto import caffe_pb2

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
            compared += compare_weights(solver, golden, "it")
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
            compared += compare_weights(solver, golden, "res")
    assert compared
