"""Copies between images that lie in memory in different orders, or are parts of others."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel

GRAIN = 16384
"""Elements below which a second thread costs more than it saves."""


@kernel
def copy_rows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, source_n: Int, source_c: Int, source_h: Int, source_w: Int, target: Floats,
    target_n: Int, target_c: Int, target_h: Int, target_w: Int, channels: Int, height: Int, width: Int,
) -> None:  # fmt: skip
    """Items are rows (n, h); steps along the axes count elements."""
    for item in range(begin, end):
        n, h = item // height, item % height
        at, to = n * source_n + h * source_h, n * target_n + h * target_h
        if source_c == 1 and target_c == 1:
            for w in range(width):
                first, start = at + w * source_w, to + w * target_w
                for c in range(channels):
                    target[start + c] = source[first + c]
        else:
            for c in range(channels):
                first, start = at + c * source_c, to + c * target_c
                for w in range(width):
                    target[start + w * target_w] = source[first + w * source_w]


def is_images(source: Any, target: Any) -> bool:
    """Whether `copy_images` can copy them: float32 (N, C, H, W) or (N, C, D, H, W) of one shape, apart in memory."""
    return (
        type(source) is np.ndarray
        and source.shape == target.shape
        and source.ndim in (4, 5)
        and source.dtype == target.dtype == np.float32
        and target.flags.writeable
        and source.flags.aligned
        and not np.may_share_memory(source, target)
    )


def copy_images(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, for what `is_images` allows; volumes one after the other, each as D images."""
    if source.ndim == 5:
        for volume, copied in zip(source, target, strict=True):
            copy_images(threads, volume.swapaxes(0, 1), copied.swapaxes(0, 1))
        return
    n, channels, height, width = source.shape
    steps, others = _steps(source), _steps(target)
    grain = max(1, GRAIN // max(1, channels * width))
    if steps[1] == others[1] == 1 and steps[3] == others[3] == channels:  # whole rows
        channels, width = channels * width, 1
    copy_rows.run(threads, n * height, grain, source, *steps, target, *others, channels, height, width)


def _steps(images: Any) -> tuple[int, ...]:
    """Strides in elements; channels and columns that are the only ones count as next to each other."""
    n, c, h, w = (stride // images.itemsize for stride in images.strides)
    _, channels, _, width = images.shape
    return n, 1 if channels == 1 else c, h, channels if width == 1 else w
