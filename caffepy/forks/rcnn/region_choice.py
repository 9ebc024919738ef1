"""DecodeBBox, ScaleRoute and HardMining: layers that choose rows of regions (MS-CNN and Cascade R-CNN)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from caffepy.data.transforms.pixel_boxes import PixelBoxes
from caffepy.forks.rcnn.anchors import decode_regions, read_normalisation
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.detection.boxes import Rows
from caffepy.layers.detection.suppression import descending
from caffepy.layers.layer import Blobs, Layer, register_layer


class RowLayer(Layer):
    """A layer on the host whose tops hold chosen rows. It has no gradient."""

    has_backward = False
    changes_shapes = True

    def capture_blocker(self) -> str:
        return "it chooses regions on the host"

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

    def write(self, values: Rows, top: Blobs, index: int) -> None:
        """Reshape a top to an array and fill it."""
        top[index].reshape(values.shape)
        self.backend.from_host(np.ascontiguousarray(values, np.float32), top[index].data)


@register_layer("DecodeBBox")
class DecodeBBoxLayer(RowLayer):
    """Regions moved by the offsets that were predicted for them (`decode_bbox_layer.cpp`; Cai and Vasconcelos 2018).

    Shapes: predictions (R, 8), of which the last four are the object's, regions (R, 5), and in TRAIN an optional third
    bottom (R, 6) of ProposalTarget, whose last column is the overlap with the object; the top is (K, 5, 1, 1). In TRAIN
    regions without area are dropped, and with the third bottom those that overlap their object by `gt_iou_thr` or more.
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

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        count = bottom[1].shape[0]
        values = [self.backend.to_host(blob.data).reshape(count, -1) for blob in bottom]
        predictions, regions = values[0][:, None, 4:], values[1]
        with np.errstate(all="ignore"):
            boxes = decode_regions(predictions, regions[:, 1:], self._normalisation)[:, 0]
        keep = np.ones(count, bool)
        if self._training:
            keep &= ~(boxes[:, :2] > boxes[:, 2:]).any(1)
        if len(values) == 3:
            keep &= ~(values[2][:, -1] >= np.float32(self.param.decode_bbox_param.gt_iou_thr))
        if not keep.any():
            raise self.data_error(
                f"none of the {count} regions of '{self.bottom_names[1]}' is left: each has no area, or overlaps its "
                "object by gt_iou_thr or more"
            )
        rows = np.concatenate([regions[:, :1], boxes], 1)[keep]
        self.write(rows[:, :, None, None], top, 0)


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

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        values = [self.backend.to_host(blob.data) for blob in bottom]
        rows = self._chosen(values[0].reshape(-1, 5)[:, 1:])
        for index, value in enumerate(values):
            self.write(value[rows], top, index)

    def _chosen(self, boxes: Rows) -> NDArray[np.intp]:
        scales = np.sqrt(PixelBoxes.from_corners(boxes).areas)
        rows = np.flatnonzero((scales >= self._range[0]) & (scales < self._range[1]))
        if len(rows):
            return rows
        with np.errstate(divide="ignore"):
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

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        if not self.backend.holds_values:
            return
        values = [self.backend.to_host(blob.data) for blob in bottom]
        rows = self._hardest(values[0].reshape(-1), values[1].reshape(-1, 5)[:, 0])
        for index, value in enumerate(values[1:]):
            self.write(value[rows], top, index)

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
