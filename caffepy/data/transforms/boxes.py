"""The boxes of one image: read from an AnnotatedDatum, changed with the image, and patches sampled to fit them.

Boxes are in parts of the image's width and height. Defined by NVIDIA Caffe's `bbox_util.cpp`, `im_transforms.cpp` and
`sampler.cpp`; computed in float32, in their order of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.data.transforms.draws import Draws
from caffepy.errors import ConfigError, DataError
from caffepy.proto import caffe_pb2

Floats = NDArray[np.float32]
COLUMNS = 8
"""Of the rows that a net takes: item, label, instance, xmin, ymin, xmax, ymax, difficult."""
_MAX_BOXES = 1 << 16
"""Of one image: more would take the memory of a batch."""
_FARTHEST = 100.0
"""Widths or heights of the image that a corner may lie beyond it. Corners in pixels are mostly farther."""


@dataclass(frozen=True)
class Annotations:
    """The boxes of one image, in the order of the record.

    Args:
        labels: of their groups.
        instances: their numbers.
        boxes: (boxes, 4): xmin, ymin, xmax, ymax in parts of the image's width and height.
        difficult: whether they are hard to see.
    """

    labels: NDArray[np.int64]
    instances: NDArray[np.int64]
    boxes: Floats
    difficult: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, item: int) -> Floats:
        """(boxes, 8) as `COLUMNS` says; `item` is the image's index in the batch."""
        rows = np.empty((len(self), COLUMNS), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 7] = item, self.labels, self.instances, self.difficult
        rows[:, 3:7] = self.boxes
        return rows

    def among(self, chosen: NDArray[np.bool_], boxes: Floats) -> Annotations:
        """Those that are chosen, with other boxes."""
        return Annotations(self.labels[chosen], self.instances[chosen], boxes[chosen], self.difficult[chosen])


def parse_annotated_datum(record: bytes | memoryview) -> tuple[caffe_pb2.AnnotatedDatum, Annotations]:
    """Parse a record and check its boxes.

    Raises:
        DataError: it is no AnnotatedDatum, or its boxes cannot be boxes. The message continues a sentence that begins
            with the record's name.
    """
    try:
        parsed = caffe_pb2.AnnotatedDatum.FromString(bytes(record))
    except (DecodeError, ValueError) as error:
        raise DataError(
            f"is not an AnnotatedDatum ({error}); build the set again with `caffepy convert_annoset`"
        ) from error
    if not parsed.HasField("datum"):
        raise DataError("is an AnnotatedDatum without a datum; build the set again with `caffepy convert_annoset`")
    return parsed, _annotations(parsed)


def _annotations(parsed: caffe_pb2.AnnotatedDatum) -> Annotations:
    count = sum(len(group.annotation) for group in parsed.annotation_group)
    if count > _MAX_BOXES:
        raise DataError(f"has {count} boxes; more than {_MAX_BOXES} are refused")
    found = [(group.group_label, one) for group in parsed.annotation_group for one in group.annotation]
    values = [(one.bbox.xmin, one.bbox.ymin, one.bbox.xmax, one.bbox.ymax) for _, one in found]
    boxes = np.array(values, np.float32).reshape(-1, 4)
    if not (np.abs(boxes) <= _FARTHEST).all():  # neither is a NaN
        bad = boxes[~(np.abs(boxes) <= _FARTHEST).all(1)][0]
        raise DataError(
            f"has a box ({', '.join(f'{value:g}' for value in bad)}), which lies nowhere near the image; the corners "
            "must be in parts of its width and height, not in pixels"
        )
    return Annotations(
        np.array([label for label, _ in found], np.int64),
        np.array([one.instance_id for _, one in found], np.int64),
        boxes,
        np.array([one.bbox.difficult for _, one in found], np.bool_),
    )


# -- what resizing, cropping and mirroring make of boxes -----------------------------------------------


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


# -- batch samplers -----------------------------------------------------------------------------------


_AT_ONCE = 64
"""Patches that are tried at once."""


def check_samplers(samplers: Sequence[caffe_pb2.BatchSampler], where: str) -> None:
    """Refuse ranges that are none.

    Raises:
        ConfigError: naming the field.
    """
    for batch_sampler in samplers:
        sampler = batch_sampler.sampler
        if not 0 < sampler.min_scale <= sampler.max_scale <= 1:
            raise ConfigError(
                f"{where}: a sampler needs 0 < min_scale <= max_scale <= 1, not {sampler.min_scale:g} and "
                f"{sampler.max_scale:g}"
            )
        if not 0 < sampler.min_aspect_ratio <= sampler.max_aspect_ratio < np.inf:
            raise ConfigError(
                f"{where}: a sampler needs 0 < min_aspect_ratio <= max_aspect_ratio, not "
                f"{sampler.min_aspect_ratio:g} and {sampler.max_aspect_ratio:g}"
            )


def sample_patch(samplers: Sequence[caffe_pb2.BatchSampler], objects: Floats, draws: Draws) -> Floats | None:
    """One of the patches (4,) that all samplers together find; None if they find none.

    Args:
        samplers: the prototxt's.
        objects: (boxes, 4) of the image.
        draws: the sample's random numbers.
    """
    found = [patch for one in samplers if one.use_original_image for patch in _patches(one, objects, draws)]
    return found[draws.below(len(found))] if found else None


def _patches(batch_sampler: caffe_pb2.BatchSampler, objects: Floats, draws: Draws) -> list[Floats]:
    found: list[Floats] = []
    most = batch_sampler.max_sample if batch_sampler.HasField("max_sample") else batch_sampler.max_trials
    left = batch_sampler.max_trials
    while left > 0 and len(found) < most:
        count = min(left, _AT_ONCE)
        patches = random_patches(batch_sampler.sampler, count, draws)
        found.extend(patches[satisfies(patches, objects, batch_sampler.sample_constraint)])
        left -= count
    return found[:most]


def random_patches(sampler: caffe_pb2.Sampler, count: int, draws: Draws) -> Floats:
    """(count, 4) patches: sides scale * sqrt(ratio) and scale / sqrt(ratio), at a random place within the image."""
    scale = draws.uniforms(sampler.min_scale, sampler.max_scale, count)
    ratio = draws.uniforms(sampler.min_aspect_ratio, sampler.max_aspect_ratio, count)
    ratio = np.minimum(np.maximum(ratio, scale * scale), _f32(1) / (scale * scale))
    size = np.stack((scale * np.sqrt(ratio), scale / np.sqrt(ratio)), 1)
    corner = np.stack([draws.uniforms(0, np.maximum(_f32(1) - size[:, axis], 0), count) for axis in (0, 1)], 1)
    return np.concatenate((corner, corner + size), 1)


def satisfies(patches: Floats, objects: Floats, constraint: caffe_pb2.SampleConstraint) -> NDArray[np.bool_]:
    """Whether each patch meets the constraint with one of the objects; True without a constraint.

    Of several measures that are limited the first decides, in the order jaccard_overlap, sample_coverage and
    object_coverage: Caffe's SatisfySampleConstraint does not take back what it found by the first.
    """
    pairs = patches[:, None], objects[None]
    measures: dict[str, Callable[[], Floats]] = {
        "jaccard_overlap": lambda: overlaps(*pairs),
        "sample_coverage": lambda: coverages(*pairs),
        "object_coverage": lambda: coverages(pairs[1], pairs[0]),
    }
    for name, measure in measures.items():
        least, most = f"min_{name}", f"max_{name}"
        if not (constraint.HasField(least) or constraint.HasField(most)):
            continue
        values = measure()
        meets = np.ones(values.shape, np.bool_)
        if constraint.HasField(least):
            meets &= values >= _f32(getattr(constraint, least))
        if constraint.HasField(most):
            meets &= values <= _f32(getattr(constraint, most))
        return np.asarray(meets.any(1))
    return np.ones(len(patches), np.bool_)
