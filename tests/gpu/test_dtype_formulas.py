"""Formulas and sums over float16 and bfloat16 on the CUDA backend, against float64 of what is stored."""

from __future__ import annotations

import backend_checks as checks
import numpy as np
import pytest
from dtype_checks import agrees, rounded, some, stored
from hypothesis import given

from caffepy.backend import Backend, Channel, Each, Scalar, expression

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
    half, momentum = checks.dirty(backend, shape, "float16"), checks.to_device(backend, np.float32(0.9))
    backend.apply(update, (data, diff, history, rate, decay, momentum), (data, history, half), 0)
    step = 0.9 * h.astype(float) + r[:, None].astype(float) * (g + d[:, None].astype(float) * w)
    checks.close(backend.to_host(history), step)
    checks.close(backend.to_host(data), w - step)
    assert np.array_equal(backend.to_host(half), rounded(backend.to_host(data), "float16"))
