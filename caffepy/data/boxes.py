"""Areas of boxes and their overlaps, by the rules of the Caffes that define them.

A rule says whether the last row and column belong to a box, and which intersections count. MS-CNN and Cascade R-CNN
differ in both (`BoxIOU` in MS-CNN's `math_functions.cpp`, `JaccardOverlap` in Cascade R-CNN's `bbox_util.cpp`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, exact_function

Rows: TypeAlias = Any
"""A NumPy array of float32: boxes (..., 4), or one number for each box."""
_f32 = np.float32

UNIT, BORDERED, DARKNET, INCLUSIVE, EXACT, WHOLE, CORNERS = range(7)
"""Rules, by which intersections they count.

UNIT (SSD): with a width and a height above 0. BORDERED (SSD's boxes in pixels): one pixel is added to both sides, and
the intersection of disjoint boxes is 1. DARKNET (YOLO): 0 / 0 is NaN. INCLUSIVE (Faster R-CNN), WHOLE and CORNERS: the
last row and column belong to the boxes. EXACT (MS-CNN): as UNIT, of boxes with an area. WHOLE (Cascade R-CNN, of boxes
with a size): 1 pixel or wider, of boxes with an area. CORNERS (Cascade R-CNN, of boxes with two corners): the same, and
higher than 1 pixel.
"""
MODES = ("IOU", "IOMU", "IOFU")
"""Intersection over the union, over the smaller box, over the first box."""


@dataclass(frozen=True)
class Boxes:
    """Boxes (..., 4) as x1, y1, x2, y2, their areas (...), and the rule of their overlaps."""

    corners: Rows
    areas: Rows
    rule: int

    @classmethod
    def from_corners(cls, boxes: Rows, rule: int = UNIT) -> Boxes:
        """Return boxes (..., 4) of two corners."""
        return cls(np.ascontiguousarray(boxes, np.float32), box_areas(boxes, rule in (INCLUSIVE, CORNERS)), rule)

    @classmethod
    def from_sizes(cls, boxes: Rows, rule: int = EXACT) -> Boxes:
        """Return boxes (..., 4) of x, y, width and height."""
        sides = boxes[..., 2:]
        ends = boxes[..., :2] + sides - _f32(rule != EXACT)
        areas = np.where((sides > 0).all(-1), sides[..., 0] * sides[..., 1], _f32(0))
        return cls(np.concatenate([boxes[..., :2], ends], -1), areas, rule)

    def __getitem__(self, index: Any) -> Boxes:
        """Return the boxes with these indices; None adds an axis."""
        return Boxes(self.corners[index], self.areas[index], self.rule)


def box_areas(boxes: Rows, extra: float = 0) -> Rows:
    """Return the area of each box (..., 4), 0 if a side is negative. `extra` is added to the sides: 1 for pixels."""
    width, height = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
    more = _f32(extra)
    return np.where((width < 0) | (height < 0), _f32(0), (width + more) * (height + more))


def intersections(a: Rows, b: Rows, rule: int = UNIT) -> Rows:
    """Return the areas of the intersections of boxes (..., 4), which broadcast."""
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    width, height = sides[..., 0], sides[..., 1]
    if rule == BORDERED:
        meet = (width >= 0) & (height >= 0)
        return np.where(meet, (width + _f32(1)) * (height + _f32(1)), _f32(1))
    if rule == DARKNET:
        return np.where((width < 0) | (height < 0), _f32(0), width * height)
    if rule in (WHOLE, CORNERS):
        meet = (width >= 0) & ((height >= 0) if rule == WHOLE else (height > 0))
        return np.where(meet, (width + _f32(1)) * (height + _f32(1)), _f32(0))
    return np.where((width > 0) & (height > 0), width * height, _f32(0))


def overlaps(a: Boxes, b: Boxes, mode: str = "IOU") -> Rows:
    """Return the overlaps of boxes of one rule, which broadcast: 0 over an area of 0, but NaN with DARKNET."""
    shared = intersections(a.corners, b.corners, a.rule)
    if a.rule >= EXACT:
        shared = np.where((a.areas > 0) & (b.areas > 0), shared, _f32(0))
    whole = np.minimum(a.areas, b.areas) if mode == "IOMU" else a.areas
    if mode == "IOU":
        whole = a.areas + b.areas - shared
    with np.errstate(all="ignore"):
        ratio = shared / whole
    return ratio if a.rule == DARKNET else np.where(whole > 0, ratio, _f32(0))


@exact_function
def overlap(a: Floats, a_areas: Floats, i: Int, b: Floats, b_areas: Floats, j: Int, rule: Int, mode: Int) -> Float:
    """Return the overlap of box i of `a` and box j of `b`, as `overlaps`. Not for BORDERED; `mode` indexes MODES."""
    # In this order of arguments NaN propagates as in Caffe.
    width = min(a[4 * i + 2], b[4 * j + 2]) - max(a[4 * i], b[4 * j])
    height = min(a[4 * i + 3], b[4 * j + 3]) - max(a[4 * i + 1], b[4 * j + 1])
    if rule == DARKNET:
        shared = np.float32(0) if width < 0 or height < 0 else width * height
        return shared / (a_areas[i] + b_areas[j] - shared)
    if rule in (UNIT, EXACT):
        meet = width > 0 and height > 0
    else:
        least = np.float32(-1 if rule == INCLUSIVE else 0)
        meet = (width > least or width == 0) and (height > least or (rule == WHOLE and height == 0))
        width += np.float32(1)
        height += np.float32(1)
    if not meet or (rule >= EXACT and not (a_areas[i] > 0 and b_areas[j] > 0)):
        return np.float32(0)
    shared = width * height
    if mode == 0:
        return shared / (a_areas[i] + b_areas[j] - shared)
    return shared / (min(a_areas[i], b_areas[j]) if mode == 1 else a_areas[i])
