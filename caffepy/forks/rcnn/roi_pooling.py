"""Pooling of regions (ROIPooling, PSROIPooling, ROIAlign, PSROIAlign, ROIWarping), MaskPooling and MaskResize.

ROIAlign, PSROIAlign and ROIWarping take bilinear samples. MaskPooling and MaskResize are layers of Multi-task Network
Cascades (Dai et al. 2016).
"""

from __future__ import annotations

from math import floor
from typing import Any

import numpy as np

from caffepy.backend import Array, Channel, Each, Expression, Geometry, Scalar, expression
from caffepy.backend.formulas import identity, product, product_with_channel, total_with_channel
from caffepy.formats.proto import caffe_pb2
from caffepy.layers.layer import Blobs, Layer, LayoutAdapter, flatten_pixels, register_layer
from caffepy.layers.loss import IndexCheck
from caffepy.layers.spatial_map import SpatialMap

# -- maxima and means of bins --------------------------------------------------------------------------


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


# -- bilinear samples ----------------------------------------------------------------------------------


@expression
def corner_place(i: Each, first: Channel, last: Channel, scale: Scalar, padding: Scalar, bins: Scalar) -> Each:
    """Corner i of the bins of a region whose sides were moved out; -1 if the region has no extent."""
    begin = (first - (last - first + 1) * padding) * scale - 0.5
    extent = (last + (last - first + 1) * padding) * scale - 0.5 - begin
    return begin + i * (extent / bins) if extent > 0 else -1.0


@expression
def warped_place(i: Each, first: Channel, last: Channel, scale: Scalar, bins: Scalar) -> Each:
    """First corner of bin i of a region with rounded corners."""
    begin = floor(first * scale + 0.5) if first >= 0 else -floor(0.5 - first * scale)
    end = floor(last * scale + 0.5) if last >= 0 else -floor(0.5 - last * scale)
    return begin + i * (max(end - begin, 0.0) / bins)


@expression
def sampled_place(
    i: Each, s: Each, first: Channel, last: Channel, scale: Scalar, bins: Scalar, samples: Scalar, limit: Scalar
) -> Each:
    """Sample s of bin i of a region; -1 if it lies beyond the bin's part in the image, which ends at `limit`."""
    extent = max((last + 1) * scale - first * scale, 0.1) / bins
    begin = min(max(i * extent + first * scale, 0.0), limit)
    end = min(max((i + 1) * extent + first * scale, 0.0), limit)
    at = begin + s * (extent / (samples + 1))
    return at if at < end else -1.0


class GridLayer(RegionLayer):
    """A layer that samples each region at the points of a grid of rows and columns.

    A point more than half a pixel outside the image gives 0; other points are moved to the nearest pixel's center if
    they lie outside all centers.
    """

    recordable = True

    _regions = -1

    def make_grid(self, regions: int, high: int, wide: int, corners: tuple[int, ...]) -> None:
        """Allocate the coordinates of `high` x `wide` points of each region; `corners` is the regions' shape."""
        self._rows, self._columns = self.scratch("rows", (regions, high)), self.scratch("columns", (regions, wide))
        self._parts = [self.scratch(f"part {i}", (regions,)) for i in range(5)]
        self._corners = LayoutAdapter(self.backend, corners, (regions, 5))

    def make_corner_grid(self, bottom: Blobs, top: Blobs, high: int, wide: int) -> None:
        """Give the top `high` x `wide` points of each region, one for each index of its rows and columns."""
        regions = self.check_shapes(bottom)
        top[0].reshape((regions, bottom[0].shape[1], high, wide))
        self.make_grid(regions, high, wide, bottom[1].shape)
        if regions != self._regions:
            self._regions = regions
            self._indices = ([self.numbers(np.arange(high), regions)], [self.numbers(np.arange(wide), regions)])

    def numbers(self, values: Any, regions: int) -> Array:
        """Return an array (regions, len(values)) on the device whose rows are `values`."""
        result = self.backend.zeros((regions, len(values)))
        if self.backend.holds_values:
            self.backend.from_host(np.tile(np.asarray(values, np.float32), (regions, 1)), result)
        return result

    def load_regions(self, regions: Array) -> list[Array]:
        """Return sample, x1, y1, x2 and y2 of the regions, (R,) each."""
        flat = self._corners.load(regions)
        for number, part in enumerate(self._parts):
            self.backend.copy(flat[:, number], part.array)
        return [part.array for part in self._parts]

    def sample(self, x: Array, y: Array, group: int = 1) -> None:
        """y = the samples of x at the grid's points."""
        arrays = (self._parts[0].array, self._rows.array, self._columns.array)
        self.backend.roi_bilinear_forward(x, *arrays, y, group, self._check.bad_index)

    def spread(self, dy: Array, dx: Array, group: int = 1) -> None:
        """dx = the gradient of `sample`."""
        arrays = (self._parts[0].array, self._rows.array, self._columns.array)
        self.backend.roi_bilinear_backward(dy, *arrays, dx, group)

    def place_with(self, formula: Expression, indices: tuple[list[Array], list[Array]], *settings: Any) -> None:
        """Write the coordinates that a formula gives."""
        _, x1, y1, x2, y2 = (part.array for part in self._parts)
        axes = ((indices[0], y1, y2, self._rows), (indices[1], x1, x2, self._columns))
        for axis, (index, first, last, places) in enumerate(axes):
            values = [setting[axis] if isinstance(setting, tuple) else setting for setting in settings]
            self.backend.apply(formula, (*index, first, last, *map(float, values)), (places.array,), 0)


@register_layer("ROIAlign")
class ROIAlignLayer(GridLayer):
    """Bilinear samples at the corners of each region's bins (`roi_align_layer.cpp` of MS-CNN and Cascade R-CNN).

    Shapes: x (N, C, H, W), regions (R, 5), y (R, C, pooled_h + 1, pooled_w + 1). The settings are those of
    `roi_pooling_param`: `pad_ratio` p moves each side out by p (x2 - x1 + 1) or p (y2 - y1 + 1), `spatial_scale` then
    multiplies the corners, and 0.5 is subtracted. A region without extent gives 0, as does a point more than half a
    pixel outside. dx is distributed over the four neighbours (He et al. 2017).

    Raises:
        ConfigError: pooled_h or pooled_w is 0, or pad_ratio is below 0.
        ShapeError: the bottoms have other shapes.
        DataError: a region's sample is outside the batch.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.roi_pooling_param
        if min(param.pooled_h, param.pooled_w) < 1:
            raise self.error("roi_pooling_param needs pooled_h and pooled_w, at least 1")
        if param.pad_ratio < 0:
            raise self.error(f"roi_pooling_param's pad_ratio is {param.pad_ratio:g}; it must be at least 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.roi_pooling_param
        self.make_corner_grid(bottom, top, param.pooled_h + 1, param.pooled_w + 1)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.roi_pooling_param
        self.load_regions(bottom[1].data)
        bins = (param.pooled_h, param.pooled_w)
        self.place_with(corner_place, self._indices, param.spatial_scale, param.pad_ratio, bins)
        self.sample(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.clear_region_gradient(propagate_down, bottom)
        if propagate_down[0]:
            self.spread(top[0].diff, bottom[0].diff)


@register_layer("PSROIAlign")
class PSROIAlignLayer(GridLayer):
    """The mean of bilinear samples in each bin of each region, over the bin's own channel.

    Shapes: x (N, output_dim * group_size^2, H, W), regions (R, 5), y (R, output_dim, group_size, group_size). A region
    reaches from x1 * `spatial_scale` to (x2 + 1) * `spatial_scale`, and is at least 0.1 long. A bin is clipped to
    [0, W - 1]; from where it begins then, S = `sample_num` samples follow at distances of its length / (S + 1), of
    which those beyond its end count as 0. y is their sum over S^2 (`psroi_align_layer.cu` of R-FCN-PSROIAlign, whose
    gradient also leaves them out; there it reads memory that was not written).

    Raises:
        ConfigError: output_dim, group_size, sample_num or spatial_scale is not above 0.
        ShapeError: the bottoms have other shapes.
        DataError: a region's sample is outside the batch.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.psroi_align_param
        if min(param.output_dim, param.group_size, param.sample_num) < 1 or param.spatial_scale <= 0:
            raise self.error("psroi_align_param needs output_dim, group_size, sample_num, spatial_scale, all above 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, regions = self.param.psroi_align_param, self.check_shapes(bottom)
        wanted = param.output_dim * param.group_size**2
        if bottom[0].shape[1] != wanted:
            raise self.shape_error(f"needs {wanted} channels, output_dim * group_size^2", bottom[0])
        top[0].reshape((regions, param.output_dim, param.group_size, param.group_size))
        side = param.group_size * param.sample_num
        self.make_grid(regions, side, side, bottom[1].shape)
        self._samples = self.scratch("samples", (regions, param.output_dim, side, side))
        if regions != self._regions:
            self._regions = regions
            bins, samples = np.divmod(np.arange(side), param.sample_num)
            indices = [self.numbers(bins, regions), self.numbers(samples + 1, regions)]
            self._indices = (indices, indices)
        number = param.sample_num
        self._window = Geometry((number, number), (number, number), (0, 0), (1, 1))

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param, x = self.param.psroi_align_param, bottom[0]
        self.load_regions(bottom[1].data)
        limits = (x.shape[2] - 1, x.shape[3] - 1)
        self.place_with(sampled_place, self._indices, param.spatial_scale, param.group_size, param.sample_num, limits)
        self.sample(x.data, self._samples.array, param.group_size)
        self.backend.pool_average_forward(self._samples.array, top[0].data, self._window)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        self.clear_region_gradient(propagate_down, bottom)
        if propagate_down[0]:
            self.backend.pool_average_backward(top[0].diff, self._samples.array, self._window)
            self.spread(self._samples.array, bottom[0].diff, self.param.psroi_align_param.group_size)


@register_layer("ROIWarping")
class ROIWarpingLayer(GridLayer):
    """A bilinear sample at the first corner of each of a region's bins (MNC's `roi_warping_layer.cu`; Dai et al. 2016).

    Shapes: x (N, C, H, W), regions (R, 5), y (R, C, pooled_h, pooled_w). Corners are multiplied by `spatial_scale` and
    rounded; bin j begins at x1 + j (x2 - x1) / pooled_w. A point more than half a pixel outside gives 0.

    The regions have a gradient, which passes through the rounding: with s = `spatial_scale` and t = j / pooled_w,
    dx1 = sum of dy * s (1 - t) * dy/dx and dx2 = sum of dy * s t * dy/dx, and the same for y. It is 0 for points at the
    image's right or lower edge, as in MNC, whose t differs a little: it divides by x2 - x1 + 1.

    Raises:
        ConfigError: pooled_h or pooled_w is 0.
        ShapeError: the bottoms have other shapes.
        DataError: a region's sample is outside the batch.
    """

    exact_bottoms = frozenset()

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.roi_warping_param
        if min(param.pooled_h, param.pooled_w) < 1:
            raise self.error("roi_warping_param needs pooled_h and pooled_w, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.roi_warping_param
        self.make_corner_grid(bottom, top, param.pooled_h, param.pooled_w)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        param = self.param.roi_warping_param
        self.load_regions(bottom[1].data)
        self.place_with(warped_place, self._indices, param.spatial_scale, (param.pooled_h, param.pooled_w))
        self.sample(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self.spread(top[0].diff, bottom[0].diff)
        if propagate_down[1]:
            host = self.backend.to_host
            arrays = (bottom[0].data, bottom[1].data, top[0].diff, self._rows.array, self._columns.array)
            values = [host(array) for array in arrays]
            gradient = self._corner_gradient(*values) if self.backend.holds_values else None
            self.backend.from_host(gradient, bottom[1].diff)

    def _corner_gradient(self, x: Any, regions: Any, dy: Any, rows: Any, columns: Any) -> Any:
        """Return the gradient by the regions; the arguments are on the host."""
        param, (height, width) = self.param.roi_warping_param, x.shape[2:]
        result = np.zeros((len(dy), 5), np.float32)
        down, right = np.arange(param.pooled_h) / param.pooled_h, np.arange(param.pooled_w) / param.pooled_w
        for number, region in enumerate(regions.reshape(-1, 5)):
            if not 0 <= region[0] < len(x):
                continue
            image = x[int(region[0])]
            top, left = np.maximum(rows[number], 0).astype(int), np.maximum(columns[number], 0).astype(int)
            fits_down = (rows[number] >= -0.5) & (top + 1 <= height - 1)
            fits_right = (columns[number] >= -0.5) & (left + 1 <= width - 1)
            if not fits_down.any() or not fits_right.any():
                continue
            top, left = top[fits_down], left[fits_right]
            a = (np.maximum(rows[number][fits_down], 0) - top)[:, None]
            b = (np.maximum(columns[number][fits_right], 0) - left)[None]
            first, second, third, fourth = (
                image[:, i[:, None], j[None]]
                for i, j in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1))
            )
            slopes = dy[number][:, fits_down][:, :, fits_right] * param.spatial_scale
            by_column = (slopes * ((1 - a) * (second - first) + a * (fourth - third))).sum((0, 1), dtype=np.float64)
            by_row = (slopes * ((1 - b) * (third - first) + b * (fourth - second))).sum((0, 2), dtype=np.float64)
            t, u = right[fits_right], down[fits_down]
            result[number, 1:] = (
                (by_column * (1 - t)).sum(),
                (by_row * (1 - u)).sum(),
                (by_column * t).sum(),
                (by_row * u).sum(),
            )
        return result.reshape(regions.shape)

    def capture_blocker(self) -> str | None:
        training = self.context.phase == caffe_pb2.TRAIN
        return "its gradient by the regions is computed on the host" if training else None


# -- masks ---------------------------------------------------------------------------------------------


@register_layer("MaskPooling")
class MaskPoolingLayer(Layer):
    """y[n, c] = x[n, c] * mask[n, 0] (MNC's `mask_pooling_layer.cu`).

    Shapes: x and y (N, C, H, W), mask (N, 1, H, W). dx = dy * mask, and dmask = sum over the channels of dy * x.

    Raises:
        ShapeError: the bottoms have other shapes.
    """

    bottoms = (2, 2)
    recordable = True

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        x, mask = bottom[0].shape, bottom[1].shape
        if len(x) != 4 or mask != (x[0], 1, *x[2:]):
            raise self.shape_error("needs images N C H W and masks N 1 H W", *bottom)
        top[0].reshape(x)
        pixels = (x[0] * x[2] * x[3],)
        self._masks, self._mask_diffs = (LayoutAdapter(self.backend, mask, pixels) for _ in range(2))
        self._product = self.scratch("product", x)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        x, y = (flatten_pixels(self.backend, blob.data) for blob in (bottom[0], top[0]))
        self.backend.apply(product_with_channel, (x, self._masks.load(bottom[1].data)), (y,), 0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        dy = flatten_pixels(self.backend, top[0].diff)
        if propagate_down[1]:
            self.backend.apply(product, (top[0].diff, bottom[0].data), (self._product.array,))
            rows = flatten_pixels(self.backend, self._product.array)
            self.backend.reduce(identity, (rows,), (self._mask_diffs.target(bottom[1].diff),), 0)
            self._mask_diffs.store(bottom[1].diff)
        if propagate_down[0]:
            dx = flatten_pixels(self.backend, bottom[0].diff)
            self.backend.apply(product_with_channel, (dy, self._masks.load(bottom[1].data)), (dx,), 0)


@register_layer("MaskResize")
class MaskResizeLayer(Layer):
    """Bilinear resizing of x (N, C, H, W) to `output_height` x `output_width` (MNC's `mask_resize_layer.cu`).

    y at (i, j) is x at (i H / output_height, j W / output_width), interpolated between the four neighbours. Up to half
    a pixel beyond the last row or column it has their value, further out it is 0. dx adds up dy times these weights.
    (MNC's kernel adds up two rows and columns only, which is less where the top is larger than the bottom.)

    Raises:
        ConfigError: output_height or output_width is 0.
        ShapeError: the bottom does not have four axes, or is empty.
    """

    supports_half = True
    recordable = True

    _shape: tuple[int, ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.mask_resize_param
        if min(param.output_height, param.output_width) < 1:
            raise self.error("mask_resize_param needs output_height and output_width, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, shape = self.param.mask_resize_param, bottom[0].shape
        if len(shape) != 4 or min(shape[2:]) < 1:
            raise self.shape_error("the bottom must have four axes, (N, C, H, W), and pixels", bottom[0])
        sizes = (param.output_height, param.output_width)
        top[0].reshape((*shape[:2], *sizes))
        if shape != self._shape:
            self._shape = shape
            (rows, row_weights), (columns, column_weights) = map(_neighbours, shape[2:], sizes)
            pixels = rows[:, None, :, None] * shape[3] + columns[None, :, None, :]
            weights = row_weights[:, None, :, None] * column_weights[None, :, None, :]
            targets = np.broadcast_to(np.arange(sizes[0] * sizes[1]).reshape(*sizes, 1, 1), pixels.shape)
            used = weights != 0
            matrix = (sizes[0] * sizes[1], shape[2] * shape[3])
            self._map = SpatialMap(self.backend, matrix, targets[used], pixels[used], weights[used])

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self._map.forward(bottom[0].data, top[0].data)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            self._map.backward(top[0].diff, bottom[0].diff)


def _neighbours(size: int, target: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the two neighbours of each target position along one axis, (target, 2), and their weights."""
    places = np.arange(target, dtype=np.float32) * (np.float32(size) / np.float32(target))
    inside = places <= np.float32(size) - np.float32(0.5)
    places = np.minimum(places, np.float32(size - 1))
    first = places.astype(np.int64)
    fraction = places - first.astype(np.float32)
    neighbours = np.stack([first, np.minimum(first + 1, size - 1)], 1)
    return neighbours, np.stack([1 - fraction, fraction], 1) * inside[:, None]


def resize_matrix(size: int, target: int) -> np.ndarray:
    """Return the matrix (target, size) that resizes one axis."""
    matrix = np.zeros((target, size), np.float32)
    neighbours, weights = _neighbours(size, target)
    np.add.at(matrix, (np.arange(target)[:, None], neighbours), weights)
    return matrix
