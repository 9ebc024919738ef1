"""Window files of MS-CNN and Cascade R-CNN: images with objects and regions to ignore; and how both forks place images.

For each image a file has `# number`, path, channels, height, width, the number of objects, each object, the number of
regions, and x1, y1, x2, y2 of each region. An object is class, ignore, x1, y1, x2, y2 in MS-CNN's files, and class,
ignore, difficult, x1, y1, x2, y2 in Cascade R-CNN's.

The labels of anchors that ImageGtData and DetectionData give: which object each anchor is to predict.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from caffepy.data.boxes import EXACT, Boxes, overlaps
from caffepy.data.images import MAX_PIXELS, Pixels, decode_image, read_file, resize, rounded, to_pixels
from caffepy.data.random import SampleRng
from caffepy.data.sources.databases import hash_of
from caffepy.data.transform import check_transform
from caffepy.errors import DataError
from caffepy.layers.layer import Layer
from caffepy.utils.files import read_list

Floats = NDArray[np.float32]
_f32 = np.float32
_MAX_LIST_BYTES = 1 << 30
_MAX_COORDINATE = 1 << 24
"""In pixels: float32 represents all integers up to it."""
_CROP_FIRST, _MARGIN = 1.5, 1.2
"""Factor from which an image is cropped before it is enlarged, and the size of this crop relative to what is needed."""
_NOISE = 20
"""Range of the random shift of a crop, in pixels."""


# -- window files --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Entry:
    """One image of a window file.

    Args:
        path: with the root folder.
        size: height and width as in the file.
        labels: classes of the objects (n,).
        flags: ignore and difficult of the objects (n, 2).
        boxes: x1, y1, x2, y2 of the objects (n, 4).
        ignored: the same of the regions to ignore (m, 4).
    """

    path: str
    size: tuple[int, int]
    labels: Floats
    flags: NDArray[np.bool_]
    boxes: Floats
    ignored: Floats


class ObjectWindowSource:
    """The images of a window file.

    Args:
        path: of the file.
        root_folder: prefix of each image's path, without an added slash, as in the forks.
        difficult: whether objects have a column `difficult`.

    Raises:
        DataError: the file cannot be read, or has another format.
    """

    def __init__(self, path: Path, root_folder: str, difficult: bool) -> None:
        self.description = f"window file '{path}'"
        self.channels = 3
        self.entries: list[Entry] = []
        self._columns = 7 if difficult else 6
        text = read_list(path, _MAX_LIST_BYTES, self.description)
        self._read(iter(text.split()), root_folder)
        if not self.entries:
            raise DataError(f"{self.description} names no images")
        self._hash = hash_of(os.fsencode(text))

    def _read(self, words: Iterator[str], root: str) -> None:
        for word in words:
            number = len(self.entries)
            if word != "#":
                raise DataError(f"{self.description}: '{word[:40]}' where '#' and the number of an image was expected")
            try:
                next(words)
                path = root + next(words)
                self.channels, height, width, objects = (int(next(words)) for _ in range(4))
                rows = [[float(next(words)) for _ in range(self._columns)] for _ in range(objects)]
                regions = [[float(next(words)) for _ in range(4)] for _ in range(int(next(words)))]
            except (ValueError, StopIteration, RuntimeError) as error:
                raise DataError(f"{self.description}: image {number} is incomplete; {self._format}") from error
            self.entries.append(self._entry(path, (height, width), rows, regions))

    @property
    def _format(self) -> str:
        columns = "class ignore x1 y1 x2 y2" if self._columns == 6 else "class ignore difficult x1 y1 x2 y2"
        return (
            f"each is '# number path channels height width objects', with '{columns}' for each object, and "
            "'regions', with 'x1 y1 x2 y2' for each region to ignore; white space divides, so a path cannot contain any"
        )

    def _entry(self, path: str, size: tuple[int, int], rows: list[list[float]], regions: list[list[float]]) -> Entry:
        table = np.array(rows, _f32).reshape(-1, self._columns)
        ignored = np.array(regions, _f32).reshape(-1, 4)
        number, values = len(self.entries), np.concatenate([table[:, -4:], ignored])
        if "\0" in path or min(size) <= 0 or not (np.abs(values) <= _MAX_COORDINATE).all():
            raise DataError(f"{self.description}: image {number} has an invalid path, size or box")
        if not (table[:, 0] >= 1).all():
            raise DataError(f"{self.description}: image {number} has an object of class 0 or less; 0 is the background")
        flags = np.zeros((len(table), 2), bool)
        flags[:, : self._columns - 5] = table[:, 1:-4] != 0
        return Entry(path, size, table[:, 0], flags, table[:, -4:].copy(), ignored)

    def __len__(self) -> int:
        return len(self.entries)

    def scene(self, number: int, nvidia: bool) -> Scene:
        """Return an image with its boxes.

        Raises:
            DataError: it cannot be read. The message follows the image's name.
        """
        entry = self.entries[number]
        pixels = to_pixels(decode_image(read_file(entry.path, "; see root_folder"), True, nvidia=nvidia))
        return Scene(pixels, entry.boxes, entry.ignored)

    def name(self, number: int) -> str:
        """Return the name of an image for messages."""
        return f"image {number} ('{self.entries[number].path}') of {self.description}"

    def fingerprint(self) -> dict[str, str]:
        return {"the number of images": str(len(self)), "the hash of the window file": self._hash}

    def close(self) -> None:
        """Does nothing: no file stays open between reads."""


def open_object_windows(layer: Layer, source: str, root_folder: str, difficult: bool) -> ObjectWindowSource:
    """Return the images of a window file.

    Args:
        layer: whose source it is.
        source: path of the file.
        root_folder: prefix of each image's path.
        difficult: whether objects have a column `difficult`.

    Raises:
        ConfigError: the images do not have 3 channels.
        DataError: the file cannot be read, or has another format.
    """
    windows = ObjectWindowSource(layer.context.resolve(source), root_folder, difficult)
    if windows.channels != 3:
        raise layer.error(f"its images have {windows.channels} channels, but they are read in color, with 3")
    return windows


# -- images --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Normaliser:
    """(pixel - mean) * scale.

    Args:
        mean: one value for each channel.
        scale: factor.
    """

    mean: Floats
    scale: float

    def apply(self, pixels: Pixels) -> Floats:
        """Return the values (3, H, W) of pixels (H, W, 3)."""
        return np.asarray((pixels.astype(_f32) - self.mean).transpose(2, 0, 1) * _f32(self.scale))


def read_normaliser(layer: Layer, scale: float) -> Normaliser:
    """Return the normaliser of a transform_param.

    Raises:
        ConfigError: it has a mean_file, or another number of mean_value than 1 or 3.
    """
    transform = layer.param.transform_param
    check_transform(transform, layer.where)
    if transform.HasField("mean_file"):
        raise layer.error("mean_file is not supported; give one or three mean_value")
    if len(transform.mean_value) not in (0, 1, 3):
        raise layer.error(f"transform_param has {len(transform.mean_value)} mean_value; give 1 or 3")
    values = np.array(list(transform.mean_value) or [0], _f32)
    return Normaliser(np.broadcast_to(values, (3,)).astype(_f32), scale)


@dataclass(frozen=True)
class Scene:
    """An image (H, W, 3) with the boxes (n, 4) of its objects and of regions to ignore, in its pixels."""

    pixels: Pixels
    boxes: Floats
    ignored: Floats

    @property
    def size(self) -> tuple[int, int]:
        """Height and width."""
        return self.pixels.shape[0], self.pixels.shape[1]

    def mirrored(self) -> Scene:
        """Return the mirrored image."""
        width = _f32(self.pixels.shape[1])
        boxes = [np.stack([width - b[:, 2], b[:, 1], width - b[:, 0], b[:, 3]], 1) for b in (self.boxes, self.ignored)]
        return Scene(np.ascontiguousarray(self.pixels[:, ::-1]), *boxes)

    def moved(self, factors: tuple[float, float] = (1, 1), shift: tuple[float, float] = (0, 0)) -> Scene:
        """Return the image with boxes that are multiplied by factors and then shifted, each x and y."""
        scale, offset = (np.array([*values, *values], _f32) for values in (factors, shift))
        return replace(self, boxes=self.boxes * scale + offset, ignored=self.ignored * scale + offset)

    def resized(self, height: int, width: int) -> Scene:
        """Return the image resized to a height and width, with its boxes.

        Raises:
            DataError: the size is 0, or exceeds the limit of images.
        """
        rows, columns = self.size
        if (height, width) == (rows, columns):
            return self
        moved = self.moved((float(_f32(width) / _f32(columns)), float(_f32(height) / _f32(rows))))
        return replace(moved, pixels=_resized(self.pixels, height, width))


def _resized(pixels: Pixels, height: int, width: int) -> Pixels:
    if height * width > MAX_PIXELS:
        raise DataError(f"would be resized to {height} x {width}; the limit is {MAX_PIXELS} pixels")
    return resize(pixels, height, width)


@dataclass(frozen=True)
class Placed:
    """A scene on a canvas.

    Args:
        scene: the part of the image that is copied, and boxes in pixels of the canvas.
        left: first column of this part on the canvas.
        top: first row.
    """

    scene: Scene
    left: int
    top: int

    def image(self, normaliser: Normaliser, canvas: tuple[int, int]) -> Floats:
        """Return the canvas (3, H, W) with the image; the rest is 0."""
        (height, width), out = self.scene.size, np.zeros((3, *canvas), _f32)
        out[:, self.top : self.top + height, self.left : self.left + width] = normaliser.apply(self.scene.pixels)
        return out


def place(
    scene: Scene, factors: tuple[float, float], center: tuple[float, float], size: tuple[int, int], rng: SampleRng
) -> Placed:
    """Rescale a scene and cut or pad it to a canvas, as both forks do.

    Args:
        scene: the image.
        factors: of width and height.
        center: x and y in the image that the crop is centered at, with a random shift.
        size: height and width of the canvas.
        rng: gives the shift.
    """
    if max(factors) > _CROP_FIRST:
        scene, center = _cropped(scene, factors, center)
    rows, columns = scene.size
    height, width = rounded(_f32(rows) * _f32(factors[1])), rounded(_f32(columns) * _f32(factors[0]))
    moved = scene.moved(factors)
    if factors != (1, 1):
        moved = replace(moved, pixels=_resized(scene.pixels, height, width))
    shifts = [rng.below(_NOISE) - _NOISE // 2 for _ in range(2)]
    left, first_column, columns = _along(width, size[1], center[0] * factors[0], shifts[0])
    top, first_row, rows = _along(height, size[0], center[1] * factors[1], shifts[1])
    pixels = moved.pixels[first_row : first_row + rows, first_column : first_column + columns]
    return Placed(replace(moved.moved(shift=(left - first_column, top - first_row)), pixels=pixels), left, top)


def _cropped(
    scene: Scene, factors: tuple[float, float], center: tuple[float, float]
) -> tuple[Scene, tuple[float, float]]:
    """Return the part of a scene that is needed when it is enlarged, and the center in it."""
    firsts, sides = [], []
    for side, factor, middle in zip(scene.size[::-1], factors, center, strict=True):
        length = min(rounded(_MARGIN * side / factor), side)
        firsts.append(min(max(rounded(middle - length * 0.5), 0), side - length))
        sides.append(length)
    (left, top), (width, height) = firsts, sides
    pixels = scene.pixels[top : top + height, left : left + width]
    moved = replace(scene.moved(shift=(-left, -top)), pixels=np.ascontiguousarray(pixels))
    return moved, (center[0] - left, center[1] - top)


def _along(length: int, canvas: int, center: float, shift: int) -> tuple[int, int, int]:
    """Return along one axis the first pixel on the canvas, the first pixel of the image, and the number of pixels."""
    if length < canvas:
        return min(max(rounded((canvas - length) / 2) + shift, 0), canvas - length), 0, length
    first = rounded(center) + shift - rounded(canvas / 2)
    return 0, min(max(first, 0), length - canvas), canvas


def random_center(size: tuple[int, int], canvas: tuple[int, int], rng: SampleRng) -> tuple[float, float]:
    """Return x and y of the center of a random crop of an image without objects."""
    found = []
    for side, length in zip(size[::-1], canvas[::-1], strict=True):
        found.append(side / 2 if length > side else rng.below(side - length + 1) + length / 2)
    return found[0], found[1]


def center_of(box: Floats) -> tuple[float, float]:
    """Return x and y of the center of x1, y1, x2, y2."""
    return float(box[0] + box[2]) / 2, float(box[1] + box[3]) / 2


CHANNELS = 6
"""Of a map: label, x and y of the object's center, width, height, overlap."""


@dataclass(frozen=True)
class LabelMap:
    """The anchors of one map: width and height, and the pixels from one position to the next."""

    width: int
    height: int
    stride: int

    def shape(self, height: int, width: int) -> tuple[int, int]:
        """Return the rows and columns for an image."""
        return rounded(_f32(height) / _f32(self.stride)), rounded(_f32(width) / _f32(self.stride))


def read_label_maps(
    layer: Layer, widths: Sequence[int], heights: Sequence[int], strides: Sequence[int], name: str
) -> list[LabelMap]:
    """Return the maps of the fields field_w, field_h and `name`.

    Raises:
        ConfigError: their numbers differ, or a value is 0.
    """
    if len({len(widths), len(heights), len(strides)}) != 1 or 0 in (*widths, *heights, *strides):
        raise layer.error(f"needs as many field_w as field_h and {name}, all above 0")
    return [LabelMap(*values) for values in zip(widths, heights, strides, strict=True)]


@dataclass(frozen=True)
class Matching:
    """How anchors match objects.

    Args:
        kind: EXACT for MS-CNN, CORNERS for Cascade R-CNN, whose boxes include their last pixel.
        foreground: overlap above which an anchor matches an object.
        ignored: overlap with regions to ignore from which an anchor is ignored.
        pickup: least overlap of an anchor with an object that no anchor matches, to give it a position.
        margin: how far an anchor may reach beyond the image, as a fraction of half its size; None: any.
        inside: least fraction of an anchor in the image; None: any.
    """

    kind: int
    foreground: float
    ignored: float
    pickup: float
    margin: float | None = None
    inside: float | None = None


@dataclass(frozen=True)
class Truth:
    """The objects of an image on its canvas: labels (n,), boxes x1, y1, x2, y2 (n, 4), ignored (n,)."""

    labels: Floats
    boxes: Floats
    ignored: NDArray[np.bool_]


def is_outside(boxes: Floats, least: tuple[float, float], canvas: tuple[int, int]) -> NDArray[np.bool_]:
    """Return which boxes (n, 4) have their center outside the canvas, or a smaller width or height than `least`."""
    centers, sides = (boxes[:, :2] + boxes[:, 2:]) / _f32(2), boxes[:, 2:] - boxes[:, :2] + _f32(1)
    limits = np.array(canvas[::-1], _f32)
    outside = (centers < 0) | (centers >= limits) | (sides < np.array(least, _f32))
    return outside[:, 0] | outside[:, 1]


def label_anchors(
    maps: list[LabelMap], matching: Matching, truth: Truth, placed: Placed, canvas: tuple[int, int]
) -> list[Floats]:
    """Return the maps (6, rows, columns) of one image on a canvas of this height and width.

    Anchors outside the image, and those to ignore, have label 0 and overlap 1: neither object nor background. An anchor
    that matches an ignored object has label 0 and its overlap.
    """
    outs = [np.empty((CHANNELS, *one.shape(*canvas)), _f32) for one in maps]
    extra = _f32(0 if matching.kind == EXACT else 1)
    objects = _boxes(truth.boxes, matching.kind)
    ignored = _boxes(placed.scene.ignored, matching.kind)
    count = len(truth.labels)
    matches, best, best_map = np.zeros(count, np.int64), np.zeros(count, _f32), np.zeros(count, np.int64)
    sides = np.concatenate(
        [(truth.boxes[:, :2] + truth.boxes[:, 2:]) / _f32(2), truth.boxes[:, 2:] - truth.boxes[:, :2] + extra], 1
    )
    for which, (one, out) in enumerate(zip(maps, outs, strict=True)):
        out[...] = 0
        anchors, inside = _anchors(one, out.shape[1:], placed, matching)
        near = overlaps(anchors[:, None], ignored[None], "IOFU").sum(1) >= _f32(matching.ignored)
        if matching.kind == EXACT:
            inside &= ~near.reshape(inside.shape)
        found = overlaps(objects[:, None], anchors[None]) * inside.reshape(-1)
        largest = found.max(0, initial=0)
        matched = largest > _f32(matching.foreground)
        index = found.argmax(0) if count else np.zeros(len(largest), np.int64)
        matches += np.bincount(index[matched], minlength=count)
        of_object = found.max(1, initial=0)
        best_map, best = np.where(of_object > best, which, best_map), np.maximum(best, of_object)
        flat = out.reshape(CHANNELS, -1).copy()
        chosen = index[matched]
        flat[0, matched] = np.where(truth.ignored[chosen], _f32(0), truth.labels[chosen])
        flat[1:5, matched] = sides[chosen].T
        flat[5] = np.where(inside.reshape(-1) & (matched | ~near), largest, _f32(1))
        out[...] = flat.reshape(out.shape)
    for number in np.flatnonzero(~truth.ignored & (matches == 0) & (best >= _f32(matching.pickup))):
        if maps:
            _pick_up(
                maps[best_map[number]],
                outs[best_map[number]],
                truth.labels[number],
                sides[number],
                None if matching.kind == EXACT else best[number],
            )
    return outs


def _boxes(corners: Floats, kind: int) -> Boxes:
    if kind != EXACT:
        return Boxes.from_corners(corners, kind)
    return Boxes.from_sizes(np.concatenate([corners[:, :2], corners[:, 2:] - corners[:, :2]], 1))


def _anchors(
    one: LabelMap, shape: tuple[int, ...], placed: Placed, matching: Matching
) -> tuple[Boxes, NDArray[np.bool_]]:
    """Return the anchors of all positions, and which positions (rows, columns) are in the image and not to ignore."""
    rows, columns = shape
    x, y = ((np.arange(count, dtype=_f32) + _f32(0.5)) * _f32(one.stride) for count in (columns, rows))
    radius = np.array([one.width, one.height], _f32) / _f32(2)
    centers = np.stack(np.broadcast_arrays(x, y[:, None]), -1)
    corners = np.concatenate([centers - radius, centers + radius], -1)
    height, width = placed.scene.size
    inside = np.zeros((rows, columns), bool)
    first_row, first_column, used_rows, used_columns = (
        rounded(_f32(value) / _f32(one.stride)) for value in (placed.top, placed.left, height, width)
    )
    inside[first_row : first_row + used_rows, first_column : first_column + used_columns] = True
    image = np.array([placed.left, placed.top, placed.left + width, placed.top + height], _f32)
    if matching.margin is not None:
        border = _f32(matching.margin) * radius
        inside &= ~(corners[..., :2] < image[:2] - border).any(-1) & ~(corners[..., 2:] >= image[2:] + border).any(-1)
    anchors = _boxes(corners.reshape(-1, 4), matching.kind)
    if matching.margin is None and matching.inside is not None:
        within = overlaps(anchors, _boxes(image[None], matching.kind), "IOFU")
        inside &= ~(within < _f32(matching.inside)).reshape(rows, columns)
    return anchors, inside


def _pick_up(one: LabelMap, out: Floats, label: np.float32, sides: Floats, overlap: np.float32 | None) -> None:
    """Give an object that no anchor matches the position below its center, unless that has an object."""
    row, column = (min(max(math.floor(float(sides[axis]) / one.stride), 0), out.shape[2 - axis] - 1) for axis in (1, 0))
    if out[0, row, column] > 0:
        return
    out[0, row, column], out[1:5, row, column] = label, sides
    if overlap is not None:
        out[5, row, column] = overlap


def map_shapes(strides: Sequence[int], image: Sequence[int]) -> list[tuple[int, ...]]:
    """Return the shapes of the maps of anchors of these strides, for an image of shape (C, H, W)."""
    return [(CHANNELS, *LabelMap(1, 1, max(stride, 1)).shape(image[1], image[2])) for stride in strides]
