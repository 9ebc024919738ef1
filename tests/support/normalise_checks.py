"""Checks of batch normalisation, ReLU's gradient and sums of arrays: any backend and dtype, against float64 NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from backend_checks import close, dirty, normal, to_device

from caffepy.backend import Backend
from caffepy.backend.layout import memory_order, view
from caffepy.backend.types import BatchNormState, mask_bytes
from caffepy.layers.activation.sigmoid import tanh_gradient

ROUNDING = {"float32": 1e-5, "float16": 2.0**-11, "bfloat16": 2.0**-8}
"""Allowed distance relative to an array's largest value."""

SHAPES = [
    (2, 1, 1, 1), (1, 3, 1, 1), (1, 3, 7, 5), (4, 7, 5, 5), (2, 33, 3, 3), (3, 8, 4, 4), (5, 20, 6, 6), (3, 36, 5, 3),
    (2, 64, 9, 7), (1, 2048, 2, 2), (16, 256, 7, 7), (2, 520, 3, 3), (70, 5), (64, 500), (1, 7), (130, 64), (3, 6, 5),
    (40, 3, 70), (2, 4, 3, 2, 3), (7, 1, 50, 50), (3, 1, 11),
]  # fmt: skip
"""One channel and many; no multiple of 8; batch 1; images of one pixel; channels with neighbours of their own."""

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


# -- forward and backward ---------------------------------------------------------------------------------


def check_forward(
    backend: Backend, shape: tuple[int, ...], dtype: str, residual: bool, relu: bool, mask: bool,
    in_place: bool = False, to: str = "",
) -> None:  # fmt: skip
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
    backend: Backend, shape: tuple[int, ...], dtype: str, sources: int = 1, relu: bool = False, mask: bool = False,
    total: str = "", gradients: str = "",
) -> None:  # fmt: skip
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


# -- activation and sums ----------------------------------------------------------------------------------


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


def check_total(
    backend: Backend, shape: tuple[int, ...], dtype: str, sources: int, at: int | None = None, to: str = ""
) -> None:
    """A sum of several arrays, to an array of its own or to one of them."""
    pairs = [rounded_to_device(backend, normal(k, shape), dtype) for k in range(sources)]
    destination = dirty(backend, shape, to or dtype) if at is None else pairs[at][0]
    backend.add_n([array for array, _ in pairs], destination)
    close(backend.to_host(destination), sum(values for _, values in pairs), ROUNDING[to or dtype])
