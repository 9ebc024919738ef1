"""The boxes of one image, and what resizing, cropping and mirroring make of them.

Boxes are in parts of the image's width and height. Defined by NVIDIA Caffe's `bbox_util.cpp` and `im_transforms.cpp`;
computed in float32, in their order of operations.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.annotations import Annotations, Floats
from caffepy.errors import DataError
from caffepy.proto import caffe_pb2

Resize = caffe_pb2.ResizeParameter
_f32 = np.float32


def areas(boxes: Floats) -> Floats:
    """Of each box; 0 where a maximum is less than its minimum."""
    width, height = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
    return np.where((width < 0) | (height < 0), _f32(0), width * height)


def intersections(first: Floats, second: Floats) -> Floats:
    """The areas that boxes share; the arguments broadcast."""
    low = np.maximum(first[..., :2], second[..., :2])
    high = np.minimum(first[..., 2:], second[..., 2:])
    return areas(np.concatenate((low, high), -1))


def overlaps(first: Floats, second: Floats) -> Floats:
    """Intersection over union; the arguments broadcast."""
    shared = intersections(first, second)
    with np.errstate(all="ignore"):
        return np.where(shared > 0, shared / (areas(first) + areas(second) - shared), _f32(0))


def coverages(covered: Floats, by: Floats) -> Floats:
    """Which part of `covered` lies in `by`; the arguments broadcast."""
    shared = intersections(covered, by)
    with np.errstate(all="ignore"):
        return np.where(shared > 0, shared / areas(covered), _f32(0))


def clip(boxes: Floats) -> Floats:
    """Within the image."""
    return np.asarray(np.clip(boxes, _f32(0), _f32(1)), np.float32)


def crop_annotations(
    found: Annotations, crop: Floats, constraint: caffe_pb2.EmitConstraint | None = None
) -> Annotations:
    """The boxes as parts of the crop, which may be larger than the image; those outside are left out.

    Args:
        found: boxes of the image.
        crop: (4,), in parts of the image.
        constraint: which boxes stay besides those that have a part in the crop.
    """
    boxes = found.boxes
    meets = np.ones(len(found), np.bool_) if constraint is None else _emitted(boxes, crop, constraint)
    outside = (boxes[:, :2] >= crop[2:]).any(1) | (boxes[:, 2:] <= crop[:2]).any(1)
    size = np.tile(crop[2:] - crop[:2], 2)
    projected = clip(np.asarray((boxes - np.tile(crop[:2], 2)) / size, np.float32))
    return found.among(meets & ~outside & (areas(projected) > 0), projected)


def _emitted(boxes: Floats, crop: Floats, constraint: caffe_pb2.EmitConstraint) -> NDArray[np.bool_]:
    if constraint.emit_type == caffe_pb2.EmitConstraint.MIN_OVERLAP:
        return np.asarray(coverages(boxes, crop) > _f32(constraint.emit_overlap))
    centers = (boxes[:, :2] + boxes[:, 2:]) / _f32(2)
    return np.asarray(((centers >= crop[:2]) & (centers <= crop[2:])).all(1))


def mirror_annotations(found: Annotations) -> Annotations:
    """Left to right."""
    boxes = found.boxes.copy()
    boxes[:, 0], boxes[:, 2] = _f32(1) - found.boxes[:, 2], _f32(1) - found.boxes[:, 0]
    return replace(found, boxes=boxes)


def resize_annotations(found: Annotations, param: caffe_pb2.ResizeParameter, height: int, width: int) -> Annotations:
    """The boxes in the resized and perhaps padded image.

    Args:
        found: boxes of the image.
        param: how it was resized.
        height: the image's before.
        width: the image's before.
    """
    new = np.array([param.width, param.height], np.float32)
    old = np.array([width, height], np.float32)
    ratio = old[0] / old[1]
    corners = found.boxes.reshape(-1, 2, 2) * old  # (boxes, minimum or maximum, x or y)
    if param.resize_mode == Resize.FIT_LARGE_SIZE_AND_PAD:
        return replace(found, boxes=_padded(corners, new, old, ratio))
    if param.resize_mode == Resize.FIT_SMALL_SIZE:
        if ratio < new[0] / new[1]:
            new[1] = new[0] / ratio
        else:
            new[0] = ratio * new[1]
    corners = corners * new / old
    return replace(found, boxes=(_bounded(corners, new) / new).reshape(-1, 4))


def _bounded(corners: Floats, size: Floats) -> Floats:
    """Minima at least 0, maxima at most the size."""
    return np.stack((np.maximum(corners[:, 0], _f32(0)), np.minimum(corners[:, 1], size)), 1)


def _padded(corners: Floats, new: Floats, old: Floats, ratio: np.float32) -> Floats:
    padding = np.zeros(2, np.float32)
    if ratio > new[0] / new[1]:
        padding[1] = (new[1] - new[0] / ratio) / _f32(2)
    else:
        padding[0] = (new[0] - ratio * new[1]) / _f32(2)
    moved = _bounded(corners * (new - _f32(2) * padding) / old, new) + padding
    return (moved / new).reshape(-1, 4)


def extrapolate_annotations(
    found: Annotations, param: caffe_pb2.ResizeParameter, height: int, width: int, crop: Floats
) -> Annotations:
    """The boxes in parts of height_scale and width_scale, where FIT_SMALL_SIZE has them.

    Args:
        found: boxes of the crop.
        param: how the image was resized.
        height: the image's before that.
        width: the image's before that.
        crop: (4,), in parts of the resized image.

    Raises:
        DataError: the crop is smaller than the scales, and there are boxes.
    """
    scales = np.array([param.width_scale, param.height_scale], np.float32)
    if param.resize_mode != Resize.FIT_SMALL_SIZE or not (scales > 0).all() or not len(found.boxes):
        return found
    ratio = _f32(width) / _f32(height)
    new = np.array([param.width, param.height], np.float32)
    if ratio < new[0] / new[1]:
        new[1] = new[0] / ratio
    else:
        new[0] = new[1] * ratio
    cropped = new * (crop[2:] - crop[:2])
    if (cropped < scales).any():
        raise DataError(
            f"is {cropped[1]:g} x {cropped[0]:g} after resizing and cropping, less than height_scale "
            f"{param.height_scale} x width_scale {param.width_scale}"
        )
    return replace(found, boxes=(found.boxes.reshape(-1, 2, 2) * cropped / scales).reshape(-1, 4))
