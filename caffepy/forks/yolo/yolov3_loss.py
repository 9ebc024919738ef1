"""Yolov3, the loss of YOLO 3."""

from __future__ import annotations

import math

import numpy as np

from caffepy.forks.yolo.boxes import (
    CONFIDENCE,
    COORDINATES,
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
)
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.threads import host_threads
from caffepy.layers.layer import Blobs, register_layer

_Parameter = caffe_pb2.Yolov3Parameter
_FOCAL_ALPHA = 0.5
_SMALLEST = 1e-15
"""Added to a probability before its logarithm."""
_f32 = np.float32


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
        self._squared = param.iou_loss == _Parameter.MSE
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
        if kind in (_Parameter.MSE, _Parameter.IOU):
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
        reported = _Parameter.DIOU if kind == _Parameter.IOU else kind
        return float((1 - measure(reported, own_boxes, truth)).sum(dtype=np.float64))


# -- overlaps and their derivatives --------------------------------------------------------------------


_DIOU_POWER = 0.6
"""Exponent of the distance in DIOU, as in MobileNet-YOLO."""
_CIOU_SMALLEST = 1e-6


def measure(kind: int, a: Rows, b: Rows) -> Rows:
    """Return the overlap of boxes (..., 4), which broadcast, in the sense of an `iou_loss`; MSE: as IOU."""
    overlaps = center_overlaps(a, b)
    if kind in (_Parameter.MSE, _Parameter.IOU):
        return overlaps
    one, other = edges(a), edges(b)
    sides = np.maximum(one[..., 2:], other[..., 2:]) - np.minimum(one[..., :2], other[..., :2])
    if kind == _Parameter.GIOU:
        hull = sides[..., 0] * sides[..., 1]
        shared = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
        inner = np.where((shared < 0).any(-1), _f32(0), shared[..., 0] * shared[..., 1])
        union = a[..., 2] * a[..., 3] + b[..., 2] * b[..., 3] - inner
        return np.where(hull == 0, overlaps, overlaps - (hull - union) / hull)
    diagonal = np.square(sides).sum(-1)
    distance = np.square(a[..., :2] - b[..., :2]).sum(-1) / diagonal
    if kind == _Parameter.DIOU:
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
    if kind == _Parameter.GIOU:
        hull, across = hull_sides[:, :1] * hull_sides[:, 1:], hull_sides[:, ::-1]
        hull_slopes = np.concatenate((np.where(low < true_low, -across, 0), np.where(high > true_high, across, 0)), 1)
        more = np.where(hull > 0, (hull * union_slopes - union * hull_slopes) / (hull * hull), _f32(0))
        slopes = np.where(disjoint, more, slopes + more)
    result = np.concatenate((slopes[:, :2] + slopes[:, 2:], slopes[:, 2:] - slopes[:, :2]), 1)
    if kind not in (_Parameter.DIOU, _Parameter.CIOU):
        return result
    diagonal = np.square(hull_sides).sum(1, keepdims=True)
    offset = truth[:, :2] - boxes[:, :2]
    distance = np.square(offset).sum(1, keepdims=True)
    beyond_low, beyond_high = (low < true_low).astype(np.float32), (high > true_high).astype(np.float32)
    of_centers = (2 * offset * diagonal - 2 * hull_sides * (beyond_high - beyond_low) * distance) / diagonal**2
    of_sizes = hull_sides * (beyond_high + beyond_low) * distance / diagonal**2
    more = np.concatenate((of_centers, of_sizes), 1)
    if kind == _Parameter.CIOU:
        aspect = _aspect_loss(boxes, truth)
        overlaps = (inner / union)[:, 0]
        weight = aspect / (1 - overlaps + aspect + _f32(_CIOU_SMALLEST))
        turn = np.arctan(truth[:, 2] / truth[:, 3]) - np.arctan(boxes[:, 2] / boxes[:, 3])
        factor = weight * _f32(8 / math.pi**2) * turn
        more[:, 2] += factor * boxes[:, 3]
        more[:, 3] -= factor * boxes[:, 2]
    return np.where(disjoint, more, np.where(diagonal > 0, result + more, result))
