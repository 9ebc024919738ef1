"""Batch normalisation, ReLU's gradient and sums of arrays on the GPU, in each dtype, against float64 NumPy."""

from __future__ import annotations

from typing import Any

import normalise_checks as checks
import numpy as np
import pytest
from backend_checks import close, dirty, normal, to_device
from normalise_checks import SHAPES

from caffepy.backend import Backend
from caffepy.backend.types import DTYPES
from caffepy.layers.activation.sigmoid import tanh_gradient

LARGE = [(8, 64, 56, 56), (7, 48, 61, 59), (3, 2048, 14, 14), (300, 1000), (2, 1, 512, 513), (16, 5, 7000)]
"""More than one block adds up each channel."""

in_each_storage = pytest.mark.parametrize("dtype", DTYPES)


@in_each_storage
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_measure(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    checks.check_measure(backend, shape, dtype)


@pytest.mark.parametrize("offset", [1e3, -1e4])
@pytest.mark.parametrize("shape", [(16, 12, 9, 9), *LARGE])
def test_measure_where_the_mean_is_large(backend: Backend, shape: tuple[int, ...], offset: float) -> None:
    checks.check_measure(backend, shape, "float32", offset)


def test_measure_where_the_first_numbers_are_far_away(backend: Backend) -> None:
    from caffepy.backend.types import BatchNormState

    host = normal(1, (8, 64, 56, 56)) + 100
    host[0, :, 0] = 0
    arrays = [backend.zeros((64,)) for _ in range(6)]
    n = BatchNormState(*arrays, backend.zeros((1,)), epsilon=1e-5, fraction=0.9)
    backend.batch_norm_measure(to_device(backend, host), n)
    exact = host.astype(float)
    close(backend.to_host(n.mean), exact.mean(axis=(0, 2, 3)), 1e-6)
    close(backend.to_host(n.inverse), 1 / np.sqrt(exact.var(axis=(0, 2, 3)) + 1e-5), 1e-5)


@pytest.mark.parametrize(("channels", "elements"), [(1, 1), (7, 20), (64, 3000), (2048, 12544)])
def test_measure_sums(backend: Backend, channels: int, elements: int) -> None:
    checks.check_measure_sums(backend, channels, elements)


@pytest.mark.parametrize("count", [0.0, 7.5])
@pytest.mark.parametrize("channels", [1, 33, 2048])
def test_load(backend: Backend, channels: int, count: float) -> None:
    checks.check_load(backend, channels, count)


@in_each_storage
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_forward(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    checks.check_forward(backend, shape, dtype, False, False, False)
    checks.check_forward(backend, shape, dtype, True, True, True)


@in_each_storage
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 33, 3, 3), (64, 5), (3, 6, 5)])
def test_forward_combinations(
    backend: Backend, shape: tuple[int, ...], residual: bool, relu: bool, mask: bool, in_place: bool, dtype: str
) -> None:
    checks.check_forward(backend, shape, dtype, residual, relu, mask, in_place)


@in_each_storage
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_backward(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    checks.check_backward(backend, shape, dtype)
    checks.check_backward(backend, shape, dtype, relu=True)
    checks.check_backward(backend, shape, dtype, 2, relu=True, mask=True, total="first")


@in_each_storage
@pytest.mark.parametrize(("relu", "mask"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("sources", "total"),
    [(1, ""), (1, "own"), (1, "first"), (2, "own"), (3, "last"), (4, "own"), (4, "first"), (5, "own"), (5, "first"),
     (6, "last"), (9, "own"), (12, "first")],
)  # fmt: skip
@pytest.mark.parametrize("shape", [(4, 7, 5, 5), (4, 16, 9, 9)])
def test_backward_combinations(
    backend: Backend, shape: tuple[int, ...], sources: int, total: str, relu: bool, mask: bool, dtype: str
) -> None:
    checks.check_backward(backend, shape, dtype, sources, relu, mask, total)


@in_each_storage
@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_relu_backward(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    checks.check_relu_backward(backend, shape, dtype, bias=True)
    checks.check_relu_backward(backend, shape, dtype, bias=True, in_place=True)
    checks.check_relu_backward(backend, shape, dtype, bias=False)


@in_each_storage
@pytest.mark.parametrize("shape", [*SHAPES, *LARGE, (100, 1000), (100, 250), (100, 30), (1, 784), (1000, 8)])
def test_activation_backward(backend: Backend, shape: tuple[int, ...], dtype: str) -> None:
    checks.check_activation_backward(backend, shape, dtype, bias=True)
    checks.check_activation_backward(backend, shape, dtype, bias=True, in_place=True)
    checks.check_activation_backward(backend, shape, dtype, bias=False)


@in_each_storage
@pytest.mark.parametrize(
    ("sources", "at"), [(2, None), (2, 0), (3, 2), (5, None), (8, 3), (9, None), (17, None), (9, 8)]
)
@pytest.mark.parametrize("shape", [(3, 5, 4, 4), (4, 64, 28, 28), (7,), (3, 3, 3)])
def test_total(backend: Backend, shape: tuple[int, ...], sources: int, at: int | None, dtype: str) -> None:
    if dtype == "float32" or sources <= 8:
        checks.check_total(backend, shape, dtype, sources, at)


@pytest.mark.parametrize(("one", "other"), [("float32", "float16"), ("bfloat16", "float32"), ("float16", "bfloat16")])
@pytest.mark.parametrize("shape", [(4, 16, 9, 9), (4, 12, 9, 9), (2, 33, 3, 3)])
def test_storages_may_differ(backend: Backend, shape: tuple[int, ...], one: str, other: str) -> None:
    checks.check_forward(backend, shape, one, False, True, True, to=other)
    checks.check_backward(backend, shape, one, 2, relu=True, total="own", gradients=other)
    checks.check_relu_backward(backend, shape, one, bias=True, gradients=other)
    checks.check_activation_backward(backend, shape, one, bias=True, gradients=other)
    checks.check_total(backend, shape, one, 3, to=other)


@in_each_storage
def test_forward_and_backward_agree_on_where_the_relu_was_on(backend: Backend, dtype: str) -> None:
    """Numbers around 0 as well: the recomputed ReLU is the mask's."""
    shape = (4, 64, 28, 28)
    s = checks.statistics(backend, shape[1])
    for name, value in (("mean", 0.0), ("bias", 0.0)):
        backend.fill(getattr(s.device, name), value)
    x, _ = checks.rounded_to_device(backend, normal(1, shape) * 1e-3, dtype)
    y, mask = dirty(backend, shape, dtype), dirty(backend, (checks.mask_bytes(x.size),), "uint8")
    backend.batch_norm_forward(x, s.device, y, relu=True, mask=mask)
    ones = dirty(backend, shape, dtype)
    results = []
    for bits in (mask, None):
        total = dirty(backend, shape, dtype)
        sums = dirty(backend, (shape[1],)), dirty(backend, (shape[1],))
        backend.batch_norm_backward_sums(x, [ones], s.device, sums, True, bits, total)
        results.append([backend.to_host(a) for a in (total, *sums)])
    for masked, recomputed in zip(*results, strict=True):
        assert np.array_equal(masked, recomputed)


@pytest.mark.parametrize("shape", [(0, 8, 5, 5), (0, 3), (2, 3, 0)])
def test_arrays_without_elements(backend: Backend, shape: tuple[int, ...]) -> None:
    s = checks.statistics(backend, shape[1])
    x, sums = backend.zeros(shape), [dirty(backend, (shape[1],)) for _ in range(3)]
    backend.batch_norm_measure(x, s.device)
    backend.batch_norm_forward(x, s.device, x, x, True, backend.zeros((checks.mask_bytes(0),), "uint8"))
    backend.batch_norm_backward_sums(x, [x], s.device, sums[:2], True)
    backend.batch_norm_backward_data(x, x, s.device, sums[:2], x, True)
    backend.relu_backward(x, x, x, sums[2], False)
    backend.add_n([x, x], x)
    for zero in (s.device.mean, *sums):
        assert not backend.to_host(zero).any()


def test_slices_of_flat_buffers_at_any_offset(backend: Backend) -> None:
    buffer = to_device(backend, normal(1, (40000,)), "float16")
    for offset in (1, 2, 4, 6):
        x = backend.view(buffer[offset : offset + 9 * 64 * 25], (9, 64, 5, 5))
        s = checks.statistics(backend, 64)
        y = dirty(backend, x.shape, "float16")
        backend.batch_norm_measure(x, s.device)
        backend.batch_norm_forward(x, s.device, y)
        host = backend.to_host(x).astype(float)
        mean, variance = host.mean(axis=(0, 2, 3)), host.var(axis=(0, 2, 3))
        s.host.update(mean=mean, inverse=1 / np.sqrt(variance + 1e-5))
        close(backend.to_host(y), s.before_relu(host), checks.ROUNDING["float16"])


@in_each_storage
def test_a_captured_graph_gives_the_same_bits_each_time(backend: Any, dtype: str) -> None:
    shape = (8, 64, 56, 56)
    x, _ = checks.rounded_to_device(backend, normal(1, shape), dtype)
    dy, _ = checks.rounded_to_device(backend, normal(2, shape), dtype)
    s = checks.statistics(backend, 64)
    y, dx, dbias = dirty(backend, shape, dtype), dirty(backend, shape, dtype), dirty(backend, (64,))
    sums = dirty(backend, (64,)), dirty(backend, (64,))

    def work() -> None:
        backend.batch_norm_measure(x, s.device)
        backend.batch_norm_forward(x, s.device, y, relu=True)
        backend.batch_norm_backward_sums(x, [dy], s.device, sums, True)
        backend.batch_norm_backward_data(x, dy, s.device, sums, dx, True)
        backend.relu_backward(y, dy, dx, dbias, False)
        backend.activation_backward(tanh_gradient, y, dx, dx, dbias, True)

    def outcome() -> list[Any]:
        return [backend.to_host(a) for a in (s.device.mean, s.device.inverse, y, *sums, dx, dbias)]

    work()
    eager = outcome()
    graph = backend.capture(work)
    for _ in range(3):
        for array in (y, dx, dbias, *sums):
            backend.fill(array, 5)
        graph.launch()
        for once, again in zip(eager, outcome(), strict=True):
            assert np.array_equal(once, again)
