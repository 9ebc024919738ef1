"""The labels of anchors that ImageGtData and DetectionData give: which object each anchor is to predict."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.transforms.pixel_boxes import EXACT, PixelBoxes, overlaps
from caffepy.data.transforms.pixels import rounded
from caffepy.layers.core.base import Layer
from caffepy.layers.input.object_windows import Floats, Placed

_f32 = np.float32
CHANNELS = 6
"""Of a map: label, x and y of the object's center, width, height, overlap."""


@dataclass(frozen=True)
class LabelMap:
    """The anchors of one map: width and height, and the pixels from one position to the next."""

    width: int
    height: int
    stride: int

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns for an image."""
        return rounded(_f32(height) / _f32(self.stride)), rounded(_f32(width) / _f32(self.stride))


def read_label_maps(
    layer: Layer, widths: Sequence[int], heights: Sequence[int], strides: Sequence[int], name: str
) -> list[LabelMap]:
    """Return the maps of the fields field_w, field_h and `name`.

    Raises:
        ConfigError: their numbers differ, or a value is 0.
    """
    if len({len(widths), len(heights), len(strides)}) != 1 or 0 in (*widths, *heights, *strides):
        raise layer.error(f"needs as many field_w as field_h and {name}, all above 0")
    return [LabelMap(*values) for values in zip(widths, heights, strides, strict=True)]


@dataclass(frozen=True)
class Matching:
    """How anchors match objects.

    Args:
        kind: EXACT for MS-CNN, CORNERS for Cascade R-CNN, whose boxes include their last pixel.
        foreground: overlap above which an anchor matches an object.
        ignored: overlap with regions to ignore from which an anchor is ignored.
        pickup: least overlap of an anchor with an object that no anchor matches, to give it a position.
        margin: how far an anchor may reach beyond the image, as a fraction of half its size; None: any.
        inside: least fraction of an anchor in the image; None: any.
    """

    kind: int
    foreground: float
    ignored: float
    pickup: float
    margin: float | None = None
    inside: float | None = None


@dataclass(frozen=True)
class Truth:
    """The objects of an image on its canvas: labels (n,), boxes x1, y1, x2, y2 (n, 4), ignored (n,)."""

    labels: Floats
    boxes: Floats
    ignored: NDArray[np.bool_]


def is_outside(boxes: Floats, least: tuple[float, float], canvas: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which boxes (n, 4) have their center outside the canvas, or a smaller width or height than `least`."""
    centers, sides = (boxes[:, :2] + boxes[:, 2:]) / _f32(2), boxes[:, 2:] - boxes[:, :2] + _f32(1)
    limits = np.array(canvas[::-1], _f32)
    outside = (centers < 0) | (centers >= limits) | (sides < np.array(least, _f32))
    return outside[:, 0] | outside[:, 1]


def label_anchors(maps: list[LabelMap], matching: Matching, truth: Truth, placed: Placed, outs: list[Floats]) -> None:
    """Write the maps (6, rows, columns) of one image.

    Anchors outside the image, and those to ignore, have label 0 and overlap 1: neither object nor background. An anchor
    that matches an ignored object has label 0 and its overlap.
    """
    extra = _f32(0 if matching.kind == EXACT else 1)
    objects = _boxes(truth.boxes, matching.kind)
    ignored = _boxes(placed.scene.ignored, matching.kind)
    count = len(truth.labels)
    matches, best, best_map = np.zeros(count, np.int64), np.zeros(count, _f32), np.zeros(count, np.int64)
    sides = np.concatenate([(truth.boxes[:, :2] + truth.boxes[:, 2:]) / _f32(2),
                            truth.boxes[:, 2:] - truth.boxes[:, :2] + extra], 1)  # fmt: skip
    for which, (one, out) in enumerate(zip(maps, outs, strict=True)):
        out[...] = 0
        anchors, inside = _anchors(one, out.shape[1:], placed, matching)
        near = overlaps(anchors, ignored, "IOFU").sum(1) >= _f32(matching.ignored)
        if matching.kind == EXACT:
            inside &= ~near.reshape(inside.shape)
        found = overlaps(objects, anchors) * inside.reshape(-1)
        largest = found.max(0, initial=0)
        matched = largest > _f32(matching.foreground)
        index = found.argmax(0) if count else np.zeros(len(largest), np.int64)
        matches += np.bincount(index[matched], minlength=count)
        of_object = found.max(1, initial=0)
        best_map, best = np.where(of_object > best, which, best_map), np.maximum(best, of_object)
        flat = out.reshape(CHANNELS, -1).copy()
        chosen = index[matched]
        flat[0, matched] = np.where(truth.ignored[chosen], _f32(0), truth.labels[chosen])
        flat[1:5, matched] = sides[chosen].T
        flat[5] = np.where(inside.reshape(-1) & (matched | ~near), largest, _f32(1))
        out[...] = flat.reshape(out.shape)
    for number in np.flatnonzero(~truth.ignored & (matches == 0) & (best >= _f32(matching.pickup))):
        if maps:
            _pick_up(maps[best_map[number]], outs[best_map[number]], truth.labels[number], sides[number],
                     None if matching.kind == EXACT else best[number])  # fmt: skip


def _boxes(corners: Floats, kind: int) -> PixelBoxes:
    if kind != EXACT:
        return PixelBoxes.from_corners(corners)
    return PixelBoxes.from_sizes(np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1))


def _anchors(
    one: LabelMap, shape: tuple[int, ...], placed: Placed, matching: Matching
) -> tuple[PixelBoxes, NDArray[np.bool_]]:
    """Return the anchors of all positions, and which positions (rows, columns) are in the image and not to ignore."""
    rows, columns = shape
    x, y = ((np.arange(count, dtype=_f32) + _f32(0.5)) * _f32(one.stride) for count in (columns, rows))
    radius = np.array([one.width, one.height], _f32) / _f32(2)
    centers = np.stack(np.broadcast_arrays(x, y[:, None]), -1)
    corners = np.concatenate([centers - radius, centers + radius], -1)
    height, width = placed.scene.size
    inside = np.zeros((rows, columns), bool)
    first_row, first_column, used_rows, used_columns = (
        rounded(_f32(value) / _f32(one.stride)) for value in (placed.top, placed.left, height, width)
    )
    inside[first_row : first_row + used_rows, first_column : first_column + used_columns] = True
    image = np.array([placed.left, placed.top, placed.left + width, placed.top + height], _f32)
    if matching.margin is not None:
        border = _f32(matching.margin) * radius
        inside &= ~(corners[..., :2] < image[:2] - border).any(-1) & ~(corners[..., 2:] >= image[2:] + border).any(-1)
    anchors = _boxes(corners.reshape(-1, 4), matching.kind)
    if matching.margin is None and matching.inside is not None:
        within = overlaps(anchors, _boxes(image[None], matching.kind), "IOFU")[:, 0]
        inside &= ~(within < _f32(matching.inside)).reshape(rows, columns)
    return anchors, inside


def _pick_up(one: LabelMap, out: Floats, label: np.float32, sides: Floats, overlap: np.float32 | None) -> None:
    """Give an object that no anchor matches the position below its center, unless that has an object."""
    row, column = (min(max(math.floor(float(sides[axis]) / one.stride), 0), out.shape[2 - axis] - 1) for axis in (1, 0))
    if out[0, row, column] > 0:
        return
    out[0, row, column], out[1:5, row, column] = label, sides
    if overlap is not None:
        out[5, row, column] = overlap


def map_shapes(strides: Sequence[int], image: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of the maps of anchors of these strides, for an image of shape (C, H, W)."""
    return [(CHANNELS, *LabelMap(1, 1, max(stride, 1)).shape(image[1], image[2])) for stride in strides]
