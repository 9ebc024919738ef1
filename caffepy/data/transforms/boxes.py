"""Boxes of one image: parsing AnnotatedDatum, boxes transformed with the image, and sampled patches.

Boxes are normalised to the image's width and height. Defined by NVIDIA Caffe's `bbox_util.cpp`, `im_transforms.cpp`
and `sampler.cpp`; computed in float32 in the same order of operations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.data.boxes import Boxes, box_areas, overlaps
from caffepy.data.random import SampleRng
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2

Floats = NDArray[np.float32]
COLUMNS = 8
"""Columns of a label row: item, label, instance, xmin, ymin, xmax, ymax, difficult."""
_MAX_BOXES = 1 << 16
"""Maximum boxes of one image; bounds the memory of a batch."""
_WHOLE, _HALF = 0.2, 0.2
"""Chances of `jitter_patch` to keep the image, and to cut off up to half of `jitter`."""
_MAX_COORDINATE = 100.0
"""Maximum absolute normalised coordinate. Coordinates in pixels usually exceed it."""


@dataclass(frozen=True)
class Annotations:
    """The boxes of one image, in the record's order.

    Args:
        labels: (boxes,) labels of the boxes' groups.
        instances: (boxes,) instance numbers.
        boxes: (boxes, 4) normalised xmin, ymin, xmax, ymax.
        difficult: (boxes,) whether the box is marked difficult.
    """

    labels: NDArray[np.int64]
    instances: NDArray[np.int64]
    boxes: Floats
    difficult: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, item: int) -> Floats:
        """Return label rows (boxes, 8); `item` is the image's index in the batch."""
        rows = np.empty((len(self), COLUMNS), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 7] = item, self.labels, self.instances, self.difficult
        rows[:, 3:7] = self.boxes
        return rows

    def yolo_rows(self, difficult: bool) -> Floats:
        """Return rows of YOLO (boxes, 5): class from 0, center x, center y, width, height.

        Args:
            difficult: whether to include boxes marked difficult.
        """
        chosen = difficult | ~self.difficult
        low, high = self.boxes[chosen, :2], self.boxes[chosen, 2:]
        rows = ((self.labels[chosen] - 1)[:, None], (low + high) / _f32(2), high - low)
        return np.asarray(np.concatenate(rows, 1), np.float32)

    def select(self, chosen: NDArray[np.bool_], boxes: Floats) -> Annotations:
        """Return the annotations where `chosen` is true, with `boxes` replaced."""
        return Annotations(self.labels[chosen], self.instances[chosen], boxes[chosen], self.difficult[chosen])


def parse_annotated_datum(record: bytes | memoryview) -> tuple[caffe_pb2.AnnotatedDatum, Annotations]:
    """Parse a record and check its boxes.

    Raises:
        DataError: the record is not a valid AnnotatedDatum, or a box has invalid coordinates. The message follows a
            record's name.
    """
    try:
        parsed = caffe_pb2.AnnotatedDatum.FromString(bytes(record))
    except (DecodeError, ValueError) as error:
        raise DataError(
            f"is not an AnnotatedDatum ({error}); rebuild the database with `caffepy convert_annoset`"
        ) from error
    if not parsed.HasField("datum"):
        raise DataError("is an AnnotatedDatum without a datum; rebuild the database with `caffepy convert_annoset`")
    return parsed, _annotations(parsed)


def _annotations(parsed: caffe_pb2.AnnotatedDatum) -> Annotations:
    count = sum(len(group.annotation) for group in parsed.annotation_group)
    if count > _MAX_BOXES:
        raise DataError(f"has {count} boxes; more than {_MAX_BOXES} are refused")
    labelled = [(group.group_label, item) for group in parsed.annotation_group for item in group.annotation]
    values = [(item.bbox.xmin, item.bbox.ymin, item.bbox.xmax, item.bbox.ymax) for _, item in labelled]
    boxes = np.array(values, np.float32).reshape(-1, 4)
    if not (np.abs(boxes) <= _MAX_COORDINATE).all():  # also false for NaN
        bad = boxes[~(np.abs(boxes) <= _MAX_COORDINATE).all(1)][0]
        raise DataError(
            f"has a box ({', '.join(f'{value:g}' for value in bad)}), which lies far outside the image; corners must "
            "be normalised to its width and height, not in pixels"
        )
    return Annotations(
        np.array([label for label, _ in labelled], np.int64),
        np.array([item.instance_id for _, item in labelled], np.int64),
        boxes,
        np.array([item.bbox.difficult for _, item in labelled], np.bool_),
    )


# -- boxes under resizing, cropping and mirroring ------------------------------------------------------


Resize = caffe_pb2.ResizeParameter
_f32 = np.float32


def coverages(covered: Floats, by: Floats) -> Floats:
    """Return intersection / area of `covered`; the arguments broadcast."""
    found: Floats = overlaps(Boxes.from_corners(covered), Boxes.from_corners(by), "IOFU")
    return found


def clip(boxes: Floats) -> Floats:
    """Clip boxes to [0, 1]."""
    return np.asarray(np.clip(boxes, _f32(0), _f32(1)), np.float32)


def crop_annotations(
    annotations: Annotations, crop: Floats, constraint: caffe_pb2.EmitConstraint | None = None
) -> Annotations:
    """Normalise boxes to a crop, which may exceed the image; boxes outside of it are dropped.

    Args:
        annotations: boxes of the image.
        crop: (4,), normalised to the image.
        constraint: additional condition for keeping a box.
    """
    boxes = annotations.boxes
    meets = np.ones(len(annotations), np.bool_) if constraint is None else _meets_constraint(boxes, crop, constraint)
    outside = (boxes[:, :2] >= crop[2:]).any(1) | (boxes[:, 2:] <= crop[:2]).any(1)
    size = np.tile(crop[2:] - crop[:2], 2)
    projected = clip(np.asarray((boxes - np.tile(crop[:2], 2)) / size, np.float32))
    return annotations.select(meets & ~outside & (box_areas(projected) > 0), projected)


def _meets_constraint(boxes: Floats, crop: Floats, constraint: caffe_pb2.EmitConstraint) -> NDArray[np.bool_]:
    if constraint.emit_type == caffe_pb2.EmitConstraint.MIN_OVERLAP:
        return np.asarray(coverages(boxes, crop) > _f32(constraint.emit_overlap))
    centers = (boxes[:, :2] + boxes[:, 2:]) / _f32(2)
    return np.asarray(((centers >= crop[:2]) & (centers <= crop[2:])).all(1))


def mirror_annotations(annotations: Annotations) -> Annotations:
    """Mirror boxes horizontally."""
    boxes = annotations.boxes.copy()
    boxes[:, 0], boxes[:, 2] = _f32(1) - annotations.boxes[:, 2], _f32(1) - annotations.boxes[:, 0]
    return replace(annotations, boxes=boxes)


def resize_annotations(
    annotations: Annotations, param: caffe_pb2.ResizeParameter, height: int, width: int
) -> Annotations:
    """Return the boxes in the image that `apply_resize` returns.

    Args:
        annotations: boxes of the image.
        param: the image's resize_param.
        height: the image's height before resizing.
        width: the image's width before resizing.
    """
    new = np.array([param.width, param.height], np.float32)
    old = np.array([width, height], np.float32)
    ratio = old[0] / old[1]
    corners = annotations.boxes.reshape(-1, 2, 2) * old  # (boxes, minimum or maximum, x or y)
    if param.resize_mode == Resize.FIT_LARGE_SIZE_AND_PAD:
        return replace(annotations, boxes=_padded(corners, new, old, ratio))
    if param.resize_mode == Resize.FIT_SMALL_SIZE:
        if ratio < new[0] / new[1]:
            new[1] = new[0] / ratio
        else:
            new[0] = ratio * new[1]
    corners = corners * new / old
    return replace(annotations, boxes=(_clamp(corners, new) / new).reshape(-1, 4))


def _clamp(corners: Floats, size: Floats) -> Floats:
    """Clamp minima to 0 and maxima to the size."""
    return np.stack((np.maximum(corners[:, 0], _f32(0)), np.minimum(corners[:, 1], size)), 1)


def _padded(corners: Floats, new: Floats, old: Floats, ratio: np.float32) -> Floats:
    padding = np.zeros(2, np.float32)
    if ratio > new[0] / new[1]:
        padding[1] = (new[1] - new[0] / ratio) / _f32(2)
    else:
        padding[0] = (new[0] - ratio * new[1]) / _f32(2)
    moved = _clamp(corners * (new - _f32(2) * padding) / old, new) + padding
    return (moved / new).reshape(-1, 4)


def extrapolate_annotations(
    annotations: Annotations, param: caffe_pb2.ResizeParameter, height: int, width: int, crop: Floats
) -> Annotations:
    """Normalise boxes to height_scale and width_scale, for FIT_SMALL_SIZE.

    Args:
        annotations: boxes of the crop.
        param: the image's resize_param.
        height: the image's height before resizing.
        width: the image's width before resizing.
        crop: (4,), normalised to the resized image.

    Raises:
        DataError: there are boxes and the crop is smaller than the scales.
    """
    scales = np.array([param.width_scale, param.height_scale], np.float32)
    if param.resize_mode != Resize.FIT_SMALL_SIZE or not (scales > 0).all() or not len(annotations.boxes):
        return annotations
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
    return replace(annotations, boxes=(annotations.boxes.reshape(-1, 2, 2) * cropped / scales).reshape(-1, 4))


# -- batch samplers -----------------------------------------------------------------------------------


_CHUNK = 64
"""Candidate patches per batch."""


def check_samplers(samplers: Sequence[caffe_pb2.BatchSampler], where: str) -> None:
    """Refuse invalid ranges of samplers.

    Raises:
        ConfigError: the message names the fields.
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


def sample_patch(samplers: Sequence[caffe_pb2.BatchSampler], objects: Floats, rng: SampleRng) -> Floats | None:
    """Return a random patch (4,) among the patches of all samplers; None if there are none.

    Args:
        samplers: the layer's batch_sampler.
        objects: (boxes, 4), the image's boxes.
        rng: the sample's random numbers.
    """
    patches = [patch for each in samplers if each.use_original_image for patch in _patches(each, objects, rng)]
    return patches[rng.below(len(patches))] if patches else None


def jitter_patch(jitter: float, square: bool, rng: SampleRng) -> Floats | None:
    """Return a random patch (4,) of YOLO (GenerateJitterSamples in MobileNet-YOLO's `sampler.cpp`); None: the image.

    One image of five stays whole. One of five loses up to half of `jitter`, the others lose up to `jitter`.

    Args:
        jitter: largest part of the width and of the height that is cut off.
        square: whether both sides lose the same part.
        rng: the sample's random numbers.
    """
    kind = rng.uniform(0, 1)
    if kind < _WHOLE:
        return None
    least = 1 - (jitter / 2 if kind < _WHOLE + _HALF else jitter)
    width = _f32(rng.uniform(least, 1))
    height = width if square else _f32(rng.uniform(least, 1))
    left, top = (_f32(rng.uniform(0, float(_f32(1) - side))) for side in (width, height))
    return np.array([left, top, left + width, top + height], np.float32)


def _patches(batch_sampler: caffe_pb2.BatchSampler, objects: Floats, rng: SampleRng) -> list[Floats]:
    accepted: list[Floats] = []
    max_patches = batch_sampler.max_sample if batch_sampler.HasField("max_sample") else batch_sampler.max_trials
    trials = batch_sampler.max_trials
    while trials > 0 and len(accepted) < max_patches:
        count = min(trials, _CHUNK)
        patches = random_patches(batch_sampler.sampler, count, rng)
        accepted.extend(patches[satisfies(patches, objects, batch_sampler.sample_constraint)])
        trials -= count
    return accepted[:max_patches]


def random_patches(sampler: caffe_pb2.Sampler, count: int, rng: SampleRng) -> Floats:
    """Draw (count, 4) patches with sides scale * sqrt(ratio) and scale / sqrt(ratio) at random positions."""
    fractions = rng.words(4 * count).reshape(4, count) / 2.0**32
    low = np.array([sampler.min_scale, sampler.min_aspect_ratio])[:, None]
    high = np.array([sampler.max_scale, sampler.max_aspect_ratio])[:, None]
    scale, ratio = (low + (high - low) * fractions[:2]).astype(np.float32)
    ratio = np.minimum(np.maximum(ratio, scale * scale), _f32(1) / (scale * scale))
    root = np.sqrt(ratio)
    sides = np.stack((scale * root, scale / root))
    corners = (np.maximum(_f32(1) - sides, 0) * fractions[2:]).astype(np.float32)
    return np.asarray(np.concatenate((corners, corners + sides)).T)


def satisfies(patches: Floats, objects: Floats, constraint: caffe_pb2.SampleConstraint) -> NDArray[np.bool_]:
    """Return whether each patch meets the constraint with one of the objects; True without a constraint.

    If several measures are limited, only the first counts, in the order jaccard_overlap, sample_coverage,
    object_coverage, as in Caffe's SatisfySampleConstraint.
    """
    pairs = patches[:, None], objects[None]
    measures: dict[str, Callable[[], Floats]] = {
        "jaccard_overlap": lambda: overlaps(Boxes.from_corners(pairs[0]), Boxes.from_corners(pairs[1])),
        "sample_coverage": lambda: coverages(*pairs),
        "object_coverage": lambda: coverages(pairs[1], pairs[0]),
    }
    for name, measure in measures.items():
        lower, upper = f"min_{name}", f"max_{name}"
        if not (constraint.HasField(lower) or constraint.HasField(upper)):
            continue
        values = measure()
        meets = np.ones(values.shape, np.bool_)
        if constraint.HasField(lower):
            meets &= values >= _f32(getattr(constraint, lower))
        if constraint.HasField(upper):
            meets &= values <= _f32(getattr(constraint, upper))
        return np.asarray(meets.any(1))
    return np.ones(len(patches), np.bool_)
