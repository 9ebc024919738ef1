"""e^x, log(1 + x) and tanh(x) of float32, beside NumPy's in float64."""

from __future__ import annotations

from collections.abc import Callable
from math import exp, log1p, tanh
from typing import Any

import numpy as np
import pytest

from caffepy.backend import Each, expression
from caffepy.backend.cpu.backend import CpuBackend


@expression
def raised(x: Each) -> Each:
    return exp(x)


@expression
def lowered(x: Each) -> Each:
    return log1p(x)


@expression
def bent(x: Each) -> Each:
    return tanh(x)


def computed(formula: Any, x: Any) -> Any:
    y = np.empty_like(x)
    CpuBackend(1).apply(formula, (x,), (y,))
    return y


def units_off(found: Any, exact: Callable[[Any], Any], x: Any) -> Any:
    """How many units of the last place of float32 the results are off."""
    wanted = exact(x.astype(np.float64))
    return np.abs(found - wanted) / np.spacing(np.abs(wanted).astype(np.float32))


SPREAD = np.random.default_rng(1).standard_normal(100_000).astype(np.float32)


@pytest.mark.parametrize("scale", [1e-6, 0.1, 1, 10, 20])
def test_exponentials_are_two_units_off_at_most(scale: float) -> None:
    x = np.clip(SPREAD * np.float32(scale), -87, 88)
    assert units_off(computed(raised, x), np.exp, x).max() <= 2


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.1, 1, 1e6, 1e30])
def test_logarithms_are_two_units_off_at_most(scale: float) -> None:
    x = np.abs(SPREAD) * np.float32(scale)
    assert units_off(computed(lowered, x), np.log1p, x).max() <= 2
    below = -np.abs(SPREAD[np.abs(SPREAD) < 0.99])
    assert units_off(computed(lowered, below), np.log1p, below).max() <= 2


@pytest.mark.parametrize("scale", [1e-30, 1e-6, 0.1, 0.4, 1, 5])
def test_hyperbolic_tangents_are_two_units_off_at_most(scale: float) -> None:
    x = SPREAD * np.float32(scale)
    assert units_off(computed(bent, x), np.tanh, x).max() <= 2


def test_hyperbolic_tangents_beyond_the_range() -> None:
    x = np.array([-np.inf, -1e30, -50, -0.0, 0, 50, 1e30, np.inf, np.nan], np.float32)
    found = computed(bent, x)
    np.testing.assert_array_equal(found, [-1, -1, -1, 0, 0, 1, 1, 1, np.nan])
    assert np.signbit(found[3])


def test_exponentials_beyond_the_range() -> None:
    x = np.array([-np.inf, -1e30, -110, -0.0, 0, 88.73, 1e30, np.inf, np.nan], np.float32)
    np.testing.assert_array_equal(computed(raised, x), [0, 0, 0, 1, 1, np.inf, np.inf, np.inf, np.nan])
    small = np.linspace(-103, -87, 999, dtype=np.float32)  # subnormal results
    np.testing.assert_allclose(computed(raised, small), np.exp(small.astype(np.float64)), rtol=0, atol=3e-45)


def test_logarithms_beyond_the_range() -> None:
    x = np.array([-np.inf, -1.5, -1, 0, np.inf, np.nan, 3e38], np.float32)
    np.testing.assert_allclose(
        computed(lowered, x), [np.nan, np.nan, -np.inf, 0, np.inf, np.nan, np.log(3e38)], rtol=2e-7
    )
