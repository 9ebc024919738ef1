"""Images on larger canvases of one colour, and their compression to JPEG (SSD's ExpandImage)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import Image, call_opencv, opencv, recompress, to_image, to_pixels

_MAX_CHANNELS = 4
"""Most channels that OpenCV has a colour for."""
_UNIT = 16
"""Side of the largest unit that a JPEG codes by itself: two blocks, where colours are subsampled."""


@dataclass(frozen=True)
class Canvas:
    """Where an image lies on a larger canvas: its size, and the row and column of the image's corner."""

    rows: int
    columns: int
    top: int
    left: int


def canvas_part(
    image: Image, canvas: Canvas, color: NDArray[np.generic], part: tuple[int, int, int, int], recompresses: bool
) -> Image:
    """Return a part of an image on a canvas of one colour, the same pixels as of the whole canvas.

    A JPEG codes each unit of 16 x 16 pixels by itself, and decoding a pixel reads only the units beside its own.
    Therefore a part that ends between units, with one more unit on each side, compresses as in the whole.

    Args:
        image: (C, H, W).
        canvas: the canvas.
        color: (C,), of the canvas.
        part: row and column of the part's corner, its height and width.
        recompresses: whether the canvas is compressed and decompressed (`recompress`).
    """
    top, left, rows, columns = part
    if not recompresses:
        return _drawn(image, canvas, color, (top, top + rows, left, left + columns))
    y0, y1 = _with_image(top, top + rows, canvas.top, image.shape[1], canvas.rows)
    x0, x1 = _with_image(left, left + columns, canvas.left, image.shape[2], canvas.columns)
    if y0 < y1 and x0 < x1:
        (v0, v1), (u0, u1) = _in_units(y0, y1, canvas.rows), _in_units(x0, x1, canvas.columns)
        inner = recompress(_drawn(image, canvas, color, (v0, v1, u0, u1)))[:, y0 - v0 : y1 - v0, x0 - u0 : x1 - u0]
        if inner.shape[1:] == (rows, columns):
            return inner
    else:
        y0 = y1 = top
        x0 = x1 = left
        inner = image[:, :0, :0]
    flat = recompress(_drawn(image[:, :0, :0], Canvas(_UNIT, _UNIT, 0, 0), color, (0, _UNIT, 0, _UNIT)))[:, 0, 0]
    borders = (y0 - top, top + rows - y1, x0 - left, left + columns - x1)
    return surround(inner, borders, flat)


def _with_image(begin: int, end: int, corner: int, length: int, canvas: int) -> tuple[int, int]:
    """Return the part of [begin, end) that compression may give another colour than the canvas's."""
    first, last = _in_units(corner, corner + length, canvas)
    return max(begin, first), min(end, last)


def _in_units(begin: int, end: int, length: int) -> tuple[int, int]:
    """Enlarge a range to whole units of a JPEG and by one more on each side, within [0, length)."""
    return max(begin // _UNIT * _UNIT - _UNIT, 0), min(-(-end // _UNIT) * _UNIT + _UNIT, length)


def _drawn(image: Image, canvas: Canvas, color: NDArray[np.generic], part: tuple[int, int, int, int]) -> Image:
    """Return the rows and columns [part[0], part[1]) x [part[2], part[3]) of an image on a canvas."""
    v0, v1, u0, u1 = part
    y0, y1 = (min(max(edge, v0), v1) for edge in (canvas.top, canvas.top + image.shape[1]))
    x0, x1 = (min(max(edge, u0), u1) for edge in (canvas.left, canvas.left + image.shape[2]))
    visible = image[:, y0 - canvas.top : y1 - canvas.top, x0 - canvas.left : x1 - canvas.left]
    return surround(visible, (y0 - v0, v1 - y1, x0 - u0, u1 - x1), color)


def surround(image: Image, borders: tuple[int, int, int, int], color: NDArray[np.generic]) -> Image:
    """Return an image with borders (top, bottom, left, right) of one colour around it; `color`: (C,)."""
    pixels = to_pixels(image)
    if pixels.shape[2] > _MAX_CHANNELS or not pixels.size:
        top, bottom, left, right = borders
        shape = (pixels.shape[0] + top + bottom, pixels.shape[1] + left + right, pixels.shape[2])
        canvas = np.broadcast_to(color.astype(pixels.dtype), shape).copy()
        canvas[top : shape[0] - bottom, left : shape[1] - right] = pixels
        return to_image(canvas)
    border: int = opencv().BORDER_CONSTANT
    return to_image(call_opencv("copyMakeBorder", pixels, *borders, border, value=color.astype(np.float64).tolist()))
