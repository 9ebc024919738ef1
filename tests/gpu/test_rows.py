"""The primitives that move elements by index, on the CUDA backend."""

from __future__ import annotations

import pytest
import row_checks as checks

from caffepy.backend import Backend


@pytest.mark.parametrize(("rows", "shape"), checks.ROWS)
def test_rows(backend: Backend, rows: int, shape: tuple[int, ...]) -> None:
    checks.check_rows(backend, rows, shape, 1)


def test_rows_that_are_not_there(backend: Backend) -> None:
    checks.check_bad_rows(backend)


@pytest.mark.parametrize(("x_shape", "y_pixels"), checks.PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_spatial_product(backend: Backend, x_shape: tuple[int, ...], y_pixels: tuple[int, ...], dtype: str) -> None:
    checks.check_spatial_product(backend, x_shape, y_pixels, dtype)


@pytest.mark.parametrize(("shape", "axis", "wanted"), checks.LARGEST)
def test_largest(backend: Backend, shape: tuple[int, ...], axis: int, wanted: int) -> None:
    checks.check_largest(backend, shape, axis, wanted)


@pytest.mark.parametrize(("shape", "size"), checks.UNPOOLED)
def test_unpool(backend: Backend, shape: tuple[int, int, int, int], size: tuple[int, int]) -> None:
    checks.check_unpool(backend, shape, size)


@pytest.mark.parametrize(("kernel", "stride"), checks.WINDOWS)
def test_stochastic_pooling(backend: Backend, kernel: int, stride: int) -> None:
    checks.check_stochastic(backend, (2, 5, 8, 9), kernel, stride)


@pytest.mark.parametrize(("channels", "scale"), checks.REGIONS)
def test_regions(backend: Backend, channels: int, scale: float) -> None:
    checks.check_roi_max(backend, channels, scale)
    checks.check_roi_average(backend, channels, scale)
