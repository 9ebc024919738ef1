"""Pooling on the CPU where channels fill several vectors, and over whole images."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from primitive_checks.strategies import poolings

from caffepy.backend import Geometry, create_backend

BACKEND = create_backend(None, 2)


def images(shape: tuple[int, ...]) -> np.ndarray:
    result = BACKEND.zeros(shape)
    result[...] = np.random.default_rng(1).integers(-3, 4, shape)
    return result


def windows(size: tuple[int, ...], out: tuple[int, ...], geometry: Geometry) -> Any:
    """((oh, ow), the window's part of the image, its area within the padded image)."""
    for at in np.ndindex(*out):
        moves = list(zip(at, geometry.kernel, geometry.stride, geometry.pad, size, strict=True))
        begins = [o * s - p for o, _, s, p, _ in moves]
        area = math.prod(min(b + k, n + p) - b for b, (_, k, _, p, n) in zip(begins, moves, strict=True))
        spans = [slice(max(b, 0), max(b + k, 0)) for b, (_, k, _, _, _) in zip(begins, moves, strict=True)]
        yield at, (slice(None), slice(None), *spans), area


def check_averages(shape: tuple[int, ...], out: tuple[int, ...], geometry: Geometry) -> None:
    """A window's area is that within the padded image; numbers that are not finite reach their windows alone."""
    x, dy = images(shape), BACKEND.zeros((*shape[:2], *out))
    dy[...] = np.random.default_rng(2).integers(-3, 4, dy.shape)
    for array, number in ((x, np.nan), (x, np.inf), (dy, np.nan), (dy, -np.inf)):
        array[tuple(np.random.default_rng(3).integers(array.shape))] = number
    y, dx = BACKEND.zeros(dy.shape), BACKEND.zeros(shape)
    y[...], dx[...] = 77, 77
    expected, gradient = np.zeros(y.shape), np.zeros(shape)
    for (h, w), window, area in windows(shape[2:], out, geometry):
        expected[:, :, h, w] = x[window].astype(float).sum(axis=(2, 3)) / area
        with np.errstate(invalid="ignore"):
            gradient[window] += dy[:, :, h, w, None, None] / area
    BACKEND.pool_average_forward(x, y, geometry)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-5)
    BACKEND.pool_average_backward(dy, dx, geometry)
    np.testing.assert_allclose(dx, gradient, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 3, 4, 7, 16, 20, 33, 85, 150, 520])
@settings(max_examples=12, derandomize=True)
@given(case=poolings())
def test_averages_of_windows(channels: int, case: tuple[tuple[int, ...], tuple[int, int], Geometry]) -> None:
    (images, _, *size), out, geometry = case
    check_averages((images, channels, *size), out, geometry)


@pytest.mark.parametrize("channels", [1, 3, 33, 512, 537])
@pytest.mark.parametrize(
    ("size", "out", "geometry"),
    [
        ((5, 19), (1, 1), Geometry((5, 19), (1, 1), (0, 0), (1, 1))),
        ((7, 9), (7, 9), Geometry((5, 5), (1, 1), (2, 2), (1, 1))),
        ((12, 11), (3, 2), Geometry((4, 5), (4, 6), (0, 0), (1, 1))),
        ((3, 4), (1, 1), Geometry((9, 10), (1, 1), (3, 3), (1, 1))),
    ],
)
def test_averages_of_large_windows(
    channels: int, size: tuple[int, int], out: tuple[int, int], geometry: Geometry
) -> None:
    check_averages((2, channels, *size), out, geometry)


@pytest.mark.parametrize("threads", [1, 3])
def test_averages_of_parts_of_the_rows(threads: int) -> None:
    """Rows that meet what the row before them meets are copied, within the rows of one thread and one image."""
    backend, geometry = create_backend(None, threads), Geometry((3, 3), (3, 3), (0, 0), (1, 1))
    for shape in ((5, 3, 60, 61), (5, 40, 60, 61)):
        dy, dx = backend.zeros((*shape[:2], 20, 20)), backend.zeros(shape)
        dy[...] = np.random.default_rng(2).integers(-3, 4, dy.shape)
        backend.pool_average_backward(dy, dx, geometry)
        assert not dx[..., 60:].any()
        np.testing.assert_allclose(dx[..., :60], dy.repeat(3, axis=2).repeat(3, axis=3) / 9, rtol=1e-6)


@pytest.mark.parametrize("channels", [1, 3, 33, 512, 537])
@pytest.mark.parametrize(("size", "stride"), [((5, 19), (1, 1)), ((6, 11), (2, 3)), ((1, 9), (1, 1))])
def test_maxima_of_large_windows(channels: int, size: tuple[int, int], stride: tuple[int, int]) -> None:
    """Those of many channels are found in parts: the first of equal numbers wins, and NaN over all."""
    geometry = Geometry((min(size[0], 5), 9), stride, (0, 0), (1, 1))
    out = tuple((n - k) // s + 1 for n, k, s in zip(size, geometry.kernel, stride, strict=True))
    x = images((2, channels, *size))
    x[1, : channels // 2 + 1, -1, [3, 7]] = np.nan
    x[0, :, 0, 0] = -np.inf
    y, mask = BACKEND.zeros((2, channels, *out)), BACKEND.zeros((2, channels, *out), "int32")
    BACKEND.pool_max_forward(x, y, mask, geometry)
    for (h, w), window, _ in windows(size, out, geometry):
        part = np.array(x[window])
        first = part.reshape(2, channels, -1).argmax(axis=2)
        rows, columns = np.unravel_index(first, part.shape[2:])
        assert np.array_equal(y[:, :, h, w], part.max(axis=(2, 3)), equal_nan=True)
        assert np.array_equal(mask[:, :, h, w], (window[2].start + rows) * size[1] + window[3].start + columns)
