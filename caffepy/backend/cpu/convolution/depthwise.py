"""Depthwise convolution on the CPU: each channel has a filter of its own, and neighbouring channels are one vector.

There is nothing to multiply as a matrix: each element is read once for each filter element, from the first-level cache
but for the first time, so memory sets the speed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Doubles, Floats, Int, Ints, kernel
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.types import Geometry, spatial_output

GRAIN = 16384
"""Products below which a second thread costs more than it saves."""
BLOCKS = 64
"""Parts of the output whose gradients are added up apart; fixed, so that the order of a sum depends on no thread."""


def is_depthwise(weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether every input channel makes one output channel by itself."""
    return len(weights_shape) == 4 and geometry.group == weights_shape[0] > 1 and weights_shape[1] == 1


@kernel
def forward(begin: Int, end: Int, x: Floats, weights: Floats, bias: Floats, y: Floats, sizes: Ints) -> None:
    """Items are rows of the output; weights are (kernel_h, kernel_w, C)."""
    channels, height, width, out_height, out_width = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    for item in range(begin, end):
        image, row = item // out_height, item % out_height
        for column in range(out_width):
            at = (item * out_width + column) * channels
            for c in range(channels):
                y[at + c] = bias[c]
            for i in range(sizes[5]):
                h = row * sizes[7] - sizes[9] + i * sizes[11]
                if h < 0 or h >= height:
                    continue
                for j in range(sizes[6]):
                    w = column * sizes[8] - sizes[10] + j * sizes[12]
                    if w >= 0 and w < width:
                        source, tap = ((image * height + h) * width + w) * channels, (i * sizes[6] + j) * channels
                        for c in range(channels):
                            y[at + c] += x[source + c] * weights[tap + c]


@kernel
def backward_data(begin: Int, end: Int, dy: Floats, weights: Floats, dx: Floats, sizes: Ints) -> None:
    """Items are rows of the image."""
    channels, height, width, out_height, out_width = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    for item in range(begin, end):
        image, h = item // height, item % height
        for w in range(width):
            at = (item * width + w) * channels
            for c in range(channels):
                dx[at + c] = 0
            for i in range(sizes[5]):
                up = h + sizes[9] - i * sizes[11]
                row = up // sizes[7]
                if up < 0 or row * sizes[7] != up or row >= out_height:
                    continue
                for j in range(sizes[6]):
                    left = w + sizes[10] - j * sizes[12]
                    column = left // sizes[8]
                    if left >= 0 and column * sizes[8] == left and column < out_width:
                        source = ((image * out_height + row) * out_width + column) * channels
                        tap = (i * sizes[6] + j) * channels
                        for c in range(channels):
                            dx[at + c] += dy[source + c] * weights[tap + c]


@kernel
def backward_weights(begin: Int, end: Int, x: Floats, dy: Floats, totals: Doubles, rows: Floats, sizes: Ints) -> None:
    """Items are blocks of output rows; each has its own totals (kernel_h, kernel_w, C) and sums of one row (C)."""
    channels, height, width, out_height, out_width = sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]
    for block in range(begin, end):
        own = block * channels
        for item in range(block * sizes[14], min((block + 1) * sizes[14], sizes[13] * out_height)):
            image, row = item // out_height, item % out_height
            for i in range(sizes[5]):
                h = row * sizes[7] - sizes[9] + i * sizes[11]
                if h < 0 or h >= height:
                    continue
                for j in range(sizes[6]):
                    for c in range(channels):
                        rows[own + c] = 0
                    for column in range(out_width):
                        w = column * sizes[8] - sizes[10] + j * sizes[12]
                        if w >= 0 and w < width:
                            source = ((image * height + h) * width + w) * channels
                            target = (item * out_width + column) * channels
                            for c in range(channels):
                                rows[own + c] += x[source + c] * dy[target + c]
                    total = ((block * sizes[5] + i) * sizes[6] + j) * channels
                    for c in range(channels):
                        totals[total + c] += rows[own + c]


class DepthwiseConvolution:
    """A planned convolution over two spatial axes with as many groups as input and output channels.

    Args:
        threads: of the backend.
        workspace: of the backend.
        x_shape: (N, C, H, W).
        weights_shape: (C, 1, kernel_h, kernel_w).
        geometry: how the windows move.
    """

    gives_sums = False

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        g = geometry
        self._threads, self._workspace = threads, workspace
        images, self._channels, self._height, width = x_shape
        self._taps = math.prod(g.kernel)
        out = tuple(map(spatial_output, x_shape[2:], g.kernel, g.stride, g.pad, g.dilation))
        self._rows, self._image_rows = images * out[0], images * self._height
        block = max(1, -(-self._rows // BLOCKS))
        self._blocks = -(-self._rows // block)
        numbers = (
            self._channels, self._height, width, *out, *g.kernel, *g.stride, *g.pad, *g.dilation, images, block
        )  # fmt: skip
        self._sizes = np.array(numbers, np.int32)
        self._zeros = np.zeros(self._channels, np.float32)
        self._grain = max(1, GRAIN // max(1, out[1] * self._channels * self._taps))
        self._image_grain = max(1, GRAIN // max(1, width * self._channels * self._taps))

    def _packed(self, weights: Any) -> Any:
        """(kernel_h, kernel_w, C) of weights whose memory is (C, kernel_h, kernel_w)."""
        packed = self._workspace.take("depthwise filters", self._taps * self._channels)
        plain = weights.reshape(self._channels, self._taps)
        packed[: plain.size].reshape(self._taps, self._channels)[...] = plain.T
        return packed

    def forward(self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None) -> None:
        assert sums is None, "gives no sums"
        start = self._zeros if bias is None else bias
        forward.run(self._threads, self._rows, self._grain, x, self._packed(weights), start, y, self._sizes)
        if relu:
            np.maximum(y, 0, out=y)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        packed = self._packed(weights)
        backward_data.run(self._threads, self._image_rows, self._image_grain, dy, packed, dx, self._sizes)

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        totals = np.zeros((self._blocks, self._taps, self._channels))
        rows = self._workspace.take("depthwise rows", self._blocks * self._channels)
        backward_weights.run(self._threads, self._blocks, 1, x, dy, totals, rows, self._sizes)
        result = totals.sum(axis=0).T.reshape(dweights.shape)
        if accumulate:
            dweights += result
        else:
            dweights[...] = result
