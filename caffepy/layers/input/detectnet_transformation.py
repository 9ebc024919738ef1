"""DetectNetTransformation: augmentation of images, and coverage maps of their boxes.

Defined by NVIDIA Caffe's `detectnet_transform_layer.cpp` and `detectnet_coverage_rectangular.cpp`. Sizes are (height,
width). A coverage map marks the cells of a grid that lie in an object and holds the position of its box, in float32.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images import CUBIC, Pixels, call_opencv, cut, opencv, resize, rounded, to_pixels
from caffepy.data.mean import read_mean
from caffepy.data.random import SampleRng
from caffepy.errors import DataError
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, register_layer

_COLUMNS = 16
"""Columns of a label: left, top, width, height, alpha, class, and ten unused ones."""
_CLASS = 5


@register_layer("DetectNetTransformation")
class DetectNetTransformationLayer(Layer):
    """Augmented images and their ground truth for DetectNet (NVIDIA Caffe's `detectnet_transform_layer.cpp`).

    Bottoms: images (N, 3, H, W); labels (N, 1, rows, 16), whose first row holds the number of boxes and 16. Tops:
    images (N, 3, image_size_y, image_size_x); coverage maps (N, 8 + classes, grid rows, grid columns), see
    `CoverageMap`. TRAIN augments images at random, TEST resizes them. Computed on the host.

    Raises:
        ConfigError: a size is missing, or the mean does not fit.
        ShapeError: the bottoms have other shapes.
        DataError: a label is malformed.
    """

    bottoms = (2, 2)
    tops = (2, 2)
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detectnet_groundtruth_param
        if min(param.stride, param.image_size_x, param.image_size_y) < 1:
            raise self.error("detectnet_groundtruth_param needs stride, image_size_x and image_size_y of at least 1")
        transform = self.param.transform_param
        if len(transform.mean_value) not in (0, 1, 3):
            raise self.error(f"transform_param has {len(transform.mean_value)} mean_value; give 1 or 3")
        self._mean_file = None
        if transform.HasField("mean_file"):
            self._mean_file = read_mean(self.context.resolve(transform.mean_file))
            if self._mean_file.shape[0] != 3:
                raise self.error(f"the mean in mean_file has {self._mean_file.shape[0]} channels, but images have 3")
        self._output = (param.image_size_y, param.image_size_x)
        self._coverage = CoverageMap(param)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        images, labels = bottom[0].shape, bottom[1].shape
        if len(images) != 4 or images[1] != 3:
            raise self.shape_error("needs images of 3 channels", bottom[0])
        if len(labels) != 4 or labels[0] != images[0] or labels[1] != 1 or labels[3] != _COLUMNS:
            raise self.shape_error(f"needs labels of shape N 1 rows {_COLUMNS}", bottom[0], bottom[1])
        top[0].reshape((images[0], 3, *self._output))
        top[1].reshape((images[0], *self._coverage.shape))

    def capture_blocker(self) -> str | None:
        return "it transforms images on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        images, labels = (self.backend.to_host(blob.data) for blob in bottom)
        size = (images.shape[2], images.shape[3])
        mean, first = self._mean(size), self._first_sample(len(images))
        data = np.empty(top[0].shape, np.float32)
        maps = np.empty(top[1].shape, np.float32)
        for index, (image, rows) in enumerate(zip(images, labels, strict=True)):
            boxes = self._boxes(rows[0], index)
            augmentation = self._augmentation(size, first + index)
            pixels = augment_image(to_pixels(image), augmentation, mean, self._output)
            data[index] = pixels.transpose(2, 0, 1)
            classes = boxes[:, _CLASS].astype(np.int64)
            maps[index] = self._coverage.generate(augment_boxes(boxes[:, :4], augmentation, size), classes)
        self.backend.from_host(data, top[0].data)
        self.backend.from_host(maps, top[1].data)

    def _first_sample(self, count: int) -> int:
        """Return the number of the pass's first sample. Without a data layer, samples are numbered by pass."""
        if self.context.first_sample is not None:
            return self.first_sample()
        shard = self.context.shard
        return (self.context.passes.number * shard.parts + shard.part) * count

    def _augmentation(self, size: tuple[int, int], sample: int) -> Augmentation:
        if self.context.phase != caffe_pb2.TRAIN:
            return Augmentation(self._output)
        stream = self.random_stream()
        return draw_augmentation(
            self.param.detectnet_augmentation_param, size, self._output, SampleRng(stream.seed, stream.stream, sample)
        )

    def _mean(self, size: tuple[int, int]) -> NDArray[np.float32]:
        if self._mean_file is None:
            return np.array(list(self.param.transform_param.mean_value) or [0], np.float32)
        return resize(to_pixels(self._mean_file), *size, CUBIC)

    def _boxes(self, rows: NDArray[np.float32], index: int) -> NDArray[np.float32]:
        """Return the labels of one image."""
        count, length = rows[0, :2].tolist()
        name = f"{self.where}: '{self.bottom_names[1]}' of image {index} of the batch"
        if not (0 <= count <= len(rows) - 1) or int(length) != _COLUMNS:
            raise DataError(
                f"{name} begins with {count:g} and {length:g}; it must be the number of boxes, at most "
                f"{len(rows) - 1}, and {_COLUMNS}"
            )
        boxes = rows[1 : 1 + int(count)]
        if not np.isfinite(boxes[:, : _CLASS + 1]).all():
            raise DataError(f"{name} has a box or class that is not finite")
        return boxes


# -- augmentation --------------------------------------------------------------------------------------


Floats = NDArray[np.float32]
Size = tuple[int, int]
_f32 = np.float32
_EPSILON = float(np.finfo(np.float32).eps)
_MAX_SIDE = 1 << 15


@dataclass(frozen=True)
class Augmentation:
    """The random parameters of one image's augmentation.

    Args:
        scale: size after resizing.
        crop: first row and column of the output in the resized and rotated image; may be negative.
        hue: rotation of the hue in degrees.
        saturation: factor on the saturation.
        flip: whether to mirror left to right.
        rotation: in degrees.
    """

    scale: Size
    crop: tuple[int, int] = (0, 0)
    hue: float = 0.0
    saturation: float = 1.0
    flip: bool = False
    rotation: float = 0.0

    @property
    def rotates(self) -> bool:
        return abs(self.rotation) > _EPSILON


def draw_augmentation(
    param: caffe_pb2.DetectNetAugmentationParameter, size: Size, output: Size, rng: SampleRng
) -> Augmentation:
    """Draw the augmentation of an image in training."""

    def happens(probability: float) -> bool:
        return rng.uniform(0, 1) <= probability

    def symmetric(limit: float) -> float:
        return rng.uniform(-limit, limit)

    augmentation = Augmentation(size)
    if happens(param.hue_rotation_prob):
        augmentation = replace(augmentation, hue=max(min(symmetric(param.hue_rotation), 180.0), -180.0))
    if happens(param.desaturation_prob):
        augmentation = replace(augmentation, saturation=1 - rng.uniform(0, 1) * param.desaturation_max)
    augmentation = replace(augmentation, flip=happens(param.flip_prob))
    if happens(param.scale_prob):
        factor = _f32(rng.uniform(param.scale_min, param.scale_max))
        augmentation = replace(augmentation, scale=(rounded(float(size[0] * factor)), rounded(float(size[1] * factor))))
    if happens(param.rotation_prob):
        augmentation = replace(augmentation, rotation=symmetric(param.max_rotate_degree))
    if max(augmentation.scale) > _MAX_SIDE or min(augmentation.scale) < 1:
        raise DataError(
            f"would be resized to {augmentation.scale[0]} x {augmentation.scale[1]}; see scale_min and scale_max"
        )
    rotated = rotated_size(augmentation.scale, augmentation.rotation) if augmentation.rotates else augmentation.scale
    fractions, shifts = (0.5, 0.5), (0, 0)
    if happens(param.crop_prob):
        fractions, shifts = (rng.uniform(0, 1), rng.uniform(0, 1)), (param.shift_y, param.shift_x)
    top, left = (
        rounded(fraction * (side - output_side + shift) - shift // 2)
        for fraction, side, output_side, shift in zip(fractions, rotated, output, shifts, strict=True)
    )
    return replace(augmentation, crop=(top, left))


def augment_image(pixels: Pixels, augmentation: Augmentation, mean: Floats, output: Size) -> Pixels:
    """Return the augmented image less the mean."""
    cv2 = opencv()
    pixels = pixels * _f32(1 / 255)
    if abs(augmentation.hue) > _EPSILON or augmentation.saturation < 1 - 1 / 255:
        pixels = _change_colors(pixels, augmentation)
    pixels = pixels - mean * _f32(1 / 255)
    if augmentation.flip:
        pixels = pixels[:, ::-1]
    pixels = np.ascontiguousarray(pixels)
    if pixels.shape[:2] != augmentation.scale:
        pixels = resize(pixels, *augmentation.scale, CUBIC)
    if augmentation.rotates:
        size = rotated_size(pixels.shape[:2], augmentation.rotation)
        matrix, canvas = _rotation_matrix(pixels.shape[:2], augmentation.rotation), np.zeros((*size, 3), np.float32)
        pixels = call_opencv("warpAffine", pixels, matrix, size[::-1], canvas, cv2.INTER_LINEAR, cv2.BORDER_TRANSPARENT)
    result: Pixels = cut(pixels, *augmentation.crop, output) * _f32(255)
    return result


def _change_colors(pixels: Pixels, augmentation: Augmentation) -> Pixels:
    cv2 = opencv()
    hsv = np.array(call_opencv("cvtColor", pixels, cv2.COLOR_BGR2HSV))
    hsv[:, :, 0] += _f32(augmentation.hue if abs(augmentation.hue) > _EPSILON else 0)
    if augmentation.saturation < 1 - 1 / 255:
        hsv[:, :, 1] *= _f32(augmentation.saturation)
    return call_opencv("cvtColor", hsv, cv2.COLOR_HSV2BGR)


def augment_boxes(boxes: Floats, augmentation: Augmentation, size: Size) -> Floats:
    """Return the augmented boxes (boxes, 4), as left, top, width and height, of an image of `size`."""
    boxes = boxes.astype(np.float32)
    if augmentation.flip:
        boxes[:, 0] = _f32(size[1]) - boxes[:, 0] - boxes[:, 2] - _f32(1)
    if augmentation.scale != size:
        factors = np.array(augmentation.scale[::-1], np.float32) / np.array(size[::-1], np.float32)
        boxes *= np.tile(factors, 2)
    if augmentation.rotates:
        boxes = _rotate_boxes(boxes, _rotation_matrix(augmentation.scale, augmentation.rotation).astype(np.float32))
    boxes[:, :2] -= np.array(augmentation.crop[::-1], np.float32)
    return boxes


def _rotate_boxes(boxes: Floats, matrix: Floats) -> Floats:
    """Move the centres of boxes by a rotation. The boxes keep their sizes and stay upright."""
    high = boxes[:, :2] + boxes[:, 2:]
    center = (boxes[:, :2] + high) * _f32(0.5)
    moved = center @ matrix[:, :2].T + matrix[:, 2]
    return np.concatenate((moved - (high - center), boxes[:, 2:]), 1)


def _bounds(center: tuple[float, float], size: Size, rotation: float) -> tuple[int, int, int, int]:
    """Return left, top, width and height in whole pixels of a rotated rectangle (`cv::RotatedRect::boundingRect`)."""
    points = opencv().boxPoints((center, (size[1], size[0]), rotation))
    (left, top), (right, bottom) = np.floor(points.min(0)).astype(int), np.ceil(points.max(0)).astype(int)
    return int(left), int(top), int(right - left + 1), int(bottom - top + 1)


def rotated_size(size: Size, rotation: float) -> Size:
    """Return the size of the bounding box of a rotated image."""
    _, _, width, height = _bounds((size[1] // 2, size[0] // 2), size, rotation)
    return height, width


def _rotation_matrix(size: Size, rotation: float) -> NDArray[np.float64]:
    """Return the matrix (2, 3) that rotates an image about its centre and moves its bounding box to the origin."""
    cv2 = opencv()
    center = (size[1] * 0.5, size[0] * 0.5)
    left, top, _, _ = _bounds(center, size, rotation)
    before = cv2.boxPoints((center, (size[1], size[0]), 0.0))
    after = cv2.boxPoints(((center[0] - left, center[1] - top), (size[1], size[0]), rotation))
    return np.asarray(cv2.getAffineTransform(before[:3], after[:3]), np.float64)


# -- coverage maps -------------------------------------------------------------------------------------


_MIN_COVERAGE = np.finfo(np.float32).eps
CHANNELS = 8
"""Channels before those of the classes: object present; left, top, right and bottom of the box relative to the cell's
corner; 1 / width; 1 / height; norm."""
_Parameter = caffe_pb2.DetectNetGroundTruthParameter


class CoverageMap:
    """Computes coverage maps.

    Args:
        param: the layer's detectnet_groundtruth_param.
    """

    def __init__(self, param: caffe_pb2.DetectNetGroundTruthParameter) -> None:
        self._param = param
        self._classes = {one.src: one.dst for one in param.object_class} or {1: 0}
        size = np.array([param.image_size_x, param.image_size_y], np.float32)
        self._image = np.concatenate((np.zeros(2, np.float32), size))
        columns, rows = np.rint(size * _f32(1.0 / param.stride)).astype(int).tolist()
        self.shape: tuple[int, int, int] = (CHANNELS + max(self._classes.values()) + 1, rows, columns)
        """Channels, rows and columns of a map."""

    def generate(self, boxes: Floats, classes: NDArray[np.int64]) -> Floats:
        """Return the map of one image, with the shape of `shape`.

        Args:
            boxes: (boxes, 4): left, top, width and height in pixels.
            classes: the class of each box in the labels.
        """
        result = np.zeros(self.shape, np.float32)
        for box, number in zip(boxes, classes.tolist(), strict=True):
            if self._param.crop_bboxes:
                box = _intersection(box, self._image)
            if number in self._classes and box[2] * box[3] >= _MIN_COVERAGE:
                self._mark(result, box, CHANNELS + self._classes[number])
        return result

    def _mark(self, result: Floats, box: Floats, channel: int) -> None:
        stride = _f32(self._param.stride)
        covered = self._covered(box)
        low = np.floor(covered[:2] / stride)
        high = np.ceil((covered[:2] + covered[2:]) / stride)
        bounds = np.clip(np.stack((low, high)), 0, self.shape[:0:-1]).astype(int)
        (left, top), (right, bottom) = bounds.tolist()
        if right <= left or bottom <= top:
            return
        corners = [np.arange(begin, end, dtype=np.float32) * stride for begin, end in ((left, right), (top, bottom))]
        sides = [
            np.minimum(corner + stride, covered[axis] + covered[2 + axis]) - np.maximum(corner, covered[axis])
            for axis, corner in enumerate(corners)
        ]
        shared = np.maximum(sides[1], 0)[:, None] * np.maximum(sides[0], 0)
        inside = shared / (stride * stride) > _MIN_COVERAGE
        part = result[:, top:bottom, left:right]
        part[:, inside] = self._values(box, covered, corners, channel)[:, inside]

    def _covered(self, box: Floats) -> Floats:
        """Return the covered region: the box scaled by scale_cvg about its centre, limited by min_ or max_cvg_len."""
        param, size = self._param, box[2:]
        center = (box[:2] + (box[:2] + size)) * _f32(0.5)
        shrunk = size * _f32(param.scale_cvg)
        if param.gridbox_type == _Parameter.GRIDBOX_MIN:
            shrunk = np.minimum(size, np.maximum(_f32(param.min_cvg_len), shrunk))
        else:
            shrunk = np.minimum(_f32(param.max_cvg_len), shrunk)
        half = shrunk * _f32(0.5)
        return np.concatenate((center - half, (center + half) - (center - half)))

    def _values(self, box: Floats, covered: Floats, corners: list[Floats], channel: int) -> Floats:
        """Return all channels of the cells with these left and top corners."""
        norm = _f32(self._param.stride) ** 2 / (covered[2] * covered[3])
        values = np.zeros((self.shape[0], corners[1].size, corners[0].size), np.float32)
        values[0] = values[channel] = 1
        values[1], values[2] = box[0] - corners[0], (box[1] - corners[1])[:, None]
        values[3], values[4] = box[0] + box[2] - corners[0], (box[1] + box[3] - corners[1])[:, None]
        values[5], values[6] = _f32(1) / box[2], _f32(1) / box[3]
        values[7] = norm if self._param.obj_norm else max(norm, _f32(1))
        return values


def _intersection(box: Floats, other: Floats) -> Floats:
    """Return the intersection of two rectangles, all 0 if they are disjoint, as OpenCV does."""
    low = np.maximum(box[:2], other[:2])
    size = np.minimum(box[:2] + box[2:], other[:2] + other[2:]) - low
    return np.concatenate((low, size)) if (size > 0).all() else np.zeros(4, np.float32)
