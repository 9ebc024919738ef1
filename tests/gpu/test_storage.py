"""Arrays of float16 and bfloat16 on the CUDA backend, against float64 of what is stored."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import backend_checks as checks
import backend_oracle as oracle
import numpy as np
import pytest
from backend_checks import SIZES, normal
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from caffepy.backend import Backend, Channel, Each, Geometry, RandomStream, Scalar, expression
from caffepy.backend.arguments import STORAGE

some = settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
storages = pytest.mark.parametrize("storage", STORAGE)
STEP = {"float32": 2e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}
"""Allowed distance relative to the largest value: a rounding of the result, whose place in its binade is unknown."""

SHAPES = [(1, 1, 1, 1), (2, 3, 5, 7), (3, 8, 4, 4), (1, 33, 6, 5), (4, 64, 7, 7), (5, 10), (7,), (2, 3, 4, 5, 6), ()]


def rounded(host: Any, storage: str) -> Any:
    """What is left of float32 numbers in a storage, as float32."""
    if storage == "float32":
        return host
    if storage == "float16":
        with np.errstate(over="ignore"):
            return host.astype(np.float16).astype(np.float32)
    bits = np.ascontiguousarray(host).view(np.uint32).astype(np.uint64)
    whole = (((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16) << 16).astype(np.uint32).view(np.float32).reshape(host.shape)
    return np.where(np.isnan(host), np.float32(np.nan), whole)


def stored(backend: Backend, seed: int, shape: tuple[int, ...], storage: str) -> tuple[Any, Any]:
    """Random numbers on the device, and what is stored there."""
    host = normal(seed, shape)
    return checks.place(backend, host, storage), rounded(host, storage)


def agrees(backend: Backend, array: Any, expected: Any, storage: str) -> None:
    checks.close(backend.to_host(array), expected, STEP[storage])


# -- memory -----------------------------------------------------------------------------------------------


@storages
@pytest.mark.parametrize("shape", SHAPES)
def test_numbers_are_rounded_to_the_nearest(backend: Backend, storage: str, shape: tuple[int, ...]) -> None:
    array, expected = stored(backend, 1, shape, storage)
    assert array.dtype == {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}[storage]
    back = backend.to_host(array)
    assert back.dtype == np.float32 and back.flags.c_contiguous
    assert np.array_equal(back, expected)
    assert np.array_equal(backend.to_host(backend.view(backend.flat(array), shape)), expected)
    backend.fill(array, -2.7)
    assert np.array_equal(backend.to_host(array), rounded(np.full(shape, -2.7, np.float32), storage))
    backend.fill(array, 0)
    assert not backend.to_host(array).any()


@pytest.mark.parametrize("storage", ["float16", "bfloat16"])
@pytest.mark.parametrize("target", STORAGE)
def test_awkward_numbers(backend: Backend, storage: str, target: str) -> None:
    """Ties, overflow, numbers below the normal range, infinities and NaN."""
    host = np.array([1 + 2**-11, 1 + 3 * 2**-11, 1 + 2**-8, 1 + 3 * 2**-8, 65519, 65520, 1e-7, 6e-8, 3.4e38, -0.0, 0,
                     np.inf, -np.inf, np.nan, -1e-40, 77], np.float32)  # fmt: skip
    array, result = checks.place(backend, host, storage), checks.dirty(backend, host.shape, target)
    backend.copy(array, result)
    np.testing.assert_array_equal(backend.to_host(result), rounded(rounded(host, storage), target))


@pytest.mark.parametrize(("old", "new"), list(itertools.product(STORAGE, STORAGE)))
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
def test_slices(
    backend: Backend, old: str, new: str, axis: int, shape: tuple[int, ...], start: int, stop: int
) -> None:
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


@storages
@pytest.mark.parametrize(
    "shape", [(4, 50, 4, 4), (2, 256, 6, 6), (3, 3, 20, 30), (1, 40, 1, 33), (2, 17, 33, 5), (2, 4, 3, 2)]
)
def test_channels_last_to_c_order_and_back(backend: Backend, storage: str, shape: tuple[int, ...]) -> None:
    array, values = stored(backend, 5, shape, storage)
    row = checks.dirty(backend, (values.size,), storage)
    backend.copy(array, row.reshape(shape))
    assert np.array_equal(backend.to_host(row), values.reshape(-1))
    again = checks.dirty(backend, shape, storage)
    backend.copy(row.reshape(shape), again)
    assert np.array_equal(backend.to_host(again), values)
    backend.add(row.reshape(shape), again)
    assert np.array_equal(backend.to_host(again), rounded(values + values, storage))


@storages
def test_arrays_with_more_axes_than_a_kernel_walks_along(backend: Backend, storage: str) -> None:
    array, values = stored(backend, 6, (3, 4, 5, 6, 7), storage)
    part = checks.dirty(backend, (2, 3, 2, 3, 3), storage)
    index = (slice(0, 3, 2), slice(1, 4), slice(0, 5, 3), slice(0, 6, 2), slice(1, 7, 2))
    backend.copy(array[index], part)
    assert np.array_equal(backend.to_host(part), values[index])


@pytest.mark.parametrize("dtype", ["int32", "uint8"])
@storages
def test_whole_numbers_become_any_storage(backend: Backend, storage: str, dtype: str) -> None:
    host = np.arange(2 * 24 * 3 * 5).reshape(2, 24, 3, 5) % 200
    target = checks.dirty(backend, host.shape, storage)
    backend.copy(checks.place(backend, host, dtype), target)
    assert np.array_equal(backend.to_host(target), host)
    assert backend.to_host(checks.place(backend, host, dtype)).dtype == dtype


@storages
@pytest.mark.parametrize("shape", [(1,), (4001,), (3, 7, 5, 2), (200, 1000)])
def test_all_finite(backend: Backend, storage: str, shape: tuple[int, ...]) -> None:
    host = normal(1, shape)
    assert backend.all_finite(checks.place(backend, host, storage))
    for value, index in itertools.product((np.nan, np.inf, -np.inf), (0, host.size // 2, host.size - 1)):
        spoiled = host.copy()
        spoiled.reshape(-1)[index] = value
        assert not backend.all_finite(checks.place(backend, spoiled, storage))


# -- formulas ---------------------------------------------------------------------------------------------

MIXTURES = [("float16", "float16", "float16"), ("bfloat16", "bfloat16", "bfloat16"), ("float32", "float16", "bfloat16"),
            ("float16", "bfloat16", "float32")]  # fmt: skip


@pytest.mark.parametrize(("first", "second", "result"), MIXTURES)
@some
@given(case=checks.shapes_and_axes())
def test_apply(backend: Backend, first: str, second: str, result: str, case: tuple[tuple[int, ...], int, int]) -> None:
    check_apply(backend, first, second, result, *case)


@pytest.mark.parametrize(("first", "second", "result"), MIXTURES)
@pytest.mark.parametrize(
    "shape", [(64, 96, 12, 12), (3, 8, 41, 33), (9, 1000), (1000000,), (6, 4096, 8, 8), (40, 6000)]
)
@pytest.mark.parametrize("axis", [0, 1])
def test_apply_over_many_blocks(
    backend: Backend, first: str, second: str, result: str, shape: tuple[int, ...], axis: int
) -> None:
    check_apply(backend, first, second, result, shape, min(axis, len(shape) - 1), 1)


def check_apply(
    backend: Backend, first: str, second: str, result: str, shape: tuple[int, ...], axis: int, axes: int
) -> None:
    own = shape[axis : axis + axes]
    x, x_host = stored(backend, 1, shape, first)
    y, y_host = stored(backend, 2, shape, second)
    gain, gain_host = stored(backend, 3, own, "float32")
    out, other = checks.dirty(backend, shape, result), checks.dirty(backend, shape, first)
    backend.apply(checks.mixed, (x, y, gain, 0.1), (out,), axis)
    value = gain_host.reshape(own + (1,) * (len(shape) - axis - axes)).astype(float) * x_host + y_host
    agrees(backend, out, np.where(value > 0, value, 0.1 * value), result)
    backend.apply(checks.two, (x, y), (out, other))
    agrees(backend, out, x_host.astype(float) * y_host, result)
    agrees(backend, other, x_host.astype(float) + y_host, first)
    backend.apply(checks.plain, (x, y, 0.25), (x,))
    agrees(backend, x, x_host - 0.25 * y_host.astype(float), first)


@pytest.mark.parametrize(("first", "second"), [("float16", "float16"), ("float32", "bfloat16"), ("float32", "float32")])
@some
@given(case=checks.shapes_and_axes())
def test_reduce(backend: Backend, first: str, second: str, case: tuple[tuple[int, ...], int, int]) -> None:
    check_reduce(backend, first, second, *case)


@pytest.mark.parametrize(("first", "second"), [("float16", "float16"), ("float32", "bfloat16"), ("float32", "float32")])
@pytest.mark.parametrize(
    "shape", [(64, 500), (256, 1000), (64, 10), (2048, 24), (64, 20, 24, 24), (3, 7, 41, 33), (1000001,), (40, 3, 4001),
              (2, 2048, 7, 7), (7, 33, 100, 100)],
)  # fmt: skip
@pytest.mark.parametrize("axis", [0, 1])
def test_reduce_over_many_blocks(backend: Backend, first: str, second: str, shape: tuple[int, ...], axis: int) -> None:
    check_reduce(backend, first, second, shape, min(axis, len(shape) - 1), 1)


def check_reduce(backend: Backend, first: str, second: str, shape: tuple[int, ...], axis: int, axes: int) -> None:
    own = shape[axis : axis + axes]
    x, x_host = stored(backend, 1, shape, first)
    y, y_host = stored(backend, 2, shape, second)
    mean, mean_host = stored(backend, 3, own, "float32")
    summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + axes)
    products, sums = checks.dirty(backend, own), checks.dirty(backend, own, "float16")
    backend.reduce(checks.two, (x, y), (products, sums), axis)
    size = float(np.sqrt(x_host.size / max(1, np.prod(own))))
    np.testing.assert_allclose(
        backend.to_host(products), (x_host.astype(float) * y_host).sum(axis=summed), rtol=1e-5, atol=1e-5 * size
    )
    np.testing.assert_allclose(
        backend.to_host(sums), (x_host.astype(float) + y_host).sum(axis=summed), rtol=1e-3, atol=2e-3 * size
    )
    once = backend.to_host(products)
    backend.reduce(checks.two, (x, y), (products, sums), axis)
    assert np.array_equal(backend.to_host(products), once)
    spread = mean_host.reshape(own + (1,) * (len(shape) - axis - axes))
    squares = ((x_host.astype(float) - spread) ** 2).sum(axis=summed)
    backend.fill(products, 3)
    backend.reduce(checks.centred_square, (x, mean), (products,), axis, accumulate=True)
    checks.close(backend.to_host(products), squares + 3)
    total = checks.dirty(backend, ())
    backend.reduce(checks.centred_square, (x, mean), (total,), axis)
    checks.close(backend.to_host(total), squares.sum())


@expression
def update(
    data: Each, diff: Each, history: Each, rate: Channel, decay: Channel, momentum: Scalar
) -> tuple[Each, Each, Each]:
    step = momentum * history + rate * (diff + decay * data)
    return data - step, step, data - step


@pytest.mark.parametrize("blocks", [3, 1000, 40000])
def test_an_update_with_rates_for_each_block_and_a_copy_in_half(backend: Backend, blocks: int) -> None:
    shape = (blocks, 64)
    (data, w), (diff, g), (history, h) = (stored(backend, seed, shape, "float32") for seed in (1, 2, 3))
    (rate, r), (decay, d) = (stored(backend, seed, (blocks,), "float32") for seed in (4, 5))
    half, momentum = checks.dirty(backend, shape, "float16"), checks.place(backend, np.float32(0.9))
    backend.apply(update, (data, diff, history, rate, decay, momentum), (data, history, half), 0)
    step = 0.9 * h.astype(float) + r[:, None].astype(float) * (g + d[:, None].astype(float) * w)
    checks.close(backend.to_host(history), step)
    checks.close(backend.to_host(data), w - step)
    assert np.array_equal(backend.to_host(half), rounded(backend.to_host(data), "float16"))


# -- windows ----------------------------------------------------------------------------------------------

POOLINGS = [
    ((2, 8, 13, 12), (6, 6), Geometry((3, 3), (2, 2), (0, 0), (1, 1))),
    ((2, 16, 12, 14), (6, 7), Geometry((2, 2), (2, 2), (0, 0), (1, 1))),
    ((2, 7, 9, 9), (9, 9), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    ((1, 33, 9, 8), (5, 5), Geometry((3, 3), (2, 2), (1, 1), (1, 1))),
    ((3, 24, 7, 7), (1, 1), Geometry((7, 7), (1, 1), (0, 0), (1, 1))),
    ((1, 8, 23, 20), (2, 2), Geometry((15, 17), (8, 9), (0, 0), (1, 1))),
    ((2, 4, 14, 14), (4, 4), Geometry((5, 5), (3, 3), (0, 0), (1, 1))),
    ((5, 1, 1, 1), (1, 1), Geometry((1, 1), (1, 1), (0, 0), (1, 1))),
    ((1, 3, 10, 11), (3, 3), Geometry((2, 3), (4, 4), (1, 1), (1, 1))),
]
poolings = pytest.mark.parametrize(("x_shape", "y_size", "geometry"), POOLINGS)


def numbers_in_windows(places: Any, width: int, g: Geometry) -> Any:
    """A mask of places h * W + w as numbers within the windows."""
    rows = np.arange(places.shape[2])[:, None] * g.stride[0] - g.pad[0]
    columns = np.arange(places.shape[3]) * g.stride[1] - g.pad[1]
    return (places // width - rows) * g.kernel[1] + places % width - columns


@storages
@pytest.mark.parametrize("mask", ["int32", "uint8"])
@poolings
def test_pool_max(
    backend: Backend, storage: str, mask: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    check_pool_max(backend, storage, mask, x_shape, y_size, geometry, ties=True)


@some
@given(case=checks.poolings())
def test_pool_max_of_any_geometry(backend: Backend, case: Any) -> None:
    check_pool_max(backend, "float16", "uint8", *case, ties=False)


def check_pool_max(
    backend: Backend, storage: str, mask_dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int],
    geometry: Geometry, ties: bool,
) -> None:  # fmt: skip
    y_shape = (*x_shape[:2], *y_size)
    host = np.round(normal(1, x_shape)) if ties else rounded(normal(1, x_shape), storage)
    if mask_dtype == "uint8" and np.prod(geometry.kernel) > 255:
        return
    expected, places = oracle.pool_max(host, y_shape, geometry)
    y, mask = checks.dirty(backend, y_shape, storage), checks.dirty(backend, y_shape, mask_dtype)
    backend.pool_max_forward(checks.place(backend, host, storage), y, mask, geometry)
    assert np.array_equal(backend.to_host(y), expected)
    numbers = places if mask_dtype == "int32" else numbers_in_windows(places, x_shape[3], geometry)
    assert np.array_equal(backend.to_host(mask), numbers)
    dy, dy_host = stored(backend, 2, y_shape, storage)
    dx = checks.dirty(backend, x_shape, storage)
    backend.pool_max_backward(dy, mask, dx, geometry)
    agrees(backend, dx, oracle.pool_max_gradient(dy_host, places, x_shape), storage)


@storages
@poolings
def test_pool_average(
    backend: Backend, storage: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    y_shape = (*x_shape[:2], *y_size)
    x, x_host = stored(backend, 1, x_shape, storage)
    dy, dy_host = stored(backend, 2, y_shape, storage)
    y, dx = checks.dirty(backend, y_shape, storage), checks.dirty(backend, x_shape, storage)
    backend.pool_average_forward(x, y, geometry)
    agrees(backend, y, oracle.pool_average(x_host.astype(float), y_shape, geometry), storage)
    backend.pool_average_backward(dy, dx, geometry)
    agrees(backend, dx, oracle.pool_average_gradient(dy_host.astype(float), x_shape, geometry), storage)


@storages
@pytest.mark.parametrize("channels", [1, 3, 7, 12, 33, 96])
@pytest.mark.parametrize(("size", "beta"), [(5, 0.75), (3, 0.5), (1, 1.0), (9, 0.6), (35, 0.75), (201, 0.9)])
def test_lrn(backend: Backend, storage: str, channels: int, size: int, beta: float) -> None:
    shape = (2, channels, 3, 5)
    x, x_host = stored(backend, 1, shape, storage)
    dy, dy_host = stored(backend, 2, shape, storage)
    y, dx = checks.dirty(backend, shape, storage), checks.dirty(backend, shape, storage)
    backend.lrn_across_forward(x, y, None, size, 1.3, beta, 1.5)
    agrees(backend, y, oracle.lrn(x_host.astype(float), size, 1.3, beta, 1.5)[0], storage)
    backend.lrn_across_backward(x, None, None, dy, dx, size, 1.3, beta, 1.5)
    expected = oracle.lrn_gradient(x_host.astype(float), dy_host.astype(float), size, 1.3, beta, 1.5)
    agrees(backend, dx, expected, storage)


# -- random numbers ---------------------------------------------------------------------------------------


@storages
@some
@given(shape=st.lists(SIZES, min_size=1, max_size=4), first_sample=st.sampled_from([0, 3, 2**32 - 1]))
def test_dropout(backend: Backend, storage: str, shape: list[int], first_sample: int) -> None:
    """The elements whose documented random number is at least the ratio are kept, wherever the counter lies."""
    x, values = stored(backend, 1, tuple(shape), storage)
    stream = RandomStream(2**40 + 5, 0xDEADBEEF)
    chances = oracle.random_uniform(tuple(shape), 2**40 + 5, 0xDEADBEEF, 7, first_sample)
    expected = rounded(np.where(chances >= 0.4, values * np.float32(1 / 0.6), 0).astype(np.float32), storage)
    on_device = checks.place(backend, np.array([7, first_sample], np.uint64), "uint64")
    for counter in ((7, first_sample), on_device):
        out = checks.dirty(backend, tuple(shape), storage)
        backend.dropout(x, out, 0.4, stream, counter)
        assert np.array_equal(backend.to_host(out), expected)
    uniform = checks.dirty(backend, tuple(shape))
    backend.random_uniform(uniform, stream, on_device)
    assert np.array_equal(backend.to_host(uniform), chances)
    backend.dropout(x, x, 0.4, stream, on_device)
    assert np.array_equal(backend.to_host(x), expected)


# -- graphs -----------------------------------------------------------------------------------------------


def everything(backend: Backend) -> tuple[Callable[[], None], list[Any]]:
    """Work that calls the primitives in all the ways that need memory of their own, and what it writes."""
    shape = (6, 16, 8, 8)
    x, dy = (stored(backend, seed, shape, "float16")[0] for seed in (1, 2))
    rows, labels = stored(backend, 3, (4, 5, 6), "float32")[0], checks.place(backend, np.ones((4, 6)))
    across, gain = checks.place(backend, np.ones((6, 8, 8))), stored(backend, 4, (16, 8), "float32")[0]
    results = [checks.dirty(backend, shape, "bfloat16") for _ in range(4)] + [checks.dirty(backend, shape)]
    y, dx, wide, dropped, softmax = results
    pooled, mask = checks.dirty(backend, (6, 16, 4, 4), "float16"), checks.dirty(backend, (6, 16, 4, 4), "uint8")
    sums, places, total = checks.dirty(backend, (16,)), checks.dirty(backend, (16, 8)), checks.dirty(backend, ())
    flat, probabilities, totals = backend.zeros((6 * 1024,)), backend.zeros((4, 5, 6)), backend.zeros((2,))
    bad, ranks = checks.place(backend, [-1], "int32"), backend.zeros((6, 8, 8))
    counter, halves = checks.place(backend, np.array([1, 2], np.uint64), "uint64"), backend.zeros(shape, "float16")
    window = Geometry((2, 2), (2, 2), (0, 0), (1, 1))

    def work() -> None:
        backend.fill(wide, 0)
        backend.apply(checks.mixed, (x, dy, gain, 0.1), (y,))
        backend.reduce(checks.two, (x, dy), (sums, sums))
        backend.reduce(checks.two, (x, dy), (places, places))
        backend.reduce(checks.two, (x, dy), (total, total))
        backend.copy(x, flat.reshape(shape))
        backend.copy(x[:, 2:10], wide[:, 4:12])
        backend.add(dy, wide)
        backend.pool_max_forward(x, pooled, mask, window)
        backend.pool_max_backward(pooled, mask, halves, window)
        backend.lrn_across_forward(x, halves, None, 5, 1e-2, 0.75, 1.0)
        backend.lrn_across_backward(x, None, None, dy, halves, 5, 1e-2, 0.75, 1.0)
        backend.dropout(halves, dropped, 0.5, RandomStream(1, 2), counter)
        backend.copy(halves, dx)
        backend.copy(halves, softmax)
        backend.softmax_forward(softmax, softmax, 2)
        backend.label_ranks(softmax, across, ranks, bad, 1)
        backend.softmax_loss_forward(rows, labels, probabilities, totals, bad, 1, None)
        backend.softmax_loss_backward(probabilities, labels, probabilities, totals, 1, None, 1.0, True)

    return work, [*results, pooled, mask, sums, places, total, flat, probabilities, totals, ranks, halves]


def test_everything_can_be_captured(backend: Any) -> None:
    """A second run neither allocates nor waits; a graph of it computes the same, also after others needed memory."""
    work, results = everything(backend)
    work()
    expected = [backend.to_host(array) for array in results]
    backend.stream.begin_capture()
    work()
    graph = backend.stream.end_capture()
    for array in results:
        backend.fill(array, 55)
    large = backend.zeros((300, 2000))
    backend.reduce(checks.two, (large, large), (backend.zeros((2000,)), backend.zeros((2000,))))
    backend.softmax_forward(backend.zeros((7, 40, 30, 31)), backend.zeros((7, 40, 30, 31)), 2)
    for _ in range(2):
        graph.launch(backend.stream)
    for ours, array in zip(expected, results, strict=True):
        assert np.array_equal(ours, backend.to_host(array))


def test_a_captured_dropout_follows_its_counter(backend: Any) -> None:
    x, out = checks.place(backend, np.ones((8, 64))), backend.zeros((8, 64))
    counter = checks.place(backend, np.array([0, 0], np.uint64), "uint64")
    stream = RandomStream(3, 4)
    backend.dropout(x, out, 0.5, stream, counter)
    backend.stream.begin_capture()
    backend.dropout(x, out, 0.5, stream, counter)
    graph = backend.stream.end_capture()
    for place in [(1, 0), (1, 8), (2, 2**33)]:
        backend.from_host(np.array(place, np.uint64), counter)
        graph.launch(backend.stream)
        chances = oracle.random_uniform((8, 64), 3, 4, *place)
        assert np.array_equal(backend.to_host(out), np.where(chances >= 0.5, 2, 0))
