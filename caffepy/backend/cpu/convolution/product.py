"""Convolutions that are matrix products without im2col: 1x1 kernels, or a kernel as large as the image."""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.gemm.packing import WeightPacking, extended
from caffepy.backend.cpu.gemm.pixels import PixelProduct
from caffepy.backend.cpu.gemm.product import Gemm
from caffepy.backend.cpu.jit.recording import note_host_work
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Geometry

PACKED = 256 if WIDTH == 16 else 512
"""Single pixels from which packed weights are read so often that it pays to pack them."""


def is_pixels(geometry: Geometry) -> bool:
    """Whether windows are single pixels that follow each other, and all of them, with all their channels."""
    g = geometry
    return math.prod(g.kernel) == 1 and all(stride == 1 for stride in g.stride) and not any(g.pad) and g.group == 1


def is_product(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether windows do not overlap and fill the image, and there are too few of them to pack the weights for."""
    g, sizes = geometry, x_shape[2:]
    if g.group > 1 or any(g.pad):
        return False
    pixels = is_pixels(geometry)
    windows = x_shape[0] * (math.prod(sizes) if pixels else 1)
    return (pixels or g.kernel == sizes) and windows < (min(PACKED, weights_shape[0]) if pixels else weights_shape[0])


class PixelConvolution(TileConvolution):
    """A planned convolution whose windows are the rows of a matrix."""

    @cached_property
    def _product(self) -> PixelProduct:
        depth = self.shape.depth
        return PixelProduct(depth, self.shape.outputs, WeightPacking(extended(np.arange(depth)), depth))

    @cached_property
    def _back(self) -> PixelProduct:
        depth, outputs = self.shape.depth, self.shape.outputs
        return PixelProduct(outputs, depth, WeightPacking(extended(np.arange(outputs) * depth), 1))

    @property
    def packed_size(self) -> int:
        return self._product.packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        self._product.pack(self.threads, weights, packed)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        start = self.zeros if bias is None else bias
        self._product.run(
            self.threads, y.size // self.shape.outputs, x, self.packed(weights), start, y, residual, relu
        )  # fmt: skip

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        packed = self.workspace.take("weights", self._back.packed_size)
        self._back.pack(self.threads, weights, packed)
        self._back.run(self.threads, dy.size // self.shape.outputs, dy, packed, self.zeros, dx)


class ProductConvolution(PixelConvolution):
    """One whose weights, when they are not kept, are read where they lie."""

    @cached_property
    def _gemm(self) -> Gemm:
        return Gemm(self.threads, self.workspace)

    def _matrix(self, array: Any, columns: int) -> Any:
        return memory_order(array).reshape(-1, columns)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        if self.kept_for(weights) is not None:  # in the order of tiles, which is the faster one once it is there
            super().forward(x, weights, bias, y, relu, sums, residual)
            return
        assert sums is None, "gives no sums"
        note_host_work()
        shape = self.shape
        out = self._matrix(y, shape.outputs)
        self._gemm(self._matrix(x, shape.depth), self._matrix(weights, shape.depth).T, out, accumulate=False)
        if bias is not None:
            out += bias
        if residual is not None:
            y += residual
        if relu:
            np.maximum(out, 0, out=out)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        depth = self.shape.depth
        self._gemm(
            self._matrix(dy, self.shape.outputs), self._matrix(weights, depth), self._matrix(dx, depth),
            accumulate=False,
        )  # fmt: skip

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        depth = self.shape.depth
        self._gemm(
            self._matrix(dy, self.shape.outputs).T, self._matrix(x, depth), self._matrix(dweights, depth), accumulate
        )  # fmt: skip
