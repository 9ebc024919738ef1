"""Pooling on the CPU where channels fill several vectors, and over whole images."""

from __future__ import annotations

import numpy as np
import pytest

from caffepy.backend import Geometry, create_backend

BACKEND = create_backend(None, 2)


def images(shape: tuple[int, ...]) -> np.ndarray:
    result = BACKEND.zeros(shape)
    result[...] = np.random.default_rng(1).integers(-3, 4, shape)
    return result


@pytest.mark.parametrize("channels", [16, 64, 85, 150])
def test_maxima_of_many_channels(channels: int) -> None:
    """The first of equal numbers wins; NaN wins over all."""
    x = images((2, channels, 5, 6))
    x[1, :, 2, 3] = np.nan
    y, mask = BACKEND.zeros((2, channels, 2, 2)), BACKEND.zeros((2, channels, 2, 2), "int32")
    BACKEND.pool_max_forward(x, y, mask, Geometry((3, 3), (2, 3), (0, 0), (1, 1)))
    for h, w in np.ndindex(2, 2):
        rows, columns = slice(2 * h, 2 * h + 3), slice(3 * w, 3 * w + 3)
        window = np.array(x[:, :, rows, columns]).reshape(2, channels, 9)
        first = window.argmax(axis=2)
        assert np.array_equal(y[:, :, h, w], window.max(axis=2), equal_nan=True)
        assert np.array_equal(mask[:, :, h, w], (2 * h + first // 3) * 6 + 3 * w + first % 3)


@pytest.mark.parametrize("shape", [(2, 33, 4, 7), (1, 70, 1, 3), (3, 1, 5, 5)])
def test_averages_of_whole_images(shape: tuple[int, ...]) -> None:
    x, y = images(shape), BACKEND.zeros((*shape[:2], 1, 1))
    BACKEND.pool_average_forward(x, y, Geometry(shape[2:], (1, 1), (0, 0), (1, 1)))
    np.testing.assert_allclose(y, x.mean(axis=(2, 3), keepdims=True), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("channels", [1, 7, 16, 85])
@pytest.mark.parametrize("kernel", [(2, 2), (3, 2), (4, 5)])
@pytest.mark.parametrize(("stride", "pad"), [((1, 1), (1, 0)), ((2, 3), (0, 1)), ((5, 4), (1, 1))])
def test_averages_of_windows(
    channels: int, kernel: tuple[int, int], stride: tuple[int, int], pad: tuple[int, int]
) -> None:
    """A window's area is that within the padded image; the gradient is the transpose of the forward pass."""
    geometry = Geometry(kernel, stride, pad, (1, 1))
    out = tuple(-(-(size + 2 * p - k) // s) + 1 for size, k, s, p in zip((7, 9), kernel, stride, pad, strict=True))
    out = tuple(o - (s * (o - 1) >= size + p) for o, s, p, size in zip(out, stride, pad, (7, 9), strict=True))
    x, y, dy, dx = images((2, channels, 7, 9)), *(BACKEND.zeros((2, channels, *out)) for _ in range(2)), None
    expected, dx = np.zeros(y.shape), BACKEND.zeros(x.shape)
    for h, w in np.ndindex(*out):
        top, left = h * stride[0] - pad[0], w * stride[1] - pad[1]
        area = (min(top + kernel[0], 7 + pad[0]) - top) * (min(left + kernel[1], 9 + pad[1]) - left)
        part = x[:, :, max(top, 0) : max(top + kernel[0], 0), max(left, 0) : max(left + kernel[1], 0)]
        expected[:, :, h, w] = part.sum(axis=(2, 3)) / area
    BACKEND.pool_average_forward(x, y, geometry)
    np.testing.assert_allclose(y, expected, rtol=1e-5, atol=1e-6)
    dy[...] = np.random.default_rng(2).integers(-3, 4, dy.shape)
    BACKEND.pool_average_backward(dy, dx, geometry)
    np.testing.assert_allclose((dx * x).sum(), (dy * expected).sum(), rtol=1e-4, atol=1e-3)
