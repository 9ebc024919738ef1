"""Datum: Caffe's record of one image and its label, parsed and checked (Caffe's `io.cpp`)."""

from __future__ import annotations

import math
import os
import struct
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.data.images.png import is_png, whole_png
from caffepy.errors import DataError
from caffepy.proto import caffe_pb2

LARGE = 1 << 14
"""Records of more bytes than this are parsed without copying their data."""
_DATA_TAG = 0x22
MAX_PIXELS = 1 << 26
"""Of an encoded image: 945 kB of PNG can unpack to gigabytes. A square one of this size has 8192 rows."""
_JPEG = b"\xff\xd8"
_JPEG_SIZES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
"""Markers of the segments that hold a JPEG's height and width."""


def parse_datum(record: bytes | memoryview) -> tuple[caffe_pb2.Datum, bytes | memoryview]:
    """Parse a record: the Datum and its `data`, which are left out of the Datum of a large record.

    There they are a view of the record, because copying megabytes would dominate the time of parsing.

    Raises:
        DataError: the record is no Datum. The message continues a sentence that begins with the record's name.
    """
    try:
        if len(record) > LARGE and (span := _find_data(record)) is not None:
            start, stop, following = span
            datum = caffe_pb2.Datum.FromString(bytes(record[:start]) + bytes(record[following:]))
            if not datum.data:
                return datum, memoryview(record)[stop:following]
        datum = caffe_pb2.Datum.FromString(record)  # type: ignore[arg-type]
    except (DecodeError, ValueError) as error:
        raise DataError(f"is not a Datum ({error}); build the set again with `caffepy convert_imageset`") from error
    return datum, datum.data


def _find_data(record: bytes | memoryview) -> tuple[int, int, int] | None:
    """Offsets of the field `data`, of its bytes and of their end; None if another field than a number precedes it."""
    at = 0
    while at < len(record):
        tag = record[at]
        if tag == _DATA_TAG:
            length, start = _varint(record, at + 1)
            return (at, start, start + length) if start + length <= len(record) else None
        if tag & 7 or tag & 0x80:
            return None
        _, at = _varint(record, at + 1)
    return None


def _varint(record: bytes | memoryview, at: int) -> tuple[int, int]:
    """A varint, and the offset behind it."""
    value = 0
    for shift, byte in enumerate(record[at : at + 10]):
        value |= (byte & 127) << (7 * shift)
        if byte < 128:
            return value, at + shift + 1
    raise ValueError("a number does not end")


def datum_shape(datum: caffe_pb2.Datum, values: int, kind: str) -> tuple[int, int, int]:
    """(C, H, W) of a Datum that is not encoded.

    Args:
        datum: the record.
        values: how many values it holds.
        kind: what they are: bytes or floats.

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
    """A JPEG, PNG or other image file as (C, H, W), channels blue, green, red; a view of (H, W, C) memory.

    Args:
        data: the file's bytes.
        force_color: make it 3 channels.
        force_gray: make it 1 channel. With neither it keeps the channels that it has.
        nvidia: as NVIDIA Caffe: no transparency, 16 bits become 8, and JPEGs are not turned as their EXIF says.

    Raises:
        DataError: OpenCV cannot decode it, it is a damaged PNG, or it has more than 8 bits a channel or 2^26 pixels.
    """
    cv2 = opencv()
    height, width = _encoded_size(data)
    if height * width > MAX_PIXELS:
        raise DataError(f"is an image of {height} x {width} pixels; more than {MAX_PIXELS} are refused, shrink it")
    native = cv2.IMREAD_ANYCOLOR if nvidia else cv2.IMREAD_UNCHANGED
    flag = cv2.IMREAD_COLOR if force_color else cv2.IMREAD_GRAYSCALE if force_gray else native
    if nvidia and bytes(data[:2]) == _JPEG:
        flag |= cv2.IMREAD_IGNORE_ORIENTATION
    if is_png(data):
        data = whole_png(data)
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flag) if data else None
    except (cv2.error, MemoryError) as error:
        raise DataError(f"is an image that OpenCV cannot decode ({' '.join(str(error).split())})") from error
    if image is None:
        raise DataError(f"is an image of {len(data)} bytes that OpenCV cannot decode; is it damaged?")
    return as_channels_first(image)


def resize_image(image: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8]:
    """An image (C, H, W) in another size, bilinear as `cv::resize` does it by default."""
    cv2 = opencv()
    try:
        resized = cv2.resize(image.transpose(1, 2, 0), (width, height))
    except (cv2.error, MemoryError) as error:
        raise DataError(f"cannot be resized to {height} x {width} ({' '.join(str(error).split())})") from error
    return as_channels_first(np.asarray(resized))


def opencv() -> Any:
    """cv2, told when it is loaded to refuse large images of every format; some decoders allocate before we could."""
    os.environ.setdefault("OPENCV_IO_MAX_IMAGE_PIXELS", str(MAX_PIXELS))
    import cv2

    return cv2


def _encoded_size(data: bytes | memoryview) -> tuple[int, int]:
    """Height and width that a PNG or JPEG declares; (0, 0) of other formats and of damaged headers."""
    if is_png(data) and len(data) >= 24:
        width, height = struct.unpack_from(">2I", data, 16)
        return height, width
    at = 2 if bytes(data[:2]) == _JPEG else len(data)
    while at + 9 <= len(data) and data[at] == 0xFF:
        marker, length = data[at + 1], data[at + 2] << 8 | data[at + 3]
        if marker in _JPEG_SIZES:
            return data[at + 5] << 8 | data[at + 6], data[at + 7] << 8 | data[at + 8]
        at += 1 if marker == 0xFF else 2 + length
    return 0, 0


def as_channels_first(image: NDArray[np.generic]) -> NDArray[np.uint8]:
    """OpenCV's (H, W) or (H, W, C) as a (C, H, W) view.

    Raises:
        DataError: it has more than 8 bits a channel.
    """
    if image.dtype != np.uint8:
        raise DataError(f"is an image of {image.dtype} values; Caffe takes 8 bits a channel")
    image8 = image.view(np.uint8)
    return image8[None] if image8.ndim == 2 else image8.transpose(2, 0, 1)
