"""Products with a formula of their elements on the CPU."""

from __future__ import annotations

import pytest
from dense_checks import FORMULAS, SIZES, check_gemm_and_apply

from caffepy.backend.cpu.backend import CpuBackend

BACKEND = CpuBackend(2)


@pytest.mark.parametrize("transposed", [(False, False), (True, False), (False, True), (True, True)])
@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("sizes", SIZES)
def test_products_with_formulas(sizes: tuple[int, int, int], formula: str, transposed: tuple[bool, bool]) -> None:
    check_gemm_and_apply(BACKEND, sizes, formula, transposed, "float32", 1e-5)
