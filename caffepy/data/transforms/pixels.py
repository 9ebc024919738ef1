"""Images between OpenCV's layout (H, W, C) and the net's (C, H, W), rounding, canvases, and OpenCV calls that raise
DataError."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, SupportsFloat, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.data.datum import opencv
from caffepy.errors import DataError

_MAX_CHANNELS = 4
"""Most channels that OpenCV has a colour for."""

Image: TypeAlias = "NDArray[Any]"
"""(C, H, W), uint8 or float32, any strides."""
Pixels: TypeAlias = "NDArray[Any]"
"""(H, W, C), uint8 or float32, contiguous: OpenCV's order."""


def rounded(value: SupportsFloat) -> int:
    """Round halves away from 0, as C's round."""
    return int(math.copysign(math.floor(abs(float(value)) + 0.5), float(value)))


def to_pixels(image: Image) -> Pixels:
    """Convert (C, H, W) to contiguous (H, W, C)."""
    return np.ascontiguousarray(image.transpose(1, 2, 0))


def to_image(pixels: Pixels) -> Image:
    """Convert (H, W, C) to a (C, H, W) view."""
    image: Image = pixels.transpose(2, 0, 1)
    return image


class _Ipp(threading.local):
    """Whether this thread is in a `without_ipp` block."""

    is_off = False


_ipp = _Ipp()


@contextmanager
def without_ipp() -> Iterator[None]:
    """Switch off Intel IPP, which rounds differently, for this thread's calls of OpenCV in a block. Blocks may nest.

    Loaders enter it once for each image: the calls that switch give the GIL away, as all of OpenCV's do.
    """
    if _ipp.is_off:
        yield
        return
    cv2 = opencv()
    use_ipp = cv2.ipp.useIPP()
    cv2.ipp.setUseIPP(False)
    _ipp.is_off = True
    try:
        yield
    finally:
        _ipp.is_off = False
        cv2.ipp.setUseIPP(use_ipp)


def call_opencv(function: str, *args: Any, **kwargs: Any) -> Pixels:
    """Call an OpenCV function without Intel IPP; return an array of three axes.

    Raises:
        DataError: OpenCV failed. The message follows a record's name.
    """
    cv2 = opencv()
    try:
        with without_ipp():
            result = np.asarray(getattr(cv2, function)(*args, **kwargs))
    except (cv2.error, MemoryError, OverflowError) as error:
        raise DataError(f"cannot be transformed: OpenCV's {function} says {' '.join(str(error).split())}") from error
    return np.atleast_3d(result)


def resize(pixels: Pixels, height: int, width: int, interpolation: int) -> Pixels:
    """Resize an image with `cv::resize`; `interpolation` is an OpenCV constant.

    Raises:
        DataError: a side would be 0, or OpenCV failed.
    """
    if height <= 0 or width <= 0:
        raise DataError(f"is {pixels.shape[0]} x {pixels.shape[1]} and would be resized to {height} x {width}")
    return call_opencv("resize", pixels, (width, height), interpolation=interpolation)


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


def recompress(image: Image) -> Image:
    """Compress and decompress an image as JPEG at OpenCV's default quality, as Caffe stores a changed record."""
    cv2 = opencv()
    try:
        ok, data = cv2.imencode(".jpg", to_pixels(image))
        pixels = cv2.imdecode(data, cv2.IMREAD_ANYCOLOR) if ok else None
    except (cv2.error, MemoryError) as error:
        raise DataError(f"cannot be written as JPEG ({' '.join(str(error).split())})") from error
    if pixels is None:
        raise DataError("cannot be written as JPEG")
    return to_image(np.atleast_3d(np.asarray(pixels)))


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
