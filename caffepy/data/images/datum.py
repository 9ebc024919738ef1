"""Datum parsing, checks and image decoding (Caffe's `io.cpp`)."""

from __future__ import annotations

import math
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.data.images.jpeg import jpeg_size
from caffepy.data.images.png import is_png, sanitize_png
from caffepy.errors import DataError
from caffepy.forks import free_after_fork
from caffepy.proto import caffe_pb2

VIEW_MIN_BYTES = 1 << 14
"""Records above this size are parsed without copying their `data`."""
_DATA_TAG = 0x22
MAX_PIXELS = 1 << 26
"""Pixel limit of encoded images: a PNG of 945 kB can unpack to gigabytes. A square image at the limit has 8192 rows."""
_JPEG = b"\xff\xd8"


def parse_datum(record: bytes | memoryview) -> tuple[caffe_pb2.Datum, bytes | memoryview]:
    """Parse a record; return the Datum and its `data`.

    For large records `data` is a view of the record and is not in the Datum: copying would dominate parsing.

    Raises:
        DataError: the record is not a Datum. The message follows a record's name.
    """
    try:
        if len(record) > VIEW_MIN_BYTES and (span := _find_data(record)) is not None:
            start, stop, following = span
            datum = caffe_pb2.Datum.FromString(bytes(record[:start]) + bytes(record[following:]))
            if not datum.data:
                return datum, memoryview(record)[stop:following]
        datum = caffe_pb2.Datum.FromString(record)  # type: ignore[arg-type]
    except (DecodeError, ValueError) as error:
        raise DataError(f"is not a Datum ({error}); rebuild the database with `caffepy convert_imageset`") from error
    return datum, datum.data


def _find_data(record: bytes | memoryview) -> tuple[int, int, int] | None:
    """Return the offsets of the field `data`, its first byte and its end; None if a non-varint field precedes it."""
    offset = 0
    while offset < len(record):
        tag = record[offset]
        if tag == _DATA_TAG:
            length, start = _varint(record, offset + 1)
            return (offset, start, start + length) if start + length <= len(record) else None
        if tag & 7 or tag & 0x80:
            return None
        _, offset = _varint(record, offset + 1)
    return None


def _varint(record: bytes | memoryview, offset: int) -> tuple[int, int]:
    """Return a varint and the offset after it."""
    value = 0
    for shift, byte in enumerate(record[offset : offset + 10]):
        value |= (byte & 127) << (7 * shift)
        if byte < 128:
            return value, offset + shift + 1
    raise ValueError("unterminated varint")


def datum_shape(datum: caffe_pb2.Datum, values: int, kind: str) -> tuple[int, int, int]:
    """Return the shape (C, H, W) of a Datum that is not encoded.

    Args:
        datum: the record.
        values: number of stored values.
        kind: "bytes" or "floats", for messages.

    Raises:
        DataError: the dimensions are not positive or do not fit the number of values.
    """
    shape = (datum.channels, datum.height, datum.width)
    if min(shape) <= 0 or math.prod(shape) != values:
        raise DataError(
            f"is a Datum of {values} {kind}, but its channels x height x width is "
            f"{shape[0]} x {shape[1]} x {shape[2]} = {math.prod(shape)}"
        )
    return shape


def decode_image(
    data: bytes | memoryview, force_color: bool = False, force_gray: bool = False, nvidia: bool = False
) -> NDArray[np.uint8]:
    """Decode an image file to (C, H, W) in BGR order; a view of (H, W, C) memory.

    Args:
        data: the file's content.
        force_color: convert to 3 channels.
        force_gray: convert to 1 channel. With neither, the file's channels stay.
        nvidia: decode as NVIDIA Caffe: drop alpha, reduce 16 bits to 8, ignore the EXIF orientation of JPEGs.

    Raises:
        DataError: OpenCV fails, a PNG is damaged, or the image has more than 8 bits per channel or 2^26 pixels.
    """
    cv2 = opencv()
    height, width = _encoded_size(data)
    if height * width > MAX_PIXELS:
        raise DataError(f"is an image of {height} x {width} pixels; the limit is {MAX_PIXELS}, shrink it")
    native = cv2.IMREAD_ANYCOLOR if nvidia else cv2.IMREAD_UNCHANGED
    flag = cv2.IMREAD_COLOR if force_color else cv2.IMREAD_GRAYSCALE if force_gray else native
    if nvidia and bytes(data[:2]) == _JPEG:
        flag |= cv2.IMREAD_IGNORE_ORIENTATION
    if is_png(data):
        data = sanitize_png(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flag) if data else None
    except (cv2.error, MemoryError) as error:
        raise DataError(f"is an image that OpenCV cannot decode ({' '.join(str(error).split())})") from error
    if image is None:
        raise DataError(f"is an image of {len(data)} bytes that OpenCV cannot decode; is it damaged?")
    return as_channels_first(image)


def decode_plain_jpeg(file: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8] | None:
    """Decode a file whose size `jpeg.jpeg_size` gave to (H, W, 3) in BGR order; None: OpenCV cannot.

    One call that releases the GIL: what else is done for a file in Python, threads wait for.
    """
    cv2 = opencv()
    try:
        image = cv2.imdecode(file, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except (cv2.error, MemoryError):
        return None
    return None if image is None or image.shape != (height, width, 3) else image


def copy_planes(image: NDArray[np.uint8], planes: NDArray[np.uint8]) -> None:
    """Copy an image (C, H, W) into contiguous planes of the same shape.

    For three channels in OpenCV's order of memory this is `cv::split`, four times as fast as NumPy.
    """
    channels = image.shape[0]
    if channels == 3 and image.strides[0] == 1 and image.strides[2] == 3:
        opencv().split(image.transpose(1, 2, 0), list(planes))
    else:
        planes[...] = image


def resize_image(image: NDArray[np.uint8], height: int, width: int, bicubic: bool = False) -> NDArray[np.uint8]:
    """Resize an image (C, H, W) bilinearly (the default of `cv::resize`), or by bicubic interpolation."""
    cv2 = opencv()
    interpolation = cv2.INTER_CUBIC if bicubic else cv2.INTER_LINEAR
    try:
        resized = cv2.resize(image.transpose(1, 2, 0), (width, height), interpolation=interpolation)
    except (cv2.error, MemoryError) as error:
        raise DataError(f"cannot be resized to {height} x {width} ({' '.join(str(error).split())})") from error
    return as_channels_first(np.asarray(resized))


@cache
def opencv() -> Any:
    """Import cv2 with its pixel limit set: some decoders allocate before `decode_image` could check the size."""
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))
    import cv2

    return cv2


class _SingleThreaded:
    """How many blocks of `single_threaded_opencv` there are, and OpenCV's number of threads before the first."""

    def __init__(self) -> None:
        self.lock = free_after_fork(threading.Lock())
        self.blocks = self.before = 0


_single_threaded = _SingleThreaded()


@contextmanager
def single_threaded_opencv() -> Iterator[None]:
    """Let OpenCV use no threads of its own in the process, while any such block lasts.

    For callers with threads of their own, for which those of OpenCV's one pool would get in the way.
    """
    cv2, state = opencv(), _single_threaded
    with state.lock:
        if state.blocks == 0:
            state.before = cv2.getNumThreads()
            cv2.setNumThreads(1)
        state.blocks += 1
    try:
        yield
    finally:
        with state.lock:
            state.blocks -= 1
            if state.blocks == 0:
                cv2.setNumThreads(state.before)


def _encoded_size(data: bytes | memoryview) -> tuple[int, int]:
    """Return height and width from a PNG or JPEG header; (0, 0) for other formats and damaged headers."""
    if is_png(data) and len(data) >= 24:
        width, height = struct.unpack_from(">2I", data, 16)
        return height, width
    height, width, _ = jpeg_size(data, 0, len(data), True)
    return int(height), int(width)


def as_channels_first(image: NDArray[np.generic]) -> NDArray[np.uint8]:
    """Return a (C, H, W) view of OpenCV's (H, W) or (H, W, C).

    Raises:
        DataError: the image has more than 8 bits per channel.
    """
    if image.dtype != np.uint8:
        raise DataError(f"is an image of {image.dtype} values; Caffe reads 8 bits per channel")
    image8 = image.view(np.uint8)
    return image8[None] if image8.ndim == 2 else image8.transpose(2, 0, 1)
