"""Images and OpenCV: reading, decoding, encoding and resizing, and facts of JPEG and PNG files that these need.

No other module decodes. `bulk_copy` runs the check of JPEG headers as machine code. Marker names and offsets follow
ITU-T T.81, annex B, and JFIF's and Adobe's application segments. OpenCV's PNG decoder trusts chunk lengths: damaged
chunks can make it hang or allocate gigabytes, so chunks are validated, and chunks that do not affect pixels are dropped
(W3C's PNG specification, third edition).
"""

from __future__ import annotations

import math
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, SupportsFloat, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.deferred import Bytes, Int, part
from caffepy.errors import DataError
from caffepy.utils.files import read_data
from caffepy.utils.process_fork import free_after_fork

MAX_PIXELS = 1 << 26
"""Pixel limit of encoded images: a PNG of 945 kB can unpack to gigabytes. A square image at the limit has 8192 rows."""
_MAX_BYTES = 1 << 30
"""Limit of an image file."""
NEAREST, LINEAR, CUBIC, AREA = range(4)
"""Interpolations of OpenCV."""

_BASELINE, _TABLES, _EXTENSION, _ARITHMETIC = 0xC0, 0xC4, 0xC8, 0xCC
_FIRST_FRAME, _LAST_FRAME = 0xC0, 0xCF
_SCAN, _APP1, _APP14 = 0xDA, 0xE1, 0xEE
_EXIF, _ADOBE = 0x45786966, 0x41646F62
"""The first four letters of the segments' names."""
_TRANSFORM_AT = 15
"""Offset of the byte in Adobe's segment, from its marker, that is 1 for YCbCr."""


@part
def _number(file: Bytes, at: Int, size: Int) -> Int:
    """Return a big-endian number of `size` bytes."""
    value: Int = 0
    for i in range(size):
        value = value << 8 | np.int64(file[at + i])
    return value


@part
def jpeg_size(file: Bytes, begin: Int, end: Int, ignores_orientation: Int) -> tuple[Int, Int, Int]:
    """Return height and width of a JPEG, and 1 if it is plain; zeros if its header is damaged or of another format.

    A plain JPEG is complete and baseline, with three channels, YCbCr, of 8 bits.

    Args:
        file: contains the JPEG in [begin, end).
        begin: its first byte.
        end: one past its last byte.
        ignores_orientation: whether decoding ignores the orientation that Exif may give; else files with Exif are not
            plain.
    """
    if end - begin < 4 or _number(file, begin, 2) != 0xFFD8:
        return 0, 0, 0
    plain = 1 if _number(file, end - 2, 2) == 0xFFD9 else 0
    at = begin + 2
    while at + 10 <= end and file[at] == 0xFF:
        marker = np.int64(file[at + 1])
        if marker == 0xFF:
            at += 1
            continue
        length = _number(file, at + 2, 2)
        if marker >= _FIRST_FRAME and marker <= _LAST_FRAME and marker not in (_TABLES, _EXTENSION, _ARITHMETIC):
            height, width = _number(file, at + 5, 2), _number(file, at + 7, 2)
            if marker != _BASELINE or file[at + 4] != 8 or file[at + 9] != 3 or height == 0 or width == 0:
                plain = 0
            return height, width, plain
        if marker == _SCAN or length < 2:
            return 0, 0, 0
        if marker == _APP1 and not ignores_orientation and _number(file, at + 4, 4) == _EXIF:
            plain = 0
        adobe = marker == _APP14 and _number(file, at + 4, 4) == _ADOBE
        if adobe and (at + _TRANSFORM_AT >= end or file[at + _TRANSFORM_AT] != 1):
            plain = 0
        at += 2 + length
    return 0, 0, 0


_JPEG = b"\xff\xd8"
_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_PIXEL_CHUNKS = {b"IHDR", b"PLTE", b"tRNS", b"eXIf", b"IDAT", b"IEND"}
"""Chunks that affect pixels (eXIf may rotate the image). Texts, profiles and animations are dropped."""
_DEPTHS = {0: {1, 2, 4, 8, 16}, 2: {8, 16}, 3: {1, 2, 4, 8}, 4: {8, 16}, 6: {8, 16}}
"""Valid bit depths of each colour type."""


def is_png(data: bytes | memoryview) -> bool:
    """Return whether the content begins with the PNG signature."""
    return bytes(data[:8]) == _SIGNATURE


def sanitize_png(data: bytes | memoryview) -> bytes | memoryview:
    """Return a PNG without the chunks that do not affect its pixels.

    Raises:
        DataError: the PNG is damaged. The message follows the image's name.
    """
    chunks, unchanged = [_SIGNATURE], True
    previous, seen = b"", set()
    for name, begin, end in _chunks(data):
        if name == b"IHDR":
            _check_header(data[begin + 8 : end - 4], first=not previous)
        elif not previous:
            raise _damaged("it does not begin with IHDR")
        if name == b"IDAT" and name in seen and previous != name:
            raise _damaged("its IDAT chunks are not consecutive")
        if name == b"IDAT" and name not in seen:
            _check_stream(data[begin + 8 : end - 4])
        if name in _PIXEL_CHUNKS:
            chunks.append(bytes(data[begin:end]))
        else:
            unchanged = False
        previous = name
        seen.add(name)
    if b"IDAT" not in seen:
        raise _damaged("it has no IDAT chunk")
    return data if unchanged else b"".join(chunks)


def _chunks(data: bytes | memoryview) -> Iterator[tuple[bytes, int, int]]:
    """Yield name, begin and end of each chunk up to IEND; check the CRC of chunks that affect pixels."""
    at, name = len(_SIGNATURE), b""
    while name != b"IEND":
        if at + 12 > len(data):
            raise _damaged("it ends before IEND")
        length, name = struct.unpack_from(">I4s", data, at)
        end = at + 12 + length
        if end > len(data):
            raise _damaged(f"a chunk of {length} bytes exceeds the file")
        if name in _PIXEL_CHUNKS and zlib.crc32(data[at + 4 : end - 4]) != struct.unpack_from(">I", data, end - 4)[0]:
            raise _damaged(f"the CRC of {name.decode()} is wrong")
        if name not in _PIXEL_CHUNKS and not name[0] & 0x20:
            raise _damaged("it has an unknown critical chunk")
        yield name, at, end
        at = end


def _check_header(header: bytes | memoryview, first: bool) -> None:
    if len(header) != 13 or not first:
        raise _damaged("IHDR is misplaced or has the wrong length")
    width, height, depth, colour, compression, filtering, interlace = struct.unpack(">2I5B", header)
    valid = depth in _DEPTHS.get(colour, ()) and compression == filtering == 0 and interlace <= 1
    if not (valid and 0 < width < 2**31 and 0 < height < 2**31):
        raise _damaged("IHDR has an invalid size, colour type or method")


def _check_stream(begin: bytes | memoryview) -> None:
    """Check the two header bytes of the zlib stream (RFC 1950), which may be split over two chunks."""
    if len(begin) >= 2 and (
        begin[0] & 15 != 8 or begin[0] >> 4 > 7 or (begin[0] << 8 | begin[1]) % 31 or begin[1] & 32
    ):
        raise _damaged("IDAT is not a zlib stream")


def _damaged(how: str) -> DataError:
    return DataError(f"is a damaged PNG: {how}; replace it")


# -- arrays --------------------------------------------------------------------------------------------

Image: TypeAlias = "NDArray[Any]"
"""(C, H, W), uint8 or float32, any strides."""
Pixels: TypeAlias = "NDArray[Any]"
"""(H, W, C), uint8 or float32, contiguous: OpenCV's order."""


def sides(shape: Sequence[int]) -> str:
    """Return a shape as text for messages: 3 x 20 x 30."""
    return " x ".join(map(str, shape))


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


# -- OpenCV --------------------------------------------------------------------------------------------


@cache
def opencv() -> Any:
    """Import cv2 with its pixel limit set: some decoders allocate before `decode` could check the size."""
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


def call_opencv(function: str, *args: Any, ipp: bool = False, **kwargs: Any) -> Pixels:
    """Call an OpenCV function, without Intel IPP unless `ipp`; return an array of three axes.

    Raises:
        DataError: OpenCV failed. The message follows a record's name.
    """
    cv2 = opencv()
    try:
        with nullcontext() if ipp else without_ipp():
            result = np.asarray(getattr(cv2, function)(*args, **kwargs))
    except (cv2.error, MemoryError, OverflowError) as error:
        raise DataError(f"cannot be transformed: OpenCV's {function} says {' '.join(str(error).split())}") from error
    return np.atleast_3d(result)


def resize(pixels: Pixels, height: int, width: int, interpolation: int = LINEAR, ipp: bool = False) -> Pixels:
    """Resize an image (H, W, C) with `cv::resize`, without Intel IPP unless `ipp`, which rounds differently.

    Raises:
        DataError: a side would be 0, or OpenCV failed.
    """
    if height <= 0 or width <= 0:
        raise DataError(f"is {pixels.shape[0]} x {pixels.shape[1]} and would be resized to {height} x {width}")
    return call_opencv("resize", pixels, (width, height), interpolation=interpolation, ipp=ipp)


def scaled(pixels: Pixels, factor: float, interpolation: int = LINEAR) -> Pixels:
    """Return an image (H, W, C) with both sides multiplied by a factor; `cv::resize` with IPP.

    Raises:
        DataError: OpenCV failed.
    """
    return call_opencv("resize", pixels, None, fx=factor, fy=factor, interpolation=interpolation, ipp=True)


def resize_image(image: Image, height: int, width: int, interpolation: int = LINEAR) -> NDArray[np.uint8]:
    """Resize an image (C, H, W) of bytes as a data layer does when it reads a file: `resize` with IPP."""
    return as_channels_first(resize(image.transpose(1, 2, 0), height, width, interpolation, ipp=True))


def cut(pixels: Pixels, top: int, left: int, size: tuple[int, int], border: int = 0) -> Pixels:
    """Return the part of an image that begins at a row and column, which may lie outside, filled with `border`."""
    result = np.full((*size, *pixels.shape[2:]), border, pixels.dtype)
    begins = max(top, 0), max(left, 0)
    ends = min(top + size[0], pixels.shape[0]), min(left + size[1], pixels.shape[1])
    if begins[0] < ends[0] and begins[1] < ends[1]:
        part = pixels[begins[0] : ends[0], begins[1] : ends[1]]
        result[begins[0] - top : ends[0] - top, begins[1] - left : ends[1] - left] = part
    return result


def copy_planes(image: NDArray[np.uint8], planes: NDArray[np.uint8]) -> None:
    """Copy an image (C, H, W) into contiguous planes of the same shape.

    For three channels in OpenCV's order of memory this is `cv::split`, four times as fast as NumPy.
    """
    channels = image.shape[0]
    if channels == 3 and image.strides[0] == 1 and image.strides[2] == 3:
        opencv().split(image.transpose(1, 2, 0), list(planes))
    else:
        planes[...] = image


# -- decoding ------------------------------------------------------------------------------------------


def read_image(path: Path | str, force_color: bool = False, force_gray: bool = False, nvidia: bool = False) -> Image:
    """Read and decode an image file; arguments and result as in `decode_image`.

    Raises:
        DataError: the file cannot be read or decoded. The message follows the image's name.
    """
    return decode_image(read_file(path), force_color, force_gray, nvidia)


def read_file(path: Path | str, advice: str = "") -> bytes:
    """Return the content of an image file.

    Raises:
        DataError: the file cannot be read. The message follows the image's name and ends with `advice`.
    """
    return read_data(path, _MAX_BYTES, advice=advice)


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
    native = cv2.IMREAD_ANYCOLOR if nvidia else cv2.IMREAD_UNCHANGED
    flag = cv2.IMREAD_COLOR if force_color else cv2.IMREAD_GRAYSCALE if force_gray else native
    if nvidia and bytes(data[:2]) == _JPEG:
        flag |= cv2.IMREAD_IGNORE_ORIENTATION
    return as_channels_first(decode(data, flag))


def decode(data: bytes | memoryview, flag: int = -1) -> NDArray[Any]:
    """Decode an image file to OpenCV's (H, W) or (H, W, C) in BGR order.

    Args:
        data: the file's content.
        flag: of `cv::imdecode`; -1: the file's channels and depth stay.

    Raises:
        DataError: OpenCV fails, a PNG is damaged, or the image has more than 2^26 pixels.
    """
    cv2 = opencv()
    height, width = _encoded_size(data)
    if height * width > MAX_PIXELS:
        raise DataError(f"is an image of {height} x {width} pixels; the limit is {MAX_PIXELS}, shrink it")
    if is_png(data):
        data = sanitize_png(data)
    image, reason = None, ""
    try:
        image = cv2.imdecode(np.frombuffer(data, np.uint8), flag) if data else None
    except (cv2.error, MemoryError) as error:
        reason = f" ({' '.join(str(error).split())})"
    if image is None:
        raise DataError(f"is an image of {len(data)} bytes that OpenCV cannot decode{reason}; is it damaged?")
    return np.asarray(image)


def encode(pixels: Pixels, suffix: str = ".jpg", settings: Sequence[int] = ()) -> bytes:
    """Encode an image (H, W, C) as a file with this suffix; `settings` are those of `cv::imencode`.

    Raises:
        DataError: OpenCV fails, or knows no such format.
    """
    cv2, reason = opencv(), ""
    try:
        done, data = cv2.imencode(suffix, pixels, list(settings))
    except (cv2.error, MemoryError) as error:
        done, data, reason = False, b"", f" ({' '.join(str(error).split())})"
    if not done:
        raise DataError(f"cannot be encoded as '{suffix[1:]}'{reason}")
    return bytes(data)


def recompress(image: Image) -> Image:
    """Compress and decompress an image as JPEG at OpenCV's default quality, as Caffe stores a changed record."""
    return to_image(np.atleast_3d(decode(encode(to_pixels(image)), opencv().IMREAD_ANYCOLOR)))


def decode_plain_jpeg(file: NDArray[np.uint8], height: int, width: int) -> NDArray[np.uint8] | None:
    """Decode a file whose size `jpeg_size` gave to (H, W, 3) in BGR order; None: OpenCV cannot.

    One call that releases the GIL: what else is done for a file in Python, threads wait for.
    """
    cv2 = opencv()
    try:
        image = cv2.imdecode(file, cv2.IMREAD_COLOR | cv2.IMREAD_IGNORE_ORIENTATION)
    except (cv2.error, MemoryError):
        return None
    return None if image is None or image.shape != (height, width, 3) else image


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
