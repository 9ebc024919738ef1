"""Formulas that are made of others compute, on numbers and on arrays, what their parts compute one after the other."""

from __future__ import annotations

from math import sqrt

import numpy as np
import pytest

from caffepy.backend import Channel, Each, Scalar, create_backend, expression

SHIFT = 0.25


@expression
def shifted(x: Each, slope: Channel, factor: Scalar) -> Each:
    larger = x if x > 0 else slope * x
    return factor * larger + SHIFT


@expression
def root(value: Each, history: Each, slope: Channel) -> tuple[Each, Each]:
    square = value * value + history
    return sqrt(square), square * slope


def expected(x: np.ndarray, history: np.ndarray, slope: np.ndarray, factor: float) -> tuple[np.ndarray, np.ndarray]:
    value = factor * np.where(x > 0, x, slope * x) + SHIFT
    square = value * value + history
    return np.sqrt(square), square * slope


@pytest.mark.parametrize("flag", [0.0, 1.0])
def test_compositions(flag: float) -> None:
    backend = create_backend(None, 1)
    formula = root.of("value", shifted).unless("flag", ("x", "history")).returning("square", "square + flag")
    rng = np.random.default_rng(0)
    x, history = rng.normal(size=(3, 5)).astype(np.float32), rng.random((3, 5), np.float32)
    slope = rng.random(5, np.float32)
    first, second = expected(x, history, slope, 0.5) if flag == 0 else (x, history)
    third = expected(x, history, slope, 0.5)[0] ** 2 + flag
    given = {"x": x, "history": history, "slope": slope, "factor": 0.5, "flag": flag}
    assert sorted(formula.parameters) == sorted(given)
    outputs = [np.empty_like(x) for _ in range(4)]
    with backend.activate():
        backend.apply(formula.with_copies(1), [given[name] for name in formula.parameters], outputs, axis=1)
    for found, wanted in zip(outputs, (first, second, third, first), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-6)
    numbers = [given[name] if np.ndim(given[name]) == 0 else given[name][..., 0].flat[0] for name in formula.parameters]
    assert formula(*numbers) == pytest.approx((first[0, 0], second[0, 0], third[0, 0]))


def test_equal_compositions_are_one_so_that_their_kernel_is_compiled_once() -> None:
    assert root.of("value", shifted) is root.of("value", shifted)
    assert root.unless("flag", ("value", "history")) is root.unless("flag", ("value", "history"))


def test_variables_of_the_same_name_are_refused() -> None:
    @expression
    def clash(x: Each) -> Each:
        square = x * x
        return square + 1

    with pytest.raises(AssertionError):
        root.of("value", clash)
