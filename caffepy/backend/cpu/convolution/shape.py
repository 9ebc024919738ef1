"""The sizes of a convolution over two spatial axes, and what all of its passes share."""

from __future__ import annotations

import math

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Padding, Taps
from caffepy.backend.types import Geometry, spatial_output


class ConvolutionShape:
    """Sizes, padding and taps of a convolution.

    Args:
        x: (N, C, H, W).
        weights: (num_output, C / group, kernel_h, kernel_w).
        geometry: how the windows move.
    """

    def __init__(self, x: tuple[int, ...], weights: tuple[int, ...], geometry: Geometry) -> None:
        self.geometry = geometry
        self.images, self.channels, self.height, self.width = x
        self.outputs, self.group_channels = weights[:2]
        self.out_height, self.out_width = (spatial_output(x[2 + i], *self.window(i)) for i in (0, 1))
        self.group_outputs = self.outputs // geometry.group
        self.depth = math.prod(weights[1:])
        """Elements of one filter."""
        self.group_step = self.group_outputs * self.depth
        """Elements of the filters of one group."""
        self.padding = Padding(
            self.height, self.width, self.channels, geometry.pad[0], geometry.pad[1],
            self.height + 2 * geometry.pad[0], self.width + 2 * geometry.pad[1],
        )  # fmt: skip
        self.taps = self._make_taps()

    def window(self, axis: int) -> tuple[int, int, int, int]:
        """(kernel, stride, pad, dilation) along one spatial axis."""
        g = self.geometry
        return g.kernel[axis], g.stride[axis], g.pad[axis], g.dilation[axis]

    def _make_taps(self) -> Taps:
        """Whole kernel rows where their elements lie next to each other in the image, else single kernel elements."""
        g = self.geometry
        whole = g.group == 1 and (g.dilation[1] == 1 or g.kernel[1] == 1)
        length = g.kernel[1] if whole else 1
        rows, columns = np.arange(g.kernel[0]) * g.dilation[0], np.arange(0, g.kernel[1], length) * g.dilation[1]
        rows, columns = (v.reshape(-1) for v in np.meshgrid(rows, columns, indexing="ij"))
        return Taps(rows, columns, length, self.group_channels)
