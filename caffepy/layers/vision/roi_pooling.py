"""ROIPooling and PSROIPooling."""

from __future__ import annotations

import numpy as np

from caffepy.backend import Array
from caffepy.layers.core.base import Blobs, Layer, register_layer
from caffepy.layers.core.formulas import total_with_channel
from caffepy.layers.core.index_check import IndexCheck
from caffepy.layers.core.layout_adapter import LayoutAdapter


class RegionLayer(Layer):
    """A layer over regions of images. Bottoms: x (N, C, H, W), regions (R, 5) as sample, x1, y1, x2, y2.

    Raises:
        ShapeError: the bottoms have other shapes.
        DataError: a region's sample is outside the batch.
    """

    bottoms = (2, 2)
    exact_bottoms = frozenset({1})

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        self._check = IndexCheck(
            self, f"region {{}} of '{bottom[1].title}' has a sample number outside the batch of '{bottom[0].title}'"
        )

    def check_shapes(self, bottom: Blobs) -> int:
        """Check the bottoms' shapes and return the number of regions.

        Raises:
            ShapeError: the bottoms are not images and regions.
        """
        if len(bottom[0].shape) != 4:
            raise self.shape_error("the first bottom must have four axes, (N, C, H, W)", bottom[0])
        regions = bottom[1].shape[0] if bottom[1].shape else 0
        if bottom[1].count != 5 * regions or len(bottom[1].shape) < 2 or bottom[1].shape[1] != 5:
            raise self.shape_error("the second bottom must have five numbers for each region", bottom[1])
        return regions

    def clear_region_gradient(self, propagate_down: list[bool], bottom: Blobs) -> None:
        """Set the gradient of the regions to 0."""
        if propagate_down[1]:
            self.backend.fill(bottom[1].diff, 0)

    def raise_device_errors(self) -> None:
        self._check.raise_device_errors()


def padding_map(ratio: float) -> tuple[np.ndarray, np.ndarray]:
    """Return the matrix and the shift that map regions (R, 5) to those with `pad_ratio`: regions @ matrix + shift.

    x1 becomes x1 - (x2 - x1 + 1) ratio and x2 becomes x2 + (x2 - x1 + 1) ratio, and y1 and y2 likewise.
    """
    matrix = np.diag([1, *[1 + ratio] * 4])
    matrix[[3, 4, 1, 2], [1, 2, 3, 4]] = -ratio
    return matrix.astype(np.float32), np.array([0, -ratio, -ratio, ratio, ratio], np.float32)


@register_layer("ROIPooling")
class ROIPoolingLayer(RegionLayer):
    """Max pooling of each region to `pooled_h` x `pooled_w` bins (Fast R-CNN's `roi_pooling_layer.cpp`).

    Shapes: x (N, C, H, W), regions (R, 5), y (R, C, pooled_h, pooled_w). An empty bin gives 0. Corners are multiplied
    by `spatial_scale`, rounded, and inclusive. Before that, `pad_ratio` moves each side out by this part of the width
    or height (MS-CNN's `roi_pooling_layer.cpp`).

    Raises:
        ConfigError: pooled_h or pooled_w is 0, or pad_ratio is below 0.
        ShapeError: the bottoms have other shapes.
        DataError: a region's sample is outside the batch.
    """

    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.roi_pooling_param
        if min(param.pooled_h, param.pooled_w) < 1:
            raise self.error("roi_pooling_param needs pooled_h and pooled_w, at least 1")
        if param.pad_ratio < 0:
            raise self.error(f"roi_pooling_param's pad_ratio is {param.pad_ratio:g}; it must be at least 0")
        self._spread, self._shift = self.backend.zeros((5, 5)), self.backend.zeros((5,))
        if self.backend.holds_values:
            for values, array in zip(padding_map(param.pad_ratio), (self._spread, self._shift), strict=True):
                self.backend.from_host(values, array)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, regions = self.param.roi_pooling_param, self.check_shapes(bottom)
        top[0].reshape((regions, bottom[0].shape[1], param.pooled_h, param.pooled_w))
        self._mask = self.scratch("mask", top[0].shape, "int32")
        self._flat = LayoutAdapter(self.backend, bottom[1].shape, (regions, 5))

    def _regions(self, bottom: Blobs) -> Array:
        """Return the regions with `pad_ratio`."""
        if self.param.roi_pooling_param.pad_ratio == 0:
            return bottom[1].data
        padded = self.scratch("padded", (bottom[1].shape[0], 5)).array
        rois = self._flat.load(bottom[1].data)
        self.backend.gemm_and_apply(total_with_channel, rois, self._spread, self._shift, padded)
        return padded

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scale = self.param.roi_pooling_param.spatial_scale
        x, rois = bottom[0].data, self._regions(bottom)
        self.backend.roi_max_forward(x, rois, top[0].data, self._mask.array, scale, self._check.bad_index)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.clear_region_gradient(propagate_down, bottom)
        if propagate_down[0]:
            scale = self.param.roi_pooling_param.spatial_scale
            self.backend.roi_max_backward(top[0].diff, self._regions(bottom), self._mask.array, bottom[0].diff, scale)


@register_layer("PSROIPooling")
class PSROIPoolingLayer(RegionLayer):
    """Average pooling of each region to `group_size` x `group_size` bins, each over its own channel (R-FCN).

    Shapes: x (N, output_dim * group_size^2, H, W), regions (R, 5), y (R, output_dim, group_size, group_size). An empty
    bin gives 0. Corners are rounded, inclusive, and then multiplied by `spatial_scale` (`psroi_pooling_layer.cu`).

    Raises:
        ConfigError: output_dim, group_size or spatial_scale is not above 0.
        ShapeError: the bottoms have other shapes.
        DataError: a region's sample is outside the batch.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.psroi_pooling_param
        if min(param.output_dim, param.group_size) < 1 or param.spatial_scale <= 0:
            raise self.error("psroi_pooling_param needs output_dim, group_size and spatial_scale, all above 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, regions = self.param.psroi_pooling_param, self.check_shapes(bottom)
        wanted = param.output_dim * param.group_size**2
        if bottom[0].shape[1] != wanted:
            raise self.shape_error(f"needs {wanted} channels, output_dim * group_size^2", bottom[0])
        top[0].reshape((regions, param.output_dim, param.group_size, param.group_size))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        scale = self.param.psroi_pooling_param.spatial_scale
        x, rois = bottom[0].data, bottom[1].data
        self.backend.roi_average_forward(x, rois, top[0].data, scale, self._check.bad_index)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.clear_region_gradient(propagate_down, bottom)
        if propagate_down[0]:
            scale = self.param.psroi_pooling_param.spatial_scale
            self.backend.roi_average_backward(top[0].diff, bottom[1].data, bottom[0].diff, scale)
