"""EvalDetection: hits and misses of YOLO 1 and 2."""

from __future__ import annotations

import numpy as np

from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.detection_loss import GridLabels, check_grid, read_boxes
from caffepy.layers.detection.grid_loss import GridObjectsReader
from caffepy.layers.detection.host import host_threads
from caffepy.layers.detection.yolo_boxes import (
    CONFIDENCE,
    COORDINATES,
    center_overlaps,
    grid_boxes,
    read_anchors,
    sigmoid,
    softmax,
    suppress_all,
)
from caffepy.proto import caffe_pb2

_Parameter = caffe_pb2.EvalDetectionParameter
_COLUMNS = 4
_LEAST_SCORE = 0.005
"""Intel Caffe drops boxes below this score after the suppression."""


@register_layer("EvalDetection")
class EvalDetectionLayer(Layer):
    """Compares predicted boxes with objects (`eval_detection_layer.cpp` of caffe-yolo and of Intel Caffe).

    Shapes: predictions (N, ...) of side^2 num_object boxes; objects; an ignored third bottom; the top (N, C + 4 side^2
    num_object) with C = num_class: the number of objects of each class, then rows (class, score, hit, miss) by class
    and in descending order of scores, then zeros. A box has the class with the largest probability, and a score by
    score_type. With nms >= 0 a box that overlaps any box with a higher score by nms or more is dropped. A box hits the
    object of its class that it overlaps most if the overlap is at least `threshold`, and no box with a higher score
    did.

    Without biases the predictions are those of YOLO 1 (DetectionLoss), the labels those of BoxData; objects marked
    difficult are not counted, and boxes on them are neither hits nor misses. With biases the predictions are those of
    YOLO 2 (RegionLoss), (N, A (5 + C), H, W) with A = num_object, the objects those of AnnotatedData. As in Intel
    Caffe, boxes with a score below 0.005 are then dropped where nms >= 0, and a box that overlaps the objects of its
    class too little is neither a hit nor a miss. Computed on the host.

    Raises:
        ConfigError: biases do not match num_object.
        ShapeError: the bottoms do not match side, num_class and num_object.
        DataError: an object is out of range.
    """

    bottoms = (2, 3)
    no_gradient_bottoms = frozenset({1, 2})
    has_backward = False

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.eval_detection_param
        self._anchors = None
        if param.biases:
            self._anchors = read_anchors(self, param.biases, param.num_object)[: param.num_object]
        self._objects = GridObjectsReader(self)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.eval_detection_param
        if self._anchors is None:
            check_grid(self, bottom, param.side, param.num_class, param.num_object)
        else:
            self._objects.reshape(bottom)
            values = param.num_object * (COORDINATES + 1 + param.num_class)
            if bottom[0].shape[1:] != (values, param.side, param.side):
                raise self.shape_error(
                    f"side {param.side}, num_class {param.num_class} and num_object {param.num_object} need "
                    f"predictions N {values} {param.side} {param.side}",
                    bottom[0],
                )  # fmt: skip
        boxes = param.side**2 * param.num_object
        top[0].reshape((bottom[0].shape[0], param.num_class + _COLUMNS * boxes))

    def capture_blocker(self) -> str:
        return "it compares boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        values, labels = (self.backend.to_host(blob.data) for blob in bottom[:2])
        result = np.zeros(top[0].shape, np.float32)
        if self.backend.holds_values:
            with np.errstate(all="ignore"):
                self._evaluate(values, labels, result)
        self.backend.from_host(result, top[0].data)

    def _evaluate(self, values: Rows, labels: Rows, result: Rows) -> None:
        """Write the rows of all images."""
        param, images = self.param.eval_detection_param, len(values)
        boxes, scores, classes = self._predictions(values)
        owners, object_classes, truth, difficult = self._truth(labels, images)
        for image in range(images):
            rows = result[image, param.num_class :].reshape(-1, _COLUMNS)
            own = owners == image
            counted = object_classes[own & ~difficult]
            result[image, : param.num_class] = np.bincount(counted, minlength=param.num_class)
            order = suppress_all(
                host_threads(self), boxes[image], scores[image], np.zeros(len(boxes[image]), np.int64), 1, param.nms
            )
            if self._anchors is not None and param.nms >= 0:
                order = order[~(scores[image][order] < np.float32(_LEAST_SCORE))]
            order = order[np.argsort(classes[image][order], kind="stable")]
            rows = rows[: len(order)]
            rows[:, 0], rows[:, 1] = classes[image][order], scores[image][order]
            for label in np.unique(classes[image][order]):
                chosen = rows[:, 0] == label
                objects = np.flatnonzero(own & (object_classes == label))
                overlaps = center_overlaps(boxes[image][order][chosen][:, None], truth[objects][None])
                rows[chosen, 2:] = self._compare(overlaps, difficult[objects])

    def _compare(self, overlaps: Rows, difficult: Rows) -> Rows:
        """Return hit and miss (n, 2) for the overlaps (n, G) of boxes with objects of their class, best box first."""
        found = np.zeros((len(overlaps), 2), np.float32)
        if not overlaps.shape[1]:
            found[:, 1] = 1
            return found
        seen = np.zeros(overlaps.shape[1], bool)
        overlaps = np.nan_to_num(overlaps, nan=-1.0)
        nearest = overlaps.argmax(1)
        for row, index, value in zip(found, nearest, overlaps.max(1), strict=True):
            if not value >= np.float32(self.param.eval_detection_param.threshold):
                row[1] = self._anchors is None
            elif not difficult[index]:
                row[:] = not seen[index], seen[index]
                seen[index] = True
        return found

    def _score(self, confidence: Rows, chance: Rows) -> Rows:
        kind = self.param.eval_detection_param.score_type
        if kind == _Parameter.OBJ:
            return np.broadcast_to(confidence, np.broadcast_shapes(confidence.shape, chance.shape))
        if kind == _Parameter.PROB:
            return np.broadcast_to(chance, np.broadcast_shapes(confidence.shape, chance.shape))
        return confidence * chance

    def _predictions(self, values: Rows) -> tuple[Rows, Rows, Rows]:
        """Return boxes (N, P, 4), scores (N, P) and classes (N, P), in the order of cells and then of boxes."""
        param, images = self.param.eval_detection_param, len(values)
        if self._anchors is None:
            table = values.reshape(images, -1, param.side**2)
            boxes = read_boxes(table, param)
            chances = table[:, None, : param.num_class]
            confidence = table[:, param.num_class : param.num_class + param.num_object]
            chance, classes = chances.max(2), chances.argmax(2)
        else:
            table = values.reshape(images, param.num_object, -1, param.side, param.side)
            codes = np.concatenate((sigmoid(table[:, :, :2]), table[:, :, 2:COORDINATES]), 2)
            boxes = grid_boxes(codes, self._anchors).reshape(images, param.num_object, -1, COORDINATES)
            cells = table.reshape(images, param.num_object, -1, param.side**2)
            chances = softmax(cells[:, :, CONFIDENCE + 1 :], 2)
            confidence = sigmoid(cells[:, :, CONFIDENCE])
            chance, classes = chances.max(2), chances.argmax(2)
        scores = self._score(confidence, chance)
        classes = np.broadcast_to(classes, scores.shape)
        by_cell = [np.moveaxis(part, 1, 2).reshape(images, -1, *part.shape[3:]) for part in (boxes, scores, classes)]
        return by_cell[0], by_cell[1], by_cell[2]

    def _truth(self, labels: Rows, images: int) -> tuple[Rows, Rows, Rows, Rows]:
        """Return image, class, box and difficult mark of each object.

        Raises:
            DataError: a class is out of range.
        """
        param = self.param.eval_detection_param
        if self._anchors is not None:
            found = self._objects.read(labels, param.num_class)
            return found.images, found.classes, found.boxes, np.zeros(len(found.images), bool)
        grid = GridLabels(labels.reshape(images, -1), param.side**2)
        owners, cells = np.nonzero(grid.present)
        classes = grid.classes[owners, cells]
        if ((classes < 0) | (classes >= param.num_class)).any():
            raise self.data_error(
                f"'{self.bottom_names[1]}' has the classes {classes.min()} to {classes.max()}, but num_class is "
                f"{param.num_class}; classes begin at 0"
            )
        return owners, classes, grid.boxes[owners, cells], grid.difficult[owners, cells]
