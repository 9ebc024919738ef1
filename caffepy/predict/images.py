"""Images as nets take them: as Caffe's `caffe.io.load_image` and `caffe.io.Transformer` prepare them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import decode_image, opencv
from caffepy.data.images.mean import read_mean
from caffepy.errors import ConfigError, DataError
from caffepy.files import open_regular, read_regular

Floats = NDArray[np.float32]

_MOST_BYTES = 1 << 28
_LEVELS = 255.0


@dataclass(frozen=True)
class Preparation:
    """What is done to the values of an image, which are red, green and blue from 0 to 1.

    Args:
        raw_scale: factor before the mean is subtracted.
        channel_swap: the order of the channels that the net takes; (2, 1, 0) is blue, green, red. One channel is not
            swapped.
        mean: subtracted: a value for each channel (C), or an image (C, H, W), which is resized to the input.
        input_scale: factor after that.
    """

    raw_scale: float = _LEVELS
    channel_swap: tuple[int, ...] = (2, 1, 0)
    mean: Floats | None = None
    input_scale: float = 1.0

    def apply(self, image: Floats) -> Floats:
        """An image (H, W, C) as the net's input (C, H, W).

        Raises:
            ConfigError: `channel_swap` or `mean` does not fit the image.
        """
        channels = image.shape[2]
        if channels > 1 and self.channel_swap:
            if sorted(self.channel_swap) != list(range(channels)):
                raise ConfigError(f"channel_swap {self.channel_swap} is no order of the input's {channels} channels")
            image = image[:, :, list(self.channel_swap)]
        values = image.transpose(2, 0, 1) * np.float32(self.raw_scale)
        if self.mean is not None:
            values = values - self._mean_for(values.shape)
        return np.asarray(np.ascontiguousarray(values * np.float32(self.input_scale)), np.float32)

    def _mean_for(self, shape: Sequence[int]) -> Floats:
        mean = self.mean
        assert mean is not None
        if mean.ndim not in (1, 3) or mean.shape[0] not in (1, shape[0]):
            raise ConfigError(f"the mean has the shape {mean.shape}, which does not fit an input of {tuple(shape)}")
        if mean.ndim == 1:
            return np.asarray(mean.reshape(-1, 1, 1), np.float32)
        if mean.shape[1:] != tuple(shape[1:]):
            mean = np.asarray(resize(mean.transpose(1, 2, 0), shape[1], shape[2]).transpose(2, 0, 1), np.float32)
        return mean


def resize(image: Floats, height: int, width: int) -> Floats:
    """An image (H, W, C) at another size, by linear interpolation."""
    if image.shape[:2] == (height, width):
        return image
    resized = opencv().resize(np.ascontiguousarray(image), (width, height), interpolation=1)
    return np.asarray(resized, np.float32).reshape(height, width, image.shape[2])


def image_files(path: Path, ending: str = "jpg") -> list[Path]:
    """The file itself, or the files of a folder that end so, in the order of their names.

    Raises:
        DataError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == f".{ending.lower().lstrip('.')}")
    if not found:
        raise DataError(f"folder '{path}' has no files that end in .{ending}; name another ending with --ext")
    return found


def read_image(path: Path, channels: int = 3) -> Floats:
    """An image file as (H, W, C): red, green and blue, or gray, from 0 to 1.

    Raises:
        DataError: it cannot be read, or is no image.
    """
    try:
        pixels = decode_image(read_regular(path, _MOST_BYTES), force_color=channels == 3, force_gray=channels == 1)
    except OSError as error:
        raise DataError(f"image '{path}' cannot be read: {error.strerror}") from error
    except DataError as error:
        raise DataError(f"image '{path}' {error}") from error
    return np.asarray(pixels.transpose(1, 2, 0)[:, :, ::-1] / np.float32(_LEVELS), np.float32)


def read_images(path: Path, channels: int = 3, ending: str = "jpg") -> list[tuple[str, Floats]]:
    """The images of a file, a folder, or an .npy file of images (H, W, C) or (N, H, W, C) from 0 to 1, with names.

    Raises:
        DataError: something cannot be read, or is no image of so many channels.
    """
    if path.suffix != ".npy":
        return [(str(file), read_image(file, channels)) for file in image_files(path, ending)]
    array = read_array(path)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[3] != channels or not array.size:
        raise DataError(f"'{path}' has the shape {array.shape}; images are (N, H, W, {channels}) for this net")
    return [(f"{path}[{index}]", np.asarray(image, np.float32)) for index, image in enumerate(array)]


def read_array(path: Path) -> Floats:
    """The numbers of an .npy file.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    try:
        with open_regular(path) as file:
            return np.asarray(np.load(file, allow_pickle=False), np.float32)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, EOFError, TypeError, MemoryError) as error:
        raise DataError(f"'{path}' is no .npy file of numbers: {error}") from error


def read_any_mean(text: str) -> Floats | None:
    """A mean from --mean-file: values with commas, an .npy file, or a .binaryproto; None of an empty text.

    Raises:
        DataError: it cannot be read.
    """
    if not text:
        return None
    try:
        return np.array([float(part) for part in text.split(",")], np.float32)
    except ValueError:
        path = Path(text)
    return read_array(path) if path.suffix == ".npy" else np.asarray(read_mean(path))
