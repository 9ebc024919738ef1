"""Which images are read from what the user names, and how they are prepared for a net."""

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
"""What the transformers call the input."""


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

    raw_scale: float = 255.0
    channel_swap: tuple[int, ...] = (2, 1, 0)
    mean: Floats | None = None
    input_scale: float = 1.0

    def transformer(self, shape: Sequence[int]) -> Transformer:
        """What prepares images (H, W, C) for an input "data" of the shape (N, C, H, W).

        Raises:
            ConfigError: `channel_swap` or `mean` does not fit the input.
        """
        channels, mean = shape[1], self.mean
        order = self.channel_swap if channels > 1 and self.channel_swap else None
        if order is not None and sorted(order) != list(range(channels)):
            raise ConfigError(f"channel_swap {order} is no order of the input's {channels} channels")
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


def read_images(path: Path, channels: int = 3, ending: str = "jpg") -> list[tuple[str, Floats]]:
    """The images of a file, a folder, or an .npy file of images (H, W, C) or (N, H, W, C) from 0 to 1, with names.

    Raises:
        DataError: something cannot be read, or is no image of so many channels.
    """
    if path.suffix != ".npy":
        return [(str(file), load_image(file, channels != 1)) for file in image_files(path, ending)]
    array = read_array(path)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or array.shape[3] != channels or not array.size:
        raise DataError(f"'{path}' has the shape {array.shape}; images are (N, H, W, {channels}) for this net")
    return [(f"{path}[{index}]", np.asarray(image, np.float32)) for index, image in enumerate(array)]


def read_array(path: Path) -> Floats:
    """The numbers of an .npy file.

    `np.load` also opens zip files and pickles, and takes the memory that a header asks for; this reads arrays alone.

    Raises:
        DataError: it cannot be read, or holds something else.
    """
    try:
        with open_regular(path) as file:
            shape, by_columns, dtype = _npy_header(file)
            count = math.prod(shape)
            stored = os.fstat(file.fileno()).st_size - file.tell()
            if dtype.kind not in "biuf":
                raise ValueError(f"it holds {dtype}")
            if count * dtype.itemsize > stored:
                raise ValueError(f"it is too short for its shape {shape}; is it whole?")
            flat = np.frombuffer(file.read(count * dtype.itemsize), dtype, count)
            with np.errstate(over="ignore"):
                array = np.asarray(flat.reshape(shape[::-1]).T if by_columns else flat.reshape(shape), np.float32)
            return array if array.flags.writeable else array.copy()
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except (ValueError, TypeError, MemoryError) as error:
        raise DataError(f"'{path}' is no .npy file of numbers: {error}") from error


def _npy_header(file: BinaryIO) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, whether the first axis varies fastest, and type, from the beginning of an .npy file.

    Raises:
        ValueError, TypeError, MemoryError: it is none.
    """
    version = np.lib.format.read_magic(file)
    read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
    if read is None:
        raise ValueError(f"its version is {version[0]}.{version[1]}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of Python's parser, about what is in the header
            shape, by_columns, dtype = read(file)
    except (ArithmeticError, LookupError, RecursionError, SyntaxError, tokenize.TokenError) as error:
        raise ValueError("its header is damaged") from error
    if min(shape, default=0) < 0:
        raise ValueError(f"its shape is {shape}")
    return shape, by_columns, dtype


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
