"""Matrix products on the GPU in every dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from backend_checks import normal, to_device
from dense_checks import FORMULAS, SIZES, check_gemm_and_apply
from stored_numbers import STORAGES, TOLERANCE, bits, numbers, rounded

from caffepy.layers.activation.sigmoid import sigmoid_with_channel


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize(
    "sizes", [(64, 500, 800), (64, 10, 500), (7, 33, 40), (1, 1, 64), (70, 300, 100), (512, 640, 96)]
)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
def test_products(
    make: Callable[..., Any], dtype: str, sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    import cupy

    rows, columns, depth = sizes
    rng = np.random.default_rng(2)
    a, b = (rounded(rng.standard_normal(shape), dtype) for shape in ((rows, depth), (depth, columns)))
    expected = a.astype(float) @ b.astype(float)
    backend = make()
    with backend.activate():
        on_a, on_b = (
            cupy.asarray(np.ascontiguousarray(bits(host.T if turned else host, dtype)))
            for host, turned in zip((a, b), transposed, strict=True)
        )
        kinds = {"float32", "uint16" if dtype == "bfloat16" else dtype}
        for kind in sorted(kinds):
            out = backend.zeros((rows, columns), kind)
            backend.gemm(on_a, on_b, out, *transposed)
            backend.gemm(on_a, on_b, out, *transposed, accumulate=True)
            off = np.abs(numbers(out.get()) - 2 * expected).max() / np.abs(2 * expected).max()
            assert off <= (1e-3 if kind == "float32" else TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("sizes", [(1301, 1304, 1304), (1304, 1301, 1304), (1304, 1304, 1301)])
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True)])
def test_large_products_of_odd_lengths(
    make: Callable[..., Any], dtype: str, sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    test_products(make, dtype, sizes, transposed)


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("sizes", [*SIZES, (100, 1000, 500), (100, 784, 1000)])
def test_products_with_formulas(
    make: Callable[..., Any], dtype: str, sizes: tuple[int, int, int], transposed: tuple[bool, bool]
) -> None:
    for math in ("tf32", "fp32"):
        backend = make(math=math)
        far = 4e-3 if dtype == "float32" and math == "tf32" else {"float32": 1e-5}.get(dtype, 2 * TOLERANCE[dtype])
        with backend.activate():
            for formula in FORMULAS:
                check_gemm_and_apply(backend, sizes, formula, transposed, dtype, far)


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
