"""Pooling and LRN."""

from __future__ import annotations

from typing import Any

import backend_oracle as oracle
import numpy as np
import pytest
from backend_arrays import TOLERANCE, agrees, close, dirty, normal, rounded, stored, to_device
from hypothesis import given
from hypothesis import strategies as st

from caffepy.backend import Backend, Geometry, LrnWindow
from primitive_checks.strategies import CHANNELS, SIZES, often, poolings, some

POOLINGS = [
    ((2, 8, 13, 12), (6, 6), Geometry((3, 3), (2, 2), (0, 0), (1, 1))),
    ((2, 16, 12, 14), (6, 7), Geometry((2, 2), (2, 2), (0, 0), (1, 1))),
    ((2, 7, 9, 9), (9, 9), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
    ((1, 33, 9, 8), (5, 5), Geometry((3, 3), (2, 2), (1, 1), (1, 1))),
    ((3, 24, 7, 7), (1, 1), Geometry((7, 7), (1, 1), (0, 0), (1, 1))),
    ((2, 40, 15, 16), (1, 1), Geometry((15, 16), (1, 1), (0, 0), (1, 1))),
    ((1, 3, 4, 5), (1, 1), Geometry((4, 5), (1, 1), (0, 0), (1, 1))),
    ((1, 8, 23, 20), (2, 2), Geometry((15, 17), (8, 9), (0, 0), (1, 1))),
    ((2, 4, 14, 14), (4, 4), Geometry((5, 5), (3, 3), (0, 0), (1, 1))),
    ((5, 1, 1, 1), (1, 1), Geometry((1, 1), (1, 1), (0, 0), (1, 1))),
    ((1, 3, 10, 11), (3, 3), Geometry((2, 3), (4, 4), (1, 1), (1, 1))),
    ((9, 20, 17, 17), (9, 9), Geometry((3, 3), (2, 2), (1, 1), (1, 1))),
    ((1, 67, 25, 25), (13, 13), Geometry((3, 3), (2, 2), (1, 1), (1, 1))),
]
"""(shape, size of y, windows)."""


def _mask(backend: Backend, mask_dtype: str, positions: Any, width: int, g: Geometry) -> Any:
    """Positions h * W + w in the plane, or for uint8 numbers within the windows."""
    if mask_dtype == "int32":
        return positions
    rows = np.arange(positions.shape[2])[:, None] * g.stride[0] - g.pad[0]
    columns = np.arange(positions.shape[3]) * g.stride[1] - g.pad[1]
    return (positions // width - rows) * g.kernel[1] + positions % width - columns


def check_pool_max(backend: Backend, dtype: str, host: Any, y_size: tuple[int, int], geometry: Geometry) -> None:
    """Maxima, their places in each kind of mask, and the gradient; the first of equal numbers wins, NaN over all."""
    y_shape = (*host.shape[:2], *y_size)
    expected, positions = oracle.pool_max(host, y_shape, geometry)
    for mask_dtype in sorted({"int32", backend.mask_dtype}):
        if mask_dtype == "uint8" and np.prod(geometry.kernel) > 255:
            continue
        y, mask = dirty(backend, y_shape, dtype), dirty(backend, y_shape, mask_dtype)
        backend.pool_max_forward(to_device(backend, host, dtype), y, mask, geometry)
        np.testing.assert_array_equal(backend.to_host(y), expected.astype(np.float32))
        wanted = _mask(backend, mask_dtype, positions, host.shape[3], geometry)
        assert np.array_equal(backend.to_host(mask), wanted)
        dy, dy_host = stored(backend, 2, y_shape, dtype)
        dx = dirty(backend, host.shape, dtype)
        backend.pool_max_backward(dy, mask, dx, geometry)
        agrees(backend, dx, oracle.pool_max_gradient(dy_host, positions, host.shape), dtype)


@often
@given(case=poolings(), ties=st.booleans())
def test_pool_max(backend: Backend, case: Any, ties: bool) -> None:
    x = normal(1, case[0])
    check_pool_max(backend, "float32", np.round(x) if ties else x, *case[1:])


@some
@given(case=poolings())
def test_pool_max_of_each_dtype(backend: Backend, dtype: str, case: Any) -> None:
    check_pool_max(backend, dtype, rounded(normal(1, case[0]), dtype), *case[1:])


@pytest.mark.parametrize(("x_shape", "y_size", "geometry"), POOLINGS)
def test_pool_max_shapes(
    backend: Backend, dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    check_pool_max(backend, dtype, np.round(normal(1, x_shape)), y_size, geometry)


@pytest.mark.parametrize(
    ("x_shape", "y_size", "geometry"),
    [
        ((2, 5, 9, 8), (4, 4), Geometry((3, 3), (2, 2), (0, 0), (1, 1))),
        ((2, 16, 10, 8), (5, 4), Geometry((3, 3), (2, 2), (0, 0), (1, 1))),  # windows that end outside of the image
        ((2, 7, 6, 6), (6, 6), Geometry((3, 3), (1, 1), (1, 1), (1, 1))),
        ((3, 20, 24, 24), (12, 12), Geometry((2, 2), (2, 2), (0, 0), (1, 1))),
        ((1, 4, 13, 11), (1, 1), Geometry((13, 11), (1, 1), (0, 0), (1, 1))),
        ((2, 85, 5, 6), (2, 2), Geometry((3, 3), (2, 3), (0, 0), (1, 1))),
        ((2, 150, 5, 6), (2, 2), Geometry((3, 3), (2, 3), (0, 0), (1, 1))),
    ],
)
def test_pool_max_passes_nan_on(
    backend: Backend, dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    host = np.array(np.round(4 * normal(1, x_shape)) / 4, np.float32)
    host[np.random.default_rng(4).random(x_shape) < 0.05] = np.nan
    check_pool_max(backend, dtype, host, y_size, geometry)


def check_pool_average(
    backend: Backend, dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    y_shape = (*x_shape[:2], *y_size)
    (x, x_host), (dy, dy_host) = stored(backend, 1, x_shape, dtype), stored(backend, 2, y_shape, dtype)
    y, dx = dirty(backend, y_shape, dtype), dirty(backend, x_shape, dtype)
    backend.pool_average_forward(x, y, geometry)
    agrees(backend, y, oracle.pool_average(x_host.astype(float), y_shape, geometry), dtype)
    backend.pool_average_backward(dy, dx, geometry)
    agrees(backend, dx, oracle.pool_average_gradient(dy_host.astype(float), x_shape, geometry), dtype)


@often
@given(case=poolings())
def test_pool_average(backend: Backend, case: Any) -> None:
    check_pool_average(backend, "float32", *case)


@some
@given(case=poolings())
def test_pool_average_of_each_dtype(backend: Backend, dtype: str, case: Any) -> None:
    check_pool_average(backend, dtype, *case)


WHOLE = [
    (shape, (1, 1), Geometry(shape[2:], (1, 1), (0, 0), (1, 1)))
    for shape in [(2, 33, 4, 7), (1, 70, 1, 3), (3, 1, 5, 5)]
]


@pytest.mark.parametrize(("x_shape", "y_size", "geometry"), POOLINGS + WHOLE)
def test_pool_average_shapes(
    backend: Backend, dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    check_pool_average(backend, dtype, x_shape, y_size, geometry)


def check_lrn(backend: Backend, dtype: str, shape: tuple[int, ...], window: LrnWindow) -> None:
    """Normalisation across channels and its gradient."""
    numbers = window.size, window.alpha, window.beta, window.k
    (x, x_host), (dy, dy_host) = stored(backend, 1, shape, dtype), stored(backend, 2, shape, dtype)
    y, dx = dirty(backend, shape, dtype), dirty(backend, shape, dtype)
    scale = dirty(backend, shape) if backend.keeps_lrn_scale else None
    backend.lrn_across_forward(x, y, scale, window)
    expected, expected_scale = oracle.lrn(x_host.astype(float), *numbers)
    tolerance = max(2e-5, TOLERANCE[dtype])
    close(backend.to_host(y), expected, tolerance)
    if scale is not None:
        close(backend.to_host(scale), expected_scale)
    backend.lrn_across_backward(x, None if scale is None else y, scale, dy, dx, window)
    close(backend.to_host(dx), oracle.lrn_gradient(x_host.astype(float), dy_host.astype(float), *numbers), tolerance)


@often
@given(
    n=SIZES,
    c=CHANNELS,
    size=st.sampled_from([1, 3, 5, 9]),
    beta=st.sampled_from([0.75, 0.5, 1.0, 1.3]),
    k=st.sampled_from([1, 1.5, 2]),
)
def test_lrn(backend: Backend, n: int, c: int, size: int, beta: float, k: float) -> None:
    check_lrn(backend, "float32", (n, c, 3, 2), LrnWindow(size, 0.7, beta, k))


@pytest.mark.parametrize("channels", [1, 3, 7, 12, 33, 96])
@pytest.mark.parametrize(("size", "beta"), [(5, 0.75), (3, 0.5), (1, 1.0), (9, 0.6), (35, 0.75), (201, 0.9)])
def test_lrn_windows(backend: Backend, dtype: str, channels: int, size: int, beta: float) -> None:
    check_lrn(backend, dtype, (2, channels, 3, 5), LrnWindow(size, 1.3, beta, 1.5))
