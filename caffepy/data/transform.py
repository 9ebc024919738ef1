"""Scale, mean, crop and mirror of images: Caffe's `data_transformer.cpp`.

y[c, h, w] = (x[c, top + h, left + w'] - mean[c, top + h, left + w']) * scale, where w' is w, or crop - 1 - w when
mirrored. In training the crop lies anywhere, in testing in the centre, at ((H - crop) // 2, (W - crop) // 2). Mirroring
happens in both phases, if asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.mean import read_mean
from caffepy.data.random import below, sample_words
from caffepy.errors import ConfigError, DataError
from caffepy.proto import caffe_pb2

_NOT_SUPPORTED: dict[str, float] = {
    "img_rand_resize_lower": 0,
    "img_rand_resize_upper": 0,
    "rand_resize_ratio_lower": 0,
    "rand_resize_ratio_upper": 0,
    "vertical_stretch_lower": 1,
    "vertical_stretch_upper": 1,
    "horizontal_stretch_lower": 1,
    "horizontal_stretch_upper": 1,
    "crop_h": 0,
    "crop_w": 0,
}
"""NVIDIA Caffe's fields that change the data, with the value that changes nothing."""
_NOT_SUPPORTED_MESSAGES = ("resize_param", "noise_param", "distort_param", "expand_param", "emit_constraint")


def check_transform(param: caffe_pb2.TransformationParameter, where: str) -> None:
    """Refuse contradictions and what is not supported.

    Raises:
        ConfigError: naming the field.
    """
    for field, harmless in _NOT_SUPPORTED.items():
        if getattr(param, field) != harmless:
            raise ConfigError(f"{where}: transform_param.{field} is not supported yet; remove it")
    for field in _NOT_SUPPORTED_MESSAGES:
        if param.HasField(field):
            raise ConfigError(f"{where}: transform_param.{field} is not supported yet; remove it")
    if param.HasField("mean_file") and param.mean_value:
        raise ConfigError(f"{where}: transform_param has both mean_file and mean_value; keep one of them")
    if param.force_color and param.force_gray:
        raise ConfigError(f"{where}: transform_param has both force_color and force_gray; keep one of them")


@dataclass(frozen=True)
class Choices:
    """What chance decided for some samples: 32-bit words, scaled to each image's size when it is known."""

    mirror: NDArray[np.bool_]
    top: NDArray[np.uint64] | None
    left: NDArray[np.uint64] | None

    def __getitem__(self, part: slice) -> Choices:
        if self.top is None or self.left is None:
            return Choices(self.mirror[part], None, None)
        return Choices(self.mirror[part], self.top[part], self.left[part])


class Transformer:
    """Turns images (C, H, W) into what the net takes.

    Args:
        param: the layer's transform_param.
        phase: caffe_pb2.TRAIN or TEST.
        resolve: turns the written path of the mean file into one that exists.
        where: what messages call the layer.

    Raises:
        ConfigError: fields that contradict each other or are not supported.
        DataError: the mean file cannot be read.
    """

    def __init__(
        self,
        param: caffe_pb2.TransformationParameter,
        phase: int,
        resolve: Callable[[str], Path] = Path,
        where: str = "transform_param",
    ) -> None:
        check_transform(param, where)
        self.force_color = param.force_color
        self.force_gray = param.force_gray
        self._where = where
        self._crop = param.crop_size
        self._mirror = param.mirror
        self._train = phase == caffe_pb2.TRAIN
        self._scale = np.float32(param.scale)
        self._seed = param.random_seed if param.random_seed >= 0 else None
        self._mean_file = read_mean(resolve(param.mean_file)) if param.HasField("mean_file") else None
        self._mean_values = np.array(param.mean_value, np.float32)
        self._plane_mean: NDArray[np.float32] = np.empty((0, 0, 0), np.float32)
        """The mean spread over a whole image of the shape that came last."""
        self._last_shape = self._last_output = (0, 0, 0)

    def output_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """What an image (C, H, W) becomes: (C, crop, crop), or its own shape without a crop.

        Raises:
            DataError: the image is smaller than the crop, or the mean does not fit it.
            ConfigError: there are neither one nor C mean values.
        """
        if shape == self._last_shape:
            return self._last_output
        channels, height, width = shape
        if self._crop and min(height, width) < self._crop:
            raise DataError(f"is {height} x {width}, smaller than crop_size {self._crop}")
        self._mean(shape)
        self._last_shape = shape
        self._last_output = (channels, self._crop, self._crop) if self._crop else shape
        return self._last_output

    def choose(self, seed: int, stream: int, first: int, count: int) -> Choices:
        """What chance decides for the global samples [first, first + count), whoever asks."""
        random_crop = bool(self._crop) and self._train
        if not (self._mirror or random_crop):
            return Choices(np.zeros(count, np.bool_), None, None)
        words = sample_words(seed if self._seed is None else self._seed, stream, first, count)
        mirror = below(words[0], 2).astype(np.bool_) if self._mirror else np.zeros(count, np.bool_)
        return Choices(mirror, words[1], words[2]) if random_crop else Choices(mirror, None, None)

    def apply(
        self, images: NDArray[np.uint8] | NDArray[np.float32], choices: Choices, out: NDArray[np.float32]
    ) -> None:
        """Transform images of one shape.

        Args:
            images: (N, C, H, W), uint8 or float32, any strides, of a shape that `output_shape` accepts.
            choices: those of these samples.
            out: (N, C, h, w), a view of channels-last memory.
        """
        mean = self._mean(images.shape[1:])
        tops, lefts = self._corners(images.shape[2:], choices, len(images))
        if images.dtype == np.uint8 and images.flags.c_contiguous:
            self._apply_planes(images, mean, tops, lefts, choices.mirror, out.transpose(0, 2, 3, 1))
            return
        whole_mean = np.broadcast_to(mean, images.shape[1:])
        for image, top, left, mirror, result in zip(images, tops, lefts, choices.mirror, out, strict=True):
            part = (slice(None), slice(top, top + result.shape[1]), slice(left, left + result.shape[2]))
            target = result[:, :, ::-1] if mirror else result
            np.subtract(image[part], whole_mean[part], out=target, dtype=np.float32)
            if self._scale != 1:
                result *= self._scale

    def _apply_planes(
        self,
        images: NDArray[np.uint8] | NDArray[np.float32],
        mean: NDArray[np.float32],
        tops: NDArray[np.int64],
        lefts: NDArray[np.int64],
        mirror: NDArray[np.bool_],
        out: NDArray[np.float32],
    ) -> None:
        from caffepy.data.transform_kernels import transform_planes

        number, channels, height, width = images.shape
        if self._plane_mean.shape != images.shape[1:]:
            self._plane_mean = np.array(np.broadcast_to(mean, images.shape[1:]), order="C")
        mean = self._plane_mean
        if out.shape[1:3] == (height, width) and not mirror.any():
            # Whole images: one long row each, which spares the kernel its cost a row.
            mean, images = mean.reshape(channels, 1, -1), images.reshape(number, channels, 1, -1)
            out = out.reshape(number, 1, -1, channels)
        transform_planes(images, tops, lefts, mirror, mean, self._scale, out)

    def _corners(
        self, size: tuple[int, ...], choices: Choices, count: int
    ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        if not self._crop:
            return np.zeros(count, np.int64), np.zeros(count, np.int64)
        free_rows, free_columns = size[0] - self._crop, size[1] - self._crop
        if choices.top is None or choices.left is None:
            return np.full(count, free_rows // 2), np.full(count, free_columns // 2)
        return below(choices.top, free_rows + 1), below(choices.left, free_columns + 1)

    def _mean(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The mean for images of one shape: (C, H, W) from a file, else (C, 1, 1)."""
        channels, height, width = shape
        if self._mean_file is not None:
            if self._mean_file.shape != shape:
                raise DataError(
                    f"is {channels} x {height} x {width}, but the mean in mean_file is "
                    f"{' x '.join(map(str, self._mean_file.shape))}; make the mean of this set"
                )
            return self._mean_file
        if self._mean_values.size not in (0, 1, channels):
            raise ConfigError(
                f"{self._where}: transform_param has {self._mean_values.size} mean_value; "
                f"give 1, or one for each of the {channels} channels"
            )
        values = self._mean_values if self._mean_values.size else np.zeros(1, np.float32)
        return np.broadcast_to(values, channels).reshape(channels, 1, 1)
