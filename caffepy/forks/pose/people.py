"""People in images: parts and connections, records of CPMData and OPData, their augmentation, and the maps.

A record is a Datum of raw planes: blue, green and red, then a plane whose rows hold numbers about the people, then, for
most, a mask of what is annotated. The formats and computations are those of `cpm_data_transformer.cpp` of CMU's
caffe_train and of `metaData.cpp`, `dataAugmentation.cpp` and `oPDataTransformer.cpp` of openpose_caffe_train.

The parts and connections in the databases and maps of OpenPose are those of `poseModel.cpp` of openpose_caffe_train.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from caffepy.data.datum import parse_datum
from caffepy.data.images import opencv, rounded
from caffepy.errors import ConfigError, DataError

# -- parts and connections -----------------------------------------------------------------------------

Pairs = tuple[tuple[int, int], ...]
Sources = tuple[tuple[int, ...], ...]


def pairs(text: str) -> Pairs:
    """Return the pairs of neighbours in chains of parts, such as "1-8-9" and "3..6"."""
    found: list[tuple[int, int]] = []
    for word in text.split():
        first, dots, last = word.partition("..")
        found += pairwise(range(int(first), int(last) + 1) if dots else map(int, word.split("-")))
    return tuple(found)


@dataclass(frozen=True)
class Skeleton:
    """What the maps show.

    Args:
        parts: number of parts.
        limbs: connections between parts, each with two maps.
        mirrored: pairs of parts that a flip swaps.
        background: whether there is a map of the background.
        small: parts whose map is narrower by SMALL_RATIO.
    """

    parts: int
    limbs: Pairs
    mirrored: Pairs
    background: bool = True
    small: frozenset[int] = frozenset()

    @property
    def channels(self) -> int:
        """Number of maps: of limbs, of parts, of the background."""
        return 2 * len(self.limbs) + self.parts + self.background

    def channels_of(self, parts: set[int]) -> list[int]:
        """Return the maps of these parts and of their limbs."""
        limbs = [i for i, limb in enumerate(self.limbs) if parts & set(limb)]
        return [2 * i + axis for i in limbs for axis in range(2)] + [2 * len(self.limbs) + part for part in parts]


@dataclass(frozen=True)
class PeopleSource:
    """How the people of a database become those of a skeleton.

    Args:
        skeleton: of the maps.
        category: COCO, MPII, PT, HAND, FACE or DOME.
        lmdb_parts: number of parts in the database.
        sources: for each part those of the database whose mean it is; none: the database lacks the part.
        masked: parts that the database does not annotate in all people: their maps do not count.
        masked_near: parts whose maps do not count near people.
        feet: indices of each knee and ankle, if the background around feet does not count.
    """

    skeleton: Skeleton
    category: str
    lmdb_parts: int
    sources: Sources
    masked: frozenset[int] = frozenset()
    masked_near: frozenset[int] = frozenset()
    feet: Pairs = field(default=())


SMALL_RATIO = 5.75 / 7

_LIMBS_18 = pairs("1-8 8-9 9-10 1-11 11-12 12-13 1-2 2-3 3-4 2-16 1-5 5-6 6-7 5-17 1-0 0-14 0-15 14-16 15-17")
_LIMBS_19 = pairs("1-8 9-10 10-11 8-9 8-12 12-13 13-14 1-2 2-3 3-4 2-17 1-5 5-6 6-7 5-18 1-0 0-15 0-16 15-17 16-18")
_LIMBS_23 = pairs(
    "0-1 1-2 2-3 0-4 4-5 5-6 7-8 8-9 10-11 11-12 0-13 13-15 0-14 14-16 12-17 17-18 12-19 9-20 20-21 9-22 1-7 4-10 "
    "1-15 4-16 15-16 7-10 1-3 4-6 7-9 10-12 3-6 9-12 3-7 6-10 9-21 12-18"
)
_BODY_25B = pairs(
    "0-1 0-2 1-3 2-4 0-5 0-6 5-7 6-8 7-9 8-10 5-11 6-12 11-13 12-14 13-15 14-16 15-19 19-20 15-21 16-22 22-23 16-24"
)
_MORE_25B = pairs("3-4 3-5 4-6 5-9 6-10 9-10 9-11 10-12 11-12 15-16")
_LEFT_HAND, _RIGHT_HAND, _FACE = 25, 45, 65
"""First part of each in the skeleton of 135 parts."""


def _hand(wrist: int, first: int) -> Pairs:
    return tuple(limb for i in range(5) for limb in pairwise((wrist, *range(first + 4 * i, first + 4 * i + 4))))


def _face() -> Pairs:
    inner = pairs(
        "0..16 0-17 16-26 17..26 21-27 22-27 27..30 30-33-32-31 33-34-35 27-39 27-42 36..41 42..47 33-51 48..59 48-60 "
        "54-64 60..67 36-68 39-68 42-69 45-69"
    )
    own = tuple((_FACE + a, _FACE + b) for a, b in inner)
    return ((0, _FACE + 30), (2, _FACE + 39), (1, _FACE + 42), *own)


_MIRRORED_18 = pairs("5-2 6-3 7-4 11-8 12-9 13-10 15-14 17-16")
_MIRRORED_19 = pairs("5-2 6-3 7-4 12-9 13-10 14-11 16-15 18-17")
_MIRRORED_23 = pairs("4-1 5-2 6-3 10-7 11-8 12-9 14-13 16-15 17-20 18-21 19-22")
_MIRRORED_25 = (*_MIRRORED_19, (19, 22), (20, 23), (21, 24))
_MIRRORED_25B = (*((i, i + 1) for i in range(1, 16, 2)), (19, 22), (20, 23), (21, 24))
_MIRRORED_FACE = (
    *((i, 16 - i) for i in range(8)),
    *((17 + i, 26 - i) for i in range(5)),
    *pairs("31-35 32-34"),
    *((36 + i, 45 - i) for i in range(4)),
    *pairs("40-47 41-46 48-54 49-53 50-52 55-59 56-58 60-64 61-63 65-67 68-69"),
)

_SKELETON_18 = Skeleton(18, _LIMBS_18, _MIRRORED_18)
_SKELETON_19 = Skeleton(19, _LIMBS_19, _MIRRORED_19)
_SKELETON_23 = Skeleton(23, _LIMBS_23, _MIRRORED_23)
_SKELETON_25 = Skeleton(25, (*_LIMBS_19, (14, 19), (19, 20), (14, 21), (11, 22), (22, 23), (11, 24)), _MIRRORED_25)
_SKELETON_25B = Skeleton(
    25, (*_BODY_25B, (5, 17), (5, 18), (6, 17), (6, 18), *_MORE_25B), _MIRRORED_25B, background=False
)
_SKELETON_135 = Skeleton(
    135,
    (*_BODY_25B, (5, 17), (17, 18), (6, 17), *_MORE_25B, *_hand(9, _LEFT_HAND), *_hand(10, _RIGHT_HAND), *_face()),
    (
        *_MIRRORED_25B,
        *((_LEFT_HAND + i, _RIGHT_HAND + i) for i in range(20)),
        *((_FACE + a, _FACE + b) for a, b in _MIRRORED_FACE),
    ),
    background=False,
    small=frozenset(range(_LEFT_HAND, 135)),
)


def from_parts(*sources: int | tuple[int, ...]) -> Sources:
    return tuple(source if isinstance(source, tuple) else (source,) for source in sources)


def _range(first: int, count: int) -> Sources:
    return tuple((i,) for i in range(first, first + count))


def _none(count: int) -> Sources:
    return ((),) * count


_COCO_18 = from_parts(0, (5, 6), 6, 8, 10, 5, 7, 9, 12, 14, 16, 11, 13, 15, 2, 1, 4, 3)
_COCO_19 = (*_COCO_18[:8], (11, 12), *_COCO_18[8:])
_COCO_23 = (*_COCO_18[:1], *_COCO_18[2:])
_FEET = _range(17, 6)
_MPII_25B = (*_none(5), (13,), (12,), *_none(10), (8,), (9,), *_none(6))
_EYES_AND_NOSE = from_parts((27, 28, 29, 30, 31, 32, 34, 35), (42, 43, 44, 45, 46, 47), (36, 37, 38, 39, 40, 41))
_FINGERS = frozenset(range(_LEFT_HAND, _FACE))
_FACE_PARTS = frozenset(range(_FACE, 135))
_MPII_PARTS, _FEET_PARTS = frozenset({17, 18}), frozenset(range(19, 25))


def _empty(sources: Sources) -> frozenset[int]:
    return frozenset(i for i, source in enumerate(sources) if not source)


def _plain(skeleton: Skeleton, category: str, lmdb_parts: int, sources: Sources) -> PeopleSource:
    """A model whose maps of parts that the database lacks do not count."""
    return PeopleSource(skeleton, category, lmdb_parts, sources, _empty(sources))


_FEET_OF_25, _FEET_OF_23, _FEET_OF_25B = ((10, 11), (13, 14)), ((8, 9), (11, 12)), ((13, 15), (14, 16))
_PT = from_parts(13, (), (), (), (), 9, 8, 10, 7, 11, 6, 3, 2, 4, 1, 5, 0, 12, 14, (), (), (), (), (), ())
_COCO_25B_17, _COCO_25B_23 = (*_range(0, 17), *_none(8)), (*_range(0, 17), *_none(2), *_FEET)
_HAND_21 = (*_none(10), (0,), *_none(34), *_range(1, 20), *_none(70))
_HAND_42 = (*_none(9), (0,), (21,), *_none(14), *_range(1, 20), *_range(22, 20), *_none(70))
_FACE_70 = (*_EYES_AND_NOSE, *_none(62), *_range(0, 68), *_EYES_AND_NOSE[:0:-1])

MODELS = {
    "COCO_18": PeopleSource(_SKELETON_18, "COCO", 17, _COCO_18),
    "DOME_18": PeopleSource(_SKELETON_18, "DOME", 19, (*_range(0, 8), *_range(9, 10))),
    "COCO_19": PeopleSource(_SKELETON_19, "COCO", 17, _COCO_19),
    "DOME_19": PeopleSource(_SKELETON_19, "DOME", 19, _range(0, 19)),
    "COCO_23": PeopleSource(_SKELETON_23, "COCO", 23, (*_COCO_23, *_FEET)),
    "COCO_23_17": PeopleSource(
        _SKELETON_23, "COCO", 17, (*_COCO_23, *_none(6)), frozenset(range(17, 23)), feet=_FEET_OF_23
    ),
    "COCO_25": PeopleSource(_SKELETON_25, "COCO", 23, (*_COCO_19, *_FEET), frozenset(range(19)) - {1, 8, 11, 14}),
    "COCO_25_17": PeopleSource(_SKELETON_25, "COCO", 17, (*_COCO_19, *_none(6)), _FEET_PARTS, feet=_FEET_OF_25),
    "COCO_25B_23": PeopleSource(_SKELETON_25B, "COCO", 23, _COCO_25B_23, frozenset(), _MPII_PARTS),
    "COCO_25B_17": PeopleSource(_SKELETON_25B, "COCO", 17, _COCO_25B_17, _FEET_PARTS, _MPII_PARTS, _FEET_OF_25B),
    "MPII_25B_16": _plain(_SKELETON_25B, "MPII", 16, _MPII_25B),
    "PT_25B_15": _plain(_SKELETON_25B, "PT", 15, _PT),
    "COCO_135_23": PeopleSource(
        _SKELETON_135, "COCO", 23, (*_COCO_25B_23, *_none(110)), frozenset(), _MPII_PARTS | _FINGERS | _FACE_PARTS
    ),
    "COCO_135_17": PeopleSource(
        _SKELETON_135,
        "COCO",
        17,
        (*_COCO_25B_17, *_none(110)),
        frozenset(),
        _MPII_PARTS | _FEET_PARTS | _FINGERS | _FACE_PARTS,
        _FEET_OF_25B,
    ),
    "MPII_135_16": _plain(_SKELETON_135, "MPII", 16, (*_MPII_25B, *_none(110))),
    "HAND_135_21": PeopleSource(
        _SKELETON_135, "HAND", 21, _HAND_21, _empty(_HAND_21) - {9, *range(_LEFT_HAND, _RIGHT_HAND)}
    ),
    "HAND_135_42": _plain(_SKELETON_135, "HAND", 42, _HAND_42),
    "FACE_135_70": PeopleSource(_SKELETON_135, "FACE", 70, _FACE_70),
    "DOME_135": PeopleSource(_SKELETON_135, "DOME", 135, _range(0, 135)),
}
"""By the name in the prototxt. Models of cars and of 59, 65 and 95 parts are not here."""


def model_named(name: str, where: str) -> PeopleSource:
    """Return a model of OpenPose.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in MODELS:
        raise ConfigError(f"{where}: there is no model '{name}'; there are {', '.join(MODELS)}")
    return MODELS[name]


# -- records -------------------------------------------------------------------------------------------

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


def _bytes_at(plane: Pixels, line: int, first: int, count: int) -> bytes:
    height, width = plane.shape
    if line >= height or first + count > width:
        raise DataError(f"is {height} x {width}; the numbers about its people need line {line + 1} with {count} bytes")
    return plane[line, first : first + count].tobytes()


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

    def floats(line: int, count: int) -> Doubles:
        return np.frombuffer(_bytes_at(plane, line, 0, 4 * count), "<f4").astype(np.float64)

    def text(line: int) -> str:
        return bytes(plane[line].tobytes()).partition(b"\0")[0].decode(errors="replace")

    height, width = floats(1, 2)
    others = _bytes_at(plane, 2, count_at, 1)[0]
    scales = [float(floats(4, 1)[0]), *(floats(_PERSON_LINES + others, others) if others else ())]
    people = []
    for index in range(others + 1):
        center_line = 3 if index == 0 else _PERSON_LINES + index - 1
        first = 5 if index == 0 else _PERSON_LINES + 1 + others + 3 * (index - 1)
        points = np.stack([floats(first, parts), floats(first + 1, parts)], axis=1) - offset
        states = floats(first + 2, parts)
        center = floats(center_line, 2) - offset
        if not all(np.isfinite(values).all() for values in (points, states, center)) or not scales[index] > 0:
            raise DataError(
                f"has a number about its person {index} that is not finite, or a scale that is not positive"
            )
        people.append(Person(center, scales[index], points, np.rint(states).astype(np.int64)))
    if not (np.isfinite([height, width]).all() and min(height, width) >= 1):
        raise DataError(f"has an image of {height:g} x {width:g} pixels")
    after = _PERSON_LINES if not others else _PERSON_LINES + 1 + _OTHER_LINES * others
    source = text(after) if after < plane.shape[0] else ""
    return People(text(0), (int(height), int(width)), people, source)


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
