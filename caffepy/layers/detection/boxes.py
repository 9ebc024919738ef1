"""The encoding of boxes relative to prior boxes, objects, and pixels of the original images.

`bbox_util.cpp` of SSD's Caffe: EncodeBBox, DecodeBBox, GetGroundTruth, OutputBBox. The columns of
ground truth are image, label, instance, xmin, ymin, xmax, ymax, difficult.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.boxes import BORDERED, Boxes, Rows, box_areas
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer
from caffepy.utils.files import read_regular

CORNER = caffe_pb2.PriorBoxParameter.CORNER
CENTER_SIZE = caffe_pb2.PriorBoxParameter.CENTER_SIZE


def clip_boxes(boxes: Rows, height: float = 1.0, width: float = 1.0) -> Rows:
    """Clip boxes to an image of this size."""
    limits = np.array([width, height, width, height], np.float32)
    return np.maximum(np.minimum(boxes, limits), np.float32(0))


@dataclass(frozen=True)
class Priors:
    """Prior boxes (P, 4) and the variances (P, 4) of predictions relative to them."""

    boxes: Rows
    variances: Rows

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
    priors = Priors(boxes, variances)
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


def check_predictions(layer: Layer, bottom: Blobs, images: int, priors: int, codes: int, classes: int) -> None:
    """Check the sizes of the bottoms with location predictions and scores.

    Raises:
        ShapeError: there are not `codes` location predictions and `classes` scores for each prior of each image.
    """
    for blob, wanted, what in ((bottom[0], codes, "location predictions"), (bottom[1], classes, "scores")):
        if blob.count != images * priors * wanted:
            raise layer.shape_error(
                f"needs {wanted} {what} for each of the {priors} priors; num_classes is {classes}", blob, bottom[2]
            )


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


def to_pixels(boxes: Rows, image: ImageSize, resize: caffe_pb2.ResizeParameter | None) -> Boxes:
    """Convert boxes (K, 4) of the net's input to pixels of the image, clipped to it (OutputBBox).

    Args:
        boxes: as fractions of the input's width and height.
        image: the original image.
        resize: how the image was resized to the net's input; None: warped.

    Returns:
        The boxes. Their areas include the borders.
    """
    height, width = image.height, image.width
    mode = resize.resize_mode if resize is not None else _Resize.WARP
    if resize is not None and mode == _Resize.FIT_SMALL_SIZE and resize.height_scale and resize.width_scale:
        scaled = boxes * np.array([resize.width_scale, resize.height_scale] * 2, np.float32)
        clipped = clip_boxes(scaled, height, width)
        return Boxes(clipped, box_areas(clipped), BORDERED)
    if resize is not None and mode == _Resize.FIT_LARGE_SIZE_AND_PAD:
        boxes = _without_padding(boxes, image, resize)
    pixels = clip_boxes(boxes) * np.array([width, height] * 2, np.float32)
    return Boxes(pixels, box_areas(pixels, width > 1 or height > 1), BORDERED)


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
    return GroundTruth(images[order], labels[order], boxes, hard[order])
