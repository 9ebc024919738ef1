"""The CPU's kernels of batch normalisation and ReLU's gradient against float64 NumPy."""

from __future__ import annotations

import normalise_checks as checks
import numpy as np
import pytest
from backend_checks import close, normal, to_device
from normalise_checks import SHAPES

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.interface import NormalisationPrimitives
from caffepy.backend.types import BatchNormState

BACKEND = CpuBackend(2)
SEVERAL_BLOCKS = [(4, 64, 40, 40), (7, 48, 31, 29), (3, 1000, 9, 9), (2, 5, 201, 203)]


@pytest.fixture(autouse=True)
def _only_kernels(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Arrays whose channels are neighbours may not be left to `NormalisationPrimitives`."""
    shape = request.node.callspec.params.get("shape", (1, 1)) if hasattr(request.node, "callspec") else (1, 1)
    if len(shape) in (2, 4):
        for name in ("batch_norm_measure", "batch_norm_forward", "batch_norm_backward_data"):
            monkeypatch.delattr(NormalisationPrimitives, name)


@pytest.mark.parametrize("shape", SHAPES + SEVERAL_BLOCKS)
def test_measure(shape: tuple[int, ...]) -> None:
    checks.check_measure(BACKEND, shape, "float32")


@pytest.mark.parametrize("offset", [1e3, -1e4])
@pytest.mark.parametrize("shape", [(16, 12, 9, 9), (4, 64, 40, 40)])
def test_measure_where_the_mean_is_large(shape: tuple[int, ...], offset: float) -> None:
    checks.check_measure(BACKEND, shape, "float32", offset)


def test_measure_where_the_first_numbers_are_far_away() -> None:
    host = normal(1, (8, 64, 56, 56)) + 100
    host[0, :, 0] = 0
    n = BatchNormState(*(BACKEND.zeros((64,)) for _ in range(6)), BACKEND.zeros((1,)), epsilon=1e-5, fraction=0.9)
    BACKEND.batch_norm_measure(to_device(BACKEND, host), n)
    exact = host.astype(float)
    close(BACKEND.to_host(n.mean), exact.mean(axis=(0, 2, 3)), 1e-6)
    close(BACKEND.to_host(n.inverse), 1 / np.sqrt(exact.var(axis=(0, 2, 3)) + 1e-5), 1e-5)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 33, 3, 3), (64, 5), (7, 48, 31, 29)])
def test_forward(shape: tuple[int, ...], residual: bool, relu: bool, mask: bool, in_place: bool) -> None:
    checks.check_forward(BACKEND, shape, "float32", residual, relu, mask, in_place)


@pytest.mark.parametrize(("relu", "mask"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("sources", "total"), [(1, ""), (1, "own"), (1, "first"), (2, "last"), (4, "own"), (6, "own")])
@pytest.mark.parametrize("shape", [(4, 7, 5, 5), (7, 48, 31, 29)])
def test_backward(shape: tuple[int, ...], sources: int, total: str, relu: bool, mask: bool) -> None:
    checks.check_backward(BACKEND, shape, "float32", sources, relu, mask, total)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("shape", SHAPES + SEVERAL_BLOCKS)
def test_relu_backward(shape: tuple[int, ...], in_place: bool) -> None:
    checks.check_relu_backward(BACKEND, shape, "float32", True, in_place)


def test_statistics_do_not_depend_on_the_threads() -> None:
    x, bits = normal(1, (7, 48, 31, 29)), []
    for threads in (1, 2):
        backend = CpuBackend(threads)
        n = checks.statistics(backend, 48).device
        backend.batch_norm_measure(to_device(backend, x), n)
        sums = [backend.zeros((48,)) for _ in range(2)]
        backend.batch_norm_backward_sums(to_device(backend, x), [to_device(backend, x)], n, sums, True)
        bits.append([backend.to_host(array) for array in (n.mean, n.inverse, *sums)])
    assert all(np.array_equal(one, two) for one, two in zip(*bits, strict=True))


@pytest.mark.parametrize("shape", [(4, 64, 40, 40), (2, 5, 201, 203), (3, 7)])
def test_what_the_workspace_holds_does_not_matter(shape: tuple[int, ...]) -> None:
    backend = CpuBackend(1)
    x, dy = (to_device(backend, normal(seed, shape)) for seed in (1, 2))
    results = []
    for _ in range(2):
        for purpose in ("sums", "totals", "shift", "joined", "variance", "columns", "gradient columns"):
            backend._workspace.take(purpose, 2**20)[:] = np.nan
        n = BatchNormState(*(backend.zeros(shape[1:2]) for _ in range(6)), backend.zeros((1,)), 1e-5, 0.9)
        backend.fill(n.scale, 1)
        sums, dx = [backend.zeros(shape[1:2]) for _ in range(2)], backend.zeros(shape)
        backend.batch_norm_measure(x, n)
        backend.batch_norm_backward_sums(x, [dy], n, sums)
        backend.batch_norm_backward_data(x, dy, n, sums, dx)
        results.append([backend.to_host(array) for array in (n.mean, n.inverse, *sums, dx)])
    for first, second in zip(*results, strict=True):
        assert np.isfinite(first).all()
        np.testing.assert_array_equal(first, second)
