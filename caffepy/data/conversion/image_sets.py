"""Conversion of image lists to databases, as Caffe's `convert_imageset.cpp`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from caffepy.backend.cpu.jit.cpus import cpu_count
from caffepy.data.conversion.image_records import (
    ImageOptions,
    ImageRecord,
    UnreadableImageError,
    read_image_record,
)
from caffepy.data.conversion.ordered_map import Progress, ordered_map
from caffepy.data.datum import single_threaded_opencv
from caffepy.data.sources.image_list import labelled_lines
from caffepy.data.sources.record_write import RecordWriter, check_overwrite, open_writer, record_key
from caffepy.errors import DataError

logger = logging.getLogger(__name__)

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
    root: str, listing: Path, target: Database, options: ImageOptions, seed: int | None = None,
    progress: Progress | None = None,
) -> ConversionResult:  # fmt: skip
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
    entries: list[ListEntry], listing: Path, target: Database, options: ImageOptions, reader: Reader, seed: int | None,
    progress: Progress,
) -> ConversionResult:  # fmt: skip
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
    entries: list[ListEntry], listing: Path, options: ImageOptions, reader: Reader, writer: RecordWriter,
    progress: Progress,
) -> int:  # fmt: skip
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
                f"'{listing}':{entry.number}: '{entry.path}' is {_format(image.shape)}, but '{first}' is "
                f"{_format(size)}; pass --resize_height and --resize_width, or omit --check_size"
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


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
