"""Primitives that move elements by index, and pooling over regions and random places."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from backend_arrays import close, dirty, normal, to_device

from caffepy.backend import Backend, Geometry, SparseMatrix


def _bad(backend: Backend) -> Any:
    return to_device(backend, np.full(1, -1), "int32")


@pytest.mark.parametrize(
    ("rows", "shape"),
    [(40, (600, 300)), (7, (5, 4)), (3, (40, 130)), (4, (6, 3, 2, 5)), (1, (9,)), (2000, (300, 3)), (5, (0, 4))],
)
def test_rows(backend: Backend, rows: int, shape: tuple[int, ...]) -> None:
    """gather_rows and scatter_add_rows with rows that are named often, once and never."""
    index = np.random.default_rng(1).integers(0, rows, shape[0]).astype(np.float32)
    source, bad = normal(1, (rows, *shape[1:])), _bad(backend)
    out = dirty(backend, shape)
    backend.gather_rows(to_device(backend, source), to_device(backend, index), out, bad)
    assert np.array_equal(backend.to_host(out), source[index.astype(int)])
    assert backend.to_host(bad)[0] == -1
    dy, before = normal(2, shape), normal(3, source.shape)
    results = []
    for _ in range(2):
        total = to_device(backend, before)
        backend.scatter_add_rows(to_device(backend, dy), to_device(backend, index), total)
        results.append(backend.to_host(total))
    wanted = before.astype(np.float64)
    np.add.at(wanted, index.astype(int), dy)
    close(results[0], wanted)
    assert np.array_equal(*results)


def test_rows_that_are_not_there(backend: Backend) -> None:
    """Rows that are not there: zeros, a note, no gradient."""
    source, index, bad = normal(1, (3, 4)), np.array([1, -1, 0, 3, -0.5, np.nan], np.float32), _bad(backend)
    out, labels = dirty(backend, (6, 4)), dirty(backend, (6, 3))
    backend.gather_rows(to_device(backend, source), to_device(backend, index), out, bad)
    wanted = np.zeros((6, 4), np.float32)
    wanted[[0, 2, 4]] = source[[1, 0, 0]]
    assert np.array_equal(backend.to_host(out), wanted)
    assert backend.to_host(bad)[0] in (1, 3, 5)
    total = backend.zeros((3, 4))
    backend.scatter_add_rows(to_device(backend, np.ones((6, 4))), to_device(backend, index), total)
    assert np.array_equal(backend.to_host(total)[:, 0], [2, 1, 0])
    bad = _bad(backend)
    backend.one_hot(to_device(backend, index), labels, bad)
    assert np.array_equal(backend.to_host(labels), np.eye(3)[[1, 0, 0, 0, 0, 0]] * [[1], [0], [1], [0], [1], [0]])
    assert backend.to_host(bad)[0] in (1, 3, 5)


def sparse(backend: Backend, dense: Any) -> SparseMatrix:
    """A dense matrix as the primitive takes it."""
    rows, columns = np.nonzero(dense)
    begins = np.searchsorted(rows, np.arange(len(dense) + 1))
    return SparseMatrix(
        to_device(backend, begins, "int32"),
        to_device(backend, columns, "int32"),
        to_device(backend, dense[rows, columns]),
        dense.shape,
    )


@pytest.mark.parametrize(
    ("x_shape", "y_pixels"),
    [((2, 3, 4, 5), (6, 2)), ((2, 3, 20), (7,)), ((2, 4, 2, 3, 2), (3, 2, 2)), ((0, 3, 4), (5,))],
)
def test_spatial_product(backend: Backend, dtype: str, x_shape: tuple[int, ...], y_pixels: tuple[int, ...]) -> None:
    """A matrix with empty rows and with several entries a row."""
    pixels, outputs = math.prod(x_shape[2:]), math.prod(y_pixels)
    dense = normal(3, (outputs, pixels)) * (np.random.default_rng(4).random((outputs, pixels)) < 0.3)
    x = to_device(backend, normal(5, x_shape), dtype)
    y = dirty(backend, (*x_shape[:2], *y_pixels), dtype)
    backend.spatial_product(sparse(backend, dense), x, y)
    host = backend.to_host(x).astype(np.float64).reshape(*x_shape[:2], pixels)
    tolerance = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 8e-3}[dtype]
    close(backend.to_host(y), (host @ dense.T.astype(np.float64)).reshape(*x_shape[:2], *y_pixels), tolerance)


@pytest.mark.parametrize(
    ("shape", "axis", "wanted"),
    [
        ((3, 7), 1, 2),
        ((2, 600), 1, 600),
        ((2, 5, 3, 4), 1, 3),
        ((2, 5, 3, 4), 3, 4),
        ((6,), 0, 1),
        ((2, 3, 4, 2, 3), 2, 4),
        ((4, 3), 0, 4),
    ],
)
def test_largest(backend: Backend, shape: tuple[int, ...], axis: int, wanted: int) -> None:
    """Values with many that are equal: the one of the larger index comes first."""
    x = np.random.default_rng(6).integers(-4, 4, shape).astype(np.float32)
    out_shape = (*shape[:axis], wanted, *shape[axis + 1 :])
    indices, values = dirty(backend, out_shape), dirty(backend, out_shape)
    backend.largest(to_device(backend, x), axis, indices, values)
    order = np.flip(np.argsort(x, axis=axis, kind="stable"), axis=axis)
    order = np.take(order, range(wanted), axis=axis)
    assert np.array_equal(backend.to_host(indices), order)
    assert np.array_equal(backend.to_host(values), np.take_along_axis(x, order, axis))


@pytest.mark.parametrize(("shape", "size"), [((2, 3, 2, 3), (4, 6)), ((1, 20, 5, 5), (3, 3))])
def test_unpool(backend: Backend, shape: tuple[int, int, int, int], size: tuple[int, int]) -> None:
    """Pixels that are named twice get the last value; those outside the plane are noted."""
    x = normal(7, shape)
    pixels = math.prod(size)
    mask = np.random.default_rng(8).integers(0, pixels, shape).astype(np.float32)
    planes = np.zeros((*shape[:2], pixels), np.float32)
    for n, c, h, w in np.ndindex(shape):
        planes[n, c, int(mask[n, c, h, w])] = x[n, c, h, w]
    y, bad = dirty(backend, (*shape[:2], *size)), _bad(backend)
    backend.unpool_forward(to_device(backend, x), to_device(backend, mask), y, bad)
    assert np.array_equal(backend.to_host(y), planes.reshape(*shape[:2], *size))
    assert backend.to_host(bad)[0] == -1
    dy, dx = normal(9, (*shape[:2], *size)), dirty(backend, shape)
    backend.unpool_backward(to_device(backend, dy), to_device(backend, mask), dx)
    wanted = np.take_along_axis(dy.reshape(*shape[:2], -1), mask.reshape(*shape[:2], -1).astype(int), 2)
    assert np.array_equal(backend.to_host(dx), wanted.reshape(shape))
    mask[0, 0, 0, 0] = pixels
    backend.unpool_forward(to_device(backend, x), to_device(backend, mask), y, bad)
    assert backend.to_host(bad)[0] >= 0


@pytest.mark.parametrize(("kernel", "stride"), [(2, 2), (3, 2), (3, 1), (1, 1)])
def test_stochastic_pooling(backend: Backend, kernel: int, stride: int) -> None:
    """The element at which the running sum reaches chance * sum, row by row."""
    shape = (2, 5, 8, 9)
    size = [-(-(n - kernel) // stride) + 1 for n in shape[2:]]
    x = np.abs(normal(10, shape))
    chance = np.random.default_rng(11).random((*shape[:2], *size)).astype(np.float32)
    y, mask = dirty(backend, chance.shape), dirty(backend, chance.shape, "int32")
    geometry = Geometry((kernel, kernel), (stride, stride), (0, 0), (1, 1))
    backend.pool_stochastic_forward(to_device(backend, x), to_device(backend, chance), y, mask, geometry)
    found, chosen = backend.to_host(y), backend.to_host(mask)
    for n, c, h, w in np.ndindex(chance.shape):
        rows, columns = slice(h * stride, h * stride + kernel), slice(w * stride, w * stride + kernel)
        window = x[n, c, rows, columns].astype(np.float64)
        running = window.cumsum()
        at = np.searchsorted(running, chance[n, c, h, w] * running[-1])
        row, column = divmod(min(at, window.size - 1), window.shape[1])
        assert chosen[n, c, h, w] == (h * stride + row) * shape[3] + w * stride + column
        assert found[n, c, h, w] == x[n, c, h * stride + row, w * stride + column]


ROIS = np.array(
    [
        [0, 0, 0, 15, 11],
        [1, 4, 2, 9, 7],
        [1, 12, 10, 40, 30],
        [0, 5, 5, 5, 5],
        [2, 3.4, 1.6, 10.2, 9.9],
        [0, 30, 30, 40, 40],
    ],
    np.float32,
)
"""Whole images, parts, beyond the edge, one pixel, halves, and outside."""


def _round(x: float) -> int:
    return int(math.floor(abs(x) + 0.5)) * (1 if x >= 0 else -1)


def _bins(roi: Any, scale: float, size: tuple[int, int], bins: int, whole: bool) -> Any:
    """For each bin (row, column) the slices of the plane that it covers."""
    edges = []
    for first, last, length in ((roi[2], roi[4], size[0]), (roi[1], roi[3], size[1])):
        if whole:
            begin = _round(float(np.float32(first) * np.float32(scale)))
            extent = max(_round(float(np.float32(last) * np.float32(scale))) - begin + 1, 1)
        else:
            begin = _round(first) * scale
            extent = max((_round(last) + 1) * scale - begin, 0.1)
        step = np.float32(extent) / np.float32(bins)
        edges.append(
            [
                slice(
                    *np.clip(
                        [math.floor(np.float32(i * step) + begin), math.ceil(np.float32((i + 1) * step) + begin)],
                        0,
                        length,
                    )
                )
                for i in range(bins)
            ]
        )
    return {(i, j): (h, w) for i, h in enumerate(edges[0]) for j, w in enumerate(edges[1])}


@pytest.mark.parametrize(("channels", "scale"), [(1, 1.0), (5, 0.5), (16, 0.3)])
def test_roi_max(backend: Backend, channels: int, scale: float) -> None:
    """Maxima of the bins, 0 where a bin is empty, and the gradient at the maxima."""
    x = normal(12, (3, channels, 12, 16))
    shape = (len(ROIS), channels, 3, 3)
    wanted, dx = np.zeros(shape), np.zeros(x.shape)
    dy = normal(13, shape)
    for r, roi in enumerate(ROIS):
        for (i, j), (h, w) in _bins(roi, scale, (12, 16), 3, whole=True).items():
            part = x[int(roi[0])][:, h, w]
            for c in range(channels) if part.size else ():
                wanted[r, c, i, j] = part[c].max()
                at = np.unravel_index(part[c].argmax(), part[c].shape)
                dx[int(roi[0]), c, h.start + at[0], w.start + at[1]] += dy[r, c, i, j]
    rois, bad = to_device(backend, ROIS), _bad(backend)
    y, mask, found = dirty(backend, shape), dirty(backend, shape, "int32"), dirty(backend, x.shape)
    backend.roi_max_forward(to_device(backend, x), rois, y, mask, scale, bad)
    close(backend.to_host(y), wanted)
    backend.roi_max_backward(to_device(backend, dy), rois, mask, found, scale)
    close(backend.to_host(found), dx)
    assert backend.to_host(bad)[0] == -1
    wrong = ROIS.copy()
    wrong[4, 0] = 3
    backend.roi_max_forward(to_device(backend, x), to_device(backend, wrong), y, mask, scale, bad)
    assert backend.to_host(bad)[0] == 4 and not backend.to_host(y)[4].any()


def _weights(at: float, size: int) -> Any:
    """The weight of each of `size` pixels at a coordinate; 0 more than half a pixel outside."""
    if not -0.5 <= at <= size - 0.5:
        return np.zeros(size)
    return np.maximum(0, 1 - np.abs(np.clip(at, 0, size - 1) - np.arange(size)))


@pytest.mark.parametrize(("outputs", "group"), [(1, 1), (40, 1), (5, 2), (3, 4)])
def test_roi_bilinear(backend: Backend, outputs: int, group: int) -> None:
    """Bilinear samples at the points of grids, in the image, at its edges and outside, and the pixels' gradient."""
    x = normal(16, (3, outputs * group * group, 7, 9))
    rng = np.random.default_rng(17)
    rows, columns = (rng.uniform(-1.5, size + 0.5, (6, 4)).astype(np.float32) for size in (7, 9))
    rows[0], columns[0] = [0, 6, 6.5, -0.5], [8, 8.5, 3, -0.4]
    samples = np.array([0, 1, 1, 2, 0, 2], np.float32)
    shape = (6, outputs, 4, 4)
    wanted, dx, dy = np.zeros(shape), np.zeros(x.shape), normal(18, shape)
    for r, d, i, j in np.ndindex(shape):
        c = (d * group + i * group // 4) * group + j * group // 4
        weights = np.outer(_weights(rows[r, i], 7), _weights(columns[r, j], 9))
        wanted[r, d, i, j] = (x[int(samples[r]), c] * weights).sum()
        dx[int(samples[r]), c] += dy[r, d, i, j] * weights
    arrays, bad = [to_device(backend, a) for a in (samples, rows, columns)], _bad(backend)
    y, found = dirty(backend, shape), dirty(backend, x.shape)
    backend.roi_bilinear_forward(to_device(backend, x), *arrays, y, group, bad)
    close(backend.to_host(y), wanted)
    backend.roi_bilinear_backward(to_device(backend, dy), *arrays, found, group)
    close(backend.to_host(found), dx)
    assert backend.to_host(bad)[0] == -1
    samples[4] = 3
    backend.roi_bilinear_forward(to_device(backend, x), to_device(backend, samples), *arrays[1:], y, group, bad)
    assert backend.to_host(bad)[0] == 4 and not backend.to_host(y)[4].any()


@pytest.mark.parametrize(("outputs", "scale"), [(1, 1.0), (5, 0.5), (16, 0.3)])
def test_roi_average(backend: Backend, outputs: int, scale: float) -> None:
    """Means of each bin's own channel and the gradient spread over the bins."""
    group = 3
    x = normal(14, (3, outputs * group * group, 12, 16))
    shape = (len(ROIS), outputs, group, group)
    wanted, dx = np.zeros(shape), np.zeros(x.shape)
    dy = normal(15, shape)
    for r, roi in enumerate(ROIS):
        for (i, j), (h, w) in _bins(roi, scale, (12, 16), group, whole=False).items():
            for d in range(outputs):
                c = (d * group + i) * group + j
                part = x[int(roi[0]), c, h, w].astype(np.float64)
                if part.size:
                    wanted[r, d, i, j] = part.mean()
                    dx[int(roi[0]), c, h, w] += dy[r, d, i, j] / part.size
    rois, bad = to_device(backend, ROIS), _bad(backend)
    y, found = dirty(backend, shape), dirty(backend, x.shape)
    backend.roi_average_forward(to_device(backend, x), rois, y, scale, bad)
    close(backend.to_host(y), wanted)
    backend.roi_average_backward(to_device(backend, dy), rois, found, scale)
    close(backend.to_host(found), dx)
    assert backend.to_host(bad)[0] == -1
