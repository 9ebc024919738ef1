"""The primitives that move elements by index, on the CUDA backend."""

from __future__ import annotations

import pytest
import row_checks as checks

from caffepy.backend import Backend


@pytest.mark.parametrize(
    ("rows", "shape"), [(7, (5, 4)), (3, (40, 130)), (4, (6, 3, 2, 5)), (1, (9,)), (2000, (300, 3)), (5, (0, 4))]
)
def test_rows(backend: Backend, rows: int, shape: tuple[int, ...]) -> None:
    checks.check_rows(backend, rows, shape, 1)


def test_rows_that_are_not_there(backend: Backend) -> None:
    checks.check_bad_rows(backend)


@pytest.mark.parametrize(
    ("x_shape", "y_pixels"),
    [((2, 3, 4, 5), (6, 2)), ((2, 3, 20), (7,)), ((2, 4, 2, 3, 2), (3, 2, 2)), ((0, 3, 4), (5,))],
)
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_spatial_product(backend: Backend, x_shape: tuple[int, ...], y_pixels: tuple[int, ...], dtype: str) -> None:
    checks.check_spatial_product(backend, x_shape, y_pixels, dtype)


@pytest.mark.parametrize(
    ("shape", "axis", "wanted"), [((3, 7), 1, 2), ((2, 600), 1, 600), ((2, 5, 3, 4), 1, 3), ((2, 5, 3, 4), 3, 4),
                                  ((6,), 0, 1), ((2, 3, 4, 2, 3), 2, 4), ((4, 3), 0, 4)],
)  # fmt: skip
def test_largest(backend: Backend, shape: tuple[int, ...], axis: int, wanted: int) -> None:
    checks.check_largest(backend, shape, axis, wanted)


@pytest.mark.parametrize(("shape", "size"), [((2, 3, 2, 3), (4, 6)), ((1, 20, 5, 5), (3, 3))])
def test_unpool(backend: Backend, shape: tuple[int, int, int, int], size: tuple[int, int]) -> None:
    checks.check_unpool(backend, shape, size)


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (3, 1), (1, 1)])
def test_stochastic_pooling(backend: Backend, kernel: int, stride: int) -> None:
    checks.check_stochastic(backend, (2, 5, 8, 9), kernel, stride)


@pytest.mark.parametrize(("channels", "scale"), [(1, 1.0), (5, 0.5), (16, 0.3)])
def test_regions(backend: Backend, channels: int, scale: float) -> None:
    checks.check_roi_max(backend, channels, scale)
    checks.check_roi_average(backend, channels, scale)
