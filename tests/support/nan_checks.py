"""Checks that NaN passes on through what takes a maximum, for any backend: an overflow must be seen at the end."""

from __future__ import annotations

from typing import Any

import backend_checks as checks
import backend_oracle as oracle
import normalise_checks
import numpy as np
from backend_checks import dirty, normal, to_device

from caffepy.backend import Backend, Channel, Each, Geometry, expression
from caffepy.backend.types import mask_bytes
from caffepy.net.fuse import rectified_with_channel

SHAPES = [(7,), (33, 5), (3, 8, 5, 7), (2, 33, 9, 8), (2, 1, 3, 3)]
POOLINGS = [
    ((2, 5, 9, 8), (4, 4), Geometry((3, 3), (2, 2), (0, 0), (1, 1))),
    ((2, 16, 10, 8), (5, 4), Geometry((3, 3), (2, 2), (0, 0), (1, 1))),
    ((2, 7, 6, 6), (6, 6), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    ((3, 20, 24, 24), (12, 12), Geometry((2, 2), (2, 2), (0, 0), (1, 1))),
    ((1, 4, 13, 11), (1, 1), Geometry((13, 11), (1, 1), (0, 0), (1, 1))),
]
"""(shape, size of y, windows); the second has windows that end outside of the image."""


@expression
def extremes(x: Each, y: Each) -> tuple[Each, Each, Each, Each]:
    return max(x, y), min(x, y), max(y, x), min(x, 0.5)


@expression
def extremes_with_channel(x: Each, c: Channel) -> tuple[Each, Each]:
    return max(x, c), min(c, x)


def with_nan(host: Any, seed: int = 9, share: float = 0.2) -> Any:
    """The numbers, some of them NaN and some infinite."""
    rng = np.random.default_rng(seed)
    host = np.array(host, np.float32)
    host[rng.random(host.shape) < share] = np.nan
    host[rng.random(host.shape) < 0.1] = np.inf
    host[rng.random(host.shape) < 0.1] = -np.inf
    return host


def check_formulas(backend: Backend, shape: tuple[int, ...], dtype: str = "float32") -> None:
    """min and max, whichever of the two is NaN, in place and not."""
    hosts = [with_nan(np.round(4 * normal(s, shape)) / 4, s) for s in (1, 2)]
    x, y = (to_device(backend, host, dtype) for host in hosts)
    outs = [dirty(backend, shape, dtype) for _ in range(4)]
    backend.apply(extremes, (x, y), outs)
    a, b = hosts
    for out, wanted in zip(
        outs, (np.maximum(a, b), np.minimum(a, b), np.maximum(b, a), np.minimum(a, np.float32(0.5))), strict=True
    ):
        np.testing.assert_array_equal(backend.to_host(out), wanted)
    backend.apply(extremes, (x, y), (x, *outs[1:]))
    np.testing.assert_array_equal(backend.to_host(x), np.maximum(a, b))


def check_channel_formulas(backend: Backend, shape: tuple[int, ...], dtype: str = "float32") -> None:
    """The same with one value for each channel, and the epilogue of a fused InnerProduct and ReLU."""
    x_host, c_host = with_nan(np.round(4 * normal(1, shape)) / 4), with_nan(np.round(4 * normal(2, shape[1:2])) / 4)
    spread = c_host.reshape((1, -1) + (1,) * (len(shape) - 2))
    x, c = to_device(backend, x_host, dtype), to_device(backend, c_host)
    larger, smaller = dirty(backend, shape, dtype), dirty(backend, shape, dtype)
    backend.apply(extremes_with_channel, (x, c), (larger, smaller), 1)
    np.testing.assert_array_equal(backend.to_host(larger), np.maximum(x_host, spread))
    np.testing.assert_array_equal(backend.to_host(smaller), np.minimum(x_host, spread))
    backend.apply(rectified_with_channel, (x, c), (x,), 1)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(backend.to_host(x), np.maximum(x_host + spread, 0))


def check_pooling(
    backend: Backend, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry,
    dtype: str = "float32", mask_dtype: str = "int32",
) -> None:  # fmt: skip
    """The first NaN of a window wins, and takes the gradient."""
    host = np.array(np.round(4 * normal(1, x_shape)) / 4, np.float32)
    host[np.random.default_rng(4).random(x_shape) < 0.05] = np.nan
    y_shape = (*x_shape[:2], *y_size)
    expected, places = oracle.pool_max(host, y_shape, geometry)
    y, mask = dirty(backend, y_shape, dtype), dirty(backend, y_shape, mask_dtype)
    backend.pool_max_forward(to_device(backend, host, dtype), y, mask, geometry)
    np.testing.assert_array_equal(backend.to_host(y), expected.astype(np.float32))
    dy, dx = np.round(normal(2, y_shape)), dirty(backend, x_shape, dtype)
    backend.pool_max_backward(to_device(backend, dy, dtype), mask, dx, geometry)
    np.testing.assert_array_equal(backend.to_host(dx), oracle.pool_max_gradient(dy, places, x_shape))


def check_softmax_loss(backend: Backend, shape: tuple[int, ...], axis: int) -> None:
    """One score that is NaN makes the loss NaN."""
    scores = normal(1, shape)
    scores[(0,) * len(shape)] = np.nan
    labels = np.zeros(shape[:axis] + shape[axis + 1 :], np.float32)
    totals, bad = dirty(backend, (2,)), to_device(backend, [-1], "int32")
    probabilities = dirty(backend, shape)
    backend.softmax_loss_forward(
        to_device(backend, scores), to_device(backend, labels), probabilities, totals, bad, axis, None
    )  # fmt: skip
    assert np.isnan(backend.to_host(totals)[0])
    assert backend.to_host(totals)[1] == labels.size


def check_statistics_of_sums(backend: Backend, channels: int) -> None:
    """A channel whose squares overflowed has no deviation, and is not made one of an infinite mean."""
    sums = np.ones((2, channels), np.float32)
    sums[:, 0] = np.inf
    state = normalise_checks.statistics(backend, channels)
    backend.batch_norm_measure_sums(to_device(backend, sums), 12, state.device)
    inverse = backend.to_host(state.device.inverse)
    assert np.isnan(inverse[0]) and np.isfinite(inverse[1:]).all()


def check_normalised(backend: Backend, shape: tuple[int, ...], dtype: str, residual: bool, mask: bool) -> None:
    """Normalisation with ReLU."""
    state = normalise_checks.statistics(backend, shape[1])
    x = normal(1, shape)
    x.reshape(-1)[::7] = np.nan
    extra = to_device(backend, normal(2, shape), dtype) if residual else None
    bits = backend.zeros((mask_bytes(x.size),), "uint8") if mask else None
    y = dirty(backend, shape, dtype)
    backend.batch_norm_forward(to_device(backend, x, dtype), state.device, y, extra, True, bits)
    found = backend.to_host(y)
    assert np.array_equal(np.isnan(found), np.isnan(x))
    assert (found[~np.isnan(x)] >= 0).all()


def check_convolution(backend: Backend, x_shape: tuple[int, ...], outputs: int, geometry: Geometry, dtype: str) -> None:
    """A convolution with ReLU, as it is chosen: NaN in one image is in every output that it reaches."""
    x = normal(1, x_shape)
    x[(0,) * len(x_shape)] = np.nan
    weights = np.abs(normal(2, (outputs, x_shape[1] // geometry.group, *geometry.kernel))) + np.float32(0.1)
    plan = backend.plan_convolution(x_shape, weights.shape, geometry, dtype)
    y_shape = (x_shape[0], outputs, *(
        checks.spatial_output(*w)
        for w in zip(x_shape[2:], geometry.kernel, geometry.stride, geometry.pad, geometry.dilation, strict=True)
    ))  # fmt: skip
    on_x, on_weights = to_device(backend, x, dtype), to_device(backend, weights, dtype)
    for bias in (None, to_device(backend, normal(3, (outputs,)))):
        y = dirty(backend, y_shape, dtype)
        plan.forward(on_x, on_weights, bias, y, relu=True)
        found = backend.to_host(y)
        reached = found[(0, slice(0, outputs // geometry.group), *(0,) * len(geometry.kernel))]
        assert np.isnan(reached).all()
        assert (found[np.isfinite(found)] >= 0).all()
