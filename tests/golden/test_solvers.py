"""Update rules and policies against BVLC Caffe 1.0: 12 iterations of a small net, and a resume from its snapshot."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from training import compare_weights, open_solver, weights_of

FOLDER = Path(__file__).parent / "solvers"
CASES = sorted(path.name.removesuffix("_solver.prototxt") for path in FOLDER.glob("*_solver.prototxt"))
ITERATIONS = 12


@pytest.mark.parametrize("case", CASES)
def test_every_iteration_is_caffes(case: str) -> None:
    golden = np.load(FOLDER / f"{case}.npz")
    with open_solver(FOLDER / f"{case}_solver.prototxt") as solver:
        solver.load_weights([FOLDER / "init.caffemodel"])
        for iteration in range(ITERATIONS):
            solver.step(1)
            # what was recorded is the loss blob, which with iter_size holds the last pass
            assert float(solver.net.blobs["loss"].host_data()) == pytest.approx(golden["losses"][iteration], rel=1e-5)
            assert compare_weights(solver, golden, "it") == len(weights_of(solver.net))


@pytest.mark.parametrize("case", CASES)
def test_resuming_from_caffes_own_solverstate(case: str) -> None:
    golden = np.load(FOLDER / f"{case}.npz")
    with open_solver(FOLDER / f"{case}_solver.prototxt") as solver:
        solver.restore(FOLDER / f"{case}_iter_6.solverstate")
        assert solver.iteration == 6
        while solver.iteration < ITERATIONS:
            solver.step(1)
            assert compare_weights(solver, golden, "res") == len(weights_of(solver.net))
