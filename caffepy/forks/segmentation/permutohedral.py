"""The permutohedral lattice: Gaussian weights of all pairs of points, in time that grows with the points only.

Adams, Baek and Davis, "Fast high-dimensional filtering using the permutohedral lattice", Computer Graphics Forum 2010.
Points of d features lie in simplices of a lattice in the plane of d + 1 coordinates that add up to 0. The filter splats
values to the d + 1 corners of each point's simplex, blurs along each of the d + 1 axes with the weights 1/2, 1, 1/2,
and slices: it reads the values back at the corners.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

Floats = Any
"""A NumPy array of float64."""
Ints = Any
"""A NumPy array of int64."""

MOST_KEYS = 2**62
TINY = 1e-20


@dataclass(frozen=True)
class Lattice:
    """The part of the lattice that points use; d features, M corners.

    Args:
        vertices: numbers of the corners of each point's simplex, (points, d + 1).
        weights: barycentric coordinates of the point, (points, d + 1); they add up to 1.
        neighbours: numbers of the corners before and behind each corner along each axis, (d + 1, 2, M); -1: none.
    """

    vertices: Ints
    weights: Floats
    neighbours: Ints

    @property
    def size(self) -> int:
        """How many corners there are."""
        return int(self.neighbours.shape[2])

    def normalisation(self) -> Floats:
        """Return 1 / (the sum of a point's weights over all points), (points,)."""
        values = np.bincount(self.vertices.ravel(), self.weights.ravel(), self.size)
        for pair in self.neighbours:
            padded = np.append(values, 0.0)
            values = values + 0.5 * (padded[pair[0]] + padded[pair[1]])
        return 1 / ((values[self.vertices] * self.weights).sum(axis=1) + TINY)


def make_lattice(features: Floats) -> Lattice:
    """Return the lattice of points whose weights are exp(-|difference of features|^2 / 2).

    Args:
        features: (points, d).

    Raises:
        ValueError: features are not finite, or lie too far apart.
    """
    if not np.isfinite(features).all():
        raise ValueError("are not all finite")
    rest, rank, weights = _place(features)
    axes = rest.shape[1]
    corner = np.arange(axes)[:, None, None]
    # Corner k of a simplex is k steps away from its first corner; a coordinate that passes the last rank goes back.
    coordinates = rest + np.where(rank <= axes - 1 - corner, corner, corner - axes)
    keys, steps = _keys(coordinates[..., :-1])
    known, vertices = np.unique(keys, return_inverse=True)
    neighbours = np.stack([[_find(known, known + step), _find(known, known - step)] for step in steps])
    return Lattice(vertices.reshape(axes, -1).T, weights, neighbours)


def _place(features: Floats) -> tuple[Ints, Ints, Floats]:
    """Return each point's nearest corner of color 0, the ranks of the differences, and the barycentric coordinates."""
    points, count = features.shape
    axes = count + 1
    index = np.arange(count)
    # The standard deviation of splat, blur and slice together is sqrt(2/3) (d + 1) in the lattice's coordinates.
    scaled = features * (math.sqrt(2 / 3) * axes / np.sqrt((index + 1) * (index + 2)))
    behind = np.cumsum(scaled[:, ::-1], axis=1)[:, ::-1]
    elevated = np.zeros((points, axes))
    elevated[:, :-1] = behind
    elevated[:, 1:] -= (index + 1) * scaled
    low, high = (rounded(elevated / axes) * axes for rounded in (np.floor, np.ceil))
    nearest = np.where(high - elevated < elevated - low, high, low)
    if np.abs(nearest).max(initial=0) > MOST_KEYS:
        raise ValueError("lie too far apart for the deviations")
    rest = nearest.astype(np.int64)
    order = np.argsort(-(elevated - rest), axis=1, kind="stable")
    rank = np.argsort(order, axis=1) + rest.sum(axis=1, keepdims=True) // axes
    # A point outside the plane returns to it by whole steps of its coordinates of lowest or highest rank.
    turn = np.where(rank < 0, axes, np.where(rank > count, -axes, 0))
    rank, rest = rank + turn, rest + turn
    ordered = np.zeros((points, axes))
    np.put_along_axis(ordered, rank, (elevated - rest) / axes, axis=1)
    falling = ordered[:, ::-1]
    weights = falling - np.roll(falling, 1, axis=1)
    weights[:, 0] += 1
    return rest, rank, weights


def _keys(coordinates: Ints) -> tuple[Ints, list[int]]:
    """Return a number for each corner, (…,), and how much it grows by one step along each axis."""
    axes = coordinates.shape[-1] + 1
    flat = coordinates.reshape(-1, axes - 1)
    # One step changes a coordinate by at most d: with that margin no step leaves the range of its coordinate.
    first, last = flat.min(axis=0, initial=0) - axes, flat.max(axis=0, initial=0) + axes
    sizes = [int(size) for size in last - first + 1]
    if math.prod(sizes) > MOST_KEYS:
        raise ValueError("lie too far apart for the deviations")
    strides = [math.prod(sizes[axis + 1 :]) for axis in range(axes - 1)]
    keys = (coordinates - first) @ np.array(strides, np.int64)
    return keys, [axes * stride - sum(strides) for stride in [*strides, 0]]


def _find(known: Ints, wanted: Ints) -> Ints:
    """Return the places of wanted keys among the known ones, which rise; -1: it is not there."""
    places = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    return np.where(known[places] == wanted, places, -1)
