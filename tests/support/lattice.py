"""The permutohedral lattice's filter as a matrix, and the features of pixels."""

from __future__ import annotations

import numpy as np
from layer_harness import Floats

from caffepy.forks.segmentation.permutohedral import Lattice


def dense(lattice: Lattice) -> Floats:
    """The filter's matrix of weights of all pairs of points."""
    points, corners = lattice.vertices.shape
    splat = np.zeros((lattice.size, points))
    np.add.at(splat, (lattice.vertices.ravel(), np.repeat(np.arange(points), corners)), lattice.weights.ravel())
    values = splat
    for pair in lattice.neighbours:
        blur = np.eye(lattice.size)
        for found in pair:
            blur[np.flatnonzero(found >= 0), found[found >= 0]] += 0.5
        values = blur @ values
    return splat.T @ values


def pixels(height: int, width: int, deviation: float) -> Floats:
    """The positions of an image's pixels as features."""
    y, x = np.indices((height, width))
    return np.stack([x.ravel(), y.ravel()], axis=1) / deviation
