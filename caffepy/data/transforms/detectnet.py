"""DetectNet's random changes of an image and of the boxes in it.

Defined by NVIDIA Caffe's `detectnet_transform_layer.cpp`. Sizes are (height, width).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from caffepy.data.images.datum import opencv
from caffepy.data.transforms.draws import Draws
from caffepy.data.transforms.pixels import Pixels, call
from caffepy.errors import DataError
from caffepy.proto import caffe_pb2

Floats = NDArray[np.float32]
Size = tuple[int, int]
_f32 = np.float32
_EPSILON = float(np.finfo(np.float32).eps)
_FARTHEST = 1 << 15


@dataclass(frozen=True)
class Augmentation:
    """What chance has decided for an image.

    Args:
        scale: the size that it is resized to.
        crop: the row and column of the resized and rotated image at which the output begins; may be negative.
        hue: rotation in degrees.
        saturation: factor.
        flip: left to right.
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
        """Whether the image is rotated at all."""
        return abs(self.rotation) > _EPSILON


def choose(param: caffe_pb2.DetectNetAugmentationParameter, size: Size, output: Size, draws: Draws) -> Augmentation:
    """What happens to an image in training.

    Args:
        param: the chances and ranges.
        size: the image's.
        output: the net's.
        draws: the sample's random numbers.
    """

    def happens(chance: float) -> bool:
        return draws.uniform(0, 1) <= chance

    def around_zero(most: float) -> float:
        return draws.uniform(-most, most)

    chosen = Augmentation(size)
    if happens(param.hue_rotation_prob):
        chosen = replace(chosen, hue=max(min(around_zero(param.hue_rotation), 180.0), -180.0))
    if happens(param.desaturation_prob):
        chosen = replace(chosen, saturation=1 - draws.uniform(0, 1) * param.desaturation_max)
    chosen = replace(chosen, flip=happens(param.flip_prob))
    if happens(param.scale_prob):
        factor = _f32(draws.uniform(param.scale_min, param.scale_max))
        chosen = replace(chosen, scale=(_rounded(float(size[0] * factor)), _rounded(float(size[1] * factor))))
    if happens(param.rotation_prob):
        chosen = replace(chosen, rotation=around_zero(param.max_rotate_degree))
    if max(chosen.scale) > _FARTHEST or min(chosen.scale) < 1:
        raise DataError(f"would be resized to {chosen.scale[0]} x {chosen.scale[1]}; see scale_min and scale_max")
    before = rotated_size(chosen.scale, chosen.rotation) if chosen.rotates else chosen.scale
    parts, shifts = (0.5, 0.5), (0, 0)
    if happens(param.crop_prob):
        parts, shifts = (draws.uniform(0, 1), draws.uniform(0, 1)), (param.shift_y, param.shift_x)
    top, left = (
        _rounded(part * (have - want + shift) - shift // 2)
        for part, have, want, shift in zip(parts, before, output, shifts, strict=True)
    )
    return replace(chosen, crop=(top, left))


def _rounded(value: float) -> int:
    """As C's round: halves away from 0."""
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


def augment_image(pixels: Pixels, chosen: Augmentation, mean: Floats, output: Size) -> Pixels:
    """The image minus the mean after what was chosen.

    Args:
        pixels: (H, W, 3), values from 0 to 255.
        chosen: what to do.
        mean: (H, W, 3), or anything that broadcasts to it.
        output: the result's size.
    """
    cv2 = opencv()
    pixels = pixels * _f32(1 / 255)
    if abs(chosen.hue) > _EPSILON or chosen.saturation < 1 - 1 / 255:
        pixels = _in_other_colors(pixels, chosen)
    pixels = pixels - mean * _f32(1 / 255)
    if chosen.flip:
        pixels = pixels[:, ::-1]
    pixels = np.ascontiguousarray(pixels)
    if pixels.shape[:2] != chosen.scale:
        pixels = call("resize", pixels, chosen.scale[::-1], interpolation=cv2.INTER_CUBIC)
    if chosen.rotates:
        size = rotated_size(pixels.shape[:2], chosen.rotation)
        matrix, canvas = _rotation_matrix(pixels.shape[:2], chosen.rotation), np.zeros((*size, 3), np.float32)
        pixels = call("warpAffine", pixels, matrix, size[::-1], canvas, cv2.INTER_LINEAR, cv2.BORDER_TRANSPARENT)
    result: Pixels = _cut(pixels, chosen.crop, output) * _f32(255)
    return result


def _in_other_colors(pixels: Pixels, chosen: Augmentation) -> Pixels:
    cv2 = opencv()
    hsv = np.array(call("cvtColor", pixels, cv2.COLOR_BGR2HSV))
    hsv[:, :, 0] += _f32(chosen.hue if abs(chosen.hue) > _EPSILON else 0)
    if chosen.saturation < 1 - 1 / 255:
        hsv[:, :, 1] *= _f32(chosen.saturation)
    return call("cvtColor", hsv, cv2.COLOR_HSV2BGR)


def _cut(pixels: Pixels, crop: tuple[int, int], output: Size) -> Floats:
    """The part from `crop` on; zeros outside of the image."""
    result = np.zeros((*output, 3), np.float32)
    begins = [max(start, 0) for start in crop]
    ends = [min(start + side, have) for start, side, have in zip(crop, output, pixels.shape[:2], strict=True)]
    if all(end > begin for begin, end in zip(begins, ends, strict=True)):
        top, left = (begin - start for begin, start in zip(begins, crop, strict=True))
        part = pixels[begins[0] : ends[0], begins[1] : ends[1]]
        result[top : top + part.shape[0], left : left + part.shape[1]] = part
    return result


def augment_boxes(boxes: Floats, chosen: Augmentation, size: Size) -> Floats:
    """(boxes, 4) left, top, width and height after what was chosen for their image of `size`."""
    boxes = boxes.astype(np.float32)
    if chosen.flip:
        boxes[:, 0] = _f32(size[1]) - boxes[:, 0] - boxes[:, 2] - _f32(1)
    if chosen.scale != size:
        factors = np.array(chosen.scale[::-1], np.float32) / np.array(size[::-1], np.float32)
        boxes *= np.tile(factors, 2)
    if chosen.rotates:
        boxes = _rotated(boxes, _rotation_matrix(chosen.scale, chosen.rotation).astype(np.float32))
    boxes[:, :2] -= np.array(chosen.crop[::-1], np.float32)
    return boxes


def _rotated(boxes: Floats, matrix: Floats) -> Floats:
    """Their centres move; they stay as large and upright."""
    high = boxes[:, :2] + boxes[:, 2:]
    center = (boxes[:, :2] + high) * _f32(0.5)
    moved = center @ matrix[:, :2].T + matrix[:, 2]
    return np.concatenate((moved - (high - center), boxes[:, 2:]), 1)


def _bounds(center: tuple[float, float], size: Size, rotation: float) -> tuple[int, int, int, int]:
    """Left, top, width and height in whole pixels of a rotated rectangle, as `cv::RotatedRect::boundingRect`."""
    points = opencv().boxPoints((center, (size[1], size[0]), rotation))
    (left, top), (right, bottom) = np.floor(points.min(0)).astype(int), np.ceil(points.max(0)).astype(int)
    return int(left), int(top), int(right - left + 1), int(bottom - top + 1)


def rotated_size(size: Size, rotation: float) -> Size:
    """Of the smallest upright rectangle around an image that is rotated."""
    _, _, width, height = _bounds((size[1] // 2, size[0] // 2), size, rotation)
    return height, width


def _rotation_matrix(size: Size, rotation: float) -> NDArray[np.float64]:
    """(2, 3): rotates an image about its centre and moves it so that nothing lies left of or above the origin."""
    cv2 = opencv()
    center = (size[1] * 0.5, size[0] * 0.5)
    left, top, _, _ = _bounds(center, size, rotation)
    before = cv2.boxPoints((center, (size[1], size[0]), 0.0))
    after = cv2.boxPoints(((center[0] - left, center[1] - top), (size[1], size[0]), rotation))
    return np.asarray(cv2.getAffineTransform(before[:3], after[:3]), np.float64)
