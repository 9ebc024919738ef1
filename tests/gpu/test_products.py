"""Matrix products on tensor cores, captured, and cuBLAS; all others are in test_primitives.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backend_arrays import normal, to_device
from primitive_checks.dense import FORMULAS, SIZES, TOLERANCE, TRANSPOSED, check_gemm, check_gemm_and_apply

from caffepy.layers.activation import sigmoid_with_channel

TF32 = TOLERANCE | {"float32": 2e-3}


@pytest.mark.parametrize(
    "sizes", [(64, 500, 800), (64, 10, 500), (7, 33, 40), (1, 1, 64), (70, 300, 100), (512, 640, 96)]
)
@pytest.mark.parametrize("transposed", TRANSPOSED)
def test_products_in_tf32(make: Callable[..., Any], sizes: tuple[int, int, int], transposed: tuple[bool, bool]) -> None:
    backend = make(math="tf32")
    with backend.activate():
        check_gemm(backend, sizes, transposed, tolerance=TF32)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1301, 1304, 1304), (1304, 1301, 1304), (1304, 1304, 1301)])
@pytest.mark.parametrize("transposed", TRANSPOSED[:3])
def test_large_products_of_odd_lengths(
    make: Callable[..., Any], dtype: str, sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    backend = make(math="tf32")
    with backend.activate():
        check_gemm(backend, sizes, transposed, dtype)


@pytest.mark.parametrize("transposed", TRANSPOSED)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_with_formulas_in_tf32(
    make: Callable[..., Any], sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    backend = make(math="tf32")
    with backend.activate():
        for formula in FORMULAS:
            check_gemm_and_apply(backend, sizes, formula, transposed, "float32", 2 * TF32["float32"])


def test_products_with_formulas_are_one_launch_captured(make: Callable[..., Any]) -> None:
    """The same bits from a graph, and what the formula makes of the product where that is made by itself."""
    backend = make(math="tf32")
    with backend.activate():
        a, b, bias = (to_device(backend, normal(k, shape)) for k, shape in enumerate(((100, 250), (30, 250), (30,))))
        whole, product = backend.zeros((100, 30)), backend.zeros((100, 30))

        def work() -> None:
            backend.gemm_and_apply(sigmoid_with_channel, a, b, bias, whole, transpose_b=True)

        work()
        eager = backend.to_host(whole)
        graph = backend.capture(work)
        backend.fill(whole, 5)
        graph.launch()
        assert np.array_equal(backend.to_host(whole), eager)
        backend.gemm(a, b, product, transpose_b=True)
        backend.apply(sigmoid_with_channel, (product, bias), (product,))
        np.testing.assert_allclose(eager, backend.to_host(product), rtol=1e-6, atol=1e-7)


def test_factors_of_two_storages_are_a_mistake(make: Callable[..., Any]) -> None:
    backend = make()
    with backend.activate(), pytest.raises(AssertionError, match="factors of"):
        backend.gemm(backend.zeros((4, 4)), backend.zeros((4, 4), "float16"), backend.zeros((4, 4)))
