"""SSD's batch samplers: random patches of an image that fit its boxes.

Defined by NVIDIA Caffe's `sampler.cpp`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.annotations import Floats
from caffepy.data.transforms.boxes import coverages, overlaps
from caffepy.data.transforms.draws import Draws
from caffepy.errors import ConfigError
from caffepy.proto import caffe_pb2

_AT_ONCE = 64
"""Patches that are tried at once."""
_f32 = np.float32


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
