"""What happens to an image on its way into a net: Caffe's `data_transformer.cpp`.

First it may get another size or noise (`Transformer.prepare`, see `caffepy.data.transforms`). Then
y[c, h, w] = (x[c, top + h, left + w'] - mean[c, top + h, left + w']) * scale, where w' is w, or crop - 1 - w when
mirrored. In training the crop lies anywhere, in testing in the centre, at ((H - crop) // 2, (W - crop) // 2). Mirroring
happens in both phases, if asked for.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.mean import read_mean
from caffepy.data.random import below, sample_words
from caffepy.data.sources.source import hash_of
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.im_transforms import (
    apply_noise,
    apply_resize,
    check_distort,
    check_noise,
    check_random_resize,
    check_resize,
    random_resize,
    resizes_randomly,
)
from caffepy.data.transforms.pixels import Image, Pixels, to_image, to_pixels
from caffepy.errors import ConfigError, DataError
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)
_MAX_CROP = 1 << 16
_SSD_ALONE = ("distort_param", "expand_param", "emit_constraint")
"""What AnnotatedData alone does."""


def check_transform(param: caffe_pb2.TransformationParameter, where: str) -> None:
    """Refuse contradictions.

    Raises:
        ConfigError: naming the field.
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
    if param.HasField("resize_param"):
        check_resize(param.resize_param, where)
    check_noise(param.noise_param, where)
    check_distort(param.distort_param, where)


def warn_of_unused(param: caffe_pb2.TransformationParameter, nvidia: bool, where: str) -> None:
    """Say which of SSD's fields a layer that reads no boxes does not apply."""
    unused = [field for field in _SSD_ALONE if param.HasField(field)]
    if unused:
        logger.warning("%s: %s is for AnnotatedData and has no effect here", where, " and ".join(unused))
    if nvidia and (param.HasField("resize_param") or param.HasField("noise_param")):
        logger.warning(
            "%s: resize_param and noise_param have no effect here in NVIDIA Caffe, and with its numbers have none "
            "(CAFFEPY_DIALECT=bvlc applies them)", where,
        )  # fmt: skip


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
        nvidia: whether NVIDIA Caffe's numbers are wanted where the two Caffes differ.
        annotated: whether the layer is one of SSD's, which apply `resize_param` and `noise_param` in NVIDIA Caffe too.

    Raises:
        ConfigError: fields that contradict each other.
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
            warn_of_unused(param, nvidia, where)
        self._height, self._width = (param.crop_size or size for size in (param.crop_h, param.crop_w))
        self.crop: int = max(self._height, self._width)
        """Height or width of what is cut out, the larger one; 0: images are taken whole."""
        self.mirror: bool = param.mirror
        """Whether chance mirrors images."""
        self.random_crop = bool(self.crop) and phase == caffe_pb2.TRAIN
        """Whether chance decides where to cut; else it is the centre."""
        self.resizes_randomly = resizes_randomly(param)
        """Whether a field of NVIDIA Caffe's random resize is given."""
        self._ssd = annotated or not nvidia
        self.damages = self._ssd and param.HasField("noise_param")
        """Whether `prepare` applies noise."""
        self.prepares = self.resizes_randomly or self.damages or (self._ssd and param.HasField("resize_param"))
        """Whether `prepare` changes images."""
        self.centers_mean = False
        """Whether mean_file is cut at its own centre, wherever the image is cut: NVIDIA Caffe does so with decoded and
        with randomly resized images. Set by the loader, which knows the first record."""
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
            DataError: the image is smaller than the crop, or the mean does not fit it; continues a record's name.
        """
        last, output = self._last
        if shape == last:
            return output
        channels, height, width = shape
        if height < self._height or width < self._width:
            name = (
                f"crop_size {self.crop}" if self._height == self._width else f"the crop {self._height} x {self._width}"
            )
            raise DataError(f"is {height} x {width}, smaller than {name}")
        output = (channels, self._height, self._width) if self.crop else shape
        self.mean(output if self.centers_mean else shape)
        self._last = shape, output  # at once: several threads may ask
        return output

    def prepare(self, image: Image, draws: Draws, encoded: bool = True) -> Image:
        """The image in the size and with the noise that chance decides, before it is cut.

        Args:
            image: (C, H, W), uint8 or float32.
            draws: the sample's.
            encoded: whether its record held JPEG or the like; Caffe damages no other images.

        Raises:
            DataError: OpenCV cannot do it, or the image would be too large or too small.
        """
        if not self.prepares:
            return image
        pixels: Pixels = to_pixels(image)
        if self.resizes_randomly:
            pixels = random_resize(pixels, self._param, (self._height, self._width), draws)
        if self._ssd and self._param.HasField("resize_param"):
            pixels = apply_resize(pixels, self._param.resize_param, draws)
        if encoded and self.damages:
            pixels = apply_noise(pixels, self._param.noise_param, draws)
        return to_image(pixels)

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
        free_rows, free_columns = height - self._height, width - self._width
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
        cut = image[part]
        mean = self.mean(cut.shape) if self.centers_mean else np.broadcast_to(self.mean(image.shape), image.shape)[part]
        np.subtract(cut, mean, out=target, dtype=np.float32)
        if self.scale != 1:
            out *= self.scale

    def mean(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        """The mean for images of one shape: (C, H, W) from a file, else (C, 1, 1).

        With `centers_mean` the shape is what is cut out of images, and so is the mean.

        Raises:
            DataError: the file's mean has another shape, or there are neither one nor C mean values.
        """
        channels, height, width = shape
        if self._mean_file is not None:
            if self.centers_mean:
                return self._center_of_mean(channels, height, width)
            if self._mean_file.shape != shape:
                raise DataError(
                    f"is {channels} x {height} x {width}, but the mean in mean_file is "
                    f"{' x '.join(map(str, self._mean_file.shape))}; make the mean of this set"
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
                f"makes {channels} x {height} x {width}, but the mean in mean_file is {' x '.join(map(str, whole))}; "
                "it must have as many channels and be as large"
            )
        top, left = (whole[1] - height) // 2, (whole[2] - width) // 2
        return self._mean_file[:, top : top + height, left : left + width]

    def channel_means(self, channels: int) -> NDArray[np.float32]:
        """What is subtracted from each channel, on average."""
        if self._mean_file is not None and self._mean_file.shape[0] == channels:
            return np.asarray(self._mean_file.mean((1, 2)))
        return self.mean((channels, 1, 1)).reshape(-1)
