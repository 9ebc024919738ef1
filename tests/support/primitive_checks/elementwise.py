"""Formulas and sums."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from backend_arrays import agrees, close, dirty, normal, rounded, stored, to_device
from hypothesis import given

from caffepy.backend import Backend, Channel, Each, Scalar, expression
from caffepy.backend.formulas import rectified_with_channel
from caffepy.backend.types import DTYPES
from primitive_checks.strategies import often, repeats, shapes_and_axes, some


@expression
def mixed(x: Each, y: Each, gain: Channel, slope: Scalar) -> Each:
    shifted = gain * x + y
    return shifted if shifted > 0 else slope * shifted


@expression
def plain(x: Each, y: Each, slope: Scalar) -> Each:
    return x - slope * y


@expression
def two(x: Each, y: Each) -> tuple[Each, Each]:
    return x * y, x + y


@expression
def centred_square(x: Each, mean: Channel) -> Each:
    return (x - mean) ** 2


MANY_BLOCKS = [
    (64, 20, 12, 12),
    (3, 7, 41, 33),
    (200, 500),
    (1000000,),
    (5, 3, 9, 9, 9),
    (64, 96, 12, 12),
    (3, 8, 41, 33),
    (9, 1000),
    (40, 6000),
    (6, 1024, 8, 8),
]
SUMMED = [
    (64, 500),
    (256, 1000),
    (64, 10),
    (2048, 24),
    (64, 20, 24, 24),
    (3, 7, 41, 33),
    (1000001,),
    (40, 3, 4001),
    (2, 2048, 7, 7),
    (7, 33, 100, 100),
    (64, 20, 12, 12),
    (200, 500),
    (5, 3, 9, 9, 9),
]
EACH_SAMPLE = [(3, 40, 37, 29), (2, 64, 90, 70), (300, 8, 5, 5), (2, 5, 64, 65), (4, 130, 7, 7), (2, 9, 8, 9, 10)]
"""Images whose samples have a number for each channel, as in Squeeze-and-Excitation."""


REPEATS = [
    (shape, 0, [first, second, third])
    for shape in [(2, 512, 38, 38), (3, 40, 7, 5), (5, 12, 1, 9), (4, 3, 2, 5, 6)]
    for pixels, channels in [((shape[0], 1, *shape[2:]), (1, shape[1], *[1] * (len(shape) - 2)))]
    for first, second in [(pixels, channels), (channels, (shape[0], *[1] * (len(shape) - 1)))]
    for third in [pixels, channels]
]
"""A value for each pixel or image and one for each channel, as in Normalize."""


def third(dtype: str, other: str) -> str:
    """The dtype of blobs that is neither of two; the same where they are equal."""
    return dtype if dtype == other else next(d for d in DTYPES if d not in (dtype, other))


def check_apply(backend: Backend, first: str, second: str, shape: tuple[int, ...], axis: int, axes: int) -> None:
    """Formulas with channels, without, with two results and in place."""
    own, result = shape[axis : axis + axes], third(first, second)
    (x, x_host), (y, y_host) = stored(backend, 1, shape, first), stored(backend, 2, shape, second)
    gain, gain_host = stored(backend, 3, own, "float32")
    out, other = dirty(backend, shape, result), dirty(backend, shape, first)
    backend.apply(mixed, (x, y, gain, 0.1), (out,), axis)
    value = gain_host.reshape(own + (1,) * (len(shape) - axis - axes)).astype(float) * x_host + y_host
    agrees(backend, out, np.where(value > 0, value, 0.1 * value), result)
    backend.apply(two, (x, y), (out, other))
    agrees(backend, out, x_host.astype(float) * y_host, result)
    agrees(backend, other, x_host.astype(float) + y_host, first)
    backend.apply(plain, (x, y, 0.25), (x,))
    agrees(backend, x, x_host - 0.25 * y_host.astype(float), first)


@often
@given(case=shapes_and_axes())
def test_apply(backend: Backend, case: tuple[tuple[int, ...], int, int]) -> None:
    check_apply(backend, "float32", "float32", *case)


@some
@given(case=shapes_and_axes())
def test_apply_to_each_dtype(
    backend: Backend, dtype: str, other_dtype: str, case: tuple[tuple[int, ...], int, int]
) -> None:
    check_apply(backend, dtype, other_dtype, *case)


@pytest.mark.parametrize("shape", MANY_BLOCKS)
@pytest.mark.parametrize("axis", [0, 1])
def test_apply_over_many_blocks(
    backend: Backend, dtype: str, other_dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    check_apply(backend, dtype, other_dtype, shape, min(axis, len(shape) - 1), 1)


@pytest.mark.parametrize("shape", EACH_SAMPLE)
def test_apply_with_numbers_for_the_channels_of_each_sample(
    backend: Backend, dtype: str, shape: tuple[int, ...]
) -> None:
    check_apply(backend, dtype, dtype, shape, 0, 2)


def check_reduce(backend: Backend, first: str, second: str, shape: tuple[int, ...], axis: int, axes: int) -> None:
    """Sums over all axes but some, with channels and without, overwriting and adding, twice the same bits."""
    own = shape[axis : axis + axes]
    spread = own + (1,) * (len(shape) - axis - axes)
    (x, x_host), (y, y_host) = stored(backend, 1, shape, first), stored(backend, 2, shape, second)
    mean, mean_host = stored(backend, 3, own, "float32")
    exact, half = x_host.astype(float), "float16" if "float16" in backend.dtypes else "float32"
    summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + axes)
    products, sums = dirty(backend, own), dirty(backend, own, half)
    backend.reduce(two, (x, y), (products, sums), axis)
    size = math.sqrt(x_host.size / max(1, math.prod(own)))
    rtol, atol = 1e-5, 1e-5 * size
    np.testing.assert_allclose(backend.to_host(products), (exact * y_host).sum(axis=summed), rtol, atol)
    more = 1 if half == "float32" else 200
    np.testing.assert_allclose(backend.to_host(sums), (exact + y_host).sum(axis=summed), more * rtol, more * atol)
    once = backend.to_host(products)
    backend.reduce(two, (x, y), (products, sums), axis)
    assert np.array_equal(backend.to_host(products), once)
    squares = (exact - mean_host.reshape(spread)) ** 2
    backend.fill(products, 3)
    backend.reduce(centred_square, (x, mean), (products,), axis, accumulate=True)
    close(backend.to_host(products), squares.sum(axis=summed) + 3)
    total = dirty(backend, ())
    backend.reduce(centred_square, (x, mean), (total,), axis)
    close(backend.to_host(total), squares.sum())
    differences = (exact - 0.25 * y_host).sum(axis=summed)
    for quarter in (0.25, to_device(backend, np.float32(0.25))):
        backend.reduce(plain, (x, y, quarter), (products,), axis)
        np.testing.assert_allclose(backend.to_host(products), differences, rtol, atol)


@often
@given(case=shapes_and_axes())
def test_reduce(backend: Backend, case: tuple[tuple[int, ...], int, int]) -> None:
    check_reduce(backend, "float32", "float32", *case)


@some
@given(case=shapes_and_axes())
def test_reduce_of_each_dtype(
    backend: Backend, dtype: str, other_dtype: str, case: tuple[tuple[int, ...], int, int]
) -> None:
    check_reduce(backend, dtype, other_dtype, *case)


@pytest.mark.parametrize("shape", SUMMED)
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_over_many_blocks(
    backend: Backend, dtype: str, other_dtype: str, shape: tuple[int, ...], axis: int
) -> None:
    check_reduce(backend, dtype, other_dtype, shape, min(axis, len(shape) - 1), 1)


@pytest.mark.parametrize("shape", EACH_SAMPLE)
def test_reduce_to_numbers_for_the_channels_of_each_sample(
    backend: Backend, dtype: str, shape: tuple[int, ...]
) -> None:
    check_reduce(backend, dtype, dtype, shape, 0, 2)


def test_a_scalar_may_lie_on_the_device(backend: Backend) -> None:
    x, y = normal(1, (5, 8, 3, 3)), normal(2, (5, 8, 3, 3))
    out = dirty(backend, x.shape)
    backend.apply(plain, (to_device(backend, x), to_device(backend, y), to_device(backend, np.float32(0.25))), (out,))
    close(backend.to_host(out), x - 0.25 * y)


def test_apply_to_slices_of_flat_buffers_at_any_offset(backend: Backend) -> None:
    x = normal(1, (4001,))
    buffer, out = to_device(backend, x), dirty(backend, x.shape)
    for start, stop in [(0, 4000), (1, 4001), (4, 4000), (2, 5)]:
        backend.apply(plain, (buffer[start:stop], buffer[start:stop], 0.5), (out[start:stop],))
        close(backend.to_host(out[start:stop]), 0.5 * x[start:stop])


@expression
def update(
    data: Each, diff: Each, history: Each, rate: Channel, decay: Channel, momentum: Scalar
) -> tuple[Each, Each, Each]:
    step = momentum * history + rate * (diff + decay * data)
    return data - step, step, data - step


@pytest.mark.parametrize("blocks", [3, 1000, 40000])
def test_an_update_with_rates_for_each_block_and_a_copy(backend: Backend, dtype: str, blocks: int) -> None:
    shape = (blocks, 64)
    (data, w), (diff, g), (history, h) = (stored(backend, seed, shape, "float32") for seed in (1, 2, 3))
    (rate, r), (decay, d) = (stored(backend, seed, (blocks,), "float32") for seed in (4, 5))
    copy, momentum = dirty(backend, shape, dtype), to_device(backend, np.float32(0.9))
    backend.apply(update, (data, diff, history, rate, decay, momentum), (data, history, copy), 0)
    step = 0.9 * h.astype(float) + r[:, None].astype(float) * (g + d[:, None].astype(float) * w)
    close(backend.to_host(history), step)
    close(backend.to_host(data), w - step)
    assert np.array_equal(backend.to_host(copy), rounded(backend.to_host(data), dtype))


@expression
def two_channels(x: Each, factor: Channel, shift: Channel) -> Each:
    return x * factor + shift


def check_repeats(
    backend: Backend, dtype: str, shape: tuple[int, ...], axis: int, smalls: list[tuple[int, ...]]
) -> None:
    """Two arguments that repeat along some axes, and sums over others."""
    x, x_host = stored(backend, 1, shape, dtype)
    (factor, f), (shift, s) = (
        stored(backend, seed, small, "float32") for seed, small in ((2, smalls[0]), (3, smalls[1]))
    )
    out, total = dirty(backend, shape, dtype), dirty(backend, smalls[2])
    rest = (1,) * (len(shape) - axis - f.ndim)
    wanted = x_host.astype(float) * f.reshape(f.shape + rest) + s.reshape(s.shape + rest)
    backend.apply(two_channels, (x, factor, shift), (out,), axis)
    agrees(backend, out, wanted, dtype)
    summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + f.ndim or smalls[2][i - axis] == 1)
    sums, size = wanted.sum(axis=summed).reshape(smalls[2]), math.sqrt(x_host.size / total.size)
    for accumulate in (False, True):
        backend.reduce(two_channels, (x, factor, shift), (total,), axis, accumulate)
        found, exact = backend.to_host(total), (1 + accumulate) * sums
        np.testing.assert_allclose(found, exact, 1e-5, 1e-5 * size)


@often
@given(case=repeats())
def test_arguments_that_repeat(backend: Backend, case: tuple[tuple[int, ...], int, list[tuple[int, ...]]]) -> None:
    check_repeats(backend, "float32", *case)


@pytest.mark.parametrize("case", REPEATS, ids=str)
def test_values_of_pixels_and_channels(
    backend: Backend, dtype: str, case: tuple[tuple[int, ...], int, list[tuple[int, ...]]]
) -> None:
    check_repeats(backend, dtype, *case)


# -- NaN and infinity: an overflow must be seen at the end ------------------------------------------------------


@expression
def keep_finite(x: Each, limit: Scalar) -> Each:
    return x if x - x == 0 else limit


@expression
def extremes(x: Each, y: Each) -> tuple[Each, Each, Each, Each]:
    return max(x, y), min(x, y), max(y, x), min(x, 0.5)


@expression
def extremes_with_channel(x: Each, c: Channel) -> tuple[Each, Each]:
    return max(x, c), min(c, x)


def test_formulas_keep_nan_and_infinity(backend: Backend) -> None:
    host = np.array([1, np.nan, np.inf, -np.inf, -0.0] * 5, np.float32)
    x, out = to_device(backend, host), dirty(backend, (25,))
    backend.apply(keep_finite, (x, 5.0), (out,))
    assert np.array_equal(backend.to_host(out)[:5], np.array([1, 5, 5, 5, 0], np.float32))
    backend.apply(plain, (x, backend.zeros((25,)), 1.0), (out,))
    assert np.array_equal(backend.to_host(out), host, equal_nan=True)


def with_nan(host: Any, seed: int = 9) -> Any:
    """The numbers rounded to quarters, some of them NaN and some infinite."""
    rng, host = np.random.default_rng(seed), np.array(np.round(4 * host) / 4, np.float32)
    for share, value in ((0.2, np.nan), (0.1, np.inf), (0.1, -np.inf)):
        host[rng.random(host.shape) < share] = value
    return host


NAN_SHAPES = [(7,), (33, 5), (3, 8, 5, 7), (2, 33, 9, 8), (2, 1, 3, 3)]


@pytest.mark.parametrize("shape", NAN_SHAPES)
def test_min_and_max_pass_nan_on(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    """Whichever of the two is NaN, in place and not."""
    a, b = (with_nan(normal(seed, shape), seed) for seed in (1, 2))
    x, y = (to_device(backend, host, dtype) for host in (a, b))
    outs = [dirty(backend, shape, dtype) for _ in range(4)]
    backend.apply(extremes, (x, y), outs)
    wanted = (np.maximum(a, b), np.minimum(a, b), np.maximum(b, a), np.minimum(a, np.float32(0.5)))
    for out, expected in zip(outs, wanted, strict=True):
        np.testing.assert_array_equal(backend.to_host(out), expected)
    backend.apply(extremes, (x, y), (x, *outs[1:]))
    np.testing.assert_array_equal(backend.to_host(x), np.maximum(a, b))


@pytest.mark.parametrize("shape", NAN_SHAPES[1:])
def test_min_and_max_with_channels_pass_nan_on(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    """The same with one number for each channel, and the epilogue of a fused InnerProduct and ReLU."""
    x_host, c_host = with_nan(normal(1, shape)), with_nan(normal(2, shape[1:2]))
    spread = c_host.reshape((1, -1) + (1,) * (len(shape) - 2))
    x, c = to_device(backend, x_host, dtype), to_device(backend, c_host)
    larger, smaller = dirty(backend, shape, dtype), dirty(backend, shape, dtype)
    backend.apply(extremes_with_channel, (x, c), (larger, smaller), 1)
    np.testing.assert_array_equal(backend.to_host(larger), np.maximum(x_host, spread))
    np.testing.assert_array_equal(backend.to_host(smaller), np.minimum(x_host, spread))
    backend.apply(rectified_with_channel, (x, c), (x,), 1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(backend.to_host(x), np.maximum(x_host + spread, 0))


@pytest.mark.parametrize("shape", [(1,), (5,), (4001,), (3, 7, 5, 2), (3, 5, 7, 11), (200, 1000), (300000,)])
def test_all_finite(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    """One NaN or infinity anywhere is found; the dtype's largest number is not one."""
    host = normal(1, shape)
    host.reshape(-1)[0] = 65504 if dtype == "float16" else 3.3895314e38  # bfloat16's
    assert backend.all_finite(to_device(backend, host, dtype))
    for value in (np.nan, np.inf, -np.inf):
        for index in (0, host.size // 2, host.size - 1):
            spoiled = host.copy()
            spoiled.reshape(-1)[index] = value
            assert not backend.all_finite(to_device(backend, spoiled, dtype))
    if dtype == "float32":
        host.reshape(-1)[0] = np.finfo(np.float32).max
        assert backend.all_finite(to_device(backend, host))
