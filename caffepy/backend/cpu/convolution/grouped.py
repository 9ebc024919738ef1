"""Convolution on the CPU with small groups (depthwise: one channel): a vector holds several groups.

There is little to multiply as a matrix: each element is read once per filter element, mostly from the L1 cache, so
depthwise convolutions are bound by memory.

The weight gradient has a separate algorithm (`PlanesPass`) for many channels and small images. The pixels of a channel
vector are then far apart, often by a power of two, which maps them to few L1 cache sets. Therefore one image's pixels
are packed into a zero-padded panel, and all sums stay in registers during a pass over it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numba.extending import intrinsic

from caffepy.backend.cpu.convolution.axes import Axis, axis_residues, forward_axis, merged
from caffepy.backend.cpu.convolution.correlation import ConvolutionShape
from caffepy.backend.cpu.convolution.depthwise_backward_data import (
    ZEROS,
    ResidueDgrad,
    ScatterDgrad,
    one_window,
    suits_residue_dgrad,
    suits_scatter_dgrad,
)
from caffepy.backend.cpu.convolution.direct import TileConvolution
from caffepy.backend.cpu.convolution.simd_groups import (
    NUMBERS,
    WORD,
    Row,
    SimdGroups,
    SimdGroupsWriter,
    add_blocks,
    fold_kernel,
    gather,
    generator,
    named_kernel,
    new_rows,
    next_rows,
    pixel_kernel,
    repeat_channels,
    row_kernel,
    row_of,
    row_tables,
    row_tap_kernel,
    row_tiles,
    step_of,
    table_of,
    tap_kernel,
    tile_height,
    tiles,
)
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Kernel
from caffepy.backend.cpu.jit.kernel_graph import note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN, VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import WIDTH, ahead
from caffepy.backend.cpu.memory import Workspace
from caffepy.backend.types import Geometry

SUMS = 20 if WIDTH == 16 else 9
"""Sums over taps that stay in registers beside their operands."""
PLANE = 12 * 1024
"""Maximum elements of x and dy of one channel vector for packing."""
BATCH = 2**21
"""Maximum elements of x and dy; beyond, reading line by line is faster, because the prefetcher follows it."""
MIN_CHANNELS = 8 * WIDTH
"""Minimum channels; with fewer, pixels are not far apart."""
BATCH_PARTS = 8
"""Batch parts with separate gradient sums; fixed, so that the summation order does not depend on threads."""


class _PlaneWriter(SimdGroupsWriter):
    """Emits the packing of pixels and the sums over a plane."""

    def write_copy(self, arguments: list[Any]) -> None:
        """See `copy_pixels`."""
        x, step, count, target, inputs = arguments
        masks = self.masks(inputs, whole=False)

        def pixel(w: Any, _: Any, nothing: list[Any]) -> list[Any]:
            source = self.shifted(x, self.builder.mul(w, step))
            self.prefetch(source, WIDTH)  # of the next channel vector, which is read soon
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
    """Return an intrinsic that packs the lanes' factors of some pixels, one vector after another.

    Arguments: the first pixel and the elements between pixels; the number of pixels; the target; elements of a pixel.
    """
    signature = types.void(NUMBERS, WORD, WORD, NUMBERS, WORD)

    def typed(typing_context: Any, x: Any, step: Any, count: Any, target: Any, inputs: Any) -> Any:
        return signature, generator(_PlaneWriter, lanes, lambda writer, arguments: writer.write_copy(arguments))

    return intrinsic(typed)


@cache
def plane_sums(row: Row, rows: int, pixels: int) -> Any:
    """Return an intrinsic: for all taps of a kernel of `rows` rows, totals += the sum over a plane of x * dy.

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
    """Return the kernel of a `PlanesPass`."""
    copy_x, copy_dy, sums = copy_pixels(lanes), copy_pixels(SimdGroups(1, 1)), plane_sums(row, rows, pixels)

    def grouped_planes(  # noqa: PLR0913 -- a kernel
        begin: Int, end: Int, x: Floats, dy: Floats, totals: Floats, images: Int, block: Int, parts: Int, vectors: Int,
        filters: Int, sources: Int, used: Int, inputs: Int, outputs: Int, height: Int, width: Int, out_height: Int,
        out_width: Int, top: Int, left: Int, stride: Int, dilation: Int, columns: Int, blocks: Int, panels: Floats,
        x_size: Int, dy_size: Int, vector: Int,
    ) -> None:  # fmt: skip
        """Items are (block of images, part of the vectors). `columns` and `blocks` are those of a panel's line."""
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

    return named_kernel(grouped_planes, [lanes.made, lanes.read, row.taps, row.step, row.gap, rows, pixels])


class PlanesPass:
    """The planned sums over each block of a batch.

    Args:
        lanes: distribution of groups over vectors in the forward pass.
        shape: of the convolution, over two spatial axes.
        row: the taps of a kernel row.
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
        """Return whether panels are small enough, pixels far enough apart, and the batch fits the caches."""
        shape = self._shape
        taps = shape.geometry.kernel[0] * self._row.taps
        elements = shape.images * (math.prod(shape.sizes) * shape.channels + math.prod(shape.out) * shape.outputs)
        return (
            taps <= SUMS and sum(self._sizes) <= PLANE and min(shape.channels, shape.outputs) >= MIN_CHANNELS
            and elements <= BATCH
        )  # fmt: skip

    def blocks(self, images: int) -> int:
        """Return the batch parts with separate sums."""
        return -(-images // -(-images // BATCH_PARTS))

    def run(self, threads: int, x: Any, dy: Any, totals: Any, workspace: Workspace) -> None:
        """Write the sums of each block in packed weight order."""
        shape, g, lanes, images = self._shape, self._shape.geometry, self._lanes, x.shape[0]
        blocks = self.blocks(images)
        parts = min(self._vectors, -(-4 * threads // blocks)) if threads > 1 else 1
        panels = workspace.take("panels", blocks * parts * sum(self._sizes))
        taps = g.kernel[0] * self._row.taps
        work = images * shape.out[0] * shape.out[1] * self._vectors * taps
        plane_kernel(lanes, self._row, g.kernel[0], self._pixels).run(
            threads, blocks * parts, max(1, VECTOR_GRAIN * blocks * parts // max(1, work)), x, dy, totals, images,
            -(-images // BATCH_PARTS), parts, self._vectors, taps * WIDTH, lanes.sources, lanes.used, shape.channels,
            shape.outputs, *shape.sizes, *shape.out, *g.pad, g.stride[0], g.dilation[0], self._columns, self._blocks,
            panels, *self._sizes, WIDTH,
        )  # fmt: skip


BLOCKS = 8
"""Output parts with separate gradient sums; fixed, so that the summation order does not depend on threads."""
MAX_READ = 8
"""Maximum input channels of a group; each has its own instruction."""

FACTORS = 24 if WIDTH == 16 else 6
"""Vectors of a row of taps that stay in registers beside the sums of eight pixels."""
TAPS = 32
"""Maximum taps of a depthwise row that share loads: spilled taps cost no more than reloading them per pixel, and edge
pixels are also computed eight at a time."""
CACHED = 128 * 1024
"""Gradient elements per thread that all residues process before the next part."""
REPEATED = 256 * 1024
"""Elements of images with repeated channels, so that they are still cached when read."""
LARGE = 2**18
"""Minimum image elements for which, with vectors of 16, groups with stride 2 are faster read pixel by pixel."""
DEPTH = 64 // WIDTH
"""Prefetch distance in vectors, within a tile or to the next one."""


def _fits(lanes: SimdGroups) -> bool:
    return lanes.groups >= 2 and lanes.read <= MAX_READ


def _lanes(weights_shape: tuple[int, ...], group: int) -> tuple[SimdGroups, SimdGroups]:
    """Return the groups' distribution over vectors: forward (and weight gradient), and data gradient."""
    made, read = weights_shape[0] // group, weights_shape[1]
    return SimdGroups(made, read), SimdGroups(read, made)


def is_grouped(weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Return whether several groups fit a vector in at least one direction, or the data gradient is folded."""
    lanes = _lanes(weights_shape, geometry.group)
    return geometry.group > 1 and (any(map(_fits, lanes)) or _folds(lanes[1]))


def _folds(lanes: SimdGroups) -> bool:
    """Return whether the data gradient is computed per output and then summed, to avoid idle lanes."""
    return lanes.made == 1 and lanes.used < WIDTH


class _Pass:
    """Results at the pixels of some axes, each a sum over taps: the forward pass, or a residue of the data gradient.

    Args:
        lanes: distribution of groups over vectors.
        groups: number of groups.
        axes: results and sources along each spatial axis.
        sizes: sizes of the source's and of the result's spatial axes.
        kernel: sizes of the whole kernel.
    """

    def __init__(
        self, lanes: SimdGroups, groups: int, axes: Sequence[Axis], sizes: tuple[tuple[int, ...], tuple[int, ...]],
        kernel: tuple[int, ...],
    ) -> None:  # fmt: skip
        (source, target), self._lanes, column = sizes, lanes, axes[-1]
        self._inputs, self._outputs = groups * lanes.read, groups * lanes.made
        self._vectors = -(-groups // lanes.groups)
        tap = lanes.read * WIDTH
        self._filters = math.prod(kernel) * tap
        self._row_starts, self._row_taps = row_tables(axes[:-1], source, kernel, self._inputs, tap)
        self._next_rows, self._fetched = next_rows(self._row_starts, self._row_taps), new_rows(axes)
        self._column_taps = table_of(np.stack([column.shifts * self._inputs, column.taps * tap], axis=-1))
        plain = lanes.read == 1 or WIDTH < 16 or math.prod(source) * self._inputs <= LARGE
        row = row_of(column, 0.75 if plain else 0.6)
        most = TAPS if lanes.read == 1 else FACTORS // lanes.read
        self._row = row if row is not None and row.taps <= most else None
        self._high = tile_height(len(column.indices))
        size = source[-1]
        self._tiles = tiles(column, size) if self._row is None else row_tiles(column, size, self._high)
        self._tile_table = table_of(self._tiles)
        self._steps = [step_of(column.indices), step_of(column.pixels)]
        self._from = int(column.indices[0]) * self._inputs
        rows = merged([axis.pixels for axis in axes[:-1]], target[:-1])
        self._y_rows = table_of((rows * target[-1] + column.pixels[0]) * self._outputs)
        self._rows = len(rows)
        self._images = math.prod(source) * self._inputs, math.prod(target) * self._outputs
        row_taps = math.prod(len(axis.taps) for axis in axes[:-1])
        self._work = len(column.pixels) * self._vectors * len(column.taps) * max(1, row_taps) * lanes.read

    def run(
        self, threads: int, images: int, x: Any, packed: Any, start: Any, y: Any, relu: bool = False
    ) -> None:  # fmt: skip
        """Compute y of some images, optionally rectified."""
        lines = images * self._rows
        parts = min(len(self._tiles), -(-4 * threads // max(1, lines)))
        kernel, more = (pixel_kernel(self._lanes), ()) if self._row is None else (
            row_kernel(self._lanes, self._row, self._high),
            (ZEROS, self._next_rows, min(self._vectors, DEPTH), self._fetched),
        )  # fmt: skip
        kernel.run(
            threads, lines * parts, max(1, VECTOR_GRAIN * parts // max(1, self._work)), x, self._images[0], self._from,
            self._steps[0] * self._inputs, self._row_starts, self._row_taps, self._column_taps, self._tile_table,
            len(self._tiles), parts, packed, self._filters, start, y, self._images[1], self._y_rows,
            self._steps[1] * self._outputs, self._rows, self._vectors, self._lanes.sources, self._lanes.used,
            self._inputs, self._outputs, int(relu), *more,
        )  # fmt: skip


class _WeightsPass:
    """The weight gradient.

    Args:
        lanes: distribution of groups over vectors in the forward pass.
        shape: of the convolution.
        axes: axes of the forward pass.
    """

    def __init__(self, lanes: SimdGroups, shape: ConvolutionShape, axes: Sequence[Axis]) -> None:
        self._lanes, self._shape, column = lanes, shape, axes[-1]
        kernel, source, inputs = shape.geometry.kernel, shape.sizes, shape.channels
        self._vectors = -(-shape.geometry.group // lanes.groups)
        tap = lanes.read * WIDTH
        self._filters = math.prod(kernel) * tap
        self._starts, self._taps = row_tables(axes[:-1], source, kernel, inputs, tap)
        self._next_rows, self._fetched = next_rows(self._starts, self._taps), new_rows(axes)
        reached = column.indices[None, :] + column.shifts[:, None]
        begins = (reached < 0).sum(axis=1)
        ends = np.maximum(begins, (reached < source[-1]).sum(axis=1))
        self._columns = table_of(np.stack([begins, ends, column.shifts * inputs, column.taps * tap], axis=-1))
        self._from = int(column.indices[0]) * inputs
        at = int(column.indices[0] + column.shifts[0])
        self._bounds = -at, source[-1] - at
        row = row_of(column, 0.8) if lanes.read == 1 else None
        self._row = row if row is not None and row.taps <= SUMS else None
        planes = PlanesPass(lanes, shape, row) if row is not None and len(source) == 2 else None
        self._planes = planes if planes is not None and planes.pays else None
        order = _forward_order(lanes, shape).reshape(-1)
        self._positions = table_of(np.argsort(order, kind="stable")[-shape.weights :])

    def run(self, threads: int, x: Any, dy: Any, dweights: Any, accumulate: bool, workspace: Workspace) -> None:
        shape, size = self._shape, self._vectors * self._filters
        lines = x.shape[0] * shape.out_height
        block = max(1, -(-lines // BLOCKS))
        blocks = -(-lines // block) if self._planes is None else self._planes.blocks(x.shape[0])
        totals = workspace.take("totals", blocks * size)
        if self._planes is None:
            self._add_lines(threads, x, dy, totals, block)
        else:
            self._planes.run(threads, x, dy, totals, workspace)
        grain = max(1, GRAIN // blocks)
        add_blocks.run(
            threads, shape.weights, grain, totals, blocks, size, self._positions, dweights, int(accumulate)
        )  # fmt: skip

    def _add_lines(self, threads: int, x: Any, dy: Any, totals: Any, block: int) -> None:
        shape, size = self._shape, self._vectors * self._filters
        lines = x.shape[0] * shape.out_height
        blocks = -(-lines // block)
        parts = min(self._vectors, -(-4 * threads // blocks))
        work = lines * shape.out_width * size // WIDTH
        kernel, more = self._kernel()
        kernel.run(
            threads, blocks * parts, max(1, VECTOR_GRAIN * blocks * parts // max(1, work)), x,
            math.prod(shape.sizes) * shape.channels, self._from,
            shape.geometry.stride[-1] * shape.channels, self._starts, self._taps, self._columns,
            shape.geometry.kernel[-1], dy, shape.out_width * shape.outputs, totals, self._filters, size, lines, block,
            shape.out_height, self._vectors, parts, self._lanes.sources, self._lanes.used, shape.channels,
            shape.outputs, *more,
        )  # fmt: skip

    def _kernel(self) -> tuple[Kernel, tuple[Any, ...]]:
        """Return the kernel and its arguments beyond those of `tap_kernel`."""
        if self._row is None:
            return tap_kernel(self._lanes), ()
        rows = 3 if 3 * self._row.taps <= SUMS else 1
        more = (self._shape.out_width, *self._bounds, ZEROS, self._next_rows, self._fetched)
        return row_tap_kernel(self._lanes, self._row, rows), more


def _forward_order(lanes: SimdGroups, shape: ConvolutionShape) -> Any:
    """Return for each element (vector, tap, i, lane) of packed weights its index in the weights; -1: none."""
    taps = math.prod(shape.geometry.kernel)
    vectors = -(-shape.outputs // lanes.used)
    v, k, i, lane = np.ix_(range(vectors), range(taps), range(lanes.read), range(WIDTH))
    output = v * lanes.used + lane
    return np.where((lane < lanes.used) & (output < shape.outputs), (output * taps + k) * lanes.read + i, -1)


def _backward_order(lanes: SimdGroups, shape: ConvolutionShape) -> Any:
    """The same for the data gradient, whose lanes are the image's channels."""
    taps = math.prod(shape.geometry.kernel)
    vectors = -(-shape.geometry.group // lanes.groups)
    v, k, j, lane = np.ix_(range(vectors), range(taps), range(lanes.read), range(WIDTH))
    channel = v * lanes.used + lane
    output = channel // lanes.made * lanes.read + j
    index = (output * taps + k) * lanes.made + channel % lanes.made
    return np.where((lane < lanes.used) & (channel < shape.channels), index, -1)


class GroupedConvolution(TileConvolution):
    """A planned convolution with small groups; a direction in which no two groups fit a vector uses tiles."""

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        super().__init__(threads, workspace, x_shape, weights_shape, geometry)
        self._lanes, self._back_lanes = _lanes(weights_shape, geometry.group)
        self._forward_pass: tuple[_Pass, ConstantTable, int] | None = None
        self._back_passes: tuple[list[_Pass] | list[ResidueDgrad], ConstantTable, int] | None = None
        self._weights_pass: _WeightsPass | None = None
        self._runs = one_window(self.shape)
        self._scatter: ScatterDgrad | None = None
        self._by_residues = suits_residue_dgrad(self.shape)

    def _axes(self) -> list[Axis]:
        shape = self.shape
        return [forward_axis(out, *shape.window(i)) for i, out in enumerate(shape.out)]

    def _packed(self, weights: Any, order: ConstantTable, size: int) -> Any:
        packed = self.workspace.take("weights", size)
        self._gather(weights, order, size, packed)
        return packed

    def _gather(self, weights: Any, order: ConstantTable, size: int, packed: Any) -> None:
        gather.run(self.threads, size, GRAIN, weights, order, packed)

    def forward(
        self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None, residual: Any = None
    ) -> None:  # fmt: skip
        if not _fits(self._lanes):
            super().forward(x, weights, bias, y, relu, sums, residual)
            return
        assert sums is None, "gives no sums"
        plan, start = self._planned_pass()[0], self.zeros if bias is None else bias
        plan.run(self.threads, x.shape[0], x, self.packed(weights), start, y, relu and residual is None)
        if residual is not None:  # tiles overlap, so they cannot add it
            note_host_work()
            y += residual
            if relu:
                np.maximum(y, 0, out=y)

    def _planned_pass(self) -> tuple[_Pass, ConstantTable, int]:
        if self._forward_pass is None:
            shape, geometry = self.shape, self.shape.geometry
            order = _forward_order(self._lanes, shape)
            sizes = (shape.sizes, shape.out)
            plan = _Pass(self._lanes, geometry.group, self._axes(), sizes, geometry.kernel)
            self._forward_pass = plan, table_of(order), order.size
        return self._forward_pass

    @property
    def packed_size(self) -> int:
        return self._planned_pass()[2] if _fits(self._lanes) else super().packed_size

    def pack(self, weights: Any, packed: Any) -> None:
        if not _fits(self._lanes):
            super().pack(weights, packed)
            return
        _, table, size = self._planned_pass()
        self._gather(weights, table, size, packed)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        if suits_scatter_dgrad(self._runs) and not self._by_residues:
            if self._scatter is None:
                self._scatter = ScatterDgrad(self._runs, self.threads, self.workspace)
            self._scatter.run(dy, weights, dx)
            return
        folds = _folds(self._back_lanes)
        if not folds and not _fits(self._back_lanes):
            super().backward_data(dy, weights, dx)
            return
        if self._back_passes is None:
            self._back_passes = self._plan_back()
        plans, table, size = self._back_passes
        packed = self._packed(weights, table, size)
        many, image = (self._back_lanes.read if folds else 1), dx.size // dx.shape[0]
        each = max(dy.size // dy.shape[0], many * image if folds else 0)
        step = dy.shape[0] if len(plans) == 1 and not folds else max(1, self.threads * CACHED // each)
        for first in range(0, dy.shape[0], step):  # residues read the same elements, which stay in a cache
            part, target = dy[first : first + step], dx[first : first + step]
            made = self.workspace.take("folded", target.size * many) if folds else target
            for plan in plans:
                plan.run(self.threads, part.shape[0], part, packed, self.zeros, made)
            if folds:
                items = part.shape[0] * image // self.shape.channels
                fold_kernel(many).run(
                    self.threads,
                    items,
                    max(1, GRAIN // (many * self.shape.channels)),
                    made,
                    target,
                    self.shape.channels,
                )

    def _plan_back(self) -> tuple[list[_Pass] | list[ResidueDgrad], ConstantTable, int]:
        if self._by_residues:
            dgrad = ResidueDgrad(self.shape)
            return [dgrad], table_of(dgrad.order), dgrad.order.size
        shape, geometry, lanes, groups = self.shape, self.shape.geometry, self._back_lanes, self.shape.geometry.group
        if _folds(lanes):
            lanes, groups = SimdGroups(1, 1), shape.outputs
        residues = [axis_residues(size, *shape.window(i)) for i, size in enumerate(shape.sizes)]
        plans = [
            _Pass(lanes, groups, axes, (shape.out, shape.sizes), geometry.kernel)
            for axes in itertools.product(*residues)
        ]
        order = _forward_order(lanes, shape) if _folds(self._back_lanes) else _backward_order(lanes, shape)
        return plans, table_of(order), order.size

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        repeats = not _fits(self._lanes) and self._lanes.read == 1
        if not _fits(self._lanes) and not repeats:
            super().backward_weights(x, dy, dweights, accumulate)
            return
        if self._weights_pass is None:
            shape, lanes = (_one_output_a_group(self.shape), SimdGroups(1, 1)) if repeats else (self.shape, self._lanes)
            self._weights_pass = _WeightsPass(lanes, shape, self._axes())
        if not repeats:
            self._weights_pass.run(self.threads, x, dy, dweights, accumulate, self.workspace)
            return
        many, image = self.shape.group_outputs, x.size // x.shape[0]
        step = max(1, REPEATED // (many * image))  # the summation order does not depend on threads
        for first in range(0, x.shape[0], step):
            part = x[first : first + step]
            channels = self.workspace.take("repeated", many * part.size)[: many * part.size]
            repeat_channels.run(self.threads, part.size, max(1, GRAIN // many), part, channels, many)
            self._weights_pass.run(
                self.threads, channels.reshape(len(part), -1), dy[first : first + step], dweights,
                accumulate or first > 0, self.workspace,
            )  # fmt: skip


def _one_output_a_group(shape: ConvolutionShape) -> ConvolutionShape:
    """Return the shape of a layer with a channel multiplier in which each output has its own channel."""
    x, weights = (shape.images, shape.outputs, *shape.sizes), (shape.outputs, 1, *shape.geometry.kernel)
    return ConvolutionShape(x, weights, replace(shape.geometry, group=shape.outputs))
