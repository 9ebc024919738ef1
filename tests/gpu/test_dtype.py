"""Arrays of float16 and bfloat16 on the CUDA backend: placing, copying, adding, dropout."""

from __future__ import annotations

import itertools

import backend_checks as checks
import backend_oracle as oracle
import numpy as np
import pytest
from backend_checks import SIZES, normal
from dtype_checks import SHAPES, dtypes, rounded, some, stored
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import Backend, RandomStream
from caffepy.backend.types import DTYPES


@dtypes
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_rounded_to_the_nearest(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    array, expected = stored(backend, 1, shape, dtype)
    assert array.dtype == {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[dtype]
    back = backend.to_host(array)
    assert back.dtype == np.float32 and back.flags.c_contiguous
    assert np.array_equal(back, expected)
    assert np.array_equal(backend.to_host(backend.view(backend.flat(array), shape)), expected)
    backend.fill(array, -2.7)
    assert np.array_equal(backend.to_host(array), rounded(np.full(shape, -2.7, np.float32), dtype))
    backend.fill(array, 0)
    assert not backend.to_host(array).any()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", DTYPES)
def test_awkward_numbers(backend: Backend, dtype: str, target: str) -> None:
    """Ties, overflow, numbers below the normal range, infinities and NaN."""
    host = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65519, 65520, 1e-7, 6e-8, 3.4e38, -0.0, 0,
                     np.inf, -np.inf, np.nan, -1e-40, 77], np.float32)  # fmt: skip
    array, result = checks.to_device(backend, host, dtype), checks.dirty(backend, host.shape, target)
    backend.copy(array, result)
    np.testing.assert_array_equal(backend.to_host(result), rounded(rounded(host, dtype), target))


@pytest.mark.parametrize(("old", "new"), list(itertools.product(DTYPES, DTYPES)))
@pytest.mark.parametrize("shape", [(5, 16, 7, 8), (3, 7, 5, 2), (2, 40, 6, 50), (4, 4000)])
def test_copy_and_add_between_storages(backend: Backend, old: str, new: str, shape: tuple[int, ...]) -> None:
    source, values = stored(backend, 1, shape, old)
    target, before = stored(backend, 2, shape, new)
    backend.add(source, target)
    np.testing.assert_array_equal(backend.to_host(target), rounded(before + values, new))
    backend.copy(source, target)
    assert np.array_equal(backend.to_host(target), rounded(values, new))


@pytest.mark.parametrize(("old", "new"), [("float32", "float32"), ("float16", "float16"), ("float32", "bfloat16")])
@pytest.mark.parametrize("axis", [0, 1, 2, 3])
@pytest.mark.parametrize(
    ("shape", "start", "stop"), [((8, 48, 9, 12), 2, 6), ((6, 48, 8, 16), 0, 4), ((5, 7, 6, 5), 1, 4)]
)
def test_slices(backend: Backend, old: str, new: str, axis: int, shape: tuple[int, ...], start: int, stop: int) -> None:
    """As Concat and Slice copy them, into and out of a larger array, and added."""
    start, stop = (start * 4, stop * 4) if axis == 1 and shape[1] > 40 else (start, stop)
    index = tuple(slice(start, stop) if a == axis else slice(None) for a in range(4))
    whole, everything = stored(backend, 3, shape, new)
    part, values = stored(backend, 4, everything[index].shape, old)
    backend.copy(part, whole[index])
    everything[index] = rounded(values, new)
    assert np.array_equal(backend.to_host(whole), everything)
    backend.add(part, whole[index])
    everything[index] = rounded(everything[index] + values, new)
    assert np.array_equal(backend.to_host(whole), everything)
    backend.copy(whole[index], part)
    assert np.array_equal(backend.to_host(part), rounded(everything[index], old))


@dtypes
@pytest.mark.parametrize(
    "shape",
    [(4, 50, 4, 4), (2, 256, 6, 6), (3, 3, 20, 30), (1, 40, 1, 33), (2, 17, 33, 5), (2, 4, 3, 2), (3, 8, 4, 5, 6)],
)
def test_channels_last_to_c_order_and_back(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    array, values = stored(backend, 5, shape, dtype)
    row = checks.dirty(backend, (values.size,), dtype)
    backend.copy(array, row.reshape(shape))
    assert np.array_equal(backend.to_host(row), values.reshape(-1))
    again = checks.dirty(backend, shape, dtype)
    backend.copy(row.reshape(shape), again)
    assert np.array_equal(backend.to_host(again), values)
    backend.add(row.reshape(shape), again)
    assert np.array_equal(backend.to_host(again), rounded(values + values, dtype))


@dtypes
def test_arrays_with_more_axes_than_a_kernel_walks_along(backend: Backend, dtype: str) -> None:
    array, values = stored(backend, 6, (3, 4, 5, 6, 7), dtype)
    part = checks.dirty(backend, (2, 3, 2, 3, 3), dtype)
    index = (slice(0, 3, 2), slice(1, 4), slice(0, 5, 3), slice(0, 6, 2), slice(1, 7, 2))
    backend.copy(array[index], part)
    assert np.array_equal(backend.to_host(part), values[index])


@pytest.mark.parametrize("integer", ["int32", "uint8"])
@dtypes
def test_whole_numbers_become_any_dtype(backend: Backend, dtype: str, integer: str) -> None:
    host = np.arange(2 * 24 * 3 * 5).reshape(2, 24, 3, 5) % 200
    target = checks.dirty(backend, host.shape, dtype)
    backend.copy(checks.to_device(backend, host, integer), target)
    assert np.array_equal(backend.to_host(target), host)
    assert backend.to_host(checks.to_device(backend, host, integer)).dtype == integer


@dtypes
@pytest.mark.parametrize("shape", [(1,), (4001,), (3, 7, 5, 2), (200, 1000)])
def test_all_finite(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    host = normal(1, shape)
    assert backend.all_finite(checks.to_device(backend, host, dtype))
    for value, index in itertools.product((np.nan, np.inf, -np.inf), (0, host.size // 2, host.size - 1)):
        spoiled = host.copy()
        spoiled.reshape(-1)[index] = value
        assert not backend.all_finite(checks.to_device(backend, spoiled, dtype))


@dtypes
@some
@given(shape=st.lists(SIZES, min_size=1, max_size=4), first_sample=st.sampled_from([0, 3, 2**32 - 1]))
def test_dropout(backend: Backend, dtype: str, shape: list[int], first_sample: int) -> None:
    """The elements whose documented random number is at least the ratio are kept, wherever the counter lies."""
    x, values = stored(backend, 1, tuple(shape), dtype)
    stream = RandomStream(2**40 + 5, 0xDEADBEEF)
    chances = oracle.random_uniform(tuple(shape), 2**40 + 5, 0xDEADBEEF, 7, first_sample)
    expected = rounded(np.where(chances >= 0.4, values * np.float32(1 / 0.6), 0).astype(np.float32), dtype)
    on_device = checks.to_device(backend, np.array([7, first_sample], np.uint64), "uint64")
    for counter in ((7, first_sample), on_device):
        out = checks.dirty(backend, tuple(shape), dtype)
        backend.dropout(x, out, 0.4, stream, counter)
        assert np.array_equal(backend.to_host(out), expected)
    uniform = checks.dirty(backend, tuple(shape))
    backend.random_uniform(uniform, stream, on_device)
    assert np.array_equal(backend.to_host(uniform), chances)
    backend.dropout(x, x, 0.4, stream, on_device)
    assert np.array_equal(backend.to_host(x), expected)
