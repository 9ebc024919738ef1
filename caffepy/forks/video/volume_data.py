"""VideoWithVoxelTruthData and VideoSegmentationData of C3D: clips with a truth for each voxel."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from caffepy.data.clips import ClipLine, ClipList, ClipLoader, ClipTransform, Floats
from caffepy.data.random import SampleRng
from caffepy.errors import DataError
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source
from caffepy.layers.input.video_data import clip_loader
from caffepy.layers.layer import register_layer
from caffepy.utils.files import read_data

_MAX_BYTES = 1 << 31
_HEADER = 20
"""Bytes of N, C, L, H and W, 32-bit whole numbers in the order of little-endian machines."""


def read_volume(path: str, as_bytes: bool) -> NDArray[np.generic]:
    """Return the volume (C, L, H, W) of a file: N, which is 1, C, L, H and W, then the values.

    Raises:
        DataError: it cannot be read, or its size is not that of its header.
    """
    content = read_data(path, _MAX_BYTES)
    shape = tuple(np.frombuffer(content[:_HEADER], "<i4").tolist()) if len(content) >= _HEADER else (0,)
    dtype = np.dtype(np.uint8 if as_bytes else "<f4")
    size = _HEADER + math.prod(shape) * dtype.itemsize
    if shape[0] != 1 or min(shape) < 1 or size != len(content):
        raise DataError(
            f"has {len(content)} bytes and begins with the sizes {' x '.join(map(str, shape))}; a volume of 1 x C x L "
            f"x H x W {'bytes' if as_bytes else 'numbers of single precision'} would have {max(size, _HEADER)} bytes"
        )
    return np.frombuffer(content, dtype, offset=_HEADER).reshape(shape[1:])


@register_layer("VideoWithVoxelTruthData")
class VideoWithVoxelTruthDataLayer(PrefetchingLayer):
    """Clips and the truth of each voxel from files (C3D's `video_with_voxel_truth_data_layer.cpp`).

    Tops: (N, C - T, L, H, W), (N, T, L, H, W), where T is `num_truth_channels`. Each line of `source` names a file:
    five 32-bit integers 1, C, L, H, W, and then the values, bytes with `use_byte_input`, else numbers of single
    precision. Both tops have one crop, random in TRAIN, and are mirrored together. The clip becomes (x - mean) * scale;
    the truth becomes t * truth_scale, or with `clip_min` (t - clip_min) / (clip_max - clip_min), cut to 0 to 1. With
    `is_flow` mirroring negates the first channel of the truth.

    In TRAIN a file that cannot be read is replaced by the next one.

    Raises:
        ConfigError: a setting is wrong.
        DataError: the list or, in TEST, a file cannot be read.
    """

    tops = (2, 2)

    def batch_size(self) -> int:
        return self.param.image_data_param.batch_size

    @property
    def truth_channels(self) -> int:
        """How many of a volume's last channels are the truth."""
        return self.param.image_data_param.num_truth_channels

    @property
    def as_bytes(self) -> bool:
        """Whether the files hold bytes."""
        return self.param.image_data_param.use_byte_input

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param, transform = self.param.image_data_param, self.param.transform_param
        if transform.mirror and not transform.crop_size:
            raise self.error("mirror needs crop_size")
        if param.HasField("clip_min") and not param.clip_max > param.clip_min:
            raise self.error(f"clip_min is {param.clip_min:g} and clip_max {param.clip_max:g}; it must be larger")
        if self.truth_channels < 1:
            raise self.error("num_truth_channels must be at least 1")
        context = self.context
        self._transform = ClipTransform(transform, context.phase, context.resolve, self.where)
        self._list = ClipList(context.resolve(param.source), numbered=False, labelled=False)
        return self._list, self._loader_of(0, 0).first_shapes()

    def _loader_of(self, seed: int, stream: int) -> ClipLoader:
        param = self.param.image_data_param
        return clip_loader(self, self._list, self.read, self._transform, param.shuffle, param.rand_skip, seed, stream)

    def make_loader(self) -> DescribingLoader:
        stream = self.random_stream()
        return self._loader_of(stream.seed, stream.stream)

    def read(self, line: ClipLine, rng: SampleRng) -> list[Floats]:
        """Return a clip and its truth; see `ClipReader`."""
        volume = read_volume(line.path, self.as_bytes)
        channels = volume.shape[0] - self.truth_channels
        if channels < 1:
            raise DataError(f"has {volume.shape[0]} channels; num_truth_channels is {self.truth_channels}")
        rows, columns = self._transform.crop_of(volume.shape[2], volume.shape[3], rng)
        mirrored = self._transform.mirrors(rng)
        clip, truth = volume[:channels], self._truth(volume[channels:, :, rows, columns], mirrored)
        mean = np.broadcast_to(self._transform.mean(clip.shape), clip.shape)[..., rows, columns]
        data = self._transform.normalised(clip[..., rows, columns], mean)
        return [part[..., ::-1] for part in (data, truth)] if mirrored else [data, truth]

    def _truth(self, values: NDArray[np.generic], mirrored: bool) -> Floats:
        param = self.param.image_data_param
        truth: Floats = values.astype(np.float32)
        if param.is_flow and mirrored:
            truth[0] *= -1
        if param.HasField("clip_min"):
            truth = (truth - np.float32(param.clip_min)) / np.float32(param.clip_max - param.clip_min)
            return truth.clip(0, 1)
        return truth if param.truth_scale == 1 else truth * np.float32(param.truth_scale)


@register_layer("VideoSegmentationData")
class VideoSegmentationDataLayer(VideoWithVoxelTruthDataLayer):
    """Clips and the class of each voxel from files (C3D's `video_segmentation_data_layer.cpp`).

    As VideoWithVoxelTruthData with volumes of bytes whose last channel is the class, which is not scaled.
    Tops: (N, C - 1, L, H, W), (N, 1, L, H, W).

    Raises:
        ConfigError: a setting is wrong.
        DataError: the list or, in TEST, a file cannot be read.
    """

    @property
    def truth_channels(self) -> int:
        """The classes are one channel."""
        return 1

    @property
    def as_bytes(self) -> bool:
        """The files hold bytes."""
        return True

    def _truth(self, values: NDArray[np.generic], mirrored: bool) -> Floats:
        return values.astype(np.float32)
