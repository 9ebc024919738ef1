"""Convolutions by kernels and rewritings of our own for few shapes: results, same bits in every run, capture, NaN."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from convolution_checks import Arrays, check_candidate, check_same_bits, families_of, spoil

from caffepy.backend.types import DTYPES

OWN = (
    "wgrad small-k",
    "large windows",
    "small",
    "flipped",
    "depth multiplier",
    "products",
    "large depthwise",
    "few channels",
)
"""Families of candidates."""

EXPECTED = {
    "a large window": ("large windows", "small", "flipped"),
    "a large window on one channel": ("large windows", "flipped"),
    "a large window on 16 channels": ("small", "flipped"),
    "depthwise, a large window": ("large depthwise",),
    "depthwise, a large window / 8": ("large depthwise",),
    "depthwise, a large dilated window / 2": ("large depthwise",),
    "depthwise, a large window on a whole image": ("large depthwise",),
    "a stride along a row, one channel": ("few channels",),
    "three axes / 2 on 3 channels": ("few channels",),
    "few pixels": ("wgrad small-k",),
    "few pixels / 2": ("wgrad small-k",),
    "few images, whole": ("wgrad small-k", "products"),
    "few pixels, three axes": ("wgrad small-k",),
    "a channel multiplier": ("depth multiplier",),
    "a channel multiplier / 2": ("depth multiplier",),
    "1x1, three groups": ("products",),
}
"""For each case the families that must have been tried, in float32 or in halves."""

HALVES_ALONE, SINGLES_ALONE = ("wgrad small-k",), ("large windows",)


def own_candidates(backend: Any, task: Any) -> list[tuple[str, Any]]:
    """Family and candidate, prepared, without those of cuDNN."""
    found: list[tuple[str, Any]] = []
    for family in families_of(backend, task):
        if family.name in OWN:
            found += [(family.name, candidate) for candidate in family.candidates() if candidate.prepare()]
    return found


def tasks_of(problem: Any) -> list[Any]:
    from caffepy.backend.cuda.convolution.problem import Direction, Task

    plain = [Task(problem, direction) for direction in Direction]
    return [*plain, replace(plain[0], bias=True, relu=True)]


def check_captured(backend: Any, task: Any, candidate: Any) -> None:
    """A candidate gives the same bits from a graph."""
    import cupy

    from caffepy.backend.cuda.convolution.autotune import operands_for

    operands = operands_for(task, None)
    candidate.run(operands)
    expected = operands.out.get().copy()
    spoil(operands.out)
    backend.stream.begin_capture(mode=cupy.cuda.runtime.streamCaptureModeThreadLocal)
    candidate.run(operands)
    graph = backend.stream.end_capture()
    graph.launch(backend.stream)
    backend.synchronize()
    assert np.array_equal(operands.out.get(), expected), f"{candidate.name} for {task}: other bits from a graph"


def check_case(backend: Any, case: str, dtype: str) -> None:
    """Every candidate of ours for a case."""
    arrays, tried = Arrays(backend, case, dtype), set()
    for task in tasks_of(arrays.problem):
        for family, candidate in own_candidates(backend, task):
            tried.add(family)
            check_candidate(arrays, task, candidate)
            check_same_bits(task, candidate)
            check_captured(backend, task, candidate)
    absent = HALVES_ALONE if dtype == "float32" else SINGLES_ALONE
    assert set(EXPECTED[case]) - set(absent) <= tried


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", EXPECTED)
def test_results_are_right_and_the_same_bits(make: Callable[..., Any], case: str, dtype: str) -> None:
    backend = make(autotune=False)
    with backend.activate():
        check_case(backend, case, dtype)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("case", EXPECTED)
def test_nan_of_a_gradient_is_passed_on(make: Callable[..., Any], case: str, dtype: str) -> None:
    """All of the first image of dy is NaN: so are its dx, wherever a window is, and all dweights."""
    from caffepy.backend.cuda.convolution.algorithm import Operands
    from caffepy.backend.cuda.convolution.problem import Direction

    backend = make(autotune=False)
    with backend.activate():
        arrays = Arrays(backend, case, dtype)
        dy = arrays.upload(arrays.dy.get())
        spoil(dy[:1])
        reached = np.zeros(arrays.problem.x, bool)
        reached[0] = np.abs(arrays.dx[0]) > 0
        for task in tasks_of(arrays.problem)[1:3]:
            shape = arrays.problem.arrays(task.direction)[2]
            for family, candidate in own_candidates(backend, task):
                weights = task.direction is Direction.WEIGHTS
                out = backend.zeros(shape, "float32" if weights else arrays.problem.array_dtype)
                first, second = (arrays.x, dy) if weights else (dy, arrays.weights)
                candidate.run(Operands(first, second, out))
                missed = ~np.isnan(out.get())
                assert not (missed if weights else missed & reached).any(), f"{family}: {candidate.name} hides NaN"
