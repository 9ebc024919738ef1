"""SpatialTransformer and PowerFile.

The pixels of an image that an affine transformation makes (SpatialTransformer, STLoss).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend import Array, Border
from caffepy.layers.blob import Blob
from caffepy.layers.fillers import read_numbers
from caffepy.layers.formulas import total, total_with_channel
from caffepy.layers.layer import Blobs, Layer, register_layer


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
