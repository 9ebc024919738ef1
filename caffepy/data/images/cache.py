"""Decoded images kept in memory, as ImageData's `cache` asks for."""

from __future__ import annotations

import os
from collections.abc import Hashable
from threading import Lock
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from caffepy.forks import free_after_fork

_shared: WeakValueDictionary[Hashable, ImageCache] = WeakValueDictionary()
_lock = free_after_fork(Lock())


class ImageCache:
    """Images by the number of their record, until they fill the memory. Thread-safe.

    Args:
        most: bytes that they may take.
    """

    def __init__(self, most: int) -> None:
        self._images: dict[int, NDArray[np.uint8]] = {}
        self._left = most
        self.full = False
        """Whether an image did not fit any more."""

    def __len__(self) -> int:
        return len(self._images)

    def get(self, number: int) -> NDArray[np.uint8] | None:
        """The image of a record, if it is kept."""
        return self._images.get(number)

    def put(self, number: int, image: NDArray[np.uint8]) -> None:
        """Keep an image if it still fits."""
        with _lock:
            if number in self._images:
                return
            self.full = self.full or image.nbytes > self._left
            if not self.full:
                self._left -= image.nbytes
                self._images[number] = image


def shared_cache(key: Hashable) -> ImageCache:
    """The cache that all layers of this process with the same images share; it takes half of the free memory."""
    with _lock:
        cache = _shared.get(key)
        if cache is None:
            cache = _shared[key] = ImageCache(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2)
        return cache
