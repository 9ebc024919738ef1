"""Overlaps of boxes in pixels and their suppression, against loops over plain numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, kernel
from caffepy.data.boxes import CORNERS, EXACT, MODES, WHOLE, Boxes, overlaps
from caffepy.layers.detection.suppression import _heap_sort, sort_like_cpp, suppress


def overlap(a: Any, b: Any, kind: int, mode: str) -> float:
    """Of x, y, width, height, in double precision."""
    if kind == CORNERS and min(a[2], a[3], b[2], b[3]) < 1:
        return 0.0
    if min(a[2], a[3], b[2], b[3]) <= 0:
        return 0.0
    width = min(a[0] + a[2], b[0] + b[2]) - max(a[0], b[0])
    height = min(a[1] + a[3], b[1] + b[3]) - max(a[1], b[1])
    least = 0 if kind == EXACT else 1
    meet = width > 0 and height > 0 if kind == EXACT else width >= least and height >= least
    if kind == CORNERS:
        meet = meet and height > 1
    shared = width * height if meet else 0.0
    areas = a[2] * a[3], b[2] * b[3]
    whole = {"IOU": sum(areas) - shared, "IOMU": min(areas), "IOFU": areas[0]}[mode]
    return float(shared / whole)


def boxes_of(values: Any, kind: int) -> Boxes:
    values = values.astype(np.float32)
    if kind != CORNERS:
        return Boxes.from_sizes(values, kind)
    return Boxes.from_corners(np.concatenate([values[:, :2], values[:, :2] + values[:, 2:] - 1], 1), kind)


@pytest.mark.parametrize("kind", [EXACT, WHOLE, CORNERS])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), count=st.integers(1, 9))
def test_overlaps_are_those_of_the_formula(kind: int, mode: str, seed: int, count: int) -> None:
    """Whole numbers, so that borders meet: one pixel of overlap counts in one direction and not in the other."""
    values = np.random.default_rng(seed).integers([0, 0, -1, -1], [9, 9, 8, 8], (2, count, 4)).astype(float)
    found = overlaps(boxes_of(values[0], kind)[:, None], boxes_of(values[1], kind)[None], mode)
    wanted = [[overlap(a, b, kind, mode) for b in values[1]] for a in values[0]]
    np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("kind", [EXACT, WHOLE, CORNERS])
@pytest.mark.parametrize("mode", MODES)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 1000), limit=st.integers(0, 5))
def test_suppression_keeps_boxes_that_no_better_one_overlaps(kind: int, mode: str, seed: int, limit: int) -> None:
    values = np.random.default_rng(seed).integers([0, 0, 1, 1], [12, 12, 9, 9], (20, 4)).astype(float)
    kept: list[int] = []
    for number, box in enumerate(values):
        if all(overlap(values[other], box, kind, mode) <= 0.41 for other in kept):
            kept.append(number)
    found = suppress(boxes_of(values, kind), 0.41, mode, limit)
    assert found.tolist() == (kept[:limit] if limit else kept)


def test_no_boxes() -> None:
    assert suppress(Boxes.from_corners(np.empty((0, 4), np.float32)), 0.5).tolist() == []


# -- the order of equal scores ---------------------------------------------------------------------------


GOLDEN = np.load(Path(__file__).parents[3] / "golden" / "nvidia" / "std_sort.npz")
"""Keys with many ties, and how a C++ program with libstdc++'s std::sort ordered them; heap_order: std::partial_sort of
all of them, which std::sort falls back to where its partitions stay large."""
CASES = range(len(GOLDEN.files) // 3)


@kernel
def _sort_by_heap(begin: Int, end: Int, keys: Floats, order: Ints, count: Int) -> None:
    _heap_sort(keys, order, 0, count)


@pytest.mark.parametrize("number", CASES)
def test_ties_fall_as_in_cpps_heap_sort(number: int) -> None:
    keys = GOLDEN[f"keys_{number}"].astype(np.float32)
    order = np.arange(len(keys), dtype=np.int32)
    _sort_by_heap.run(1, 1, 1, keys, order, len(keys))
    np.testing.assert_array_equal(order, GOLDEN[f"heap_order_{number}"])


@pytest.mark.parametrize("number", CASES)
def test_ties_fall_as_in_cpp(number: int) -> None:
    keys = GOLDEN[f"keys_{number}"].astype(np.float32)
    order = np.arange(len(keys), dtype=np.int32)
    before = keys.copy()
    sort_like_cpp(keys, order)
    np.testing.assert_array_equal(order, GOLDEN[f"order_{number}"])
    np.testing.assert_array_equal(keys, before[order])
