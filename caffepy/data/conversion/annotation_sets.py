"""Databases of images with boxes, as SSD's `convert_annoset.cpp` makes them, and the sizes of their images.

Boxes are read from VOC's XML, COCO's JSON an image, and plain text (SSD's `io.cpp`).
"""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from caffepy.config.messages import field_head
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
from caffepy.files import atomic_write, read_regular
from caffepy.proto import caffe_pb2
from caffepy.registry import suggest

logger = logging.getLogger(__name__)


# -- reading a file ------------------------------------------------------------------------------------


_MAX_BYTES = 1 << 24
_MAX_SIDE = 2**31 - 1
"""Of an image; Caffe's sizes are int32."""

Size = tuple[int, int]
"""Height and width."""
Corners = tuple[float, float, float, float]
"""xmin, ymin, xmax, ymax in pixels."""


class BoxWriter:
    """Collects the boxes of an image in groups of one label, in parts of its width and height.

    Args:
        record: gets the groups.
        path: of the annotation, for messages.
        labels: of the classes' names.
    """

    def __init__(self, record: caffe_pb2.AnnotatedDatum, path: str, labels: Mapping[str, int]) -> None:
        self._record = record
        self._groups: dict[int, caffe_pb2.AnnotationGroup] = {}
        self._labels = labels
        self.path = path
        self.size = (0, 0)

    def set_size(self, stated: Size | None, image: Size) -> None:
        """Boxes count in what the annotation says the image's size is; in the image's own if it says nothing.

        Raises:
            DataError: the size is not positive, or larger than an image's.
        """
        if stated is None:
            logger.warning("'%s' does not say the image's size; the image's own is taken", self.path)
        elif stated != image:
            logger.warning("'%s': says %d x %d, but the image is %d x %d", self.path, *stated, *image)
        self.size = stated or image
        if not 0 < min(self.size) <= max(self.size) <= _MAX_SIDE:
            raise DataError(f"'{self.path}': the image's size is {self.size[0]} x {self.size[1]}; correct it")

    def label(self, name: str) -> int:
        """The label of a class.

        Raises:
            DataError: the map has no such class.
        """
        if name not in self._labels:
            raise DataError(
                f"'{self.path}': the class '{name}' is not in the label map; {suggest(name, list(self._labels))}"
            )
        return self._labels[name]

    def add(self, label: int, corners: Corners, difficult: bool) -> None:
        """Add a box.

        Raises:
            DataError: a corner is not a number.
        """
        height, width = self.size
        if not all(map(math.isfinite, corners)):
            raise DataError(f"'{self.path}': the box {corners} is not of numbers")
        if not (0 <= corners[0] <= corners[2] <= width and 0 <= corners[1] <= corners[3] <= height):
            shown = ", ".join(f"{corner:g}" for corner in corners)
            logger.warning("'%s': the box (%s) does not lie within %d x %d", self.path, shown, height, width)
        if label not in self._groups:
            self._groups[label] = self._record.annotation_group.add(group_label=label)
        group = self._groups[label]
        with np.errstate(over="ignore"):
            parts = np.array(corners, np.float32) / np.array([width, height, width, height], np.float32)
        names = ("xmin", "ymin", "xmax", "ymax")
        box = caffe_pb2.NormalizedBBox(difficult=difficult, **dict(zip(names, parts.tolist(), strict=True)))
        group.annotation.add(instance_id=len(group.annotation), bbox=box)


def read_boxes(path: str, kind: str, image: Size, labels: Mapping[str, int], record: caffe_pb2.AnnotatedDatum) -> None:
    """Add the boxes of a file to a record.

    Args:
        path: the file.
        kind: one of `READERS`.
        image: height and width of the image file.
        labels: of the classes' names.
        record: gets the groups of boxes.

    Raises:
        DataError: the file cannot be read, is not of this kind, or names a class without a label.
    """
    try:
        content = read_regular(Path(path), _MAX_BYTES)
    except OSError as error:
        raise DataError(f"'{path}' cannot be read: {error.strerror}") from error
    READERS[kind](content, image, BoxWriter(record, path, labels))


# -- VOC's XML -------------------------------------------------------------------------------------------


def _read_xml(content: bytes, image: Size, boxes: BoxWriter) -> None:
    root = _parse_xml(content, boxes.path)
    if root.tag != "annotation":
        raise DataError(f"'{boxes.path}': its outermost element is <{root.tag}>, not VOC's <annotation>")
    height, width = (_whole(root.findtext(f"size/{side}")) for side in ("height", "width"))
    boxes.set_size(None if height is None or width is None else (height, width), image)
    for number, found in enumerate(root.findall("object"), 1):
        where = f"'{boxes.path}': object {number}"
        name, box = found.findtext("name"), found.find("bndbox")
        if name is None or box is None:
            raise DataError(f"{where} has no <{'name' if name is None else 'bndbox'}>")
        xmin, ymin, xmax, ymax = (
            _number(box.findtext(corner), f"{where}: {corner}") for corner in ("xmin", "ymin", "xmax", "ymax")
        )
        difficult = (found.findtext("difficult") or "").strip() == "1"
        boxes.add(boxes.label(name.strip()), (xmin, ymin, xmax, ymax), difficult)


def _parse_xml(content: bytes, path: str) -> Element:
    """The outermost element; entities, which can make gigabytes of a few bytes, are refused."""

    def refuse(*_: object) -> None:
        raise DataError(f"'{path}' has a DOCTYPE, which annotations do not need; remove it")

    builder, parser = TreeBuilder(), expat.ParserCreate()
    parser.buffer_text = True
    parser.StartDoctypeDeclHandler = refuse
    parser.StartElementHandler = builder.start
    parser.EndElementHandler = builder.end
    parser.CharacterDataHandler = builder.data
    try:
        parser.Parse(content, True)
    except (expat.ExpatError, ValueError, LookupError) as error:
        raise DataError(f"'{path}' is not XML: {error}") from error
    return builder.close()


def _whole(text: str | None) -> int | None:
    """A whole number; None for what Caffe's reader does not take as one."""
    try:
        return int(text or "")
    except ValueError:
        return None


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{where} is '{str(value)[:40]}', not a number") from None


# -- COCO's JSON, one file an image ----------------------------------------------------------------------


def _read_json(content: bytes, image: Size, boxes: BoxWriter) -> None:
    try:
        found = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{boxes.path}' is not JSON: {error}") from error
    try:
        size = found["image"]["height"], found["image"]["width"]
        stated = size if all(isinstance(side, int) for side in size) else None
    except (KeyError, TypeError):
        stated = None
    boxes.set_size(stated, image)
    try:
        annotations = [
            (str(one["category_id"]), list(one["bbox"]), one.get("iscrowd", 0)) for one in found["annotation"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"'{boxes.path}' is not COCO's annotation of one image: 'annotation' is a list of objects with category_id "
            "and bbox"
        ) from error
    for number, (name, box, crowd) in enumerate(annotations, 1):
        where = f"'{boxes.path}': annotation {number}"
        if len(box) != 4:
            raise DataError(f"{where}: bbox has {len(box)} numbers, not the 4 of x, y, width, height")
        x, y, width, height = (np.float32(_number(value, f"{where}: bbox")) for value in box)
        boxes.add(boxes.label(name), (float(x), float(y), float(x + width), float(y + height)), bool(crowd))


# -- text ------------------------------------------------------------------------------------------------


def _read_txt(content: bytes, image: Size, boxes: BoxWriter) -> None:
    boxes.set_size(image, image)
    for number, line in enumerate(content.decode(errors="replace").splitlines(), 1):
        if not line.strip():
            continue
        where = f"'{boxes.path}':{number}"
        label, corners = _whole(line.split()[0]), line.split()[1:]
        if label is None or not -(2**31) <= label < 2**31 or len(corners) != 4:
            raise DataError(f"{where}: a line is a label's number, xmin, ymin, xmax and ymax")
        xmin, ymin, xmax, ymax = (_number(corner, f"{where}: a corner") for corner in corners)
        boxes.add(label, (xmin, ymin, xmax, ymax), False)


READERS: dict[str, Callable[[bytes, Size, BoxWriter], None]] = {"xml": _read_xml, "json": _read_json, "txt": _read_txt}
"""Of each `label_type`."""


# -- the sets ----------------------------------------------------------------------------------------


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
