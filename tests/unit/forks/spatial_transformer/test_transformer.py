"""SpatialTransformer, STLoss, LocLoss and PowerFile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from layer_harness import Runner, check_layer, gaussian, spread

from caffepy.errors import ConfigError, DataError, ShapeError


def transformed(x: Any, theta: Any, height: int, width: int) -> Any:
    """Each pixel's position in x, and the four pixels around it; pixels outside are 0."""
    y = np.zeros((*x.shape[:2], height, width))
    for n in range(len(x)):
        matrix = theta[n].reshape(2, 3)
        for i in range(height):
            for j in range(width):
                r, c = matrix @ [2 * i / height - 1, 2 * j / width - 1, 1]
                r, c = (r + 1) / 2 * x.shape[2], (c + 1) / 2 * x.shape[3]
                for h in (int(np.floor(r)), int(np.floor(r)) + 1):
                    for w in (int(np.floor(c)), int(np.floor(c)) + 1):
                        if 0 <= h < x.shape[2] and 0 <= w < x.shape[3]:
                            y[n, :, i, j] += (1 - abs(r - h)) * (1 - abs(c - w)) * x[n, :, h, w]
    return y


X = gaussian((2, 3, 6, 7))
THETA = np.array([[0.942, 0.335, 0.016, 0.015, 0.976, 0.208], [1.065, -0.059, 0.181, 0.187, 0.775, -0.357]], np.float32)
"""Matrices with which no position is near a whole pixel, where the derivative jumps."""


@pytest.mark.parametrize("size", [None, (4, 5)])
def test_affine(size: tuple[int, int] | None) -> None:
    height, width = size or X.shape[2:]
    fields = f"output_H: {height} output_W: {width}" if size else ""
    check_layer(
        f"type: 'SpatialTransformer' st_param {{ {fields} }}",
        [X, THETA],
        lambda x, theta: transformed(x, theta, height, width),
        step=1e-4,
    )


def test_constants() -> None:
    """Elements of the matrix that the net does not predict."""
    text = "type: 'SpatialTransformer' st_param { theta_1_1: 0.63 theta_1_2: 0.1 theta_2_1: 0 theta_2_2: 0.47 }"
    free = np.array([[-0.003, -0.278], [-0.338, -0.26]], np.float32)

    def formula(x: Any, free: Any) -> Any:
        theta = np.tile([0.63, 0.1, 0, 0, 0.47, 0], (2, 1))
        theta[:, [2, 5]] = free
        return transformed(x, theta, *x.shape[2:])

    check_layer(text, [X, free.reshape(2, 2, 1, 1)], lambda x, free: formula(x, free.reshape(2, 2)), step=1e-4)


def test_constant_shift() -> None:
    text = "type: 'SpatialTransformer' st_param { theta_1_3: 0.016 theta_2_3: 0.208 }"
    given = THETA[:1, [0, 1, 3, 4]]
    runner = Runner(text, [X[:1], given])
    np.testing.assert_allclose(runner.forward()[0], transformed(X[:1], THETA[:1], *X.shape[2:]), rtol=1e-4, atol=1e-5)


def test_identity() -> None:
    identity = np.tile(np.array([1, 0, 0, 0, 1, 0], np.float32), (2, 1))
    y = Runner("type: 'SpatialTransformer'", [X, identity]).forward()[0]
    np.testing.assert_allclose(y, X, rtol=1e-5, atol=1e-5)


def test_without_gradient_of_the_image() -> None:
    text = "type: 'SpatialTransformer' st_param { to_compute_dU: false }"
    result = Runner(text, [X, THETA]).run([np.ones(X.shape, np.float32)])
    other = Runner("type: 'SpatialTransformer'", [X, THETA]).run([np.ones(X.shape, np.float32)])
    assert not np.any(result.bottom_diffs[0]) and np.any(other.bottom_diffs[0])
    assert np.array_equal(result.bottom_diffs[1], other.bottom_diffs[1])


def test_bad_settings() -> None:
    for fields in ("transform_type: 'tps'", "sampler_type: 'nearest'", "output_H: 0"):
        with pytest.raises(ConfigError):
            Runner(f"type: 'SpatialTransformer' st_param {{ {fields} }}", [X, THETA])
    with pytest.raises(ShapeError, match="5 elements"):
        Runner("type: 'SpatialTransformer' st_param { theta_1_3: 0 }", [X, THETA])
    with pytest.raises(ConfigError, match="threshold"):
        Runner("type: 'LocLoss' loc_loss_param { threshold: 0 }", [THETA])
    with pytest.raises(ShapeError, match="six elements"):
        Runner("type: 'STLoss' st_loss_param { output_H: 2 output_W: 2 }", [THETA[:, :5]])


def test_loss_of_positions_outside() -> None:
    def formula(theta: Any) -> Any:
        height, width = 5, 4
        rows, columns = np.meshgrid(np.arange(height) / height * 2 - 1, np.arange(width) / width * 2 - 1, indexing="ij")
        grid = np.stack([rows.ravel(), columns.ravel(), np.ones(rows.size)])
        beyond = np.maximum(np.abs(theta.reshape(-1, 2, 3) @ grid) - 1, 0)
        return (beyond**2).sum() / 2 / len(theta) / rows.size

    theta = THETA * np.float32(1.7)
    check_layer("type: 'STLoss' st_loss_param { output_H: 5 output_W: 4 }", [theta], formula, step=1e-3)


def test_loss_of_large_values() -> None:
    formula = lambda x: (np.maximum(abs(x) - 0.5, 0) ** 2).mean() / 2  # noqa: E731
    x = spread((4, 2), step=0.3)
    check_layer("type: 'LocLoss' loc_loss_param { threshold: 0.5 }", [x], formula, step=1e-3, loss_weight=2.5)


def test_shift_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "shift.txt"
    path.write_text("0.5 -1\n2")
    text = f"type: 'PowerFile' power_file_param {{ shift_file: '{path}' }}"
    shift = np.array([0.5, -1, 2, 0, 0, 0])
    check_layer(text, [gaussian((3, 6))], lambda x: x + shift, in_place=True)
    check_layer("type: 'PowerFile'", [gaussian((3, 6))], lambda x: x)
    with pytest.raises(DataError, match="cannot be read"):
        Runner("type: 'PowerFile' power_file_param { shift_file: '/nowhere/x' }", [gaussian((3, 6))])
    path.write_text("0.5 abc")
    with pytest.raises(DataError, match="other than numbers"):
        Runner(text, [gaussian((3, 6))])
