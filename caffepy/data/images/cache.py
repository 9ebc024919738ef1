"""Decoded images kept in memory, as ImageData's `cache` asks for."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from caffepy.forks import free_after_fork

_shared: WeakValueDictionary[Hashable, ImageCache] = WeakValueDictionary()
_lock = free_after_fork(Lock())

Image = NDArray[np.uint8]
Version = tuple[int, int, int, int]


class ImageCache:
    """Images by their file, until they fill the memory. Thread-safe.

    A file that was written again since is decoded again. An image whose file was removed stays.

    Args:
        most: bytes that the images may take.
    """

    def __init__(self, most: int) -> None:
        self._images: dict[str, tuple[Version, Image]] = {}
        self._left = most
        self.full = False
        """Whether an image did not fit any more."""

    def __contains__(self, path: str) -> bool:
        return path in self._images

    def image(self, path: str, decode: Callable[[], Image]) -> Image:
        """The image of a file: the one that is kept, else what `decode` gives, which is kept if it fits."""
        version = _version(path)
        kept = self._images.get(path)
        if kept is not None and version in (kept[0], None):
            return kept[1]
        image = decode()
        if version is not None:
            self._put(path, version, image)
        return image

    def _put(self, path: str, version: Version, image: Image) -> None:
        with _lock:
            before = self._images.pop(path, None)
            if before is not None:
                self._left += before[1].nbytes
            self.full = self.full or image.nbytes > self._left
            if not self.full:
                self._left -= image.nbytes
                self._images[path] = version, image


def _version(path: str) -> Version | None:
    """What changes when a file is replaced or written to; None where there is no file."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def shared_cache(key: Hashable) -> ImageCache:
    """The cache of all layers of this process with the same `key`; it takes half of the free memory.

    Args:
        key: what decides, beside the file, how an image is decoded and resized.
    """
    with _lock:
        cache = _shared.get(key)
        if cache is None:
            cache = _shared[key] = ImageCache(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        return cache
