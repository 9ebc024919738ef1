"""DetectNet's coverage maps: which squares of a grid lie in an object, and where its box is.

Defined by NVIDIA Caffe's `detectnet_coverage_rectangular.cpp`; computed in float32.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.proto import caffe_pb2

Floats = NDArray[np.float32]
_f32 = np.float32
_EPSILON = np.finfo(np.float32).eps
CHANNELS = 8
"""Before those of the classes: whether there is an object, its left, top, right and bottom relative to the square's
corner, one over its width and height, and the norm."""
_Parameter = caffe_pb2.DetectNetGroundTruthParameter


class CoverageMap:
    """Makes the maps of one setting.

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
        """The map of one image.

        Args:
            boxes: (boxes, 4): left, top, width and height in pixels.
            classes: their numbers in the labels.
        """
        result = np.zeros(self.shape, np.float32)
        for box, number in zip(boxes, classes.tolist(), strict=True):
            if self._param.crop_bboxes:
                box = _intersection(box, self._image)
            if number in self._classes and box[2] * box[3] >= _EPSILON:
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
        inside = shared / (stride * stride) > _EPSILON
        part = result[:, top:bottom, left:right]
        part[:, inside] = self._values(box, covered, corners, channel)[:, inside]

    def _covered(self, box: Floats) -> Floats:
        """The region within the box that counts as covered: scale_cvg of it, at most or at least so many pixels."""
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
        """All channels of the squares with these left and top corners."""
        norm = _f32(self._param.stride) ** 2 / (covered[2] * covered[3])
        values = np.zeros((self.shape[0], corners[1].size, corners[0].size), np.float32)
        values[0] = values[channel] = 1
        values[1], values[2] = box[0] - corners[0], (box[1] - corners[1])[:, None]
        values[3], values[4] = box[0] + box[2] - corners[0], (box[1] + box[3] - corners[1])[:, None]
        values[5], values[6] = _f32(1) / box[2], _f32(1) / box[3]
        values[7] = norm if self._param.obj_norm else max(norm, _f32(1))
        return values


def _intersection(box: Floats, other: Floats) -> Floats:
    """As OpenCV's of two rectangles: all 0 where they share nothing."""
    low = np.maximum(box[:2], other[:2])
    size = np.minimum(box[:2] + box[2:], other[:2] + other[2:]) - low
    return np.concatenate((low, size)) if (size > 0).all() else np.zeros(4, np.float32)
