"""The sizes of a convolution, and what all of its passes share."""

from __future__ import annotations

import math

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Padding, Taps
from caffepy.backend.cpu.convolution.phases import merged
from caffepy.backend.types import Geometry, spatial_output


class ConvolutionShape:
    """Sizes, padding and taps of a convolution over two or more spatial axes; all but the last are taken as one.

    Args:
        x: (N, C, spatial...).
        weights: (num_output, C / group, kernel...).
        geometry: how the windows move.
    """

    def __init__(self, x: tuple[int, ...], weights: tuple[int, ...], geometry: Geometry) -> None:
        self.geometry = g = geometry
        self.images, self.channels, self.sizes = x[0], x[1], x[2:]
        self.outputs, self.group_channels = weights[:2]
        self.out = tuple(spatial_output(size, *self.window(i)) for i, size in enumerate(self.sizes))
        self.out_height, self.out_width = math.prod(self.out[:-1]), self.out[-1]
        self.pixels = self.images * self.out_height * self.out_width
        """Of the output of all images."""
        self.group_outputs = self.outputs // g.group
        self.depth = math.prod(weights[1:])
        """Elements of one filter."""
        self.weights = self.outputs * self.depth
        """Elements of all filters."""
        self.group_step = self.group_outputs * self.depth
        """Elements of the filters of one group."""
        padded = tuple(size + 2 * pad for size, pad in zip(self.sizes, g.pad, strict=True))
        self.apart = g.group > 1 and math.prod(g.kernel) > 1
        """Whether what a window reads lies apart, pixel by pixel."""
        self.padding = Padding(self.sizes, self.channels, g.pad, padded)
        self.line_rows = merged(
            [np.arange(out) * stride for out, stride in zip(self.out[:-1], g.stride[:-1], strict=True)], padded[:-1]
        )
        """Row of the padded image at which the windows of each row of the output begin."""
        self.taps = self._make_taps()

    def window(self, axis: int) -> tuple[int, int, int, int]:
        """(kernel, stride, pad, dilation) along one spatial axis."""
        g = self.geometry
        return g.kernel[axis], g.stride[axis], g.pad[axis], g.dilation[axis]

    def _make_taps(self) -> Taps:
        """Whole kernel rows where their elements lie next to each other in the image, else single kernel elements."""
        g = self.geometry
        whole = g.kernel[-1] == 1 or (g.dilation[-1] == 1 and g.group == 1)
        length = g.kernel[-1] if whole else 1
        axes = zip(g.kernel[:-1], g.dilation[:-1], strict=True)
        rows = merged([np.arange(kernel) * dilation for kernel, dilation in axes], self.padding.padded[:-1])
        columns = np.arange(0, g.kernel[-1], length) * g.dilation[-1]
        rows, columns = (v.reshape(-1) for v in np.meshgrid(rows, columns, indexing="ij"))
        return Taps(rows, columns, length, self.group_channels)
