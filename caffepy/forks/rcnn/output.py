"""Outputs of MS-CNN and Cascade R-CNN: proposals (BoxOutput, BoxGroupOutput) and detections (FrcnnOutput)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caffepy.data.boxes import CORNERS, Boxes, Rows
from caffepy.forks.rcnn.anchors import Anchors, decode_regions, read_anchors, read_limits, read_normalisation
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.output import ResultFiles, open_result_files, writes_files
from caffepy.layers.detection.suppression import check_mode, descending, sort_like_cpp, suppress
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, Layer, LayerContext, register_layer

_NO_BOX = (0, 1, 1, 10, 10, 0)
"""The only row if the whole batch has no box: a region that can be pooled."""
_COLUMNS = 5


@dataclass(frozen=True)
class Candidates:
    """The boxes of one image before suppression, with their scores (n,) and what the rows of the tops hold (n, 4)."""

    boxes: Boxes
    scores: Rows
    rows: Rows


class BoxProposalsLayer(Layer):
    """A layer that suppresses boxes and gives regions for pooling."""

    tops = (1, 2)
    has_backward = False
    changes_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.settings()
        check_mode(self, param.nms_type)
        self._normalisation = read_normalisation(self)
        self._limits = read_limits(self, param.field_xyr, param.field_whr)

    def settings(self) -> caffe_pb2.BoxOutputParameter | caffe_pb2.BoxGroupOutputParameter:
        """Return the layer's parameter."""
        raise NotImplementedError

    def images(self, bottom: Blobs) -> int:
        """Return the number of images of the batch."""
        raise NotImplementedError

    def candidates(self, values: list[Rows]) -> list[Candidates]:
        """Return the boxes of each image in descending order of scores."""
        raise NotImplementedError

    def capture_blocker(self) -> str:
        return "it suppresses boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        values = [self.backend.to_host(blob.data) for blob in bottom]
        if self.backend.holds_values:
            with np.errstate(all="ignore"):
                rows = self._suppressed(self.candidates(values))
        else:
            rows = np.zeros((max(self.images(bottom) * self.settings().max_post_nms_num, 1), 6), np.float32)
        for index, blob in enumerate(top):
            blob.reshape((len(rows), _COLUMNS + index, 1, 1))
            part = np.ascontiguousarray(rows[:, : _COLUMNS + index])
            self.backend.from_host(part.reshape(blob.shape), blob.data)

    def _suppressed(self, images: list[Candidates]) -> Rows:
        """Return the rows (image, x1, y1, x2, y2, score) of all images."""
        param, found = self.settings(), []
        for image, of_image in enumerate(images):
            kept = suppress(of_image.boxes, param.iou_thr, param.nms_type, param.max_post_nms_num)
            rows = np.empty((len(kept), 6), np.float32)
            rows[:, 0], rows[:, 1:5], rows[:, 5] = image, of_image.rows[kept], of_image.scores[kept]
            found.append(rows)
        rows = np.concatenate(found)
        return rows if len(rows) else np.array([_NO_BOX], np.float32)


@register_layer("BoxOutput")
class BoxOutputLayer(BoxProposalsLayer):
    """The boxes that maps predict, after non-maximum suppression (MS-CNN's `box_output_layer.cpp`; Cai et al. 2016).

    Shapes: one map (N, C + 4, H, W) for each size of anchor, scores of C classes and then the offsets of the box; the
    top is (R, 5, 1, 1) with rows (image, x1, y1, x2, y2) in pixels of the net's input, for ROIPooling; R changes from
    pass to pass. A second top (R, 6, 1, 1) also holds the score. The score of a box is the highest score of an object
    minus the background's. Boxes with a score below `fg_thr` or a side below `min_size` are dropped. A batch without
    boxes has the row (0, 1, 1, 10, 10). Computed on the host. The layer has no gradient.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: a bottom has another number of images, or fewer than 6 channels.
    """

    bottoms = (1, None)

    def settings(self) -> caffe_pb2.BoxOutputParameter:
        return self.param.box_output_param

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.settings()
        fields = (param.field_w, param.field_h, param.downsample_rate)
        if any(len(values) != len(bottom) for values in fields):
            raise self.error(f"needs field_w, field_h and downsample_rate for each of its {len(bottom)} bottoms")
        self._anchors = [read_anchors(self, w, h, rate, "downsample_rate") for w, h, rate in zip(*fields, strict=True)]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        for blob in bottom:
            if len(blob.shape) != 4 or blob.shape[0] != bottom[0].shape[0] or blob.shape[1] < 6:
                raise self.shape_error("needs maps (N, classes + 4, H, W) of 2 or more classes", blob)
        for index, blob in enumerate(top):
            blob.reshape((1, _COLUMNS + index, 1, 1))

    def images(self, bottom: Blobs) -> int:
        return bottom[0].shape[0]

    def candidates(self, values: list[Rows]) -> list[Candidates]:
        maps = [self._boxes_of(value, anchors) for value, anchors in zip(values, self._anchors, strict=True)]
        found = []
        for image in range(len(values[0])):
            boxes, scores = (np.concatenate([part[which][image] for part in maps]) for which in (0, 1))
            good = (scores >= self.settings().fg_thr) & (boxes[:, 2:] >= self.settings().min_size).all(1)
            boxes, scores = boxes[good], scores[good]
            order = descending(scores)[: self.settings().max_nms_num or None]
            boxes = boxes[order]
            rows = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
            found.append(Candidates(Boxes.from_sizes(boxes), scores[order], rows))
        return found

    def _boxes_of(self, values: Rows, anchors: Anchors) -> tuple[Rows, Rows]:
        """Return the boxes (N, H W, 4) of a map, clipped to the image, and their scores (N, H W)."""
        images, channels, rows, columns = values.shape
        scores = values[:, 1 : channels - 4].max(1) - values[:, 0]
        boxes = anchors.decode(values[:, None, channels - 4 :], self._normalisation, self._limits)[:, 0]
        size = np.array([columns, rows], np.float32).reshape(2, 1, 1) * np.float32(anchors.stride)
        boxes[:, :2] = np.maximum(boxes[:, :2], np.float32(0))
        boxes[:, 2:] = np.minimum(boxes[:, 2:], size - boxes[:, :2])
        return boxes.reshape(images, 4, -1).transpose(0, 2, 1), scores.reshape(images, -1)


@register_layer("BoxGroupOutput")
class BoxGroupOutputLayer(BoxProposalsLayer):
    """The boxes that groups of anchors predict, after suppression (Cascade R-CNN's `box_group_output_layer.cpp`).

    Bottoms come in pairs: probabilities (N G, C, H, W) of G anchors and offsets (N G, 4, H, W), with one
    `box_group_param` for each pair. The tops are as BoxOutput's, (R, 5, 1, 1) and (R, 6, 1, 1). The score of a box is
    1 minus the probability of the background. Boxes that overlap a box with a higher score by more than `iou_thr` are
    dropped; of an image max_nms_num boxes are considered and max_post_nms_num kept. Equal scores keep their order.
    Computed on the host. The layer has no gradient.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms are not such pairs.
    """

    bottoms = (2, None)

    def settings(self) -> caffe_pb2.BoxGroupOutputParameter:
        return self.param.box_group_output_param

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        groups = self.settings().box_group_param
        if len(bottom) != 2 * len(groups):
            raise self.error(f"has {len(bottom)} bottoms and {len(groups)} box_group_param; each takes two bottoms")
        self._anchors = [read_anchors(self, list(g.field_w), list(g.field_h), g.stride, "stride") for g in groups]

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        images = self.images(bottom)
        for index, anchors in enumerate(self._anchors):
            scores, offsets = bottom[2 * index : 2 * index + 2]
            kinds = len(anchors.widths)
            wanted = (images * kinds, 4, *scores.shape[2:])
            if len(scores.shape) != 4 or scores.shape[0] != images * kinds or offsets.shape != wanted:
                raise self.shape_error(
                    f"needs probabilities (N * {kinds}, C, H, W) and offsets (N * {kinds}, 4, H, W)", scores, offsets
                )
        for index, blob in enumerate(top):
            blob.reshape((1, _COLUMNS + index, 1, 1))

    def images(self, bottom: Blobs) -> int:
        return (bottom[0].shape or (0,))[0] // len(self._anchors[0].widths)

    def candidates(self, values: list[Rows]) -> list[Candidates]:
        param = self.settings()
        images = len(values[0]) // len(self._anchors[0].widths)
        maps = [self._boxes_of(values[2 * i], values[2 * i + 1], anchors) for i, anchors in enumerate(self._anchors)]
        found = []
        for image in range(images):
            corners, scores = (np.concatenate([part[which][image] for part in maps]) for which in (0, 1))
            sides = corners[:, 2:] - corners[:, :2] + np.float32(1)
            good = (scores >= param.fg_thr) & (sides >= param.min_size).all(1)
            corners, scores = corners[good], scores[good]
            order = np.argsort(-scores, kind="stable")[: param.max_nms_num or None]
            corners = corners[order]
            found.append(Candidates(Boxes.from_corners(corners, CORNERS), scores[order], corners))
        return found

    def _boxes_of(self, scores: Rows, offsets: Rows, anchors: Anchors) -> tuple[Rows, Rows]:
        """Return the corners (N, G H W, 4) of a pair's boxes, clipped to the image, and their scores (N, G H W)."""
        kinds = len(anchors.widths)
        images, (rows, columns) = len(scores) // kinds, scores.shape[2:]
        offsets = offsets.reshape(images, kinds, 4, rows, columns)
        boxes = anchors.decode(offsets, self._normalisation, self._limits)
        corners = np.concatenate([boxes[:, :, :2], boxes[:, :, :2] + boxes[:, :, 2:] - np.float32(1)], 2)
        size = np.array([columns, rows], np.float32).reshape(2, 1, 1) * np.float32(anchors.stride)
        corners[:, :, :2] = np.maximum(corners[:, :, :2], np.float32(0))
        corners[:, :, 2:] = np.minimum(corners[:, :, 2:], size)
        objectness = np.float32(1) - scores[:, 0].reshape(images, -1)
        return corners.transpose(0, 1, 3, 4, 2).reshape(images, -1, 4), objectness


_PROBABILITIES, _OFFSETS, _REGIONS, _SIZE = range(4)
COLUMNS = 7


@register_layer("FrcnnOutput")
class FrcnnOutputLayer(HostLayer):
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
    blocker = "it suppresses boxes on the host"

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

    def compute(self, probabilities: Rows, offsets: Rows, regions: Rows, size: Rows) -> list[Rows]:
        count, size = len(probabilities), size.reshape(2)
        boxes = self._boxes(offsets.reshape(count, -1, 4), regions.reshape(count, -1))
        found = self._detect(probabilities.reshape(count, -1), boxes, size)
        self._save(found, size)
        first = np.array([[0, *(-1,) * (COLUMNS - 1)]], np.float32)
        return [np.concatenate([first, found])[:, :, None, None]]

    def _boxes(self, offsets: Rows, regions: Rows) -> Rows:
        """Return the corners (R, C, 4) of the predictions, or (R, 2, 4)."""
        bad = np.flatnonzero((regions[:, 0] != 0) | ~(regions[:, 3:5] >= regions[:, 1:3]).all(1))
        if len(bad):
            row = " ".join(f"{v:g}" for v in regions[bad[0], :5])
            raise self.data_error(
                f"region {bad[0]} of '{self.bottom_names[_REGIONS]}' is ({row}); it must be of image 0 of a batch of "
                "one image, with x1 <= x2 and y1 <= y2"
            )
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
            kept = suppress(Boxes.from_corners(corners, CORNERS), param.iou_thr, param.nms_type)
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
