"""Files of boxes: VOC's XML, COCO's JSON an image, and plain text (SSD's `io.cpp`)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from xml.etree.ElementTree import Element, TreeBuilder
from xml.parsers import expat

import numpy as np

from caffepy.errors import DataError
from caffepy.files import read_regular
from caffepy.proto import caffe_pb2
from caffepy.registry import suggest

logger = logging.getLogger(__name__)

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
