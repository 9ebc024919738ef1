"""DetectionEvaluate."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.boxes import CORNERS, Boxes, Rows, overlaps
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import COLUMNS as TRUTH_COLUMNS
from caffepy.layers.detection.boxes import (
    GroundTruth,
    ImageSize,
    check_resize,
    read_ground_truth,
    read_image_sizes,
    to_pixels,
)
from caffepy.layers.detection.suppression import sort_like_cpp
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, LayerContext, register_layer

_DETECTION_COLUMNS, _COLUMNS = 7, 5
_FROM_DETECTION, _FROM_OBJECT = (0, 5, 6, 1, 2, 3, 4), (0, 5, 6, 1, 2, 3, 4, 7)
"""Order of the columns of FrcnnOutput and of EvalData that makes those of DetectionOutput and AnnotatedData."""


@register_layer("DetectionEvaluate")
class DetectionEvaluateLayer(HostLayer):
    """Classifies detections as true and false positives (`detection_evaluate_layer.cpp`).

    Shapes: detections (1, 1, D, 7) of DetectionOutput, objects (1, 1, G, 8), top (1, 1, R, 5). The top starts with one
    row (-1, label, number of objects, -1, -1) for each class but the background; then follows one row (image, label,
    score, true positive, false positive) for each detection. A detection is a true positive if it overlaps its nearest
    object of the same class by at least `overlap_threshold`, and no detection with a higher score did. If that object
    is marked difficult, without evaluate_difficult_gt, the detection is neither. With a name_size_file boxes are
    compared in pixels; images with detections use its lines in order. Computed on the host. A solver's test with
    eval_type: "detection" computes the mean average precision.

    With three bottoms (Cascade R-CNN's `detection_evaluate_layer.cpp`) they are detections (D, 7, 1, 1) of FrcnnOutput,
    objects (G, 8, 1, 1) of EvalData, and the heights and widths of the net's inputs (N, 2, 1, 1); the top is
    (R, 5, 1, 1). Boxes are in pixels of the input, and are compared in pixels of the images of name_size_file, or
    without it of the input; the last row and column belong to a box.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms have other shapes.
        DataError: a detection is not finite or belongs to the background, or a file is invalid.
    """

    bottoms = (2, 3)
    has_backward = False
    no_gradient_bottoms = frozenset({1, 2})
    changes_shapes = True
    blocker = "it compares boxes on the host"

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_evaluate_param
        self._inputs: Rows | None = None
        if param.num_classes < 1:
            raise self.error("num_classes is needed: how many classes there are with the background")
        if param.background_label_id >= param.num_classes:
            raise self.error(
                f"background_label_id {param.background_label_id} is not below num_classes {param.num_classes}; "
                "correct one"
            )
        if not param.overlap_threshold > 0:
            raise self.error(f"overlap_threshold {param.overlap_threshold:g} must be above 0")
        self._resize = param.resize_param if param.HasField("resize_param") else None
        if self._resize is not None:
            check_resize(self, self._resize)
        self._sizes: list[ImageSize] = []
        if param.name_size_file and self.backend.holds_values:
            self._sizes = read_image_sizes(self, param.name_size_file)
        self._next, self._started = 0, False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        if len(bottom) > 2:
            for blob, columns in zip(bottom, (_DETECTION_COLUMNS, TRUTH_COLUMNS, 2), strict=True):
                if len(blob.shape) < 2 or blob.shape[1] != columns or blob.count != columns * blob.shape[0]:
                    raise self.shape_error("needs detections D 7 1 1, objects G 8 1 1 and sizes N 2 1 1", *bottom)
            top[0].reshape((self.param.detection_evaluate_param.num_classes, _COLUMNS, 1, 1))
            return
        for blob, columns in zip(bottom, (_DETECTION_COLUMNS, TRUTH_COLUMNS), strict=True):
            if blob.shape[:2] != (1, 1) or len(blob.shape) != 4 or blob.shape[3] != columns:
                raise self.shape_error("needs detections 1 1 D 7 and objects 1 1 G 8", *bottom)
        top[0].reshape((1, 1, self.param.detection_evaluate_param.num_classes, _COLUMNS))

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """With name_size_file, whose lines belong to the images with detections, in order."""
        return bool(param.detection_evaluate_param.name_size_file)

    def has_side_effects(self) -> bool:
        """Whether the layer advances in name_size_file."""
        return bool(self._sizes)

    def compute(self, detections: Rows, truth: Rows, *sizes: Rows) -> list[Rows]:
        detections = detections.reshape(-1, _DETECTION_COLUMNS)
        if not sizes:
            return [self._evaluate(detections, truth)[None, None]]
        self._inputs = sizes[0].reshape(-1, 2)
        truth = truth.reshape(-1, TRUTH_COLUMNS)[:, _FROM_OBJECT]
        return [self._evaluate(detections[:, _FROM_DETECTION], truth)[:, :, None, None]]

    def _evaluate(self, detections: Rows, truth_values: Rows) -> Rows:
        param, name = self.param.detection_evaluate_param, self.bottom_names[1]
        background = param.background_label_id
        truth = read_ground_truth(self, truth_values, name, background, stop_at_padding=self._inputs is None)
        self._check(detections)
        images, labels = detections[:, 0].astype(np.int64), detections[:, 1].astype(np.int64)
        counted = truth.labels if param.evaluate_difficult_gt else truth.labels[~truth.difficult]
        class_rows = np.full((param.num_classes, _COLUMNS), -1, np.float32)
        class_rows[:, 1] = np.arange(param.num_classes)
        class_rows[:, 2] = np.bincount(counted[counted < param.num_classes], minlength=param.num_classes)
        parts = [np.delete(class_rows, background, axis=0)]
        self._seek_image()
        for image in np.unique(images[images != -1]):
            in_image = np.flatnonzero(images == image)
            for label in np.unique(labels[in_image]):
                if label != -1:
                    objects = np.flatnonzero((truth.images == image) & (truth.labels == label))
                    found = detections[in_image[labels[in_image] == label]]
                    parts.append(self._score(found, truth, objects, int(image)))
            self._next = (self._next + 1) % max(len(self._sizes), 1)
        # As in Caffe, detections of image -1 have rows of zeros.
        parts.append(np.zeros((int(((images == -1) & (labels != -1)).sum()), _COLUMNS), np.float32))
        return np.concatenate(parts)

    def _check(self, detections: Rows) -> None:
        """Check the detections."""
        blob, background = self.bottom_names[0], self.param.detection_evaluate_param.background_label_id
        bad = np.flatnonzero(~np.isfinite(detections[:, :2]).all(1) | np.isnan(detections[:, 2]))
        if len(bad):
            image, label, score = detections[bad[0], :3]
            raise self.data_error(
                f"row {bad[0]} of '{blob}' has image {image:g}, label {label:g}, score {score:g}, which are not all "
                "finite; look for NaN in the layers before it"
            )
        bad = np.flatnonzero((np.trunc(detections[:, 0]) != -1) & (np.trunc(detections[:, 1]) == background))
        if len(bad):
            raise self.data_error(
                f"row {bad[0]} of '{blob}' is a detection of the background, class {background}; give "
                "DetectionOutput the same background_label_id"
            )

    def _seek_image(self) -> None:
        """Set the line of name_size_file for the first pass, also of a resumed run."""
        if self._sizes and not self._started:
            self._next, self._started = self.first_sample() % len(self._sizes), True

    def _score(self, detections: Rows, truth: GroundTruth, objects: NDArray[np.intp], image: int) -> Rows:
        """Return the top's rows for one image's detections (K, 7) of one class; `objects` are of the same class."""
        param = self.param.detection_evaluate_param
        rows = np.zeros((len(detections), _COLUMNS), np.float32)
        if not len(objects):
            rows[:, :3], rows[:, 4] = detections[:, :3], 1
            return _truncate_ids(rows)
        order = np.arange(len(detections), dtype=np.int32)
        sort_like_cpp(np.ascontiguousarray(detections[:, 2]), order)
        detections = detections[order]
        rows[:, :3] = detections[:, :3]
        found = self._overlaps(np.ascontiguousarray(detections[:, 3:]), truth.boxes[objects], image)
        visited = np.zeros(len(objects), bool)
        for row, overlaps_of_row in zip(rows, found, strict=True):
            nearest = int(np.argmax(overlaps_of_row))
            if not overlaps_of_row[nearest] >= np.float32(param.overlap_threshold):
                row[4] = 1
            elif param.evaluate_difficult_gt or not truth.difficult[objects[nearest]]:
                row[3], row[4] = not visited[nearest], visited[nearest]
                visited[nearest] = True
        return _truncate_ids(rows)

    def _overlaps(self, detections: Rows, objects: Rows, image: int) -> Rows:
        """Return the overlaps of detections and objects (K, G), in pixels if a name_size_file or sizes are given."""
        pair = detections, objects
        if self._inputs is not None:
            factors = self._factors(self._inputs, image)
            a, b = (Boxes.from_corners(boxes * factors, CORNERS) for boxes in pair)
        elif self._sizes:
            a, b = (to_pixels(boxes, self._sizes[self._next], self._resize) for boxes in pair)
        else:
            a, b = map(Boxes.from_corners, pair)
        return overlaps(a[:, None], b[None])

    def _factors(self, inputs: Rows, image: int) -> Rows:
        """Return the factors (4,) from pixels of an image's input to those of the original image."""
        if not 0 <= image < len(inputs):
            name = self.bottom_names[2]
            raise self.data_error(f"'{self.bottom_names[0]}' has image {image}, but '{name}' {len(inputs)} sizes")
        if not self._sizes:
            return np.ones(4, np.float32)
        original = self._sizes[self._next]
        height, width = np.float32(original.height) / inputs[image, 0], np.float32(original.width) / inputs[image, 1]
        return np.array([width, height, width, height], np.float32)


def _truncate_ids(rows: Rows) -> Rows:
    """Truncate image and label to integers."""
    rows[:, :2] = np.trunc(rows[:, :2])
    return rows
