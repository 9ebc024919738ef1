"""The gradient of the weights of narrow groups with many channels and small images.

The pixels of a vector of channels lie far apart there, often by a power of two, which map to the same few lines of the
first cache. So these pixels of one image are brought together, with zeros around them, and all sums stay in registers
while they are passed over.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from numba import types
from numba.extending import intrinsic

from caffepy.backend.cpu.convolution.shape import ConvolutionShape
from caffepy.backend.cpu.convolution.simd_groups import NUMBERS, WORD, Row, SimdGroups, SimdGroupsWriter, generator
from caffepy.backend.cpu.convolution.simd_groups_kernels import named_kernel
from caffepy.backend.cpu.jit.kernel import Floats, Int, Kernel
from caffepy.backend.cpu.jit.threads import VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead
from caffepy.backend.cpu.workspace import Workspace

SUMS = 20 if WIDTH == 16 else 9
"""Sums for taps that stay in registers beside what they are made of."""
CACHED = 12 * 1024
"""Elements of x and dy, in one vector of channels, that are brought together."""
BATCH = 2**21
"""Elements of x and dy beyond which reading them line by line is faster, as memory is fetched ahead then."""
MIN_CHANNELS = 8 * WIDTH
"""With fewer, pixels do not lie far apart."""
BLOCKS = 8
"""Parts of the batch whose gradients are added up apart; fixed, so that the order of a sum depends on no thread."""


class _PlaneWriter(SimdGroupsWriter):
    """Writes the copy of pixels and the sums over a plane of them."""

    def write_copy(self, arguments: list[Any]) -> None:
        """See `copy_pixels`."""
        x, step, count, target, inputs = arguments
        masks = self.masks(inputs, whole=False)

        def pixel(w: Any, _: Any, nothing: list[Any]) -> list[Any]:
            source = self.shifted(x, self.builder.mul(w, step))
            self.prefetch(source, WIDTH)  # of the next vector of channels, which is wanted soon
            factor = self.factors(source, masks)[0]
            address = self.vector_at(target, self.builder.mul(w, self.word(WIDTH)))
            self.builder.store(factor, address, align=4)
            return nothing

        self.loop(count, [], [], pixel)

    def write_sums(self, row: Row, rows: int, pixels: int, arguments: list[Any]) -> None:
        """See `plane_sums`."""
        x, x_line, gap, dy, dy_line, lines, blocks, totals = arguments
        builder, meets = self.builder, row.columns(pixels)

        def over_blocks(line: Any, slope: Any, block: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(block, self.word(pixels * WIDTH))
            own, source = self.shifted(slope, at), self.shifted(line, builder.mul(at, self.word(row.step)))
            slopes = [builder.load(self.vector_at(own, self.word(p * WIDTH)), align=4) for p in range(pixels)]
            sums = list(sums)
            for r in range(rows):
                begin = self.shifted(source, builder.mul(gap, self.word(r)))
                for column, pairs in meets.items():
                    factor = builder.load(self.vector_at(begin, self.word(column * WIDTH)), align=4)
                    for pixel, tap in pairs:
                        number = r * row.taps + tap
                        sums[number] = self.multiply_add(factor, slopes[pixel], sums[number])
            return sums

        def over_lines(h: Any, _: Any, sums: list[Any]) -> list[Any]:
            line, slope = self.shifted(x, builder.mul(h, x_line)), self.shifted(dy, builder.mul(h, dy_line))
            return self.loop(blocks, sums, [], lambda block, _, inner: over_blocks(line, slope, block, inner))

        for number, total in enumerate(self.loop(lines, self.zeros(rows * row.taps), [], over_lines)):
            address = self.vector_at(totals, self.word(number * WIDTH))
            builder.store(builder.fadd(builder.load(address, align=4), total), address, align=4)


@cache
def copy_pixels(lanes: SimdGroups) -> Any:
    """What the lanes multiply in each of some pixels, one vector after the other.

    Arguments: the first pixel and the elements from one to the next; how many; where to; elements of a pixel.
    """
    signature = types.void(NUMBERS, WORD, WORD, NUMBERS, WORD)

    def typed(typing_context: Any, x: Any, step: Any, count: Any, target: Any, inputs: Any) -> Any:
        return signature, generator(_PlaneWriter, lanes, lambda writer, arguments: writer.write_copy(arguments))

    return intrinsic(typed)


@cache
def plane_sums(row: Row, rows: int, pixels: int) -> Any:
    """For all taps of a kernel of `rows` rows, totals += the sum over a plane of x * dy.

    Arguments: x, the elements between the windows of two lines and between two rows of a window; dy and the elements of
    its line; lines, blocks of `pixels` of each; totals.
    """
    signature = types.void(NUMBERS, WORD, WORD, NUMBERS, WORD, WORD, WORD, NUMBERS)

    def typed(  # noqa: PLR0913 -- a kernel
        typing_context: Any, x: Any, x_line: Any, gap: Any, dy: Any, dy_line: Any, lines: Any, blocks: Any, totals: Any
    ) -> Any:  # fmt: skip
        def write(writer: Any, arguments: list[Any]) -> None:
            writer.write_sums(row, rows, pixels, arguments)

        return signature, generator(_PlaneWriter, SimdGroups(1, 1), write)

    return intrinsic(typed)


@cache
def plane_kernel(lanes: SimdGroups, row: Row, rows: int, pixels: int) -> Kernel:
    """The kernel of a `PlanesPass`."""
    copy_x, copy_dy, sums = copy_pixels(lanes), copy_pixels(SimdGroups(1, 1)), plane_sums(row, rows, pixels)

    def narrow_planes(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, dy: Floats, totals: Floats, images: Int, block: Int, parts: Int, vectors: Int,
        filters: Int, sources: Int, used: Int, inputs: Int, outputs: Int, height: Int, width: Int, out_height: Int,
        out_width: Int, top: Int, left: Int, stride: Int, dilation: Int, columns: Int, blocks: Int, panels: Floats,
        x_size: Int, dy_size: Int, vector: Int,
    ) -> None:  # fmt: skip
        """Items are (block of images, part of the vectors). `columns` and `blocks` are those of a line of panels."""
        slopes = dy_size // out_height
        for item in range(begin, end):
            number, part = item // parts, item % parts
            first, stop = part * vectors // parts, (part + 1) * vectors // parts
            size = vectors * filters
            for i in range(number * size + first * filters, number * size + stop * filters):
                totals[i] = 0
            panel = ahead(panels, item * (x_size + dy_size))
            for i in range(x_size + dy_size):
                panel[i] = 0
            slope = ahead(panel, x_size)
            for n in range(number * block, min(images, (number + 1) * block)):
                for v in range(first, stop):
                    read, made = min(sources, inputs - v * sources), min(used, outputs - v * used)
                    for h in range(height):
                        copy_x(
                            ahead(x, (n * height + h) * width * inputs + v * sources), inputs, width,
                            ahead(panel, ((h + top) * columns + left) * vector), read,
                        )  # fmt: skip
                    for h in range(out_height):
                        copy_dy(
                            ahead(dy, (n * out_height + h) * out_width * outputs + v * used), outputs, out_width,
                            ahead(slope, h * slopes), made,
                        )  # fmt: skip
                    sums(
                        panel, stride * columns * vector, dilation * columns * vector, slope, slopes, out_height,
                        blocks, ahead(totals, number * size + v * filters),
                    )  # fmt: skip

    return named_kernel(narrow_planes, [lanes.made, lanes.read, row.taps, row.step, row.gap, rows, pixels])


class PlanesPass:
    """The sums over each block of a batch, planned.

    Args:
        lanes: how groups share vectors forward.
        shape: of the convolution, over two spatial axes.
        row: the taps of a row of the kernel.
    """

    def __init__(self, lanes: SimdGroups, shape: ConvolutionShape, row: Row) -> None:
        self._lanes, self._shape, self._row = lanes, shape, row
        self._vectors = -(-shape.geometry.group // lanes.groups)
        self._pixels = 7 if shape.out[-1] % 7 == 0 and WIDTH == 16 else 4
        self._blocks = -(-shape.out[-1] // self._pixels)
        (kernel, _), (stride, _), (dilation, _) = shape.geometry.kernel, shape.geometry.stride, shape.geometry.dilation
        reached = (shape.out[0] - 1) * stride + (kernel - 1) * dilation + 1
        self._rows = max(reached, shape.sizes[0] + shape.geometry.pad[0])
        self._columns = max(row.span(self._blocks * self._pixels), shape.sizes[1] + shape.geometry.pad[1])

    @property
    def _sizes(self) -> tuple[int, int]:
        """Elements of the panels of x and of dy."""
        return self._rows * self._columns * WIDTH, self._shape.out[0] * self._blocks * self._pixels * WIDTH

    @property
    def pays(self) -> bool:
        """Whether panels are small enough, pixels far enough apart, and the batch is one that caches hold."""
        shape = self._shape
        taps = shape.geometry.kernel[0] * self._row.taps
        elements = shape.images * (math.prod(shape.sizes) * shape.channels + math.prod(shape.out) * shape.outputs)
        return (
            taps <= SUMS and sum(self._sizes) <= CACHED and min(shape.channels, shape.outputs) >= MIN_CHANNELS
            and elements <= BATCH
        )  # fmt: skip

    def blocks(self, images: int) -> int:
        """Parts of the batch that have sums of their own."""
        return -(-images // -(-images // BLOCKS))

    def run(self, threads: int, x: Any, dy: Any, totals: Any, workspace: Workspace) -> None:
        """Write the sums of each block, in the order of packed weights."""
        shape, g, lanes, images = self._shape, self._shape.geometry, self._lanes, x.shape[0]
        blocks = self.blocks(images)
        parts = min(self._vectors, -(-4 * threads // blocks)) if threads > 1 else 1
        panels = workspace.take("panels", blocks * parts * sum(self._sizes))
        taps = g.kernel[0] * self._row.taps
        work = images * shape.out[0] * shape.out[1] * self._vectors * taps
        plane_kernel(lanes, self._row, g.kernel[0], self._pixels).run(
            threads, blocks * parts, max(1, VECTOR_GRAIN * blocks * parts // max(1, work)), x, dy, totals, images,
            -(-images // BLOCKS), parts, self._vectors, taps * WIDTH, lanes.sources, lanes.used, shape.channels,
            shape.outputs, *shape.sizes, *shape.out, *g.pad, g.stride[0], g.dilation[0], self._columns, self._blocks,
            panels, *self._sizes, WIDTH,
        )  # fmt: skip
