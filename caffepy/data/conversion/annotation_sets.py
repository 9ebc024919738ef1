"""Databases of images with boxes, as SSD's `convert_annoset.cpp` makes them, and the sizes of their images."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath

from caffepy.config.messages import field_head
from caffepy.data.conversion.annotation_files import READERS, read_boxes
from caffepy.data.conversion.image_records import (
    ImageOptions,
    ImageRecord,
    UnreadableImageError,
    image_size,
    one_thread_an_image,
    read_image_record,
)
from caffepy.data.conversion.image_sets import Converted, Database, Line, convert_lines, root_prefix
from caffepy.data.conversion.label_maps import read_label_map
from caffepy.data.conversion.ordered import ordered_map
from caffepy.data.conversion.progress import Progress, all_cores
from caffepy.data.sources.image_list import labelled_lines, list_lines
from caffepy.errors import ConfigError, DataError
from caffepy.files import atomic_write
from caffepy.proto import caffe_pb2

logger = logging.getLogger(__name__)

ANNOTATION_TYPES = ("classification", "detection")
LABEL_TYPES = tuple(READERS)
_DATUM_TAG = b"\x0a"


@dataclass(frozen=True)
class AnnotationOptions:
    """What Caffe's flags of the same names say.

    Args:
        anno_type: one of `ANNOTATION_TYPES`: the list gives a label for each image, or a file with boxes.
        label_type: of those files, one of `LABEL_TYPES`.
        label_map_file: a LabelMap; None where the files have the labels' numbers (txt).
        check_label: refuse a map that has a name twice.
    """

    anno_type: str = "classification"
    label_type: str = "xml"
    label_map_file: Path | None = None
    check_label: bool = False

    def labels(self) -> dict[str, int]:
        """The map's labels.

        Raises:
            ConfigError: a map is needed, and there is none.
            DataError: it cannot be read, or has a name twice.
        """
        if self.label_map_file is not None:
            return read_label_map(self.label_map_file, self.check_label)
        if self.label_type != "txt":
            raise ConfigError(
                f"boxes of {self.label_type} files have names: --label_map_file must say their labels; `caffepy "
                "create_label_map` writes such files"
            )
        return {}


def convert_annotation_set(
    root: str, listing: Path, target: Database, images: ImageOptions, annotations: AnnotationOptions,
    seed: int | None = None, progress: Progress | None = None,
) -> Converted:  # fmt: skip
    """Make a database of AnnotatedDatums out of the images that a list names, with their labels or files of boxes.

    The keys are those of `convert_image_set`. An image without its file of boxes gets none, and the log says so.

    Args:
        root: put before each path, as it is; after a folder a slash is added.
        listing: the list: a path and a label a line, or two paths.
        target: where the records go.
        images: what to do to the images.
        annotations: what the list and its files hold.
        seed: of a random order; None: the order of the list.
        progress: is told how far it is.

    Raises:
        ConfigError: a label map is needed, and there is none.
        DataError: as `convert_image_set`; also, the label map or a file of boxes does not hold what it should.
        RunError: the database cannot be written.
    """
    prefix = root_prefix(root)
    if annotations.anno_type == "classification":
        lines = [Line(number, name, prefix + name, label) for number, name, label in labelled_lines(listing)]
        reader = partial(_read_labelled, images)
    else:
        lines = _paired_lines(listing, prefix)
        reader = partial(_read_boxed, images, annotations.label_type, annotations.labels())
    return convert_lines(lines, listing, target, images, reader, seed, progress or Progress())


def write_image_sizes(
    root: str, listing: Path, target: Path, name_id_file: Path | None = None, threads: int | None = None,
    progress: Progress | None = None,
) -> Converted:  # fmt: skip
    """Write name, height and width of each image of a list, as SSD's `get_image_size.cpp`.

    Args:
        root: put before each path.
        listing: the list; what is behind the path is ignored.
        target: the file to write.
        name_id_file: a name and a number a line; the number is written instead of the name.
        threads: that decode; None: all cores.
        progress: is told how far it is.

    Raises:
        DataError: a list cannot be read, none of the images can, or an image's name has no number.
        RunError: the file cannot be written.
    """
    progress, prefix = progress or Progress(), root_prefix(root)
    lines = _paired_lines(listing, prefix)
    numbers = None if name_id_file is None else {name: number for _, name, number in labelled_lines(name_id_file)}
    rows, progress.total = [], len(lines)
    with one_thread_an_image():
        for line, size in ordered_map(_try_size, lines, threads or all_cores()):
            progress.advance()
            if isinstance(size, UnreadableImageError):
                logger.error("'%s':%d: left out: '%s' %s", listing, line.number, line.path, size)
            else:
                rows.append(f"{_name_or_number(line, numbers, name_id_file)} {size[0]} {size[1]}\n")
    if not rows:
        raise DataError(f"none of the images of '{listing}' can be read; are they in '{root}'?")
    with atomic_write(target) as file:
        file.write(os.fsencode("".join(rows)))
    progress.finish(len(rows))
    return Converted(len(rows), len(lines) - len(rows))


def _paired_lines(listing: Path, prefix: str) -> list[Line]:
    """The lines of a list of two words each; neither may have a space, as in Caffe."""
    lines = []
    for number, text in list_lines(listing):
        words = text.split()
        if len(words) != 2:
            raise DataError(f"'{listing}':{number}: has {len(words)} words; a line is an image and its annotation")
        lines.append(Line(number, words[0], prefix + words[0], -1, prefix + words[1]))
    return lines


def _read_labelled(options: ImageOptions, line: Line) -> tuple[ImageRecord, bytes]:
    image = read_image_record(line.path, line.label, options, with_shape=True)
    return image, b"".join((field_head(_DATUM_TAG, len(image.datum)), image.datum))


def _read_boxed(
    options: ImageOptions, label_type: str, labels: Mapping[str, int], line: Line
) -> tuple[ImageRecord, bytes]:
    image = read_image_record(line.path, line.label, options, with_shape=True)
    rest = caffe_pb2.AnnotatedDatum(type=caffe_pb2.AnnotatedDatum.BBOX)
    if os.path.exists(line.annotation):
        read_boxes(line.annotation, label_type, image.original, labels, rest)
    else:
        logger.warning("'%s' is not there: '%s' gets no boxes", line.annotation, line.path)
    return image, b"".join((field_head(_DATUM_TAG, len(image.datum)), image.datum, rest.SerializeToString()))


def _try_size(line: Line) -> tuple[Line, tuple[int, int] | UnreadableImageError]:
    try:
        return line, image_size(line.path)
    except UnreadableImageError as error:
        return line, error


def _name_or_number(line: Line, numbers: Mapping[str, int] | None, origin: Path | None) -> str:
    name = PurePath(line.name).stem
    if numbers is None:
        return name
    if name not in numbers:
        raise DataError(f"'{origin}' has no number for '{name}'; each line is a name and a number")
    return str(numbers[name])
