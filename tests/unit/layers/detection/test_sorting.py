"""The order of equal scores."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from caffepy.layers.detection.sorting import sort_like_cpp

GOLDEN = np.load(Path(__file__).parents[3] / "golden" / "nvidia" / "std_sort.npz")
"""Keys with many ties, and how a C++ program with libstdc++'s std::sort ordered them."""


@pytest.mark.parametrize("number", range(len(GOLDEN.files) // 2))
def test_ties_fall_as_in_cpp(number: int) -> None:
    keys = GOLDEN[f"keys_{number}"].astype(np.float32)
    order = np.arange(len(keys), dtype=np.int32)
    before = keys.copy()
    sort_like_cpp(keys, order)
    np.testing.assert_array_equal(order, GOLDEN[f"order_{number}"])
    np.testing.assert_array_equal(keys, before[order])
