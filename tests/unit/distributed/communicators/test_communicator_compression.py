from __future__ import annotations

import math
import threading
import warnings
from contextlib import nullcontext
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from caffepy.distributed.communicators.communicator import (
    Compressor,
    host_compressor,
    round_to_bfloat16,
    widen_bfloat16,
)
from caffepy.distributed.communicators.hierarchical import HierarchicalCommunicator
from caffepy.distributed.communicators.local import LocalCommunicator, ThreadGroup
from caffepy.distributed.communicators.mpi import _add_bfloat16, _add_float16

KINDS = [("fp16", np.float16, 2.0**-10, 2.0**-24), ("bf16", np.uint16, 2.0**-7, 2.0**-133)]


@pytest.fixture(autouse=True)
def no_warnings() -> object:
    """What overflows on its way is infinite, which the update sees; NumPy has nothing to say about it."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def widened(copy: np.ndarray) -> np.ndarray:
    if copy.dtype == np.float16:
        return copy.astype(np.float32)
    found = np.empty(copy.shape, np.float32)
    widen_bfloat16(copy, found)
    return found


def compressor_of(kind: str, size: int) -> Compressor:
    compressor = host_compressor(kind, size)
    assert compressor is not None
    return compressor


@pytest.mark.parametrize(("kind", "dtype", "relative", "absolute"), KINDS)
@given(values=st.lists(st.floats(-60000, 60000, width=32), min_size=1, max_size=40), size=st.integers(1, 9))
def test_the_sum_of_compressed_numbers_is_the_mean(
    kind: str, dtype: type, relative: float, absolute: float, values: list[float], size: int
) -> None:
    array = np.array(values, np.float32)
    compressor = compressor_of(kind, size)
    copy = compressor.compress(array)
    assert copy.dtype == dtype
    total = size * widened(copy)
    np.testing.assert_allclose(total, array, rtol=relative, atol=size * absolute)
    found = np.empty_like(array)
    compressor.decompress(copy, found)
    np.testing.assert_array_equal(found, widened(copy))


def test_nothing_is_compressed_unless_it_is_asked_for() -> None:
    assert host_compressor("none", 2) is None


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_every_array_has_one_copy(kind: str) -> None:
    halves = compressor_of(kind, 2)
    buffer = np.arange(10, dtype=np.float32)
    first, second = halves.compress(buffer[:4]), halves.compress(buffer[4:])
    assert not np.shares_memory(first, second)
    buffer += 1
    assert halves.compress(buffer[:4]) is first
    np.testing.assert_array_equal(widened(first), (np.arange(4) + 1) / 2)
    np.testing.assert_array_equal(widened(second), np.arange(4, 10) / 2)


def test_what_is_not_finite_stays_so_and_what_is_too_large_becomes_it() -> None:
    array = np.array([np.nan, np.inf, -np.inf, 1e6, 1e-9], np.float32)
    wanted = np.array([np.nan, np.inf, -np.inf, np.inf, 0], np.float16)
    np.testing.assert_array_equal(compressor_of("fp16", 1).compress(array), wanted)


def bfloat16(values: list[float] | np.ndarray) -> np.ndarray:
    copy = np.empty(len(values), np.uint16)
    round_to_bfloat16(np.array(values, np.float32), copy)
    return copy


def test_bfloat16_keeps_what_is_not_finite_and_nearly_all_large_numbers() -> None:
    every_nan = np.array([0x7F800001, 0x7FFFFFFF, 0xFFFFFFFF, 0xFF800001, 0x7FC00000], np.uint32).view(np.float32)
    assert np.isnan(widened(bfloat16(every_nan))).all()
    found = widened(bfloat16([np.inf, -np.inf, 1e38, 3.4e38, -0.0, 1e-40]))
    assert found[:2].tolist() == [np.inf, -np.inf]
    assert found[2] == pytest.approx(1e38, rel=2**-8)
    assert found[3] == np.inf
    assert (found[4], math.copysign(1, found[4])) == (0, -1)
    assert found[5] == pytest.approx(1e-40, abs=2**-134)


@given(st.integers(0, 0x7F7FFFFF), st.booleans())
def test_bfloat16_is_rounded_to_the_nearest_and_to_even_in_the_middle(bits: int, negative: bool) -> None:
    value = np.array([bits], np.uint32).view(np.float32)
    value = -value if negative else value
    found = int(bfloat16(value)[0]) & 0x7FFF
    lower = bits >> 16
    lower_value, upper_value = (
        (Fraction(float(widened(np.array([n], np.uint16))[0])) for n in (lower, lower + 1))
        if (lower < 0x7F7F)
        else (Fraction(255 * 2**120), Fraction(256 * 2**120))
    )
    exact = abs(Fraction(float(value[0])))
    below, above = exact - lower_value, upper_value - exact
    wanted = lower if below < above or (below == above and lower % 2 == 0) else lower + 1
    assert found == wanted
    assert (int(bfloat16(value)[0]) >> 15 == 1) == negative


def test_a_long_array_is_rounded_as_its_parts_are() -> None:
    values = np.random.default_rng(1).standard_normal(200_003).astype(np.float32)
    whole = bfloat16(values)
    parts = np.concatenate([bfloat16(values[:1000]), bfloat16(values[1000:])])
    np.testing.assert_array_equal(whole, parts)


def test_mpis_operators_add_what_bytes_stand_for() -> None:
    first, second = [1.5, 300.0, np.inf, 1e-3], [2.25, 1.0, -np.inf, 3e38]
    target, source = bfloat16(second), bfloat16(first)
    _add_bfloat16(source.tobytes(), memoryview(target).cast("B"), None)
    with np.errstate(all="ignore"):
        wanted = bfloat16(widened(bfloat16(first)) + widened(bfloat16(second)))
    np.testing.assert_array_equal(widened(target), widened(wanted))
    halves = np.array([60000, np.inf], np.float16)
    _add_float16(np.array([60000, -np.inf], np.float16).tobytes(), memoryview(halves).cast("B"), None)
    np.testing.assert_array_equal(halves, np.array([np.inf, np.nan], np.float16))


@pytest.mark.parametrize(("kind", "rounded"), [("fp16", np.float32(np.float16(1 / 3))), ("bf16", 0.333984375)])
def test_ranks_send_compressed_numbers_and_threads_do_not(kind: str, rounded: float) -> None:
    """One rank of one thread: what is sent was rounded, sums without compression were not."""
    array = np.full(100, 1 / 3, np.float32)
    local = LocalCommunicator(ThreadGroup(1), 0)
    whole = HierarchicalCommunicator(local, LocalCommunicator(ThreadGroup(1), 0))
    whole.all_reduce_async(array, nullcontext()).synchronize()
    np.testing.assert_array_equal(array, np.float32(1 / 3))
    assert not whole.compresses
    compressed = HierarchicalCommunicator(local, LocalCommunicator(ThreadGroup(1), 0), kind)
    assert compressed.compresses
    compressed.all_reduce_async(array, nullcontext()).synchronize()
    np.testing.assert_array_equal(array, np.float32(rounded))


@pytest.mark.parametrize("kind", ["fp16", "bf16"])
def test_two_ranks_average_compressed_numbers(kind: str) -> None:
    group = ThreadGroup(2)
    arrays = [np.array([1.0, -2.5, 100.0], np.float32), np.array([3.0, 0.5, -50.0], np.float32)]

    def work(rank: int) -> None:
        ranks = LocalCommunicator(group, rank)
        communicator = HierarchicalCommunicator(LocalCommunicator(ThreadGroup(1), 0), ranks, kind)
        communicator.all_reduce_async(arrays[rank], nullcontext()).synchronize()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    for array in arrays:
        np.testing.assert_array_equal(array, [2.0, -1.0, 25.0])
