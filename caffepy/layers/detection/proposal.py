"""Proposal."""

from __future__ import annotations

import numpy as np

from caffepy.backend.cpu.jit.kernel import Float, Floats, Int, Ints, kernel
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.detection.boxes import Rows

_SCORES, _DELTAS, _IMAGE = range(3)
_SYNOPSYS = ("anchor_base_size", "anchor_scale", "anchor_ratio", "max_rois", "rpn_min_size", "rpn_nms_thresh")
"""Fields of Synopsys Caffe's form of `proposal_param`."""


@kernel
def _suppress(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, boxes: Floats, count: Int, threshold: Float, limit: Int, dead: Ints, kept: Ints
) -> None:
    """Keep boxes in order; drop those that overlap a kept one by more than the threshold. kept[limit]: their number."""
    found = 0
    for i in range(count):
        if dead[i] == 0 and found < limit:
            kept[found] = i
            found += 1
            left, top, right, bottom = boxes[4 * i], boxes[4 * i + 1], boxes[4 * i + 2], boxes[4 * i + 3]
            size = (right - left + 1) * (bottom - top + 1)
            for j in range(i + 1, count):
                width = min(right, boxes[4 * j + 2]) - max(left, boxes[4 * j]) + 1
                height = min(bottom, boxes[4 * j + 3]) - max(top, boxes[4 * j + 1]) + 1
                if width > 0 and height > 0:
                    shared = width * height
                    other = (boxes[4 * j + 2] - boxes[4 * j] + 1) * (boxes[4 * j + 3] - boxes[4 * j + 1] + 1)
                    if shared / (size + other - shared) > threshold:
                        dead[j] = 1
    kept[limit] = found


def suppress_pixels(boxes: Rows, threshold: float, limit: int) -> Rows:
    """Return the indices of the kept boxes (n, 4), given in descending order of scores; corners are inclusive pixels.

    Args:
        boxes: the boxes.
        threshold: intersection over union above which a box is dropped.
        limit: the most boxes that are kept.
    """
    limit = min(limit, len(boxes))
    kept, dead = np.zeros(limit + 1, np.int32), np.zeros(max(len(boxes), 1), np.int32)
    _suppress.run(1, 1, 1, np.ascontiguousarray(boxes, np.float32), len(boxes), threshold, limit, dead, kept)
    return kept[: int(kept[limit])]


@register_layer("Proposal")
class ProposalLayer(Layer):
    """Regions of interest from the scores and the box regression of anchors (Ren et al. 2015).

    Shapes: scores (1, 2 A, H, W), of which the second A are those of objects; regression (1, 4 A, H, W); image (…):
    height, width, scale of the rows and, if given, of the columns. Tops: regions (R, 5) as 0, x1, y1, x2, y2, and
    optionally their scores (R). R is at most `post_nms_topn` and changes from pass to pass.

    Each position (h, w) has an anchor for each `ratio` r and `scale` s: around (`base_size` - 1) / 2 + `feat_stride` *
    (w, h), its width is s round(sqrt(base_size^2 / r)) and its height s round(r round(sqrt(base_size^2 / r))), with
    inclusive corners. An anchor with center c and sides l becomes the box with center c + d l and sides l exp(e),
    clipped to the image. A box below `min_size` * scale gets the score 0. Of the best `pre_nms_topn` boxes those are
    left out that overlap a better one by more than `nms_thresh`. Equal scores stay in the order of h, w, anchor.
    Computed on the host; the bottoms' gradient is 0 (`proposal_layer.cpp` of PVANet's Caffe).

    A prototxt with fields of Synopsys Caffe's `proposal_layer.cpp`, or without ratio and scale, gives the anchors by
    `anchor_ratio` and `anchor_scale`. Boxes below `rpn_min_size` are then left out, and the scores are (R, 1).

    Raises:
        ConfigError: a setting is out of range.
        ShapeError: the bottoms do not match the anchors.
    """

    bottoms = (3, 3)
    tops = (1, 2)
    exact_bottoms = frozenset({0, 1, 2})
    changes_shapes = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.proposal_param
        ratios, scales = np.array(param.ratio, np.float32), np.array(param.scale, np.float32)
        base, self._limit, self._threshold = param.base_size, param.post_nms_topn, param.nms_thresh
        self._min_size = float(param.min_size)
        self._leaves_out = any(param.HasField(name) for name in _SYNOPSYS) or not len(ratios) and not len(scales)
        if self._leaves_out:
            ratios = np.array([0.5, 1, 2] if param.anchor_ratio == 3 else [1], np.float32)
            scales = np.array([8, 16, 32] if param.anchor_scale == 3 else [32], np.float32)
            base, self._limit, self._threshold = param.anchor_base_size, param.max_rois, param.rpn_nms_thresh
            self._min_size = param.rpn_min_size
        if not len(ratios) or not len(scales) or min(*ratios, *scales) <= 0:
            raise self.error("proposal_param needs ratio and scale, all above 0")
        if min(base, param.feat_stride, param.pre_nms_topn, self._limit) < 1 or self._threshold < 0:
            raise self.error("the sizes and numbers of boxes in proposal_param must be at least 1, its threshold 0")
        self._anchors = make_anchors(base, ratios, scales)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        scores, deltas, image = bottom
        anchors = len(self._anchors)
        if len(scores.shape) != 4 or scores.shape[:2] != (1, 2 * anchors):
            raise self.shape_error(f"needs scores of one image, 1 {2 * anchors} H W, for {anchors} anchors", scores)
        if deltas.shape != (1, 4 * anchors, *scores.shape[2:]):
            raise self.shape_error(f"needs regression of the shape 1 {4 * anchors} H W", deltas, scores)
        if image.count < 3:
            raise self.shape_error("needs the image's height, width and scale", image)
        self._reshape_tops(top, max(1, min(self._limit, anchors * scores.shape[2] * scores.shape[3])))

    def _reshape_tops(self, top: Blobs, regions: int) -> None:
        top[0].reshape((regions, 5))
        if len(top) > 1:
            top[1].reshape((regions, 1) if self._leaves_out else (regions,))

    def capture_blocker(self) -> str:
        return "it suppresses boxes on the host"

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        values = [self.backend.to_host(blob.data) for blob in bottom]
        if not self.backend.holds_values:
            for blob in top:
                self.backend.from_host(None, blob.data)
            return
        with np.errstate(all="ignore"):
            boxes, scores = self._propose(*values)
        self._reshape_tops(top, len(boxes))
        self.backend.from_host(np.concatenate([np.zeros((len(boxes), 1), np.float32), boxes], 1), top[0].data)
        if len(top) > 1:
            self.backend.from_host(scores.reshape(top[1].shape), top[1].data)

    def _propose(self, scores: Rows, deltas: Rows, image: Rows) -> tuple[Rows, Rows]:
        """Return the regions (R, 4) and their scores (R,)."""
        count, (high, wide) = len(self._anchors), scores.shape[2:]
        height, width, *scales = image.reshape(-1)[:4]
        least = np.float32(self._min_size) * np.array([scales[-1], scores.dtype.type(scales[0])], np.float32)
        steps = np.float32(self.param.proposal_param.feat_stride)
        x, y = np.meshgrid(np.arange(wide, dtype=np.float32) * steps, np.arange(high, dtype=np.float32) * steps)
        anchors = (np.stack([x, y, x, y], -1)[:, :, None] + self._anchors).reshape(-1, 4)
        rates = deltas.reshape(count, 4, high, wide).transpose(2, 3, 0, 1).reshape(-1, 4)
        sides = anchors[:, 2:] - anchors[:, :2] + 1
        centers = rates[:, :2] * sides + (anchors[:, :2] + np.float32(0.5) * sides)
        half = np.float32(0.5) * (np.exp(rates[:, 2:]) * sides)
        limits = np.array([width - 1, height - 1] * 2, np.float32)
        boxes = np.maximum(np.minimum(np.concatenate([centers - half, centers + half], 1), limits), np.float32(0))
        large = (boxes[:, 2:] - boxes[:, :2] + 1 >= least).all(1)
        merits = scores[0, count:].transpose(1, 2, 0).reshape(-1)
        if self._leaves_out:
            boxes, merits = boxes[large], merits[large]
        else:
            merits = merits * large
        order = np.argsort(-merits, kind="stable")[: self.param.proposal_param.pre_nms_topn]
        kept = order[suppress_pixels(boxes[order], self._threshold, self._limit)]
        return boxes[kept], merits[kept]

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        for blob, wanted in zip(bottom, propagate_down, strict=True):
            if wanted:
                self.backend.fill(blob.diff, 0)


def make_anchors(base: int, ratios: Rows, scales: Rows) -> Rows:
    """Return the anchors of the first position (ratios * scales, 4), as inclusive corners."""
    widths = np.floor(np.sqrt(np.float32(base * base) / ratios) + np.float32(0.5))
    sides = np.stack([widths, np.floor(widths * ratios + np.float32(0.5))], 1)
    half = np.float32(0.5) * (sides[:, None] * scales[None, :, None] - 1).reshape(-1, 2)
    center = np.float32(0.5 * (base - 1))
    return np.concatenate([center - half, center + half], 1).astype(np.float32)
