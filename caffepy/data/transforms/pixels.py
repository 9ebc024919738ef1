"""Images between OpenCV's layout (H, W, C) and the net's (C, H, W), rounding, and OpenCV calls that raise DataError."""

from __future__ import annotations

import math
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import opencv
from caffepy.errors import DataError

_MAX_CHANNELS = 4
"""Most channels that OpenCV has a colour for."""

Image: TypeAlias = "NDArray[Any]"
"""(C, H, W), uint8 or float32, any strides."""
Pixels: TypeAlias = "NDArray[Any]"
"""(H, W, C), uint8 or float32, contiguous: OpenCV's order."""


def rounded(value: float) -> int:
    """Round halves away from 0, as C's round."""
    return int(math.copysign(math.floor(abs(float(value)) + 0.5), float(value)))


def to_pixels(image: Image) -> Pixels:
    """Convert (C, H, W) to contiguous (H, W, C)."""
    return np.ascontiguousarray(image.transpose(1, 2, 0))


def to_image(pixels: Pixels) -> Image:
    """Convert (H, W, C) to a (C, H, W) view."""
    image: Image = pixels.transpose(2, 0, 1)
    return image


def call_opencv(function: str, *args: Any, **kwargs: Any) -> Pixels:
    """Call an OpenCV function without Intel IPP, which rounds differently; return an array of three axes.

    Raises:
        DataError: OpenCV failed. The message follows a record's name.
    """
    cv2 = opencv()
    use_ipp = cv2.ipp.useIPP()
    cv2.ipp.setUseIPP(False)  # for this thread
    try:
        result = np.asarray(getattr(cv2, function)(*args, **kwargs))
    except (cv2.error, MemoryError, OverflowError) as error:
        raise DataError(f"cannot be transformed: OpenCV's {function} says {' '.join(str(error).split())}") from error
    finally:
        cv2.ipp.setUseIPP(use_ipp)
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
    if pixels.shape[2] > _MAX_CHANNELS:
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
