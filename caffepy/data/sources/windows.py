"""R-CNN's window files: images and the windows in them, foreground or background by their overlap with objects.

The format is that of Caffe's `window_data_layer.cpp`: for each image `# number`, path, channels, height, width, number
of windows, and for each window class, overlap, x1, y1, x2, y2.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.sources.source import hash_of
from caffepy.errors import DataError
from caffepy.files import read_list, read_regular

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
