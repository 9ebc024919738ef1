"""ProposalTarget: a sample of proposals with the classes and offsets that they are to predict."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from caffepy.data.transforms.pixel_boxes import EXACT, WHOLE, PixelBoxes, overlaps
from caffepy.data.transforms.sample_rng import SampleRng
from caffepy.layers.core.base import Blobs, register_layer
from caffepy.layers.detection.anchors import read_normalisation
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.region_choice import RowLayer
from caffepy.proto import caffe_pb2

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
        if not self.backend.holds_values:
            return
        regions, objects = (self.backend.to_host(b.data).reshape(b.shape[0], -1) for b in bottom)
        stream = self.random_stream()
        rng = SampleRng(stream.seed, stream.stream, self.first_sample())
        with np.errstate(all="ignore"):
            found = self._sample(self._read_regions(regions), self._read_objects(objects), rng)
        for index, values in enumerate(found[: len(top)]):
            self.write(values[:, :, None, None], top, index)

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
        return _with_sizes(rows)

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
        return Objects(rows[:, 0], _with_sizes(rows)[:, 1:], rows[:, 5].astype(np.int64), rows[:, 6] != 0)

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
        kind = WHOLE if self._cascade else EXACT
        found = overlaps(PixelBoxes.from_sizes(regions[:, 1:], kind), PixelBoxes.from_sizes(objects.boxes, kind))
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


def _with_sizes(rows: Rows) -> Rows:
    """Return (n, 5) image, x, y, width, height of rows of image, x1, y1, x2, y2."""
    return np.concatenate([rows[:, :3], rows[:, 3:5] - rows[:, 1:3] + _f32(1)], 1)


def _with_corners(boxes: Rows) -> Rows:
    """Return x1, y1, x2, y2 of boxes (n, 4) of x, y, width, height."""
    return np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:] - _f32(1)], 1)


def _offsets(regions: Rows, boxes: Rows) -> Rows:
    """Return the offsets (n, 4) of boxes from regions, both x, y, width, height."""
    half = _f32(0.5)
    centers = (boxes[:, :2] + half * boxes[:, 2:]) - (regions[:, :2] + half * regions[:, 2:])
    return np.concatenate([centers / regions[:, 2:], np.log(boxes[:, 2:] / regions[:, 2:])], 1)
