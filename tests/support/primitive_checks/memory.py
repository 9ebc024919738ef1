"""Placing, copying, adding and reshaping of arrays, and what each dtype keeps of numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from backend_arrays import dirty, normal, rounded, stored, to_device
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import Backend
from primitive_checks.strategies import SIZES, often


def check_memory(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    """zeros, from_host, to_host, flat, view, copy, add, fill."""
    array, host = stored(backend, 1, shape, dtype)
    assert array.dtype == {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    back = backend.to_host(array)
    assert back.dtype == np.float32 and back.flags.c_contiguous and np.array_equal(back, host)
    again = backend.view(backend.flat(array), shape)
    assert np.array_equal(backend.to_host(again), host)
    other = dirty(backend, shape, dtype)
    backend.copy(array, other)
    assert np.array_equal(backend.to_host(other), host)
    backend.add(array, other)
    assert np.array_equal(backend.to_host(other), rounded(host + host, dtype))
    backend.fill(array, -2.7)
    assert np.array_equal(backend.to_host(again), rounded(np.full(shape, -2.7, np.float32), dtype))
    backend.fill(array, 0)
    assert not backend.to_host(array).any()


@often
@given(shape=st.lists(SIZES, max_size=5))
def test_memory(backend: Backend, dtype: str, shape: list[int]) -> None:
    check_memory(backend, dtype, tuple(shape))


@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (1, 33, 6, 5), (4, 64, 7, 7), (5, 10), (2, 3, 4, 5, 6), ()])
def test_memory_of_more_shapes(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    check_memory(backend, dtype, shape)


def test_awkward_numbers(backend: Backend, dtype: str, other_dtype: str) -> None:
    """Ties, overflow, numbers below the normal range, infinities and NaN."""
    host = np.array(
        [
            1 + 2**-11,
            1 + 3 * 2**-11,
            1 + 2**-8,
            1 + 3 * 2**-8,
            65519,
            65520,
            1e-7,
            6e-8,
            3.4e38,
            -0.0,
            0,
            np.inf,
            -np.inf,
            np.nan,
            -1e-40,
            77,
        ],
        np.float32,
    )
    array, result = to_device(backend, host, dtype), dirty(backend, host.shape, other_dtype)
    backend.copy(array, result)
    np.testing.assert_array_equal(backend.to_host(result), rounded(rounded(host, dtype), other_dtype))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((4, 6, 5, 7), (4, 210)),
        ((4, 210), (4, 6, 5, 7)),
        ((4, 6, 1, 1), (4, 6)),
        ((4, 6), (4, 6, 1, 1)),
        ((4, 1, 5, 7), (4, 35)),
        ((4, 6, 5, 7), (2, 12, 7, 5)),
        ((8, 3), (2, 3, 4)),
        ((4, 6, 5, 7), (4, 6, 35)),
        ((24,), (1, 2, 3, 4)),
        ((1,), ()),
        ((4, 6, 5, 7), (4, 6, 5, 7)),
        ((2, 6, 4, 5), (2, 3, 2, 4, 5)),
        ((2, 3, 2, 4, 5), (2, 6, 4, 5)),
        ((2, 3, 2, 4, 5), (6, 40)),
        ((6, 40), (2, 3, 2, 4, 5)),
    ],
)
def test_reshaped(backend: Backend, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """The logical order of the elements survives a reshape."""
    host = normal(2, old)
    result = backend.reshaped(to_device(backend, host), new)
    assert np.array_equal(backend.to_host(result), host.reshape(new))
    backend.flat(result)


@pytest.mark.parametrize("shape", [(5, 16, 7, 8), (3, 7, 5, 2), (2, 40, 6, 50), (4, 4000)])
def test_copy_and_add(backend: Backend, dtype: str, other_dtype: str, shape: tuple[int, ...]) -> None:
    source, values = stored(backend, 1, shape, dtype)
    target, before = stored(backend, 2, shape, other_dtype)
    backend.add(source, target)
    np.testing.assert_array_equal(backend.to_host(target), rounded(before + values, other_dtype))
    backend.copy(source, target)
    assert np.array_equal(backend.to_host(target), rounded(values, other_dtype))


@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "start", "stop"),
    [((8, 48, 9, 12), 2, 6), ((6, 48, 8, 16), 0, 4), ((5, 7, 6, 5), 1, 4), ((5, 6, 7, 8), 1, 4)],
)
def test_slices(
    backend: Backend, dtype: str, other_dtype: str, axis: int, shape: tuple[int, ...], start: int, stop: int
) -> None:
    """As Concat and Slice copy them, into and out of a larger array, and added."""
    start, stop = (start * 4, stop * 4) if axis == 1 and shape[1] > 40 else (start, stop)
    index = tuple(slice(start, stop) if a == axis else slice(None) for a in range(4))
    whole, everything = stored(backend, 3, shape, other_dtype)
    part, values = stored(backend, 4, everything[index].shape, dtype)
    backend.copy(part, whole[index])
    everything[index] = rounded(values, other_dtype)
    assert np.array_equal(backend.to_host(whole), everything)
    backend.add(part, whole[index])
    everything[index] = rounded(everything[index] + values, other_dtype)
    assert np.array_equal(backend.to_host(whole), everything)
    backend.copy(whole[index], part)
    assert np.array_equal(backend.to_host(part), rounded(everything[index], dtype))


@pytest.mark.parametrize(
    "shape",
    [(4, 50, 4, 4), (2, 256, 6, 6), (3, 3, 20, 30), (1, 40, 1, 33), (2, 17, 33, 5), (2, 4, 3, 2), (3, 8, 4, 5, 6)],
)
def test_channels_last_to_c_order_and_back(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    array, values = stored(backend, 5, shape, dtype)
    row = dirty(backend, (values.size,), dtype)
    backend.copy(array, row.reshape(shape))
    assert np.array_equal(backend.to_host(row), values.reshape(-1))
    again = dirty(backend, shape, dtype)
    backend.copy(row.reshape(shape), again)
    assert np.array_equal(backend.to_host(again), values)
    backend.add(row.reshape(shape), again)
    assert np.array_equal(backend.to_host(again), rounded(values + values, dtype))


def _ordered(backend: Backend, shape: tuple[int, ...], order: str) -> tuple[Any, Any]:
    """A zeroed array (N, C, ...) of an order in memory, and all of the memory, 1-D."""
    whole = {
        "channels first": shape,
        "channels last": (shape[0], *shape[2:], shape[1]),
        "some of the channels": (shape[0], *shape[2:], shape[1] + 3),
        "every second column": (*shape[:-1], 2 * shape[-1]),
    }[order]
    memory = backend.zeros((int(np.prod(whole)),))
    array = memory.reshape(whole)
    if order in ("channels last", "some of the channels"):
        array = array.transpose(0, len(shape) - 1, *range(1, len(shape) - 1))
    if order == "some of the channels":
        array = array[:, 2:-1]
    return array[..., ::2] if order == "every second column" else array, memory


ORDERS = st.sampled_from(["channels first", "channels last", "some of the channels", "every second column"])


@often
@given(shape=st.lists(st.integers(1, 20), min_size=4, max_size=4), depth=st.integers(0, 4), source=ORDERS, to=ORDERS)
def test_copies_between_all_orders_in_memory(
    backend: Backend, shape: list[int], depth: int, source: str, to: str
) -> None:
    """Images, and volumes where there is a depth; nothing is written beside the target."""
    sizes = (min(shape[0], 4), *shape[1:], *((depth,) if depth else ()))
    values = normal(1, sizes)
    given, (target, memory) = _ordered(backend, sizes, source)[0], _ordered(backend, sizes, to)
    backend.copy(to_device(backend, values), given)
    backend.copy(given, target)
    found = dirty(backend, sizes)
    backend.copy(target, found)
    np.testing.assert_array_equal(backend.to_host(found), values)
    assert np.count_nonzero(backend.to_host(memory)) == np.count_nonzero(values)


def test_arrays_with_more_axes_than_a_kernel_walks_along(backend: Backend, dtype: str) -> None:
    array, values = stored(backend, 6, (3, 4, 5, 6, 7), dtype)
    part = dirty(backend, (2, 3, 2, 3, 3), dtype)
    index = (slice(0, 3, 2), slice(1, 4), slice(0, 5, 3), slice(0, 6, 2), slice(1, 7, 2))
    backend.copy(array[index], part)
    assert np.array_equal(backend.to_host(part), values[index])


@pytest.mark.parametrize("integer", ["int32", "uint8"])
def test_whole_numbers_become_any_dtype(backend: Backend, dtype: str, integer: str) -> None:
    host = np.arange(2 * 24 * 3 * 5).reshape(2, 24, 3, 5) % 200
    target = dirty(backend, host.shape, dtype)
    backend.copy(to_device(backend, host, integer), target)
    assert np.array_equal(backend.to_host(target), host)
    assert backend.to_host(to_device(backend, host, integer)).dtype == integer


@pytest.mark.parametrize(
    ("sources", "at"),
    [(2, None), (2, 0), (3, None), (3, 2), (5, None), (8, 3), (8, None), (9, None), (17, None), (9, 8)],
)
@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (4, 64, 28, 28), (7,), (3, 3, 3)])
def test_add_n(backend: Backend, dtype: str, shape: tuple[int, ...], sources: int, at: int | None) -> None:
    """A sum of several arrays, to an array of its own or to one of them."""
    pairs = [stored(backend, seed, shape, dtype) for seed in range(sources)]
    destination = dirty(backend, shape, dtype) if at is None else pairs[at][0]
    backend.add_n([array for array, _ in pairs], destination)
    # A GPU adds up to eight in a launch, and rounds each launch's sum to the dtype.
    _agrees_rounded(backend, destination, sum(host.astype(float) for _, host in pairs), dtype, -(-sources // 8))


def test_add_n_to_another_dtype(backend: Backend, dtype: str, other_dtype: str) -> None:
    pairs = [stored(backend, seed, (4, 12, 9, 9), dtype) for seed in range(3)]
    destination = dirty(backend, (4, 12, 9, 9), other_dtype)
    backend.add_n([array for array, _ in pairs], destination)
    _agrees_rounded(backend, destination, sum(host.astype(float) for _, host in pairs), other_dtype)


def _agrees_rounded(backend: Backend, array: Any, expected: Any, dtype: str, roundings: int = 1) -> None:
    """Within half a step of the dtype at the largest value, for each rounding."""
    limit = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}[dtype] * roundings * np.abs(expected).max()
    np.testing.assert_allclose(backend.to_host(array), expected, rtol=0, atol=limit)
