"""Convolutions that are matrix products as they lie: of single pixels, or with a kernel as large as the image.

Pixels of at most four channels are a case of their own: a tile would be left after a few products, and the gradient of
the image has one lane. Vectors run along the output channels, and memory sets the speed.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.gemm.packing import WeightPacking, extended
from caffepy.backend.cpu.gemm.pixels import PixelProduct
from caffepy.backend.cpu.gemm.product import Gemm
from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.recording import note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Geometry

MAX_CHANNELS = 4
"""Of a pixel, so that one pass over the output channels meets all of them."""
PACKED = 256 if WIDTH == 16 else 512
"""Single pixels from which packed weights are read so often that it pays to pack them."""
BLOCKS = 8
"""Parts of the pixels whose gradients are added up apart; fixed, so that the order of a sum depends on no thread."""


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


@kernel
def turn_weights(begin: Int, end: Int, weights: Floats, channels: Int, outputs: Int, turned: Floats) -> None:
    """turned[c, j] = weights[j, c], zero for the channels up to four that do not exist. Items are c."""
    for c in range(begin, end):
        for j in range(outputs):
            turned[c * outputs + j] = weights[j * channels + c] if c < channels else 0


@kernel
def spread_pixels(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, channels: Int, turned: Floats, start: Floats, y: Floats, outputs: Int,
    addend: Floats, adds: Int, relu: Int,
) -> None:  # fmt: skip
    """y[p, j] = start[j] + sum over c of x[p, c] * turned[c, j] (+ addend), perhaps rectified. Items are pixels."""
    second, third, fourth = ahead(turned, outputs), ahead(turned, 2 * outputs), ahead(turned, 3 * outputs)
    for p in range(begin, end):
        pixel, to = ahead(x, p * channels), ahead(y, p * outputs)
        x0 = pixel[0]
        if channels == 1:
            for j in range(outputs):
                to[j] = start[j] + x0 * turned[j]
        else:
            x1 = pixel[1]
            x2, x3 = pixel[min(2, channels - 1)], pixel[channels - 1]
            for j in range(outputs):
                to[j] = start[j] + x0 * turned[j] + x1 * second[j] + x2 * third[j] + x3 * fourth[j]
        if adds == 1:
            more = ahead(addend, p * outputs)
            for j in range(outputs):
                to[j] += more[j]
        if relu == 1:
            for j in range(outputs):
                to[j] = 0 if to[j] < 0 else to[j]


@kernel
def sum_pixels(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, channels: Int, dy: Floats, outputs: Int, pixels: Int, blocks: Int, totals: Floats
) -> None:  # fmt: skip
    """totals[block, c, j] = sum over a block's pixels of x[p, c] * dy[p, j]. Items are blocks."""
    for block in range(begin, end):
        total = ahead(totals, block * channels * outputs)
        for i in range(channels * outputs):
            total[i] = 0
        first, stop = block * pixels // blocks, (block + 1) * pixels // blocks
        four = first + (stop - first) // 4 * 4
        for p in range(first, four, 4):
            d0, d1 = ahead(dy, p * outputs), ahead(dy, (p + 1) * outputs)
            d2, d3 = ahead(dy, (p + 2) * outputs), ahead(dy, (p + 3) * outputs)
            for c in range(channels):
                pixel, own = ahead(x, p * channels + c), ahead(total, c * outputs)
                x0, x1, x2, x3 = pixel[0], pixel[channels], pixel[2 * channels], pixel[3 * channels]
                for j in range(outputs):
                    own[j] += (x0 * d0[j] + x1 * d1[j]) + (x2 * d2[j] + x3 * d3[j])
        for p in range(four, stop):
            slope = ahead(dy, p * outputs)
            for c in range(channels):
                own, factor = ahead(total, c * outputs), x[p * channels + c]
                for j in range(outputs):
                    own[j] += factor * slope[j]


@kernel
def add_totals(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, totals: Floats, blocks: Int, channels: Int, outputs: Int, dweights: Floats, accumulate: Int
) -> None:  # fmt: skip
    """dweights[j, c] (+)= the sum of all blocks' totals[c, j]. Items are j."""
    for j in range(begin, end):
        for c in range(channels):
            total = dweights[j * channels + c] if accumulate == 1 else 0.0
            for block in range(blocks):
                total += totals[(block * channels + c) * outputs + j]
            dweights[j * channels + c] = total


def is_thin(weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether windows are single pixels of a few channels and outputs fill a vector."""
    return is_pixels(geometry) and weights_shape[1] <= MAX_CHANNELS and weights_shape[0] >= WIDTH


class ThinConvolution(TileConvolution):
    """A planned convolution of single pixels of a few channels."""

    @cached_property
    def _gemm(self) -> Gemm:
        return Gemm(self.threads, self.workspace)

    @property
    def packed_size(self) -> int:
        return MAX_CHANNELS * self.shape.outputs

    def pack(self, weights: Any, packed: Any) -> None:
        turn_weights.run(1, MAX_CHANNELS, 1, weights, self.shape.channels, self.shape.outputs, packed)

    def _pixels(self, images: int) -> int:
        return images * math.prod(self.shape.sizes)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        assert sums is None, "gives no sums"
        shape = self.shape
        spread_pixels.run(
            self.threads, self._pixels(x.shape[0]), max(1, GRAIN // shape.outputs), x, shape.channels,
            self.packed(weights), self.zeros if bias is None else bias, y, shape.outputs,
            y if residual is None else residual, int(residual is not None), int(relu),
        )  # fmt: skip

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        shape = self.shape
        turned = self.workspace.take("turned weights", self.packed_size)
        self.pack(weights, turned)
        columns = turned[: shape.channels * shape.outputs].reshape(shape.channels, shape.outputs).T
        slopes, target = memory_order(dy).reshape(-1, shape.outputs), memory_order(dx).reshape(-1, shape.channels)
        self._gemm(slopes, columns, target, accumulate=False)

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        shape = self.shape
        totals = self.workspace.take("totals", BLOCKS * shape.weights)
        pixels = self._pixels(x.shape[0])
        sum_pixels.run(
            self.threads, BLOCKS, max(1, BLOCKS * GRAIN // max(1, pixels * shape.outputs)), x, shape.channels, dy,
            shape.outputs, pixels, BLOCKS, totals,
        )  # fmt: skip
        add_totals.run(
            self.threads, shape.outputs, shape.outputs, totals, BLOCKS, shape.channels, shape.outputs, dweights,
            int(accumulate),
        )  # fmt: skip
