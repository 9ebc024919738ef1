"""The order of equal scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, kernel
from caffepy.layers.detection.suppression import _heap_sort, sort_like_cpp

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
