from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.parallel.compression import Halves
from caffepy.parallel.hierarchical import HierarchicalCommunicator
from caffepy.parallel.local import LocalCommunicator, LocalGroup


@given(st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40), st.integers(1, 9))
def test_the_sum_of_halves_is_the_mean_to_ten_bits(values: list[float], size: int) -> None:
    array = np.array(values, np.float32)
    halves = Halves(np, size)
    copy = halves.shrink(array)
    assert copy.dtype == np.float16
    found = np.empty_like(array)
    halves.widen(sum(copy.astype(np.float32) for _ in range(size)), found)
    np.testing.assert_allclose(found, array, rtol=2**-10, atol=size * 2**-24)


def test_every_array_has_one_copy() -> None:
    halves = Halves(np, 2)
    buffer = np.arange(10, dtype=np.float32)
    first, second = halves.shrink(buffer[:4]), halves.shrink(buffer[4:])
    assert not np.shares_memory(first, second)
    buffer += 1
    assert halves.shrink(buffer[:4]) is first
    np.testing.assert_array_equal(first, (np.arange(4) + 1) / 2)
    np.testing.assert_array_equal(second, np.arange(4, 10) / 2)


@pytest.mark.filterwarnings("ignore:overflow encountered")
def test_what_is_not_finite_stays_so_and_what_is_too_large_becomes_it() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1e6, 1e-9], np.float32)
    wanted = np.array([np.nan, np.inf, -np.inf, np.inf, 0], np.float16)
    np.testing.assert_array_equal(Halves(np, 1).shrink(array), wanted)


def test_ranks_send_halves_and_threads_do_not() -> None:
    """One rank of one thread: what is sent went through float16, sums without compression did not."""
    array = np.full(100, 1 / 3, np.float32)
    local = LocalCommunicator(LocalGroup(1), 0)
    whole = HierarchicalCommunicator(local, LocalCommunicator(LocalGroup(1), 0))
    whole.begin_average(array, nullcontext()).finish()
    np.testing.assert_array_equal(array, np.float32(1 / 3))
    compressed = HierarchicalCommunicator(local, LocalCommunicator(LocalGroup(1), 0), compress=True)
    compressed.begin_average(array, nullcontext()).finish()
    np.testing.assert_array_equal(array, np.float32(np.float16(1 / 3)))
