"""Depthwise convolutions of a few channels without a stride: the elements of a row fill vectors, whatever their pixels.

Channels alone would leave most lanes empty. An element of the output is the sum over taps of the elements of the padded
image that lie the tap's columns times the channels further, so vectors pass over a row of elements; weights are
repeated for as many pixels as make whole vectors.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.convolution.correlation import Padding
from caffepy.backend.cpu.convolution.lanes import Lanes, pixel_sums
from caffepy.backend.cpu.convolution.lanes_kernels import gather
from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, kernel
from caffepy.backend.cpu.jit.threads import GRAIN, VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead, table_at
from caffepy.backend.cpu.workspace import Workspace

CACHED = 256 * 1024
"""Elements for each thread of padded images that are made before they are read."""
MAX_CHANNELS = WIDTH // 2
"""Channels that leave half of a vector's lanes empty."""

sums8, sums4, sums1 = (pixel_sums(Lanes(1, 1), pixels, False) for pixels in (8, 4, 1))


@kernel
def flat_rows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, x_image: Int, row_starts: Words, row_taps: Words, columns: Words, kernel_w: Int,
    packed: Floats, filters: Int, start: Floats, y: Floats, rows: Int, width: Int, channels: Int, vectors: Int,
    count: Int, pixels: Int, tile: Int, relu: Int, vector: Int,
) -> None:  # fmt: skip
    """Items are the rows (n, oh) of y. `vectors` vectors hold `pixels` pixels; `tile` times as many go at once."""
    period, line = vectors * vector, width * channels
    for item in range(begin, end):
        n, r = item // rows, item % rows
        row, met = table_at(row_taps, 2 * row_starts[r]), row_starts[r + 1] - row_starts[r]
        for number in range(count):
            first = min(number * tile * pixels, width - tile * pixels) * channels  # those that overlap write the same
            for v in range(vectors):
                a, w = ahead(x, n * x_image + first + v * vector), ahead(packed, v * filters)
                b, c = ahead(start, v * vector), ahead(y, item * line + first + v * vector)
                if tile == 8:
                    sums8(a, period, row, met, columns, kernel_w, w, b, c, period, vector, vector, relu)
                elif tile == 4:
                    sums4(a, period, row, met, columns, kernel_w, w, b, c, period, vector, vector, relu)
                else:
                    sums1(a, period, row, met, columns, kernel_w, w, b, c, period, vector, vector, relu)


def _pixels(channels: int) -> int:
    """As few as make whole vectors."""
    return math.lcm(channels, WIDTH) // channels


def is_flat(shape: ConvolutionShape) -> bool:
    """Whether the output and the gradient of the image are computed in this way."""
    g = shape.geometry
    depthwise = g.group == shape.channels == shape.outputs and len(shape.sizes) == 2
    reach = g.dilation[1] * (g.kernel[1] - 1)
    wide = min(shape.sizes[1], shape.out[1]) >= _pixels(shape.channels)
    return depthwise and shape.channels <= MAX_CHANNELS and g.stride == (1, 1) and wide and g.pad[1] <= reach


class FlatPass:
    """The output, or with `down` the gradient of the image, planned.

    Args:
        shape: of the convolution.
        down: for the gradient of the image.
        workspace: of the backend.
    """

    def __init__(self, shape: ConvolutionShape, down: bool, workspace: Workspace) -> None:
        g, channels = shape.geometry, shape.channels
        self._workspace, self._channels = workspace, channels
        source, target = (shape.out, shape.sizes) if down else (shape.sizes, shape.out)
        top, left = (d * (k - 1) - p if down else p for k, d, p in zip(g.kernel, g.dilation, g.pad, strict=True))
        columns = target[1] + g.dilation[1] * (g.kernel[1] - 1)
        self._padding = Padding(source, channels, (0, left), (source[0], max(columns, left + source[1])))
        at = np.arange(target[0])[:, None] - top + np.arange(g.kernel[0]) * g.dilation[0]
        valid, taps = (at >= 0) & (at < source[0]), np.broadcast_to(np.arange(g.kernel[0]), at.shape)
        tables = at[valid] * self._padding.row, taps[valid] * g.kernel[1] * WIDTH
        self._rows = ConstantTable(np.append(np.stack(tables, axis=-1).reshape(-1), 0))
        self._starts = ConstantTable(np.concatenate([[0], np.cumsum(valid.sum(axis=1))]))
        shifts = np.arange(g.kernel[1])
        self._columns = ConstantTable(np.stack([shifts * g.dilation[1] * channels, shifts * WIDTH], axis=-1))
        self._pixels, self._sizes = _pixels(channels), target
        self._vectors = self._pixels * channels // WIDTH
        self._tile = next(tile for tile in (8, 4, 1) if tile * self._pixels <= target[1])
        self._taps = math.prod(g.kernel)
        v, k, lane = np.ix_(range(self._vectors), range(self._taps), range(WIDTH))
        own = (v * WIDTH + lane) % channels
        self.order = ConstantTable(np.ascontiguousarray(own * self._taps + (self._taps - 1 - k if down else k)))
        """For each element of packed weights, which of the weights it is."""
        self._bias = ConstantTable(np.arange(self._vectors * WIDTH) % channels)

    def run(
        self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any, relu: bool = False
    ) -> None:  # fmt: skip
        """Compute y of some images, perhaps rectified, from packed weights and one number for each channel."""
        period, (rows, width) = self._vectors * WIDTH, self._sizes
        begin = self._workspace.take("start", period)
        gather.run(threads, period, GRAIN, start, self._bias, begin)
        step = max(1, threads * CACHED // self._padding.elements)
        count = -(-width // (self._tile * self._pixels))
        work = self._taps * -(-width * self._channels // WIDTH)
        for first in range(0, images, step):
            part, target = x[first : first + step], y[first : first + step]
            padded = self._workspace.take("images", part.shape[0] * self._padding.elements + WIDTH)
            self._padding.write(threads, part, padded)
            flat_rows.run(
                threads, part.shape[0] * rows, max(1, VECTOR_GRAIN // work), padded, self._padding.elements,
                self._starts, self._rows, self._columns, len(self._columns.array), packed, self._taps * WIDTH, begin,
                target, rows, width, self._channels, self._vectors, count, self._pixels, self._tile, int(relu), WIDTH,
            )  # fmt: skip
