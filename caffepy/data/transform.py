"""Image transformation before the net (Caffe's `data_transformer.cpp`).

`Transformer.preprocess` optionally resizes the image and adds noise (see `caffepy.data.transforms`). Then
y[c, h, w] = (x[c, top + h, left + w'] - mean[c, top + h, left + w']) * scale, where w' is w, or crop - 1 - w when
mirrored. TRAIN crops at a random offset, TEST at the center, ((H - crop) // 2, (W - crop) // 2). `mirror` acts in both
phases.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import Image, Pixels, sides, to_image, to_pixels, without_ipp
from caffepy.data.mean import read_mean
from caffepy.data.random import SampleRng, below, sample_words
from caffepy.data.sources.databases import hash_of
from caffepy.data.transforms.im_transforms import (
    INTEL_RESIZES,
    apply_noise,
    apply_resize,
    check_distort,
    check_intel_resize,
    check_noise,
    check_random_resize,
    check_resizes,
    intel_resize,
    random_resize,
    resizes_randomly,
)
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2

logger = logging.getLogger(__name__)
_MAX_CROP = 1 << 16
_ANNOTATED_ONLY = ("distort_param", "expand_param", "emit_constraint")
"""Fields that only AnnotatedData applies."""
_SEGMENTS_ONLY = ("fix_crop", "more_fix_crop", "multi_scale", "max_distort", "is_flow")
"""Fields that only VideoData of TSN applies."""


def check_transform(param: caffe_pb2.TransformationParameter, where: str) -> None:
    """Refuse contradictory or out-of-range fields.

    Raises:
        ConfigError: the message names the field.
    """
    if param.HasField("mean_file") and param.mean_value:
        raise ConfigError(f"{where}: transform_param has both mean_file and mean_value; keep one of them")
    if param.force_color and param.force_gray:
        raise ConfigError(f"{where}: transform_param has both force_color and force_gray; keep one of them")
    if not param.crop_size and bool(param.crop_h) != bool(param.crop_w):
        raise ConfigError(f"{where}: transform_param needs crop_h and crop_w, or neither; crop_size stands for both")
    if max(param.crop_size, param.crop_h, param.crop_w) > _MAX_CROP:
        raise ConfigError(f"{where}: transform_param has a crop of more than {_MAX_CROP} pixels")
    check_random_resize(param, where)
    check_intel_resize(param, where)
    check_resizes(param.resize_param, where)
    check_noise(param.noise_param, where)
    check_distort(param.distort_param, where)


def both_sides(height: int, width: int, where: str, names: str = "new_height and new_width") -> tuple[int, int] | None:
    """Return a height and a width; None if neither is set.

    Raises:
        ConfigError: only one of them is set.
    """
    if bool(height) != bool(width):
        raise ConfigError(f"{where}: {names} must be set together")
    return (height, width) if height else None


def warn_about_unused_fields(param: caffe_pb2.TransformationParameter, nvidia: bool, where: str) -> None:
    """Warn about fields that act only in AnnotatedData or VideoData or, in NVIDIA's dialect, not in this layer."""
    segments = [field for field in _SEGMENTS_ONLY if param.HasField(field)]
    if segments:
        logger.warning("%s: %s is for VideoData with a list and has no effect here", where, " and ".join(segments))
    unused = [field for field in _ANNOTATED_ONLY if param.HasField(field)]
    if unused:
        logger.warning("%s: %s is for AnnotatedData and has no effect here", where, " and ".join(unused))
    if nvidia and (param.resize_param or param.HasField("noise_param")):
        logger.warning(
            "%s: resize_param and noise_param have no effect here in NVIDIA's dialect, as in NVIDIA Caffe; "
            "--dialect bvlc (CAFFEPY_DIALECT=bvlc in scripts) applies them",
            where,
        )


@dataclass(frozen=True)
class CropParams:
    """Mirror flags and crop offsets of N samples. Offsets are random words, scaled when the image's size is known."""

    mirror: NDArray[np.bool_]
    top: NDArray[np.uint64] | None
    left: NDArray[np.uint64] | None


class DataTransformer:
    """Crops, mirrors, subtracts the mean and scales images (C, H, W).

    Args:
        param: the layer's transform_param.
        phase: caffe_pb2.TRAIN or TEST.
        resolve: resolves the path of the mean file.
        where: layer name for messages.
        nvidia: whether to compute as NVIDIA Caffe where the two Caffes differ.
        annotated: whether the layer is SSD's AnnotatedData, which applies `resize_param` and `noise_param` in both
            dialects.

    Raises:
        ConfigError: fields contradict each other.
        DataError: the mean file cannot be read.
    """

    def __init__(
        self,
        param: caffe_pb2.TransformationParameter,
        phase: int,
        resolve: Callable[[str], Path] = Path,
        where: str = "transform_param",
        nvidia: bool = False,
        annotated: bool = False,
    ) -> None:
        check_transform(param, where)
        self.force_color = param.force_color
        self.force_gray = param.force_gray
        self.nvidia = nvidia
        self._param = param
        self._where = where
        if not annotated:
            warn_about_unused_fields(param, nvidia, where)
        self._height, self._width = (param.crop_size or size for size in (param.crop_h, param.crop_w))
        self.crop: int = max(self._height, self._width)
        """The larger side of the crop; 0: no crop."""
        self.mirror: bool = param.mirror
        """Whether to mirror random images."""
        self.random_crop = bool(self.crop) and phase == caffe_pb2.TRAIN
        """Whether the crop offset is random; else the crop is centered."""
        self.resizes_randomly = resizes_randomly(param)
        """Whether NVIDIA Caffe's random resize is configured."""
        self._ssd = annotated or not nvidia
        fields = [name for name in INTEL_RESIZES if param.HasField(name)]
        if annotated and fields:
            raise ConfigError(f"{where}: {fields[0]} of transform_param does not move boxes; use a batch_sampler")
        self._intel = bool(fields)
        """Whether Intel Caffe's random resize is configured."""
        self.adds_noise = self._ssd and param.HasField("noise_param")
        """Whether `preprocess` applies noise."""
        resizes = self.resizes_randomly or self._intel or (self._ssd and bool(param.resize_param))
        self.preprocesses = resizes or self.adds_noise
        """Whether `preprocess` changes images."""
        self.center_crops_mean = False
        """Whether to subtract the center crop of mean_file at every crop offset, as NVIDIA Caffe does for decoded and
        for randomly resized images. The loader sets it from the first record."""
        self.scale = np.float32(param.scale)
        self._seed = param.random_seed if param.random_seed >= 0 else None
        self._mean_file = read_mean(resolve(param.mean_file)) if param.HasField("mean_file") else None
        self._mean_values = np.array(param.mean_value, np.float32)
        self._last_shape: tuple[tuple[int, ...], tuple[int, int, int]] = ((), (0, 0, 0))
        """The last input shape of `output_shape` and its result."""

    def fingerprint(self) -> dict[str, str]:
        """Return `RecordSource.fingerprint` entries for the mean file; empty without one."""
        return {} if self._mean_file is None else {"the hash of the mean": hash_of(self._mean_file.tobytes())}

    @property
    def mean_size(self) -> tuple[int, int]:
        """Height and width of mean_file, which all images must have; (0, 0): no mean_file."""
        return (0, 0) if self._mean_file is None else (self._mean_file.shape[1], self._mean_file.shape[2])

    def output_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """Return the shape of a transformed image (C, H, W): (C, crop_h, crop_w), or its own shape without a crop.

        Raises:
            DataError: the image is smaller than the crop, or the mean does not fit it. The message follows a record's
                name.
        """
        last, output = self._last_shape
        if shape == last:
            return output
        channels, height, width = shape
        if height < self._height or width < self._width:
            name = (
                f"crop_size {self.crop}" if self._height == self._width else f"the crop {self._height} x {self._width}"
            )
            raise DataError(f"is {height} x {width}, smaller than {name}")
        output = (channels, self._height, self._width) if self.crop else shape
        self.mean(output if self.center_crops_mean else shape)
        self._last_shape = shape, output  # one assignment: other threads may read it
        return output

    def preprocess(self, image: Image, rng: SampleRng, encoded: bool = True, resize: int = 0) -> Image:
        """Resize the image randomly and add noise, before the crop.

        Args:
            image: (C, H, W), uint8 or float32.
            rng: the sample's random numbers.
            encoded: whether the record was an encoded image; Caffe adds noise to no others.
            resize: index of the resize_param.

        Raises:
            DataError: OpenCV cannot do it, or the image would be too large or too small.
        """
        if not self.preprocesses:
            return image
        pixels: Pixels = to_pixels(image)
        with without_ipp():
            if self._intel:
                pixels = intel_resize(pixels, self._param, rng)
            if self.resizes_randomly:
                pixels = random_resize(pixels, self._param, (self._height, self._width), rng)
            if self._ssd and self._param.resize_param:
                pixels = apply_resize(pixels, self._param.resize_param[resize], rng)
            if encoded and self.adds_noise:
                pixels = apply_noise(pixels, self._param.noise_param, rng)
        return to_image(pixels)

    def draw_crops(self, seed: int, stream: int, samples: NDArray[np.int64]) -> CropParams:
        """Draw mirror flags and crop offsets of global samples."""
        if not (self.mirror or self.random_crop):
            return CropParams(np.zeros(samples.size, np.bool_), None, None)
        words = sample_words(self.seed(seed), stream, samples)
        mirror = below(words[0], 2).astype(np.bool_) if self.mirror else np.zeros(samples.size, np.bool_)
        return CropParams(mirror, words[1], words[2]) if self.random_crop else CropParams(mirror, None, None)

    def seed(self, seed: int) -> int:
        """Return `transform_param.random_seed` if set, else the solver's seed."""
        return seed if self._seed is None else self._seed

    def crop_offset(self, height: int, width: int, crop_params: CropParams, index: int) -> tuple[int, int]:
        """Return the row and column of the crop of sample `index`, for an image of this size."""
        if not self.crop:
            return 0, 0
        free_rows, free_columns = height - self._height, width - self._width
        if crop_params.top is None or crop_params.left is None:
            return free_rows // 2, free_columns // 2
        top, left = int(crop_params.top[index]), int(crop_params.left[index])
        return top * (free_rows + 1) >> 32, left * (free_columns + 1) >> 32

    def apply(self, image: NDArray[np.generic], crop_params: CropParams, index: int, out: NDArray[np.float32]) -> None:
        """Transform one image.

        Args:
            image: (C, H, W), uint8 or float32, any strides, of a shape that `output_shape` accepts.
            crop_params: crop offsets and mirror flags of the batch.
            index: the image's index in the batch.
            out: output (C, h, w), any strides.
        """
        top, left = self.crop_offset(image.shape[1], image.shape[2], crop_params, index)
        part = (slice(None), slice(top, top + out.shape[1]), slice(left, left + out.shape[2]))
        target = out[:, :, ::-1] if crop_params.mirror[index] else out
        crop = image[part]
        mean = (
            self.mean(crop.shape)
            if self.center_crops_mean
            else np.broadcast_to(self.mean(image.shape), image.shape)[part]
        )
        for pixels, average, place in zip(crop, mean, target, strict=True):  # all at once take twice as long
            np.subtract(pixels, average, out=place, dtype=np.float32)
        if self.scale != 1:
            out *= self.scale

    def mean(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """Return the mean for images of one shape: (C, H, W) from a file, else (C, 1, 1).

        With `center_crops_mean`, `shape` is the crop's shape.

        Raises:
            DataError: the file's mean has another shape, or the number of mean values is neither 1 nor C.
        """
        channels, height, width = shape
        if self._mean_file is not None:
            if self.center_crops_mean:
                return self._center_of_mean(channels, height, width)
            if self._mean_file.shape != shape:
                raise DataError(
                    f"is {channels} x {height} x {width}, but the mean in mean_file is "
                    f"{sides(self._mean_file.shape)}; compute the mean of this database"
                )
            return self._mean_file
        if self._mean_values.size not in (0, 1, channels):
            gray = channels == 1 and self._mean_values.size == 3
            advice = ", or set transform_param { force_color: true }, which makes encoded images 3 channels"
            raise DataError(
                f"{'is gray (1 channel)' if channels == 1 else f'has {channels} channels'}, but transform_param has "
                f"{self._mean_values.size} mean_value; give 1, or one for each channel{advice if gray else ''}"
            )
        values = self._mean_values if self._mean_values.size else np.zeros(1, np.float32)
        return np.broadcast_to(values, channels).reshape(channels, 1, 1)

    def _center_of_mean(self, channels: int, height: int, width: int) -> NDArray[np.float32]:
        assert self._mean_file is not None
        whole = self._mean_file.shape
        if whole[0] != channels or whole[1] < height or whole[2] < width:
            raise DataError(
                f"makes {channels} x {height} x {width}, but the mean in mean_file is {sides(whole)}; "
                "it needs as many channels and at least this size"
            )
        top, left = (whole[1] - height) // 2, (whole[2] - width) // 2
        return self._mean_file[:, top : top + height, left : left + width]

    def channel_means(self, channels: int) -> NDArray[np.float32]:
        """Return the average mean of each channel."""
        if self._mean_file is not None and self._mean_file.shape[0] == channels:
            return np.asarray(self._mean_file.mean((1, 2)))
        return self.mean((channels, 1, 1)).reshape(-1)
