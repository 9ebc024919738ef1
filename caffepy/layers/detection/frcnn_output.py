"""FrcnnOutput: the detections of Cascade R-CNN."""

from __future__ import annotations

import numpy as np

from caffepy.data.transforms.pixel_boxes import PixelBoxes
from caffepy.layers.core.base import Blobs, Layer, LayerContext, register_layer
from caffepy.layers.detection.anchors import decode_regions, read_normalisation
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.detection_output import ResultFiles, open_result_files, writes_files
from caffepy.layers.detection.sorting import sort_like_cpp
from caffepy.layers.detection.suppression import check_mode, suppress_pixels
from caffepy.proto import caffe_pb2

_PROBABILITIES, _OFFSETS, _REGIONS, _SIZE = range(4)
COLUMNS = 7


@register_layer("FrcnnOutput")
class FrcnnOutputLayer(Layer):
    """The boxes of one image after suppression in each class (Cascade R-CNN's `frcnn_output_layer.cpp`).

    Shapes: probabilities (R, C), offsets (R, 4 C), or (R, 8) if `bbox_reg_param.cls_aware` is false, regions (R, 5) or
    (R, 6), and the net's input (1, 2) as height and width. The top is (D, 7, 1, 1): a first row (0, -1, ...), and rows
    (0, x1, y1, x2, y2, label, probability) in pixels of the input, ordered by label; D changes from pass to pass. Boxes
    with a probability below `conf_thr` are dropped; `max_det_num` limits the detections of an image. Computed on the
    host. `save_output_param` writes result files as DetectionOutput does.

    Raises:
        ConfigError: a setting is out of range.
        ShapeError: the bottoms have other shapes.
        DataError: a region is not of image 0 or has no area, or a file of save_output_param cannot be read.
    """

    bottoms = (4, 4)
    has_backward = False
    exact_bottoms = frozenset({_REGIONS})
    no_gradient_bottoms = frozenset({_SIZE})
    changes_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.frcnn_output_param
        check_mode(self, param.nms_type)
        self._normalisation = read_normalisation(self)
        self._aware = self.param.bbox_reg_param.cls_aware
        self._files: ResultFiles | None = None
        self._opened = False

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[_PROBABILITIES].shape
        if len(shape) < 2 or bottom[_PROBABILITIES].count != shape[0] * shape[1] or shape[1] < 2:
            raise self.shape_error("needs probabilities (R, C) of 2 or more classes", bottom[_PROBABILITIES])
        regions, classes = shape[:2]
        offsets = 4 * classes if self._aware else 8
        counts = [blob.count for blob in bottom[1:]]
        if counts[0] != regions * offsets or counts[1] not in (5 * regions, 6 * regions) or counts[2] != 2:
            raise self.shape_error(
                f"needs offsets (R, {offsets}), regions (R, 5) or (R, 6), and the size (1, 2) of one image", *bottom[1:]
            )
        if not self._opened:
            self._opened = True
            self._files = open_result_files(
                self, self.param.frcnn_output_param.save_output_param, list(range(1, classes))
            )
        top[0].reshape((1, COLUMNS, 1, 1))

    @classmethod
    def depends_on_earlier_passes(cls, param: caffe_pb2.LayerParameter, context: LayerContext) -> bool:
        """In TEST with result files, which hold the detections of many passes."""
        return context.phase == caffe_pb2.TEST and writes_files(param.frcnn_output_param.save_output_param)

    def has_side_effects(self) -> bool:
        return bool(self.param.frcnn_output_param.save_output_param.output_directory)

    def capture_blocker(self) -> str:
        return "it suppresses boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        regions, classes = bottom[_PROBABILITIES].shape[:2]
        rows = np.full((1, COLUMNS), -1, np.float32)
        if self.backend.holds_values:
            values = [self.backend.to_host(blob.data) for blob in bottom]
            boxes = self._boxes(values[_OFFSETS].reshape(regions, -1, 4), values[_REGIONS].reshape(regions, -1))
            rows[0, 0] = 0
            size = values[_SIZE].reshape(2)
            found = self._detect(values[_PROBABILITIES].reshape(regions, classes), boxes, size)
            self._save(found, size)
            rows = np.concatenate([rows, found])
        top[0].reshape((len(rows), COLUMNS, 1, 1))
        self.backend.from_host(rows[:, :, None, None], top[0].data)

    def _boxes(self, offsets: Rows, regions: Rows) -> Rows:
        """Return the corners (R, C, 4) of the predictions, or (R, 2, 4).

        Raises:
            DataError: a region is not of image 0, or has no area.
        """
        bad = np.flatnonzero((regions[:, 0] != 0) | ~(regions[:, 3:5] >= regions[:, 1:3]).all(1))
        if len(bad):
            row = " ".join(f"{v:g}" for v in regions[bad[0], :5])
            raise self.data_error(
                f"region {bad[0]} of '{self.bottom_names[_REGIONS]}' is ({row}); it must be of image 0 of a batch of "
                "one image, with x1 <= x2 and y1 <= y2"
            )
        with np.errstate(all="ignore"):
            return decode_regions(offsets, regions[:, 1:5], self._normalisation)

    def _detect(self, probabilities: Rows, boxes: Rows, size: Rows) -> Rows:
        """Return the detections as rows."""
        param = self.param.frcnn_output_param
        found = [np.empty((0, COLUMNS), np.float32)]
        for label in range(1, probabilities.shape[1]):
            order = np.flatnonzero(probabilities[:, label] >= np.float32(param.conf_thr)).astype(np.int32)
            scores = probabilities[order, label]
            sort_like_cpp(scores, order)
            corners = boxes[order, label if self._aware else 1]
            corners[:, :2] = np.maximum(corners[:, :2], np.float32(0))
            corners[:, 2:] = np.minimum(corners[:, 2:], size[::-1])
            kept = suppress_pixels(PixelBoxes.from_corners(corners), param.iou_thr, param.nms_type)
            rows = np.empty((len(kept), COLUMNS), np.float32)
            rows[:, 0], rows[:, 1:5], rows[:, 5], rows[:, 6] = 0, corners[kept], label, scores[kept]
            found.append(rows)
        rows = np.concatenate(found)
        if param.max_det_num and len(rows) > param.max_det_num:
            order = np.arange(len(rows), dtype=np.int32)
            sort_like_cpp(np.ascontiguousarray(rows[:, 6]), order)
            order = order[: param.max_det_num]
            rows = rows[order[np.argsort(rows[order, 5], kind="stable")]]
        return rows

    def _save(self, rows: Rows, size: Rows) -> None:
        if self._files is None:
            return
        self._files.begin(self.first_sample())
        fractions = rows[:, 1:5] / np.tile(size[::-1], 2)
        self._files.add(np.concatenate([rows[:, :1], rows[:, 5:7], fractions], 1))
