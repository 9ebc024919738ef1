"""DetectionLoss, the loss of YOLO 1 or of MS-CNN."""

from __future__ import annotations

import numpy as np

from caffepy.layers.core.base import Blobs, Layer, LayerContext, register_layer
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.grid_loss import GridLoss, GridLossLayer
from caffepy.layers.detection.yolo_boxes import COORDINATES, center_overlaps
from caffepy.layers.loss.base import LossLayer
from caffepy.proto import caffe_pb2

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
        from caffepy.layers.detection.mscnn_loss import MscnnLossLayer  # another family of forks

        return MscnnLossLayer(param, context)


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
