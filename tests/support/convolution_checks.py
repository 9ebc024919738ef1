"""Convolutions on the GPU of many shapes in every dtype, and what is expected of a candidate for them."""

from __future__ import annotations

from typing import Any

import convolution_reference as reference
import numpy as np
from backend_arrays import bits, numbers, rounded, window

from caffepy.backend import Geometry

TOLERANCE = {"float32": 2e-3, "float16": 2e-3, "bfloat16": 1.2e-2}
"""Relative to the largest value: TF32's rounding of factors, or the dtype's rounding of the result."""

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
    "depthwise, a large window": ((3, 12, 37, 45), 12, Geometry((31, 21), (1, 1), (15, 10), (1, 1), 12)),
    "depthwise, a large window / 8": ((2, 21, 40, 64), 21, window(16, 8, 4, 1, 21)),
    "depthwise, a large dilated window / 2": ((2, 5, 40, 33), 5, Geometry((7, 9), (2, 3), (6, 7), (3, 2), 5)),
    "depthwise, a large window on a whole image": ((2, 10, 9, 11), 10, window((9, 11), 1, 0, 1, 10)),
    "a stride along a row, one channel": ((2, 1, 9, 130), 32, Geometry((1, 15), (1, 4), (0, 7), (1, 1))),
    "three axes / 2 on 3 channels": ((1, 3, 5, 14, 19), 40, Geometry((3, 7, 7), (1, 2, 2), (1, 3, 3), (1,) * 3)),
    "few pixels": ((2, 64, 5, 4), 264, window(3, 1, 1)),
    "few pixels / 2": ((3, 72, 9, 7), 208, Geometry((3, 3), (2, 1), (1, 2), (1, 2))),
    "few images, whole": ((70, 40, 5, 7), 104, window((5, 7))),
    "few pixels, three axes": ((1, 32, 3, 3, 4), 160, Geometry((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)),
    "a channel multiplier": ((2, 6, 11, 12), 18, window(3, 1, 1, 1, 6)),
    "a channel multiplier / 2": ((3, 5, 9, 8), 10, window((3, 5), 2, 2, 1, 5)),
    "1x1, three groups": ((2, 15, 7, 9), 21, window(1, 1, 0, 1, 3)),
    "one axis, two groups": ((3, 12, 301), 40, Geometry((5,), (2,), (3,), (2,), 2)),
    "one axis, depthwise": ((2, 6, 1100), 6, Geometry((7,), (1,), (3,), (1,), 6)),
    "one axis, depthwise / 2": ((2, 5, 301), 5, Geometry((4,), (2,), (2,), (3,), 5)),
    "one axis": ((2, 3, 12), 4, Geometry((3,), (2,), (1,), (1,))),
    "one axis, one result": ((4, 8, 5), 8, Geometry((4,), (2,), (0,), (1,))),
    "one axis, one result, two groups": ((4, 32, 4), 32, Geometry((4,), (1,), (0,), (1,), 2)),
    "one axis, one element": ((4, 8, 1), 8, Geometry((3,), (1,), (1,), (1,))),
    "one axis, windows of one element": ((4, 8, 30), 6, Geometry((1,), (1,), (0,), (1,))),
    "three axes, odd channels": ((2, 3, 5, 6, 7), 10, Geometry((3,) * 3, (1,) * 3, (1,) * 3, (1,) * 3)),
    "three axes / 2": ((2, 16, 6, 10, 9), 24, Geometry((3,) * 3, (2,) * 3, (1,) * 3, (1,) * 3)),
    "three axes, two groups": ((2, 4, 5, 6, 7), 6, Geometry((3, 2, 3), (1, 2, 1), (1, 0, 1), (1, 1, 1), 2)),
}


def families_of(backend: Any, task: Any) -> list[Any]:
    """The families of candidates for a task, as tuning tries them."""
    from caffepy.backend.cuda.convolution.plan import TunedConvolution, algorithm_families

    plan, resources = TunedConvolution(task.problem, backend._resources, [task.problem]), backend._resources
    return list(algorithm_families(task, plan.run, plan.candidate, resources))


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
