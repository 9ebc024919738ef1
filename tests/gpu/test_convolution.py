"""Convolutions on the GPU in every dtype: each candidate, what is chosen, and capture."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import convolution_reference as reference
import numpy as np
import pytest
from normalise_checks import spread, statistics
from stored_numbers import STORAGES, TOLERANCE, bits, numbers, rounded, window

from caffepy.backend import Geometry

CASES = {
    "7x7 / 2 on 3 channels": ((2, 3, 23, 21), 16, window(7, 2, 3)),
    "11x11 / 4 on 3 channels": ((2, 3, 47, 43), 24, window(11, 4)),
    "one channel": ((1, 1, 9, 9), 1, window(3, 1, 1)),
    "odd numbers": ((3, 7, 10, 11), 33, window(3, 1, 1)),
    "unequal sides": ((2, 6, 9, 8), 10, Geometry((3, 2), (2, 1), (1, 0), (1, 2))),
    "1x1": ((4, 16, 8, 8), 32, window(1)),
    "1x1 image": ((2, 64, 1, 1), 10, window(1)),
    "depthwise": ((2, 32, 14, 14), 32, window(3, 1, 1, 1, 32)),
    "depthwise / 2": ((2, 24, 15, 13), 24, window(3, 2, 1, 1, 24)),
    "depthwise, odd channels": ((3, 7, 9, 10), 7, window(3, 1, 1, 1, 7)),
    "depthwise, large windows": ((1, 12, 17, 16), 12, window(5, 2, 2, 1, 12)),
    "depthwise, unequal sides": ((2, 6, 12, 9), 6, Geometry((2, 3), (3, 1), (0, 2), (1, 3), 6)),
    "depthwise, many channels": ((2, 200, 5, 4), 200, window(3, 1, 1, 1, 200)),
    "depthwise, dilated": ((2, 10, 13, 15), 10, window(3, 1, 2, 2, 10)),
    "two groups": ((2, 32, 9, 9), 64, window(3, 1, 1, 1, 2)),
    "four groups / 2": ((2, 32, 9, 9), 64, window(3, 2, 1, 1, 4)),
    "dilation": ((1, 8, 13, 13), 8, window(3, 1, 2, 2)),
    "upsampling's transpose": ((2, 21, 8, 8), 21, window(4, 2, 1)),
    "LeNet": ((8, 20, 12, 12), 50, window(5)),
    "cifar10": ((4, 32, 8, 8), 64, window(5, 1, 2)),
    "whole image": ((3, 16, 5, 7), 24, window((5, 7))),
    "many pixels": ((3, 24, 35, 17), 40, window(1)),
    "a large window": ((2, 3, 24, 20), 5, window(11, 1, 4)),
    "a large window on one channel": ((2, 1, 20, 75), 3, window((9, 11), 1, 2)),
    "a large window on 16 channels": ((2, 16, 20, 18), 16, window(11, 1, 5)),
    "few pixels": ((2, 64, 5, 4), 264, window(3, 1, 1)),
    "few pixels / 2": ((3, 72, 9, 7), 208, Geometry((3, 3), (2, 1), (1, 2), (1, 2))),
    "few images, whole": ((70, 40, 5, 7), 104, window((5, 7))),
    "few pixels, three axes": ((1, 32, 3, 3, 4), 160, Geometry((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)),
    "one axis, two groups": ((3, 12, 301), 40, Geometry((5,), (2,), (3,), (2,), 2)),
    "one axis, depthwise": ((2, 6, 1100), 6, Geometry((7,), (1,), (3,), (1,), 6)),
    "one axis, depthwise / 2": ((2, 5, 301), 5, Geometry((4,), (2,), (2,), (3,), 5)),
    "one axis": ((2, 3, 12), 4, Geometry((3,), (2,), (1,), (1,))),
    "three axes, odd channels": ((2, 3, 5, 6, 7), 10, Geometry((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)),
    "three axes / 2": ((2, 16, 6, 10, 9), 24, Geometry((3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3)),
    "three axes, two groups": ((2, 4, 5, 6, 7), 6, Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 2)),
}


def spoil(array: Any) -> None:
    """Fill an array with NaN, in line with what the current stream does before and after."""
    import cupy

    array.data.memset_async(0xFF, array.nbytes, cupy.cuda.get_current_stream())


class Arrays:
    """Inputs of one problem on the device, what is expected of them, and outputs full of what must not stay."""

    def __init__(self, backend: Any, case: str | tuple[Any, int, Geometry], dtype: str) -> None:
        from caffepy.backend.cuda.convolution.problem import Problem

        x_shape, outputs, geometry = CASES[case] if isinstance(case, str) else case
        weights_shape = (outputs, x_shape[1] // geometry.group, *geometry.kernel)
        self.backend = backend
        self.problem = Problem(x_shape, weights_shape, geometry, dtype)
        rng = np.random.default_rng(1)
        x, w, dy = (rounded(rng.standard_normal(s), dtype) for s in (x_shape, weights_shape, self.problem.y))
        bias = rng.standard_normal(outputs).astype(np.float32)
        self.added = rounded(rng.standard_normal(self.problem.y), dtype)
        self.x, self.weights, self.dy, self.residual = (self.upload(bits(a, dtype)) for a in (x, w, dy, self.added))
        self.bias = self.upload(bias)
        self.spread_bias = bias.reshape(-1, *(1 for _ in geometry.kernel)).astype(float)
        self.y, self.dx, self.dweights = reference.convolution(x, w, dy, geometry)

    def upload(self, host: Any) -> Any:
        """An array on the device, bit for bit."""
        import cupy

        array = self.backend.zeros(host.shape, host.dtype.name)
        cupy.copyto(array, cupy.asarray(host))
        return array

    def output(self, shape: tuple[int, ...], dtype: str | None = None) -> Any:
        """An array of nothing but NaN."""
        array = self.backend.zeros(shape, dtype or self.problem.array_dtype)
        spoil(array)
        return array

    def close(self, actual: Any, expected: Any, tolerance: float, what: str) -> None:
        """Assert that a result is as expected, relative to the largest value."""
        off = np.abs(numbers(actual.get()) - expected).max()
        assert off <= tolerance * np.abs(expected).max(), f"{what}: off by {off}"


@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("case", CASES)
def test_every_candidate(make: Callable[..., Any], case: str, dtype: str) -> None:
    from caffepy.backend.cuda.convolution.algorithm import UNFUSED
    from caffepy.backend.cuda.convolution.plan import CudaConvolution
    from caffepy.backend.cuda.convolution.problem import Direction, Task
    from caffepy.backend.cuda.convolution.registry import algorithm_families

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
            plan = CudaConvolution(arrays.problem, backend._resources)
            tried = 0
            for family in algorithm_families(task, plan.run, plan.candidate, backend._resources):
                for candidate in list(family.candidates())[:4]:
                    if candidate.prepare():
                        tried += 1
                        check_candidate(arrays, task, candidate)
                        if not task.sums or candidate.name == UNFUSED:
                            check_same_bits(task, candidate)
            assert tried, task


def check_same_bits(task: Any, candidate: Any) -> None:
    """A candidate gives the same bits in every run, also while the device is busy with something else."""
    import cupy

    from caffepy.backend.cuda.convolution.autotune import operands_for

    operands, other = operands_for(task, None), cupy.cuda.Stream(non_blocking=True)
    results = [operands.out] if operands.sums is None else [operands.out, operands.sums]
    runs = []
    for count in range(11):
        with other:
            cupy.arange(count * 2**16)
        candidate.run(operands)
        runs.append([numbers(result.get()) for result in results])
        for result, first in zip(runs[-1], runs[0], strict=True):
            assert np.array_equal(result, first), f"{candidate.name} for {task}: other bits in another run"


def check_candidate(arrays: Arrays, task: Any, candidate: Any) -> None:
    from caffepy.backend.cuda.convolution.algorithm import Operands
    from caffepy.backend.cuda.convolution.problem import Direction

    tolerance, what = TOLERANCE[arrays.problem.dtype], f"{candidate.name} for {task.direction}"
    if task.direction is Direction.FORWARD:
        out = arrays.output(arrays.problem.y)
        sums = arrays.output((2, arrays.problem.weights[0]), "float32") if task.sums else None
        bias, residual = arrays.bias if task.bias else None, arrays.residual if task.residual else None
        candidate.run(Operands(arrays.x, arrays.weights, out, bias, sums, residual=residual))
        expected = arrays.y + (arrays.spread_bias if task.bias else 0) + (arrays.added if task.residual else 0)
        arrays.close(out, np.maximum(expected, 0) if task.relu else expected, tolerance, what)
        if sums is not None:
            magnitude = np.abs(arrays.y).sum((0, 2, 3)).max()
            off = np.abs(numbers(sums[0].get()) - arrays.y.sum((0, 2, 3))).max()
            assert off <= tolerance * magnitude, f"{what}: sum off by {off}"
            arrays.close(sums[1], (arrays.y**2).sum((0, 2, 3)), 4 * tolerance, f"{what}: squares")
    elif task.direction is Direction.DATA:
        out = arrays.output(arrays.problem.x)
        candidate.run(Operands(arrays.dy, arrays.weights, out))
        arrays.close(out, arrays.dx, tolerance, what)
    else:
        out = arrays.output(arrays.problem.weights, "float32")
        candidate.run(Operands(arrays.x, arrays.dy, out))
        arrays.close(out, arrays.dweights, tolerance, what)
        candidate.run(Operands(arrays.x, arrays.dy, out, accumulate=True))
        arrays.close(out, 2 * arrays.dweights, tolerance, f"{what}, added")


@pytest.mark.parametrize("autotune", [False, True])
@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("case", ["7x7 / 2 on 3 channels", "odd numbers", "depthwise / 2", "two groups", "LeNet",
                                  "three axes / 2"])  # fmt: skip
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


@pytest.mark.parametrize("summed", [True, False])
@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("case", DEPTHWISE)
def test_a_forward_pass_behind_a_normalisation(
    make: Callable[..., Any], case: Any, dtype: str, relu: bool, summed: bool
) -> None:
    from caffepy.backend.types import NormalisedBottom

    backend = make(autotune=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        problem, tolerance, channels = arrays.problem, TOLERANCE[dtype], arrays.problem.x[1]
        plan = backend.plan_convolution(problem.x, problem.weights, problem.geometry, dtype)
        s = statistics(backend, channels)
        x, weights, dy = (numbers(a.get()) for a in (arrays.x, arrays.weights, arrays.dy))
        normal = s.before_relu(x)
        expected, _, _ = reference.convolution(np.maximum(normal, 0) if relu else normal, weights, dy, problem.geometry)
        y, bottom = arrays.output(problem.y), NormalisedBottom(arrays.x, s.device, relu)
        sums = arrays.output((2, channels), "float32") if summed else None
        plan.forward_normalised(bottom, arrays.weights, y, sums)
        arrays.close(y, expected, tolerance, "forward")
        if sums is not None:
            off = np.abs(sums[0].get() - expected.sum((0, 2, 3))).max()
            assert off <= 1e-5 * np.abs(expected).sum((0, 2, 3)).max()
            arrays.close(sums[1], (expected**2).sum((0, 2, 3)), 3e-5, "squares")


@pytest.mark.parametrize("relu", [True, False])
@pytest.mark.parametrize("dtype", STORAGES)
@pytest.mark.parametrize("case", DEPTHWISE)
def test_both_gradients_behind_a_normalisation(make: Callable[..., Any], case: Any, dtype: str, relu: bool) -> None:
    from caffepy.backend.types import NormalisedBottom

    backend = make(autotune=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        problem, tolerance, channels = arrays.problem, TOLERANCE[dtype], arrays.problem.x[1]
        plan = backend.plan_convolution(problem.x, problem.weights, problem.geometry, dtype)
        s = statistics(backend, channels)
        x, weights, dy = (numbers(a.get()) for a in (arrays.x, arrays.weights, arrays.dy))
        normal = s.before_relu(x)
        _, dx, dweights = reference.convolution(
            np.maximum(normal, 0) if relu else normal, weights, dy, problem.geometry
        )
        g = np.where(normal > 0, dx, 0) if relu else dx
        centred = (x - spread(s.host["mean"], 4)) * spread(s.host["inverse"], 4)
        results = []
        for accumulate in (False, True):
            found = [arrays.output(problem.x), *(arrays.output((channels,), "float32") for _ in "ab")]
            results.append(found)
            if not accumulate:
                sums = arrays.output(problem.weights, "float32")
            bottom = NormalisedBottom(arrays.x, s.device, relu, (found[1], found[2]))
            plan.backward_normalised(bottom, arrays.dy, arrays.weights, found[0], sums, accumulate)
        for first, second in zip(*results, strict=True):
            assert np.array_equal(first.get(), second.get())
        arrays.close(results[0][0], dx, tolerance, "gradient to data")
        arrays.close(sums, 2 * dweights, 1e-5, "gradient to weights")
        for found, expected in ((results[0][1], g * centred), (results[0][2], g)):
            off = np.abs(found.get() - expected.sum((0, 2, 3))).max()
            assert off <= 1e-5 * np.abs(expected).sum((0, 2, 3)).max()


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
def test_kept_plans_give_the_same_bits(make: Callable[..., Any], case: str, dtype: str) -> None:
    """Every plan of cuDNN for a task, written and read: the same results, and no question to heuristics."""
    from caffepy.backend.cuda.convolution.autotune import _find, operands_for
    from caffepy.backend.cuda.convolution.cudnn import CudnnPlan
    from caffepy.backend.cuda.convolution.cudnn_graph import CudnnGraph
    from caffepy.backend.cuda.convolution.problem import Direction, Problem, Task
    from caffepy.backend.cuda.convolution.registry import algorithm_families

    x, outputs, geometry = CASES[case]
    problem = Problem(x, (outputs, x[1] // geometry.group, *geometry.kernel), geometry, dtype)
    backend, tried = make(autotune=False), 0
    with backend.activate():
        for direction in Direction:
            task = Task(problem, direction)
            families = algorithm_families(task, lambda *_: None, lambda *_: None, backend._resources)
            operands = operands_for(task, None)
            for family in families:
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
