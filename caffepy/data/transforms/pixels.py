"""Images as OpenCV takes them, (H, W, C), and as a net takes them, (C, H, W)."""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import opencv
from caffepy.errors import DataError

Image: TypeAlias = "NDArray[Any]"
"""(C, H, W), uint8 or float32, any strides."""
Pixels: TypeAlias = "NDArray[Any]"
"""(H, W, C), uint8 or float32, contiguous: OpenCV's order."""


def to_pixels(image: Image) -> Pixels:
    """(C, H, W) to (H, W, C)."""
    return np.ascontiguousarray(image.transpose(1, 2, 0))


def to_image(pixels: Pixels) -> Image:
    """(H, W, C) to (C, H, W), a view."""
    image: Image = pixels.transpose(2, 0, 1)
    return image


def call(function: str, *arguments: Any, **named: Any) -> Pixels:
    """A function of OpenCV, its result with three axes; without Intel's IPP, which rounds otherwise.

    Raises:
        DataError: OpenCV cannot do it. The message continues a sentence that begins with the record's name.
    """
    cv2 = opencv()
    before = cv2.ipp.useIPP()
    cv2.ipp.setUseIPP(False)  # of this thread
    try:
        result = np.asarray(getattr(cv2, function)(*arguments, **named))
    except (cv2.error, MemoryError, OverflowError) as error:
        raise DataError(f"cannot be transformed: OpenCV's {function} says {' '.join(str(error).split())}") from error
    finally:
        cv2.ipp.setUseIPP(before)
    return np.atleast_3d(result)


def resize(pixels: Pixels, height: int, width: int, interpolation: int) -> Pixels:
    """`cv::resize`, with OpenCV's number of the interpolation.

    Raises:
        DataError: one of the sides would be 0, or OpenCV cannot do it.
    """
    if height <= 0 or width <= 0:
        raise DataError(f"is {pixels.shape[0]} x {pixels.shape[1]} and would be resized to {height} x {width}")
    return call("resize", pixels, (width, height), interpolation=interpolation)


def recompress(image: Image) -> Image:
    """What JPEG makes of an image at OpenCV's default quality: Caffe keeps what it changed in a record as such."""
    cv2 = opencv()
    try:
        done, data = cv2.imencode(".jpg", to_pixels(image))
        pixels = cv2.imdecode(data, cv2.IMREAD_ANYCOLOR) if done else None
    except (cv2.error, MemoryError) as error:
        raise DataError(f"cannot be written as JPEG ({' '.join(str(error).split())})") from error
    if pixels is None:
        raise DataError("cannot be written as JPEG")
    return to_image(np.atleast_3d(np.asarray(pixels)))
