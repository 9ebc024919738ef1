"""--ema, --lr-find and --check on GPUs, with captured iterations, against the formula."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_runs import NET, SOLVER
from training import solver_param

import caffepy
from caffepy.training.solver import Solver

DECAY = 0.3


class Parameters:
    """Records the learned parameters after each iteration, and what tests saw."""

    def __init__(self) -> None:
        self.after: list[np.ndarray] = []
        self.tested: dict[int, np.ndarray] = {}
        self.captured = False

    def after_iteration(self, solver: Solver) -> None:
        self.captured = solver.graph_executor.captured
        self.after.append(self._learned(solver))

    def before_test(self, solver: Solver) -> None:
        self.tested[solver.iteration] = self._learned(solver)

    def after_test(self, solver: Solver, scores: Any) -> None:
        if self.after:
            np.testing.assert_array_equal(self._learned(solver), self.after[-1])

    @staticmethod
    def _learned(solver: Solver) -> np.ndarray:
        values: np.ndarray = solver.backend.to_host(solver.net.parameters.data)
        return values[: solver.net.parameters.learned].copy()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def devices(count: int) -> list[int]:
    from caffepy.backend.cuda.device import device_count

    if device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    return list(range(count))


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("dtype", ["FLOAT", "FLOAT16"])
def test_tests_see_the_average_of_captured_iterations(folder: Path, dtype: str, count: int) -> None:
    seen = Parameters()
    settings: dict[str, Any] = {"ema": DECAY, "devices": devices(count), "dtype": dtype, "callbacks": seen}
    caffepy.train(solver_param(f"{SOLVER} max_iter: 12 snapshot: 6", NET), **settings).close()
    assert seen.captured
    average = seen.tested[0]
    for made, values in enumerate(seen.after):
        share = 1 - min(DECAY, (1 + made) / (10 + made))
        average = average + np.float32(share) * (values - average)
        if made + 1 in seen.tested:
            np.testing.assert_allclose(seen.tested[made + 1], average, rtol=1e-5, atol=1e-6)
    assert len(seen.tested) == 7
    assert (folder / "x_iter_12.ema.caffemodel").exists()


@pytest.mark.parametrize("count", [1, 2])
def test_a_resumed_average_has_the_same_bits(folder: Path, count: int) -> None:
    last: list[np.ndarray] = []
    for start in (None, "x_iter_6.solverstate"):
        seen = Parameters()
        settings: dict[str, Any] = {"ema": 0.9, "devices": devices(count), "callbacks": seen, "snapshot": start}
        caffepy.train(solver_param(f"{SOLVER} max_iter: 12 snapshot: 6", NET), **settings).close()
        last.append(seen.tested[12])
    np.testing.assert_array_equal(last[0], last[1])


@pytest.mark.parametrize("count", [1, 2])
def test_every_loss_of_a_learning_rate_test_is_read(folder: Path, count: int) -> None:
    losses: list[float] = []

    def note(solver: Solver) -> None:
        losses.append(solver.losses.values()[-1])

    param = solver_param(f"{SOLVER} max_iter: 12", NET)
    settings: dict[str, Any] = {"devices": devices(count), "callbacks": note, "max_iter": 30}
    caffepy.train(param, lr_find="lr.png", **settings).close()
    assert len(set(losses)) > 10
    assert (folder / "lr.png").stat().st_size > 1000


@pytest.mark.parametrize("count", [1, 2])
def test_a_check_ends_after_one_iteration(folder: Path, count: int) -> None:
    param = solver_param(f"{SOLVER} max_iter: 12 snapshot: 1", NET)
    with caffepy.train(param, check_only=True, devices=devices(count)) as checked:
        assert checked.iteration == 1
    assert list(folder.iterdir()) == []
