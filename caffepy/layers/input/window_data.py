"""WindowData: windows of images, warped to one size, for R-CNN.

Defined by Caffe's `window_data_layer.cpp`; positions and sizes are computed in float32 as in Caffe. A window file has,
for each image, `# number`, path, channels, height, width and number of windows, and for each window class, overlap, x1,
y1, x2, y2. The overlap with objects decides whether a window is foreground or background.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import Image, Pixels, decode_image, read_file, resize, rounded, to_pixels
from caffepy.data.mean import read_mean
from caffepy.data.random import SampleRng
from caffepy.data.sampler import SampleLoader
from caffepy.data.sources.databases import hash_of
from caffepy.data.transform import check_transform
from caffepy.errors import DataError
from caffepy.layers.input.prefetching import DescribingLoader, PrefetchingLayer, Source, seeded_stream
from caffepy.layers.layer import register_layer
from caffepy.utils.files import read_list


@register_layer("WindowData")
class WindowDataLayer(PrefetchingLayer):
    """Random windows of images; fg_fraction of each batch is foreground (Caffe's `window_data_layer.cpp`).

    In each group of batch_size consecutive samples, background windows come first. Tops: (N, 3, crop_size, crop_size),
    (N,).

    Raises:
        ConfigError: a setting is missing or out of range.
        DataError: the window file or an image cannot be read, or a window does not lie in its image.
    """

    tops = (2, 2)

    def batch_size(self) -> int:
        return self.param.window_data_param.batch_size

    def open(self) -> tuple[Source, list[tuple[int, ...]]]:
        param = self.param.window_data_param
        check_transform(self.param.transform_param, self.where)
        self._settings = self._read_settings()
        self._windows = WindowSource(
            self.context.resolve(param.source),
            param.root_folder,
            (param.fg_threshold, param.bg_threshold),
            param.cache_images,
        )
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
            raise self.error(f"fg_fraction is {param.fg_fraction:g}; it must be from 0 to 1")
        return WindowSettings(
            param.batch_size,
            param.fg_fraction,
            crop,
            param.context_pad,
            param.crop_mode == "square",
            transform.mirror or param.mirror,
            self._read_mean(crop),
            param.scale * transform.scale,
            self.context.nvidia,
        )

    def _read_mean(self, crop: int) -> NDArray[np.float32]:
        transform = self.param.transform_param
        if mean_file := transform.mean_file or self.param.window_data_param.mean_file:
            return window_mean(read_mean(self.context.resolve(mean_file)), crop)
        if len(transform.mean_value) not in (0, 1, 3):
            raise self.error(f"transform_param has {len(transform.mean_value)} mean_value; give 1 or 3")
        return np.array(list(transform.mean_value) or [0], np.float32).reshape(-1, 1, 1)

    def make_loader(self) -> DescribingLoader:
        stream = seeded_stream(self)
        return WindowLoader(self._windows, self._settings, stream.seed, stream.stream, self.where, self.threads(0))


# -- batches -------------------------------------------------------------------------------------------


Floats = NDArray[np.float32]
_f32 = np.float32


@dataclass(frozen=True)
class WindowSettings:
    """Settings of WindowData.

    Args:
        batch_size: of the prototxt.
        fg_fraction: fraction of foreground windows in a batch.
        crop: height and width of the result.
        context_pad: pixels of context around the window, in the result.
        square: whether to use the tightest square around the window.
        mirror: whether to mirror at random.
        mean: subtracted from the pixels: (C, H, W), (C, 1, 1) or (1, 1, 1).
        scale: factor on the values.
        nvidia: whether images are decoded as by NVIDIA Caffe.
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


class WindowLoader(SampleLoader):
    """Fills batches with random windows.

    Args:
        source: the windows.
        settings: of the layer.
        seed: of the solver, or random_seed.
        stream: random stream of the layer.
        where: the layer, for messages.
        threads: number of decoder threads.
    """

    def __init__(
        self, source: WindowSource, settings: WindowSettings, seed: int, stream: int, where: str, threads: int = 1
    ) -> None:
        super().__init__(where, self._window, self._window_name, threads=threads)
        self._source = source
        self._settings = settings
        self._key = (seed, stream)

    def _window_name(self, sample: int) -> str:
        windows, number, _ = self._choose(sample)
        corners, image = ", ".join(map(str, windows.corners[number].tolist())), windows.images[number]
        return f"window ({corners}) of image {image} ('{self._source.files[image]}') of {self._source.description}"

    def _window(self, _: int, sample: int) -> list[Floats]:
        """Return a window's pixels and its label."""
        windows, number, mirror = self._choose(sample)
        pixels = to_pixels(
            decode_image(self._source.read(int(windows.images[number])), True, nvidia=self._settings.nvidia)
        )
        return [self._warped(pixels, windows.corners[number], mirror), np.array(windows.labels[number], np.float32)]

    def _choose(self, sample: int) -> tuple[Windows, int, bool]:
        """Return the window of a global sample: the list, its index in it, and whether it is mirrored."""
        settings, rng = self._settings, SampleRng(*self._key, sample)
        foreground_count = int(_f32(settings.batch_size) * _f32(settings.fg_fraction))
        is_foreground = sample % settings.batch_size >= settings.batch_size - foreground_count
        windows = self._source.foreground if is_foreground else self._source.background
        if not len(windows):
            kind = "foreground" if is_foreground else "background"
            raise DataError(
                f"{self.where}: {self._source.description} has no {kind} windows; see fg_threshold, bg_threshold and "
                "fg_fraction"
            )
        return windows, rng.below(len(windows)), settings.mirror and bool(rng.below(2))

    def _warped(self, pixels: Pixels, corners: NDArray[np.int64], mirror: bool) -> Floats:
        settings, image = self._settings, pixels.shape[:2]
        crop = crop_window(corners.tolist(), (image[0], image[1]), settings, mirror)
        left, top, right, bottom = crop.corners
        if left < 0 or top < 0 or right >= image[1] or bottom >= image[0] or right < left or bottom < top:
            raise DataError(f"exceeds the image of {image[0]} x {image[1]}; x1, y1, x2 and y2 must lie within it")
        part = np.ascontiguousarray(pixels[top : bottom + 1, left : right + 1])
        warped = resize(part, crop.height, crop.width).transpose(2, 0, 1)
        rows, columns = slice(crop.top, crop.top + crop.height), slice(crop.left, crop.left + crop.width)
        values = warped[:, :, ::-1] if mirror else warped
        out = np.zeros((3, settings.crop, settings.crop), np.float32)
        mean = np.broadcast_to(settings.mean, out.shape)
        out[:, rows, columns] = (values - mean[:, rows, columns]) * _f32(settings.scale)
        return out


@dataclass(frozen=True)
class WindowCrop:
    """A crop of an image, and its position in the result.

    Args:
        corners: x1, y1, x2, y2 in the image, inclusive.
        height: of the warped crop.
        width: of the warped crop.
        top: first row of the warped crop in the result. Pixels around it are 0.
        left: first column.
    """

    corners: tuple[int, int, int, int]
    height: int
    width: int
    top: int = 0
    left: int = 0


def _crop_axis(
    low: int, high: int, half: np.float32, size: int, settings: WindowSettings
) -> tuple[int, int, int, int, int]:
    """Return first and last pixel in the image along one axis of a window with context, then the padding before and
    after and the length, in pixels of the result.
    """
    context = _f32(settings.crop) / _f32(settings.crop - 2 * settings.context_pad)
    center = _f32(low) + _f32(high - low + 1) / _f32(2)
    low, high = rounded(center - half * context), rounded(center + half * context)
    scale = _f32(settings.crop) / _f32(high - low + 1)
    before, after = max(0, -low), max(0, high - size + 1)
    low, high = low + before, high - after
    length = rounded(_f32(high - low + 1) * scale)
    return low, high, rounded(_f32(before) * scale), rounded(_f32(after) * scale), length


def crop_window(corners: list[int], image: tuple[int, int], settings: WindowSettings, mirror: bool) -> WindowCrop:
    """Return the crop of a window with its context.

    Args:
        corners: x1, y1, x2, y2 of the window.
        image: height and width of the image.
        settings: crop, context_pad and square.
        mirror: whether the result is mirrored, with its padding.
    """
    x1, y1, x2, y2 = corners
    crop = settings.crop
    if not (settings.context_pad or settings.square):
        return WindowCrop((x1, y1, x2, y2), crop, crop)
    half_height, half_width = _f32(y2 - y1 + 1) / _f32(2), _f32(x2 - x1 + 1) / _f32(2)
    if settings.square:
        half_height = half_width = max(half_height, half_width)
    x1, x2, left, right, width = _crop_axis(x1, x2, half_width, image[1], settings)
    y1, y2, top, _, height = _crop_axis(y1, y2, half_height, image[0], settings)
    left = right if mirror else left
    return WindowCrop((x1, y1, x2, y2), min(height, crop - top), min(width, crop - left), top, left)


def window_mean(mean: Image, crop: int) -> Floats:
    """Return the centre of a mean image with the results' size.

    Raises:
        DataError: the mean image is smaller, or does not have three channels.
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
_MAX_COORDINATE = 1 << 24
"""In pixels: float32 represents all integers up to it."""


@dataclass(frozen=True)
class Windows:
    """The foreground or background windows of all images.

    Args:
        images: index of each window's image.
        labels: class of each window, 0 for background.
        corners: (windows, 4): x1, y1, x2, y2, inclusive.
    """

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    corners: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.images)


class WindowSource:
    """The images and windows of a window file.

    Args:
        path: of the file.
        root_folder: prefix of each image's path, without an added slash, as in Caffe.
        thresholds: overlap from which a window is foreground, and below which it is background.
        cache: whether to keep the bytes of image files in memory.

    Raises:
        DataError: the file cannot be read, or has another format.
    """

    def __init__(self, path: Path, root_folder: str, thresholds: tuple[float, float], cache: bool) -> None:
        self.description = f"window file '{path}'"
        self.channels = 0
        """Number of channels in the file's entry of the last image."""
        self.files: list[str] = []
        self._cache: dict[int, bytes] | None = {} if cache else None
        text = read_list(path, _MAX_LIST_BYTES, self.description)
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
                    if any(abs(value) > _MAX_COORDINATE for value in (label, *corners)):
                        raise DataError(f"{self.description}: image {image} has an invalid path or window")
                    rows.append((image, label, *corners))
                    overlaps.append(overlap)
            except (ValueError, StopIteration, RuntimeError) as error:
                raise DataError(f"{self.description}: image {image} is incomplete; {_FORMAT}") from error
            if number != image:
                raise DataError(f"{self.description}: '# {number}' where '# {image}' was expected")
            if "\0" in name:
                raise DataError(f"{self.description}: image {image} has an invalid path or window")
            self.files.append(root + name)

    def __len__(self) -> int:
        return len(self.foreground) + len(self.background)

    def read(self, image: int) -> bytes:
        """Return the bytes of an image file.

        Raises:
            DataError: the file cannot be read.
        """
        if self._cache is not None and image in self._cache:
            return self._cache[image]
        data = read_file(self.files[image], "; see root_folder in window_data_param")
        if self._cache is not None:
            self._cache[image] = data
        return data

    def fingerprint(self) -> dict[str, str]:
        return {"the number of windows": str(len(self)), "the hash of the window file": self._hash}

    def close(self) -> None:
        """Does nothing: no file stays open between reads."""


_FORMAT = (
    "each is '# number path channels height width windows', and each window 'class overlap x1 y1 x2 y2'; white space "
    "divides, so a path cannot contain any"
)


def _windows(table: NDArray[np.int64], label: int | None = None) -> Windows:
    labels = table[:, 1] if label is None else np.full(len(table), label)
    return Windows(table[:, 0], labels, table[:, 2:])
