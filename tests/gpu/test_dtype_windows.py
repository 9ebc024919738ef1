"""Pooling and LRN over float16 and bfloat16 on the CUDA backend, against float64 of what is stored."""

from __future__ import annotations

from typing import Any

import backend_checks as checks
import backend_oracle as oracle
import numpy as np
import pytest
from backend_checks import normal
from dtype_checks import agrees, dtypes, rounded, some, stored
from hypothesis import given

from caffepy.backend import Backend, Geometry, LrnWindow

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
]
poolings = pytest.mark.parametrize(("x_shape", "y_size", "geometry"), POOLINGS)


def numbers_in_windows(positions: Any, width: int, g: Geometry) -> Any:
    """A mask of positions h * W + w as numbers within the windows."""
    rows = np.arange(positions.shape[2])[:, None] * g.stride[0] - g.pad[0]
    columns = np.arange(positions.shape[3]) * g.stride[1] - g.pad[1]
    return (positions // width - rows) * g.kernel[1] + positions % width - columns


@dtypes
@pytest.mark.parametrize("mask", ["int32", "uint8"])
@poolings
def test_pool_max(
    backend: Backend, dtype: str, mask: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    check_pool_max(backend, dtype, mask, x_shape, y_size, geometry, ties=True)


@some
@given(case=checks.poolings())
def test_pool_max_of_any_geometry(backend: Backend, case: Any) -> None:
    check_pool_max(backend, "float16", "uint8", *case, ties=False)


def check_pool_max(
    backend: Backend, dtype: str, mask_dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int],
    geometry: Geometry, ties: bool,
) -> None:  # fmt: skip
    y_shape = (*x_shape[:2], *y_size)
    host = np.round(normal(1, x_shape)) if ties else rounded(normal(1, x_shape), dtype)
    if mask_dtype == "uint8" and np.prod(geometry.kernel) > 255:
        return
    expected, positions = oracle.pool_max(host, y_shape, geometry)
    y, mask = checks.dirty(backend, y_shape, dtype), checks.dirty(backend, y_shape, mask_dtype)
    backend.pool_max_forward(checks.to_device(backend, host, dtype), y, mask, geometry)
    assert np.array_equal(backend.to_host(y), expected)
    numbers = positions if mask_dtype == "int32" else numbers_in_windows(positions, x_shape[3], geometry)
    assert np.array_equal(backend.to_host(mask), numbers)
    dy, dy_host = stored(backend, 2, y_shape, dtype)
    dx = checks.dirty(backend, x_shape, dtype)
    backend.pool_max_backward(dy, mask, dx, geometry)
    agrees(backend, dx, oracle.pool_max_gradient(dy_host, positions, x_shape), dtype)


@dtypes
@poolings
def test_pool_average(
    backend: Backend, dtype: str, x_shape: tuple[int, ...], y_size: tuple[int, int], geometry: Geometry
) -> None:
    y_shape = (*x_shape[:2], *y_size)
    x, x_host = stored(backend, 1, x_shape, dtype)
    dy, dy_host = stored(backend, 2, y_shape, dtype)
    y, dx = checks.dirty(backend, y_shape, dtype), checks.dirty(backend, x_shape, dtype)
    backend.pool_average_forward(x, y, geometry)
    agrees(backend, y, oracle.pool_average(x_host.astype(float), y_shape, geometry), dtype)
    backend.pool_average_backward(dy, dx, geometry)
    agrees(backend, dx, oracle.pool_average_gradient(dy_host.astype(float), x_shape, geometry), dtype)


@dtypes
@pytest.mark.parametrize("channels", [1, 3, 7, 12, 33, 96])
@pytest.mark.parametrize(("size", "beta"), [(5, 0.75), (3, 0.5), (1, 1.0), (9, 0.6), (35, 0.75), (201, 0.9)])
def test_lrn(backend: Backend, dtype: str, channels: int, size: int, beta: float) -> None:
    shape = (2, channels, 3, 5)
    x, x_host = stored(backend, 1, shape, dtype)
    dy, dy_host = stored(backend, 2, shape, dtype)
    y, dx = checks.dirty(backend, shape, dtype), checks.dirty(backend, shape, dtype)
    backend.lrn_across_forward(x, y, None, LrnWindow(size, 1.3, beta, 1.5))
    agrees(backend, y, oracle.lrn(x_host.astype(float), size, 1.3, beta, 1.5)[0], dtype)
    backend.lrn_across_backward(x, None, None, dy, dx, LrnWindow(size, 1.3, beta, 1.5))
    expected = oracle.lrn_gradient(x_host.astype(float), dy_host.astype(float), size, 1.3, beta, 1.5)
    agrees(backend, dx, expected, dtype)
