"""The permutohedral lattice: against its own matrices, and against Gaussian weights of all pairs."""

from __future__ import annotations

import numpy as np
import pytest
from lattice import dense, pixels
from layer_harness import Floats

from caffepy.forks.segmentation.permutohedral import make_lattice


@pytest.mark.parametrize("count", [1, 2, 5])
def test_simplices_hold_their_points_and_neighbours_are_mutual(count: int) -> None:
    features = np.random.default_rng(count).uniform(-6, 6, (300, count))
    lattice = make_lattice(features)
    assert lattice.vertices.shape == lattice.weights.shape == (300, count + 1)
    np.testing.assert_allclose(lattice.weights.sum(axis=1), 1)
    assert lattice.weights.min() > -1e-9
    for ahead, behind in lattice.neighbours:
        found = np.flatnonzero(ahead >= 0)
        assert np.array_equal(behind[ahead[found]], found)
        assert len(found) == np.count_nonzero(behind >= 0)


def test_equal_points_share_their_corners() -> None:
    features = np.random.default_rng(0).uniform(-3, 3, (10, 5))
    once, twice = make_lattice(features), make_lattice(np.concatenate([features, features]))
    assert once.size == twice.size
    assert np.array_equal(twice.vertices[:10], twice.vertices[10:])


@pytest.mark.parametrize("count", [1, 2, 5])
def test_normalised_filter_keeps_ones(count: int) -> None:
    lattice = make_lattice(np.random.default_rng(count).uniform(-2, 2, (200, count)))
    np.testing.assert_allclose(lattice.normalisation() * dense(lattice).sum(axis=1), 1)


@pytest.mark.parametrize(("features", "tolerance"), [(pixels(18, 20, 3.0), 0.08), (np.arange(60.0)[:, None] / 4, 0.05)])
def test_weights_are_near_those_of_a_gaussian(features: Floats, tolerance: float) -> None:
    lattice = make_lattice(features)
    found = dense(lattice) * lattice.normalisation()[:, None]
    wanted = np.exp(-((features[:, None] - features[None]) ** 2).sum(axis=-1) / 2)
    wanted /= wanted.sum(axis=1, keepdims=True)
    values = np.sin(features.sum(axis=1)) + (features[:, 0] > features[:, 0].mean())
    np.testing.assert_allclose(found @ values, wanted @ values, atol=tolerance)


def test_colors_that_differ_do_not_mix() -> None:
    """Two halves of an image, of one color each, whose colors are many deviations apart."""
    positions = pixels(8, 8, 20.0)
    left = (np.arange(64) % 8 < 4).astype(np.float64)
    features = np.concatenate([positions, np.tile(left[:, None] * 40, 3)], axis=1)
    lattice = make_lattice(features)
    np.testing.assert_allclose(dense(lattice) @ left * lattice.normalisation(), left, atol=1e-9)


def test_memory_grows_with_the_points_only() -> None:
    """Few points far apart have few corners."""
    lattice = make_lattice(np.array([[0.0] * 5, [1e3] * 5]))
    assert lattice.size <= 12


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e9])
def test_refuses_features_without_a_place(value: float) -> None:
    with pytest.raises(ValueError, match=r"not all finite|too far apart"):
        make_lattice(np.array([[0.0] * 5, [value] * 5]))
