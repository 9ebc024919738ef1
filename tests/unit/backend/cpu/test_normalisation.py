"""Batch normalisation on the CPU: results depend neither on the threads nor on earlier passes."""

from __future__ import annotations

import numpy as np
import pytest
from backend_arrays import normal, to_device
from primitive_checks.batch_norm import statistics

from caffepy.backend import Backend
from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.types import BatchNormState


def test_statistics_do_not_depend_on_the_threads() -> None:
    x, bits = normal(1, (7, 48, 31, 29)), []
    for threads in (1, 2):
        backend = CpuBackend(threads)
        n = statistics(backend, 48).device
        backend.batch_norm_measure(to_device(backend, x), n)
        sums = [backend.zeros((48,)) for _ in range(2)]
        backend.batch_norm_backward_sums(to_device(backend, x), [to_device(backend, x)], n, sums, True)
        bits.append([backend.to_host(array) for array in (n.mean, n.inverse, *sums)])
    assert all(np.array_equal(one, two) for one, two in zip(*bits, strict=True))


def passes(backend: Backend, shape: tuple[int, ...], scale: float = 1.0) -> list[np.ndarray]:
    x, dy = (to_device(backend, scale * normal(seed, shape)) for seed in (1, 2))
    n = BatchNormState(*(backend.zeros(shape[1:2]) for _ in range(6)), backend.zeros((1,)), 1e-5, 0.9)
    backend.fill(n.scale, 1)
    sums, dx = [backend.zeros(shape[1:2]) for _ in range(2)], backend.zeros(shape)
    backend.batch_norm_measure(x, n)
    backend.batch_norm_backward_sums(x, [dy], n, sums)
    backend.batch_norm_backward_data(x, dy, n, sums, dx)
    return [backend.to_host(array) for array in (n.mean, n.inverse, *sums, dx)]


@pytest.mark.parametrize("shape", [(4, 64, 40, 40), (2, 5, 201, 203), (3, 7)])
def test_earlier_passes_do_not_matter(shape: tuple[int, ...]) -> None:
    """Workspaces are shared: they hold NaN after a pass over NaN."""
    backend = CpuBackend(1)
    first = passes(backend, shape)
    passes(backend, (5, 65, 43, 42), np.nan)
    for found, wanted in zip(passes(backend, shape), first, strict=True):
        assert np.isfinite(found).all()
        np.testing.assert_array_equal(found, wanted)
