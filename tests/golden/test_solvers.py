"""Update rules and policies against BVLC Caffe 1.0: 12 iterations of a small net, and a resume from its snapshot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import open_solver, relative_error, weights_of

from caffepy.solvers import Solver

FOLDER = Path(__file__).parent / "solvers"
CASES = sorted(path.name.removesuffix("_solver.prototxt") for path in FOLDER.glob("*_solver.prototxt"))
ITERATIONS = 12


def check_weights(solver: Solver, golden: np.lib.npyio.NpzFile, prefix: str) -> None:
    for name, values in weights_of(solver.net).items():
        wanted = golden[f"{prefix}{solver.iteration:02d}_{name}"]
        assert relative_error(values, wanted) < 1e-5, f"{name} after iteration {solver.iteration}"


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_is_caffes(case: str) -> None:
    golden = np.load(FOLDER / f"{case}.npz")
    with open_solver(FOLDER / f"{case}_solver.prototxt") as solver:
        solver.load_weights([FOLDER / "init.caffemodel"])
        for iteration in range(ITERATIONS):
            solver.step(1)
            # what was recorded is the loss blob, which with iter_size holds the last pass
            assert float(solver.net.blobs["loss"].host_data()) == pytest.approx(golden["losses"][iteration], rel=1e-5)
            check_weights(solver, golden, "it")


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_caffes_own_solverstate(case: str) -> None:
    golden = np.load(FOLDER / f"{case}.npz")
    with open_solver(FOLDER / f"{case}_solver.prototxt") as solver:
        solver.restore(FOLDER / f"{case}_iter_6.solverstate")
        assert solver.iteration == 6
        while solver.iteration < ITERATIONS:
            solver.step(1)
            check_weights(solver, golden, "res")
