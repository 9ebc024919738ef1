"""Kernels for few shapes: which problems they suit, and that their blocks cover the work."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import convolution_reference as reference
import numpy as np
import pytest

from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
from caffepy.backend.types import Geometry

NAMES = ("implicit_gemm", "dgrad_few_channels", "depthwise")


@pytest.fixture(scope="module")
def modules(cupy_or_mock: None) -> Iterator[Any]:
    """The modules; CuPy need not be installed, the GPU is one with tensor cores."""
    prefix = "caffepy.backend.cuda.convolution"
    found = {name: importlib.import_module(f"{prefix}.{name}") for name in NAMES}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(found["implicit_gemm"], "has_tensor_cores", lambda: True)
        yield SimpleNamespace(**found)


def task(
    x: tuple[int, ...],
    outputs: int,
    kernel: tuple[int, ...],
    dtype: str = "float16",
    direction: Direction = Direction.WEIGHTS,
    group: int = 1,
    pad: int = 0,
    stride: int = 1,
) -> Task:
    axes = len(kernel)
    geometry = Geometry(kernel, (stride,) * axes, (pad,) * axes, (1,) * axes, group)
    return Task(Problem(x, (outputs, x[1] // group, *kernel), geometry, dtype), direction)


@pytest.mark.parametrize(
    ("given_task", "suited"),
    [
        (task((1, 512, 7, 7), 512, (3, 3), pad=1), True),
        (task((64, 512, 7, 7), 256, (7, 7), "bfloat16"), True),
        (task((1, 512, 7, 7), 512, (3, 3), "float32"), False),
        (task((1, 512, 7, 7), 512, (3, 3), direction=Direction.DATA, pad=1), False),
        (task((8, 512, 7, 7), 512, (3, 3), pad=1), False),
        (task((1, 508, 7, 7), 512, (3, 3)), False),
        (task((1, 512, 7, 7), 508, (3, 3)), False),
        (task((1, 64, 7, 7), 64, (3, 3)), False),
        (task((1, 1024, 7, 7), 1024, (3, 3), group=2), False),
        (task((1, 512, 49), 512, (3,)), False),
    ],
)
def test_small_k_wgrads_are_of_few_pixels_and_many_weights(modules: Any, given_task: Task, suited: bool) -> None:
    assert modules.implicit_gemm.suits_small_k_wgrad(given_task) is suited


@pytest.mark.parametrize(
    ("given_task", "suited"),
    [
        (task((4, 1, 64, 64), 8, (31, 31), "float32", Direction.DATA), True),
        (task((4, 3, 64, 64), 8, (9, 9), "float32", Direction.DATA, pad=4), True),
        (task((4, 1, 64, 64), 8, (31, 31), "float16", Direction.DATA), False),
        (task((4, 1, 64, 64), 8, (31, 31), "float32"), False),
        (task((4, 5, 64, 64), 8, (31, 31), "float32", Direction.DATA), False),
        (task((4, 1, 64, 64), 8, (8, 8), "float32", Direction.DATA), False),
        (task((4, 1, 64, 64), 8, (31, 31), "float32", Direction.DATA, stride=2), False),
        (task((4, 1, 128, 128), 8, (64, 64), "float32", Direction.DATA), False),
        (task((4, 1, 640, 640), 64, (31, 31), "float32", Direction.DATA), False),
    ],
)
def test_large_windows_are_for_few_channels(modules: Any, given_task: Task, suited: bool) -> None:
    assert modules.dgrad_few_channels.suits_large_windows(given_task) is suited


@pytest.mark.parametrize(
    ("given_task", "suited"),
    [
        (task((2, 5, 9, 9), 15, (3, 3), group=5), True),
        (task((2, 5, 9, 9), 15, (3, 3), direction=Direction.FORWARD, group=5), True),
        (task((2, 5, 9, 9), 15, (3, 3), "float32", Direction.DATA, group=5), True),
        (task((2, 5, 9, 9), 15, (3, 3), direction=Direction.DATA, group=5), False),
        (task((2, 5, 9, 9), 5, (3, 3), group=5), False),
        (task((2, 10, 9, 9), 15, (3, 3), group=5), False),
        (task((2, 5, 9), 15, (3,), group=5), False),
        (task((64, 4, 512, 512), 128, (3, 3), group=4), False),
    ],
)
def test_channels_are_repeated_where_there_is_a_multiplier_and_memory(
    modules: Any, given_task: Task, suited: bool
) -> None:
    assert modules.depthwise.suits_depth_multiplier(given_task) is suited


def test_the_depthwise_problem_of_repeated_channels_is_the_same(modules: Any) -> None:
    problem = task((2, 3, 7, 6), 12, (3, 2), group=3, pad=1, stride=2).problem
    other = modules.depthwise.repeated(problem)
    assert (other.y, other.weights) == (problem.y, problem.weights)
    rng = np.random.default_rng(1)
    x, weights, dy = (rng.standard_normal(shape) for shape in (problem.x, problem.weights, problem.y))
    y, dx, dweights = reference.convolution(x, weights, dy, problem.geometry)
    others = reference.convolution(np.repeat(x, 4, 1), weights, dy, other.geometry)
    np.testing.assert_allclose(others[0], y, atol=1e-12)
    np.testing.assert_allclose(others[1].reshape(2, 3, 4, 7, 6).sum(2), dx, atol=1e-12)
    np.testing.assert_allclose(others[2], dweights, atol=1e-12)
