"""The gradient of the image of a depthwise convolution with a stride, and so the forward pass of one transposed.

One pixel of the gradient of the output reaches a run of pixels in each row of the image. With the channels last a run
is `stride` times `channels` elements that lie together, and so do the weights once they are in this order; the pixel is
repeated as often. Then vectors are full whatever the number of channels, and each row of the image is written once,
where passes for each phase of the stride would write it in strips.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.simd_groups import NUMBERS, WORD, SimdGroups, SimdGroupsWriter, generator
from caffepy.backend.cpu.convolution.simd_groups_kernels import gather, named_kernel
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Kernel, device_function
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead
from caffepy.backend.cpu.workspace import Workspace

VECTORS_AT_ONCE = 4
"""Vectors that are worked on at a time."""
MIN_RUN = 2 * WIDTH
"""Elements of a run from which it pays."""


class _RunWriter(SimdGroupsWriter):
    """Writes the sums of a run."""

    def write(self, taps: int, arguments: list[Any]) -> None:
        """See `run_sums`."""
        builder = self.builder
        y, count, x, weights, run, keep = arguments
        keeps, block = builder.icmp_signed("!=", keep, self.word(0)), self.word(VECTORS_AT_ONCE * WIDTH)

        def products(at: Any, vectors: int, mask: Any) -> None:
            addresses = [self.vector_at(y, builder.add(at, self.word(v * WIDTH))) for v in range(vectors)]
            sums = self.choose(keeps, lambda: [self._loaded(a, mask) for a in addresses], lambda: self.zeros(vectors))
            for tap in range(taps):
                source = builder.sub(at, builder.mul(run, self.word(tap)))
                filters = builder.add(at, builder.mul(run, self.word(tap)))
                for v in range(vectors):
                    factor = self._loaded(self.vector_at(x, builder.add(source, self.word(v * WIDTH))), mask)
                    weight = self._loaded(self.vector_at(weights, builder.add(filters, self.word(v * WIDTH))), mask)
                    sums[v] = self.multiply_add(factor, weight, sums[v])
            for address, total in zip(addresses, sums, strict=True):
                if mask is None:
                    builder.store(total, address, align=4)
                else:
                    self.store(total, address, builder.sub(count, at), mask)

        def over_blocks(index: Any, _: Any, nothing: list[Any]) -> list[Any]:
            products(builder.mul(index, block), VECTORS_AT_ONCE, None)
            return nothing

        def over_rest(index: Any, _: Any, nothing: list[Any]) -> list[Any]:
            at = builder.add(done, builder.mul(index, self.word(WIDTH)))
            products(at, 1, self.lanes(builder.sub(count, at)))
            return nothing

        blocks = builder.sdiv(count, block)
        self.loop(blocks, [], [], over_blocks)
        done = builder.mul(blocks, block)
        rest = builder.add(builder.sub(count, done), self.word(WIDTH - 1))
        self.loop(builder.sdiv(rest, self.word(WIDTH)), [], [], over_rest)

    def _loaded(self, address: Any, mask: Any) -> Any:
        return self.builder.load(address, align=4) if mask is None else self.masked_load(address, mask)


@cache
def run_sums(taps: int) -> Any:
    """y[e] = keep * y[e] + the sum over taps of x[e - tap * run] * weights[e + tap * run].

    Arguments: y, how many elements, x, weights, run, keep (0 or 1).
    """
    signature = types.void(NUMBERS, WORD, NUMBERS, NUMBERS, WORD, WORD)

    def typed(typing_context: Any, y: Any, count: Any, x: Any, weights: Any, run: Any, keep: Any) -> Any:
        return signature, generator(
            _RunWriter, SimdGroups(1, 1), lambda writer, arguments: writer.write(taps, arguments)
        )  # fmt: skip

    return intrinsic(typed)


@device_function
def _clear(target: Any, start: Any, count: Any) -> None:
    for i in range(start, start + count):
        target[i] = 0


@device_function
def _repeat(source: Any, at: Any, pixels: Any, channels: Any, many: Any, target: Any, to: Any) -> None:
    """Write each of some pixels `many` times."""
    for pixel in range(at, at + pixels * channels, channels):
        for _ in range(many):
            for c in range(channels):
                target[to + c] = source[pixel + c]
            to += channels


@cache
def spread_kernel(taps: int) -> Kernel:
    """The kernel of a `SpreadGradient`."""
    sums = run_sums(taps)

    def spread(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, dy: Floats, weights: Floats, dx: Floats, repeated: Floats, size: Int, groups: Int,
        items: Int, images: Int, channels: Int, height: Int, width: Int, out_height: Int, out_width: Int, kernel: Int,
        reach: Int, stride: Int, pad: Int, across: Int, left: Int, blocks: Int,
    ) -> None:  # fmt: skip
        """Items are parts of the groups of rows that the same rows of dy reach, of all images.

        `repeated` holds `reach` rows of dy with each pixel `across` times, `taps` - 1 pixels of zeros before them and
        as many behind as make `blocks`.
        """
        run = across * channels
        line = (blocks + taps - 1) * run
        for item in range(begin, end):
            lines, image, newest = ahead(repeated, item * size), -1, 0
            _clear(lines, 0, size)
            for number in range(item * groups * images // items, (item + 1) * groups * images // items):
                n, g = number // groups, number % groups
                if n != image:
                    image, newest = n, g - reach
                for oh in range(max(0, newest + 1), min(out_height, g + 1)):
                    source = (n * out_height + oh) * out_width * channels
                    target = oh % reach * line + (taps - 1) * run
                    _repeat(dy, source, min(out_width, blocks), channels, across, lines, target)
                newest = g
                for h in range(max(0, g * stride - pad), min(height, (g + 1) * stride - pad)):
                    phase, keep = h + pad - g * stride, 0
                    row = (n * height + h) * width * channels
                    for tap in range(reach):
                        oh, k = g - tap, phase + tap * stride
                        if 0 <= oh < out_height and k < kernel:
                            x, w = ahead(lines, oh % reach * line + (taps - 1) * run), ahead(weights, k * taps * run)
                            for i in range(blocks):
                                skip, at = max(0, left - i * across) * channels, (i * across - left) * channels
                                count = min(run, width * channels - at) - skip
                                sums(
                                    ahead(dx, row + at + skip), count, ahead(x, i * run + skip), ahead(w, skip), run,
                                    keep,
                                )  # fmt: skip
                            keep = 1
                    if keep == 0:
                        _clear(dx, row, width * channels)

    return named_kernel(spread, [taps])


def one_window(shape: ConvolutionShape) -> ConvolutionShape:
    """If the image has a single window, the same with a stride that reaches beyond it, so that it is one run a row."""
    if shape.out != (1, 1):
        return shape
    g = shape.geometry
    stride = tuple(max(k, size + pad) for k, size, pad in zip(g.kernel, shape.sizes, g.pad, strict=True))
    x, weights = (shape.images, shape.channels, *shape.sizes), (shape.outputs, shape.group_channels, *g.kernel)
    wide = ConvolutionShape(x, weights, replace(g, stride=stride))
    return wide if wide.out == shape.out else shape


def is_spread(shape: ConvolutionShape) -> bool:
    """Whether the gradient of the image is computed in this way."""
    g = shape.geometry
    depthwise = g.group == shape.channels == shape.outputs and len(shape.sizes) == 2 and g.dilation == (1, 1)
    return depthwise and g.stride[1] > 1 and g.stride[1] * shape.channels >= MIN_RUN


class SpreadGradient:
    """The gradient of images, planned.

    Args:
        shape: of a depthwise convolution over two spatial axes.
        threads: of the backend.
        workspace: of the backend.
    """

    def __init__(self, shape: ConvolutionShape, threads: int, workspace: Workspace) -> None:
        self._shape, self._threads, self._workspace = shape, threads, workspace
        g, (height, width) = shape.geometry, shape.sizes
        self._reach, self._taps = (-(-kernel // stride) for kernel, stride in zip(g.kernel, g.stride, strict=True))
        self._groups = (height - 1 + g.pad[0]) // g.stride[0] + 1
        self._blocks = (width - 1 + g.pad[1]) // g.stride[1] + 1
        c, k, tap, phase = np.ix_(range(shape.channels), range(g.kernel[0]), range(self._taps), range(g.stride[1]))
        column = phase + tap * g.stride[1]
        order = np.where(column < g.kernel[1], (c * g.kernel[0] + k) * g.kernel[1] + column, -1)
        self._order = ConstantTable(np.ascontiguousarray(order.transpose(1, 2, 3, 0), np.int64))

    def run(self, dy: Any, weights: Any, dx: Any) -> None:
        """Compute dx."""
        shape, g, images = self._shape, self._shape.geometry, dy.shape[0]
        packed = self._workspace.take("weights", self._order.array.size)
        gather.run(self._threads, self._order.array.size, GRAIN, weights, self._order, packed)
        size = self._reach * (self._blocks + self._taps - 1) * g.stride[1] * shape.channels
        row = shape.sizes[1] * shape.channels
        groups = images * self._groups
        items = max(1, min(self._threads, groups * g.stride[0] * row // GRAIN))
        spread_kernel(self._taps).run(
            self._threads, items, 1, dy, packed, dx, self._workspace.take("repeated", items * size), size,
            self._groups, items, images, shape.channels, *shape.sizes, *shape.out, g.kernel[0], self._reach,
            g.stride[0], g.pad[0], g.stride[1], g.pad[1], self._blocks,
        )  # fmt: skip
