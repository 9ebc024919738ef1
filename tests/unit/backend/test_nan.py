"""NaN passes on through everything on the CPU that takes a maximum."""

from __future__ import annotations

import nan_checks as checks
import numpy as np
import pytest
from backend_checks import to_device

from caffepy.backend import Geometry
from caffepy.backend.cpu.backend import CpuBackend

BACKEND = CpuBackend(1)


@pytest.mark.parametrize("shape", checks.SHAPES)
def test_formulas(shape: tuple[int, ...]) -> None:
    checks.check_formulas(BACKEND, shape)
    if len(shape) > 1:
        checks.check_channel_formulas(BACKEND, shape)


@pytest.mark.parametrize("case", checks.POOLINGS)
def test_pooling(case: tuple[tuple[int, ...], tuple[int, int], Geometry]) -> None:
    checks.check_pooling(BACKEND, *case)


@pytest.mark.parametrize(("shape", "axis"), [((3, 5), 1), ((2, 4, 3, 3), 1), ((2, 3, 4), 2)])
def test_softmax_loss(shape: tuple[int, ...], axis: int) -> None:
    checks.check_softmax_loss(BACKEND, shape, axis)


def test_statistics() -> None:
    checks.check_statistics_of_sums(BACKEND, 5)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("mask", [False, True])
def test_normalised(residual: bool, mask: bool) -> None:
    checks.check_normalised(BACKEND, (3, 8, 4, 4), "float32", residual, mask)


@pytest.mark.parametrize(
    ("shape", "outputs", "geometry"),
    [
        ((2, 3, 9, 9), 8, Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
        ((2, 8, 6, 6), 8, Geometry((1, 1), (1, 1), (0, 0), (1, 1), 2)),
        ((2, 3, 9), 4, Geometry((3,), (1,), (1,), (1,))),
    ],
)
def test_convolution(shape: tuple[int, ...], outputs: int, geometry: Geometry) -> None:
    checks.check_convolution(BACKEND, shape, outputs, geometry, "float32")


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_infinite_weights_are_in_every_output_whose_window_meets_them(threads: int) -> None:
    """Beside the image they meet zeros: outputs there are NaN, or the numbers that they are without these weights."""
    backend, geometry = CpuBackend(threads), Geometry((3, 3), (1, 1), (1, 1), (1, 1))
    x, weights = np.ones((5, 64, 15, 10), np.float32), np.ones((4, 64, 3, 3), np.float32)
    weights[:, :, 0, 0] = np.inf
    plan, y = backend.plan_convolution(x.shape, weights.shape, geometry), backend.zeros((5, 4, 15, 10))
    plan.forward(to_device(backend, x), to_device(backend, weights), None, y)
    found = backend.to_host(y)
    assert np.isinf(found[:, :, 1:, 1:]).all()
    beside = np.concatenate([found[:, :, 0].ravel(), found[:, :, :, 0].ravel()])
    assert np.isin(beside[~np.isnan(beside)], [256, 384]).all()
