"""Batch normalisation, and the gradients of ReLU and other activations with that of the bias."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from backend_arrays import close, dirty, normal, to_device

from caffepy.backend import Backend
from caffepy.backend.types import BatchNormState, mask_bytes, memory_order, view
from caffepy.layers.activation import tanh_gradient

ROUNDING = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Allowed distance relative to an array's largest value."""

SHAPES = [
    (2, 1, 1, 1),
    (1, 3, 1, 1),
    (1, 3, 7, 5),
    (4, 7, 5, 5),
    (2, 33, 3, 3),
    (3, 8, 4, 4),
    (5, 20, 6, 6),
    (3, 36, 5, 3),
    (2, 64, 9, 7),
    (1, 2048, 2, 2),
    (16, 256, 7, 7),
    (2, 520, 3, 3),
    (70, 5),
    (64, 500),
    (1, 7),
    (130, 64),
    (3, 6, 5),
    (40, 3, 70),
    (2, 4, 3, 2, 3),
    (7, 1, 50, 50),
    (3, 1, 11),
]
"""One channel and many; no multiple of 8; batch 1; images of one pixel; channels with neighbours of their own."""

LARGE = [
    (8, 64, 56, 56),
    (7, 48, 61, 59),
    (3, 2048, 14, 14),
    (300, 1000),
    (2, 1, 512, 513),
    (16, 5, 7000),
    (4, 64, 40, 40),
    (7, 48, 31, 29),
    (3, 1000, 9, 9),
    (2, 5, 201, 203),
]
"""More than one block adds up each channel."""

DOUBTFUL = 1e-3
"""Distance from 0 within which rounding may decide whether a ReLU is on."""


def spread(values: Any, rank: int) -> Any:
    """An array of shape (C,) for broadcasting against (N, C, ...), float64."""
    return np.asarray(values, np.float64).reshape((1, -1) + (1,) * (rank - 2))


def over(rank: int) -> tuple[int, ...]:
    """All axes but the channels'."""
    return (0, *range(2, rank))


def rounded_to_device(backend: Backend, host: Any, dtype: str) -> tuple[Any, Any]:
    """The numbers on the backend, and as float64 what is left of them in that dtype."""
    array = to_device(backend, host, dtype)
    return array, backend.to_host(array).astype(np.float64)


def pack(bits: Any) -> Any:
    """A mask: one bit an element in memory order."""
    ordered = memory_order(bits)
    mask = np.zeros(mask_bytes(bits.size), np.uint8)
    packed = np.packbits(ordered.reshape(-1), bitorder="little")
    mask[: packed.size] = packed
    return mask


def unpack(mask: Any, shape: tuple[int, ...]) -> Any:
    """The bits of a mask as booleans in logical order."""
    bits = np.unpackbits(mask, bitorder="little")[: int(np.prod(shape))].astype(bool)
    return view(bits, shape)


@dataclass
class Statistics:
    """A `BatchNormState` on the backend beside the numbers in it."""

    device: BatchNormState
    host: dict[str, Any]

    def before_relu(self, x: Any) -> Any:
        """(x - mean) * inverse * scale + bias."""
        mean, inverse, scale, bias = (spread(self.host[k], x.ndim) for k in ("mean", "inverse", "scale", "bias"))
        return (x - mean) * inverse * scale + bias


def statistics(backend: Backend, channels: int, count: float = 3.0) -> Statistics:
    """Random numbers for every array, as a net in training has them."""
    names = ("mean", "inverse", "scale", "bias", "sum_mean", "sum_variance")
    host = {name: normal(20 + k, (channels,)) for k, name in enumerate(names)}
    host["inverse"] = np.abs(host["inverse"]) + np.float32(0.5)
    host["sum_variance"] = np.abs(host["sum_variance"]) + np.float32(0.1)
    host["count"] = np.full((1,), count, np.float32)
    arrays = {name: to_device(backend, value) for name, value in host.items()}
    return Statistics(BatchNormState(**arrays, epsilon=1e-5, fraction=0.9), host)


# -- statistics -------------------------------------------------------------------------------------------


def check_measure(backend: Backend, shape: tuple[int, ...], dtype: str, offset: float = 0.0) -> None:
    """Mean, deviation and running sums; the same input gives the same bits."""
    channels, rank = shape[1], len(shape)
    deviation = 0.5 + np.abs(normal(3, (channels,)))
    host = normal(1, shape) * spread(deviation, rank) + spread(normal(2, (channels,)), rank) + offset
    x, kept = rounded_to_device(backend, host.astype(np.float32), dtype)
    bits = []
    for _ in range(2):
        s = statistics(backend, channels)
        backend.batch_norm_measure(x, s.device)
        bits.append(np.concatenate([backend.to_host(a) for a in _measured(s.device)]))
    assert np.array_equal(*bits)
    _check_measured(backend, s, kept.mean(axis=over(rank)), kept.var(axis=over(rank)), kept.size // channels)


def _measured(n: BatchNormState) -> tuple[Any, ...]:
    return n.mean, n.inverse, n.sum_mean, n.sum_variance, n.count


def _check_measured(backend: Backend, s: Statistics, mean: Any, variance: Any, elements: int) -> None:
    n = s.device
    correction = elements / (elements - 1) if elements > 1 else 1.0
    close(backend.to_host(n.mean), mean, 2e-6)
    close(backend.to_host(n.inverse), 1 / np.sqrt(variance + n.epsilon), 1e-5)
    close(backend.to_host(n.sum_mean), 0.9 * s.host["sum_mean"].astype(float) + mean, 2e-6)
    close(backend.to_host(n.sum_variance), 0.9 * s.host["sum_variance"].astype(float) + correction * variance)
    close(backend.to_host(n.count), 0.9 * s.host["count"].astype(float) + 1)


def check_measure_sums(backend: Backend, channels: int, elements: int) -> None:
    """The same from the sums of x and of x^2."""
    mean, variance = normal(1, (channels,)).astype(float), np.abs(normal(2, (channels,))).astype(float) + 0.5
    s = statistics(backend, channels)
    sums = np.stack([mean * elements, (variance + mean**2) * elements]).astype(np.float32)
    backend.batch_norm_measure_sums(to_device(backend, sums), elements, s.device)
    _check_measured(backend, s, mean, variance, elements)


def check_load(backend: Backend, channels: int, count: float) -> None:
    """Stored statistics; an untrained net has a count of 0."""
    s = statistics(backend, channels, count)
    backend.batch_norm_load(s.device)
    share = 1 / count if count else 0.0
    close(backend.to_host(s.device.mean), s.host["sum_mean"].astype(float) * share)
    expected = 1 / np.sqrt(s.host["sum_variance"].astype(float) * share + s.device.epsilon)
    close(backend.to_host(s.device.inverse), expected)


@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_measure(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    check_measure(backend, shape, dtype)


@pytest.mark.parametrize("offset", [1e3, -1e4])
@pytest.mark.parametrize("shape", [(16, 12, 9, 9), *LARGE])
def test_measure_where_the_mean_is_large(backend: Backend, shape: tuple[int, ...], offset: float) -> None:
    check_measure(backend, shape, "float32", offset)


def test_measure_where_the_first_numbers_are_far_away(backend: Backend) -> None:
    host = normal(1, (8, 64, 56, 56)) + 100
    host[0, :, 0] = 0
    n = BatchNormState(*(backend.zeros((64,)) for _ in range(6)), backend.zeros((1,)), epsilon=1e-5, fraction=0.9)
    backend.batch_norm_measure(to_device(backend, host), n)
    exact = host.astype(float)
    close(backend.to_host(n.mean), exact.mean(axis=(0, 2, 3)), 1e-6)
    close(backend.to_host(n.inverse), 1 / np.sqrt(exact.var(axis=(0, 2, 3)) + 1e-5), 1e-5)


@pytest.mark.parametrize(("channels", "elements"), [(1, 1), (7, 20), (64, 3000), (2048, 12544)])
def test_measure_sums(backend: Backend, channels: int, elements: int) -> None:
    check_measure_sums(backend, channels, elements)


@pytest.mark.parametrize("channels", [5, 33])
def test_sums_that_overflowed_have_no_deviation(backend: Backend, channels: int) -> None:
    """A channel whose squares are infinite is not taken for one of an infinite mean."""
    sums = np.ones((2, channels), np.float32)
    sums[:, 0] = np.inf
    state = statistics(backend, channels)
    backend.batch_norm_measure_sums(to_device(backend, sums), 12, state.device)
    inverse = backend.to_host(state.device.inverse)
    assert np.isnan(inverse[0]) and np.isfinite(inverse[1:]).all()


@pytest.mark.parametrize("count", [0.0, 7.5])
@pytest.mark.parametrize("channels", [1, 33, 2048])
def test_load(backend: Backend, channels: int, count: float) -> None:
    check_load(backend, channels, count)


# -- forward and backward ---------------------------------------------------------------------------------


def check_forward(
    backend: Backend,
    shape: tuple[int, ...],
    dtype: str,
    residual: bool,
    relu: bool,
    mask: bool,
    in_place: bool = False,
    to: str = "",
) -> None:
    """y and the mask."""
    s = statistics(backend, shape[1])
    x, host = rounded_to_device(backend, normal(1, shape), dtype)
    other, other_host = rounded_to_device(backend, normal(2, shape), dtype)
    y = x if in_place else dirty(backend, shape, to or dtype)
    bits = dirty(backend, (mask_bytes(x.size),), "uint8") if mask else None
    backend.batch_norm_forward(x, s.device, y, other if residual else None, relu, bits)
    expected = s.before_relu(host) + (other_host if residual else 0.0)
    if mask:
        sure = np.abs(expected) > DOUBTFUL
        assert np.array_equal(unpack(backend.to_host(bits), shape)[sure], (expected > 0)[sure])
    close(backend.to_host(y), np.maximum(expected, 0) if relu else expected, ROUNDING[to or dtype])


def check_backward(
    backend: Backend,
    shape: tuple[int, ...],
    dtype: str,
    sources: int = 1,
    relu: bool = False,
    mask: bool = False,
    total: str = "",
    gradients: str = "",
) -> None:
    """Both passes; `total` is where g goes: nowhere, to an array of its "own" or to the "first" or "last" dy."""
    s = statistics(backend, shape[1])
    x, host = rounded_to_device(backend, normal(1, shape), dtype)
    before = s.before_relu(host)
    on = normal(5, shape) > 0 if mask else before > 0
    doubtful = np.abs(before) < DOUBTFUL
    pairs = [
        rounded_to_device(backend, np.where(doubtful, 0, normal(10 + k, shape)), gradients or dtype)
        for k in range(sources)
    ]
    dys = [array for array, _ in pairs]
    g = sum(values for _, values in pairs) * (on if relu else 1.0)
    where = {"": None, "own": dirty(backend, shape, gradients or dtype), "first": dys[0], "last": dys[-1]}[total]
    sums = dirty(backend, (shape[1],)), dirty(backend, (shape[1],))
    bits = to_device(backend, pack(on), "uint8") if mask else None
    backend.batch_norm_backward_sums(x, dys, s.device, sums, relu, bits, where)
    normal_x = (host - spread(s.host["mean"], host.ndim)) * spread(s.host["inverse"], host.ndim)
    elements, scale = host.size // shape[1], np.abs(g).sum(axis=over(g.ndim)).max(initial=1)
    # More than four are added up in two launches, and the first one's sum is rounded to the gradients' dtype.
    rounding = ROUNDING[gradients or dtype] * (3 if sources > 4 else 1)
    limit = (1e-5 if sources <= 4 else max(1e-5, rounding)) * scale
    np.testing.assert_allclose(backend.to_host(sums[0]), (g * normal_x).sum(axis=over(g.ndim)), rtol=1e-5, atol=limit)
    np.testing.assert_allclose(backend.to_host(sums[1]), g.sum(axis=over(g.ndim)), rtol=1e-5, atol=limit)
    if where is not None:
        close(backend.to_host(where), g, rounding)
        g = backend.to_host(where).astype(np.float64)
    again = relu and where is None and not mask
    dy = dys[0] if where is None else where
    g = g if again or where is not None or not relu else pairs[0][1]
    dx = dirty(backend, shape, gradients or dtype)
    backend.batch_norm_backward_data(x, dy, s.device, sums, dx, relu=again)
    sum_dy_x, sum_dy = (spread(backend.to_host(a), host.ndim) for a in sums)
    factor = spread(s.host["scale"], host.ndim) * spread(s.host["inverse"], host.ndim)
    expected = factor * (g - (sum_dy + normal_x * sum_dy_x) / elements)
    close(backend.to_host(dx), expected, ROUNDING[gradients or dtype])
    backend.batch_norm_backward_data(x, dy, s.device, sums, dy, relu=again)
    close(backend.to_host(dy), expected, ROUNDING[gradients or dtype])


@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_forward(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    check_forward(backend, shape, dtype, False, False, False)
    check_forward(backend, shape, dtype, True, True, True)


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 33, 3, 3), (64, 5), (3, 6, 5), (7, 48, 31, 29)])
def test_forward_combinations(
    backend: Backend, dtype: str, shape: tuple[int, ...], residual: bool, relu: bool, mask: bool, in_place: bool
) -> None:
    check_forward(backend, shape, dtype, residual, relu, mask, in_place)


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("shape", [(3, 8, 4, 4), (2, 33, 3, 3), (64, 5)])
def test_forward_with_relu_passes_nan_on(
    backend: Backend, dtype: str, shape: tuple[int, ...], residual: bool, mask: bool
) -> None:
    state, x = statistics(backend, shape[1]), normal(1, shape)
    x.reshape(-1)[::7] = np.nan
    extra = to_device(backend, normal(2, shape), dtype) if residual else None
    bits = backend.zeros((mask_bytes(x.size),), "uint8") if mask else None
    y = dirty(backend, shape, dtype)
    backend.batch_norm_forward(to_device(backend, x, dtype), state.device, y, extra, True, bits)
    found = backend.to_host(y)
    assert np.array_equal(np.isnan(found), np.isnan(x))
    assert (found[~np.isnan(x)] >= 0).all()


@pytest.mark.parametrize("shape", SHAPES + LARGE)
def test_backward(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    check_backward(backend, shape, dtype)
    check_backward(backend, shape, dtype, relu=True)
    check_backward(backend, shape, dtype, 2, relu=True, mask=True, total="first")


@pytest.mark.parametrize(("relu", "mask"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(
    ("sources", "total"),
    [
        (1, ""),
        (1, "own"),
        (1, "first"),
        (2, "own"),
        (2, "last"),
        (3, "last"),
        (4, "own"),
        (4, "first"),
        (5, "own"),
        (5, "first"),
        (6, "last"),
        (6, "own"),
        (9, "own"),
        (12, "first"),
    ],
)
@pytest.mark.parametrize("shape", [(4, 7, 5, 5), (4, 16, 9, 9), (7, 48, 31, 29)])
def test_backward_combinations(
    backend: Backend, dtype: str, shape: tuple[int, ...], sources: int, total: str, relu: bool, mask: bool
) -> None:
    check_backward(backend, shape, dtype, sources, relu, mask, total)


@pytest.mark.parametrize("shape", [(4, 16, 9, 9), (4, 12, 9, 9), (2, 33, 3, 3)])
def test_gradients_may_have_another_dtype(
    backend: Backend, dtype: str, other_dtype: str, shape: tuple[int, ...]
) -> None:
    check_forward(backend, shape, dtype, False, True, True, to=other_dtype)
    check_backward(backend, shape, dtype, 2, relu=True, total="own", gradients=other_dtype)
    check_relu_backward(backend, shape, dtype, bias=True, gradients=other_dtype)
    check_activation_backward(backend, shape, dtype, bias=True, gradients=other_dtype)


def test_forward_and_backward_agree_on_where_the_relu_was_on(backend: Backend, dtype: str) -> None:
    """Numbers around 0 as well: the recomputed ReLU is the mask's."""
    shape = (4, 64, 28, 28)
    s = statistics(backend, shape[1])
    for array in (s.device.mean, s.device.bias):
        backend.fill(array, 0.0)
    x, _ = rounded_to_device(backend, normal(1, shape) * 1e-3, dtype)
    y, mask = dirty(backend, shape, dtype), dirty(backend, (mask_bytes(x.size),), "uint8")
    backend.batch_norm_forward(x, s.device, y, relu=True, mask=mask)
    ones = dirty(backend, shape, dtype)
    results = []
    for bits in (mask, None):
        total, sums = dirty(backend, shape, dtype), [dirty(backend, (shape[1],)) for _ in range(2)]
        backend.batch_norm_backward_sums(x, [ones], s.device, sums, True, bits, total)
        results.append([backend.to_host(a) for a in (total, *sums)])
    for masked, recomputed in zip(*results, strict=True):
        assert np.array_equal(masked, recomputed)


@pytest.mark.parametrize("shape", [(0, 8, 5, 5), (0, 3), (2, 3, 0)])
def test_arrays_without_elements(backend: Backend, shape: tuple[int, ...]) -> None:
    s = statistics(backend, shape[1])
    x, sums = backend.zeros(shape), [dirty(backend, (shape[1],)) for _ in range(3)]
    backend.batch_norm_measure(x, s.device)
    backend.batch_norm_forward(x, s.device, x, x, True, backend.zeros((mask_bytes(0),), "uint8"))
    backend.batch_norm_backward_sums(x, [x], s.device, sums[:2], True)
    backend.batch_norm_backward_data(x, x, s.device, sums[:2], x, True)
    backend.relu_backward(x, x, x, sums[2], False)
    backend.add_n([x, x], x)
    for zero in (s.device.mean, *sums):
        assert not backend.to_host(zero).any()


@pytest.mark.parametrize("offset", [1, 2, 4, 6])
def test_views_of_flat_buffers_at_any_offset(backend: Backend, dtype: str, offset: int) -> None:
    buffer = to_device(backend, normal(1, (40000,)), dtype)
    x, s = backend.view(buffer[offset : offset + 9 * 64 * 25], (9, 64, 5, 5)), statistics(backend, 64)
    y = dirty(backend, x.shape, dtype)
    backend.batch_norm_measure(x, s.device)
    backend.batch_norm_forward(x, s.device, y)
    host = backend.to_host(x).astype(float)
    mean, variance = host.mean(axis=(0, 2, 3)), host.var(axis=(0, 2, 3))
    s.host.update(mean=mean, inverse=1 / np.sqrt(variance + 1e-5))
    close(backend.to_host(y), s.before_relu(host), ROUNDING[dtype])


# -- gradients of activations -----------------------------------------------------------------------------


def close_sums(found: Any, summands: np.ndarray, start: Any) -> None:
    """The sums for each channel, added to what was there."""
    axes = over(summands.ndim)
    limit = 1e-5 * np.abs(summands).sum(axis=axes).max()
    np.testing.assert_allclose(found, summands.sum(axis=axes) + start, rtol=1e-5, atol=limit)


def check_relu_backward(
    backend: Backend, shape: tuple[int, ...], dtype: str, bias: bool, in_place: bool = False, gradients: str = ""
) -> None:
    """dx, and the bias's gradient overwritten and added to."""
    y, host = rounded_to_device(backend, np.maximum(normal(1, shape), 0), dtype)
    dy, dy_host = rounded_to_device(backend, normal(2, shape), gradients or dtype)
    expected = np.where(host > 0, dy_host, 0)
    start = normal(3, (shape[1],)) if bias else None
    for accumulate in (False, True) if bias else (False,):
        dx = dirty(backend, shape, gradients or dtype)
        if in_place:
            backend.copy(dy, dx)
        dbias = to_device(backend, start) if bias else None
        backend.relu_backward(y, dx if in_place else dy, dx, dbias, accumulate)
        assert np.array_equal(backend.to_host(dx), expected)
        if bias:
            close_sums(backend.to_host(dbias), expected, start if accumulate else 0.0)


def check_activation_backward(
    backend: Backend, shape: tuple[int, ...], dtype: str, bias: bool, in_place: bool = False, gradients: str = ""
) -> None:
    """TanH's dx, and the bias's gradient overwritten and added to; channels' sums differ by more than rounding."""
    y, host = rounded_to_device(backend, np.tanh(normal(1, shape)), dtype)
    given = normal(2, shape) + spread(np.arange(shape[1]), len(shape))
    dy, dy_host = rounded_to_device(backend, given, gradients or dtype)
    expected = dy_host * (1 - host * host)
    start = normal(3, (shape[1],)) if bias else None
    for accumulate in (False, True) if bias else (False,):
        dx = dirty(backend, shape, gradients or dtype)
        if in_place:
            backend.copy(dy, dx)
        dbias = to_device(backend, start) if bias else None
        backend.activation_backward(tanh_gradient, y, dx if in_place else dy, dx, dbias, accumulate)
        close(backend.to_host(dx), expected, ROUNDING[gradients or dtype])
        if bias:
            close_sums(backend.to_host(dbias), expected, start if accumulate else 0.0)


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE, (100, 1000), (100, 250), (100, 30), (1, 784), (1000, 8)])
def test_relu_backward(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    check_relu_backward(backend, shape, dtype, bias=True)
    check_relu_backward(backend, shape, dtype, bias=True, in_place=True)
    check_relu_backward(backend, shape, dtype, bias=False)


@pytest.mark.parametrize("shape", [*SHAPES, *LARGE, (100, 1000), (100, 250), (100, 30), (1, 784), (1000, 8)])
def test_activation_backward(backend: Backend, dtype: str, shape: tuple[int, ...]) -> None:
    check_activation_backward(backend, shape, dtype, bias=True)
    check_activation_backward(backend, shape, dtype, bias=True, in_place=True)
    check_activation_backward(backend, shape, dtype, bias=False)
