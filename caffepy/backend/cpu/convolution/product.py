"""Convolutions that are matrix products as they lie: of single pixels, or with a kernel as large as the image."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.gemm.product import Gemm
from caffepy.backend.cpu.jit.recording import note_host_work
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Geometry


def is_product(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether windows do not overlap and fill the image, and there are too few of them to pack the weights for."""
    g, sizes = geometry, x_shape[2:]
    if g.group > 1 or any(g.pad):
        return False
    pixels = math.prod(g.kernel) == 1 and all(stride == 1 for stride in g.stride)
    windows = x_shape[0] * (math.prod(sizes) if pixels else 1)
    return (pixels or g.kernel == sizes) and windows < weights_shape[0]


class ProductConvolution(TileConvolution):
    """A planned convolution whose windows are the rows of a matrix: the weights are read where they lie."""

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        super().__init__(threads, workspace, x_shape, weights_shape, geometry)
        self._gemm = Gemm(threads, workspace)

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
