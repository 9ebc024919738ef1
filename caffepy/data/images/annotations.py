"""AnnotatedDatum: SSD's record of one image and its boxes, parsed and checked."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray

from caffepy.errors import DataError
from caffepy.proto import caffe_pb2

Floats = NDArray[np.float32]
COLUMNS = 8
"""Of the rows that a net takes: item, label, instance, xmin, ymin, xmax, ymax, difficult."""
_MAX_BOXES = 1 << 16
"""Of one image: more would take the memory of a batch."""
_FARTHEST = 100.0
"""Widths or heights of the image that a corner may lie beyond it. Corners in pixels are mostly farther."""


@dataclass(frozen=True)
class Annotations:
    """The boxes of one image, in the order of the record.

    Args:
        labels: of their groups.
        instances: their numbers.
        boxes: (boxes, 4): xmin, ymin, xmax, ymax in parts of the image's width and height.
        difficult: whether they are hard to see.
    """

    labels: NDArray[np.int64]
    instances: NDArray[np.int64]
    boxes: Floats
    difficult: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.labels)

    def rows(self, item: int) -> Floats:
        """(boxes, 8) as `COLUMNS` says; `item` is the image's index in the batch."""
        rows = np.empty((len(self), COLUMNS), np.float32)
        rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 7] = item, self.labels, self.instances, self.difficult
        rows[:, 3:7] = self.boxes
        return rows

    def among(self, chosen: NDArray[np.bool_], boxes: Floats) -> Annotations:
        """Those that are chosen, with other boxes."""
        return Annotations(self.labels[chosen], self.instances[chosen], boxes[chosen], self.difficult[chosen])


def parse_annotated_datum(record: bytes | memoryview) -> tuple[caffe_pb2.AnnotatedDatum, Annotations]:
    """Parse a record and check its boxes.

    Raises:
        DataError: it is no AnnotatedDatum, or its boxes cannot be boxes. The message continues a sentence that begins
            with the record's name.
    """
    try:
        parsed = caffe_pb2.AnnotatedDatum.FromString(bytes(record))
    except (DecodeError, ValueError) as error:
        raise DataError(
            f"is not an AnnotatedDatum ({error}); build the set again with `caffepy convert_annoset`"
        ) from error
    if not parsed.HasField("datum"):
        raise DataError("is an AnnotatedDatum without a datum; build the set again with `caffepy convert_annoset`")
    return parsed, _annotations(parsed)


def _annotations(parsed: caffe_pb2.AnnotatedDatum) -> Annotations:
    count = sum(len(group.annotation) for group in parsed.annotation_group)
    if count > _MAX_BOXES:
        raise DataError(f"has {count} boxes; more than {_MAX_BOXES} are refused")
    found = [(group.group_label, one) for group in parsed.annotation_group for one in group.annotation]
    values = [(one.bbox.xmin, one.bbox.ymin, one.bbox.xmax, one.bbox.ymax) for _, one in found]
    boxes = np.array(values, np.float32).reshape(-1, 4)
    if not (np.abs(boxes) <= _FARTHEST).all():  # neither is a NaN
        bad = boxes[~(np.abs(boxes) <= _FARTHEST).all(1)][0]
        raise DataError(
            f"has a box ({', '.join(f'{value:g}' for value in bad)}), which lies nowhere near the image; the corners "
            "must be in parts of its width and height, not in pixels"
        )
    return Annotations(
        np.array([label for label, _ in found], np.int64),
        np.array([one.instance_id for _, one in found], np.int64),
        boxes,
        np.array([one.bbox.difficult for _, one in found], np.bool_),
    )
