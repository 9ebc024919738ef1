"""Sizes and overlaps of boxes, their encoding relative to prior boxes, objects, and pixels of the original images.

`bbox_util.cpp` of SSD's Caffe: JaccardOverlap, EncodeBBox, DecodeBBox, GetGroundTruth, OutputBBox. The columns of
ground truth are image, label, instance, xmin, ymin, xmax, ymax, difficult.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, exact_function
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Layer
from caffepy.utils.files import read_regular

Rows: TypeAlias = Any
"""A NumPy array of float32: boxes (..., 4), or one number for each box."""

CORNER = caffe_pb2.PriorBoxParameter.CORNER
CENTER_SIZE = caffe_pb2.PriorBoxParameter.CENTER_SIZE


@exact_function
def overlap(a: Floats, a_sizes: Floats, i: Int, b: Floats, b_sizes: Floats, j: Int, extra: Float) -> Float:
    """Return intersection over union of box i of `a` and box j of `b`; 0 if they are disjoint.

    Args:
        a: boxes.
        a_sizes: areas of `a`.
        i: index in `a`.
        b: boxes.
        b_sizes: areas of `b`.
        j: index in `b`.
        extra: added to the intersection's width and height: 0, or 1 for boxes in pixels. Disjoint boxes then have an
            intersection of 1, as in Caffe.
    """
    left, top, right, bottom = a[4 * i], a[4 * i + 1], a[4 * i + 2], a[4 * i + 3]
    other_left, other_top, other_right, other_bottom = b[4 * j], b[4 * j + 1], b[4 * j + 2], b[4 * j + 3]
    width = height = extra
    if not (other_left > right or other_right < left or other_top > bottom or other_bottom < top):
        # Not min and max: NaN must propagate as with C++'s.
        left = other_left if left < other_left else left
        top = other_top if top < other_top else top
        right = other_right if other_right < right else right
        bottom = other_bottom if other_bottom < bottom else bottom
        width += right - left
        height += bottom - top
    if width > 0 and height > 0:
        shared = width * height
        return shared / (a_sizes[i] + b_sizes[j] - shared)
    return np.float32(0)


def box_sizes(boxes: Rows, extra: float = 0.0) -> Rows:
    """Return the area of each box (..., 4), 0 if a side is negative. `extra` is added to the sides: 1 for pixels."""
    width, height = boxes[..., 2] - boxes[..., 0], boxes[..., 3] - boxes[..., 1]
    valid = ~((boxes[..., 2] < boxes[..., 0]) | (boxes[..., 3] < boxes[..., 1]))
    more = np.float32(extra)
    return np.where(valid, (width + more) * (height + more), np.float32(0))


def overlap_matrix(a: Rows, a_sizes: Rows, b: Rows, b_sizes: Rows, extra: float = 0.0) -> Rows:
    """Return the `overlap` of each box of `a` (A, 4) with each of `b` (B, 4), as (A, B); -1 in place of NaN."""
    one, other, more = a[:, None], b[None], np.float32(extra)
    meet = ~((other[..., :2] > one[..., 2:]) | (other[..., 2:] < one[..., :2])).any(-1)
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    sides = np.where(meet[..., None], sides, np.float32(0)) + more
    shared = sides[..., 0] * sides[..., 1]
    with np.errstate(invalid="ignore", divide="ignore"):
        ratio = shared / (a_sizes[:, None] + b_sizes[None] - shared)
    return np.nan_to_num(np.where((sides > 0).all(-1), ratio, np.float32(0)), nan=-1.0)


def clip_boxes(boxes: Rows, height: float = 1.0, width: float = 1.0) -> Rows:
    """Clip boxes to an image of this size."""
    limits = np.array([width, height, width, height], np.float32)
    return np.maximum(np.minimum(boxes, limits), np.float32(0))


@dataclass(frozen=True)
class Priors:
    """Prior boxes (P, 4), their sizes (P,) and the variances (P, 4) of predictions relative to them."""

    boxes: Rows
    sizes: Rows
    variances: Rows

    def select(self, indices: NDArray[np.intp]) -> Priors:
        """Return the priors with these indices, which may repeat."""
        return Priors(self.boxes[indices], self.sizes[indices], self.variances[indices])

    @property
    def extents(self) -> Rows:
        """Width and height (P, 2)."""
        return self.boxes[:, 2:] - self.boxes[:, :2]

    @property
    def centers(self) -> Rows:
        """x and y of the centers (P, 2)."""
        return (self.boxes[:, :2] + self.boxes[:, 2:]) / np.float32(2)


def read_priors(layer: Layer, values: Rows, code: int) -> Priors:
    """Return the priors in a PriorBox layer's top (1, 2, 4 P).

    Raises:
        DataError: a prior has a variance, or with another `code` than CORNER a side, that is not above 0.
    """
    boxes, variances = np.ascontiguousarray(values, np.float32).reshape(2, -1, 4)
    priors = Priors(boxes, box_sizes(boxes), variances)
    good = (variances > 0).all(1)
    if code != CORNER:
        good &= (priors.extents > 0).all(1)
    if not good.all():
        number = int(np.flatnonzero(~good)[0])
        raise bad_prior(layer, number, boxes[number], variances[number], code)
    return priors


def bad_prior(layer: Layer, number: int, box: Rows, variances: Rows, code: int) -> DataError:
    """Return the error that prior `number` of bottom 2 is invalid."""
    corners, factors = (" ".join(f"{v:g}" for v in values) for values in (box, variances))
    return layer.data_error(
        f"prior {number} of '{layer.bottom_names[2]}' is ({corners}) with variances ({factors}): it needs variances "
        "above 0" + (" and a width and height above 0" if code != CORNER else "") + "; correct its PriorBox layer"
    )


def decode(priors: Priors, codes: Rows, code: int, variance_in_target: bool) -> Rows:
    """Return the boxes (..., P, 4) that predictions encode.

    Args:
        priors: P priors.
        codes: the predictions (..., P, 4).
        code: CodeType: CORNER adds the prediction to the corners, CORNER_SIZE in units of the prior's sides;
            CENTER_SIZE adds it to the center likewise and multiplies the sides by exp(prediction).
        variance_in_target: whether predictions are not multiplied by the priors' variances.
    """
    codes = codes if variance_in_target else priors.variances * codes
    if code == CORNER:
        return np.ascontiguousarray(priors.boxes + codes)
    extents = priors.extents
    if code != CENTER_SIZE:
        return np.ascontiguousarray(priors.boxes + codes * np.tile(extents, 2))
    centers = codes[..., :2] * extents + priors.centers
    with np.errstate(over="ignore"):
        half = np.exp(codes[..., 2:].astype(np.float64)).astype(np.float32) * extents / np.float32(2)
    return np.ascontiguousarray(np.concatenate([centers - half, centers + half], axis=-1))


def encode(priors: Priors, boxes: Rows, code: int) -> Rows:
    """Return the targets of predictions for `boxes` (P, 4), one for each prior: the inverse of `decode`."""
    if code == CORNER:
        return (boxes - priors.boxes) / priors.variances
    extents = priors.extents
    if code != CENTER_SIZE:
        return (boxes - priors.boxes) / np.tile(extents, 2) / priors.variances
    centers = (boxes[:, :2] + boxes[:, 2:]) / np.float32(2)
    ratios = (boxes[:, 2:] - boxes[:, :2]) / extents
    return np.concatenate([(centers - priors.centers) / extents, np.log(ratios)], axis=1) / priors.variances


def softmax(x: Rows, axis: int) -> Rows:
    """Return e^x / sum of e^x along an axis."""
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


_Resize = caffe_pb2.ResizeParameter
_MAX_BYTES = 1 << 26
"""Size limit of a name_size_file."""


@dataclass(frozen=True)
class ImageSize:
    """An image's name and its size in pixels."""

    name: str
    height: int
    width: int


def read_image_sizes(layer: Layer, name: str) -> list[ImageSize]:
    """Read the lines "name height width" of a name_size_file.

    Raises:
        DataError: the file cannot be read, is empty, or has a malformed line.
    """
    path = layer.context.resolve(name)
    sizes = []
    try:
        lines = os.fsdecode(read_regular(path, _MAX_BYTES)).splitlines()
    except OSError as error:
        raise layer.data_error(f"name_size_file {path} cannot be read: {error.strerror}") from error
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 3 or not all(word.isdecimal() and len(word) < 10 and int(word) > 0 for word in words[1:]):
            raise layer.data_error(
                f"{path}, line {number}: '{line[:80]}' is not a name, a height and a width; white "
                "space divides, so a name cannot contain any"
            )
        sizes.append(ImageSize(words[0], int(words[1]), int(words[2])))
    if not sizes:
        raise layer.data_error(f"name_size_file {path} is empty; it needs a line 'name height width' for each image")
    return sizes


def check_resize(layer: Layer, param: caffe_pb2.ResizeParameter) -> None:
    """Check the resize_param of `to_pixels`.

    Raises:
        ConfigError: height or width is missing.
    """
    if not (param.height and param.width):
        raise layer.error("resize_param needs the height and width of the net's input, above 0")


def to_pixels(boxes: Rows, image: ImageSize, resize: caffe_pb2.ResizeParameter | None) -> tuple[Rows, Rows]:
    """Convert boxes (K, 4) of the net's input to pixels of the image, clipped to it (OutputBBox).

    Args:
        boxes: as fractions of the input's width and height.
        image: the original image.
        resize: how the image was resized to the net's input; None: warped.

    Returns:
        The boxes, and their areas in pixels, borders included.
    """
    height, width = image.height, image.width
    mode = resize.resize_mode if resize is not None else _Resize.WARP
    if resize is not None and mode == _Resize.FIT_SMALL_SIZE and resize.height_scale and resize.width_scale:
        scaled = boxes * np.array([resize.width_scale, resize.height_scale] * 2, np.float32)
        clipped = clip_boxes(scaled, height, width)
        return clipped, box_sizes(clipped)
    if resize is not None and mode == _Resize.FIT_LARGE_SIZE_AND_PAD:
        boxes = _without_padding(boxes, image, resize)
    pixels = clip_boxes(boxes) * np.array([width, height] * 2, np.float32)
    return pixels, box_sizes(pixels, 1.0 if width > 1 or height > 1 else 0.0)


def _without_padding(boxes: Rows, image: ImageSize, resize: caffe_pb2.ResizeParameter) -> Rows:
    """Convert fractions of the padded input to fractions of the image in it. As in Caffe, boxes outside stay."""
    input_height, input_width = np.float32(resize.height), np.float32(resize.width)
    aspect = np.float32(image.width) / np.float32(image.height)
    source = np.array([0, 0, 1, 1], np.float32)
    if aspect > input_width / input_height:
        part = (input_height - input_width / aspect) / np.float32(2) / input_height
        source[1], source[3] = part, 1 - float(part)
    else:
        part = (input_width - input_height * aspect) / np.float32(2) / input_width
        source[0], source[2] = part, 1 - float(part)
    outside = (boxes[:, :2] >= source[2:]).any(1) | (boxes[:, 2:] <= source[:2]).any(1)
    extents = np.tile(source[2:] - source[:2], 2)
    return np.where(outside[:, None], boxes, clip_boxes((boxes - np.tile(source[:2], 2)) / extents))


COLUMNS = 8


@dataclass(frozen=True)
class GroundTruth:
    """Objects, ordered by image and row."""

    images: NDArray[np.int64]
    labels: NDArray[np.int64]
    boxes: Rows
    sizes: Rows
    difficult: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.images)

    def begins(self, images: int) -> NDArray[np.int64]:
        """Return the index of each image's first object, and the number of objects at the end (images + 1,)."""
        return np.searchsorted(self.images, np.arange(images + 1))


def bad_object(layer: Layer, blob: str, number: int, row: Rows) -> DataError:
    """Return the error that row `number` of a blob has an image or a label that is not a number."""
    return layer.data_error(
        f"row {number} of '{blob}' has the image {row[0]:g} and the label {row[1]:g}; both must be whole numbers"
    )


def bad_class(layer: Layer, blob: str, image: int, label: int) -> DataError:
    """Return the error that an object of a blob has a label outside the classes of a MultiBoxLoss."""
    classes = layer.param.multibox_loss_param.num_classes
    return layer.data_error(
        f"'{blob}' has an object of class {label} in image {image} of the batch, but there are {classes} classes, 0 to "
        f"{classes - 1}; correct the labels or num_classes"
    )


def _rounded(values: Rows) -> NDArray[np.int64]:
    """Round halves away from 0, as C's round."""
    rounded: NDArray[np.int64] = np.trunc(values + np.copysign(np.float32(0.5), values)).astype(np.int64)
    return rounded


def read_ground_truth(
    layer: Layer, values: Rows, blob: str, background: int, stop_at_padding: bool = False, difficult: bool = True
) -> GroundTruth:
    """Return the objects in the rows of a blob (GetGroundTruth in `bbox_util.cpp`).

    Rows of image -1 are padding. Objects whose label is not above the background's are dropped.

    Args:
        layer: for messages.
        values: of the blob, 8 for each row.
        blob: name of the blob.
        background: label of the background.
        stop_at_padding: whether to ignore the rows after the first padding row.
        difficult: whether to include objects marked difficult.

    Raises:
        DataError: an image or a label is not finite.
    """
    rows = np.asarray(values, np.float32).reshape(-1, COLUMNS)
    if not np.isfinite(rows[:, :2]).all():
        number = int(np.flatnonzero(~np.isfinite(rows[:, :2]).all(1))[0])
        raise bad_object(layer, blob, number, rows[number])
    images = rows[:, 0].astype(np.int64)
    if stop_at_padding and (images == -1).any():
        end = int(np.argmax(images == -1))
        rows, images = rows[:end], images[:end]
    labels, hard = _rounded(rows[:, 1]), rows[:, 7] != 0
    included = np.flatnonzero((images != -1) & (labels > background) & (difficult | ~hard))
    order = included[np.argsort(images[included], kind="stable")]
    boxes = np.ascontiguousarray(rows[order, 3:7])
    return GroundTruth(images[order], labels[order], boxes, box_sizes(boxes), hard[order])
