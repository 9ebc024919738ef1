"""The one loop of the data pipeline that NumPy is too slow for: bytes in planes to float32 in pixels. Imports numba.

A 227 x 227 colour crop takes 60 to 70 µs, most of it the writing; NumPy needs 200 to 500 for strides like these.
"""

from __future__ import annotations

import numba
import numpy as np


@numba.njit(nogil=True, cache=True)
def _row(values, mean, scale, step, start, out):  # type: ignore[no-untyped-def]
    """out[start + step * x] = (values[x] - mean[x]) * scale."""
    for x in range(values.size):
        out[step * x + start] = (np.float32(values[x]) - mean[x]) * scale


@numba.njit(nogil=True, cache=True)
def _row_mirrored(values, mean, scale, step, start, out):  # type: ignore[no-untyped-def]
    """As `_row`, values and mean from right to left. Signed places may wrap, so LLVM would not vectorise them."""
    last = np.uintp(values.size - 1)
    for x in range(np.uintp(values.size)):
        out[np.uintp(step) * x + np.uintp(start)] = (np.float32(values[last - x]) - mean[last - x]) * scale


@numba.njit(nogil=True, cache=True)
def _row3(v0, v1, v2, m0, m1, m2, scale, out):  # type: ignore[no-untyped-def]
    """`_row` of three channels at once: whole pixels are written."""
    for x in range(v0.size):
        out[3 * x] = (np.float32(v0[x]) - m0[x]) * scale
        out[3 * x + 1] = (np.float32(v1[x]) - m1[x]) * scale
        out[3 * x + 2] = (np.float32(v2[x]) - m2[x]) * scale


@numba.njit(nogil=True, cache=True)
def _row3_mirrored(v0, v1, v2, m0, m1, m2, scale, out):  # type: ignore[no-untyped-def]
    """`_row_mirrored` of three channels at once."""
    last, three = np.uintp(v0.size - 1), np.uintp(3)
    for x in range(np.uintp(v0.size)):
        s = last - x
        out[three * x] = (np.float32(v0[s]) - m0[s]) * scale
        out[three * x + np.uintp(1)] = (np.float32(v1[s]) - m1[s]) * scale
        out[three * x + np.uintp(2)] = (np.float32(v2[s]) - m2[s]) * scale


@numba.njit(nogil=True, cache=True)
def transform_planes(images, tops, lefts, mirrors, mean, scale, out):  # type: ignore[no-untyped-def]
    """out = (crop of images - mean at the same place) * scale, mirrored where asked.

    Args:
        images: uint8 (N, C, H, W), C-contiguous.
        tops: first row of each crop, int64 (N,).
        lefts: first column of each crop, int64 (N,).
        mirrors: bool (N,).
        mean: float32 (C, H, W).
        scale: float32.
        out: float32 (N, h, w, C), C-contiguous.
    """
    number, channels = images.shape[:2]
    height, width = out.shape[1:3]
    for n in range(number):
        left, right = lefts[n], lefts[n] + width
        for h in range(height):
            y = tops[n] + h
            pixels = out[n, h].reshape(width * channels)
            if channels == 3:
                v0, v1, v2 = images[n, 0, y, left:right], images[n, 1, y, left:right], images[n, 2, y, left:right]
                m0, m1, m2 = mean[0, y, left:right], mean[1, y, left:right], mean[2, y, left:right]
                if mirrors[n]:
                    _row3_mirrored(v0, v1, v2, m0, m1, m2, scale, pixels)
                else:
                    _row3(v0, v1, v2, m0, m1, m2, scale, pixels)
                continue
            for c in range(channels):
                if mirrors[n]:
                    _row_mirrored(images[n, c, y, left:right], mean[c, y, left:right], scale, channels, c, pixels)
                else:
                    _row(images[n, c, y, left:right], mean[c, y, left:right], scale, channels, c, pixels)
