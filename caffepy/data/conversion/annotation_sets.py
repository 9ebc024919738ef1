"""Conversion of images with boxes to databases (SSD's `convert_annoset.cpp`), lists of image sizes, and label maps.

Boxes are read from VOC's XML, COCO's JSON (one file per image) and plain text (SSD's `io.cpp`). Label maps hold class
names and label numbers, as SSD's tools write and read them.
"""

from __future__ import annotations

import json
import logging
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np
from google.protobuf import text_format

from caffepy.backend.cpu.jit.deferred import cpu_count
from caffepy.data.conversion.image_sets import (
    ConversionResult,
    Database,
    ImageOptions,
    ImageRecord,
    ListEntry,
    Reader,
    UnreadableImageError,
    convert_entries,
    image_size,
    read_image_record,
    root_prefix,
)
from caffepy.data.images import single_threaded_opencv
from caffepy.data.sources.image_list import labelled_lines, list_lines
from caffepy.data.workers import Progress, ordered_map
from caffepy.errors import ConfigError, DataError
from caffepy.formats.messages import field_header
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import decode_text, parse_text
from caffepy.utils.files import atomic_write, read_data
from caffepy.utils.registry import suggest

logger = logging.getLogger(__name__)


# -- label maps ----------------------------------------------------------------------------------------

_LABELS = range(-(2**31), 2**31)


def read_label_map(path: Path, unique: bool = False) -> dict[str, int]:
    """Read a LabelMap prototxt; return the label of each name.

    Args:
        path: the file.
        unique: refuse duplicate names; otherwise the last label wins.

    Raises:
        ConfigError: the file is not a LabelMap.
        DataError: the file cannot be read, is empty, or has a duplicate name.
    """
    text = decode_text(read_data(path, _MAX_BYTES, f"'{path}'"), str(path))
    labels: dict[str, int] = {}
    for item in parse_text(text, caffe_pb2.LabelMap(), str(path)).item:
        if unique and item.name in labels:
            raise DataError(f"{path}: the name '{item.name}' occurs twice; remove one, or omit --check_label")
        labels[item.name] = item.label
    if not labels:
        raise DataError(f"{path}: has no names; `caffepy create_label_map` writes label maps")
    return labels


def create_label_map(source: Path, target: Path, delimiters: str = " ", background: bool = False) -> int:
    """Write a LabelMap from a list of classes (`ReadLabelFileToLabelMap` of SSD's `io.cpp`).

    Each line is a name; a name and a label; or a name, a label and a display name. Labels that are not given count
    from 0, or from 1 with `background`.

    Args:
        source: the list of classes.
        target: the prototxt to write.
        delimiters: characters that separate fields.
        background: add the class ``none_of_the_above`` with label 0 first.

    Returns:
        The number of classes.

    Raises:
        ConfigError: `delimiters` is empty.
        DataError: the list cannot be read, or its lines differ in the number of fields or have more than three.
        RunError: the file cannot be written.
    """
    if not delimiters:
        raise ConfigError("--delimiter is empty; give the characters that separate the fields of a line")
    result = caffe_pb2.LabelMap()
    if background:
        result.item.add(name="none_of_the_above", label=0, display_name="background")
    lines = decode_text(read_data(source, _MAX_BYTES, f"'{source}'"), str(source)).splitlines()
    fields = {n: re.split(f"[{re.escape(delimiters)}]", line) for n, line in enumerate(lines, 1) if line.strip()}
    for number, parts in fields.items():
        first = next(iter(fields.values()))
        if len(parts) != len(first) or not 1 <= len(parts) <= 3:
            raise DataError(
                f"{source}:{number}: has {len(parts)} fields, but the first line has {len(first)}; every line is a "
                "name, a name and a label, or a name, a label and a display name"
            )
        label = _label(parts[1], f"{source}:{number}") if len(parts) > 1 else len(result.item)
        result.item.add(name=parts[0], label=label, display_name=parts[2] if len(parts) > 2 else parts[0])
    with atomic_write(target) as file:
        file.write(text_format.MessageToString(result, as_utf8=True).encode())
    return len(result.item)


def _label(text: str, where: str) -> int:
    if not re.fullmatch(r"[-+]?[0-9]{1,10}", text.strip()) or int(text) not in _LABELS:
        raise DataError(f"{where}: '{text[:40]}' is not a label; the second field is an integer")
    return int(text)


# -- reading a file ------------------------------------------------------------------------------------


_MAX_BYTES = 1 << 24
_MAX_SIDE = 2**31 - 1
"""Maximum side of an image; Caffe's sizes are int32."""

Size = tuple[int, int]
"""Height and width."""
Corners = tuple[float, float, float, float]
"""xmin, ymin, xmax, ymax in pixels."""


@dataclass(frozen=True)
class BoxCheck:
    """The boxes of a conversion that leaves out the boxes without an area in the image.

    Reading threads fill it: adding to a list or set is atomic.

    Attributes:
        left_out: the fault of each box that is left out, and its annotation file and corners.
        labels: the labels of the other boxes.
    """

    left_out: list[tuple[str, str]] = field(default_factory=list)
    labels: set[int] = field(default_factory=set)


class BoxWriter:
    """Adds the boxes of an image to a record, normalised and grouped by label.

    Args:
        record: the record to fill.
        path: path of the annotation file, for messages.
        labels: label of each class name.
        check: leaves out boxes without an area in the image; None: all boxes are kept, as in Caffe.
    """

    def __init__(
        self,
        record: caffe_pb2.AnnotatedDatum,
        path: str,
        labels: Mapping[str, int],
        check: BoxCheck | None = None,
    ) -> None:
        self._record = record
        self._groups: dict[int, caffe_pb2.AnnotationGroup] = {}
        self._labels = labels
        self._check = check
        self.path = path
        self.size = (0, 0)

    def set_size(self, stated: Size | None, image: Size) -> None:
        """Set the size that normalises the boxes: the annotation's, or the image's if the annotation has none.

        Raises:
            DataError: the size is not positive or too large.
        """
        if stated is None:
            logger.warning("'%s' has no image size; using the image's own size", self.path)
        elif stated != image:
            logger.warning("'%s': declares %d x %d, but the image is %d x %d", self.path, *stated, *image)
        self.size = stated or image
        if not 0 < min(self.size) <= max(self.size) <= _MAX_SIDE:
            raise DataError(f"'{self.path}': the image's size is {self.size[0]} x {self.size[1]}; correct it")

    def label(self, name: str) -> int:
        """Return the label of a class.

        Raises:
            DataError: the label map has no such class.
        """
        if name not in self._labels:
            raise DataError(
                f"'{self.path}': the class '{name}' is not in the label map; {suggest(name, list(self._labels))}"
            )
        return self._labels[name]

    def add(self, label: int, corners: Corners, difficult: bool) -> None:
        """Add a box, or count it in the check.

        Raises:
            DataError: a coordinate is not finite.
        """
        height, width = self.size
        if not all(map(math.isfinite, corners)):
            raise DataError(f"'{self.path}': the box {corners} has a coordinate that is not finite")
        fault = _fault(corners, self.size)
        shown = ", ".join(f"{corner:g}" for corner in corners)
        if self._check is not None:
            if fault:
                self._check.left_out.append((fault, f"'{self.path}': ({shown})"))
                return
            self._check.labels.add(label)
        if fault in (INVERTED, EMPTY):
            logger.warning("'%s': the box (%s) %s", self.path, shown, fault)
        elif not (0 <= corners[0] <= corners[2] <= width and 0 <= corners[1] <= corners[3] <= height):
            logger.warning("'%s': the box (%s) does not lie within %d x %d", self.path, shown, height, width)
        if label not in self._groups:
            self._groups[label] = self._record.annotation_group.add(group_label=label)
        group = self._groups[label]
        with np.errstate(over="ignore"):
            parts = np.array(corners, np.float32) / np.array([width, height, width, height], np.float32)
        names = ("xmin", "ymin", "xmax", "ymax")
        box = caffe_pb2.NormalizedBBox(difficult=difficult, **dict(zip(names, parts.tolist(), strict=True)))
        group.annotation.add(instance_id=len(group.annotation), bbox=box)


INVERTED, EMPTY, OUTSIDE = "is inverted", "has no width or no height", "lies outside of its image"


def _fault(corners: Corners, size: Size) -> str:
    """Return why a box has no area in an image of this size; "" if it has one."""
    xmin, ymin, xmax, ymax = corners
    if xmin > xmax or ymin > ymax:
        return INVERTED
    if xmin == xmax or ymin == ymax:
        return EMPTY
    return OUTSIDE if xmin >= size[1] or ymin >= size[0] or xmax <= 0 or ymax <= 0 else ""


def read_boxes(
    path: str,
    kind: str,
    image: Size,
    labels: Mapping[str, int],
    record: caffe_pb2.AnnotatedDatum,
    check: BoxCheck | None = None,
) -> None:
    """Read the boxes of an annotation file into a record.

    Args:
        path: the annotation file.
        kind: one of `READERS`.
        image: height and width of the image.
        labels: label of each class name.
        record: the record to fill.
        check: as in `BoxWriter`.

    Raises:
        DataError: the file cannot be read, is not of this kind, or names a class without a label.
    """
    content = read_data(Path(path), _MAX_BYTES, f"'{path}'")
    READERS[kind](content, image, BoxWriter(record, path, labels, check))


# -- VOC's XML -------------------------------------------------------------------------------------------


def _read_xml(content: bytes, image: Size, boxes: BoxWriter) -> None:
    root = _parse_xml(content, boxes.path)
    if root.tag != "annotation":
        raise DataError(f"'{boxes.path}': the root element is <{root.tag}>, not VOC's <annotation>")
    height, width = (_whole(root.findtext(f"size/{side}")) for side in ("height", "width"))
    boxes.set_size(None if height is None or width is None else (height, width), image)
    for number, element in enumerate(root.findall("object"), 1):
        where = f"'{boxes.path}': object {number}"
        name, box = element.findtext("name"), element.find("bndbox")
        if name is None or box is None:
            raise DataError(f"{where} has no <{'name' if name is None else 'bndbox'}>")
        xmin, ymin, xmax, ymax = (
            _number(box.findtext(corner), f"{where}: {corner}") for corner in ("xmin", "ymin", "xmax", "ymax")
        )
        difficult = (element.findtext("difficult") or "").strip() == "1"
        boxes.add(boxes.label(name.strip()), (xmin, ymin, xmax, ymax), difficult)


def _parse_xml(content: bytes, path: str) -> Element:
    """Parse XML and return the root element. DOCTYPE is refused: its entities can expand to gigabytes."""

    def refuse(*_: object) -> None:
        raise DataError(f"'{path}' has a DOCTYPE, which is refused; remove it")

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
    """Parse an integer; return None if Caffe's reader would not parse it."""
    try:
        return int(text or "")
    except ValueError:
        return None


def _number(value: Any, where: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise DataError(f"{where} is '{str(value)[:40]}', not a number") from None


def voc_class_names(path: Path) -> set[str]:
    """Return the names of the objects in an annotation file of VOC.

    Raises:
        DataError: the file cannot be read or is not XML.
    """
    root = _parse_xml(read_data(path, _MAX_BYTES, f"'{path}'"), str(path))
    return {name.strip() for item in root.findall("object") if (name := item.findtext("name", "")).strip()}


# -- COCO's JSON, one file per image ---------------------------------------------------------------------


def _read_json(content: bytes, image: Size, boxes: BoxWriter) -> None:
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise DataError(f"'{boxes.path}' is not JSON: {error}") from error
    try:
        size = document["image"]["height"], document["image"]["width"]
        stated = size if all(isinstance(side, int) for side in size) else None
    except (KeyError, TypeError):
        stated = None
    boxes.set_size(stated, image)
    try:
        annotations = [
            (str(item["category_id"]), list(item["bbox"]), item.get("iscrowd", 0)) for item in document["annotation"]
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise DataError(
            f"'{boxes.path}' is not a COCO annotation of one image: 'annotation' must be a list of objects with "
            "category_id and bbox"
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
            raise DataError(f"{where}: a line is a label number, xmin, ymin, xmax and ymax")
        xmin, ymin, xmax, ymax = (_number(corner, f"{where}: a corner") for corner in corners)
        boxes.add(label, (xmin, ymin, xmax, ymax), False)


READERS: dict[str, Callable[[bytes, Size, BoxWriter], None]] = {"xml": _read_xml, "json": _read_json, "txt": _read_txt}
"""Reader of each `label_type`."""


# -- conversion ----------------------------------------------------------------------------------------


ANNOTATION_TYPES = ("classification", "detection")
LABEL_TYPES = tuple(READERS)
_DATUM_TAG = b"\x0a"


@dataclass(frozen=True)
class AnnotationOptions:
    """Annotation options, named as Caffe's flags.

    Args:
        anno_type: one of `ANNOTATION_TYPES`: the list has a label or an annotation file per image.
        label_type: format of the annotation files, one of `LABEL_TYPES`.
        label_map_file: a LabelMap; None if the files have label numbers (txt).
        check_label: refuse duplicate names in the label map.
    """

    anno_type: str = "classification"
    label_type: str = "xml"
    label_map_file: Path | None = None
    check_label: bool = False

    def labels(self) -> dict[str, int]:
        """Return the labels of the label map; empty without one.

        Raises:
            ConfigError: `label_type` needs a label map and there is none.
            DataError: the label map cannot be read or has duplicate names.
        """
        if self.label_map_file is not None:
            return read_label_map(self.label_map_file, self.check_label)
        if self.label_type != "txt":
            raise ConfigError(
                f"{self.label_type} annotations have class names: pass their labels with --label_map_file; `caffepy "
                "create_label_map` writes label maps"
            )
        return {}


def convert_annotation_set(
    root: str,
    listing: Path,
    target: Database,
    images: ImageOptions,
    annotations: AnnotationOptions,
    seed: int | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Create a database of AnnotatedDatums from a list of images with labels or annotation files.

    Keys are those of `convert_image_set`. An image whose annotation file is missing gets no boxes and is logged.

    Args:
        root: prefix of each path; a slash is added after a folder.
        listing: the list: a path and a label per line, or two paths.
        target: the database.
        images: image options.
        annotations: annotation options.
        seed: seed of a random order; None: the list's order.
        progress: reports the progress.

    Raises:
        ConfigError: a label map is needed and there is none.
        DataError: as in `convert_image_set`, or a label map or annotation file is invalid.
        RunError: writing failed.
    """
    prefix = root_prefix(root)
    reader: Reader
    if annotations.anno_type == "classification":
        entries = [ListEntry(number, name, prefix + name, label) for number, name, label in labelled_lines(listing)]
        reader = partial(_read_labelled, images)
    else:
        entries = _paired_entries(listing, prefix)
        reader = boxed_reader(images, annotations.label_type, annotations.labels())
    return convert_entries(entries, listing, target, images, reader, seed, progress or Progress())


def boxed_reader(
    images: ImageOptions, label_type: str, labels: Mapping[str, int], check: BoxCheck | None = None
) -> Reader:
    """Return the reader of `convert_entries` that makes AnnotatedDatums of images with annotation files.

    Args:
        images: image options.
        label_type: format of the annotation files, one of `LABEL_TYPES`.
        labels: label of each class name.
        check: as in `BoxWriter`.
    """
    return partial(_read_boxed, images, label_type, labels, check)


def write_image_sizes(
    root: str,
    listing: Path,
    target: Path,
    name_id_file: Path | None = None,
    threads: int | None = None,
    progress: Progress | None = None,
) -> ConversionResult:
    """Write name, height and width of each image of a list (SSD's `get_image_size.cpp`).

    Args:
        root: prefix of each path.
        listing: the list; text after the path is ignored.
        target: the file to write.
        name_id_file: a name and a number per line; the number replaces the name.
        threads: decoding threads; None: one per core.
        progress: reports the progress.

    Raises:
        DataError: a list cannot be read, all images are unreadable, or an image's name has no number.
        RunError: writing failed.
    """
    progress, prefix = progress or Progress(), root_prefix(root)
    entries = _paired_entries(listing, prefix)
    numbers = None if name_id_file is None else {name: number for _, name, number in labelled_lines(name_id_file)}
    rows, progress.total = [], len(entries)
    with single_threaded_opencv():
        for entry, size in ordered_map(_try_size, entries, threads or cpu_count()):
            progress.advance()
            if isinstance(size, UnreadableImageError):
                logger.error("'%s':%d: skipped: '%s' %s", listing, entry.number, entry.path, size)
            else:
                rows.append(f"{_name_or_number(entry, numbers, name_id_file)} {size[0]} {size[1]}\n")
    if not rows:
        raise DataError(f"none of the images of '{listing}' can be read; check the root folder '{root}'")
    with atomic_write(target) as file:
        file.write(os.fsencode("".join(rows)))
    progress.finish(len(rows))
    return ConversionResult(len(rows), len(entries) - len(rows))


def _paired_entries(listing: Path, prefix: str) -> list[ListEntry]:
    """Return the entries of a list of two paths per line; paths must not contain spaces, as in Caffe."""
    entries = []
    for number, text in list_lines(listing):
        words = text.split()
        if len(words) != 2:
            raise DataError(
                f"'{listing}':{number}: has {len(words)} words; a line is an image and its annotation; white space "
                "divides, so a path cannot contain any"
            )
        entries.append(ListEntry(number, words[0], prefix + words[0], -1, prefix + words[1]))
    return entries


def _read_labelled(options: ImageOptions, entry: ListEntry) -> tuple[ImageRecord, bytes]:
    image = read_image_record(entry.path, entry.label, options, with_shape=True)
    return image, b"".join((field_header(_DATUM_TAG, len(image.datum)), image.datum))


def _read_boxed(
    options: ImageOptions, label_type: str, labels: Mapping[str, int], check: BoxCheck | None, entry: ListEntry
) -> tuple[ImageRecord, bytes]:
    image = read_image_record(entry.path, entry.label, options, with_shape=True)
    rest = caffe_pb2.AnnotatedDatum(type=caffe_pb2.AnnotatedDatum.BBOX)
    if os.path.exists(entry.annotation):
        read_boxes(entry.annotation, label_type, image.original, labels, rest, check)
    else:
        logger.warning("'%s' does not exist: '%s' gets no boxes", entry.annotation, entry.path)
    return image, b"".join((field_header(_DATUM_TAG, len(image.datum)), image.datum, rest.SerializeToString()))


def _try_size(entry: ListEntry) -> tuple[ListEntry, tuple[int, int] | UnreadableImageError]:
    try:
        return entry, image_size(entry.path)
    except UnreadableImageError as error:
        return entry, error


def _name_or_number(entry: ListEntry, numbers: Mapping[str, int] | None, origin: Path | None) -> str:
    name = PurePath(entry.name).stem
    if numbers is None:
        return name
    if name not in numbers:
        raise DataError(f"'{origin}' has no number for '{name}'; each line is a name and a number")
    return str(numbers[name])
