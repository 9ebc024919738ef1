"""Conversion of image lists to databases (Caffe's `convert_imageset.cpp`), and of an image file to a Datum.

An image file becomes a Datum as in Caffe's tools (`ReadImageToDatum` in `io.cpp`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path, PurePath
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.data.images import (
    MAX_PIXELS,
    decode_image,
    encode,
    opencv,
    read_file,
    resize,
    scaled,
    sides,
    single_threaded_opencv,
)
from caffepy.data.sources.databases import RecordWriter, check_overwrite, open_writer, record_key
from caffepy.data.sources.image_list import labelled_lines
from caffepy.data.workers import Progress, ordered_map
from caffepy.errors import ConfigError, DataError
from caffepy.formats.messages import field_header
from caffepy.formats.proto import caffe_pb2

logger = logging.getLogger(__name__)


# -- an image ------------------------------------------------------------------------------------------


class UnreadableImageError(DataError):
    """An image that a conversion skips. The message follows the file's name."""


Pixels = NDArray[np.uint8]
"""(H, W, 3) in BGR order, or (H, W)."""

_DATA_TAG = b"\x22"


@dataclass(frozen=True)
class ImageOptions:
    """Image options, named as Caffe's flags.

    Args:
        gray: convert to one channel.
        resize_height: height of all images; 0: unchanged.
        resize_width: width of all images; 0: unchanged.
        min_dim: minimum of the shorter side; smaller images are scaled up. 0: unchanged.
        max_dim: maximum of the longer side; larger images are scaled down. 0: unchanged.
        encoded: store encoded images instead of pixels.
        encode_type: image format, e.g. ``jpg``; implies `encoded`. Empty: the format of each file's extension.
        check_size: require images of equal size.
        threads: decoding threads; None: one per core.

    Raises:
        ConfigError: only one of the two sizes is set, a size is too large, or OpenCV cannot write the format.
    """

    gray: bool = False
    resize_height: int = 0
    resize_width: int = 0
    min_dim: int = 0
    max_dim: int = 0
    encoded: bool = False
    encode_type: str = ""
    check_size: bool = False
    threads: int | None = None

    def __post_init__(self) -> None:
        if bool(self.resize_height) != bool(self.resize_width):
            raise ConfigError("resize_height and resize_width must be set together, as in Caffe")
        if self.resize_height * self.resize_width > MAX_PIXELS:
            raise ConfigError(
                f"images of {self.resize_height} x {self.resize_width} pixels exceed the limit of {MAX_PIXELS} for "
                "reading; give a smaller size"
            )
        if self.encode_type and not _can_write(self.encode_type):
            raise ConfigError(
                f"encode_type '{self.encode_type}' is not a format that OpenCV writes; use for example jpg or png"
            )

    @property
    def resizes(self) -> bool:
        """Whether images may be resized."""
        return any((self.resize_height, self.resize_width, self.min_dim, self.max_dim))


@dataclass(frozen=True)
class ImageRecord:
    """An image converted to a Datum.

    Args:
        datum: the serialised Datum.
        shape: (C, H, W) of the Datum's image.
        original: height and width of the image in the file.
    """

    datum: bytes | memoryview
    shape: tuple[int, int, int]
    original: tuple[int, int]


def read_image_record(path: str, label: int, options: ImageOptions, with_shape: bool = False) -> ImageRecord:
    """Read, decode, resize and optionally encode an image file.

    If format and size are unchanged, the file's bytes are stored. It is decoded nevertheless, so that no damaged file
    enters the database.

    Args:
        path: the file.
        label: the image's label.
        options: resizing and encoding options.
        with_shape: set channels, height and width of encoded Datums too, as convert_annoset does.

    Raises:
        UnreadableImageError: the image cannot be read, decoded, resized or encoded.
    """
    content, original = _read_pixels(path, options.gray)
    try:
        pixels = _resized(original, options)
        shape = (1 if pixels.ndim == 2 else pixels.shape[2], *pixels.shape[:2])
        encoding = _encoding(path, options)
        if not encoding:
            return ImageRecord(_raw_datum(pixels, shape, label), shape, original.shape[:2])
        unchanged = not options.resizes and _extension(path) in (encoding, {"jpg": "jpeg"}.get(encoding))
        datum = caffe_pb2.Datum(
            data=content if unchanged else encode(pixels, f".{encoding}"), label=label, encoded=True
        )
    except DataError as error:
        raise UnreadableImageError(str(error)) from error
    if with_shape:
        datum.channels, datum.height, datum.width = shape
    return ImageRecord(datum.SerializeToString(), shape, original.shape[:2])


def image_size(path: str) -> tuple[int, int]:
    """Return height and width of an image file, after its EXIF rotation.

    Raises:
        UnreadableImageError: the image cannot be read or decoded.
    """
    height, width = _read_pixels(path, False)[1].shape[:2]
    return height, width


def _read_pixels(path: str, gray: bool) -> tuple[bytes, Pixels]:
    """Return a file's bytes and its image."""
    try:
        content = read_file(path)
        image = decode_image(content, force_color=not gray, force_gray=gray)
    except DataError as error:
        raise UnreadableImageError(str(error)) from error
    return content, image[0] if gray else image.transpose(1, 2, 0)


def _resized(image: Pixels, options: ImageOptions) -> Pixels:
    """Resize as SSD's `ReadImageToCVMat`: min_dim and max_dim take precedence over the fixed size."""
    if not options.resizes:
        return image
    if options.min_dim or options.max_dim:
        scale = _scale(min(image.shape[:2]), max(image.shape[:2]), options)
        if scale == 1:
            return image
        if image.shape[0] * image.shape[1] * scale * scale > MAX_PIXELS:
            raise DataError(f"would have more than {MAX_PIXELS} pixels with min_dim {options.min_dim}; give max_dim")
        resized = scaled(image, scale)
    else:
        resized = resize(image, options.resize_height, options.resize_width, ipp=True)
    return resized[:, :, 0] if image.ndim == 2 else resized


def _scale(smaller: int, larger: int, options: ImageOptions) -> float:
    """Return the scale in float32, as Caffe computes it; the size is rounded from it."""
    scale = np.float32(1)
    if options.min_dim > 0 and smaller < options.min_dim:
        scale = np.float32(options.min_dim) / np.float32(smaller)
    if 0 < options.max_dim < int(scale * np.float32(larger)):
        scale = np.float32(options.max_dim) / np.float32(larger)
    return float(scale)


def _encoding(path: str, options: ImageOptions) -> str:
    """Return the format in which an image is stored; empty: uncompressed pixels."""
    if options.encode_type or not options.encoded:
        return options.encode_type.lower()
    if not (extension := _extension(path)):
        raise DataError("has no extension that names its format; pass --encode_type")
    return extension


def _extension(path: str) -> str:
    return PurePath(path).suffix[1:].lower()


def _raw_datum(pixels: Pixels, shape: tuple[int, int, int], label: int) -> memoryview:
    """Serialise ``Datum(channels, height, width, data, label, encoded=False)``; OpenCV writes the planes in place."""
    header = _datum_header(shape)
    trailer = caffe_pb2.Datum(label=label, encoded=False).SerializeToString()
    size = shape[0] * shape[1] * shape[2]
    datum = np.empty(len(header) + size + len(trailer), np.uint8)
    datum[: len(header)] = np.frombuffer(header, np.uint8)
    datum[len(header) + size :] = np.frombuffer(trailer, np.uint8)
    planes = datum[len(header) : len(header) + size].reshape(shape)
    if shape[0] == 1:
        planes[0] = pixels
    else:  # copies in Python would block the other threads
        for plane, written in zip(planes, opencv().split(pixels, list(planes)), strict=True):
            if not np.may_share_memory(plane, written):  # OpenCV may ignore the given output
                plane[...] = written
    return datum.data


@lru_cache(64)
def _datum_header(shape: tuple[int, int, int]) -> bytes:
    """Return the serialised fields before the pixels."""
    channels, height, width = shape
    size = field_header(_DATA_TAG, channels * height * width)
    return caffe_pb2.Datum(channels=channels, height=height, width=width).SerializeToString() + size


def _can_write(encoding: str) -> bool:
    cv2 = opencv()
    try:
        return encoding.isalnum() and bool(cv2.haveImageWriter(f".{encoding}"))
    except cv2.error:
        return False


# -- a list of images ----------------------------------------------------------------------------------


T = TypeVar("T")


@dataclass(frozen=True)
class Database:
    """A database to write.

    Args:
        path: the database's folder.
        backend: lmdb or leveldb.
        force: replace an existing database.
    """

    path: Path
    backend: str = "lmdb"
    force: bool = False


@dataclass(frozen=True)
class ListEntry:
    """A line of an image list.

    Args:
        number: line number, from 1.
        name: the image's path as written in the list.
        path: the image's path with the root prefix.
        label: the image's label; -1 if its boxes have labels.
        annotation: path of the annotation file; empty if there is none.
    """

    number: int
    name: str
    path: str
    label: int
    annotation: str = ""


@dataclass(frozen=True)
class ConversionResult:
    """The result of a conversion.

    Args:
        records: number of written records.
        skipped: number of unreadable images.
    """

    records: int
    skipped: int


Reader = Callable[[ListEntry], tuple[ImageRecord, bytes | memoryview]]
"""Returns an image and its serialised record."""


def convert_image_set(
    root: str,
    listing: Path,
    target: Database,
    options: ImageOptions,
    seed: int | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Create a database of Datums from an image list.

    A key is the index in writing order and the path in the list. Unreadable images are logged and skipped, as in Caffe.

    Args:
        root: prefix of each path; a slash is added after a folder.
        listing: the image list: a path and a label per line.
        target: the database.
        options: image options.
        seed: seed of a random order; None: the list's order.
        progress: reports the progress.

    Raises:
        DataError: the list or all of its images cannot be read, `check_size` finds different sizes, or the database
            exists.
        RunError: writing failed.
    """
    prefix = root_prefix(root)
    entries = [ListEntry(number, name, prefix + name, label) for number, name, label in labelled_lines(listing)]
    return convert_entries(entries, listing, target, options, partial(_read, options), seed, progress or Progress())


def convert_entries(
    entries: list[ListEntry],
    listing: Path,
    target: Database,
    options: ImageOptions,
    reader: Reader,
    seed: int | None,
    progress: Progress,
) -> ConversionResult:
    """Write the record that `reader` returns for each list entry.

    Raises:
        DataError, RunError: as in `convert_image_set`, or raised by `reader`.
    """
    if not entries:
        raise DataError(f"image list '{listing}' names no images")
    check_overwrite(target.path, target.force)
    if seed is not None:
        entries = shuffled(entries, seed)
    progress.total = len(entries)
    logger.info("A total of %d images.", len(entries))  # Caffe's message
    with open_writer(target.path, target.backend, target.force) as writer, single_threaded_opencv():
        skipped = _write_all(entries, listing, options, reader, writer, progress)
    progress.finish(writer.count)
    if skipped:
        logger.warning("%d of %d images could not be read and were skipped; see above", skipped, len(entries))
    return ConversionResult(writer.count, skipped)


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """Return the items in a random order determined by the seed."""
    from caffepy.data.random import permutation

    return [items[number] for number in permutation(seed, 0, 0, len(items)).tolist()]


def root_prefix(root: str) -> str:
    """Return the path prefix for a root folder: the folder as written, with a trailing slash if it is a folder."""
    return f"{root}/" if root and not root.endswith("/") and os.path.isdir(root) else root


def _write_all(
    entries: list[ListEntry],
    listing: Path,
    options: ImageOptions,
    reader: Reader,
    writer: RecordWriter,
    progress: Progress,
) -> int:
    """Write the records in list order; return the number of unreadable images."""
    skipped, first, size = 0, "", None
    attempts = ordered_map(partial(_try_read, reader), entries, options.threads or cpu_count())
    for index, (entry, result) in enumerate(attempts):
        progress.advance()
        if isinstance(result, UnreadableImageError):
            skipped += 1
            logger.error("'%s':%d: skipped: '%s' %s", listing, entry.number, entry.path, result)
            continue
        image, record = result
        if size is None:
            first, size = entry.path, image.shape
        elif options.check_size and image.shape != size:
            raise DataError(
                f"'{listing}':{entry.number}: '{entry.path}' is {sides(image.shape)}, but '{first}' is "
                f"{sides(size)}; pass --resize_height and --resize_width, or omit --check_size"
            )
        writer.put(record_key(index, entry.name), record)
    if writer.count == 0:
        raise DataError(
            f"none of the {skipped} images of '{listing}' can be read; check the root folder. The first path is "
            f"'{entries[0].path}'"
        )
    return skipped


def _read(options: ImageOptions, entry: ListEntry) -> tuple[ImageRecord, bytes | memoryview]:
    image = read_image_record(entry.path, entry.label, options)
    return image, image.datum


def _try_read(
    reader: Reader, entry: ListEntry
) -> tuple[ListEntry, tuple[ImageRecord, bytes | memoryview] | UnreadableImageError]:
    """Return the reader's result for a list entry, or the error of an unreadable image."""
    try:
        return entry, reader(entry)
    except UnreadableImageError as error:
        return entry, error
