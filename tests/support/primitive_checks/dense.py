"""Products of matrices, alone and with a formula of their elements."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import dirty, normal, rounded, to_device
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import Backend, Expression
from caffepy.backend.formulas import total_with_channel
from caffepy.layers.activation import sigmoid_with_channel, tanh_with_channel
from primitive_checks.strategies import often

TOLERANCE = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2}
TRANSPOSED = [(False, False), (True, False), (False, True), (True, True)]


def check_gemm(
    backend: Backend,
    sizes: tuple[int, int, int],
    transposed: tuple[bool, bool],
    dtype: str = "float32",
    sliced: bool = False,
    tolerance: dict[str, float] = TOLERANCE,
) -> None:
    """Products of matrices and of slices of wider ones, overwriting and adding, to the dtype and to float32."""
    m, n, k = sizes
    a, b = (rounded(normal(seed, shape), dtype) for seed, shape in ((1, (m, k)), (2, (k, n))))
    start, extra = normal(3, (m, n)), 5 if sliced else 0

    def matrix(host: Any, kind: str) -> Any:
        wide = dirty(backend, (host.shape[0], host.shape[1] + extra), kind)
        view = wide[:, extra // 2 : extra // 2 + host.shape[1]]
        backend.copy(to_device(backend, host, kind), view)
        return view

    on_a, on_b = (
        matrix(np.ascontiguousarray(host.T if turned else host), dtype)
        for host, turned in zip((a, b), transposed, strict=True)
    )
    expected = a.astype(float) @ b.astype(float)
    for kind in sorted({"float32", dtype}):
        limit = tolerance["float32" if kind == "float32" and dtype == "float32" else dtype]
        out, turned_out = matrix(start, kind), backend.zeros((n, m), kind).T
        backend.gemm(on_a, on_b, out, *transposed, accumulate=True)
        _near(backend.to_host(out), expected + rounded(start, kind), limit)
        backend.gemm(on_a, on_b, out, *transposed)
        _near(backend.to_host(out), expected, limit)
        if dtype == "float32":
            backend.gemm(on_a, on_b, turned_out, *transposed)
            _near(backend.to_host(turned_out), expected, limit)


def _near(found: Any, expected: Any, limit: float) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit * max(1e-30, np.abs(expected).max()))


@often
@given(
    m=st.sampled_from([1, 2, 5, 7, 23, 64]),
    n=st.sampled_from([1, 3, 10, 17, 65]),
    k=st.sampled_from([1, 5, 9, 40, 133, 300]),
    transposed=st.sampled_from(TRANSPOSED),
    sliced=st.booleans(),
)
def test_gemm(backend: Backend, m: int, n: int, k: int, transposed: tuple[bool, bool], sliced: bool) -> None:
    check_gemm(backend, (m, n, k), transposed, sliced=sliced)


@pytest.mark.parametrize(
    "sizes", [(64, 500, 800), (64, 10, 500), (7, 33, 40), (1, 1, 64), (70, 300, 100), (512, 640, 96)]
)
@pytest.mark.parametrize("transposed", TRANSPOSED)
def test_gemm_of_each_dtype(
    backend: Backend, dtype: str, sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    check_gemm(backend, sizes, transposed, dtype)


@pytest.mark.parametrize("sizes", [(300, 500, 64), (10, 1003, 700), (129, 257, 1025), (700, 33, 10), (5, 2003, 300)])
@pytest.mark.parametrize("transposed", TRANSPOSED)
def test_large_gemm_of_slices(backend: Backend, sizes: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    check_gemm(backend, sizes, transposed, sliced=True)


@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("depth", [1, 8, 100, 133])
@pytest.mark.parametrize("vectors", [1, 2, 3, 4, 5])
def test_gemm_of_a_few_vectors(backend: Backend, vectors: int, depth: int, accumulate: bool) -> None:
    """Weights times a few images, on either side; both factors lie along the depth."""
    weights, x = normal(1, (23, depth)), normal(2, (vectors, depth))
    for first, second in ((weights, x), (x, weights)):
        start = normal(3, (len(first), len(second)))
        out = to_device(backend, start)
        backend.gemm(to_device(backend, first), to_device(backend, second), out, False, True, accumulate)
        expected = first.astype(float) @ second.T.astype(float) + (start if accumulate else 0)
        np.testing.assert_allclose(backend.to_host(out), expected, rtol=1e-5, atol=1e-5)


# -- with formulas ----------------------------------------------------------------------------------------------

FORMULAS: dict[str, tuple[Expression, Any]] = {
    "sum": (total_with_channel, lambda x: x),
    "sigmoid": (sigmoid_with_channel, lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (tanh_with_channel, np.tanh),
}
"""Formulas of a product and its column's number, and what they make of the sum of the two."""

SIZES = [
    (100, 30, 250),
    (100, 250, 30),
    (100, 500, 250),
    (7, 33, 40),
    (1, 1, 16),
    (1, 70, 64),
    (3, 5, 8),
    (64, 10, 500),
    (100, 1000, 500),
    (100, 784, 1000),
]
"""Rows, columns, depth: of small products and others, with wide loads and without."""


def check_gemm_and_apply(
    backend: Backend, sizes: tuple[int, int, int], formula: str, transposed: tuple[bool, bool], dtype: str, far: float
) -> None:
    """Factors of one dtype, the result in that and in float32; columns differ by more than `far`."""
    rows, columns, depth = sizes
    expression, function = FORMULAS[formula]
    hosts = [normal(1, (rows, depth)) / np.sqrt(depth), normal(2, (depth, columns))]
    bias = np.linspace(-2, 2, columns, dtype=np.float32)
    arrays = [
        to_device(backend, np.ascontiguousarray(host.T if turned else host), dtype)
        for host, turned in zip(hosts, transposed, strict=True)
    ]
    a, b = (
        backend.to_host(array).astype(float).T if turned else backend.to_host(array).astype(float)
        for array, turned in zip(arrays, transposed, strict=True)
    )
    expected = function(a @ b + bias)
    channel = to_device(backend, bias)
    for kind in sorted({"float32", dtype}):
        out = dirty(backend, (rows, columns), kind)
        backend.gemm_and_apply(expression, *arrays, channel, out, *transposed)
        first = backend.to_host(out)
        assert np.abs(first - expected).max() <= far * max(1.0, np.abs(expected).max()), (kind, sizes)
        backend.gemm_and_apply(expression, *arrays, channel, out, *transposed)
        assert np.array_equal(backend.to_host(out), first)


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_with_formulas(
    backend: Backend, dtype: str, sizes: tuple[int, int, int], formula: str, transposed: tuple[bool, bool]
) -> None:
    far = TOLERANCE[dtype] if dtype == "float32" else 2 * TOLERANCE[dtype]
    check_gemm_and_apply(backend, sizes, formula, transposed, dtype, far)
