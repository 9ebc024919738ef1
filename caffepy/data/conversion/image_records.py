"""An image file as the Datum that Caffe's tools make of it (`ReadImageToDatum` in `io.cpp`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import PurePath

import numpy as np
from numpy.typing import NDArray

from caffepy.config.messages import field_head
from caffepy.data.conversion.progress import all_cores
from caffepy.data.images.datum import MAX_PIXELS, decode_image, opencv
from caffepy.data.sources.image_list import MAX_IMAGE_BYTES
from caffepy.errors import ConfigError, DataError
from caffepy.files import read_regular
from caffepy.proto import caffe_pb2


class UnreadableImageError(DataError):
    """An image that a conversion leaves out; the message continues a sentence that begins with the file's name."""


Pixels = NDArray[np.uint8]
"""(H, W, 3) in the order blue, green, red, or (H, W)."""

_DATA_TAG = b"\x22"


@dataclass(frozen=True)
class ImageOptions:
    """What Caffe's flags of the same names say.

    Args:
        gray: one channel instead of three.
        resize_height: of every image; 0: as it is.
        resize_width: of every image; 0: as it is.
        min_dim: a smaller side is scaled up to this, the other with it; 0: as it is.
        max_dim: a larger side is scaled down to this, the other with it; 0: as it is.
        encoded: store files instead of pixels.
        encode_type: in this format, e.g. ``jpg``, which implies `encoded`; empty: in that of each file's name.
        check_size: all images must be of one size.
        threads: that decode.

    Raises:
        ConfigError: one of the two sizes alone, a size too large, or a format that OpenCV cannot write.
    """

    gray: bool = False
    resize_height: int = 0
    resize_width: int = 0
    min_dim: int = 0
    max_dim: int = 0
    encoded: bool = False
    encode_type: str = ""
    check_size: bool = False
    threads: int = field(default_factory=all_cores)

    def __post_init__(self) -> None:
        if bool(self.resize_height) != bool(self.resize_width):
            raise ConfigError("resize_height and resize_width work together only, as in Caffe; give both")
        if self.resize_height * self.resize_width > MAX_PIXELS:
            raise ConfigError(
                f"images of {self.resize_height} x {self.resize_width} pixels are more than the {MAX_PIXELS} that are "
                "read again; give a smaller size"
            )
        if self.encode_type and not _can_write(self.encode_type):
            raise ConfigError(f"encode_type '{self.encode_type}' is no format that OpenCV writes; jpg and png are")

    @property
    def resizes(self) -> bool:
        """Whether an image may change its size."""
        return any((self.resize_height, self.resize_width, self.min_dim, self.max_dim))


@dataclass(frozen=True)
class ImageRecord:
    """An image on its way into a database.

    Args:
        datum: the bytes of the Datum.
        shape: (C, H, W) of the image that the Datum holds.
        original: height and width of the file's image.
    """

    datum: bytes | memoryview
    shape: tuple[int, int, int]
    original: tuple[int, int]


def read_image_record(path: str, label: int, options: ImageOptions, with_shape: bool = False) -> ImageRecord:
    """Read, decode, resize and, if so wished, encode an image file.

    A file that is to be stored in its own format at its own size is stored byte for byte; it is decoded nevertheless,
    so that no damaged file comes into a database.

    Args:
        path: the file.
        label: of the image.
        options: what to do to it.
        with_shape: an encoded Datum has channels, height and width too, as convert_annoset's do.

    Raises:
        UnreadableImageError: it cannot be read, decoded, resized or encoded.
    """
    content, original = _read_pixels(path, options.gray)
    try:
        pixels = _resized(original, options)
        shape = (1 if pixels.ndim == 2 else pixels.shape[2], *pixels.shape[:2])
        encoding = _encoding(path, options)
        if not encoding:
            return ImageRecord(_plain_datum(pixels, shape, label), shape, original.shape[:2])
        same = not options.resizes and _extension(path) in (encoding, {"jpg": "jpeg"}.get(encoding))
        datum = caffe_pb2.Datum(data=content if same else _encode(pixels, encoding), label=label, encoded=True)
    except DataError as error:
        raise UnreadableImageError(str(error)) from error
    if with_shape:
        datum.channels, datum.height, datum.width = shape
    return ImageRecord(datum.SerializeToString(), shape, original.shape[:2])


def image_size(path: str) -> tuple[int, int]:
    """Height and width of an image file, turned as its EXIF says.

    Raises:
        UnreadableImageError: it cannot be read or decoded.
    """
    height, width = _read_pixels(path, False)[1].shape[:2]
    return height, width


@contextmanager
def one_thread_an_image() -> Iterator[None]:
    """OpenCV's own threads wait within the block: there is one image for each core already."""
    cv2 = opencv()
    before = cv2.getNumThreads()
    cv2.setNumThreads(1)
    try:
        yield
    finally:
        cv2.setNumThreads(before)


def _read_pixels(path: str, gray: bool) -> tuple[bytes, Pixels]:
    """A file's bytes and its image."""
    try:
        content = read_regular(path, MAX_IMAGE_BYTES)
        image = decode_image(content, force_color=not gray, force_gray=gray)
    except OSError as error:
        raise UnreadableImageError(f"cannot be read: {error.strerror}") from error
    except DataError as error:
        raise UnreadableImageError(str(error)) from error
    return content, image[0] if gray else image.transpose(1, 2, 0)


def _resized(image: Pixels, options: ImageOptions) -> Pixels:
    """As SSD's `ReadImageToCVMat`: min_dim and max_dim come before the fixed size."""
    if not options.resizes:
        return image
    if options.min_dim or options.max_dim:
        scale = _scale(min(image.shape[:2]), max(image.shape[:2]), options)
        if scale == 1:
            return image
        if image.shape[0] * image.shape[1] * scale * scale > MAX_PIXELS:
            raise DataError(f"would have more than {MAX_PIXELS} pixels with min_dim {options.min_dim}; give max_dim")
        return _opencv_resize(image, None, scale)
    return _opencv_resize(image, (options.resize_width, options.resize_height), 0)


def _scale(smaller: int, larger: int, options: ImageOptions) -> float:
    """In float32, as Caffe computes it: the result's size is rounded from it."""
    scale = np.float32(1)
    if options.min_dim > 0 and smaller < options.min_dim:
        scale = np.float32(options.min_dim) / np.float32(smaller)
    if 0 < options.max_dim < int(scale * np.float32(larger)):
        scale = np.float32(options.max_dim) / np.float32(larger)
    return float(scale)


def _opencv_resize(image: Pixels, size: tuple[int, int] | None, scale: float) -> Pixels:
    cv2 = opencv()
    try:
        resized: Pixels = cv2.resize(image, size, fx=scale, fy=scale)
    except (cv2.error, MemoryError) as error:
        raise DataError(f"cannot be resized ({' '.join(str(error).split())})") from error
    return resized


def _encoding(path: str, options: ImageOptions) -> str:
    """The format in which an image is stored; empty: as pixels."""
    if options.encode_type or not options.encoded:
        return options.encode_type.lower()
    if not (extension := _extension(path)):
        raise DataError("has no extension that says its format; give --encode_type")
    return extension


def _extension(path: str) -> str:
    return PurePath(path).suffix[1:].lower()


def _encode(pixels: Pixels, encoding: str) -> bytes:
    cv2 = opencv()
    try:
        done, data = cv2.imencode(f".{encoding}", pixels)
    except cv2.error as error:
        raise DataError(f"cannot be encoded as '{encoding}' ({' '.join(str(error).split())})") from error
    if not done:
        raise DataError(f"cannot be encoded as '{encoding}'")
    return bytes(data)


def _plain_datum(pixels: Pixels, shape: tuple[int, int, int], label: int) -> memoryview:
    """The bytes of ``Datum(channels, height, width, data, label, encoded=False)``; OpenCV writes the planes in them."""
    head = _plain_head(shape)
    tail = caffe_pb2.Datum(label=label, encoded=False).SerializeToString()
    size = shape[0] * shape[1] * shape[2]
    datum = np.empty(len(head) + size + len(tail), np.uint8)
    datum[: len(head)] = np.frombuffer(head, np.uint8)
    datum[len(head) + size :] = np.frombuffer(tail, np.uint8)
    planes = datum[len(head) : len(head) + size].reshape(shape)
    if shape[0] == 1:
        planes[0] = pixels
    else:  # whole copies in Python would hold the other threads up
        for plane, written in zip(planes, opencv().split(pixels, list(planes)), strict=True):
            if not np.may_share_memory(plane, written):  # OpenCV may write elsewhere than it was told
                plane[...] = written
    return datum.data


@lru_cache(64)
def _plain_head(shape: tuple[int, int, int]) -> bytes:
    """What precedes the pixels."""
    channels, height, width = shape
    size = field_head(_DATA_TAG, channels * height * width)
    return caffe_pb2.Datum(channels=channels, height=height, width=width).SerializeToString() + size


def _can_write(encoding: str) -> bool:
    cv2 = opencv()
    try:
        return encoding.isalnum() and bool(cv2.haveImageWriter(f".{encoding}"))
    except cv2.error:
        return False
