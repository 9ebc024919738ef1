"""DetectionOutput, and the files of its `save_output_param` in the formats of VOC, COCO and ILSVRC."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from caffepy.data.boxes import Rows
from caffepy.formats.proto import caffe_pb2
from caffepy.formats.prototxt import decode_text, parse_text
from caffepy.layers.detection.boxes import (
    CENTER_SIZE,
    ImageSize,
    Priors,
    check_predictions,
    check_resize,
    decode,
    read_image_sizes,
    read_priors,
    to_pixels,
)
from caffepy.layers.detection.suppression import sort_like_cpp, suppress_classes
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, Layer, LayerContext, host_threads, register_layer, warn
from caffepy.utils.files import atomic_write, read_data

_LOC, _CONF, _PRIORS = range(3)
COLUMNS = 7
_OF_YOLO = ("classes", "num_box", "coords", "nms_threshold")


@register_layer("DetectionOutput")
class DetectionOutputLayer(HostLayer):
    """The boxes that a net predicts, after non-maximum suppression in each class (`detection_output_layer.cpp`).

    Shapes: predictions (N, 4 P L), scores (N, P C), priors (1, 2, 4 P); L is 1 or, without share_location, C. The top
    is (1, 1, D, 7) with rows (image, label, score, xmin, ymin, xmax, ymax), ordered by image and label; D changes from
    pass to pass. If the whole batch has no detections, the top has a row (image, -1, ...) for each image. Computed on
    the host. `save_output_param` writes result files.

    With `use_polygon` (TextBoxes++'s `detection_output_layer.cpp`) each location predicts 8 more numbers, the four
    corners of a quadrangle relative to the prior's, clockwise from the upper left; or 5 more if the field is false, the
    two upper corners of a turned rectangle relative to the prior's center, and its height. They are decoded as
    CENTER_SIZE, do not take part in the suppression, and follow as further columns of the top, 15 or 12.

    Raises:
        ConfigError: a setting is missing or out of range, or use_polygon is given with another code_type than
            CENTER_SIZE, with variance_encoded_in_target, or with result files.
        ShapeError: the bottoms' shapes do not match num_classes.
        DataError: a prior is invalid, or a file of save_output_param cannot be read.
    """

    bottoms = (3, 4)
    has_backward = False
    changes_shapes = True
    blocker = "it suppresses boxes on the host"

    classes: Rows
    """Labels of the classes without the background."""
    more_columns: int
    """Number of columns of the top after a box's corners."""

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.detection_output_param
        given = [name for name in _OF_YOLO if param.HasField(name)] + ["biases"] * bool(param.biases)
        if given:
            raise self.error(
                f"{given[0]} is a setting of YOLO 2, which needs biases and has no settings of SSD; remove those of one"
            )
        if param.num_classes < 1:
            raise self.error("num_classes is needed: how many classes there are with the background")
        nms = param.nms_param
        if not nms.nms_threshold >= 0 or not 0 < nms.eta <= 1:
            raise self.error(
                f"nms_threshold {nms.nms_threshold:g} must be at least 0, and eta {nms.eta:g} above 0 and at most 1"
            )
        if param.visualize:
            raise self.error("visualize is not supported; remove it and draw the boxes of the top")
        self._all_classes = param.num_classes
        self._locations = 1 if param.share_location else self._all_classes
        numbers = [c for c in range(self._all_classes) if c != param.background_label_id]
        self.classes = np.array(numbers, np.int32)
        self._shape_codes = self.more_columns = 0
        if param.HasField("use_polygon"):
            if param.code_type != CENTER_SIZE or param.variance_encoded_in_target:
                raise self.error("use_polygon needs code_type CENTER_SIZE without variance_encoded_in_target")
            self._shape_codes = self.more_columns = 8 if param.use_polygon else 5
        self._files = open_result_files(self, param.save_output_param, numbers)
        if self._files is not None and self._shape_codes:
            raise self.error("the files of save_output_param have no columns for use_polygon; remove one of them")

    def describe(self, priors: Priors, codes: Rows) -> Rows:
        """Return the `more_columns` of each box (N, L, P, K), which follow it in the top."""
        return _decode_shapes(priors, codes[..., 4:])

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        images, priors = (bottom[_LOC].shape or (0,))[0], bottom[_PRIORS].count // 8
        if not bottom[_CONF].shape or bottom[_CONF].shape[0] != images or bottom[_PRIORS].count != 8 * priors:
            raise self.shape_error("needs predictions N 4*P*L, scores N P*C and priors 1 2 4*P", *bottom[:3])
        codes = (4 + self._shape_codes) * self._locations
        check_predictions(self, bottom, images, priors, codes, self._all_classes)
        self._shape = (images, priors)
        top[0].reshape((1, 1, 1, COLUMNS + self.more_columns))

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST with result files, which hold the detections of many passes."""
        return context.phase == caffe_pb2.TEST and writes_files(param.detection_output_param.save_output_param)

    def has_side_effects(self) -> bool:
        return self._files is not None

    def compute(self, loc: Rows, conf: Rows, prior_values: Rows, *_: Rows) -> list[Rows]:
        param = self.param.detection_output_param
        images, count = self._shape
        priors = read_priors(self, prior_values, param.code_type)
        codes = loc.reshape(images, count, self._locations, 4 + self._shape_codes).transpose(0, 2, 1, 3)
        boxes = decode(priors, codes[..., :4], param.code_type, param.variance_encoded_in_target)
        shapes = boxes
        if self.more_columns:
            shapes = np.concatenate([boxes, self.describe(priors, codes)], -1)
        scores = conf.reshape(images, count, self._all_classes)
        order, counts = suppress_classes(host_threads(self), boxes, scores, self.classes, param)
        detections = []
        if self._files is not None:
            self._files.begin(self.first_sample())
        for image in range(images):
            labels = np.repeat(self.classes, counts[image])
            numbers = np.concatenate(
                [np.empty(0, np.int32), *(row[:kept] for row, kept in zip(order[image], counts[image], strict=True))]
            )
            labels, numbers = self._keep_top(labels, numbers, scores[image])
            indices = labels if self._locations > 1 else 0
            detections.append(box_rows(image, labels, scores[image, numbers, labels], shapes[image, indices, numbers]))
            if self._files is not None:
                self._files.add(detections[-1])
        columns = COLUMNS + self.more_columns
        rows = np.concatenate([np.empty((0, columns), np.float32), *detections])
        return [(rows if len(rows) else empty_rows(images, columns))[None, None]]

    def _keep_top(self, labels: Rows, numbers: Rows, scores: Rows) -> tuple[Rows, Rows]:
        """Keep an image's `keep_top_k` boxes with the highest scores, ordered by label."""
        keep = self.param.detection_output_param.keep_top_k
        if keep < 0 or len(labels) <= keep:
            return labels, numbers
        indices = np.arange(len(labels), dtype=np.int32)
        sort_like_cpp(scores[numbers, labels], indices)
        indices = indices[:keep]
        indices = indices[np.argsort(labels[indices], kind="stable")]
        return labels[indices], numbers[indices]


def box_rows(image: int | Rows, labels: Rows, scores: Rows, boxes: Rows) -> Rows:
    """Return the rows of DetectionOutput's top."""
    rows = np.empty((len(labels), 3 + boxes.shape[-1]), np.float32)
    rows[:, 0], rows[:, 1], rows[:, 2], rows[:, 3:] = image, labels, scores, boxes
    return rows


def _decode_shapes(priors: Priors, codes: Rows) -> Rows:
    """Return the quadrangles (..., P, 8) or turned rectangles (..., P, 5) that predictions of this shape encode."""
    boxes = priors.boxes
    corners = boxes[:, [0, 1, 2, 1, 2, 3, 0, 3]] if codes.shape[-1] == 8 else np.tile(priors.centers, 2)
    count = corners.shape[-1]
    factors = np.tile(priors.variances[:, :2], count // 2)
    points = factors * codes[..., :count] * np.tile(priors.extents, count // 2) + corners
    if count == codes.shape[-1]:
        return points
    height = np.exp((priors.variances[:, 3] * codes[..., count]).astype(np.float64)) * priors.extents[:, 1]
    return np.concatenate([points, height[..., None].astype(np.float32)], -1)


def empty_rows(images: int, columns: int) -> Rows:
    """Return the rows of a batch without detections."""
    rows = np.full((images, columns), -1, np.float32)
    rows[:, 0] = np.arange(images)
    return rows


# -- result files --------------------------------------------------------------------------------------


FORMATS = ("VOC", "COCO", "ILSVRC")
_MAX_BYTES = 1 << 24
"""Size limit of a label map file."""
_MAX_DIGITS = 300
"""Longest number that a double can represent."""
_Detection = tuple[ImageSize, int, float, list[float]]
"""Image, label, score, and the box as left, top, width and height."""


def read_label_map(layer: Layer, name: str) -> dict[int, str]:
    """Return the names of the classes in a label map file.

    Raises:
        DataError: the file cannot be read, or has a class twice.
        ConfigError: the file is not a label map.
    """
    path = layer.context.resolve(name)
    label_map = caffe_pb2.LabelMap()
    content = read_data(path, _MAX_BYTES, f"{layer.where}: label_map_file {path}")
    text = decode_text(content, f"label_map_file {path}")
    parse_text(text, label_map, f"label_map_file {path}")
    names: dict[int, str] = {}
    for item in label_map.item:
        if item.label in names or item.name in names.values():
            raise layer.data_error(f"label_map_file {path} has the label {item.label} or the name '{item.name}' twice")
        names[item.label] = item.name
    return names


def _number(word: str) -> int | float | str:
    """Return the word as a number for JSON if it is one that a double can represent, else the word."""
    if len(word) > _MAX_DIGITS:
        return word
    if word.lstrip("-").isdecimal() and word.count("-") <= word.startswith("-"):
        return int(word)
    whole, dot, part = word.partition(".")
    return float(word) if dot and part.isdecimal() and whole.lstrip("-").isdecimal() else word


def writes_files(param: caffe_pb2.SaveOutputParameter) -> bool:
    """Return whether the settings ask for result files and have all that these need."""
    return bool(param.output_directory and param.label_map_file and param.name_size_file)


def open_result_files(layer: Layer, param: caffe_pb2.SaveOutputParameter, classes: list[int]) -> ResultFiles | None:
    """Return the result files of a layer; None, with a warning, if a field is missing or devices divide the samples.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: a file of the settings cannot be read.
    """
    given = [param.output_directory, param.label_map_file, param.name_size_file]
    if any(given) and not all(given):
        warn(layer, "no files are written: save_output_param needs output_directory, label_map_file, name_size_file")
    if not writes_files(param):
        return None
    shard = layer.context.shard
    if shard.parts > 1:
        warn(layer, "save_output_param has no effect in a TRAIN net on several devices; save the detections in a test")
        return None
    return ResultFiles(layer, param, classes) if layer.backend.holds_values and shard.rank == 0 else None


class ResultFiles:
    """Collects the detections of `num_test_image` images, writes the result files, and starts again.

    The lines of name_size_file give the names and sizes of the images, in order.

    Args:
        layer: for messages and paths.
        param: the layer's `save_output_param`.
        classes: labels of the classes without the background.

    Raises:
        ConfigError: the settings contradict each other.
        DataError: a file of the settings cannot be read.
    """

    def __init__(self, layer: Layer, param: caffe_pb2.SaveOutputParameter, classes: list[int]) -> None:
        self._layer = layer
        self._param = param
        self._classes = classes
        self._names = read_label_map(layer, self._param.label_map_file)
        self._images = read_image_sizes(layer, self._param.name_size_file)
        self._check()
        self._resize = self._param.resize_param if self._param.HasField("resize_param") else None
        given = self._param.HasField("num_test_image")
        self._count = self._param.num_test_image if given else len(self._images)
        if not 0 < self._count <= len(self._images):
            raise layer.error(
                f"num_test_image is {self._count}, but name_size_file has {len(self._images)} images; correct one"
            )
        self._folder = Path(self._param.output_directory)
        self._folder.mkdir(parents=True, exist_ok=True)
        self._next, self._missing, self._started = 0, 0, False
        self._detections: list[_Detection] = []

    def _check(self) -> None:
        if self._param.output_format not in FORMATS:
            raise self._layer.error(
                f"output_format is '{self._param.output_format}'; it must be one of {', '.join(FORMATS)}"
            )
        if self._param.HasField("resize_param"):
            check_resize(self._layer, self._param.resize_param)
        missing = [c for c in self._classes if c not in self._names]
        if missing:
            raise self._layer.data_error(f"label_map_file {self._param.label_map_file} has no label {missing[0]}")
        for name in (self._names[c] for c in self._classes):
            if "/" in name or "\0" in name:
                raise self._layer.data_error(f"label_map_file: the name '{name}' cannot be part of a file's name")

    def begin(self, first_sample: int) -> None:
        """Set the line of name_size_file for the first pass, also of a resumed run. Later calls do nothing.

        Args:
            first_sample: global number of the pass's first sample in the test.
        """
        if not self._started:
            self._next = self._missing = first_sample % self._count
        self._started = True

    def add(self, rows: Rows) -> None:
        """Add the detections (K, 7) of the next image, and write the files after the last one."""
        image = self._images[self._next]
        boxes = to_pixels(rows[:, 3:], image, self._resize).corners.astype(np.float64)
        boxes[:, 2:] = np.float32(boxes[:, 2:]) - np.float32(boxes[:, :2])
        rounded = np.copysign(np.floor(np.abs(boxes * 100) + 0.5), boxes) / 100
        for row, box in zip(rows, rounded, strict=True):
            self._detections.append((image, int(row[1]), float(row[2]), [float(v) for v in box]))
        self._next += 1
        if self._next == self._count:
            self._write()
            if self._missing:
                warn(
                    self._layer,
                    f"the result files lack {self._missing} images that were tested before the run was resumed",
                )
            self._next = self._missing = 0
            self._detections.clear()

    def _write(self) -> None:
        prefix = self._param.output_name_prefix
        if self._param.output_format == "COCO":
            self._write_text(f"{prefix}.json", json.dumps(list(map(self._as_json, self._detections)), indent=4) + "\n")
        elif self._param.output_format == "ILSVRC":
            lines = [f"{image.name} {label} {_line(score, box)}" for image, label, score, box in self._detections]
            self._write_text(f"{prefix}.txt", "".join(lines))
        else:
            for label in self._classes:
                of_class = [detection for detection in self._detections if detection[1] == label]
                lines = [f"{image.name} {_line(score, box)}" for image, _, score, box in of_class]
                self._write_text(f"{prefix}{self._names[label]}.txt", "".join(lines))

    def _as_json(self, detection: _Detection) -> dict[str, object]:
        image, label, score, box = detection
        return {
            "image_id": _number(image.name),
            "category_id": _number(self._names[label]),
            "bbox": box,
            "score": float(f"{score:.9g}"),
        }

    def _write_text(self, name: str, text: str) -> None:
        with atomic_write(self._folder / name) as file:
            file.write(text.encode())


def _line(score: float, box: list[float]) -> str:
    """Return a line of score, xmin, ymin, xmax and ymax, in whole pixels."""
    left, top, width, height = (int(value) for value in box)
    return f"{score:.6g} {left} {top} {left + width} {top + height}\n"
