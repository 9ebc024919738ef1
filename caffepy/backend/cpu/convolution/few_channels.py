"""The gradient of images of few channels on the CPU: they would leave most lanes of a vector empty.

So the columns of the kernel share vectors with the channels. For each row of the image and each column of the output
the products with all columns of the kernel are summed over the kernel's rows; then each goes to its pixel.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Correlation, Filters, Padding, Pixels, Taps, pack_all
from caffepy.backend.cpu.convolution.phases import Axis, axis_phases, merged_axes, reach
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH
from caffepy.backend.cpu.workspace import Workspace

CHUNK = 2**20
"""Elements of products that are made at a time."""
SHARE = 0.6
"""Of the vectors that tiles of channels alone would take: below this it is worth the second pass."""


@kernel
def add_columns(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, products: Floats, dx: Floats, width: Int, channels: Int, out_width: Int, kernel_w: Int,
    stride: Int, pad: Int, dilation: Int,
) -> None:  # fmt: skip
    """dx[w] = the sum of the products of all output columns and columns of the kernel that meet w. Items are rows."""
    run = kernel_w * channels
    for item in range(begin, end):
        target = item * width * channels
        for i in range(target, target + width * channels):
            dx[i] = 0
        for ow in range(out_width):
            source, at = (item * out_width + ow) * run, ow * stride - pad
            if dilation == 1:
                first, stop = max(0, -at) * channels, min(kernel_w, width - at) * channels
                to = target + at * channels
                for i in range(first, stop):
                    dx[to + i] += products[source + i]
            else:
                for k in range(kernel_w):
                    w = at + k * dilation
                    if 0 <= w < width:
                        for c in range(channels):
                            dx[target + w * channels + c] += products[source + k * channels + c]


def has_few_channels(shape: ConvolutionShape) -> bool:
    """Whether the gradient of the image takes fewer vectors in this way."""
    columns = shape.geometry.kernel[-1]
    together, apart = -(-columns * shape.channels // WIDTH), columns * -(-shape.channels // WIDTH)
    return shape.geometry.group == 1 and together < SHARE * apart


class FewChannelsGradient:
    """The gradient of images, planned.

    Args:
        shape: of the convolution.
        threads: of the backend.
        workspace: of the backend.
    """

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        self._run = shape.geometry.kernel[-1] * shape.channels
        self._rows = math.prod(shape.sizes[:-1])
        self._image = self._rows * shape.out_width * self._run
        axes = [axis_phases(size, *shape.window(i)) for i, size in enumerate(shape.sizes[:-1])]
        reaches = [reach(phases, size) for phases, size in zip(axes, shape.out[:-1], strict=True)]
        before, padded = (tuple(values) for values in zip(*reaches, strict=True))
        self._padding = Padding(shape.out, shape.outputs, (*before, 0), (*padded, shape.out_width))
        kernel = shape.geometry.kernel[:-1]
        rows = [
            merged_axes(parts, shape.sizes[:-1], kernel, before, padded) for parts in itertools.product(*axes)
        ]  # fmt: skip
        self._phases = [self._plan(axis) for axis in rows]

    def _plan(self, rows: Axis) -> Correlation:
        shape, width = self._shape, self._shape.out_width
        taps = Taps(rows.shifts, np.zeros_like(rows.shifts), 1, shape.outputs)
        weights = rows.taps[:, None] * self._run + np.arange(shape.outputs)[None, :] * shape.depth
        h, w = np.meshgrid(rows.indices, np.arange(width), indexing="ij")
        at = (rows.pixels[:, None] * width + np.arange(width)) * self._run
        pixels = Pixels(h.reshape(-1), w.reshape(-1), at, self._image)
        return Correlation(self._padding, taps, pixels, Filters(weights, 1, self._run, 1))

    def run(self, dy: Any, weights: Any, zeros: Any, dx: Any) -> None:
        """Compute dx; `zeros` are as many as a row of the kernel has elements."""
        step = max(1, CHUNK // max(1, self._image, self._padding.elements))
        parts = pack_all(self._phases, self._threads, self._workspace, weights, self._shape.group_step)
        for first in range(0, dy.shape[0], step):
            self._add(dy[first : first + step], parts, zeros, dx[first : first + step])

    def _add(self, dy: Any, packed: list[Any], zeros: Any, dx: Any) -> None:
        shape, g, images = self._shape, self._shape.geometry, dy.shape[0]
        if self._padding.needed:
            padded = self._workspace.take("images", images * self._padding.elements + WIDTH)
            self._padding.write(self._threads, dy, padded)
            dy = padded
        products = self._workspace.take("columns", images * self._image)
        for phase, part in zip(self._phases, packed, strict=True):
            phase.run(self._threads, images, dy, part, zeros, products)
        add_columns.run(
            self._threads, images * self._rows, max(1, GRAIN // max(1, shape.out_width * self._run)), products, dx,
            shape.sizes[-1], shape.channels, shape.out_width, g.kernel[-1], g.stride[-1], g.pad[-1], g.dilation[-1],
        )  # fmt: skip
