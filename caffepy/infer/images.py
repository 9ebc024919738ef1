"""Reading of image files and arrays, and the steps to the values of a net's input."""

from __future__ import annotations

import math
import os
import re
import tokenize
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from caffepy.data.mean import read_mean
from caffepy.data.sources.image_list import list_lines
from caffepy.errors import ConfigError, DataError
from caffepy.infer.input_transform import ImagePreparation, warn_about_small_crop
from caffepy.infer.pixels import Transformer, configured_transformer, crop_centres, load_image, oversample, resize_image
from caffepy.utils.files import open_regular

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

    def steps(self, shape: Sequence[int], size: tuple[int, int] | None = None, ten_crops: bool = False) -> Steps:
        """Return the steps from images to an input of the shape (C, H, W), as in Caffe's classify.py.

        Args:
            shape: the input's shape.
            size: height and width of images before cropping; None: images are resized to the input.
            ten_crops: give the crops of the corners and the centre and their mirror images, not only the centre's.

        Raises:
            ConfigError: the input is larger than `size`, or the preparation does not fit.
        """
        channels, height, width = shape
        transformer = self.transformer((1, *shape))
        if size is not None and (height > size[0] or width > size[1]):
            raise ConfigError(
                f"images are resized to {size[0]} x {size[1]}, and the net takes {height} x {width}: give a larger "
                f"--images-dim, such as {height},{width}"
            )
        if size is not None:
            warn_about_small_crop(
                (height, width), size, f"give --images-dim {height},{width}, or prepare images as the net's training "
                "did ('caffepy deploy --like train_val.prototxt')",
            )  # fmt: skip
        cut = oversample if ten_crops else crop_centres

        def values(pixels: Floats) -> Floats:
            crops = [pixels] if size is None else cut([resize_image(pixels, size)], (height, width))
            return np.stack([transformer.preprocess(INPUT, crop) for crop in crops])

        return Steps(lambda image: image.load(channels), values)


@dataclass(frozen=True)
class Steps:
    """From an image to values of a net's input.

    Args:
        load: returns an image as (H, W, C) from 0 to 1: gray, or red, green and blue.
        values: returns the values (n, C, h, w) of a loaded image; predictions of the n crops are averaged.
    """

    load: Callable[[InputImage], Floats]
    values: Callable[[Floats], Floats]


def net_steps(preparation: ImagePreparation, channels: int) -> Steps:
    """Return the steps that the fields of the net's Input layer give; `channels` are the input's."""

    def load(image: InputImage) -> Floats:
        if not isinstance(image.content, Path):
            return image.load(channels)
        return np.asarray(preparation.load(image.content) / np.float32(255), np.float32)

    return Steps(load, lambda pixels: preparation(pixels)[None])


@dataclass(frozen=True)
class InputImage:
    """An image to predict.

    Args:
        name: file name, or array file and index.
        content: the file, or an array (H, W, C), gray or red, green and blue, from 0 to 1.
    """

    name: str
    content: Path | Floats

    def load(self, channels: int) -> Floats:
        """Return (H, W, C) from 0 to 1: gray if `channels` is 1, else red, green and blue.

        Raises:
            DataError: the file cannot be read, or the array has another number of channels.
        """
        if isinstance(self.content, Path):
            return load_image(self.content, channels != 1)
        if self.content.shape[2] != channels:
            raise DataError(
                f"'{self.name}' has the shape {self.content.shape}; images are (H, W, {channels}) for this net"
            )
        return self.content


def list_images(paths: Sequence[Path], ending: str = "") -> list[InputImage]:
    """Return the images that paths name: image files, folders, lists (.txt) and arrays (.npy).

    A list has a path per line, from the working directory or else from the list's folder; a label after the path is
    ignored. An array has the shape (H, W, C) or (N, H, W, C).

    Args:
        paths: the files and folders.
        ending: suffix of the files of a folder; empty: those of `SUFFIXES`.

    Raises:
        DataError: a folder has no image, or a list or an array cannot be read.
    """
    found: list[InputImage] = []
    for path in paths:
        if path.suffix == ".npy":
            found += _array_images(path)
        elif path.suffix == ".txt":
            found += [InputImage(str(file), file) for file in _listed_files(path)]
        else:
            found += [InputImage(str(file), file) for file in image_files(path, ending)]
    return found


SUFFIXES = (".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp")
"""Suffixes of image files."""


def image_files(path: Path, ending: str = "") -> list[Path]:
    """Return the file itself, or the files of a folder with a suffix (empty: any of `SUFFIXES`), sorted by name.

    Raises:
        DataError: the folder has none.
    """
    if not path.is_dir():
        return [path]
    endings = (f".{ending.lower().lstrip('.')}",) if ending else SUFFIXES
    try:
        found = sorted(entry for entry in path.iterdir() if entry.suffix.lower() in endings)
    except OSError as error:
        raise DataError(f"folder '{path}' cannot be read: {error.strerror}") from error
    if not found:
        what = f"files that end in .{ending.lstrip('.')}; name another suffix with --ext" if ending else "image files"
        raise DataError(f"folder '{path}' has no {what}")
    return found


def _listed_files(path: Path) -> list[Path]:
    found = []
    for _, line in list_lines(path):
        name = re.sub(r"\s+[-+]?[0-9]{1,20}$", "", line)
        options = [folder / text for text in (line, name) for folder in (Path(), path.parent)]
        found.append(next((option for option in options if os.path.exists(option)), Path(name)))
    if not found:
        raise DataError(f"image list '{path}' names no images; write a path per line")
    return found


def _array_images(path: Path) -> list[InputImage]:
    array = read_array(path)
    array = array[None] if array.ndim == 3 else array
    if array.ndim != 4 or not array.size:
        raise DataError(f"'{path}' has the shape {array.shape}; images are (N, H, W, C)")
    return [InputImage(f"{path}[{index}]", np.asarray(image, np.float32)) for index, image in enumerate(array)]


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
