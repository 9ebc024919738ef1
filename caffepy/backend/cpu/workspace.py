"""Scratch memory that the layers of one backend share."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

ALIGNMENT = 64
"""Bytes in a cache line."""


def aligned(size: int) -> Any:
    """An uninitialised float32 array that begins at a cache line."""
    raw = np.empty(4 * size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + 4 * size].view(np.float32)


def aligned_zeros(shape: tuple[int, ...], dtype: str) -> Any:
    """A zeroed C-contiguous array that begins at a cache line: loads of whole vectors do not straddle two."""
    size = math.prod(shape) * np.dtype(dtype).itemsize
    raw = np.zeros(size + ALIGNMENT, np.uint8)
    start = -raw.__array_interface__["data"][0] % ALIGNMENT
    return raw[start : start + size].view(dtype).reshape(shape)


class Workspace:
    """One growing buffer for each purpose; what is in it lasts until the next `take` for that purpose."""

    def __init__(self) -> None:
        self._buffers: dict[str, Any] = {}

    def take(self, purpose: str, size: int) -> Any:
        """At least `size` float32, contents undefined."""
        buffer = self._buffers.get(purpose)
        if buffer is None or buffer.size < size:
            self._buffers.pop(purpose, None)
            buffer = self._buffers[purpose] = aligned(size)
        return buffer

    def clear(self) -> None:
        """Give the memory back."""
        self._buffers.clear()
