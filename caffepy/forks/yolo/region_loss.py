"""RegionLoss, the loss of YOLO 2, and Region, its activations."""

from __future__ import annotations

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
    grid_boxes,
    read_anchors,
    sigmoid,
)
from caffepy.layers.detection.boxes import Rows, softmax
from caffepy.layers.detection.threads import host_threads
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.utils.files import read_regular

_MAX_BYTES = 1 << 20
"""Size limit of a class map."""
_f32 = np.float32


@register_layer("RegionLoss")
class RegionLossLayer(GridLossLayer):
    """The loss of YOLO 2 (`region_loss_layer.cpp` of MobileNet-YOLO and of Intel Caffe; Redmon and Farhadi 2017).

    Shapes: predictions (N, A (5 + C), H, W) with A = num anchors and C = num_class; objects (N, 1, T, 5) with rows
    class from 0, center x, center y, width, height, or (1, 1, G, 8) of AnnotatedData. The values of a box are x, y,
    log width, log height, confidence and classes. With s = 1 / (1 + e^-x), p = s(confidence) and q = softmax(classes)
    the gradient, before the division by N, is

    - noobject_scale p p (1 - p) for the confidence, 0 if the box overlaps an object by more than `thresh`;
    - for the anchor that fits an object best, in the cell of its center: coord_scale k (s - t) s (1 - s) for x and y,
      coord_scale k (x - t) for the logarithms, class_scale (q - onehot), and object_scale (p - o) p (1 - p) with o the
      overlap of box and object. With rescore: 0 k is 2 - the object's area and o is 1; else k is 1.

    The reported loss is the sum of the squares of that gradient, divided by N.

    With objects of AnnotatedData the layer computes as Intel Caffe: differences of coordinates are limited to 1, k is
    1, the confidence of matches has the gradient -2 object_scale (1 - p)^3 p (1 - p), and the loss is not divided by N.
    `class_map` names a file with the channel of each class. Computed on the host.

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
        param, intel = self.param.region_loss_param, self._objects.corners
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

        rows, columns = objects.cells(height, width)
        anchors = self._match(objects, boxes, rows, columns)
        cell = (objects.images, anchors, slice(None), rows, columns)
        own = (objects.images, anchors, rows, columns)
        difference = self._differences(codes[cell], objects, anchors, rows, columns, (height, width))
        if intel:
            difference = np.clip(difference, -1, 1)
        weight = np.full(len(anchors), param.coord_scale, np.float32)
        if not intel and not param.rescore:
            weight *= 2 - objects.boxes[:, 2] * objects.boxes[:, 3]
        of_centers = codes[cell][:, :2]
        difference[:, :2] *= of_centers * (1 - of_centers)
        p, overlaps = confidence[own], center_overlaps(boxes[own], objects.boxes)
        matched = -2 * (1 - p) ** 3 if intel else p - (overlaps if param.rescore else _f32(1))
        channels = objects.classes if self._class_map is None else self._class_map[objects.classes]
        q = softmax(values[:, :, CONFIDENCE + 1 :][cell], 1)
        q[np.arange(len(q)), channels] -= 1
        found = gradient[cell]
        found[:, :COORDINATES] = difference * weight[:, None]
        found[:, CONFIDENCE] = _f32(param.object_scale) * matched * slope[own]
        found[:, CONFIDENCE + 1 :] = _f32(param.class_scale) * q
        gradient[cell] = found  # of several objects in a cell the last one counts
        total = float(np.square(gradient, dtype=np.float64).sum())
        return GridLoss(gradient / _f32(images), total * self.training_devices if intel else total / images)

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
class RegionLayer(Layer):
    """The activations of YOLO 2 in the order of cells (`region_layer.cpp` of caffe-yolov2).

    Let A = boxes_of_each_grid and D = coords + 1 + classes. The bottom is (N, A D, H, W). The top has its shape; its
    memory is (N, H W, A, D), where value 4 of a box is 1 / (1 + e^-x), with `softmax` the values from 5 on are their
    softmax, and others are copied. It has no gradient. Computed on the host.

    Raises:
        ShapeError: the bottom's channels do not match.
    """

    has_backward = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.region_param
        channels = param.boxes_of_each_grid * (param.coords + 1 + param.classes)
        if param.coords < CONFIDENCE or len(bottom[0].shape) != 4 or bottom[0].shape[1] != channels:
            raise self.shape_error(
                f"boxes_of_each_grid {param.boxes_of_each_grid}, coords {param.coords} and classes {param.classes} "
                f"need {channels} channels and at least {CONFIDENCE} coords",
                bottom[0],
            )
        self.refuse_in_place(bottom, top)
        top[0].reshape(bottom[0].shape)

    def capture_blocker(self) -> str:
        return "it activates boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, (images, channels, height, width) = self.param.region_param, bottom[0].shape
        values = self.backend.to_host(bottom[0].data)
        boxes = param.boxes_of_each_grid
        cells = values.reshape(images, channels, -1).transpose(0, 2, 1).reshape(images, -1, boxes, channels // boxes)
        cells = np.array(cells, np.float32)
        cells[..., CONFIDENCE] = sigmoid(cells[..., CONFIDENCE])
        if param.softmax and param.classes:
            first = CONFIDENCE + 1
            cells[..., first : first + param.classes] = softmax(cells[..., first : first + param.classes], -1)
        self.backend.from_host(cells.reshape(images, channels, height, width), top[0].data)
