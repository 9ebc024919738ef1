"""DetectionLoss of YOLO 1, and EvalDetection: hits and misses of YOLO 1 and 2."""

from __future__ import annotations

import numpy as np

from caffepy.errors import ConfigError
from caffepy.forks.yolo.boxes import (
    CONFIDENCE,
    COORDINATES,
    GridLoss,
    GridLossLayer,
    GridObjectsReader,
    center_overlaps,
    grid_boxes,
    read_anchors,
    sigmoid,
    suppress_all,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import Rows, softmax
from caffepy.layers.detection.threads import host_threads
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer
from caffepy.layers.loss import LossLayer

LABEL_ROWS = 7
"""Numbers of a cell in a label of BoxData: difficult, object, class, and the box."""
BoxFormat = caffe_pb2.DetectionLossParameter | caffe_pb2.EvalDetectionParameter
_f32 = np.float32


class YoloLossLayer(GridLossLayer):
    """The loss of YOLO 1, which `DetectionLossLayer` describes."""

    counted = 2

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        param = self.param.detection_loss_param
        check_grid(self, bottom, param.side, param.num_class, param.num_object)

    def compute(self, values: Rows, labels: Rows) -> GridLoss:
        param = self.param.detection_loss_param
        images, cells = len(values), param.side**2
        table = values.reshape(images, -1, cells)
        boxes = read_boxes(table, param)
        objects = GridLabels(labels.reshape(images, -1), cells)
        image, cell = np.nonzero(objects.present)
        classes, truth = objects.classes[image, cell], objects.boxes[image, cell]
        if ((classes < 0) | (classes >= param.num_class)).any():
            raise self.data_error(
                f"'{self.bottom_names[1]}' has the classes {classes.min()} to {classes.max()}, but num_class is "
                f"{param.num_class}; classes begin at 0"
            )
        first_confidence, first_box = param.num_class, param.num_class + param.num_object
        confidence = table[:, first_confidence:first_box]
        gradient = np.zeros_like(table)
        gradient[:, first_confidence:first_box] = _f32(param.noobject_scale) * confidence

        of_cell = boxes[image, :, cell]
        overlaps = center_overlaps(of_cell, truth[:, None])
        distances = np.sqrt(np.square(of_cell - truth[:, None]).sum(-1))
        best = np.where((overlaps > 0).any(1), overlaps.argmax(1), distances.argmin(1))
        number = np.arange(len(best))
        class_difference = table[image, :first_confidence, cell]
        class_difference[number, classes] -= 1
        gradient[image, :first_confidence, cell] = _f32(param.class_scale) * class_difference
        p = confidence[image, best, cell]
        own_overlap = np.fmax(overlaps[number, best], 0)
        gradient[image, first_confidence + best, cell] = _f32(param.object_scale) * (p - own_overlap)
        channels = first_box + COORDINATES * best[:, None] + np.arange(COORDINATES)
        index = (image[:, None], channels, cell[:, None])
        box_difference = table[index] - self._targets(truth, cell)
        gradient[index] = _f32(param.coord_scale) * box_difference
        background = np.square(confidence, dtype=np.float64).sum() - np.square(p, dtype=np.float64).sum()
        of_objects = (
            param.class_scale * np.square(class_difference, dtype=np.float64).sum()
            + param.object_scale * np.square(p - 1, dtype=np.float64).sum()
            + param.coord_scale * np.square(box_difference, dtype=np.float64).sum()
        )
        counts = (float(len(best)), float(images * cells * param.num_object - len(best)))
        sums = (float(of_objects), float(param.noobject_scale * background))
        return GridLoss(gradient / _f32(images), 0.0, sums, counts)

    def _targets(self, truth: Rows, cell: Rows) -> Rows:
        """Return the objects (n, 4) as predictions represent them."""
        param, targets = self.param.detection_loss_param, truth.copy()
        if param.constriant:
            side = _f32(param.side)
            targets[:, 0] = truth[:, 0] * side - cell % param.side
            targets[:, 1] = truth[:, 1] * side - cell // param.side
        if param.sqrt:
            targets[:, 2:] = np.sqrt(truth[:, 2:])
        return targets


@register_layer("DetectionLoss")
class DetectionLossLayer(LossLayer):
    """The loss of YOLO 1, or if `detection_loss_param.cls_num` is set that of MS-CNN.

    YOLO 1 (`detection_loss_layer.cpp` of caffe-yolo; Redmon et al. 2016).
    Shapes: predictions (N, side^2 (C + 5 B)) with C = num_class and B = num_object: for all cells in turn the C
    classes, the B confidences, and x, y, width, height of the B boxes; labels (N, 7 side^2) of BoxData. In a cell with
    an object, the box with the largest overlap is responsible, or the nearest one if none overlaps. The gradient,
    before the division by N, is noobject_scale p for the confidence p of a box; in cells with an object class_scale (q
    - onehot) for the classes q, and for the responsible box object_scale (p - overlap) and coord_scale (box - object).
    With `sqrt` boxes hold the roots of their sides, with `constriant` x and y are relative to the cell. The reported
    loss is the mean over objects of the squares of these differences, with p - 1 in place of p - overlap, plus the mean
    over other boxes of noobject_scale p^2. The means include the samples of all devices. Computed on the host.

    MS-CNN (`detection_loss_layer.cpp` of mscnn; Cai et al. 2016).
    Shapes: scores and offsets (N, C + 4, H, W), labels (N, 6, H, W) of ImageGtData, of which the channels are label, x
    and y of the object's center, width, height, and overlap; the top is (1, 1, 1, 2), as in the fork: loss =
    sum of w * -log softmax(scores)[label] / positions + lambda * box loss, and lambda * box loss. The box loss is the
    mean of smooth L1 (or of squares without `bb_smooth`) of the offsets (dx / field_w, dy / field_h, log w / field_w,
    log h / field_h), normalised by `bbox_reg_param`; predictions are limited by `field_xyr` and `field_whr`, and the
    gradient is that without limits. Objects always count. Of the background positions with an overlap below
    `bg_threshold`, `sample_mode` chooses: random, bootstrap (those with the highest scores of each class), mixture
    (both), or else all. `pos_neg_weighted` and `iou_weighted` give the weights w. Computed on the host.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms have other shapes.
        DataError: a class is out of range.
    """

    def __new__(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> Layer:  # type: ignore[misc]
        """Return the layer of the fork whose fields are set."""
        if not param.detection_loss_param.HasField("cls_num"):
            return YoloLossLayer(param, context)
        return _mscnn_loss(param.name)(param, context)


def _mscnn_loss(layer: str) -> type[Layer]:
    """The loss of another family, which has the type's name too and may be absent."""
    family = "caffepy.forks.rcnn"
    try:
        from caffepy.forks.rcnn.mscnn_loss import MscnnLossLayer
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(family):
            raise
        raise ConfigError(
            f"layer '{layer}' (DetectionLoss): with detection_loss_param.cls_num it is a layer of MS-CNN, which "
            f"{family} has; that folder is absent"
        ) from None
    return MscnnLossLayer


# -- grids of YOLO 1 -----------------------------------------------------------------------------------


class GridLabels:
    """The labels of BoxData for images of one grid.

    Args:
        values: (N, 7 cells).
        cells: number of cells.
    """

    def __init__(self, values: Rows, cells: int) -> None:
        self.difficult = values[:, :cells] == 1
        self.present = values[:, cells : 2 * cells] != 0
        self.classes = np.nan_to_num(values[:, 2 * cells : 3 * cells], nan=-1.0).astype(np.int64)
        self.boxes = values[:, 3 * cells :].reshape(len(values), cells, COORDINATES)


def check_grid(layer: Layer, bottom: Blobs, side: int, classes: int, boxes: int) -> None:
    """Check the sizes of predictions and labels of YOLO 1.

    Raises:
        ShapeError: they do not match.
    """
    images, cells = bottom[0].shape[0] if bottom[0].shape else 0, side**2
    values = cells * (classes + (COORDINATES + 1) * boxes)
    if bottom[0].count != images * values or bottom[1].count != images * cells * LABEL_ROWS:
        raise layer.shape_error(
            f"side {side}, num_class {classes} and num_object {boxes} need {values} predictions and "
            f"{cells * LABEL_ROWS} labels for each image",
            bottom[0], bottom[1],
        )  # fmt: skip


def read_boxes(table: Rows, param: BoxFormat) -> Rows:
    """Return the predicted boxes (N, B, cells, 4) of a table (N, C + 5 B, cells).

    Args:
        table: the predictions.
        param: the fields that describe the predictions.
    """
    side, count = param.side, param.num_object
    first = param.num_class + count
    boxes = table[:, first:].reshape(len(table), count, COORDINATES, -1).transpose(0, 1, 3, 2).copy()
    if param.constriant:
        cell = np.arange(side * side)
        boxes[..., 0] = (boxes[..., 0] + cell % side) / _f32(side)
        boxes[..., 1] = (boxes[..., 1] + cell // side) / _f32(side)
    if param.sqrt:
        boxes[..., 2:] = np.square(boxes[..., 2:])
    return boxes


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
