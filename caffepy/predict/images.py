"""Reading of image files and arrays, and their preprocessing."""

from __future__ import annotations

import math
import os
import tokenize
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.mean import read_mean
from caffepy.errors import ConfigError, DataError
from caffepy.files import open_regular
from caffepy.predict.pixels import Transformer, configured_transformer, load_image

Floats = NDArray[np.float32]

INPUT = "data"
"""The input's name in transformers."""


@dataclass(frozen=True)
class Preparation:
    """Preprocessing of image values, which are RGB from 0 to 1.

    Args:
        raw_scale: factor before mean subtraction.
        channel_swap: the net's channel order; (2, 1, 0) is BGR. Ignored for one channel.
        mean: subtracted mean: a value per channel (C,), or an image (C, H, W), resized to the input.
        input_scale: factor after mean subtraction.
    """

    raw_scale: float = 255.0
    channel_swap: tuple[int, ...] = (2, 1, 0)
    mean: Floats | None = None
    input_scale: float = 1.0

    def transformer(self, shape: Sequence[int]) -> Transformer:
        """Return a Transformer of images (H, W, C) for an input "data" of shape (N, C, H, W).

        Raises:
            ConfigError: `channel_swap` or `mean` does not fit the input.
        """
        channels, mean = shape[1], self.mean
        order = self.channel_swap if channels > 1 and self.channel_swap else None
        if order is not None and sorted(order) != list(range(channels)):
            raise ConfigError(f"channel_swap {order} is not an order of the input's {channels} channels")
        if mean is not None and (mean.ndim not in (1, 3) or mean.shape[0] not in (1, channels)):
            raise ConfigError(f"the mean has the shape {mean.shape}, which does not fit an input of {tuple(shape[1:])}")
        if mean is not None and mean.ndim == 1:
            mean = np.broadcast_to(mean, (channels,))
        options = {
            "channel_swap": order,
            "raw_scale": self.raw_scale,
            "mean": mean,
            "input_scale": self.input_scale,
        }
        return configured_transformer(INPUT, shape, options)


def image_files(path: Path, ending: str = "jpg") -> list[Path]:
    """Return the file itself, or the files of a folder with this suffix, sorted by name.

    Raises:
        DataError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() == f".{ending.lower().lstrip('.')}")
    if not found:
        raise DataError(f"folder '{path}' has no files that end in .{ending}; name another suffix with --ext")
    return found


def read_images(path: Path, channels: int = 3, ending: str = "jpg") -> list[tuple[str, Floats]]:
    """Return names and images of an image file, a folder, or an .npy file (H, W, C) or (N, H, W, C) from 0 to 1.

    Raises:
        DataError: a file cannot be read, or is not an image with `channels` channels.
    """
    if path.suffix != ".npy":
        return [(str(file), load_image(file, channels != 1)) for file in image_files(path, ending)]
    array = read_array(path)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[3] != channels or not array.size:
        raise DataError(f"'{path}' has the shape {array.shape}; images are (N, H, W, {channels}) for this net")
    return [(f"{path}[{index}]", np.asarray(image, np.float32)) for index, image in enumerate(array)]


def read_array(path: Path) -> Floats:
    """Return the array of an .npy file.

    Unlike `np.load`, this function rejects zip files and pickles, and does not trust the header's size.

    Raises:
        DataError: the file cannot be read or is not a numeric .npy file.
    """
    try:
        with open_regular(path) as file:
            shape, by_columns, dtype = _npy_header(file)
            count = math.prod(shape)
            stored = os.fstat(file.fileno()).st_size - file.tell()
            if dtype.kind not in "biuf":
                raise ValueError(f"it holds {dtype}")
            if count * dtype.itemsize > stored:
                raise ValueError(f"it is too short for its shape {shape}")
            flat = np.frombuffer(file.read(count * dtype.itemsize), dtype, count)
            with np.errstate(over="ignore"):
                array = np.asarray(flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape), np.float32)
            return array if array.flags.writeable else array.copy()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, MemoryError) as error:
        raise DataError(f"'{path}' is not a numeric .npy file: {error}") from error


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Return shape, Fortran order and dtype from the header of an .npy file.

    Raises:
        ValueError, TypeError, MemoryError: the header is invalid.
    """
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"its version is {version[0]}.{version[1]}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # warnings of Python's parser on the header
            shape, by_columns, dtype = read(file)
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError("its header is damaged") from error
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    return shape, by_columns, dtype


def read_any_mean(text: str) -> Floats | None:
    """Return the mean of --mean-file: values separated by commas, an .npy file or a .binaryproto; None if empty.

    Raises:
        DataError: the mean cannot be read.
    """
    if not text:
        return None
    try:
        return np.array([float(part) for part in text.split(",")], np.float32)
    except ValueError:
        path = Path(text)
    return read_array(path) if path.suffix == ".npy" else np.asarray(read_mean(path))
