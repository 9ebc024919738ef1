"""Databases of images, as Caffe's `convert_imageset.cpp` makes them."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from caffepy.data.conversion.image_records import (
    ImageOptions,
    ImageRecord,
    UnreadableImageError,
    one_thread_an_image,
    read_image_record,
)
from caffepy.data.conversion.ordered import ordered_map
from caffepy.data.conversion.progress import Progress
from caffepy.data.sources.image_list import labelled_lines
from caffepy.data.sources.lmdb_write import record_key
from caffepy.data.sources.record_write import RecordWriter, check_free, open_writer
from caffepy.errors import DataError

logger = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True)
class Database:
    """Where the records go.

    Args:
        path: its folder.
        backend: lmdb or leveldb.
        force: replace what is there.
    """

    path: Path
    backend: str = "lmdb"
    force: bool = False


@dataclass(frozen=True)
class Line:
    """A line of the list.

    Args:
        number: in the list, from 1.
        name: of the image, as it is written.
        path: of the image.
        label: of the image; -1 where boxes have labels.
        annotation: the path of the file with boxes; empty if there is none.
    """

    number: int
    name: str
    path: str
    label: int
    annotation: str = ""


@dataclass(frozen=True)
class Converted:
    """What became of a list.

    Args:
        records: in the database.
        skipped: images that could not be read.
    """

    records: int
    skipped: int


Reader = Callable[[Line], tuple[ImageRecord, bytes | memoryview]]
"""Gives an image and its whole record."""


def convert_image_set(
    root: str, listing: Path, target: Database, options: ImageOptions, seed: int | None = None,
    progress: Progress | None = None,
) -> Converted:  # fmt: skip
    """Make a database of Datums out of the images that a list names with their labels.

    The keys are the number of the line in the order of writing, and the path as the list has it. An image that cannot
    be read is logged and left out, as in Caffe.

    Args:
        root: put before each path, as it is; after a folder a slash is added.
        listing: the list, a path and a label a line.
        target: where the records go.
        options: what to do to the images.
        seed: of a random order; None: the order of the list.
        progress: is told how far it is.

    Raises:
        DataError: the list cannot be read, none of its images can, `check_size` found another size, or there is
            something at the database's path.
        RunError: the database cannot be written.
    """
    prefix = root_prefix(root)
    lines = [Line(number, name, prefix + name, label) for number, name, label in labelled_lines(listing)]
    return convert_lines(lines, listing, target, options, partial(_read, options), seed, progress or Progress())


def convert_lines(
    lines: list[Line], listing: Path, target: Database, options: ImageOptions, reader: Reader, seed: int | None,
    progress: Progress,
) -> Converted:  # fmt: skip
    """Write what a reader makes of each line.

    Raises:
        DataError, RunError: as `convert_image_set`, and what the reader raises beyond unreadable images.
    """
    if not lines:
        raise DataError(f"image list '{listing}' names no images")
    check_free(target.path, target.force)
    if seed is not None:
        lines = shuffled(lines, seed)
    progress.total = len(lines)
    logger.info("A total of %d images.", len(lines))
    with open_writer(target.path, target.backend, target.force) as writer, one_thread_an_image():
        skipped = _write_all(lines, listing, options, reader, writer, progress)
    progress.finish(writer.count)
    if skipped:
        logger.warning("%d of %d images could not be read and were left out; see above", skipped, len(lines))
    return Converted(writer.count, skipped)


def shuffled(items: Sequence[T], seed: int) -> list[T]:
    """Items in a random order that the seed alone decides."""
    from caffepy.data.random import permutation

    return [items[number] for number in permutation(seed, 0, 0, len(items)).tolist()]


def root_prefix(root: str) -> str:
    """What Caffe's tools put before each path: the root folder as it is written, with the slash that it needs."""
    return f"{root}/" if root and not root.endswith("/") and os.path.isdir(root) else root


def _write_all(
    lines: list[Line], listing: Path, options: ImageOptions, reader: Reader, writer: RecordWriter,
    progress: Progress,
) -> int:  # fmt: skip
    """Write the records in the order of the lines; returns how many images could not be read."""
    skipped, first, size = 0, "", None
    attempts = ordered_map(partial(_attempt, reader), lines, options.threads)
    for index, (line, found) in enumerate(attempts):
        progress.advance()
        if isinstance(found, UnreadableImageError):
            skipped += 1
            logger.error("'%s':%d: left out: '%s' %s", listing, line.number, line.path, found)
            continue
        image, record = found
        if size is None:
            first, size = line.path, image.shape
        elif options.check_size and image.shape != size:
            raise DataError(
                f"'{listing}':{line.number}: '{line.path}' is {_format(image.shape)}, but '{first}' is {_format(size)};"
                " give --resize_height and --resize_width, or leave --check_size out"
            )
        writer.put(record_key(index, line.name), record)
    if writer.count == 0:
        raise DataError(
            f"none of the {skipped} images of '{listing}' can be read; are they in the root folder? The first would be "
            f"'{lines[0].path}'"
        )
    return skipped


def _read(options: ImageOptions, line: Line) -> tuple[ImageRecord, bytes | memoryview]:
    image = read_image_record(line.path, line.label, options)
    return image, image.datum


def _attempt(reader: Reader, line: Line) -> tuple[Line, tuple[ImageRecord, bytes | memoryview] | UnreadableImageError]:
    """What a line gives, or why its image cannot be read."""
    try:
        return line, reader(line)
    except UnreadableImageError as error:
        return line, error


def _format(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))
