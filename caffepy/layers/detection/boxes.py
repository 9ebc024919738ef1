"""Sizes and overlaps of boxes, and their encoding relative to prior boxes (`bbox_util.cpp`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, exact_function
from caffepy.errors import DataError
from caffepy.layers.core.base import Layer
from caffepy.proto import caffe_pb2

Rows: TypeAlias = Any
"""A NumPy array of float32: boxes (..., 4), or one number for each box."""

CORNER = caffe_pb2.PriorBoxParameter.CORNER
CENTER_SIZE = caffe_pb2.PriorBoxParameter.CENTER_SIZE


@exact_function
def overlap(a: Floats, a_sizes: Floats, i: Int, b: Floats, b_sizes: Floats, j: Int, extra: Float) -> Float:
    """Return intersection over union of box i of `a` and box j of `b`; 0 if they are disjoint.

    Args:
        a: boxes.
        a_sizes: areas of `a`.
        i: index in `a`.
        b: boxes.
        b_sizes: areas of `b`.
        j: index in `b`.
        extra: added to the intersection's width and height: 0, or 1 for boxes in pixels. Disjoint boxes then have an
            intersection of 1, as in Caffe.
    """
    left, top, right, bottom = a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]
    other_left, other_top, other_right, other_bottom = b[4 * j], b[4 * j + 1], b[4 * j + 2], b[4 * j + 3]
    width = height = extra
    if not (other_left > right or other_right < left or other_top > bottom or other_bottom < top):
        # Not min and max: NaN must propagate as with C++'s.
        left = other_left if left < other_left else left
        top = other_top if top < other_top else top
        right = other_right if other_right < right else right
        bottom = other_bottom if other_bottom < bottom else bottom
        width += right - left
        height += bottom - top
    if width > 0 and height > 0:
        shared = width * height
        return shared / (a_sizes[i] + b_sizes[j] - shared)
    return np.float32(0)


def box_sizes(boxes: Rows, extra: float = 0.0) -> Rows:
    """Return the area of each box (..., 4), 0 if a side is negative. `extra` is added to the sides: 1 for pixels."""
    width, height = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
    valid = ~((boxes[..., 2] < boxes[..., 0]) | (boxes[..., 3] < boxes[..., 1]))
    more = np.float32(extra)
    return np.where(valid, (width + more) * (height + more), np.float32(0))


def overlap_matrix(a: Rows, a_sizes: Rows, b: Rows, b_sizes: Rows, extra: float = 0.0) -> Rows:
    """Return the `overlap` of each box of `a` (A, 4) with each of `b` (B, 4), as (A, B); -1 in place of NaN."""
    one, other, more = a[:, None], b[None], np.float32(extra)
    meet = ~((other[..., :2] > one[..., 2:]) | (other[..., 2:] < one[..., :2])).any(-1)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    sides = np.where(meet[..., None], sides, np.float32(0)) + more
    shared = sides[..., 0] * sides[..., 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = shared / (a_sizes[:, None] + b_sizes[None] - shared)
    return np.nan_to_num(np.where((sides > 0).all(-1), ratio, np.float32(0)), nan=-1.0)


def clip_boxes(boxes: Rows, height: float = 1.0, width: float = 1.0) -> Rows:
    """Clip boxes to an image of this size."""
    limits = np.array([width, height, width, height], np.float32)
    return np.maximum(np.minimum(boxes, limits), np.float32(0))


@dataclass(frozen=True)
class Priors:
    """Prior boxes (P, 4), their sizes (P,) and the variances (P, 4) of predictions relative to them."""

    boxes: Rows
    sizes: Rows
    variances: Rows

    def select(self, indices: NDArray[np.intp]) -> Priors:
        """Return the priors with these indices, which may repeat."""
        return Priors(self.boxes[indices], self.sizes[indices], self.variances[indices])

    @property
    def extents(self) -> Rows:
        """Width and height (P, 2)."""
        return self.boxes[:, 2:] - self.boxes[:, :2]

    @property
    def centers(self) -> Rows:
        """x and y of the centers (P, 2)."""
        return (self.boxes[:, :2] + self.boxes[:, 2:]) / np.float32(2)


def read_priors(layer: Layer, values: Rows, code: int) -> Priors:
    """Return the priors in a PriorBox layer's top (1, 2, 4 P).

    Raises:
        DataError: a prior has a variance, or with another `code` than CORNER a side, that is not above 0.
    """
    boxes, variances = np.ascontiguousarray(values, np.float32).reshape(2, -1, 4)
    priors = Priors(boxes, box_sizes(boxes), variances)
    good = (variances > 0).all(1)
    if code != CORNER:
        good &= (priors.extents > 0).all(1)
    if not good.all():
        number = int(np.flatnonzero(~good)[0])
        raise bad_prior(layer, number, boxes[number], variances[number], code)
    return priors


def bad_prior(layer: Layer, number: int, box: Rows, variances: Rows, code: int) -> DataError:
    """Return the error that prior `number` of bottom 2 is invalid."""
    corners, factors = (" ".join(f"{v:g}" for v in values) for values in (box, variances))
    return layer.data_error(
        f"prior {number} of '{layer.bottom_names[2]}' is ({corners}) with variances ({factors}): it needs variances "
        "above 0" + (" and a width and height above 0" if code != CORNER else "") + "; correct its PriorBox layer"
    )


def decode(priors: Priors, codes: Rows, code: int, variance_in_target: bool) -> Rows:
    """Return the boxes (..., P, 4) that predictions encode.

    Args:
        priors: P priors.
        codes: the predictions (..., P, 4).
        code: CodeType: CORNER adds the prediction to the corners, CORNER_SIZE in units of the prior's sides;
            CENTER_SIZE adds it to the center likewise and multiplies the sides by exp(prediction).
        variance_in_target: whether predictions are not multiplied by the priors' variances.
    """
    codes = codes if variance_in_target else priors.variances * codes
    if code == CORNER:
        return np.ascontiguousarray(priors.boxes + codes)
    extents = priors.extents
    if code != CENTER_SIZE:
        return np.ascontiguousarray(priors.boxes + codes * np.tile(extents, 2))
    centers = codes[..., :2] * extents + priors.centers
    with np.errstate(over="ignore"):
        half = np.exp(codes[..., 2:].astype(np.float64)).astype(np.float32) * extents / np.float32(2)
    return np.ascontiguousarray(np.concatenate([centers - half, centers + half], axis=-1))


def encode(priors: Priors, boxes: Rows, code: int) -> Rows:
    """Return the targets of predictions for `boxes` (P, 4), one for each prior: the inverse of `decode`."""
    if code == CORNER:
        return (boxes - priors.boxes) / priors.variances
    extents = priors.extents
    if code != CENTER_SIZE:
        return (boxes - priors.boxes) / np.tile(extents, 2) / priors.variances
    centers = (boxes[:, :2] + boxes[:, 2:]) / np.float32(2)
    ratios = (boxes[:, 2:] - boxes[:, :2]) / extents
    return np.concatenate([(centers - priors.centers) / extents, np.log(ratios)], axis=1) / priors.variances
