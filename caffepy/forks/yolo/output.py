"""YoloDetectionOutput and Yolov3DetectionOutput: the boxes of YOLO 2 and 3."""

from __future__ import annotations

import numpy as np

from caffepy.data.boxes import Rows
from caffepy.forks.yolo.boxes import (
    CONFIDENCE,
    COORDINATES,
    center_overlaps,
    edges,
    grid_boxes,
    read_anchors,
    sigmoid,
    suppress_all,
)
from caffepy.layers.detection.boxes import softmax
from caffepy.layers.detection.output import COLUMNS, box_rows, empty_rows
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, host_threads, register_layer

_f32 = np.float32
_ONE = 0.999
"""Least overlap of a box with itself, within rounding errors."""
Candidates = tuple[Rows, Rows, Rows, Rows]
"""Image, class from 0, score, and box (n, 4) of each candidate."""


class GridOutputLayer(HostLayer):
    """Selects and suppresses the boxes of grids, on the host. Subclasses define `candidates`."""

    bottoms = (1, None)
    has_backward = False
    changes_shapes = True
    blocker = "it suppresses boxes on the host"

    _channels = 0
    """Channels that each bottom must have."""
    _threshold = 0.0
    """Overlap from which a box is suppressed."""
    _centers = False
    """Whether rows have classes from 0, and center and size of boxes."""

    def candidates(self, grid: int, values: Rows) -> Candidates:
        """Return the boxes of bottom number `grid` whose score is high enough."""
        raise NotImplementedError

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom:
            if len(blob.shape) != 4 or blob.shape[1] != self._channels or blob.shape[0] != bottom[0].shape[0]:
                raise self.shape_error(f"needs bottoms of {self._channels} channels, for N images each", *bottom)
        top[0].reshape((1, 1, 1, COLUMNS))

    def compute(self, *values: Rows) -> list[Rows]:
        found = [self.candidates(grid, part) for grid, part in enumerate(values)]
        images, classes, scores, boxes = (np.concatenate(parts) for parts in zip(*found, strict=True))
        by_image = np.argsort(images, kind="stable")
        by_image = by_image[center_overlaps(boxes[by_image], boxes[by_image]) > 0]
        images, classes, scores, boxes = images[by_image], classes[by_image], scores[by_image], boxes[by_image]
        order = suppress_all(host_threads(self), boxes, scores, images, len(values[0]), self._threshold)
        first, boxes = (0, boxes[order]) if self._centers else (1, edges(boxes[order]))
        rows = box_rows(images[order], classes[order] + first, scores[order], boxes)
        return [(rows if len(order) else empty_rows(len(values[0]), COLUMNS))[None, None]]


@register_layer("YoloDetectionOutput")
class YoloDetectionOutputLayer(GridOutputLayer):
    """The boxes of YOLO 2 (`yolo_detection_output_layer.cpp` of MobileNet-YOLO).

    Shapes: each bottom (N, A (5 + C), H, W) with A = num_box and C = num_classes; the top (1, 1, D, 7) with rows
    (image, label from 1, score, xmin, ymin, xmax, ymax), by image and in descending order of scores; D changes from
    pass to pass. Without any box the top has a row (image, -1, ...) for each image. A box's score is s(confidence)
    times the largest softmax(classes), s(x) = 1 / (1 + e^-x), and at least confidence_threshold. Its center is s(x),
    s(y) within the cell, its size the anchor in `biases` times e^width, e^height. A box that overlaps any box with a
    higher score by nms_threshold or more is dropped, also one of another class. Unlike in MobileNet-YOLO, which treats
    all boxes of a batch as boxes of image 0, images are suppressed separately, and boxes of infinite size or without
    area are dropped. Computed on the host.

    A prototxt's DetectionOutput with `biases` becomes this layer with `centers`: rows are (image, class from 0, score,
    center x, center y, width, height) (`detection_output_layer.cpp` of caffe-yolov2 and of caffe_yolo_v2; unlike there
    boxes are suppressed and ordered by their scores).

    Raises:
        ConfigError: coords is not 4, or biases are missing.
        ShapeError: the bottoms' channels do not match.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolo_detection_output_param
        if param.coords != COORDINATES:
            raise self.error(f"coords is {param.coords}; a box has {COORDINATES} coordinates")
        self._anchors = read_anchors(self, param.biases, param.num_box)[: param.num_box]
        self._channels = param.num_box * (COORDINATES + 1 + param.num_classes)
        self._threshold, self._centers = param.nms_threshold, param.centers

    def candidates(self, grid: int, values: Rows) -> Candidates:
        param = self.param.yolo_detection_output_param
        images, _, height, width = values.shape
        values = values.reshape(images, param.num_box, -1, height, width)
        codes = np.concatenate((sigmoid(values[:, :, :2]), values[:, :, 2:COORDINATES]), 2)
        boxes = grid_boxes(codes, self._anchors)
        chances = softmax(values[:, :, CONFIDENCE + 1 :], 2)
        scores = sigmoid(values[:, :, CONFIDENCE]) * chances.max(2)
        # In the order of cells, then of anchors.
        chosen = np.nonzero(np.moveaxis(scores, 1, 3) >= _f32(param.confidence_threshold))
        index = (chosen[0], chosen[3], chosen[1], chosen[2])
        return index[0], chances.argmax(2)[index], scores[index], boxes[index]


@register_layer("Yolov3DetectionOutput")
class Yolov3DetectionOutputLayer(GridOutputLayer):
    """The boxes of YOLO 3 (`yolov3_detection_output_layer.cpp` of MobileNet-YOLO).

    Shapes: mask_group_num bottoms (N, A (5 + C), H, W) with A = num_box and C = num_classes; the top (1, 1, D, 7) as
    that of YoloDetectionOutput. A box has a candidate for each class whose s(confidence) s(class) exceeds
    confidence_threshold, with s(x) = 1 / (1 + e^-x). Bottom g uses the anchors that part g of `mask` selects in
    `biases`, in pixels of an image of (anchors_scale[g] H, anchors_scale[g] W). With gaussian_box a coordinate has a
    mean and a deviation d, (N, A (9 + C), H, W), and the confidence is multiplied by 1 - the mean of s(d). Suppressed
    as by YoloDetectionOutput. Computed on the host.

    Raises:
        ConfigError: mask, biases and anchors_scale do not match the bottoms.
        ShapeError: the bottoms' channels do not match.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolov3_detection_output_param
        groups, mask = param.mask_group_num, list(param.mask)
        if groups != len(bottom) or len(param.anchors_scale) < groups:
            raise self.error(
                f"mask_group_num is {groups} with {len(param.anchors_scale)} anchors_scale; both must be the number of "
                f"bottoms, {len(bottom)}"
            )
        self._anchors = read_anchors(self, param.biases, 1)
        step = len(mask) // groups
        if param.num_box < 1 or (groups - 1) * step + param.num_box > len(mask) or max(mask) >= len(self._anchors):
            raise self.error(
                f"mask is {mask}; for each of {groups} bottoms it must have num_box = {param.num_box} indices of the "
                f"{len(self._anchors)} anchors in biases"
            )
        self._masks = [mask[group * step : group * step + param.num_box] for group in range(groups)]
        self._values = (2 if param.gaussian_box else 1) * COORDINATES
        self._channels = param.num_box * (self._values + 1 + param.num_classes)
        self._threshold = param.nms_threshold

    def candidates(self, grid: int, values: Rows) -> Candidates:
        param = self.param.yolov3_detection_output_param
        images, _, height, width = values.shape
        values = values.reshape(images, param.num_box, -1, height, width)
        step = self._values // COORDINATES
        confidence = sigmoid(values[:, :, self._values])
        if param.gaussian_box:
            deviations = sigmoid(values[:, :, 1 : self._values : step])
            confidence *= (_f32(COORDINATES) - deviations.sum(2)) / _f32(COORDINATES)
        # In the order of cells, then of anchors; classes are looked at where one can exceed the threshold.
        threshold = _f32(param.confidence_threshold)
        cells = np.nonzero(np.moveaxis(confidence, 1, 3) > threshold)
        own = (cells[0], cells[3], cells[1], cells[2])
        scores = sigmoid(values[own[0], own[1], self._values + 1 :, own[2], own[3]]) * confidence[own][:, None]
        # The other classes of a box overlap its best one, with which they share the box.
        best = np.arange(scores.shape[1]) == scores.argmax(1)[:, None]
        chosen, classes = np.nonzero((scores > threshold) & (best | (self._threshold > _ONE)))
        means = values[:, :, 0 : self._values : step]
        codes = np.concatenate((sigmoid(means[:, :, :2]), means[:, :, 2:]), 2)
        scale = np.array([width, height], np.float32) * _f32(param.anchors_scale[grid])
        boxes = grid_boxes(codes, self._anchors[self._masks[grid]] / scale, relative=False)
        return own[0][chosen], classes, scores[chosen, classes], boxes[own][chosen]
