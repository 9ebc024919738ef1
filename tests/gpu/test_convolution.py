"""Convolutions on the GPU in every dtype: each candidate, what is chosen, and capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import convolution_reference as reference
import numpy as np
import pytest
from backend_arrays import numbers, window
from convolution_checks import CASES, TOLERANCE, Arrays, check_candidate, check_same_bits, families_of, spoil
from primitive_checks.batch_norm import spread, statistics

from caffepy.backend import Geometry
from caffepy.backend.types import DTYPES


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def test_every_candidate(make: Callable[..., Any], case: str, dtype: str) -> None:
    from caffepy.backend.cuda.convolution.algorithm import UNFUSED
    from caffepy.backend.cuda.convolution.problem import Direction, Task

    backend = make(autotune=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        forward = Task(arrays.problem, Direction.FORWARD)
        tasks = [forward, replace(forward, bias=True, relu=True), replace(forward, residual=True)]
        tasks += [replace(forward, bias=bias, relu=True, residual=True) for bias in (True, False)]
        tasks.append(replace(forward, bias=True, residual=True))
        tasks += [Task(arrays.problem, direction) for direction in (Direction.DATA, Direction.WEIGHTS)]
        if len(arrays.problem.x) == 4:
            tasks.append(replace(forward, sums=True))
        for task in tasks:
            tried = 0
            for family in families_of(backend, task):
                for candidate in list(family.candidates())[:4]:
                    if candidate.prepare():
                        tried += 1
                        check_candidate(arrays, task, candidate)
                        if not task.sums or candidate.name == UNFUSED:
                            check_same_bits(task, candidate)
            assert tried, task


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", ["unequal sides", "two groups", "three axes / 2", "three axes, two groups"])
def test_products_of_a_part_of_an_image(
    make: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, case: str, dtype: str
) -> None:
    """An image whose windows exceed the column buffer is computed in parts."""
    from caffepy.backend.cuda.convolution import im2col
    from caffepy.backend.cuda.convolution.problem import Direction, Task

    monkeypatch.setattr(im2col, "COLUMNS_LIMIT", 7000)
    backend = make(autotune=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        for direction in Direction:
            task = Task(arrays.problem, direction)
            check_candidate(arrays, task, im2col.Im2colConvolution(task, backend._resources))


@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "case", ["7x7 / 2 on 3 channels", "odd numbers", "depthwise / 2", "two groups", "LeNet", "three axes / 2"]
)
def test_what_is_chosen(make: Callable[..., Any], case: str, dtype: str, autotune: bool) -> None:
    backend = make(autotune=autotune, deterministic=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        problem, tolerance = arrays.problem, TOLERANCE[dtype]
        plan = backend.plan_convolution(problem.x, problem.weights, problem.geometry, dtype)
        y, dx = arrays.output(problem.y), arrays.output(problem.x)
        for bias, relu in ((None, False), (arrays.bias, False), (arrays.bias, True), (None, True)):
            plan.forward(arrays.x, arrays.weights, bias, y, relu=relu)
            expected = arrays.y if bias is None else arrays.y + arrays.spread_bias
            arrays.close(y, np.maximum(expected, 0) if relu else expected, tolerance, "forward")
        if plan.gives_sums:
            sums = arrays.output((2, problem.weights[0]), "float32")
            plan.forward(arrays.x, arrays.weights, None, y, sums=sums)
            arrays.close(sums[1], (arrays.y**2).sum((0, 2, 3)), 4 * tolerance, "sum of squares")
        plan.backward_data(arrays.dy, arrays.weights, dx)
        arrays.close(dx, arrays.dx, tolerance, "gradient to data")
        dweights = arrays.output(problem.weights, "float32")
        plan.backward_weights(arrays.x, arrays.dy, dweights, accumulate=False)
        plan.backward_weights(arrays.x, arrays.dy, dweights, accumulate=True)
        arrays.close(dweights, 2 * arrays.dweights, tolerance, "gradient to weights")


def random_depthwise(seed: int) -> tuple[Any, int, Geometry]:
    """Images of other sizes than the strips of threads, of which there are few or many."""
    draw = np.random.default_rng(seed)
    stride, channels = 1 + seed % 2, int(draw.choice([2, 5, 16, 32, 66, 130, 256]))
    height, width = (int(n) for n in draw.integers(1, 60 if channels < 100 else 16, 2))
    return (int(draw.integers(1, 5)), channels, height, width), channels, window(3, stride, 1, 1, channels)


DEPTHWISE: list[Any] = [case for case in CASES if case.startswith("depthwise") and "large" not in case]
DEPTHWISE += [pytest.param(random_depthwise(seed), id=f"depthwise, random {seed}") for seed in range(8)]


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", DEPTHWISE)
def test_passes_behind_a_normalisation(make: Callable[..., Any], case: Any, dtype: str, relu: bool) -> None:
    """The forward pass with and without sums, and both gradients at once."""
    from caffepy.backend.types import NormalisedBottom

    backend = make(autotune=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        problem, tolerance, channels = arrays.problem, TOLERANCE[dtype], arrays.problem.x[1]
        plan = backend.plan_convolution(problem.x, problem.weights, problem.geometry, dtype)
        s = statistics(backend, channels)
        x, weights, dy = (numbers(a.get()) for a in (arrays.x, arrays.weights, arrays.dy))
        normal = s.before_relu(x)
        read = np.maximum(normal, 0) if relu else normal
        y, dx, dweights = reference.convolution(read, weights, dy, problem.geometry)
        for sums in (None, arrays.output((2, channels), "float32")):
            found = arrays.output(problem.y)
            plan.forward_normalised(NormalisedBottom(arrays.x, s.device, relu), arrays.weights, found, sums)
            arrays.close(found, y, tolerance, "forward")
        arrays.close(sums[1], (y**2).sum((0, 2, 3)), 3e-5, "squares")
        results, into = [], arrays.output(problem.weights, "float32")
        for accumulate in (False, True):
            found = [arrays.output(problem.x), *(arrays.output((channels,), "float32") for _ in "ab")]
            results.append(found)
            bottom = NormalisedBottom(arrays.x, s.device, relu, (found[1], found[2]))
            plan.backward_normalised(bottom, arrays.dy, arrays.weights, found[0], into, accumulate)
        for first, second in zip(*results, strict=True):
            assert np.array_equal(first.get(), second.get())
        arrays.close(results[0][0], dx, tolerance, "gradient to data")
        arrays.close(into, 2 * dweights, 1e-5, "gradient to weights")
        g = np.where(normal > 0, dx, 0) if relu else dx
        centred = (x - spread(s.host["mean"], 4)) * spread(s.host["inverse"], 4)
        for found, terms in ((sums[0], y), (results[0][1], g * centred), (results[0][2], g)):
            off = np.abs(found.get() - terms.sum((0, 2, 3))).max()
            assert off <= 1e-5 * np.abs(terms).sum((0, 2, 3)).max()


def test_arrays_of_another_storage_are_converted(make: Callable[..., Any]) -> None:
    backend = make()
    with backend.activate():
        arrays, singles = (Arrays(backend, "odd numbers", dtype) for dtype in ("float16", "float32"))
        problem = arrays.problem
        plan = backend.plan_convolution(problem.x, problem.weights, problem.geometry, "float16")
        y = singles.output(problem.y)
        plan.forward(singles.x, arrays.weights, None, y)
        arrays.close(y, singles.y, 4e-3, "forward")


def test_a_captured_convolution_does_the_same(make: Callable[..., Any]) -> None:
    import cupy

    backend = make()
    with backend.activate():
        arrays = Arrays(backend, "7x7 / 2 on 3 channels", "float16")
        problem = arrays.problem
        plan = backend.plan_convolution(problem.x, problem.weights, problem.geometry, "float16")
        y, dweights = arrays.output(problem.y), arrays.output(problem.weights, "float32")

        def work() -> None:
            plan.forward(arrays.x, arrays.weights, arrays.bias, y, relu=True)
            plan.backward_weights(arrays.x, arrays.dy, dweights, accumulate=False)

        work()
        expected = y.get().copy(), dweights.get().copy()
        spoil(y)
        spoil(dweights)
        backend.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
        work()
        graph = backend.stream.end_capture()
        graph.launch(backend.stream)
        backend.synchronize()
        assert np.array_equal(y.get(), expected[0])
        assert np.array_equal(dweights.get(), expected[1])


@pytest.mark.parametrize("case", ["odd numbers", "two groups", "7x7 / 2 on 3 channels", "three axes, odd channels"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plan_cache_give_the_same_bits(make: Callable[..., Any], case: str, dtype: str) -> None:
    """Every plan of cuDNN for a task, written and read: the same results, and no question to heuristics."""
    from caffepy.backend.cuda.convolution.autotune import _find, operands_for
    from caffepy.backend.cuda.convolution.cudnn import CudnnGraph, CudnnPlan
    from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task

    x, outputs, geometry = CASES[case]
    problem = Problem(x, (outputs, x[1] // geometry.group, *geometry.kernel), geometry, dtype)
    backend, tried = make(autotune=False), 0
    with backend.activate():
        for direction in Direction:
            task = Task(problem, direction)
            operands = operands_for(task, None)
            for family in families_of(backend, task):
                for built in family.candidates():
                    if not isinstance(built, CudnnPlan) or not built.prepare():
                        continue
                    built.run(operands)
                    expected = backend.to_host(operands.out)
                    built.keep()
                    with pytest.MonkeyPatch.context() as patch:
                        patch.setattr(CudnnGraph, "build", lambda *_: pytest.fail("heuristics were asked"))
                        kept = _find(built.name, [family])
                    assert isinstance(kept, CudnnPlan)
                    backend.fill(operands.out, 7)
                    kept.run(operands)
                    assert np.array_equal(backend.to_host(operands.out), expected), built.name
                    tried += 1
    assert tried > 0
