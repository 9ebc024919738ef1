"""Images from bytes on the CPU: one kernel subtracts the mean, scales, mirrors and converts to channels last."""

from __future__ import annotations

from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Bytes, Float, Floats, Int, Ints, kernel
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.input_ring import HostRing, ImageSlot, InputRing
from caffepy.backend.interface import InputPrimitives
from caffepy.backend.types import Array, Counter

_COMPILING = 40_000_000
"""Elements that NumPy processes in the kernel's compile time, about 0.5 s."""


@kernel
def image_rows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, pixels: Bytes, crops: Ints, means: Floats, out: Floats, channels: Int, height: Int,
    width: Int, mean_height: Int, mean_width: Int, moves: Int, scale: Float,
) -> None:  # fmt: skip
    """Items are rows (n, h); out[n, h, w, c] = (pixels[n, c, h, w'] - means[c, top + h, left + w']) * scale.

    Without `moves` the means start at the crop's corner. Indices of right-to-left loops are unsigned: signed indices
    may wrap, which prevents vectorisation by LLVM.
    """
    plane = height * width
    mean_plane = mean_height * mean_width
    last = np.uintp(width - 1)
    for row in range(begin, end):
        n = row // height
        h = row - n * height
        mirrored = crops[3 * n] != 0
        v = np.uintp((n * channels * height + h) * width)
        m = np.uintp((moves * crops[3 * n + 1] + h) * mean_width + moves * crops[3 * n + 2])
        o = np.uintp(row * width * channels)
        if channels == 3:
            v1 = v + np.uintp(plane)
            v2 = v1 + np.uintp(plane)
            m1 = m + np.uintp(mean_plane)
            m2 = m1 + np.uintp(mean_plane)
            if mirrored:
                for x in range(np.uintp(width)):
                    s = last - x
                    to = o + np.uintp(3) * x
                    out[to] = (np.float32(pixels[v + s]) - means[m + s]) * scale
                    out[to + np.uintp(1)] = (np.float32(pixels[v1 + s]) - means[m1 + s]) * scale
                    out[to + np.uintp(2)] = (np.float32(pixels[v2 + s]) - means[m2 + s]) * scale
            else:
                for x in range(np.uintp(width)):
                    to = o + np.uintp(3) * x
                    out[to] = (np.float32(pixels[v + x]) - means[m + x]) * scale
                    out[to + np.uintp(1)] = (np.float32(pixels[v1 + x]) - means[m1 + x]) * scale
                    out[to + np.uintp(2)] = (np.float32(pixels[v2 + x]) - means[m2 + x]) * scale
            continue
        step = np.uintp(channels)
        for c in range(channels):
            to = o + np.uintp(c)
            if mirrored:
                for x in range(np.uintp(width)):
                    s = last - x
                    out[to + step * x] = (np.float32(pixels[v + s]) - means[m + s]) * scale
            elif channels == 1:
                for x in range(np.uintp(width)):
                    out[to + x] = (np.float32(pixels[v + x]) - means[m + x]) * scale
            else:
                for x in range(np.uintp(width)):
                    out[to + step * x] = (np.float32(pixels[v + x]) - means[m + x]) * scale
            v += np.uintp(plane)
            m += np.uintp(mean_plane)


class CpuInput(InputPrimitives, CpuMemory):
    """`InputPrimitives` of the CPU."""

    def take_images(
        self, ring: InputRing, counter: Counter, slot: ImageSlot, mean: Array, scale: float, images: Array,
        labels: Array | None,
    ) -> None:  # fmt: skip
        if not image_rows.should_compile(images.size, _COMPILING):
            super().take_images(ring, counter, slot, mean, scale, images, labels)
            return
        assert isinstance(ring, HostRing)
        label_values, crops, pixels = slot.parts(ring.bytes_of(counter[0], 0, slot.size))
        height, width = slot.height, slot.width
        moves = mean.shape[1:] != (1, 1)
        means: Any = mean if moves else np.ascontiguousarray(np.broadcast_to(mean, (slot.channels, height, width)))
        if not moves and not crops[:, 0].any():
            height, width = 1, height * width  # whole images: one long row each
            means = means.reshape(slot.channels, 1, width)
        image_rows.run(
            self.threads, slot.count * height, max(1, 65536 // (slot.channels * width)), pixels, crops, means, images,
            slot.channels, height, width, means.shape[1], means.shape[2], int(moves), float(np.float32(scale)),
        )  # fmt: skip
        if labels is not None:
            labels[...] = label_values
