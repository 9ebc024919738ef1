"""WindowData: windows of images, warped to one size, for R-CNN.

Defined by Caffe's `window_data_layer.cpp`; places and sizes are computed in float32 as there. A window file has for
each image `# number`, path, channels, height, width, number of windows, and for each window class, overlap, x1, y1, x2,
y2. A window is foreground or background by its overlap with objects.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import decode_image, opencv
from caffepy.data.images.mean import read_mean
from caffepy.data.prefetch import Batch
from caffepy.data.sources.source import hash_of
from caffepy.data.transform import check_transform
from caffepy.data.transforms.pixels import Image, Pixels, resize, to_pixels
from caffepy.data.transforms.sample_rng import SampleRng
from caffepy.data.workers import Workers
from caffepy.errors import DataError
from caffepy.files import read_list, read_regular
from caffepy.layers.core.base import register_layer
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source


@register_layer("WindowData")
class WindowDataLayer(PrefetchingLayer):
    """Random windows of images, fg_fraction of each batch foreground (Caffe's `window_data_layer.cpp`).

    Of every batch_size samples in a row the first are background and the last foreground. Tops: (N, 3, crop_size,
    crop_size), (N,).
    """

    tops = (2, 2)

    def batch_size(self) -> int:
        return self.param.window_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param, where = self.param.window_data_param, self.where
        check_transform(self.param.transform_param, where)
        self._settings = self._read_settings()
        self._windows = WindowSource(
            self.context.resolve(param.source), param.root_folder, (param.fg_threshold, param.bg_threshold),
            param.cache_images,
        )  # fmt: skip
        if self._windows.channels != 3:
            raise self.error(f"its images have {self._windows.channels} channels, but they are read in color, with 3")
        return self._windows, [(3, self._settings.crop, self._settings.crop), ()]

    def _read_settings(self) -> WindowSettings:
        param, transform = self.param.window_data_param, self.param.transform_param
        if param.crop_mode not in ("warp", "square"):
            raise self.error(f"crop_mode is '{param.crop_mode}'; give warp or square")
        crop = transform.crop_size or param.crop_size
        if crop <= 2 * param.context_pad:
            raise self.error(
                f"transform_param.crop_size {crop} must be more than twice context_pad {param.context_pad}"
            )
        if not 0 <= param.fg_fraction <= 1:
            raise self.error(f"fg_fraction is {param.fg_fraction:g}; give a part of the batch, from 0 to 1")
        return WindowSettings(
            param.batch_size, param.fg_fraction, crop, param.context_pad, param.crop_mode == "square",
            transform.mirror or param.mirror, self._read_mean(crop), param.scale * transform.scale, self.context.nvidia,
        )  # fmt: skip

    def _read_mean(self, crop: int) -> NDArray[np.float32]:
        transform = self.param.transform_param
        if mean_file := transform.mean_file or self.param.window_data_param.mean_file:
            return window_mean(read_mean(self.context.resolve(mean_file)), crop)
        if len(transform.mean_value) not in (0, 1, 3):
            raise self.error(f"transform_param has {len(transform.mean_value)} mean_value; give 1 or 3")
        return np.array(list(transform.mean_value) or [0], np.float32).reshape(-1, 1, 1)

    def make_loader(self) -> DescribingLoader:
        stream, own = self.random_stream(), self.param.transform_param.random_seed
        seed = stream.seed if own < 0 else own
        where, threads = self.where, self.threads(0)
        return WindowLoader(self._windows, self._settings, seed, stream.stream, where, threads)


# -- batches -------------------------------------------------------------------------------------------


Floats = NDArray[np.float32]
_f32 = np.float32


@dataclass(frozen=True)
class WindowSettings:
    """What WindowData is to do.

    Args:
        batch_size: of the prototxt: so many windows in a row are background and then foreground.
        fg_fraction: the part of them that is foreground.
        crop: height and width of the result.
        context_pad: pixels of the result around the window.
        square: whether to take the tightest square around the window.
        mirror: whether chance mirrors.
        mean: (C, H, W) whose centre is subtracted, (C, 1, 1) or (1, 1, 1).
        scale: factor on the values.
        nvidia: how images are decoded.
    """

    batch_size: int
    fg_fraction: float
    crop: int
    context_pad: int
    square: bool
    mirror: bool
    mean: Floats
    scale: float
    nvidia: bool


class WindowLoader:
    """Fills batches with random windows; a `Loader`.

    Args:
        source: the windows.
        settings: of the layer.
        seed: of the solver, or random_seed.
        stream: of the layer.
        where: the layer, for messages.
        threads: threads that decode.
    """

    def __init__(
        self, source: WindowSource, settings: WindowSettings, seed: int, stream: int, where: str, threads: int = 1
    ) -> None:
        self._source = source
        self._settings = settings
        self._key = (seed, stream)
        self._where = where
        self._image = 0
        self._workers = Workers(threads, f"read for {where}")

    @property
    def reading(self) -> str:
        return f"image {self._image} of {self._source.description}"

    def close(self) -> None:
        self._workers.close()

    def describe(self, sample: int) -> str:
        windows, number, _ = self._choose(sample)
        corners = ", ".join(map(str, windows.corners[number].tolist()))
        return f"window ({corners}) of '{self._source.files[windows.images[number]]}'"

    def load(self, first: int, count: int, batch: Batch) -> None:
        """Fill `batch` with the global samples [first, first + count)."""
        crop = self._settings.crop
        out, labels = batch.array(0, (count, 3, crop, crop)), batch.array(1, (count,))

        def fill(index: int) -> None:
            windows, number, mirror = self._choose(first + index)
            image = self._image = int(windows.images[number])
            labels[index] = windows.labels[number]
            try:
                pixels = to_pixels(decode_image(self._source.read(image), True, nvidia=self._settings.nvidia))
                self._put(pixels, windows.corners[number], mirror, out[index])
            except DataError as error:
                name = f"image {image} ('{self._source.files[image]}')"
                raise DataError(f"{self._where}: {self._source.description}: {name} {error}") from error

        self._workers.run(fill, range(count))

    def load_bytes(self, *_: object) -> int:
        """Batches are floats."""
        return 0

    def _choose(self, sample: int) -> tuple[Windows, int, bool]:
        """The window of a global sample: the list, its index there, and whether it is mirrored."""
        settings, rng = self._settings, SampleRng(*self._key, sample)
        wanted = int(_f32(settings.batch_size) * _f32(settings.fg_fraction))
        is_foreground = sample % settings.batch_size >= settings.batch_size - wanted
        windows = self._source.foreground if is_foreground else self._source.background
        if not len(windows):
            kind = "foreground" if is_foreground else "background"
            raise DataError(
                f"{self._where}: {self._source.description} has no {kind} windows; see fg_threshold, bg_threshold and "
                "fg_fraction"
            )
        return windows, rng.below(len(windows)), settings.mirror and bool(rng.below(2))

    def _put(self, pixels: Pixels, corners: NDArray[np.int64], mirror: bool, out: Floats) -> None:
        settings, image = self._settings, pixels.shape[:2]
        place = place_window(corners.tolist(), (image[0], image[1]), settings, mirror)
        left, top, right, bottom = place.corners
        if left < 0 or top < 0 or right >= image[1] or bottom >= image[0] or right < left or bottom < top:
            raise DataError(
                f"is {image[0]} x {image[1]}, but has a window ({', '.join(map(str, corners.tolist()))}); x1, y1, x2 "
                "and y2 must lie within it"
            )
        part = np.ascontiguousarray(pixels[top : bottom + 1, left : right + 1])
        warped = resize(part, place.height, place.width, opencv().INTER_LINEAR).transpose(2, 0, 1)
        rows, columns = slice(place.top, place.top + place.height), slice(place.left, place.left + place.width)
        values = warped[:, :, ::-1] if mirror else warped
        mean = np.broadcast_to(settings.mean, out.shape)
        out[...] = 0
        out[:, rows, columns] = (values - mean[:, rows, columns]) * _f32(settings.scale)


@dataclass(frozen=True)
class WindowPlace:
    """Which part of an image goes where in the result.

    Args:
        corners: x1, y1, x2, y2 in the image, both ends included.
        height: of what the part is warped to.
        width: of it.
        top: row of the result at which it begins; around it are zeros.
        left: column.
    """

    corners: tuple[int, int, int, int]
    height: int
    width: int
    top: int = 0
    left: int = 0


def _rounded(value: np.float32 | float) -> int:
    """As C's round: halves away from 0."""
    return int(math.copysign(math.floor(abs(float(value)) + 0.5), float(value)))


def _along(
    low: int, high: int, half: np.float32, size: int, settings: WindowSettings
) -> tuple[int, int, int, int, int]:
    """One axis of the window with its context: first and last pixel in the image, zeros before and after, and length.

    The zeros and the length are in pixels of the result.
    """
    context = _f32(settings.crop) / _f32(settings.crop - 2 * settings.context_pad)
    center = _f32(low) + _f32(high - low + 1) / _f32(2)
    low, high = _rounded(center - half * context), _rounded(center + half * context)
    scale = _f32(settings.crop) / _f32(high - low + 1)
    before, after = max(0, -low), max(0, high - size + 1)
    low, high = low + before, high - after
    length = _rounded(_f32(high - low + 1) * scale)
    return low, high, _rounded(_f32(before) * scale), _rounded(_f32(after) * scale), length


def place_window(corners: list[int], image: tuple[int, int], settings: WindowSettings, mirror: bool) -> WindowPlace:
    """Where a window goes.

    Args:
        corners: x1, y1, x2, y2.
        image: its height and width.
        settings: crop, context_pad and square.
        mirror: whether the result is mirrored, zeros included.
    """
    x1, y1, x2, y2 = corners
    crop = settings.crop
    if not (settings.context_pad or settings.square):
        return WindowPlace((x1, y1, x2, y2), crop, crop)
    half_height, half_width = _f32(y2 - y1 + 1) / _f32(2), _f32(x2 - x1 + 1) / _f32(2)
    if settings.square:
        half_height = half_width = max(half_height, half_width)
    x1, x2, left, right, width = _along(x1, x2, half_width, image[1], settings)
    y1, y2, top, _, height = _along(y1, y2, half_height, image[0], settings)
    left = right if mirror else left
    return WindowPlace((x1, y1, x2, y2), min(height, crop - top), min(width, crop - left), top, left)


def window_mean(mean: Image, crop: int) -> Floats:
    """The part of a mean image that is subtracted from results.

    Raises:
        DataError: it is smaller than they are, or not of three channels.
    """
    offset = (mean.shape[2] - crop) // 2
    if mean.shape[0] != 3 or offset < 0 or mean.shape[1] < offset + crop:
        raise DataError(
            f"the mean in mean_file is {' x '.join(map(str, mean.shape))}; it must have 3 channels and be at least "
            f"{crop} x {crop}"
        )
    return cast(Floats, mean[:, offset : offset + crop, offset : offset + crop])


# -- window files --------------------------------------------------------------------------------------


_MAX_LIST_BYTES = 1 << 30
_MAX_IMAGE_BYTES = 1 << 28
_FARTHEST = 1 << 24
"""Pixels: a float32 holds any whole number up to it."""


@dataclass(frozen=True)
class Windows:
    """Some windows of all images.

    Args:
        images: the number of each one's image.
        labels: 0 for background.
        corners: (windows, 4): x1, y1, x2, y2, both ends within the window.
    """

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    corners: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.images)


class WindowSource:
    """The windows that a file names, and its images.

    Args:
        path: the file.
        root_folder: put before each image's path as it is, without a slash, as Caffe does.
        thresholds: overlap from which a window is foreground, and below which it is background.
        cache: keep the bytes of image files in memory.

    Raises:
        DataError: the file cannot be read, or has another format.
    """

    def __init__(self, path: Path, root_folder: str, thresholds: tuple[float, float], cache: bool) -> None:
        self.description = f"window file '{path}'"
        self.channels = 0
        """Of the images, by what the file says of the last one."""
        self.files: list[str] = []
        self._cache: dict[int, bytes] | None = {} if cache else None
        try:
            text = read_list(path, _MAX_LIST_BYTES)
        except OSError as error:
            raise DataError(f"{self.description} cannot be read: {error.strerror}") from error
        rows: list[tuple[int, ...]] = []
        overlaps: list[float] = []
        self._read(iter(text.split()), root_folder, rows, overlaps)
        if not self.files:
            raise DataError(f"{self.description} names no images")
        self._hash = hash_of(os.fsencode(text))
        table, overlap = np.array(rows, np.int64).reshape(-1, 6), np.array(overlaps, np.float32)
        is_foreground = overlap >= np.float32(thresholds[0])
        self.foreground = _windows(table[is_foreground])
        self.background = _windows(table[~is_foreground & (overlap < np.float32(thresholds[1]))], 0)
        if (self.foreground.labels <= 0).any():
            raise DataError(f"{self.description} has a foreground window of class 0 or less; 0 is the background")

    def _read(self, words: Iterator[str], root: str, rows: list[tuple[int, ...]], overlaps: list[float]) -> None:
        for word in words:
            image = len(self.files)
            if word != "#":
                raise DataError(f"{self.description}: '{word[:40]}' where '# {image}' was expected")
            try:
                number, name = int(next(words)), next(words)
                self.channels, _, _, count = (int(next(words)) for _ in range(4))
                for _ in range(count):
                    label, overlap = int(next(words)), float(next(words))
                    corners = [int(next(words)) for _ in range(4)]
                    if any(abs(value) > _FARTHEST for value in (label, *corners)):
                        raise DataError(f"{self.description}: image {image} has a path or a window that cannot be one")
                    rows.append((image, label, *corners))
                    overlaps.append(overlap)
            except (ValueError, StopIteration, RuntimeError) as error:
                raise DataError(f"{self.description}: image {image} is not whole; {_FORMAT}") from error
            if number != image:
                raise DataError(f"{self.description}: '# {number}' where '# {image}' was expected")
            if "\0" in name:
                raise DataError(f"{self.description}: image {image} has a path or a window that cannot be one")
            self.files.append(root + name)

    def __len__(self) -> int:
        return len(self.foreground) + len(self.background)

    def read(self, image: int) -> bytes:
        """The bytes of an image's file.

        Raises:
            DataError: it cannot be read.
        """
        if self._cache is not None and image in self._cache:
            return self._cache[image]
        try:
            data = read_regular(self.files[image], _MAX_IMAGE_BYTES)
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror}; see root_folder in window_data_param") from error
        if self._cache is not None:
            self._cache[image] = data
        return data

    def fingerprint(self) -> dict[str, str]:
        return {"the number of windows": str(len(self)), "the hash of the window file": self._hash}

    def close(self) -> None:
        """There is nothing open between reads."""


_FORMAT = "each is '# number path channels height width windows', and each window 'class overlap x1 y1 x2 y2'"


def _windows(table: NDArray[np.int64], label: int | None = None) -> Windows:
    labels = table[:, 1] if label is None else np.full(len(table), label)
    return Windows(table[:, 0], labels, table[:, 2:])
