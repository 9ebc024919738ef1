"""Images for prediction: reading of files and arrays, preprocessing, and the steps to the values of a net's input.

Reading, resizing, cropping and preprocessing are those of pycaffe's `io.py`. Images are (H, W, K) float32 arrays in
[0, 1], in RGB order, as in scikit-image; OpenCV reads the files. Resizing equals that of scikit-image at Caffe's time,
without the anti-aliasing of newer versions.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tokenize import TokenError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import decode, read_file
from caffepy.data.mean import read_mean
from caffepy.data.sources.image_list import list_lines
from caffepy.errors import ConfigError, DataError, UserError
from caffepy.infer.input_transform import ImagePreparation, warn_about_small_crop
from caffepy.utils.files import open_regular
from caffepy.utils.installation import MissingExtraError

Floats = NDArray[Any]


# -- pycaffe's `io` ------------------------------------------------------------------------------------

_MAX_BYTES = 1 << 30
_LUMINANCE = np.array([0.2125, 0.7154, 0.0721])
"""RGB weights of scikit-image's `rgb2gray` (ITU-R BT.709)."""


class ArrayError(UserError, ValueError):
    """An unsuitable array; a ValueError, as in pycaffe."""


def load_image(filename: str | Path, color: bool = True) -> NDArray[np.float32]:
    """Return an image file as RGB (H, W, 3), or (H, W, 1) without `color`, from 0 to 1.

    Transparency is dropped; transparent pixels of a gray image become white, as in scikit-image. EXIF rotation is
    ignored.

    Raises:
        DataError: the file cannot be read or decoded.
    """
    try:
        pixels = decode(read_file(filename))
    except DataError as error:
        raise DataError(f"image '{filename}' {error}") from error
    image = pixels / np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else pixels.astype(float)
    if image.ndim == 2:
        image = image[:, :, np.newaxis]
    elif not color:
        image = _gray(image)
    if color:
        image = np.tile(image, (1, 1, 3)) if image.shape[2] == 1 else image[:, :, 2::-1]
    return np.ascontiguousarray(image, dtype=np.float32)


def _gray(image: Floats) -> Floats:
    if image.shape[2] == 4:
        alpha = image[:, :, 3:]
        image = image[:, :, :3] * alpha + (1 - alpha)
    gray: Floats = (image[:, :, ::-1] @ _LUMINANCE)[:, :, np.newaxis]
    return gray


def resize_image(im: Floats, new_dims: Sequence[int], interp_order: int = 1) -> NDArray[np.float32]:
    """Resize an image (H, W, K), as Caffe's `resize_image`.

    With 1 or 3 channels, pixel centres are aligned and the border is padded with the image's minimum (scikit-image's
    ``resize(mode='constant')``). Otherwise corner pixels are aligned (SciPy's `zoom`). Linear results agree with these
    libraries within 1e-6 of the image's range.

    Args:
        im: the image.
        new_dims: height and width.
        interp_order: spline order, 0 to 5; 1 is linear, other orders need SciPy.

    Raises:
        ArrayError: the image does not have three dimensions, or a size is not positive.
        MissingExtraError: SciPy is needed and not installed.
    """
    height, width = (int(size) for size in new_dims)
    if im.ndim != 3 or im.size == 0 or min(height, width) <= 0:
        raise ArrayError(f"an image of the shape {im.shape} cannot be resized to {height} x {width}")
    if im.shape[2] not in (1, 3):
        return _resample(im, height, width, interp_order, aligned=False).astype(np.float32)
    low, high = float(im.min()), float(im.max())
    if not high > low:
        return np.full((height, width, im.shape[2]), low, dtype=np.float32)
    unit = (im.astype(np.float64) - low) / (high - low)
    resized = np.clip(_resample(unit, height, width, interp_order, aligned=True), 0, 1)
    return np.asarray(resized * (high - low) + low, dtype=np.float32)


def _resample(image: Floats, height: int, width: int, order: int, aligned: bool) -> Floats:
    """Return the resized image, padded with 0 if pixel centres are `aligned`."""
    if order == 1:
        return _linear(_linear(image, 0, height, aligned), 1, width, aligned)
    try:
        from scipy import ndimage
    except ImportError as error:
        raise MissingExtraError("scipy", "images", f"to resize with interpolation order {order}") from error
    factors = (height / image.shape[0], width / image.shape[1], 1)
    mode = "grid-constant" if aligned else "constant"
    return np.asarray(ndimage.zoom(image, factors, order=order, mode=mode, grid_mode=aligned))


def _linear(image: Floats, axis: int, size: int, aligned: bool) -> Floats:
    old = image.shape[axis]
    centres = (np.arange(size) + 0.5) * (old / size) - 0.5
    at = centres if aligned else np.arange(size) * ((old - 1) / max(size - 1, 1))
    first = np.floor(at).astype(int)
    result: Floats = np.zeros(())
    for index, weight in ((first, first + 1 - at), (first + 1, at - first)):
        inside = np.where((index >= 0) & (index < old), weight, 0.0)
        spread = inside.reshape([-1 if other == axis else 1 for other in range(image.ndim)])
        result = result + image.take(index.clip(0, old - 1), axis) * spread
    return result


def oversample(images: Sequence[Floats] | Floats, crop_dims: Sequence[int] | Floats) -> NDArray[np.float32]:
    """Return ten crops of each image: four corners, centre, and their mirror images.

    Args:
        images: images of one shape (H, W, K).
        crop_dims: height and width of the crops.

    Returns:
        (10 N, height, width, K); the crops of an image are consecutive.

    Raises:
        ArrayError: a crop is larger than an image.
    """
    height, width, middle = _middle(images[0], crop_dims)
    rows, columns, channels = images[0].shape
    corners = [(y, x) for y in (0, rows - height) for x in (0, columns - width)]
    crops = np.empty((len(images), 10, height, width, channels), dtype=np.float32)
    for own, image in zip(crops, images, strict=True):
        for crop, (y, x) in zip(own, [*corners, middle], strict=False):
            crop[...] = image[y : y + height, x : x + width]
        own[5:] = own[:5, :, ::-1]
    return crops.reshape(-1, height, width, channels)


def crop_centres(images: Sequence[Floats] | Floats, crop_dims: Sequence[int] | Floats) -> Floats:
    """Return the centre crop of each image, as in `oversample`.

    Raises:
        ArrayError: a crop is larger than an image.
    """
    height, width, (top, left) = _middle(images[0], crop_dims)
    return np.stack([image[top : top + height, left : left + width] for image in images])


def _middle(image: Floats, crop_dims: Sequence[int] | Floats) -> tuple[int, int, tuple[int, int]]:
    """Return height and width of the crops, and the corner of the centre crop."""
    height, width = (int(size) for size in crop_dims)
    rows, columns = image.shape[:2]
    if height > rows or width > columns:
        raise ArrayError(f"crops of {height} x {width} cannot be cut out of images of {rows} x {columns}")
    return height, width, (int((rows - height) / 2), int((columns - width) / 2))


class Transformer:
    """Converts images to a net's input and back.

    Args:
        inputs: shape (N, K, H, W) by input name.
    """

    def __init__(self, inputs: Mapping[str, Sequence[int]]) -> None:
        self.inputs = {name: tuple(shape) for name, shape in inputs.items()}
        self.transpose: dict[str, Sequence[int]] = {}
        self.channel_swap: dict[str, Sequence[int]] = {}
        self.raw_scale: dict[str, float] = {}
        self.mean: dict[str, Floats] = {}
        self.input_scale: dict[str, float] = {}

    def _check_input(self, in_: str) -> None:
        if in_ not in self.inputs:
            raise UserError(f"{in_} is not one of the net inputs: {self.inputs}")

    def preprocess(self, in_: str, data: Floats) -> NDArray[np.float32]:
        """Return an image (H', W', K) converted to the input `in_` (K, H, W), without modifying `data`.

        Steps: convert to float32, resize, transpose, swap channels, multiply by raw_scale, subtract the mean, multiply
            by input_scale.

        Raises:
            ArrayError: the image has fewer channels than channel_swap or the mean.
        """
        self._check_input(in_)
        image = data.astype(np.float32, copy=False)
        size = self.inputs[in_][2:]
        if image.shape[:2] != size:
            image = resize_image(image, size)
        if in_ in self.transpose:
            image = image.transpose(self.transpose[in_])
        if in_ in self.channel_swap:
            self._check_channels(in_, image, max(self.channel_swap[in_]) + 1)
            image = image[list(self.channel_swap[in_])]
        if in_ in self.mean:
            self._check_channels(in_, image, len(self.mean[in_]))
        if np.may_share_memory(image, data):
            image = image.copy()
        if in_ in self.raw_scale:
            image *= self.raw_scale[in_]
        if in_ in self.mean:
            image -= self.mean[in_]
        if in_ in self.input_scale:
            image *= self.input_scale[in_]
        return image

    def _check_channels(self, in_: str, image: Floats, needed: int) -> None:
        if len(image) < needed:
            raise ArrayError(
                f"the image has {len(image)} channel{'s' * (len(image) != 1)}, and '{in_}' takes {needed}; read a gray "
                "image with color=True (caffe.io.load_image), or repeat its channel"
            )

    def deprocess(self, in_: str, data: Floats) -> Floats:
        """Return the image of an input (K, H, W): the inverse of `preprocess`, without resizing."""
        self._check_input(in_)
        image: Floats = data.copy().squeeze()
        if image.ndim < 3 <= data.ndim and (in_ in self.transpose or in_ in self.mean):
            image = image.reshape(data.shape[-3:])
        if in_ in self.input_scale:
            image /= self.input_scale[in_]
        if in_ in self.mean:
            image += self.mean[in_]
        if in_ in self.raw_scale:
            image /= self.raw_scale[in_]
        if in_ in self.channel_swap:
            image = image[np.argsort(self.channel_swap[in_])]
        if in_ in self.transpose:
            image = image.transpose(np.argsort(self.transpose[in_]))
        return image

    def set_transpose(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of dimensions; (2, 0, 1) converts (H, W, K) to (K, H, W)."""
        self._check_input(in_)
        if len(order) != len(self.inputs[in_]) - 1:
            raise UserError(
                "Transpose order needs to have the same number of dimensions as the input: "
                f"'{in_}' has {len(self.inputs[in_]) - 1}, the order {tuple(order)} has {len(order)}"
            )
        self.transpose[in_] = order

    def set_channel_swap(self, in_: str, order: Sequence[int]) -> None:
        """Set the order of channels, the first dimension after `set_transpose`; (2, 1, 0) converts RGB to BGR."""
        self._check_input(in_)
        if len(order) != self.inputs[in_][1]:
            raise UserError(
                "Channel swap needs to have the same number of dimensions as the input channels: "
                f"'{in_}' has {self.inputs[in_][1]}, the order {tuple(order)} has {len(order)}"
            )
        self.channel_swap[in_] = order

    def set_raw_scale(self, in_: str, scale: float) -> None:
        """Set the factor before mean subtraction; 255 for nets trained on bytes."""
        self._check_input(in_)
        self.raw_scale[in_] = scale

    def set_mean(self, in_: str, mean: Floats) -> None:
        """Set the mean: a value per channel (K,), or an image (K, H, W) or (H, W), resized if needed.

        Raises:
            ArrayError: the number of channels or dimensions does not fit.
        """
        self._check_input(in_)
        channels, *size = self.inputs[in_][1:]
        if mean.ndim == 1:
            if mean.shape[0] != channels:
                raise ArrayError(
                    f"Mean channels incompatible with input. The mean has {mean.shape[0]}, '{in_}' has {channels}"
                )
            mean = mean[:, np.newaxis, np.newaxis]
        else:
            mean = self._mean_image(mean, channels, size)
        self.mean[in_] = mean

    def _mean_image(self, mean: Floats, channels: int, size: Sequence[int]) -> Floats:
        if mean.ndim == 2:
            mean = mean[np.newaxis]
        if mean.ndim != 3 or mean.shape[0] not in (1, channels):
            raise ArrayError(
                f"Mean shape invalid: {mean.shape}; for {channels} channels it is (K,), (H, W) or (K, H, W)"
            )
        if mean.shape[1:] == tuple(size):
            return mean
        resized: Floats = resize_image(mean.transpose(1, 2, 0), size).transpose(2, 0, 1)
        return resized

    def set_input_scale(self, in_: str, scale: float) -> None:
        """Set the factor after mean subtraction."""
        self._check_input(in_)
        self.input_scale[in_] = scale


def configured_transformer(in_: str, shape: Sequence[int], options: Mapping[str, Any]) -> Transformer:
    """Return a Transformer of one input for images (H, W, C), configured as in Caffe's Classifier and Detector.

    Args:
        in_: the input's name.
        shape: its shape.
        options: `mean`, `input_scale`, `raw_scale` and `channel_swap`; None: unset.
    """
    transformer = Transformer({in_: shape})
    transformer.set_transpose(in_, (2, 0, 1))
    for name, value in options.items():
        if value is not None:
            getattr(transformer, f"set_{name}")(in_, value)
    return transformer


# -- the steps to a net's input ------------------------------------------------------------------------

INPUT = "data"
"""The input's name in transformers."""


@dataclass(frozen=True)
class ImageOptions:
    """Options for the preprocessing of image values, which are RGB from 0 to 1.

    Args:
        raw_scale: factor before mean subtraction.
        channel_swap: the net's channel order; (2, 1, 0) is BGR. Ignored for one channel.
        mean: subtracted mean: a value per channel (C,), or an image (C, H, W), resized to the input.
        input_scale: factor after mean subtraction.
    """

    raw_scale: float = 255.0
    channel_swap: tuple[int, ...] = (2, 1, 0)
    mean: NDArray[np.float32] | None = None
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
            ConfigError: the input is larger than `size`, or the options do not fit.
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
                (height, width),
                size,
                f"give --images-dim {height},{width}, or prepare images as the net's training "
                "did ('caffepy deploy --like train_val.prototxt')",
            )
        cut = oversample if ten_crops else crop_centres

        def values(pixels: NDArray[np.float32]) -> NDArray[np.float32]:
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

    load: Callable[[InputImage], NDArray[np.float32]]
    values: Callable[[NDArray[np.float32]], NDArray[np.float32]]


def net_steps(preparation: ImagePreparation, channels: int) -> Steps:
    """Return the steps that the fields of the net's Input layer give; `channels` are the input's."""

    def load(image: InputImage) -> NDArray[np.float32]:
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
    content: Path | NDArray[np.float32]

    def load(self, channels: int) -> NDArray[np.float32]:
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


_DAMAGED = (ArithmeticError, LookupError, MemoryError, RecursionError, SyntaxError, TokenError, TypeError, ValueError)
"""Errors of NumPy's reader and of Python's parser on damaged headers."""


def read_array(path: Path) -> NDArray[np.float32]:
    """Return the array of an .npy file.

    Unlike `np.load`, this function rejects zip files and pickles, and does not trust the header's size.

    Raises:
        DataError: the file cannot be read or is not a numeric .npy file.
    """
    try:
        open_regular(path).close()
        with warnings.catch_warnings(), np.errstate(over="ignore"):
            warnings.simplefilter("ignore")  # warnings of Python's parser on the header
            stored = np.lib.format.open_memmap(path, mode="r")
            if stored.dtype.kind not in "biuf":
                raise ValueError(f"it holds {stored.dtype}")
            return np.array(stored, np.float32)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror or error}") from error
    except _DAMAGED as error:
        raise DataError(f"'{path}' is not a numeric .npy file: {' '.join(str(error).split())}") from error


def read_any_mean(text: str) -> NDArray[np.float32] | None:
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
