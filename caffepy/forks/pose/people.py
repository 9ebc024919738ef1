"""People in images: records of CPMData and OPData, their augmentation, and the maps of parts and connections.

A record is a Datum of raw planes: blue, green and red, then a plane whose rows hold numbers about the people, then, for
most, a mask of what is annotated. The formats and computations are those of `cpm_data_transformer.cpp` of CMU's
caffe_train and of `metaData.cpp`, `dataAugmentation.cpp` and `oPDataTransformer.cpp` of openpose_caffe_train.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.datum import opencv, parse_datum
from caffepy.data.transforms.pixels import rounded
from caffepy.errors import DataError
from caffepy.forks.pose.skeletons import Sources

Floats = NDArray[np.float32]
Doubles = NDArray[np.float64]
Pixels = NDArray[np.uint8]

OCCLUDED, VISIBLE, OUTSIDE, MIXED, IGNORED = range(5)
"""States of a part: in the image but covered; visible; outside the image or not annotated; a mean of parts of which one
is outside; not annotated in the image."""
LARGEST_EXPONENT = 4.6052
"""Of a part's map, whose values below 1 % are 0."""
LIMB_WIDTH = 1
"""Distance from a limb, in elements of its maps, up to which these show its direction."""
_MAX_SIDE = 1 << 14
"""Limit of an augmented image's side, in pixels."""
_PERSON_LINES, _OTHER_LINES = 8, 4
"""Lines of the first person and of the image, and of each other person, one of them shared."""


@dataclass
class Person:
    """A person.

    Args:
        center: x and y.
        scale: the person's size as a part of 368 pixels.
        points: x and y of each part.
        states: of each part.
    """

    center: Doubles
    scale: float
    points: Doubles
    states: NDArray[np.int64]

    def move(self, matrix: Doubles) -> None:
        """Apply an affine transformation (2, 3)."""
        self.center = matrix[:, :2] @ self.center + matrix[:, 2]
        self.points = self.points @ matrix[:, :2].T + matrix[:, 2]

    def shown(self, *parts: int) -> bool:
        """Return whether all these parts are in the image."""
        return all(self.states[part] <= VISIBLE for part in parts)


@dataclass
class People:
    """The people of an image; the first is the one that the record is about.

    Args:
        dataset: name in the record.
        size: height and width of the image.
        people: of the image.
        source: file of the image, for records without it.
    """

    dataset: str
    size: tuple[int, int]
    people: list[Person]
    source: str = ""

    def move(self, matrix: Doubles) -> None:
        """Apply an affine transformation (2, 3) to all people."""
        for person in self.people:
            person.move(matrix)


def planes_of(record: bytes | memoryview) -> Pixels:
    """Return the planes (C, H, W) of a record.

    Raises:
        DataError: it is not a Datum of raw planes.
    """
    datum, data = parse_datum(record)
    shape = (datum.channels, datum.height, datum.width)
    if datum.encoded or min(shape) < 1 or math.prod(shape) != len(data):
        raise DataError(
            f"is {'an encoded image' if datum.encoded else f'a Datum of {len(data)} bytes and sizes {shape}'}; "
            "it must hold raw planes of bytes"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)


class Lines:
    """The numbers in the rows of a plane.

    Args:
        plane: (H, W).
    """

    def __init__(self, plane: Pixels) -> None:
        self._plane = plane

    def bytes_at(self, line: int, first: int, count: int) -> bytes:
        """Return bytes of a line.

        Raises:
            DataError: the plane has no such bytes.
        """
        height, width = self._plane.shape
        if line >= height or first + count > width:
            raise DataError(
                f"is {height} x {width}; the numbers about its people need line {line + 1} with {count} bytes"
            )
        return self._plane[line, first : first + count].tobytes()

    def floats(self, line: int, count: int, first: int = 0) -> Doubles:
        """Return numbers of a line, from byte `first` on."""
        return np.frombuffer(self.bytes_at(line, first, 4 * count), "<f4").astype(np.float64)

    def text(self, line: int) -> str:
        """Return a line's text, which ends with a byte of 0."""
        if line >= self._plane.shape[0]:
            raise DataError(f"has no line {line + 1} with the file of its image")
        content: bytes = self._plane[line].tobytes()
        return content.partition(b"\0")[0].decode(errors="replace")


def read_people(plane: Pixels, parts: int, count_at: int, offset: float) -> People:
    """Read the people of a record.

    Args:
        plane: the record's plane with the numbers.
        parts: number of parts of a person.
        count_at: byte of the third line with the number of other people.
        offset: subtracted from coordinates: 1 where those of the record begin at 1.

    Raises:
        DataError: the plane is too small, or a number is not finite.
    """
    lines = Lines(plane)
    height, width = lines.floats(1, 2)
    others = lines.bytes_at(2, count_at, 1)[0]
    scales = [float(lines.floats(4, 1)[0]), *lines.floats(_PERSON_LINES + others, others)] if others else [
        float(lines.floats(4, 1)[0])
    ]  # fmt: skip
    people = []
    for index in range(others + 1):
        center_line = 3 if index == 0 else _PERSON_LINES + index - 1
        first = 5 if index == 0 else _PERSON_LINES + 1 + others + 3 * (index - 1)
        points = np.stack([lines.floats(first, parts), lines.floats(first + 1, parts)], axis=1) - offset
        states = lines.floats(first + 2, parts)
        center = lines.floats(center_line, 2) - offset
        if not all(np.isfinite(values).all() for values in (points, states, center)) or not scales[index] > 0:
            raise DataError(
                f"has a number about its person {index} that is not finite, or a scale that is not positive"
            )
        people.append(Person(center, scales[index], points, np.rint(states).astype(np.int64)))
    if not (np.isfinite([height, width]).all() and min(height, width) >= 1):
        raise DataError(f"has an image of {height:g} x {width:g} pixels")
    after = _PERSON_LINES if not others else _PERSON_LINES + 1 + _OTHER_LINES * others
    source = lines.text(after) if after < plane.shape[0] else ""
    return People(lines.text(0), (int(height), int(width)), people, source)


def mark_outside(people: People, spared: Iterable[int]) -> None:
    """Give parts that lie outside the image the state OUTSIDE, except those with a state in `spared`."""
    height, width = people.size
    for person in people.people:
        x, y = person.points.T
        outside = (x < 0) | (y < 0) | (x >= width) | (y >= height)
        person.states[outside & ~np.isin(person.states, list(spared))] = OUTSIDE


def means(points: Doubles, sources: Sources) -> Doubles:
    """Return the mean of the sources of each part, or (0, 0)."""
    return np.array([points[list(source)].mean(axis=0) if source else (0.0, 0.0) for source in sources])


# -- geometry ------------------------------------------------------------------------------------------


def scaling(scale: float) -> Doubles:
    """Return the transformation that multiplies coordinates."""
    return np.array([[scale, 0, 0], [0, scale, 0]], np.float64)


def shift(x: float, y: float) -> Doubles:
    """Return the transformation that adds to coordinates."""
    return np.array([[1, 0, x], [0, 1, y]], np.float64)


def mirroring(width: int) -> Doubles:
    """Return the transformation that flips an image of this width."""
    return np.array([[-1, 0, width - 1], [0, 1, 0]], np.float64)


def rotation(size: tuple[int, int], degrees: float) -> tuple[Doubles, tuple[int, int]]:
    """Return a rotation about the image's center, and height and width of the box that the rotated image fills.

    Raises:
        DataError: the box is too large.
    """
    cv2, (height, width) = opencv(), size
    center = (width / 2, height / 2)
    corners = cv2.boxPoints((center, (width, height), degrees))
    (left, top), (right, bottom) = np.floor(corners.min(axis=0)), np.ceil(corners.max(axis=0))
    box = int(bottom - top) + 1, int(right - left) + 1
    if max(box) > _MAX_SIDE:
        raise DataError(
            f"becomes an image of {box[0]} x {box[1]} pixels; at most {_MAX_SIDE} along an axis are possible"
        )
    matrix = np.array(cv2.getRotationMatrix2D(center, degrees, 1.0), np.float64)
    matrix[:, 2] += (box[1] / 2 - center[0], box[0] / 2 - center[1])
    return matrix, box


def check_side(side: float) -> None:
    """Check the side of an image before it is resized.

    Raises:
        DataError: it is too large, or below 1 pixel.
    """
    if not 0.5 <= side <= _MAX_SIDE:
        raise DataError(f"becomes an image of {side:.0f} pixels along an axis; from 1 to {_MAX_SIDE} are possible")


def warped(image: Pixels, matrix: Doubles, size: tuple[int, int], border: int) -> Pixels:
    """Return an image (H, W) or (H, W, 3) under an affine transformation, interpolated cubically."""
    cv2 = opencv()
    result = cv2.warpAffine(
        image, matrix, size[::-1], flags=cv2.INTER_CUBIC, borderMode=cv2.BORDER_CONSTANT, borderValue=(border,) * 3
    )
    return np.asarray(result, np.uint8)


# -- maps ----------------------------------------------------------------------------------------------


class Grid:
    """The elements of a map.

    Args:
        height: of the map.
        width: of the map.
        stride: pixels of the image for one of the map.
    """

    def __init__(self, height: int, width: int, stride: int) -> None:
        self.height, self.width, self.stride = height, width, stride
        start = stride / 2 - 0.5
        self._x, self._y = start + stride * np.arange(width), (start + stride * np.arange(height))[:, None]

    def peak(self, point: Doubles, sigma: float) -> Doubles:
        """Return exp(-d^2 / (2 sigma^2)) for the distance d from a point of the image; 0 below 1 %."""
        exponent = ((self._x - point[0]) ** 2 + (self._y - point[1]) ** 2) / (2 * sigma * sigma)
        return np.where(exponent <= LARGEST_EXPONENT, np.exp(-exponent), 0.0)

    def limb(self, begin: Doubles, end: Doubles) -> tuple[NDArray[np.bool_], Doubles]:
        """Return the elements near a limb and its direction; none if both points agree.

        Args:
            begin: x and y of one part, in elements of the map.
            end: those of the other.
        """
        near = np.zeros((self.height, self.width), np.bool_)
        direction = end - begin
        length = math.hypot(*direction)
        if not length > 0:
            return near, direction
        direction = direction / length
        low = [max(rounded(value - LIMB_WIDTH), 0) for value in np.minimum(begin, end)]
        high = [
            min(rounded(value + LIMB_WIDTH), size)
            for value, size in zip(np.maximum(begin, end), (self.width, self.height), strict=True)
        ]
        if low[0] < high[0] and low[1] < high[1]:
            x, y = np.arange(low[0], high[0]) - begin[0], (np.arange(low[1], high[1]) - begin[1])[:, None]
            near[low[1] : high[1], low[0] : high[0]] = np.abs(x * direction[1] - y * direction[0]) <= LIMB_WIDTH
        return near, direction
