"""Mish."""

from __future__ import annotations

import numpy as np
import pytest
from layer_harness import BACKENDS, Runner, check_layer, spread


def test_formula_gradient_and_in_place() -> None:
    x = spread((2, 3, 4, 5), step=0.03)
    check_layer("type: 'Mish'", [x], lambda x: x * np.tanh(np.log1p(np.exp(x))), in_place=True)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_values_stay_finite(backend: str) -> None:
    runner = Runner("type: 'Mish'", [np.array([-1e4, -200, 200, 1e4], np.float32)], backend)
    np.testing.assert_array_equal(runner.forward()[0], [0, 0, 200, 1e4])
    np.testing.assert_array_equal(runner.backward([np.ones(4, "f")])[0], [0, 0, 1, 1])
