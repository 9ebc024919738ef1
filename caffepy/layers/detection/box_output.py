"""BoxOutput and BoxGroupOutput: the proposals of MS-CNN and Cascade R-CNN."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from caffepy.data.transforms.pixel_boxes import PixelBoxes
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.detection.anchors import Anchors, read_anchors, read_limits, read_normalisation
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.sorting import descending
from caffepy.layers.detection.suppression import check_mode, suppress_pixels
from caffepy.proto import caffe_pb2

_NO_BOX = (0, 1, 1, 10, 10, 0)
"""The only row if the whole batch has no box: a region that can be pooled."""
_COLUMNS = 5


@dataclass(frozen=True)
class Candidates:
    """The boxes of one image before suppression, with their scores (n,) and what the rows of the tops hold (n, 4)."""

    boxes: PixelBoxes
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
            kept = suppress_pixels(of_image.boxes, param.iou_thr, param.nms_type, param.max_post_nms_num)
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
            found.append(Candidates(PixelBoxes.from_sizes(boxes), scores[order], rows))
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
            found.append(Candidates(PixelBoxes.from_corners(corners), scores[order], corners))
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
