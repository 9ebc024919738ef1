"""In-memory cache of decoded images, for ImageData's `cache` option."""

from __future__ import annotations

import os
from collections.abc import Callable, Hashable
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from caffepy.utils.process_fork import free_after_fork

_shared: WeakValueDictionary[Hashable, ImageCache] = WeakValueDictionary()
_lock = free_after_fork(Lock())

Image = NDArray[np.uint8]
Version = tuple[int, int, int, int]


class ImageCache:
    """Decoded images by file path, up to a memory limit. Thread-safe.

    A modified file is decoded again. The image of a removed file stays.

    Args:
        max_bytes: memory limit for the images.
    """

    def __init__(self, max_bytes: int) -> None:
        self._images: dict[str, tuple[Version, Image]] = {}
        self._free_bytes = max_bytes
        self.full = False
        """Whether the limit was reached."""

    def __contains__(self, path: str) -> bool:
        return path in self._images

    def image(self, path: str, decode: Callable[[], Image]) -> Image:
        """Return the cached image of a file, or call `decode` and cache its result if it fits."""
        version = _version(path)
        entry = self._images.get(path)
        if entry is not None and version in (entry[0], None):
            return entry[1]
        image = decode()
        if version is not None:
            self._store(path, version, image)
        return image

    def _store(self, path: str, version: Version, image: Image) -> None:
        with _lock:
            previous = self._images.pop(path, None)
            if previous is not None:
                self._free_bytes += previous[1].nbytes
            self.full = self.full or image.nbytes > self._free_bytes
            if not self.full:
                self._free_bytes -= image.nbytes
                self._images[path] = version, image


def _version(path: str) -> Version | None:
    """Return values that change when a file is replaced or modified; None if it does not exist."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def shared_cache(key: Hashable) -> ImageCache:
    """Return the process-wide cache for `key`, limited to half of the free memory.

    Args:
        key: the settings that affect decoding and resizing.
    """
    with _lock:
        cache = _shared.get(key)
        if cache is None:
            free = "SC_AVPHYS_PAGES" if "SC_AVPHYS_PAGES" in os.sysconf_names else "SC_PHYS_PAGES"  # macOS: all memory
            cache = _shared[key] = ImageCache(os.sysconf(free) * os.sysconf("SC_PAGE_SIZE") // 2)
        return cache
