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

from caffepy.data.images.mean import read_mean
from caffepy.data.random import below, sample_words
from caffepy.data.sources.source import hash_of
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
        self.crop: int = param.crop_size
        """Height and width of what is cut out; 0: images are taken whole."""
        self.mirror: bool = param.mirror
        """Whether chance mirrors images."""
        self.random_crop = bool(self.crop) and phase == caffe_pb2.TRAIN
        """Whether chance decides where to cut; else it is the centre."""
        self.scale = np.float32(param.scale)
        self._seed = param.random_seed if param.random_seed >= 0 else None
        self._mean_file = read_mean(resolve(param.mean_file)) if param.HasField("mean_file") else None
        self._mean_values = np.array(param.mean_value, np.float32)
        self._last: tuple[tuple[int, ...], tuple[int, int, int]] = ((), (0, 0, 0))
        """The shape that came last, and what became of it."""

    def fingerprint(self) -> dict[str, str]:
        """`RecordSource.fingerprint` of the mean file, where there is one."""
        return {} if self._mean_file is None else {"the hash of the mean": hash_of(self._mean_file.tobytes())}

    @property
    def whole_size(self) -> tuple[int, int]:
        """The height and width that all images must have because of the mean; (0, 0): any."""
        return (0, 0) if self._mean_file is None else (self._mean_file.shape[1], self._mean_file.shape[2])

    def output_shape(self, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        """What an image (C, H, W) becomes: (C, crop, crop), or its own shape without a crop.

        Raises:
            DataError: the image is smaller than the crop, or the mean does not fit it.
            ConfigError: there are neither one nor C mean values.
        """
        last, output = self._last
        if shape == last:
            return output
        channels, height, width = shape
        if self.crop and min(height, width) < self.crop:
            raise DataError(f"is {height} x {width}, smaller than crop_size {self.crop}")
        self.mean(shape)
        output = (channels, self.crop, self.crop) if self.crop else shape
        self._last = shape, output  # at once: several threads may ask
        return output

    def choose(self, seed: int, stream: int, samples: NDArray[np.int64]) -> Choices:
        """What chance decides for some global samples, whoever asks."""
        if not (self.mirror or self.random_crop):
            return Choices(np.zeros(samples.size, np.bool_), None, None)
        words = sample_words(self.seed(seed), stream, samples)
        mirror = below(words[0], 2).astype(np.bool_) if self.mirror else np.zeros(samples.size, np.bool_)
        return Choices(mirror, words[1], words[2]) if self.random_crop else Choices(mirror, None, None)

    def seed(self, seed: int) -> int:
        """The seed of what chance decides, given the solver's."""
        return seed if self._seed is None else self._seed

    def corner(self, height: int, width: int, choices: Choices, place: int) -> tuple[int, int]:
        """The row and column at which the image at `place`, of this size, is cut."""
        if not self.crop:
            return 0, 0
        free_rows, free_columns = height - self.crop, width - self.crop
        if choices.top is None or choices.left is None:
            return free_rows // 2, free_columns // 2
        return int(below(choices.top[place], free_rows + 1)), int(below(choices.left[place], free_columns + 1))

    def apply(self, image: NDArray[np.generic], choices: Choices, place: int, out: NDArray[np.float32]) -> None:
        """Transform one image.

        Args:
            image: (C, H, W), uint8 or float32, any strides, of a shape that `output_shape` accepts.
            choices: those of its batch.
            place: the image's place in the batch.
            out: (C, h, w), any strides.
        """
        top, left = self.corner(image.shape[1], image.shape[2], choices, place)
        part = (slice(None), slice(top, top + out.shape[1]), slice(left, left + out.shape[2]))
        target = out[:, :, ::-1] if choices.mirror[place] else out
        mean = np.broadcast_to(self.mean(image.shape), image.shape)
        np.subtract(image[part], mean[part], out=target, dtype=np.float32)
        if self.scale != 1:
            out *= self.scale

    def mean(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The mean for images of one shape: (C, H, W) from a file, else (C, 1, 1).

        Raises:
            DataError: the file's mean has another shape.
            ConfigError: there are neither one nor C mean values.
        """
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
