"""Losses of YOLO: DetectionLoss of YOLO 1, RegionLoss of YOLO 2, Yolov3 of YOLO 3, and YoloSeg for masks.

EvalDetection counts hits and misses of YOLO 1 and 2. Region has the activations of YOLO 2.
"""

from __future__ import annotations

import math
from math import exp

import numpy as np

from caffepy.backend import Array, Channel, Each, Scalar, expression
from caffepy.backend.formulas import identity, scaled_square
from caffepy.data.boxes import DARKNET, Rows, intersections
from caffepy.errors import ConfigError
from caffepy.forks.yolo.boxes import (
    CELLS,
    CONFIDENCE,
    COORDINATES,
    CORNERS,
    LABEL_ROWS,
    ROWS,
    GridLabels,
    GridLoss,
    GridLossLayer,
    GridObjects,
    GridObjectsReader,
    best_overlaps,
    center_overlaps,
    check_predictions,
    edges,
    grid_boxes,
    read_anchors,
    sigmoid,
    suppress_all,
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import softmax
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, Layer, LayerContext, host_threads, register_layer
from caffepy.layers.loss import ElementLossLayer, LossLayer
from caffepy.utils.files import read_regular

# -- DetectionLoss -------------------------------------------------------------------------------------

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
        from caffepy.forks.rcnn.losses import MscnnLossLayer
    except ModuleNotFoundError as error:
        if not str(error.name).startswith(family):
            raise
        raise ConfigError(
            f"layer '{layer}' (DetectionLoss): with detection_loss_param.cls_num it is a layer of MS-CNN, which "
            f"{family} has; that folder is absent"
        ) from None
    return MscnnLossLayer


# -- grids of YOLO 1 -----------------------------------------------------------------------------------


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
            bottom[0],
            bottom[1],
        )


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


# -- EvalDetection -------------------------------------------------------------------------------------

_EvalParameter = caffe_pb2.EvalDetectionParameter
_COLUMNS = 4
_LEAST_SCORE = 0.005
"""Intel Caffe drops boxes below this score after the suppression."""


@register_layer("EvalDetection")
class EvalDetectionLayer(HostLayer):
    """Compares predicted boxes with objects (`eval_detection_layer.cpp` of caffe-yolo and of Intel Caffe).

    Shapes: predictions (N, ...) of side^2 num_object boxes; objects; an ignored third bottom; the top (N, C + 4 side^2
    num_object) with C = num_class: the number of objects of each class, then rows (class, score, hit, miss) by class
    and in descending order of scores, then zeros. A box has the class with the largest probability, and a score by
    score_type. With nms >= 0 a box that overlaps any box with a higher score by nms or more is dropped. A box hits the
    object of its class that it overlaps most if the overlap is at least `threshold`, and no box with a higher score
    did.

    Without biases the predictions are those of YOLO 1 (DetectionLoss), the labels those of BoxData; objects marked
    difficult are not counted, and boxes on them are neither hits nor misses. With biases the predictions are those of
    YOLO 2 (RegionLoss), (N, A (5 + C), H, W) with A = num_object, the objects those of RegionLoss. As in Intel
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
    blocker = "it compares boxes on the host"

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
            values = param.num_object * (COORDINATES + 1 + param.num_class)
            if bottom[0].shape[1:] != (values, param.side, param.side):
                raise self.shape_error(
                    f"side {param.side}, num_class {param.num_class} and num_object {param.num_object} need "
                    f"predictions N {values} {param.side} {param.side}",
                    bottom[0],
                )
            self._objects.reshape(bottom)
        boxes = param.side**2 * param.num_object
        top[0].reshape((bottom[0].shape[0], param.num_class + _COLUMNS * boxes))

    def compute(self, values: Rows, labels: Rows, *_: Rows) -> list[Rows]:
        param, images = self.param.eval_detection_param, len(values)
        result = np.zeros((images, param.num_class + _COLUMNS * param.side**2 * param.num_object), np.float32)
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
        return [result]

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
        if kind == _EvalParameter.OBJ:
            return np.broadcast_to(confidence, np.broadcast_shapes(confidence.shape, chance.shape))
        if kind == _EvalParameter.PROB:
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
        """Return image, class, box and difficult mark of each object."""
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


# -- YOLO 2 --------------------------------------------------------------------------------------------

_MAX_BYTES = 1 << 20
"""Size limit of a class map."""
_WARM_SAMPLES = 12800
_WARM_SCALE = _f32(0.01)


@register_layer("RegionLoss")
class RegionLossLayer(GridLossLayer):
    """The loss of YOLO 2 (`region_loss_layer.cpp` of MobileNet-YOLO, Intel Caffe and caffe-yolov2).

    Shapes: predictions (N, A (5 + C), H, W) with A = num anchors and C = num_class; objects (N, 1, T, 5) with rows
    class from 0, center x, center y, width, height, or (1, 1, G, 8) of AnnotatedData, or (N, 7 H W) of BoxData. The
    values of a box are x, y,
    log width, log height, confidence and classes. With s = 1 / (1 + e^-x), p = s(confidence) and q = softmax(classes)
    the gradient, before the division by N, is

    - noobject_scale p p (1 - p) for the confidence, 0 if the box overlaps an object by more than `thresh`;
    - for the anchor that fits an object best, in the cell of its center: coord_scale k (s - t) s (1 - s) for x and y,
      coord_scale k (x - t) for the logarithms, class_scale (q - onehot), and object_scale (p - o) p (1 - p) with o the
      overlap of box and object. With rescore: 0 k is 2 - the object's area and o is 1; else k is 1.

    The reported loss is the sum of the squares of that gradient, divided by N.

    With objects of AnnotatedData the layer computes as Intel Caffe: differences of coordinates are limited to 1, k is
    1, the confidence of matches has the gradient -2 object_scale (1 - p)^3 p (1 - p), and the loss is not divided by N.
    With labels of BoxData it computes as caffe-yolov2: k and o are 1, the loss is not divided by N, and while the first
    12800 samples train, the coordinates of other boxes have the gradient 0.01 (s - 1/2) s (1 - s) for x and y and
    0.01 x for the logarithms, which draws them to their anchors. Unlike in caffe-yolov2, where BoxData lists up to 30
    objects, a cell has the last of its objects alone. `class_map` names a file with the channel of each class. Redmon
    and Farhadi 2017. Computed on the host.

    Raises:
        ConfigError: coords is not 4, biases are missing, or the class map is invalid.
        ShapeError: the predictions' channels do not match.
        DataError: an object is out of range, or the class map cannot be read.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.region_loss_param
        if param.coords != COORDINATES:
            raise self.error(f"coords is {param.coords}; a box has {COORDINATES} coordinates")
        self._anchors = read_anchors(self, param.biases, param.num)[: param.num]
        self._class_map = self._read_class_map(param.class_map) if param.class_map else None
        self._objects = GridObjectsReader(self)

    def _read_class_map(self, name: str) -> Rows:
        path, classes = self.context.resolve(name), self.param.region_loss_param.num_class
        try:
            words = read_regular(path, _MAX_BYTES).split()
            channels = np.array([int(word) for word in words], np.int64)
        except OSError as error:
            raise self.data_error(f"class_map {path} cannot be read: {error.strerror}") from error
        except ValueError as error:
            raise self.data_error(f"class_map {path} must have one whole number in each line") from error
        if not len(channels) or channels.min() < 0 or channels.max() >= classes:
            raise self.error(f"class_map {path} must have numbers from 0 to {classes - 1}, num_class - 1")
        return channels

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        param = self.param.region_loss_param
        check_predictions(self, bottom[0], param.num, param.num_class)
        self._objects.reshape(bottom)

    def compute(self, values: Rows, labels: Rows) -> GridLoss:
        param, form = self.param.region_loss_param, self._objects.form
        images, _, height, width = values.shape
        values = values.reshape(images, param.num, -1, height, width)
        classes = param.num_class if self._class_map is None else len(self._class_map)
        objects = self._objects.read(labels, classes)
        centers = sigmoid(values[:, :, :2])
        codes = np.concatenate((centers, values[:, :, 2:COORDINATES]), 2)
        boxes = grid_boxes(codes, self._anchors)
        confidence = sigmoid(values[:, :, CONFIDENCE])
        gradient = np.zeros_like(values)
        slope = confidence * (1 - confidence)
        background = _f32(param.noobject_scale) * confidence * slope
        background[best_overlaps(host_threads(self), boxes, objects.boxes, objects.images) > _f32(param.thresh)] = 0
        gradient[:, :, CONFIDENCE] = background
        if form == CELLS and self.context.phase == caffe_pb2.TRAIN and self.first_sample() < _WARM_SAMPLES:
            gradient[:, :, :2] = _WARM_SCALE * (centers - _f32(0.5)) * centers * (1 - centers)
            gradient[:, :, 2:COORDINATES] = _WARM_SCALE * values[:, :, 2:COORDINATES]

        rows, columns = objects.cells(height, width)
        anchors = self._match(objects, boxes, rows, columns)
        cell = (objects.images, anchors, slice(None), rows, columns)
        own = (objects.images, anchors, rows, columns)
        difference = self._differences(codes[cell], objects, anchors, rows, columns, (height, width))
        if form == CORNERS:
            difference = np.clip(difference, -1, 1)
        weight = np.full(len(anchors), param.coord_scale, np.float32)
        if form == ROWS and not param.rescore:
            weight *= 2 - objects.boxes[:, 2] * objects.boxes[:, 3]
        of_centers = codes[cell][:, :2]
        difference[:, :2] *= of_centers * (1 - of_centers)
        p, overlaps = confidence[own], center_overlaps(boxes[own], objects.boxes)
        matched = p - (overlaps if form == ROWS and param.rescore else _f32(1))
        if form == CORNERS:
            matched = -2 * (1 - p) ** 3
        channels = objects.classes if self._class_map is None else self._class_map[objects.classes]
        q = softmax(values[:, :, CONFIDENCE + 1 :][cell], 1)
        q[np.arange(len(q)), channels] -= 1
        found = gradient[cell]
        found[:, :COORDINATES] = difference * weight[:, None]
        found[:, CONFIDENCE] = _f32(param.object_scale) * matched * slope[own]
        found[:, CONFIDENCE + 1 :] = _f32(param.class_scale) * q
        gradient[cell] = found  # of several objects in a cell the last one counts
        total = float(np.square(gradient, dtype=np.float64).sum())
        return GridLoss(gradient / _f32(images), total / images if form == ROWS else total * self.training_devices)

    def _match(self, objects: GridObjects, boxes: Rows, rows: Rows, columns: Rows) -> Rows:
        """Return the anchor whose size fits each object best."""
        height, width = boxes.shape[2:4]
        if self.param.region_loss_param.bias_match:
            sizes = np.broadcast_to(
                self._anchors / np.array([width, height], np.float32), (len(rows), *self._anchors.shape)
            )
        else:
            sizes = boxes[objects.images, :, rows, columns, 2:]
        return np.argmax(size_overlaps(sizes, objects.boxes[:, None, 2:]), 1)

    def _differences(
        self, codes: Rows, objects: GridObjects, anchors: Rows, rows: Rows, columns: Rows, size: tuple[int, int]
    ) -> Rows:
        """Return prediction - target (n, 4) for the predictions `codes` of the objects' cells."""
        height, width = size
        grid = np.array([width, height], np.float32)
        targets = objects.boxes * np.tile(grid, 2)
        targets[:, 0] -= columns
        targets[:, 1] -= rows
        targets[:, 2:] = np.log(targets[:, 2:] / self._anchors[anchors])
        return codes - targets


def size_overlaps(a: Rows, b: Rows) -> Rows:
    """Return the overlap of boxes with the same center and the sizes (..., 2), which broadcast."""
    centers = np.zeros((), np.float32)
    one = np.concatenate((np.zeros_like(a) + centers, a), -1)
    other = np.concatenate((np.zeros_like(b) + centers, b), -1)
    return center_overlaps(one, other)


@register_layer("Region")
class RegionLayer(HostLayer):
    """The activations of YOLO 2 in the order of cells (`region_layer.cpp` of caffe-yolov2).

    Let A = boxes_of_each_grid, or `num`, and D = coords + 1 + classes. The bottom is (N, A D, H, W). The top has its
    shape; its memory is (N, H W, A, D), where value 4 of a box is 1 / (1 + e^-x), with `softmax` the values from 5 on
    are their softmax, and others are copied. It has no gradient. Computed on the host.

    Raises:
        ConfigError: boxes_of_each_grid and `num` differ.
        ShapeError: the bottom's channels do not match.
    """

    has_backward = False
    blocker = "it activates boxes on the host"

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.region_param
        self._boxes = param.num if param.HasField("num") else param.boxes_of_each_grid
        if param.HasField("boxes_of_each_grid") and self._boxes != param.boxes_of_each_grid:
            raise self.error(f"boxes_of_each_grid is {param.boxes_of_each_grid} and num {self._boxes}; remove one")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.region_param
        channels = self._boxes * (param.coords + 1 + param.classes)
        if param.coords < CONFIDENCE or len(bottom[0].shape) != 4 or bottom[0].shape[1] != channels:
            raise self.shape_error(
                f"boxes_of_each_grid {self._boxes}, coords {param.coords} and classes {param.classes} "
                f"need {channels} channels and at least {CONFIDENCE} coords",
                bottom[0],
            )
        self.refuse_in_place(bottom, top)
        top[0].reshape(bottom[0].shape)

    def compute(self, values: Rows) -> list[Rows]:
        param, (images, channels, height, width) = self.param.region_param, values.shape
        boxes = self._boxes
        cells = values.reshape(images, channels, -1).transpose(0, 2, 1).reshape(images, -1, boxes, channels // boxes)
        cells = np.array(cells, np.float32)
        cells[..., CONFIDENCE] = sigmoid(cells[..., CONFIDENCE])
        if param.softmax and param.classes:
            first = CONFIDENCE + 1
            cells[..., first : first + param.classes] = softmax(cells[..., first : first + param.classes], -1)
        return [cells.reshape(images, channels, height, width)]


# -- YOLO 3 --------------------------------------------------------------------------------------------

_Yolov3Parameter = caffe_pb2.Yolov3Parameter
_FOCAL_ALPHA = 0.5
_SMALLEST = 1e-15
"""Added to a probability before its logarithm."""


@register_layer("Yolov3")
class Yolov3Layer(GridLossLayer):
    """The loss of one grid of YOLO 3 (`yolov3_layer.cpp` of MobileNet-YOLO; Redmon and Farhadi 2018).

    Shapes: predictions (N, A (5 + C), H, W) with A = num anchors and C = num_class; objects (N, 1, T, 5) with rows
    class from 0, center x, center y, width, height, or (1, 1, G, 8) of AnnotatedData. `mask` selects the grid's anchors
    among all `biases`, which are in pixels of an image of (anchors_scale H, anchors_scale W). Let v be x, y, log width,
    log height, confidence and classes of a box, and s = 1 / (1 + e^-v) for all but the logarithms. The gradient, before
    the division by N, is

    - s for the confidence, 0 if the box overlaps an object by more than `thresh`;
    - for an anchor that fits an object best among all anchors, or better than `iou_thresh`, in the cell of the object's
      center: coord_scale (2 - the object's area) (s - t) for the coordinates, with v in place of s for the logarithms,
      s - 1 for the confidence, and class_scale (s - y) for the classes, where y is label_smooth_eps / 2, and
      1 - label_smooth_eps / 2 for the classes of all objects of the cell.

    use_logic_gradient multiplies by s (1 - s), and the confidence of matches by object_scale. use_focal_loss weights
    the classes of a cell's first object by -(1 - q) (2 q log q + q - 1) / 2 with q = s of its class. With an `iou_loss`
    other than MSE the gradient of the coordinates is iou_normalizer times that of the overlap (IOU), GIOU, DIOU or
    CIOU, limited to max_delta; overlaps are then measured likewise. The reported loss is the sum of the squares of the
    gradient, divided by N; with an iou_loss the coordinates' part is iou_normalizer times the mean of 1 - overlap.
    Computed on the host.

    Raises:
        ConfigError: mask or biases do not match num.
        ShapeError: the predictions' channels do not match.
        DataError: an object is out of range.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.yolov3_param
        self._squared = param.iou_loss == _Yolov3Parameter.MSE
        self.counted = 0 if self._squared else 1
        super().setup(bottom, top)
        self._anchors = read_anchors(self, param.biases, 1)
        mask = list(param.mask)
        if param.num < 1 or len(mask) < param.num or max(mask) >= len(self._anchors):
            raise self.error(
                f"mask is {mask}; it must have num = {param.num} indices of the {len(self._anchors)} anchors in biases"
            )
        self._mask = np.array(mask[: param.num])
        self._objects = GridObjectsReader(self)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        param = self.param.yolov3_param
        check_predictions(self, bottom[0], param.num, param.num_class)
        self._objects.reshape(bottom)

    def compute(self, values: Rows, labels: Rows) -> GridLoss:
        param = self.param.yolov3_param
        images, _, height, width = values.shape
        values = values.reshape(images, param.num, -1, height, width)
        objects = self._objects.read(labels, param.num_class)
        anchors = self._anchors / (np.array([width, height], np.float32) * _f32(param.anchors_scale))
        codes = np.concatenate((sigmoid(values[:, :, :2]), values[:, :, 2:COORDINATES]), 2)
        boxes = grid_boxes(codes, anchors[self._mask], relative=False)
        confidence = sigmoid(values[:, :, CONFIDENCE])
        gradient = np.zeros_like(values)
        gradient[:, :, CONFIDENCE] = np.where(self._best_overlaps(boxes, objects) > _f32(param.thresh), 0, confidence)

        rows, columns = objects.cells(height, width)
        pairs, chosen = np.nonzero(self._matches(objects, anchors))
        own = (objects.images[pairs], chosen, rows[pairs], columns[pairs])
        cell = (*own[:2], slice(None), *own[2:])
        truth = objects.boxes[pairs]
        gradient[own[0], own[1], CONFIDENCE, own[2], own[3]] = (confidence[own] - 1) * _f32(
            param.object_scale if param.use_logic_gradient else 1
        )
        self._write_classes(gradient, values, cell, objects.classes[pairs])
        lost = self._write_boxes(gradient, codes, boxes, own, truth, anchors[self._mask[chosen]])
        return self._finish(gradient, values, lost, len(pairs))

    def _finish(self, gradient: Rows, values: Rows, lost: float, count: int) -> GridLoss:
        param, images = self.param.yolov3_param, len(values)
        squares = np.square(gradient if self._squared else gradient[:, :, CONFIDENCE:], dtype=np.float64).sum()
        if param.use_logic_gradient:
            for part in (slice(0, 2), slice(CONFIDENCE, None)):
                s = sigmoid(values[:, :, part])
                gradient[:, :, part] *= s * (1 - s)
        gradient /= _f32(images)
        if self._squared:
            return GridLoss(gradient, float(squares) / images)
        share = param.iou_normalizer * lost / (images * self.training_devices)
        return GridLoss(gradient, float(squares) / images, (share,), (float(count),))

    def _best_overlaps(self, boxes: Rows, objects: GridObjects) -> Rows:
        """Return the largest overlap of each box (N, A, H, W) with an object of its image; at least 0."""
        kind = self.param.yolov3_param.iou_loss
        if kind in (_Yolov3Parameter.MSE, _Yolov3Parameter.IOU):
            return best_overlaps(host_threads(self), boxes, objects.boxes, objects.images)
        best = np.zeros(boxes.shape[:-1], np.float32)
        for image, box in zip(objects.images, objects.boxes, strict=True):
            best[image] = np.fmax(best[image], measure(kind, boxes[image], box))
        return best

    def _matches(self, objects: GridObjects, anchors: Rows) -> Rows:
        """Return whether each of the grid's anchors matches each object, (n, A)."""
        param = self.param.yolov3_param
        sizes = np.concatenate((np.zeros_like(anchors), anchors), 1)[None]
        truth = np.concatenate((np.zeros_like(objects.boxes[:, :2]), objects.boxes[:, 2:]), 1)[:, None]
        overlaps = np.nan_to_num(measure(param.iou_loss, sizes, truth), nan=0.0).reshape(len(truth), len(anchors))
        best = np.where(overlaps.max(1) > 0, overlaps.argmax(1), -1)
        matches = best[:, None] == self._mask
        return matches | (overlaps[:, self._mask] > param.iou_thresh) if param.iou_thresh < 1 else matches

    def _write_classes(self, gradient: Rows, values: Rows, cell: tuple[Rows, ...], classes: Rows) -> None:
        """Write the gradient of the classes of matches, whose cells may have several objects."""
        param = self.param.yolov3_param
        count, number = len(classes), np.arange(len(classes))
        scores = sigmoid(values[:, :, CONFIDENCE + 1 :][cell])
        smoothing = _f32(param.label_smooth_eps / 2)
        high = 1 - smoothing
        keys = np.stack((cell[0], cell[1], cell[3], cell[4]), 1)
        _, first, group = np.unique(keys, axis=0, return_index=True, return_inverse=True)
        first = first[np.asarray(group).reshape(-1)]  # the first object of each object's cell
        slopes = scores - (0 if param.use_focal_loss else smoothing)
        slopes[number, classes] = scores[number, classes] - (1 if param.use_focal_loss else high)
        if param.use_focal_loss:
            q = scores[number, classes] + _f32(_SMALLEST)
            slopes *= (_f32(_FOCAL_ALPHA) * -(1 - q) * (2 * q * np.log(q) + q - 1))[:, None]
        slopes = slopes[first]
        of_cell = gradient[:, :, CONFIDENCE + 1 :]
        of_cell[cell] = _f32(param.class_scale) * slopes
        later = number[first != np.arange(count)]
        images, chosen, _, rows, columns = cell
        of_cell[images[later], chosen[later], classes[later], rows[later], columns[later]] = _f32(param.class_scale) * (
            scores[later, classes[later]] - high
        )

    def _write_boxes(
        self, gradient: Rows, codes: Rows, boxes: Rows, own: tuple[Rows, ...], truth: Rows, anchors: Rows
    ) -> float:
        """Write the gradient of the coordinates of matches, and return the sum of 1 - overlap."""
        param = self.param.yolov3_param
        images, chosen, rows, columns = own
        height, width = boxes.shape[2:4]
        predicted = codes[images, chosen, :, rows, columns]
        coordinates = np.arange(COORDINATES)
        index = (images[:, None], chosen[:, None], coordinates, rows[:, None], columns[:, None])
        if self._squared:
            targets = truth.copy()
            targets[:, 0] = truth[:, 0] * _f32(width) - columns
            targets[:, 1] = truth[:, 1] * _f32(height) - rows
            targets[:, 2:] = np.log(truth[:, 2:] / anchors)
            weight = _f32(param.coord_scale) * (2 - truth[:, 2] * truth[:, 3])
            gradient[index] = weight[:, None] * (predicted - targets)
            return 0.0
        kind, own_boxes = param.iou_loss, boxes[own]
        slopes = measure_slopes(kind, own_boxes, truth)
        slopes[:, 2:] *= np.exp(predicted[:, 2:])
        slopes *= _f32(param.iou_normalizer)
        slopes = np.nan_to_num(slopes, nan=0.0, posinf=0.0, neginf=0.0).clip(-param.max_delta, param.max_delta)
        if param.accumulate:
            np.add.at(gradient, index, -slopes)
        else:
            gradient[index] = -slopes
        reported = _Yolov3Parameter.DIOU if kind == _Yolov3Parameter.IOU else kind
        return float((1 - measure(reported, own_boxes, truth)).sum(dtype=np.float64))


# -- overlaps and their derivatives --------------------------------------------------------------------


_DIOU_POWER = 0.6
"""Exponent of the distance in DIOU, as in MobileNet-YOLO."""
_CIOU_SMALLEST = 1e-6


def measure(kind: int, a: Rows, b: Rows) -> Rows:
    """Return the overlap of boxes (..., 4), which broadcast, in the sense of an `iou_loss`; MSE: as IOU."""
    overlaps = center_overlaps(a, b)
    if kind in (_Yolov3Parameter.MSE, _Yolov3Parameter.IOU):
        return overlaps
    one, other = edges(a), edges(b)
    sides = np.maximum(one[..., 2:], other[..., 2:]) - np.minimum(one[..., :2], other[..., :2])
    if kind == _Yolov3Parameter.GIOU:
        hull = sides[..., 0] * sides[..., 1]
        union = a[..., 2] * a[..., 3] + b[..., 2] * b[..., 3] - intersections(one, other, DARKNET)
        return np.where(hull == 0, overlaps, overlaps - (hull - union) / hull)
    diagonal = np.square(sides).sum(-1)
    distance = np.square(a[..., :2] - b[..., :2]).sum(-1) / diagonal
    if kind == _Yolov3Parameter.DIOU:
        return np.where(diagonal == 0, overlaps, overlaps - distance ** _f32(_DIOU_POWER))
    aspect = _aspect_loss(a, b)
    weight = aspect / (1 - overlaps + aspect + _f32(_CIOU_SMALLEST))
    return np.where(diagonal == 0, overlaps, overlaps - distance - weight * aspect)


def _aspect_loss(a: Rows, b: Rows) -> Rows:
    turn = np.arctan(b[..., 2] / b[..., 3]) - np.arctan(a[..., 2] / a[..., 3])
    return _f32(4 / math.pi**2) * turn * turn


def measure_slopes(kind: int, boxes: Rows, truth: Rows) -> Rows:
    """Return the slopes (n, 4) of `measure` in center and size of boxes (n, 4), as darknet's dx_box_iou.

    As there, the slope in a size is not halved, and the slopes of GIOU, DIOU and CIOU replace that of the overlap where
    the boxes are disjoint.
    """
    one, other = edges(boxes), edges(truth)
    low, high, true_low, true_high = one[:, :2], one[:, 2:], other[:, :2], other[:, 2:]
    shared = np.minimum(high, true_high) - np.maximum(low, true_low)
    inner = shared[:, :1] * shared[:, 1:]
    sides, true_sides = high - low, true_high - true_low
    union = sides[:, :1] * sides[:, 1:] + true_sides[:, :1] * true_sides[:, 1:] - inner
    swapped, swapped_shared = sides[:, ::-1], shared[:, ::-1]
    # Slopes of the areas of intersection, union and hull in the edges: low x, low y, high x, high y.
    inner_slopes = np.concatenate(
        (np.where(low > true_low, -swapped_shared, 0), np.where(high < true_high, swapped_shared, 0)), 1
    )
    union_slopes = np.concatenate((-swapped, swapped), 1) - inner_slopes
    slopes = np.where(union > 0, (union * inner_slopes - inner * union_slopes) / (union * union), _f32(0))
    disjoint = (shared <= 0).any(1, keepdims=True)
    hull_sides = np.maximum(high, true_high) - np.minimum(low, true_low)
    if kind == _Yolov3Parameter.GIOU:
        hull, across = hull_sides[:, :1] * hull_sides[:, 1:], hull_sides[:, ::-1]
        hull_slopes = np.concatenate((np.where(low < true_low, -across, 0), np.where(high > true_high, across, 0)), 1)
        more = np.where(hull > 0, (hull * union_slopes - union * hull_slopes) / (hull * hull), _f32(0))
        slopes = np.where(disjoint, more, slopes + more)
    result = np.concatenate((slopes[:, :2] + slopes[:, 2:], slopes[:, 2:] - slopes[:, :2]), 1)
    if kind not in (_Yolov3Parameter.DIOU, _Yolov3Parameter.CIOU):
        return result
    diagonal = np.square(hull_sides).sum(1, keepdims=True)
    offset = truth[:, :2] - boxes[:, :2]
    distance = np.square(offset).sum(1, keepdims=True)
    beyond_low, beyond_high = (low < true_low).astype(np.float32), (high > true_high).astype(np.float32)
    of_centers = (2 * offset * diagonal - 2 * hull_sides * (beyond_high - beyond_low) * distance) / diagonal**2
    of_sizes = hull_sides * (beyond_high + beyond_low) * distance / diagonal**2
    more = np.concatenate((of_centers, of_sizes), 1)
    if kind == _Yolov3Parameter.CIOU:
        aspect = _aspect_loss(boxes, truth)
        overlaps = (inner / union)[:, 0]
        weight = aspect / (1 - overlaps + aspect + _f32(_CIOU_SMALLEST))
        turn = np.arctan(truth[:, 2] / truth[:, 3]) - np.arctan(boxes[:, 2] / boxes[:, 3])
        factor = weight * _f32(8 / math.pi**2) * turn
        more[:, 2] += factor * boxes[:, 3]
        more[:, 3] -= factor * boxes[:, 2]
    return np.where(disjoint, more, np.where(diagonal > 0, result + more, result))


# -- masks ---------------------------------------------------------------------------------------------


@expression
def mask_difference(x: Each, target: Each, factor: Scalar) -> Each:
    return factor * (1 / (1 + exp(-x)) - target)


@expression
def weighted_mask_difference(x: Each, target: Each, sums: Channel, pixels: Scalar, factor: Scalar) -> Each:
    return factor * (2 - sums / (pixels - sums) if target > 0.5 else 1.0) * (1 / (1 + exp(-x)) - target)


@register_layer("YoloSeg")
class YoloSegLayer(ElementLossLayer):
    """The gradient of a mask is d / N with d = object_scale (s - t), s = 1 / (1 + e^-x).

    As `yolo_seg.cpp` of MobileNet-YOLO. Shapes: x and t (N, C, H, W). The reported loss is the sum of d^2 / N, of which
    d / N is not the derivative. A third bottom (N, C) holds the number of a class's pixels w; d of pixels with t > 0.5
    is multiplied by 2 - w / (P - w), where w and the number of pixels P are sums over the batch.

    Raises:
        ShapeError: the counts differ.
    """

    bottoms = (2, 3)
    no_gradient_bottoms = frozenset({1, 2})

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        super().reshape(bottom, top)
        if len(bottom[0].shape) < 2:
            raise self.shape_error("needs masks N C ...", bottom[0])
        if len(bottom) > 2 and bottom[2].count != bottom[0].shape[0] * bottom[0].shape[1]:
            raise self.shape_error("needs one number for each mask, N C", bottom[0], bottom[2])

    def _difference(self, bottom: Blobs, target: Array, factor: float, out: Array) -> None:
        """out = factor * d."""
        factor *= self.param.yolo_seg_param.object_scale
        if len(bottom) == 2:
            self.backend.apply(mask_difference, (bottom[0].data, target, factor), (out,))
            return
        images, channels = bottom[0].shape[:2]
        sums = self.scratch("sums", (channels,)).array
        self.backend.reduce(identity, (self.backend.reshaped(bottom[2].data, (images, channels)),), (sums,))
        pixels = bottom[0].count / max(channels, 1)
        self.backend.apply(weighted_mask_difference, (bottom[0].data, target, sums, pixels, factor), (out,))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        difference = self.scratch("difference", bottom[0].shape).array
        self._difference(bottom, self._targets.load(bottom[1].data), 1.0, difference)
        self.backend.reduce(scaled_square, (difference, 1 / max(bottom[0].shape[0], 1)), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            factor = self.weight() / max(bottom[0].shape[0], 1)
            self._difference(bottom, self._targets.target(bottom[1].data), factor, bottom[0].diff)
            self.apply_top_gradient(top, bottom[0].diff)
