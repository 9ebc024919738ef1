"""Primitives of optical flow: correlation of two images, and sampling at positions."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from backend_arrays import close, dirty, normal, to_device

from caffepy.backend import Backend, Border, CorrelationWindow

WINDOWS = {
    "PWC-Net": CorrelationWindow(1, 1, (0, 0), (-4, -4), (9, 9), 1),
    "strides": CorrelationWindow(3, 2, (-1, 1), (-4, -2), (3, 2), 4),
    "row": CorrelationWindow(1, 1, (0, 2), (0, -3), (1, 3), 1),
    "differences": CorrelationWindow(3, 2, (-2, -1), (-2, -2), (3, 3), 2, True),
}


def _pixel(image: Any, h: int, w: int) -> Any:
    inside = 0 <= h < image.shape[2] and 0 <= w < image.shape[3]
    return image[:, :, h, w] if inside else np.zeros(image.shape[:2])


def _correlation(a: Any, b: Any, shape: tuple[int, ...], window: CorrelationWindow) -> Any:
    y = np.zeros(shape)
    places = itertools.product(*map(range, window.count), *map(range, shape[2:]), *[range(window.kernel)] * 2)
    for p, q, i, j, u, v in places:
        h, w = i * window.stride + window.origin[0] + u, j * window.stride + window.origin[1] + v
        down, right = window.first[0] + p * window.step, window.first[1] + q * window.step
        left, other = _pixel(a, h, w), _pixel(b, h + down, w + right)
        part = np.abs(left - other) if window.subtract else left * other
        y[:, p * window.count[1] + q, i, j] += part.sum(axis=1)
    return y / (window.kernel**2 * a.shape[1])


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("channels", [1, 11, 70])
def test_correlation(backend: Backend, name: str, channels: int) -> None:
    """Means over patches and channels; the gradients by a bilinear form's own values, or by differences."""
    window = WINDOWS[name]
    a, b = (normal(seed, (2, channels, 5, 6)) for seed in (1, 2))
    shape = (2, window.count[0] * window.count[1], 3, 2)
    dy = normal(3, shape)
    y, da, db = dirty(backend, shape), dirty(backend, a.shape), dirty(backend, b.shape)
    on_device = [to_device(backend, value) for value in (a, b, dy)]
    backend.correlate_forward(on_device[0], on_device[1], y, window)
    close(backend.to_host(y), _correlation(a.astype(np.float64), b.astype(np.float64), shape, window))
    backend.correlate_backward(on_device[2], on_device[0], on_device[1], da, db, window)
    for number, found in enumerate((da, db)):
        for step_seed in (4, 5):
            direction = normal(step_seed, a.shape).astype(np.float64) * 1e-6
            ends = []
            for sign in (1, -1):
                pair = [a.astype(np.float64), b.astype(np.float64)]
                pair[number] = pair[number] + sign * direction
                ends.append((_correlation(pair[0], pair[1], shape, window) * dy).sum())
            slope = (backend.to_host(found) * direction).sum()
            assert abs((ends[0] - ends[1]) / 2 - slope) <= 1e-4 * abs(direction).sum()
    again = dirty(backend, a.shape)
    backend.correlate_backward(on_device[2], on_device[0], on_device[1], again, None, window)
    assert np.array_equal(backend.to_host(again), backend.to_host(da))


def _weights(position: float, size: int, border: Border) -> dict[int, float] | None:
    """The pixels that a position reads, None where it has no value."""
    low, high = {Border.ZERO: (-1, size), Border.INSIDE: (0, size - 1), Border.REPEAT: (0, size)}[border]
    above = position > low if border is Border.ZERO else position >= low
    below = position <= high if border is Border.INSIDE else position < high
    if not (above and below):
        return None
    first = int(np.floor(position))
    weights: dict[int, float] = {}
    for pixel, weight in ((first, 1 - (position - first)), (first + 1, position - first)):
        place = min(pixel, size - 1) if border is Border.REPEAT else pixel
        if 0 <= place < size:
            weights[place] = weights.get(place, 0) + weight
    return weights


def _sampled(x: Any, positions: Any, border: Border, fill: float) -> Any:
    samples, _, rows, columns = positions.shape
    y = np.full((samples, x.shape[1], rows, columns), fill, np.float64)
    for n, i, j in itertools.product(range(samples), range(rows), range(columns)):
        w, h = (_weights(float(positions[n, k, i, j]), x.shape[3 - k], border) for k in (0, 1))
        if w is not None and h is not None:
            y[n, :, i, j] = sum(x[n, :, p, q] * h[p] * w[q] for p in h for q in w)
    return y


@pytest.mark.parametrize("border", list(Border))
@pytest.mark.parametrize("channels", [1, 5, 40])
def test_sampling(backend: Backend, border: Border, channels: int) -> None:
    """Values, and gradients by the image and by the positions, inside and beyond all edges."""
    x = normal(1, (2, channels, 5, 6))
    generator = np.random.default_rng(2)
    positions = np.stack([generator.uniform(-2, 7.5, (2, 7, 9)), generator.uniform(-2, 6.5, (2, 7, 9))], 1)
    fractions = positions - np.floor(positions)
    positions = (np.floor(positions) + np.clip(fractions, 0.1, 0.9)).astype(np.float32)
    shape = (2, channels, 7, 9)
    dy = normal(3, shape)
    y, dx, d_positions = dirty(backend, shape), dirty(backend, x.shape), dirty(backend, positions.shape)
    on_device = [to_device(backend, value) for value in (x, positions, dy)]
    backend.sample_forward(on_device[0], on_device[1], y, border, 0.25)
    close(backend.to_host(y), _sampled(x, positions, border, 0.25))
    backend.sample_backward(*on_device, dx, d_positions, border)
    wanted = np.zeros(x.shape)
    for n, i, j in itertools.product(range(2), range(7), range(9)):
        w, h = (_weights(float(positions[n, k, i, j]), x.shape[3 - k], border) for k in (0, 1))
        for p, q in itertools.product(h or {}, w or {}):
            assert h is not None and w is not None
            wanted[n, :, p, q] += h[p] * w[q] * dy[n, :, i, j]
    close(backend.to_host(dx), wanted)
    for axis in (0, 1):
        step = np.zeros(positions.shape)
        step[:, axis] = 1e-3
        ends = [_sampled(x.astype(np.float64), positions + sign * step, border, 0.25) for sign in (1, -1)]
        slope = ((ends[0] - ends[1]) / 2e-3 * dy).sum(axis=1)
        close(backend.to_host(d_positions)[:, axis], slope)
    again = dirty(backend, x.shape)
    backend.sample_backward(*on_device, again, None, border)
    assert np.array_equal(backend.to_host(again), backend.to_host(dx))


def test_sampling_at_pixels(backend: Backend) -> None:
    """At a pixel the derivative is the mean of both sides', 0 beyond the edge; positions may be NaN or huge."""
    x = normal(4, (1, 3, 4, 5))
    grid = np.stack(np.meshgrid(np.arange(5.0), np.arange(4.0)))[None]
    grid[0, 0, 3, 1:4] = (np.nan, 1e30, -1e30)
    y, d_positions = dirty(backend, x.shape), dirty(backend, grid.shape)
    dy = np.ones(x.shape, np.float32)
    on_device = [to_device(backend, value) for value in (x, grid, dy)]
    backend.sample_forward(on_device[0], on_device[1], y, Border.INSIDE, -3.0)
    known = np.isin(np.arange(5), (1, 2, 3), invert=True)
    assert np.array_equal(backend.to_host(y)[:, :, :3], x[:, :, :3])
    assert np.array_equal(backend.to_host(y)[:, :, 3], np.where(known, x[:, :, 3], -3))
    backend.sample_backward(*on_device, None, d_positions, Border.INSIDE)
    ends = np.diff(x.sum(axis=1), axis=2)
    wanted = (np.pad(ends, ((0, 0), (0, 0), (0, 1))) + np.pad(ends, ((0, 0), (0, 0), (1, 0)))) / 2
    close(backend.to_host(d_positions)[:, 0], np.where((np.arange(4) < 3)[:, None] | known, wanted, 0))
