"""Grouping of similar rectangles, as `groupRectangles` of OpenCV before version 5."""

from __future__ import annotations

from typing import Any

import numpy as np


def group_rectangles(rectangles: Any, threshold: int, eps: float) -> tuple[Any, Any]:
    """Return the mean rectangle of each group of more than `threshold` similar ones, and the groups' sizes.

    Two rectangles are similar if their four sides are at most eps * (smaller width + smaller height) / 2 apart; a group
    is what a chain of similar rectangles connects. A group inside another one is left out if it has fewer than three
    rectangles, or the other has more than three and more than it. Groups come in the order of their first rectangles.

    Args:
        rectangles: x, y, width and height of each, (n, 4); fractions are cut off.
        threshold: 0: all rectangles are returned with the size 1.
        eps: relative distance within which rectangles are similar.
    """
    given = np.asarray(rectangles, np.float64).reshape(-1, 4).astype(np.int64)
    if threshold <= 0 or not len(given):
        return given, np.ones(len(given), np.int64)
    groups = _groups(given, eps)
    sizes = np.bincount(groups)
    totals = np.stack([np.bincount(groups, given[:, i]) for i in range(4)], 1)
    # OpenCV multiplies by the inverse in float32 and rounds halves to even numbers.
    means = np.rint(totals.astype(np.float32) * (np.float32(1) / sizes.astype(np.float32))[:, None]).astype(np.int64)
    large = sizes > threshold
    means, sizes = means[large], sizes[large]
    kept = [i for i in range(len(means)) if not _is_covered(i, means, sizes, eps)]
    return means[kept], sizes[kept]


def _groups(rectangles: Any, eps: float) -> Any:
    """Return the number of each rectangle's group."""
    sides = np.concatenate([rectangles[:, :2], rectangles[:, :2] + rectangles[:, 2:]], 1)
    groups = np.full(len(rectangles), -1)
    count = 0
    for first in range(len(rectangles)):
        if groups[first] >= 0:
            continue
        groups[first] = count
        waiting = [first]
        while waiting:
            one = waiting.pop()
            reach = eps * np.minimum(rectangles[:, 2:], rectangles[one, 2:]).sum(1) * 0.5
            similar = (np.abs(sides - sides[one]) <= reach[:, None]).all(1) & (groups < 0)
            groups[similar] = count
            waiting.extend(np.flatnonzero(similar))
        count += 1
    return groups


def _is_covered(i: int, means: Any, sizes: Any, eps: float) -> bool:
    """Whether group i lies inside another one that outweighs it."""
    slack = np.rint(means[:, 2:] * eps)
    first, last = means[:, :2] - slack, means[:, :2] + means[:, 2:] + slack
    inside = (means[i, :2] >= first).all(1) & (means[i, :2] + means[i, 2:] <= last).all(1)
    inside &= (sizes > max(3, sizes[i])) | (sizes[i] < 3)
    inside[i] = False
    return bool(inside.any())
