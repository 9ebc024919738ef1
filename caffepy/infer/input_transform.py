"""Images as a net's input, by the fields of its Input layer.

`transform_param` and `image_data_param` of an Input layer act as in an ImageData layer of the TEST phase: images are
decoded, resized to `new_height` x `new_width` and transformed (see `caffepy.data.transform`), but not mirrored.
caffepy.load, classify and detect read these fields; `caffepy.net.deploy` writes them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import as_channels_first, opencv, read_image, resize_image
from caffepy.data.random import SampleRng
from caffepy.data.transform import CropParams, DataTransformer, both_sides
from caffepy.errors import ConfigError, DataError
from caffepy.formats.proto import caffe_pb2

logger = logging.getLogger(__name__)

USUAL_SIZE = 256
"""Height and width of images before a crop where nothing gives them, as in Caffe's classify.py."""


def has_preparation(layer: caffe_pb2.LayerParameter) -> bool:
    """Return whether an Input layer says how images become its values."""
    return layer.type == "Input" and (layer.HasField("transform_param") or layer.HasField("image_data_param"))


def warn_about_small_crop(crop: Sequence[int], size: Sequence[int], advice: str) -> None:
    """Warn if a crop has less than half of an image's area."""
    if 2 * crop[0] * crop[1] < size[0] * size[1]:
        logger.warning(
            "the net sees %d x %d of each image, which is resized to %d x %d: less than half of it; %s",
            *crop,
            *size,
            advice,
        )


class ImagePreparation:
    """Converts images to the values of an Input layer: y = (crop(resize(x)) - mean) * scale, with x from 0 to 255.

    Images are resized to `new_height` and `new_width`; else by the resizes of `transform_param`; else to the mean
    image's size; else to `USUAL_SIZE` if there is a crop, and to the input's size if there is none.

    Args:
        layer: the Input layer.
        shape: the input's shape (N, C, H, W). With C = 1 images are gray.
        resolve: resolves the path of mean_file.

    Raises:
        ConfigError: the input is no image, or fields contradict each other.
        DataError: mean_file cannot be read.
    """

    def __init__(
        self, layer: caffe_pb2.LayerParameter, shape: Sequence[int], resolve: Callable[[str], Path] = Path
    ) -> None:
        self._where = f"layer '{layer.name}'"
        if len(shape) != 4 or shape[1] not in (1, 3):
            raise ConfigError(
                f"{self._where}: its transform_param is for images of 1 or 3 channels, but its shape is "
                f"{' x '.join(map(str, shape))}"
            )
        param = caffe_pb2.TransformationParameter()
        param.CopyFrom(layer.transform_param)
        param.mirror = False
        self._channels = shape[1]
        self._transformer = DataTransformer(param, caffe_pb2.TEST, resolve, self._where, annotated=True)
        self._transformer.center_crops_mean = True
        self.crops = bool(self._transformer.crop)
        """Whether the values show only a part of the image."""
        self.pads = any(
            resize.resize_mode == resize.FIT_LARGE_SIZE_AND_PAD for resize in layer.transform_param.resize_param
        )
        """Whether the values show a border around the image."""
        self._size = self._size_before_crop(layer.image_data_param, shape[2:])

    def _size_before_crop(self, images: caffe_pb2.ImageDataParameter, size: Sequence[int]) -> tuple[int, int] | None:
        if new := both_sides(images.new_height, images.new_width, self._where):
            return new
        if self._transformer.preprocesses:
            return None
        if self._transformer.mean_size != (0, 0):
            return self._transformer.mean_size
        height, width = size
        if not self.crops:
            return height, width
        assumed = max(USUAL_SIZE, height), max(USUAL_SIZE, width)
        warn_about_small_crop(size, assumed, f"give {self._where} image_data_param {{ new_height new_width }}")
        return assumed

    def mean_and_scale(self) -> tuple[NDArray[np.float32], float]:
        """Return the mean per channel (C,) and the scale."""
        return self._transformer.channel_means(self._channels), float(self._transformer.scale)

    def load(self, path: str | os.PathLike[str]) -> NDArray[np.uint8]:
        """Return an image file as the data layer decodes it: (H, W, C), gray or red, green and blue.

        Raises:
            DataError: the file cannot be read or decoded.
        """
        try:
            image = read_image(Path(path), self._channels == 3, self._channels == 1)
        except DataError as error:
            raise DataError(f"image '{path}' {error}") from error
        return np.asarray(image.transpose(1, 2, 0)[:, :, ::-1])

    def __call__(self, image: str | os.PathLike[str] | NDArray[Any]) -> NDArray[np.float32]:
        """Return an image's values (C, h, w).

        Args:
            image: a file; or an array (H, W) or (H, W, K), gray or red, green and blue: uint8, or other numbers from 0
                to 1.

        Raises:
            DataError: the image cannot be read, or does not fit the net.
        """
        if isinstance(image, np.ndarray):
            return self._values(image_bytes(image, self._channels), "the array")
        return self._values(image_bytes(self.load(image), self._channels), f"image '{os.fspath(image)}'")

    def _values(self, pixels: NDArray[np.uint8], name: str) -> NDArray[np.float32]:
        transformer = self._transformer
        try:
            resized = pixels if self._size is None else resize_image(pixels, *self._size)
            changed = transformer.preprocess(resized, SampleRng(0, 0, 0))
            channels, height, width = changed.shape
            values = np.empty(transformer.output_shape((channels, height, width)), np.float32)
            transformer.apply(changed, CropParams(np.zeros(1, np.bool_), None, None), 0, values)
        except DataError as error:
            raise DataError(f"{name} {error}") from error
        return values


def image_bytes(image: NDArray[Any], channels: int) -> NDArray[np.uint8]:
    """Return an array (H, W) or (H, W, K), gray or RGB, as a decoded image: (channels, H, W), uint8, BGR.

    Raises:
        DataError: the array is no image, or holds values outside of 0 to 1 that are not uint8.
    """
    if image.ndim not in (2, 3) or (image.ndim == 3 and image.shape[2] not in (1, 3, 4)) or not image.size:
        raise DataError(f"an array of the shape {image.shape} is no image; images are (H, W), (H, W, 1) or (H, W, 3)")
    pixels = image
    if image.dtype != np.uint8:
        if image.dtype.kind not in "biuf" or not (image.min() >= 0 and image.max() <= 1):
            raise DataError("an image in an array has values of uint8, or other numbers from 0 to 1; convert it")
        pixels = np.rint(image.astype(np.float32) * np.float32(255)).astype(np.uint8)
    pixels = np.ascontiguousarray(pixels if pixels.ndim == 3 else pixels[:, :, None])
    cv2 = opencv()
    colors = pixels.shape[2]
    if channels == 3:
        code = {1: cv2.COLOR_GRAY2BGR, 3: cv2.COLOR_RGB2BGR, 4: cv2.COLOR_RGBA2BGR}[colors]
    else:
        code = {1: None, 3: cv2.COLOR_RGB2GRAY, 4: cv2.COLOR_RGBA2GRAY}[colors]
    return as_channels_first(pixels if code is None else np.asarray(cv2.cvtColor(pixels, code)))
