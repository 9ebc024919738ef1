"""Depthwise convolutions with large windows, and data gradients of few channels: what threads compute of them."""

from __future__ import annotations

import importlib
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import convolution_reference as reference
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from caffepy.backend.cuda.convolution.problem import CorrelationAxis, Direction, Problem, Task, axis_of, residues_text
from caffepy.backend.types import Geometry

NAMES = ("depthwise", "dgrad_few_channels")


@pytest.fixture(scope="module")
def modules(cupy_or_mock: None) -> Any:
    """The modules; CuPy need not be installed."""
    prefix = "caffepy.backend.cuda.convolution"
    found = {name: importlib.import_module(f"{prefix}.{name}") for name in NAMES}
    return SimpleNamespace(**found)


def depthwise(
    x: tuple[int, ...],
    kernel: tuple[int, int],
    stride: int = 1,
    pad: int = 0,
    dilation: int = 1,
    direction: Direction = Direction.FORWARD,
    dtype: str = "float32",
) -> Task:
    geometry = Geometry(kernel, (stride,) * 2, (pad,) * 2, (dilation,) * 2, x[1])
    return Task(Problem(x, (x[1], 1, *kernel), geometry, dtype), direction)


def correlated(axis: CorrelationAxis, source: Any, factors: Any, length: int) -> Any:
    """What the kernels compute along one axis."""
    results = np.zeros(length)
    for number, residue in enumerate(axis.residues):
        for q in range(axis.results):
            at = q * len(axis.residues) + number
            for tap in range(residue.taps if at < length else 0):
                pixel = axis.origin + residue.offset + q * axis.a + tap * axis.b
                inside = 0 <= pixel < len(source)
                results[at] += factors[residue.first + tap * axis.step] * (source[pixel] if inside else 0)
    return results


@given(
    length=st.integers(1, 40),
    kernel=st.integers(1, 20),
    stride=st.integers(1, 17),
    pad=st.integers(0, 19),
    dilation=st.integers(1, 7),
    direction=st.sampled_from(Direction),
)
def test_a_convolution_and_its_gradients_are_correlations(
    length: int, kernel: int, stride: int, pad: int, dilation: int, direction: Direction
) -> None:
    problem = Problem((1, 1, length), (1, 1, kernel), Geometry((kernel,), (stride,), (pad,), (dilation,)))
    assume(problem.y[2] > 0)
    rng = np.random.default_rng(1)
    x, weights, dy = (rng.integers(-9, 9, shape).astype(float) for shape in (problem.x, problem.weights, problem.y))
    expected = dict(zip(Direction, reference.convolution(x, weights, dy, problem.geometry), strict=True))[direction]
    inputs = {Direction.FORWARD: (x, weights), Direction.DATA: (dy, weights), Direction.WEIGHTS: (x, dy)}[direction]
    axis = axis_of(problem, direction, 0)
    assert {one.taps for one in axis.residues} <= {axis.taps, axis.taps - 1, 0}  # what the kernels are compiled for
    assert np.array_equal(correlated(axis, inputs[0][0, 0], inputs[1][0, 0], expected.size), expected[0, 0])


def test_residues_are_an_initialiser() -> None:
    problem = Problem((1, 1, 12), (1, 1, 3), Geometry((3,), (2,), (1,), (1,)))
    assert residues_text(axis_of(problem, Direction.DATA, 0)) == "{{1, 0, 1}, {2, 0, 2}}"


@pytest.mark.parametrize(
    ("given_task", "suited"),
    [
        (depthwise((64, 64, 56, 56), (31, 31), pad=15), True),
        (depthwise((64, 64, 56, 56), (31, 31), pad=15, direction=Direction.WEIGHTS, dtype="float16"), True),
        (depthwise((64, 64, 56, 56), (7, 7), pad=3), True),
        (depthwise((64, 64, 56, 56), (5, 5), pad=2), False),
        (depthwise((64, 64, 56, 56), (5, 5), 4, 2), False),
        (depthwise((64, 64, 56, 56), (2, 2), 8), True),
        (depthwise((64, 64, 56, 56), (1, 1), 8), False),
        (depthwise((0, 64, 56, 56), (31, 31)), False),
        (replace(depthwise((64, 64, 56, 56), (31, 31)), bias=True, relu=True), True),
        (replace(depthwise((64, 64, 56, 56), (31, 31)), sums=True), False),
        (replace(depthwise((64, 64, 56, 56), (31, 31)), residual=True), False),
        (
            Task(Problem((2, 6, 9, 9), (12, 1, 9, 9), Geometry((9, 9), (1, 1), (0, 0), (1, 1), 6)), Direction.DATA),
            False,
        ),
        (Task(Problem((2, 6, 99), (6, 1, 64), Geometry((64,), (1,), (0,), (1,), 6)), Direction.DATA), False),
    ],
)
def test_large_depthwise_is_for_large_windows_or_strides(modules: Any, given_task: Task, suited: bool) -> None:
    assert modules.depthwise.suits_large_depthwise(given_task) is suited


@given(
    x=st.tuples(st.integers(1, 70), st.integers(1, 70), st.integers(1, 90), st.integers(1, 90)),
    kernel=st.tuples(st.integers(1, 63), st.integers(1, 63)),
    stride=st.integers(1, 16),
    dilation=st.integers(1, 3),
    direction=st.sampled_from(Direction),
    dtype=st.sampled_from(["float32", "float16"]),
)
def test_tilings_cover_the_results_and_fit_a_multiprocessor(
    modules: Any,
    x: tuple[int, ...],
    kernel: tuple[int, int],
    stride: int,
    dilation: int,
    direction: Direction,
    dtype: str,
) -> None:
    module = modules.depthwise
    given_task = depthwise(x, kernel, stride, max(kernel) // 2, dilation, direction, dtype)
    assume(min(given_task.problem.y) > 0 and module.suits_large_depthwise(given_task))
    correlation, found = module.correlation_of(given_task), module.large_depthwise_tilings(given_task)
    assert len({tiling.name for tiling in found}) == len(found) <= module.MAX_TILINGS
    for tiling in found:
        assert tiling.threads <= module.MAX_THREADS and correlation.shared_bytes(tiling) <= module.MAX_BYTES
        assert correlation.packs(tiling) * tiling.channels >= x[1]
        axes = ((correlation.down, tiling.rows, tiling.groups), (correlation.across, tiling.run, tiling.runs))
        for axis, each, threads, tiles in zip(*zip(*axes, strict=True), correlation.tiles(tiling), strict=True):
            assert tiles * threads * each >= axis.results > (tiles - 1) * threads * each
            assert each == 1 or axis.a > 1 or threads % axis.b == 0  # the kernel's static_assert
        assert tiling.rows == 1 or correlation.down.a == 1
        if tiling.split > 1:
            assert direction is not Direction.WEIGHTS
            assert len(correlation.down.residues) == len(correlation.across.residues) == tiling.shares == 1
            sums = tiling.threads * tiling.rows * tiling.run
            assert correlation.shared_bytes(tiling) >= 4 * sums
        pieces = correlation.pieces(tiling)
        for axis, part, number in zip((correlation.down, correlation.across), tiling.factors, pieces, strict=True):
            assert 0 < part <= axis.factors <= part * number
        if direction is Direction.WEIGHTS:
            assert 1 <= correlation.parts(tiling) <= x[0] * math.prod(pieces)


def test_shapes_of_nets_have_tilings(modules: Any) -> None:
    module = modules.depthwise
    for given_task in (
        depthwise((64, 64, 56, 56), (31, 31), 1, 15),
        depthwise((64, 21, 224, 224), (16, 16), 8, 4),
        depthwise((1, 21, 512, 512), (64, 64), 32, 16),
        depthwise((8, 32, 64, 64), (63, 63), 1, 31),
    ):
        for direction in Direction:
            assert len(module.large_depthwise_tilings(replace(given_task, direction=direction))) > 0


def test_threads_read_different_banks_where_the_stride_is_even(modules: Any) -> None:
    module = modules.depthwise
    correlation = module.correlation_of(depthwise((64, 21, 224, 224), (16, 16), 8, 4))
    for tiling in module.large_depthwise_tilings(correlation.task):
        apart = tiling.run * 8 + correlation.extra(tiling)
        assert apart % 2 == 1
        last = correlation.source(tiling)[1] - 1
        assert correlation.pixels(tiling) == last + last // (tiling.run * 8) + 1


@pytest.mark.parametrize(
    ("x", "outputs", "kernel", "suited"),
    [
        ((8, 1, 32, 512), 32, (1, 15), True),
        ((1, 3, 16, 112, 112), 64, (3, 7, 7), True),
        ((8, 4, 32, 512), 32, (3, 3), True),
        ((8, 5, 32, 512), 32, (3, 3), False),
        ((8, 3, 32, 512), 15, (3, 3), False),
        ((8, 3, 32, 512), 64, (1, 1), False),
        ((8, 3, 32), 64, (3,), False),
        ((256, 3, 512, 512), 64, (15, 15), False),
    ],
)
def test_few_channels_are_up_to_four(
    modules: Any, x: tuple[int, ...], outputs: int, kernel: tuple[int, ...], suited: bool
) -> None:
    axes = len(kernel)
    geometry = Geometry(kernel, (1,) * axes, (0,) * axes, (1,) * axes)
    given_task = Task(Problem(x, (outputs, x[1], *kernel), geometry), Direction.DATA)
    assert modules.dgrad_few_channels.suits_few_channels(given_task) is suited
    assert not modules.dgrad_few_channels.suits_few_channels(replace(given_task, direction=Direction.FORWARD))


@given(width=st.integers(5, 90), stride=st.integers(1, 9), height=st.integers(5, 9), depth=st.integers(0, 3))
def test_warps_cover_all_results(modules: Any, width: int, stride: int, height: int, depth: int) -> None:
    module, more = modules.dgrad_few_channels, bool(depth)
    sizes = (*(depth,) * more, height, width)
    geometry = Geometry((1,) * more + (5, 5), (1,) * more + (2, stride), (0,) * (2 + more), (1,) * (2 + more))
    problem = Problem((2, 3, *sizes), (16, 3, *geometry.kernel), geometry)
    runs = module.runs_of(problem)
    assert runs * module.RUN * stride >= width > (runs - 1) * module.RUN * stride
    assert module.warps_of(problem) == 2 * math.prod(sizes[:-1]) * stride * runs
