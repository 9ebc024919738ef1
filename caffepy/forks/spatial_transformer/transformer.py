"""SpatialTransformer, the losses of its parameters STLoss and LocLoss, and PowerFile.

SpatialTransformer and STLoss share the pixels of an image that an affine transformation makes.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Border, Each, Scalar, expression
from caffepy.backend.formulas import total, total_with_channel
from caffepy.layers.blob import Blob
from caffepy.layers.fillers import read_numbers
from caffepy.layers.layer import Blobs, Layer, register_layer
from caffepy.layers.loss import LossLayer


def output_grid(height: int, width: int) -> NDArray[np.float32]:
    """Return the coordinates (3, height * width) of the top's pixels: row and column in [-1, 1), and 1."""
    rows, columns = np.meshgrid(np.arange(height) / height, np.arange(width) / width, indexing="ij")
    return np.stack([2 * rows.ravel() - 1, 2 * columns.ravel() - 1, np.ones(rows.size)]).astype(np.float32)


ELEMENTS = ("theta_1_1", "theta_1_2", "theta_1_3", "theta_2_1", "theta_2_2", "theta_2_3")
"""The fields of st_param that fix elements of the matrix."""


@register_layer("SpatialTransformer")
class SpatialTransformerLayer(Layer):
    """y[n, :, i, j] = x[n, :, r, c] at (r, c) = theta[n] (i', j', 1), by bilinear interpolation.

    i' = 2 i / output_H - 1 and j' = 2 j / output_W - 1; r and c are scaled from [-1, 1] to [0, H] and [0, W]. Pixels
    outside x are 0. The matrix theta, row by row, has the elements of the second bottom, of which `theta_1_1` to
    `theta_2_3` replace some by constants. Without `to_compute_dU` x has no gradient.

    Shapes: x (N, C, H, W), theta (N, 6 - constants), y (N, C, output_H, output_W); by default H and W. Source:
    `st_layer.cu` of SpatialTransformerLayer (Jaderberg et al. 2015).

    Raises:
        ConfigError: the transformation is not affine, the sampler not bilinear, or the size below 1.
        ShapeError: the bottoms have other shapes.
    """

    bottoms = (2, 2)
    recordable = True

    _shapes: tuple[tuple[int, ...], ...] | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        self.refuse_in_place(bottom, top)
        param = self.param.st_param
        if param.transform_type != "affine" or param.sampler_type != "bilinear":
            raise self.error("st_param has transform_type affine and sampler_type bilinear only")
        for name in ("output_H", "output_W"):
            if param.HasField(name) and getattr(param, name) < 1:
                raise self.error(f"st_param.{name} is {getattr(param, name)}; it must be at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        param, x = self.param.st_param, bottom[0].shape
        free = [i for i, name in enumerate(ELEMENTS) if not param.HasField(name)]
        if len(x) != 4 or min(x[2:]) < 1:
            raise self.shape_error("the first bottom must have four axes, (N, C, H, W)", bottom[0])
        if not bottom[1].shape or bottom[1].shape[0] != x[0] or bottom[1].count != len(free) * x[0]:
            raise self.shape_error(f"the second bottom must have {len(free)} elements for each sample", *bottom)
        height = param.output_H if param.HasField("output_H") else x[2]
        width = param.output_W if param.HasField("output_W") else x[3]
        self.check_memory(4 * math.prod(x[:2]) * height * width, "its top")
        top[0].reshape((*x[:2], height, width))
        if (x, top[0].shape) != self._shapes:
            self._make_constants(x, height, width, free)
            self._shapes = (x, top[0].shape)
        self._theta = self.scratch("theta", (x[0], len(free)))
        self._matrix = self.scratch("matrix", (x[0], 6))
        self._lines = self.scratch("lines", (2 * x[0], height * width))
        self._positions = self.scratch("positions", (x[0], 2, height, width))
        self._d_positions = self.scratch("gradient of positions", (x[0], 2, height, width))

    def _make_constants(self, x: tuple[int, ...], height: int, width: int, free: list[int]) -> None:
        """Make the matrices that turn theta into columns and rows of pixels: (theta S + c) grid."""
        param, backend = self.param.st_param, self.backend
        select, constant = np.zeros((len(free), 6), np.float32), np.zeros(6, np.float32)
        for place in range(6):
            # Positions have the column first, theta the row.
            source, scale = (place + 3) % 6, x[3 if place < 3 else 2] / 2
            if source in free:
                select[free.index(source), place] = scale
            else:
                constant[place] = scale * getattr(param, ELEMENTS[source])
            constant[place] += scale if place % 3 == 2 else 0
        self._grid, self._select, self._constant = (
            backend.zeros(shape) for shape in ((3, height * width), select.shape, constant.shape)
        )
        if backend.holds_values:
            backend.from_host(output_grid(height, width), self._grid)
            backend.from_host(select, self._select)
            backend.from_host(constant, self._constant)

    def sampling_constants(self) -> tuple[Array, Array, Array]:
        """Return S, c and grid of the positions (theta S + c) grid, (columns and rows, pixels) for each sample."""
        return self._select, self._constant, self._grid

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        backend, matrix, lines = self.backend, self._matrix.array, self._lines.array
        positions = self._positions.array
        theta = backend.reshaped(bottom[1].data, self._theta.shape)
        if theta.shape[1]:
            backend.gemm(theta, self._select, matrix)
        else:
            backend.fill(matrix, 0)
        backend.apply(total_with_channel, (matrix, self._constant), (matrix,), 1)
        backend.gemm(matrix.reshape(lines.shape[0], 3), self._grid, lines)
        backend.copy(lines.reshape(positions.shape), positions)
        backend.sample_forward(bottom[0].data, positions, top[0].data, Border.ZERO, 0.0)

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        backend, lines, matrix = self.backend, self._lines.array, self._matrix.array
        by_image = propagate_down[0] and self.param.st_param.to_compute_dU
        dx = bottom[0].diff if by_image else None
        d_positions = self._d_positions.array if propagate_down[1] else None
        backend.sample_backward(bottom[0].data, self._positions.array, top[0].diff, dx, d_positions, Border.ZERO)
        if propagate_down[0] and not by_image:
            backend.fill(bottom[0].diff, 0)
        if d_positions is None or bottom[1].count == 0:
            return
        backend.copy(d_positions, lines.reshape(d_positions.shape))
        backend.gemm(lines, self._grid, matrix.reshape(lines.shape[0], 3), False, True)
        backend.gemm(matrix, self._select, self._theta.array, False, True)
        d_theta = bottom[1].diff
        backend.copy(self._theta.array.reshape(d_theta.shape), d_theta)


@register_layer("PowerFile")
class PowerFileLayer(Layer):
    """y = x + shift, with the shift of each element of a sample from `shift_file` (`power_file_layer.cu`).

    The file has numbers, divided by spaces or line ends. Elements without a number have the shift 0. dx = dy. Source:
    SpatialTransformerLayer.

    Raises:
        DataError: the file cannot be read.
        ShapeError: the bottom has no samples.
    """

    recordable = True

    _shift: Blob | None = None

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        shape = bottom[0].shape
        if not shape:
            raise self.shape_error("the bottom needs a first axis, N", bottom[0])
        top[0].reshape(shape)
        if self._shift is None or self._shift.shape != shape:
            self._shift = Blob(self.backend, shape, f"{self.name} shift")
            if self.backend.holds_values:
                self.backend.from_host(np.broadcast_to(self._values(shape[1:]), shape).copy(), self._shift.data)

    def shift(self) -> Any:
        """Return what is added to the bottom, in its shape."""
        assert self._shift is not None
        return self._shift.host_data()

    def _values(self, shape: tuple[int, ...]) -> NDArray[np.float32]:
        values = np.zeros(math.prod(shape), np.float32)
        if self.param.power_file_param.shift_file:
            found = read_numbers(self.context.resolve(self.param.power_file_param.shift_file), self.where, len(values))
            values[: len(found)] = found
        return values.reshape(shape)

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        assert self._shift is not None
        self.backend.apply(total, (bottom[0].data, self._shift.data), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0] and bottom[0] is not top[0]:
            self.backend.copy(top[0].diff, bottom[0].diff)


# -- losses --------------------------------------------------------------------------------------------


@expression
def excess(x: Each, limit: Scalar, factor: Scalar) -> Each:
    beyond = max(x - limit, 0.0) + max(-x - limit, 0.0)
    return 0.5 * factor * beyond * beyond


@expression
def excess_slope(x: Each, limit: Scalar, factor: Scalar) -> Each:
    return factor * (max(x - limit, 0.0) - max(-x - limit, 0.0))


class ExcessLossLayer(LossLayer):
    """A loss of one bottom: the mean of (|v| - limit)^2 / 2 over the values v beyond a limit."""

    bottoms = (1, 1)
    no_gradient_bottoms = frozenset()

    def check_first_axis(self, bottom: Blobs) -> None:
        """Check that the bottom has samples.

        Raises:
            ShapeError: it has none.
        """
        if bottom[0].count == 0:
            raise self.shape_error("the bottom must not be empty", bottom[0])


@register_layer("LocLoss")
class LocLossLayer(ExcessLossLayer):
    """loss = the mean over all elements of max(|x| - threshold, 0)^2 / 2.

    Source: `loc_loss_layer.cu` of SpatialTransformerLayer.

    Raises:
        ConfigError: the threshold is not above 0.
        ShapeError: the bottom is empty.
    """

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        self._limit = self.param.loc_loss_param.threshold
        if not self._limit > 0:
            raise self.error(f"loc_loss_param.threshold is {self._limit:g}; it must be above 0")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_first_axis(bottom)
        top[0].reshape(())

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        inputs = (bottom[0].data, self._limit, 1 / bottom[0].count)
        self.backend.reduce(excess, inputs, (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if propagate_down[0]:
            inputs = (bottom[0].data, self._limit, self.weight() / bottom[0].count)
            self.backend.apply(excess_slope, inputs, (bottom[0].diff,))
            self.apply_top_gradient(top, bottom[0].diff)


@register_layer("STLoss")
class STLossLayer(ExcessLossLayer):
    """loss = the mean over samples and pixels of (max(|r| - 1, 0)^2 + max(|c| - 1, 0)^2) / 2.

    (r, c) = theta (i', j', 1). It pulls the pixels of a transformed image of `output_H` x `output_W` pixels into the
    image; see SpatialTransformer. Shape: theta (N, 6). Source: `st_loss_layer.cu` of SpatialTransformerLayer.

    Raises:
        ConfigError: the size is below 1.
        ShapeError: the bottom does not have six elements for each sample.
    """

    _grid: Array | None = None

    def setup(self, bottom: Blobs, top: Blobs) -> None:
        super().setup(bottom, top)
        param = self.param.st_loss_param
        if min(param.output_H, param.output_W) < 1:
            raise self.error("st_loss_param needs output_H and output_W, at least 1")

    def reshape(self, bottom: Blobs, top: Blobs) -> None:
        self.check_first_axis(bottom)
        param, samples = self.param.st_loss_param, bottom[0].shape[0] if bottom[0].shape else 0
        if bottom[0].count != 6 * samples:
            raise self.shape_error("the bottom must have six elements for each sample", bottom[0])
        top[0].reshape(())
        pixels = param.output_H * param.output_W
        self.check_memory(8 * samples * pixels, "the transformed positions")
        if self._grid is None:
            self._grid = self.backend.zeros((3, pixels))
            if self.backend.holds_values:
                self.backend.from_host(output_grid(param.output_H, param.output_W), self._grid)
        self._theta = self.scratch("theta", (2 * samples, 3))
        self._lines = self.scratch("lines", (2 * samples, pixels))

    def _factor(self) -> float:
        return 2 / math.prod(self._lines.shape)

    def _transform(self, bottom: Blobs) -> Array:
        assert self._grid is not None
        lines = self._lines.array
        self.backend.gemm(self.backend.reshaped(bottom[0].data, self._theta.shape), self._grid, lines)
        return lines

    def forward(self, bottom: Blobs, top: Blobs) -> None:
        self.backend.reduce(excess, (self._transform(bottom), 1.0, self._factor()), (top[0].data,))

    def backward(self, top: Blobs, propagate_down: list[bool], bottom: Blobs) -> None:
        if not propagate_down[0]:
            return
        assert self._grid is not None
        lines, diff = self._transform(bottom), bottom[0].diff
        self.backend.apply(excess_slope, (lines, 1.0, self.weight() * self._factor()), (lines,))
        self.backend.gemm(lines, self._grid, self._theta.array, False, True)
        self.backend.copy(self._theta.array.reshape(diff.shape), diff)
        self.apply_top_gradient(top, diff)
