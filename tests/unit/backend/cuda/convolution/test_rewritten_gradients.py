"""Gradients as forward convolutions, in NumPy, and in parts; which convolutions are products of their arrays."""

from __future__ import annotations

import importlib
from typing import Any

import convolution_reference as reference
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task, is_product
from caffepy.backend.types import Geometry


@pytest.fixture(scope="module")
def module(cupy_or_mock: None) -> Any:
    return importlib.import_module("caffepy.backend.cuda.convolution.rewritten")


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    axes = draw(st.sampled_from([1, 2, 3]))
    kernel = tuple(draw(st.integers(1, 4)) for _ in range(axes))
    dilation = tuple(draw(st.integers(1, 2)) for _ in range(axes))
    reach = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
    pad = tuple(draw(st.integers(0, most)) for most in reach)
    size = tuple(draw(st.integers(most + 1, most + 4)) for most in reach)
    n, channels, outputs = (draw(st.integers(1, 3)) for _ in range(3))
    geometry = Geometry(kernel, (1,) * axes, pad, dilation)
    return Problem((n, channels, *size), (outputs, channels, *kernel), geometry)


@settings(max_examples=40)
@given(problem=problems())
def test_the_gradient_is_a_forward_convolution_of_the_turned_weights(module: Any, problem: Problem) -> None:
    rng = np.random.default_rng(1)
    weights, dy = rng.standard_normal(problem.weights), rng.standard_normal(problem.y)
    _, dx, _ = reference.convolution(np.zeros(problem.x), weights, dy, problem.geometry)
    other = module.flipped(problem)
    assert other.y == problem.x
    turned = np.flip(weights.swapaxes(0, 1), tuple(range(2, weights.ndim)))
    y, _, _ = reference.convolution(dy, turned, np.zeros(other.y), other.geometry)
    np.testing.assert_allclose(y, dx, rtol=1e-10, atol=1e-10)


def large(direction: Direction, stride: int = 1, pad: int = 0, group: int = 1) -> Task:
    geometry = Geometry((31, 31), (stride,) * 2, (pad,) * 2, (1, 1), group)
    return Task(Problem((4, 2, 64, 64), (8, 2 // group, 31, 31), geometry), direction)


def test_it_is_for_data_gradients_of_large_windows_with_stride_one(module: Any) -> None:
    assert module.suits_flipping(large(Direction.DATA))
    assert not module.suits_flipping(large(Direction.FORWARD))
    assert not module.suits_flipping(large(Direction.DATA, stride=2))
    assert not module.suits_flipping(large(Direction.DATA, group=2))
    assert not module.suits_flipping(large(Direction.DATA, pad=31)), "its padding would be negative"


def test_over_one_axis_it_is_for_windows_of_any_size(module: Any) -> None:
    def line(kernel: int) -> Task:
        geometry = Geometry((kernel,), (1,), (0,), (1,))
        return Task(Problem((4, 8, 64), (16, 8, kernel), geometry), Direction.DATA)

    assert module.suits_flipping(line(2))
    assert not module.suits_flipping(line(1)), "the products of a 1x1 window need no turning"


def pointwise(n: int, channels: int, side: int, outputs: int) -> Problem:
    return Problem((n, channels, side, side), (outputs, channels, 1, 1), Geometry((1, 1), (1, 1), (0, 0), (1, 1)))


@given(n=st.integers(1, 300), channels=st.integers(1, 2100), side=st.integers(1, 120), outputs=st.integers(1, 2100))
def test_parts_are_of_one_size_and_leave_few_pixels_over(
    module: Any, n: int, channels: int, side: int, outputs: int
) -> None:
    number, depth = module.parts_of(pointwise(n, channels, side, outputs))
    pixels = n * side * side
    assert number >= 1
    if number > 1:
        assert depth % 8 == 0
        assert depth >= module.MIN_DEPTH
        assert 0 <= pixels - number * depth < depth + 8 * number
        assert number * outputs * channels <= module.MAX_NUMBERS
    else:
        assert depth == pixels


def test_an_early_layers_gradient_is_split_and_a_late_layers_is_not(module: Any) -> None:
    early, late = pointwise(8, 64, 56, 256), pointwise(8, 2048, 7, 512)
    assert module.suits_split_k(Task(early, Direction.WEIGHTS))
    assert module.parts_of(early)[0] * 4 <= module.RESIDENT_BLOCKS
    assert not module.suits_split_k(Task(early, Direction.DATA))
    assert not module.suits_split_k(Task(late, Direction.WEIGHTS))


@pytest.mark.parametrize(
    ("kernel", "pad", "group", "expected"),
    [((5, 7), 0, 1, True), ((5, 7), 1, 1, False), ((5, 6), 0, 1, False), ((5, 7), 0, 2, False), ((1, 1), 0, 2, True)],
)
def test_windows_of_a_whole_image_or_a_pixel_are_products(
    kernel: tuple[int, int], pad: int, group: int, expected: bool
) -> None:
    geometry = Geometry(kernel, (1, 1), (pad, pad), (1, 1), group)
    problem = Problem((3, 4, 5, 7), (6, 4 // group, *kernel), geometry)
    assert is_product(problem) is expected
    assert np.prod(problem.y[2:]) == 1 or kernel != (5, 7) or pad
