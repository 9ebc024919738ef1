"""Proposal, ProposalTarget, and the layers that choose rows of regions: DecodeBBox, ScaleRoute and HardMining.

ProposalTarget gives a sample of proposals with the classes and offsets that they are to predict. The layers that choose
rows are those of MS-CNN and Cascade R-CNN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.boxes import CORNERS, EXACT, INCLUSIVE, WHOLE, Boxes, Rows, overlaps
from caffepy.data.random import SampleRng
from caffepy.forks.rcnn.anchors import decode_regions, read_normalisation, with_sizes
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.suppression import descending, suppress
from caffepy.layers.host import HostLayer
from caffepy.layers.layer import Blobs, register_layer

# -- layers that choose rows ---------------------------------------------------------------------------


class RowLayer(HostLayer):
    """A layer on the host whose tops hold chosen rows. It has no gradient."""

    has_backward = False
    changes_shapes = True
    blocker = "it chooses regions on the host"

    def check_rows(self, blobs: Blobs, count: int) -> None:
        """Check that all blobs have as many rows.

        Raises:
            ShapeError: one has another number.
        """
        for blob in blobs:
            if not blob.shape or blob.shape[0] != count:
                raise self.shape_error(f"needs {count} rows, one for each region", blob)

    def check_regions(self, regions: Blobs) -> None:
        """Check that blobs have five numbers for each region.

        Raises:
            ShapeError: one has not.
        """
        for blob in regions:
            if len(blob.shape) < 2 or blob.shape[1] != 5 or blob.count != 5 * blob.shape[0]:
                raise self.shape_error("needs regions (R, 5): image, x1, y1, x2, y2", blob)


@register_layer("DecodeBBox")
class DecodeBBoxLayer(RowLayer):
    """Regions moved by the offsets that were predicted for them (`decode_bbox_layer.cpp`; Cai and Vasconcelos 2018).

    Shapes: predictions (R, 8), of which the last four are the object's, regions (R, 5), and in TRAIN an optional third
    bottom (R, 6) of ProposalTarget, whose last column is the overlap with the object; the top is (K, 5, 1, 1). In TRAIN
    regions without area are dropped, and with the third bottom regions that overlap an object by `gt_iou_thr` or more.
    `bbox_reg_param` has the mean and deviation of the offsets. Computed on the host. The layer has no gradient.

    Raises:
        ShapeError: the bottoms have other shapes.
        DataError: no region is left.
    """

    bottoms = (2, 3)
    exact_bottoms = frozenset({1, 2})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self._normalisation = read_normalisation(self)
        self._training = self.context.phase == caffe_pb2.TRAIN
        if len(bottom) == 3 and not self._training:
            raise self.error("takes a third bottom in the TRAIN phase only")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_regions(bottom[1:2])
        regions = bottom[1].shape[0]
        self.check_rows(bottom, regions)
        if bottom[0].count != 8 * regions:
            raise self.shape_error("needs predictions (R, 8), four of the background and four of an object", bottom[0])
        top[0].reshape((regions, 5, 1, 1))

    def compute(self, predictions: Rows, regions: Rows, *objects: Rows) -> list[Rows]:
        count = len(regions)
        regions = regions.reshape(count, -1)
        boxes = decode_regions(predictions.reshape(count, 1, -1)[..., 4:], regions[:, 1:], self._normalisation)[:, 0]
        keep = np.ones(count, bool)
        if self._training:
            keep &= ~(boxes[:, :2] > boxes[:, 2:]).any(1)
        if objects:
            keep &= ~(objects[0].reshape(count, -1)[:, -1] >= np.float32(self.param.decode_bbox_param.gt_iou_thr))
        if not keep.any():
            raise self.data_error(
                f"none of the {count} regions of '{self.bottom_names[1]}' is left: each has no area, or overlaps its "
                "object by gt_iou_thr or more"
            )
        return [np.concatenate([regions[:, :1], boxes], 1)[keep][:, :, None, None]]


@register_layer("ScaleRoute")
class ScaleRouteLayer(RowLayer):
    """The rows of the regions whose scale is in a range (Cascade R-CNN's `scale_route_layer.cpp`).

    Shapes: regions (R, 5) and any other bottoms (R, ...); each top has the same shape with K rows. The scale of a
    region is sqrt(width * height), in pixels. Regions with low_scale <= scale < high_scale are kept; a limit that is
    not given has no effect. If there are none, the region nearest to the middle of the range, in log2 of the scale, is
    kept: the middle is sqrt(low_scale * high_scale), the only limit, or 256. Computed on the host. The layer has no
    gradient.

    Raises:
        ConfigError: the limits are not above 0 in ascending order.
        ShapeError: the bottoms have other shapes.
        DataError: no region has a scale.
    """

    bottoms = (1, None)
    tops = (1, None)
    equal_bottoms_and_tops = True
    exact_bottoms = frozenset({0})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.scale_route_param
        low = param.low_scale if param.HasField("low_scale") else None
        high = param.high_scale if param.HasField("high_scale") else None
        self._range = (low or 0.0, np.inf if high is None else high)
        if (low is not None and not low > 0) or not self._range[0] <= self._range[1] or self._range[1] <= 0:
            raise self.error(f"low_scale is {low} and high_scale {high}; they must be above 0, the lower one first")
        given = [value for value in (low, high) if value is not None]
        self._middle = float(np.prod(given)) ** (1 / len(given)) if given else 256.0

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_regions(bottom[:1])
        self.check_rows(bottom, bottom[0].shape[0])
        for blob, result in zip(bottom, top, strict=True):
            result.reshape(blob.shape)

    def compute(self, *values: Rows) -> list[Rows]:
        rows = self._chosen(values[0].reshape(-1, 5)[:, 1:])
        return [value[rows] for value in values]

    def _chosen(self, boxes: Rows) -> NDArray[np.intp]:
        scales = np.sqrt(Boxes.from_corners(boxes, CORNERS).areas)
        rows = np.flatnonzero((scales >= self._range[0]) & (scales < self._range[1]))
        if len(rows):
            return rows
        distances = np.abs(np.log2(scales / np.float32(self._middle)))
        if not np.isfinite(distances).any():
            raise self.data_error(f"no region of '{self.bottom_names[0]}' has a width and a height above 0")
        return np.array([np.nanargmin(distances)])


@register_layer("HardMining")
class HardMiningLayer(RowLayer):
    """The rows of the regions with the highest losses (Cascade R-CNN's `hard_mining_layer.cpp`; Shrivastava 2016).

    Shapes: losses (R,), regions (R, 5) and any other bottoms (R, ...); the tops are the bottoms after the first, with
    min(R, num_image * num_roi_per_image) rows, in the order of the regions. Each image gives its num_roi_per_image
    regions with the highest losses; if some images have fewer, the others' next regions fill up. Of equal losses the
    last comes first. Computed on the host. The layer has no gradient.

    Raises:
        ConfigError: num_image or num_roi_per_image is 0, or the tops are not the bottoms after the first.
        ShapeError: the bottoms have other shapes.
        DataError: a region's image is outside num_image.
    """

    bottoms = (2, None)
    tops = (1, None)
    exact_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.hard_mining_param
        if min(param.num_image, param.num_roi_per_image) < 1:
            raise self.error("hard_mining_param needs num_image and num_roi_per_image, at least 1")
        if len(bottom) != len(top) + 1:
            raise self.error(f"has {len(bottom)} bottoms and {len(top)} tops; each bottom after the losses needs a top")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_regions(bottom[1:2])
        regions = bottom[1].shape[0]
        self.check_rows(bottom, regions)
        if bottom[0].count != regions:
            raise self.shape_error("needs one loss for each region", bottom[0])
        self._count = min(regions, self.param.hard_mining_param.num_image * self._of_image)
        for blob, result in zip(bottom[1:], top, strict=True):
            result.reshape((self._count, *blob.shape[1:]))

    @property
    def _of_image(self) -> int:
        return self.param.hard_mining_param.num_roi_per_image

    def compute(self, *values: Rows) -> list[Rows]:
        rows = self._hardest(values[0].reshape(-1), values[1].reshape(-1, 5)[:, 0])
        return [value[rows] for value in values[1:]]

    def _hardest(self, losses: Rows, images: Rows) -> NDArray[np.intp]:
        limit = self.param.hard_mining_param.num_image
        bad = np.flatnonzero(~((images >= 0) & (images < limit)))
        if len(bad):
            raise self.data_error(
                f"region {bad[0]} of '{self.bottom_names[1]}' is of image {images[bad[0]]:g}, but num_image is {limit}"
            )
        order = descending(losses)
        numbers = images[order].astype(np.int64)
        rank = np.empty(len(order), np.int64)
        for image in range(limit):
            of_image = numbers == image
            rank[of_image] = np.arange(of_image.sum())
        first, rest = order[rank < self._of_image], order[rank >= self._of_image]
        return np.sort(np.concatenate([first, rest[: self._count - len(first)]]))


# -- Proposal ------------------------------------------------------------------------------------------

_SCORES, _DELTAS, _IMAGE = range(3)
_SYNOPSYS = ("anchor_base_size", "anchor_scale", "anchor_ratio", "max_rois", "rpn_min_size", "rpn_nms_thresh")
"""Fields of Synopsys Caffe's form of `proposal_param`."""


@register_layer("Proposal")
class ProposalLayer(HostLayer):
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
    blocker = "it suppresses boxes on the host"

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
        regions = max(1, min(self._limit, anchors * scores.shape[2] * scores.shape[3]))
        for blob, shape in zip(top, ((regions, 5), (regions, 1) if self._leaves_out else (regions,)), strict=False):
            blob.reshape(shape)

    def compute(self, scores: Rows, deltas: Rows, image: Rows) -> list[Rows]:
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
        candidates = Boxes.from_corners(boxes[order], INCLUSIVE)
        kept = order[suppress(candidates, self._threshold, limit=self._limit)]
        regions = np.concatenate([np.zeros((len(kept), 1), np.float32), boxes[kept]], 1)
        return [regions, merits[kept].reshape((-1, 1) if self._leaves_out else -1)]


def make_anchors(base: int, ratios: Rows, scales: Rows) -> Rows:
    """Return the anchors of the first position (ratios * scales, 4), as inclusive corners."""
    widths = np.floor(np.sqrt(np.float32(base * base) / ratios) + np.float32(0.5))
    sides = np.stack([widths, np.floor(widths * ratios + np.float32(0.5))], 1)
    half = np.float32(0.5) * (sides[:, None] * scales[None, :, None] - 1).reshape(-1, 2)
    center = np.float32(0.5 * (base - 1))
    return np.concatenate([center - half, center + half], 1).astype(np.float32)


# -- ProposalTarget ------------------------------------------------------------------------------------

_f32 = np.float32
_MARGIN = 32
"""Least side of a random region, in pixels."""
_TRIES = 1000
"""Draws of a random region that overlaps no object."""
_MSCNN_COLUMNS, _CASCADE_COLUMNS = 7, 8


@dataclass(frozen=True)
class Sampled:
    """The sampled regions (K, 5) as image, x, y, width, height; their labels, objects (K,) and overlaps with them."""

    regions: Rows
    labels: NDArray[np.int64]
    objects: NDArray[np.int64]
    overlaps: Rows


@dataclass(frozen=True)
class Objects:
    """The objects of a batch: images (G,), boxes (G, 4) as x, y, width, height, labels (G,), ignored (G,)."""

    images: Rows
    boxes: Rows
    labels: NDArray[np.int64]
    ignored: NDArray[np.bool_]


@register_layer("ProposalTarget")
class ProposalTargetLayer(RowLayer):
    """Random foreground and background regions of a batch, and their targets (`proposal_target_layer.cpp`).

    Shapes: regions (R, 5); objects (G, 7) of ImageGtData or (G, 8) of DetectionData with rows (image, x1, y1, x2, y2,
    label, ignored, difficult), image -1 for padding. Tops: regions (K, 5, 1, 1), labels (K, 1, 1, 1), offsets, inside
    weights and outside weights (K, D, 1, 1), objects (K, 6, 1, 1) with rows (label, x1, y1, x2, y2, overlap), and
    optional weights of the samples (K, 1, 1, 1). D is 4 * cls_num, or 8 if `bbox_reg_param.cls_aware` is false.

    A region is foreground if it overlaps an object by `fg_thr` or more, and background if its largest overlap is in
    [bg_thr_lw, bg_thr_hg). Of `batch_size` regions at most round(fg_fraction * batch_size) are foreground. If there are
    too few, regions that are neither fill up (`pickup_discard`). Objects with 7 columns have MS-CNN's rules: random
    boxes fill up to batch_size, and overlaps have no borders of a pixel. Objects with 8 columns have Cascade R-CNN's:
    a random box is drawn only if no region is left. It is of an image that has regions or objects. Offsets: (dx / w,
    dy / h, log w' / w, log h' / h), normalised. Random numbers depend on the number of the batch's first sample.
    Computed on the host. The layer has no gradient.

    Raises:
        ConfigError: a setting is missing or out of range.
        ShapeError: the bottoms have other shapes.
        DataError: an image is outside num_img_per_batch, or a label is outside the classes.
    """

    bottoms = (2, 2)
    tops = (6, 7)
    exact_bottoms = frozenset({0, 1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.proposal_target_param
        if param.batch_size < 1 and param.batch_size != -1:
            raise self.error(f"batch_size is {param.batch_size}; it must be above 0, or -1 for all regions")
        if param.cls_num < 2 or param.num_img_per_batch < 1 or not 0 <= param.fg_fraction <= 1:
            raise self.error("needs cls_num, at least 2, num_img_per_batch, at least 1, and fg_fraction from 0 to 1")
        if param.fg_thr < param.bg_thr_hg:
            raise self.error(f"fg_thr {param.fg_thr:g} is below bg_thr_hg {param.bg_thr_hg:g}; a region would be both")
        self._normalisation = read_normalisation(self)
        self._aware = self.param.bbox_reg_param.cls_aware
        self._columns = 4 * param.cls_num if self._aware else 8
        training = self.context.phase == caffe_pb2.TRAIN
        images = param.num_img_per_batch
        self._images = self.context.shard.device_batch(images) if training else images

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_regions(bottom[:1])
        shape = bottom[1].shape
        if (
            len(shape) < 2
            or shape[1] not in (_MSCNN_COLUMNS, _CASCADE_COLUMNS)
            or bottom[1].count != shape[0] * shape[1]
        ):
            raise self.shape_error("needs objects (G, 7) of ImageGtData or (G, 8) of DetectionData", bottom[1])
        self._cascade = shape[1] == _CASCADE_COLUMNS
        size = self.param.proposal_target_param.batch_size
        rows = max(bottom[0].shape[0], 1) if size == -1 else size
        for blob, columns in zip(top, (5, 1, self._columns, self._columns, self._columns, 6, 1), strict=False):
            blob.reshape((rows, columns, 1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.counter()
        super().forward(bottom, top)

    def compute(self, *values: Rows) -> list[Rows]:
        regions, objects = (part.reshape(len(part), -1) for part in values)
        stream = self.random_stream()
        rng = SampleRng(stream.seed, stream.stream, self.first_sample())
        found = self._sample(self._read_regions(regions), self._read_objects(objects), rng)
        return [part[:, :, None, None] for part in found]

    # -- input ---------------------------------------------------------------------------------------

    def _check_images(self, images: Rows, blob: str) -> None:
        limit = self._images
        bad = np.flatnonzero(~((images >= 0) & (images < limit)))
        if len(bad):
            raise self.data_error(
                f"row {bad[0]} of '{blob}' is of image {images[bad[0]]:g}, but a device's batch has {limit}; see "
                "num_img_per_batch"
            )

    def _read_regions(self, rows: Rows) -> Rows:
        """Return regions (R, 5) as image, x, y, width, height."""
        self._check_images(rows[:, 0], self.bottom_names[0])
        return np.concatenate([rows[:, :1], with_sizes(rows[:, 1:])], 1)

    def _read_objects(self, rows: Rows) -> Objects:
        rows = rows[rows[:, 0] != -1]
        name, classes = self.bottom_names[1], self.param.proposal_target_param.cls_num
        self._check_images(rows[:, 0], name)
        bad = np.flatnonzero(~((rows[:, 5] > 0) & (rows[:, 5] < classes)))
        if len(bad):
            raise self.data_error(
                f"row {bad[0]} of '{name}' has the label {rows[bad[0], 5]:g}; it must be from 1 to {classes - 1}; "
                "see cls_num"
            )
        return Objects(rows[:, 0], with_sizes(rows[:, 1:5]), rows[:, 5].astype(np.int64), rows[:, 6] != 0)

    # -- sampling ------------------------------------------------------------------------------------

    def _sample(self, regions: Rows, objects: Objects, rng: SampleRng) -> list[Rows]:
        """Return the values of the tops, two-dimensional."""
        if self.param.proposal_target_param.append_gtbox:
            regions = np.concatenate([regions, np.column_stack([objects.images, objects.boxes]).astype(_f32)])
        matched, best = self._match(regions, objects)
        sampled = self._choose(regions, objects, matched, best, rng)
        return self._outputs(sampled, objects)

    def _overlaps(self, regions: Rows, objects: Objects) -> Rows:
        """Return the overlaps (R, G); -1 where the images differ."""
        rule = WHOLE if self._cascade else EXACT
        found = overlaps(Boxes.from_sizes(regions[:, 1:], rule)[:, None], Boxes.from_sizes(objects.boxes, rule)[None])
        return np.where(regions[:, :1] == objects.images, found, _f32(-1))

    def _match(self, regions: Rows, objects: Objects) -> tuple[NDArray[np.int64], Rows]:
        """Return the object with the largest overlap of each region, -1 if its image has none, and the overlap."""
        if not len(objects.labels):
            return np.full(len(regions), -1), np.zeros(len(regions), _f32)
        found = self._overlaps(regions, objects)
        matched, best = found.argmax(1), found.max(1)
        return np.where(best < 0, -1, matched), np.maximum(best, _f32(0))

    def _choose(
        self, regions: Rows, objects: Objects, matched: NDArray[np.int64], best: Rows, rng: SampleRng
    ) -> Sampled:
        param = self.param.proposal_target_param
        is_object = (best >= _f32(param.fg_thr)) & (matched >= 0)
        ignored = is_object & objects.ignored[matched] if len(objects.labels) else is_object
        foreground = np.flatnonzero(is_object & ~ignored)
        in_range = (best >= _f32(param.bg_thr_lw)) & (best < _f32(param.bg_thr_hg)) & ~is_object
        background, rest = np.flatnonzero(in_range), np.flatnonzero(~is_object & ~in_range)
        size, limit = param.batch_size, math.floor(_f32(param.fg_fraction) * _f32(param.batch_size) + 0.5)
        if size == -1:
            size, limit = len(foreground) + len(background), len(foreground)
        foreground = rng.some(foreground, limit)
        wanted = size - len(foreground)
        if len(background) > wanted:
            background = rng.some(background, wanted)
        elif param.pickup_discard or not self._cascade:
            background = np.concatenate([background, rest[: wanted - len(background)]])
        kept = np.concatenate([foreground, background])
        missing = 0 if self._cascade else size - len(kept)
        images = np.unique(np.concatenate([regions[:, 0], objects.images]))
        more = self._random_regions(objects, images, missing if len(kept) else max(missing, 1), rng)
        found = matched[foreground]
        none = np.full(len(background) + len(more), -1)
        labels = np.concatenate([objects.labels[found], np.zeros(len(none), np.int64)])
        rows = np.concatenate([regions[kept], more])
        return Sampled(rows, labels, np.concatenate([found, none]), best[foreground])

    def _random_regions(self, objects: Objects, images: Rows, count: int, rng: SampleRng) -> Rows:
        """Return `count` random regions (count, 5) of these images that overlap each object by less than fg_thr."""
        param, found = self.param.proposal_target_param, np.empty((count, 5), _f32)
        width, height = param.img_width, param.img_height
        if count and min(width, height) <= _MARGIN:
            raise self.error(
                f"has {count} regions too few, and draws random ones: it needs img_width and img_height, more than "
                f"{_MARGIN}"
            )
        for number in range(count):
            for _ in range(_TRIES):
                x, y = rng.below(width - _MARGIN), rng.below(height - _MARGIN)
                sides = max(rng.below(width - x), _MARGIN), max(rng.below(height - y), _MARGIN)
                found[number] = (images[rng.below(len(images))], x, y, *sides)
                if not (self._overlaps(found[number : number + 1], objects) >= _f32(param.fg_thr)).any():
                    break
            else:
                raise self.data_error(f"found no random region that overlaps no object by fg_thr {param.fg_thr:g}")
        return found

    # -- output --------------------------------------------------------------------------------------

    def _outputs(self, sampled: Sampled, objects: Objects) -> list[Rows]:
        param, count = self.param.proposal_target_param, len(sampled.labels)
        positives = np.flatnonzero(sampled.labels > 0)
        targets, inside = np.zeros((count, self._columns), _f32), np.zeros((count, self._columns), _f32)
        found = np.zeros((count, 6), _f32)
        if len(positives):
            boxes = objects.boxes[sampled.objects[positives]]
            classes = sampled.labels[positives] if self._aware else np.ones(len(positives), np.int64)
            columns = 4 * classes[:, None] + np.arange(4)
            offsets = self._normalisation.apply(_offsets(sampled.regions[positives, 1:], boxes))
            targets[positives[:, None], columns] = offsets
            counted = (sampled.overlaps >= _f32(param.bbox_thr_lw)) & (sampled.overlaps <= _f32(param.bbox_thr_hg))
            inside[positives[:, None], columns] = counted[:, None]
            found[positives, 0], found[positives, 5] = sampled.labels[positives], sampled.overlaps
            found[positives, 1:5] = _with_corners(boxes)
        rows = np.concatenate([sampled.regions[:, :1], _with_corners(sampled.regions[:, 1:])], 1)
        labels = sampled.labels[:, None].astype(_f32)
        return [rows, labels, targets, inside, inside, found, self._weights(sampled, found[:, 5])[:, None]]

    def _weights(self, sampled: Sampled, best: Rows) -> Rows:
        """Return the weights of the samples: the sums of objects and background have the ratio of fg_fraction."""
        param, positive = self.param.proposal_target_param, sampled.labels > 0
        weights = np.where(positive & param.iou_weighted, best, _f32(1))
        total, count = weights[positive].sum(), len(weights)
        if total != 0:
            weights[positive] *= _f32(param.fg_fraction * count) / total
            weights[~positive] *= _f32((1 - param.fg_fraction) * count) / max(weights[~positive].sum(), _f32(1e-30))
        return weights


def _with_corners(boxes: Rows) -> Rows:
    """Return x1, y1, x2, y2 of boxes (n, 4) of x, y, width, height."""
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:] - _f32(1)], 1)


def _offsets(regions: Rows, boxes: Rows) -> Rows:
    """Return the offsets (n, 4) of boxes from regions, both x, y, width, height."""
    half = _f32(0.5)
    centers = (boxes[:, :2] + half * boxes[:, 2:]) - (regions[:, :2] + half * regions[:, 2:])
    return np.concatenate([centers / regions[:, 2:], np.log(boxes[:, 2:] / regions[:, 2:])], 1)
