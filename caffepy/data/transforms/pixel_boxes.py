"""Boxes in pixels and their overlaps, as MS-CNN and Cascade R-CNN compute them.

The two forks differ in the borders of a box (`BoxIOU` in MS-CNN's `math_functions.cpp`, `JaccardOverlap` in Cascade
R-CNN's `bbox_util.cpp`), and the results of both are kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

Rows: TypeAlias = Any
"""A NumPy array of float32: boxes (..., 4), or one number for each box."""

EXACT, WHOLE, CORNERS = range(3)
"""Intersections that count: wider than 0 pixels (MS-CNN); 1 pixel or wider (Cascade R-CNN, of boxes with a size); the
same and higher than 1 pixel (Cascade R-CNN, of boxes with two corners)."""
MODES = ("IOU", "IOMU", "IOFU")
"""Intersection over the union, over the smaller box, over the first box."""

_f32 = np.float32


@dataclass(frozen=True)
class PixelBoxes:
    """Boxes (n, 4) as first and last x and y, and their areas (n,): 0 if a box is not valid.

    Args:
        corners: x1, y1, x2, y2.
        areas: in pixels.
        kind: EXACT, WHOLE or CORNERS. Except with EXACT, x2 and y2 belong to the box.
    """

    corners: Rows
    areas: Rows
    kind: int

    @classmethod
    def from_sizes(cls, boxes: Rows, kind: int = EXACT) -> PixelBoxes:
        """Return boxes (n, 4) of x, y, width and height."""
        sides = boxes[..., 2:]
        ends = boxes[..., :2] + sides - _f32(kind != EXACT)
        areas = np.where((sides > 0).all(-1), sides[..., 0] * sides[..., 1], _f32(0))
        return cls(np.concatenate([boxes[..., :2], ends], -1), areas, kind)

    @classmethod
    def from_corners(cls, boxes: Rows) -> PixelBoxes:
        """Return boxes (n, 4) of first and last pixels, of the kind CORNERS."""
        sides = boxes[..., 2:] - boxes[..., :2]
        valid = (sides >= 0).all(-1)
        areas = np.where(valid, (sides[..., 0] + _f32(1)) * (sides[..., 1] + _f32(1)), _f32(0))
        return cls(np.ascontiguousarray(boxes), areas, CORNERS)

    def take(self, order: NDArray[np.intp]) -> PixelBoxes:
        """Return the boxes with these indices."""
        return PixelBoxes(self.corners[order], self.areas[order], self.kind)


def overlaps(a: PixelBoxes, b: PixelBoxes, mode: str = "IOU") -> Rows:
    """Return the overlap of each box of `a` with each of `b`, (A, B)."""
    return _ratio(a.corners[:, None], a.areas[:, None], b.corners[None], b.areas[None], a.kind, mode)


def paired_overlaps(a: PixelBoxes, b: PixelBoxes) -> Rows:
    """Return intersection over union of the boxes of equal index, (n,)."""
    return _ratio(a.corners, a.areas, b.corners, b.areas, a.kind, "IOU")


def _ratio(a: Rows, a_areas: Rows, b: Rows, b_areas: Rows, kind: int, mode: str) -> Rows:
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    width, height = sides[..., 0], sides[..., 1]
    meet = (width > 0) & (height > 0)
    if kind != EXACT:
        meet = (width >= 0) & ((height >= 0) if kind == WHOLE else (height > 0))
        width, height = width + _f32(1), height + _f32(1)
    shared = np.where(meet & (a_areas > 0) & (b_areas > 0), width * height, _f32(0))
    if mode == "IOMU":
        whole = np.minimum(a_areas, b_areas) + np.zeros_like(shared)
    elif mode == "IOFU":
        whole = a_areas + np.zeros_like(shared)
    else:
        whole = a_areas + b_areas - shared
    return np.divide(shared, whole, out=np.zeros_like(shared), where=whole > 0)
