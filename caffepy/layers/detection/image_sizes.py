"""The sizes of original images (name_size_file), and the conversion of boxes to their pixels (OutputBBox)."""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np

from caffepy.files import read_regular
from caffepy.layers.core.base import Layer
from caffepy.layers.detection.boxes import Rows, box_sizes, clip_boxes
from caffepy.proto import caffe_pb2

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
