"""Equivalent problems (padded, space-to-depth, gathered rows) give the original results: in NumPy, without a GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import backend_oracle as oracle
import convolution_reference as reference
import numpy as np
import pytest

from caffepy.backend.cuda.convolution.problem import Direction, Problem
from caffepy.backend.types import Geometry

if TYPE_CHECKING:
    from caffepy.backend.cuda.convolution.rewritten import EquivalentProblem, SpaceToDepth, equivalent_problems


@pytest.fixture(scope="module", autouse=True)
def _imports(cupy_or_mock: None) -> None:
    """CuPy need not be installed."""
    global EquivalentProblem, SpaceToDepth, equivalent_problems
    from caffepy.backend.cuda.convolution.rewritten import EquivalentProblem, SpaceToDepth, equivalent_problems


CASES = {
    "ResNet's first layer": ((2, 3, 17, 15), 8, Geometry((7, 7), (2, 2), (3, 3), (1, 1))),
    "CaffeNet's first layer": ((1, 3, 23, 19), 6, Geometry((11, 11), (4, 4), (0, 0), (1, 1))),
    "VGG's first layer": ((2, 3, 6, 5), 4, Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    "one channel": ((3, 1, 9, 8), 5, Geometry((5, 5), (1, 1), (0, 0), (1, 1))),
    "odd numbers": ((2, 21, 4, 5), 10, Geometry((2, 3), (1, 2), (1, 0), (2, 1))),
    "a kernel of unequal sides": ((1, 3, 12, 13), 7, Geometry((5, 4), (3, 3), (2, 1), (1, 1))),
}


def rearranged(change: SpaceToDepth, plain: Any) -> Any:
    """What kernels/space_to_depth.cu's `fold` computes."""
    n, channels, height, width = change.target
    own = channels // change.row
    result = np.zeros(change.target)
    for (_, c, y, x), value in np.ndenumerate(np.ones((1, *change.source[1:]))):
        i, a = divmod(y + change.pad[0], change.block)
        column, b = divmod(x + change.pad[1], change.block)
        for d in range(change.row):
            j = column - d
            if i < height and 0 <= j < width:
                channel = d * own + (a * change.block + b) * change.source[1] + c
                result[: change.source[0], channel, i, j] = value * plain[:, c, y, x]
    return result


def restored(change: SpaceToDepth, result: Any) -> Any:
    """What kernels/space_to_depth.cu's `unfold` computes."""
    plain = np.zeros(change.source)
    for (_, c, y, x), _ in np.ndenumerate(np.ones((1, *change.source[1:]))):
        i, a = divmod(y + change.pad[0], change.block)
        j, b = divmod(x + change.pad[1], change.block)
        if i < change.target[2] and j < change.target[3]:
            channel = (a * change.block + b) * change.source[1] + c
            plain[:, c, y, x] = result[: change.source[0], channel, i, j]
    return plain


def reread(array: Any, shape: tuple[int, ...]) -> Any:
    """An array under another shape with the same elements in memory, channels last."""
    n, c, h, w = shape
    return array.transpose(0, 2, 3, 1).reshape(n, h, w, c).transpose(0, 3, 1, 2)


def equivalents(dtype: str, case: str, direction: Direction) -> list[tuple[Problem, EquivalentProblem]]:
    x, outputs, geometry = CASES[case]
    problem = Problem(x, (outputs, x[1], *geometry.kernel), geometry, dtype)
    return [(problem, other) for _, other in equivalent_problems(problem, direction)]


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", CASES)
def test_results_are_the_same(dtype: str, case: str) -> None:
    rng = np.random.default_rng(1)
    for direction in Direction:
        every = equivalents(dtype, case, direction)
        assert every, "these problems have few channels or odd numbers of them"
        for plain, other in every:
            x, w, dy = (rng.standard_normal(shape) for shape in (plain.x, plain.weights, plain.y))
            inner = other.problem
            assert inner.y == other.y.target
            fx, fw, fdy = (
                rearranged(other.x, x),
                reread(rearranged(other.weights, w), inner.weights),
                rearranged(other.y, dy),
            )
            y, dx, dw = reference.convolution(fx, fw, fdy, inner.geometry)
            y_expected, dx_expected, dw_expected = reference.convolution(x, w, dy, plain.geometry)
            if direction is Direction.FORWARD:
                np.testing.assert_allclose(restored(other.y, y), y_expected, atol=1e-9)
            elif direction is Direction.DATA:
                np.testing.assert_allclose(restored(other.x, dx), dx_expected, atol=1e-9)
            else:
                dw = reread(dw, other.weights.target)
                np.testing.assert_allclose(restored(other.weights, dw), dw_expected, atol=1e-9)


@pytest.mark.parametrize("direction", Direction)
def test_volumes_are_padded_as_planes(direction: Direction) -> None:
    geometry = Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1))
    plain = Problem((2, 3, 4, 5, 6), (6, 3, 3, 2, 3), geometry)
    [(_, other)] = equivalent_problems(plain, direction)
    rng = np.random.default_rng(1)
    inner = other.problem
    assert (inner.x, inner.weights) == ((2, 4, 4, 5, 6), (8, 4, 3, 2, 3))
    pairs = ((plain.x, other.x, inner.x), (plain.weights, other.weights, inner.weights), (plain.y, other.y, inner.y))
    given = [rng.standard_normal(shape) for shape, _, _ in pairs]
    changed = [
        rearranged(change, array.reshape(change.source)).reshape(shape)
        for array, (_, change, shape) in zip(given, pairs, strict=True)
    ]
    wanted = reference.convolution(*given, geometry)
    for result, expected, (shape, change, _) in zip(
        reference.convolution(*changed, geometry), wanted, (pairs[2], pairs[0], pairs[1]), strict=True
    ):
        found = restored(change, result.reshape(change.target)).reshape(shape)
        np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("case", CASES)
def test_the_reference_is_right(case: str) -> None:
    x_shape, outputs, geometry = CASES[case]
    problem = Problem(x_shape, (outputs, x_shape[1], *geometry.kernel), geometry)
    rng = np.random.default_rng(2)
    x, w, dy = (rng.standard_normal(shape) for shape in ((1, *x_shape[1:]), problem.weights, (1, *problem.y[1:])))
    y, dx, dw = reference.convolution(x, w, dy, geometry)
    np.testing.assert_allclose(y, oracle.convolution(x, w, None, geometry, problem.y[2:]), atol=1e-9)
    dx_expected, dw_expected = oracle.convolution_gradients(x, w, dy, geometry)
    np.testing.assert_allclose(dx, dx_expected, atol=1e-9)
    np.testing.assert_allclose(dw, dw_expected, atol=1e-9)


def test_channels_are_multiples_of_what_one_load_takes() -> None:
    for dtype, unit in (("float32", 4), ("bfloat16", 8)):
        for case in CASES:
            for _, other in equivalents(dtype, case, Direction.WEIGHTS):
                assert other.problem.weights[0] % unit == 0
                assert other.problem.x[1] % 4 == 0


def test_many_channels_are_left_alone() -> None:
    geometry = Geometry((3, 3), (2, 2), (1, 1), (1, 1))
    problem = Problem((8, 64, 28, 28), (128, 64, 3, 3), geometry, "float16")
    assert not list(equivalent_problems(problem, Direction.FORWARD))


def test_groups_are_left_alone() -> None:
    geometry = Geometry((3, 3), (1, 1), (1, 1), (1, 1), group=3)
    assert not list(equivalent_problems(Problem((2, 3, 9, 9), (6, 1, 3, 3), geometry), Direction.FORWARD))
