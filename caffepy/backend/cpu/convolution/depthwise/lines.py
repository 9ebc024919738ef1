"""Depthwise convolutions over one axis: vectors run along the axis, which is contiguous in memory as it is.

With the channels last, images would be turned and turned back, which takes longer than the products. A channel's line
is copied with zeros around it, and split into the phases of a stride, so that each tap reads vectors that lie together;
the gradient of the image has its own phases, which are brought together at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.convolution.lanes import LINE, NUMBERS, TABLE, WORD
from caffepy.backend.cpu.convolution.lanes_tables import table_of
from caffepy.backend.cpu.convolution.phases import axis_phases
from caffepy.backend.cpu.jit.intrinsics import intrinsic
from caffepy.backend.cpu.jit.kernel import ConstantTable, Floats, Int, Words, device_function, kernel
from caffepy.backend.cpu.jit.threads import VECTOR_GRAIN
from caffepy.backend.cpu.jit.vector import VECTOR, WIDTH, Writer, ahead, table_at
from caffepy.backend.cpu.workspace import Workspace
from caffepy.backend.types import Geometry, spatial_output

VECTORS_AT_ONCE = 4
"""Vectors, or taps of the gradient of the weights, that are worked on at a time."""
MIN_LINE = 4 * WIDTH
"""Elements of a line of the output from which it pays where channels fill vectors as well."""
MAX_TAPS = 9
"""Of a convolution of a single channel: with more, tiles that share what they read among outputs are faster."""


class _LineWriter(Writer):
    """Writes sums over taps, or over a line for several taps."""

    def _loaded(self, pointer: Any, offset: Any) -> Any:
        return self.builder.load(self.vector_at(pointer, offset), align=4)

    def write_sums(self, arguments: list[Any]) -> None:
        """See `line_sums`."""
        x, taps, tap_count, weights, start, y, count, relu = arguments
        builder = self.builder
        rectifies = builder.icmp_signed("!=", relu, self.word(0))
        first = self.splat(builder.load(start, align=4))

        def products(at: Any, vectors: int) -> list[Any]:
            def over_taps(tap: Any, _: Any, sums: list[Any]) -> list[Any]:
                entry = builder.mul(tap, self.word(2))
                source = builder.add(at, self.table(taps, entry))
                index = self.table(taps, builder.add(entry, self.word(1)))
                weight = self.splat(builder.load(builder.gep(weights, [index]), align=4))
                factors = [self._loaded(x, builder.add(source, self.word(v * WIDTH))) for v in range(vectors)]
                return [self.multiply_add(f, weight, total) for f, total in zip(factors, sums, strict=True)]

            sums = self.loop(tap_count, [ir.Constant(VECTOR, [0.0] * WIDTH)] * vectors, [], over_taps)
            sums = [builder.fadd(total, first) for total in sums]
            return [builder.select(rectifies, self.rectified(total), total) for total in sums]

        def over_blocks(index: Any, _: Any, nothing: list[Any]) -> list[Any]:
            at, last = builder.mul(index, block), builder.sub(count, block)
            at = builder.select(builder.icmp_signed("<", at, last), at, last)  # those that overlap write the same
            for v, total in enumerate(products(at, VECTORS_AT_ONCE)):
                builder.store(total, self.vector_at(y, builder.add(at, self.word(v * WIDTH))), align=4)
            return nothing

        def over_vectors(index: Any, _: Any, nothing: list[Any]) -> list[Any]:
            at = builder.mul(index, self.word(WIDTH))
            left = builder.sub(count, at)
            self.store(products(at, 1)[0], self.vector_at(y, at), left, self.lanes(left))
            return nothing

        block = self.word(VECTORS_AT_ONCE * WIDTH)
        blocks = builder.sdiv(builder.add(count, self.word(VECTORS_AT_ONCE * WIDTH - 1)), block)
        vectors = builder.sdiv(builder.add(count, self.word(WIDTH - 1)), self.word(WIDTH))
        long = builder.icmp_signed(">=", count, block)
        self.loop(builder.select(long, blocks, self.word(0)), [], [], over_blocks)
        self.loop(builder.select(long, self.word(0), vectors), [], [], over_vectors)

    def write_dots(self, taps: int, arguments: list[Any]) -> None:
        """See `line_dots`."""
        x, table, dy, count, totals = arguments
        builder = self.builder
        starts = [builder.gep(x, [self.table(table, self.word(2 * tap))]) for tap in range(taps)]

        def over_line(index: Any, _: Any, sums: list[Any]) -> list[Any]:
            at = builder.mul(index, self.word(WIDTH))
            return added(at, self._loaded(dy, at), sums)

        def added(at: Any, slope: Any, sums: list[Any]) -> list[Any]:
            return [
                self.multiply_add(self._loaded(start, at), slope, total)
                for start, total in zip(starts, sums, strict=True)
            ]

        whole = builder.sdiv(count, self.word(WIDTH))
        sums = self.loop(whole, [ir.Constant(VECTOR, [0.0] * WIDTH)] * taps, [], over_line)
        at = builder.mul(whole, self.word(WIDTH))
        mask = self.lanes(builder.sub(count, at))
        sums = added(at, self.masked_load(self.vector_at(dy, at), mask), sums)
        for tap, total in enumerate(sums):
            address = self.vector_at(totals, self.word(tap * WIDTH))
            builder.store(builder.fadd(builder.load(address, align=4), total), address, align=4)


@intrinsic
def line_sums(  # noqa: PLR0913 -- a kernel
    typing_context: Any, x: Any, taps: Any, tap_count: Any, weights: Any, start: Any, y: Any, count: Any, relu: Any
) -> Any:  # fmt: skip
    """y[i] = start[0] + the sum over taps of x[offset + i] * weights[index], perhaps rectified.

    Arguments: x, taps as a table of (offset, index) and their number, weights, start, y, its elements, whether it is
    rectified. x has a vector of elements behind the last that is wanted.
    """

    def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
        _LineWriter(builder).write_sums(list(arguments))
        return context.get_dummy_value()

    return types.void(NUMBERS, TABLE, WORD, NUMBERS, NUMBERS, NUMBERS, WORD, WORD), generate


@cache
def line_dots(taps: int) -> Any:
    """For each of several taps, a vector of totals += the sum over vectors of x[offset + i] * dy[i].

    Arguments: x and taps as for `line_sums`, dy and its elements, totals.
    """

    def typed(typing_context: Any, x: Any, table: Any, dy: Any, count: Any, totals: Any) -> Any:
        def generate(context: Any, builder: Any, _: Any, arguments: Any) -> Any:
            _LineWriter(builder).write_dots(taps, list(arguments))
            return context.get_dummy_value()

        return types.void(NUMBERS, TABLE, NUMBERS, WORD, NUMBERS), generate

    return intrinsic(typed)


line_dots1, line_dots2, line_dots3, line_dots4 = (line_dots(taps) for taps in (1, 2, 3, 4))


@device_function
def _split(source: Any, width: Any, before: Any, phases: Any, target: Any, length: Any) -> None:
    """target[p * length + j] = source[j * phases + p - before], 0 where there is none."""
    for p in range(phases):
        line = ahead(target, p * length)
        first = min(length, max(0, (before - p + phases - 1) // phases))
        stop = min(length, max(first, (width + before - p + phases - 1) // phases))
        for j in range(first):
            line[j] = 0
        if phases == 1:
            own = ahead(source, first - before)
            for j in range(stop - first):
                line[first + j] = own[j]
        else:
            for j in range(first, stop):
                line[j] = source[j * phases + p - before]
        for j in range(stop, length):
            line[j] = 0


@kernel
def correlate_lines(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, weights: Floats, start: Floats, y: Floats, lines: Floats, size: Int, rows: Int,
    items: Int, channels: Int, width: Int, sources: Int, before: Int, phases: Int, length: Int, out_width: Int,
    results: Int, merged: Int, pad: Int, starts: Words, taps: Words, filters: Int, relu: Int,
) -> None:  # fmt: skip
    """Items are parts of the rows (n, channel). A channel has `sources` lines of x and `results` lines of y.

    Lines of x are split into `phases`; those of y are made of `merged` phases, `pad` elements of which lie before them.
    `starts` has where the taps of each of these begin in their table.
    """
    for item in range(begin, end):
        source = ahead(lines, item * size)
        made = ahead(source, sources * phases * length)
        for row in range(item * rows // items, (item + 1) * rows // items):
            channel = row % channels
            for q in range(sources):
                line = ahead(x, (row * sources + q) * width)
                _split(line, width, before, phases, ahead(source, q * phases * length), length)
            own = ahead(weights, channel * filters)
            for r in range(results):
                target, base = ahead(y, (row * results + r) * out_width), ahead(start, channel * results + r)
                for p in range(merged):
                    table, count = table_at(taps, 2 * starts[r * merged + p]), starts[r * merged + p + 1]
                    count -= starts[r * merged + p]
                    if merged == 1:
                        line_sums(ahead(source, pad), table, count, own, base, target, out_width, relu)
                    else:
                        first = max(0, (pad - p + merged - 1) // merged)
                        stop = max(first, (out_width + pad - p + merged - 1) // merged)
                        line_sums(ahead(source, first), table, count, own, base, made, stop - first, relu)
                        for i in range(first, stop):
                            target[i * merged + p - pad] = made[i - first]


@kernel
def correlate_line_weights(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, x: Floats, dy: Floats, dweights: Floats, lines: Floats, size: Int, items: Int, images: Int,
    channels: Int, width: Int, before: Int, phases: Int, length: Int, out_width: Int, many: Int, kernel: Int,
    taps: Words, vector: Int, accumulate: Int,
) -> None:  # fmt: skip
    """Items are parts of the channels; each has `many` lines of dy."""
    for item in range(begin, end):
        source = ahead(lines, item * size)
        totals = ahead(source, phases * length)
        for channel in range(item * channels // items, (item + 1) * channels // items):
            for i in range(many * kernel * vector):
                totals[i] = 0
            for n in range(images):
                row = n * channels + channel
                _split(ahead(x, row * width), width, before, phases, source, length)
                for j in range(many):
                    slope = ahead(dy, (row * many + j) * out_width)
                    for k in range(0, kernel, 4):
                        table, sums = table_at(taps, 2 * k), ahead(totals, (j * kernel + k) * vector)
                        if kernel - k >= 4:
                            line_dots4(source, table, slope, out_width, sums)
                        elif kernel - k == 3:
                            line_dots3(source, table, slope, out_width, sums)
                        elif kernel - k == 2:
                            line_dots2(source, table, slope, out_width, sums)
                        else:
                            line_dots1(source, table, slope, out_width, sums)
            for k in range(many * kernel):
                at = channel * many * kernel + k
                total = 0.0
                for i in range(k * vector, (k + 1) * vector):
                    total += totals[i]
                dweights[at] = dweights[at] + total if accumulate == 1 else total


@dataclass(frozen=True)
class _Plan:
    """How lines are read and made; see `correlate_lines`.

    Args:
        before: zeros before a line, elements that are left out if it is negative.
        phases: that lines are split into.
        length: of a phase.
        merged: phases that results are made of.
        pad: where results begin among their phases.
        starts: where the taps of each of these begin in their table.
        taps: (offset in the phases, index of the weight).
    """

    before: int
    phases: int
    length: int
    merged: int
    pad: int
    starts: ConstantTable
    taps: ConstantTable


def _length(reach: int) -> int:
    """Elements of a phase of which so many are read: not a multiple of a page, and a block of vectors more."""
    return -(-(reach + VECTORS_AT_ONCE * WIDTH) // LINE) * LINE + LINE


def is_lines(x_shape: tuple[int, ...], weights_shape: tuple[int, ...], geometry: Geometry) -> bool:
    """Whether a convolution over one axis is depthwise, or of one channel, and its lines are long enough."""
    g = geometry
    if len(x_shape) != 3 or weights_shape[1] != 1 or (g.group == 1 and g.kernel[0] > MAX_TAPS):
        return False
    window = g.kernel[0], g.stride[0], g.pad[0], g.dilation[0]
    least = MIN_LINE if x_shape[1] > WIDTH // 2 else WIDTH
    return min(spatial_output(x_shape[2], *window), x_shape[2] // g.stride[0]) >= least


class LinesConvolution:
    """A planned depthwise convolution over one axis.

    Args:
        threads: of the backend.
        workspace: of the backend.
        x_shape: (N, C, W).
        weights_shape: (num_output, 1, kernel).
        geometry: how the windows move.
    """

    gives_sums = False
    forward_normalised = None
    backward_normalised = None

    def __init__(
        self, threads: int, workspace: Workspace, x_shape: tuple[int, ...], weights_shape: tuple[int, ...],
        geometry: Geometry,
    ) -> None:  # fmt: skip
        self._threads, self._workspace = threads, workspace
        _, self._channels, self._width = x_shape
        self._many = weights_shape[0] // self._channels
        self._kernel, self._stride = geometry.kernel[0], geometry.stride[0]
        self._pad, self._dilation = geometry.pad[0], geometry.dilation[0]
        self._out_width = spatial_output(self._width, self._kernel, self._stride, self._pad, self._dilation)
        self._zeros = ConstantTable(np.zeros(self._channels * self._many, np.float32))
        self._forward_plan = self._plan_forward()
        self._backward_plan = self._plan_backward()

    def _plan_forward(self) -> _Plan:
        taps, stride = np.arange(self._kernel) * self._dilation, self._stride
        length = _length(self._out_width + int(taps[-1]) // stride)
        offsets = np.tile(taps % stride * length + taps // stride, self._many)
        table = np.stack([offsets, np.arange(len(offsets))], axis=-1)
        starts = np.arange(self._many + 1) * self._kernel
        return _Plan(self._pad, stride, length, 1, 0, table_of(starts), table_of(table))

    def _plan_backward(self) -> _Plan:
        window = self._kernel, self._stride, self._pad, self._dilation
        phases = {int(p.pixels[0] + self._pad) % self._stride: p for p in axis_phases(self._width, *window)}
        shifts = [shift for p in phases.values() for shift in (int(s) for s in p.shifts)]
        before = -min(shifts, default=0)
        reach = (self._width + self._pad) // self._stride + 1 + max(shifts, default=0) + before
        length = _length(max(1, reach))
        starts, table = [0], []
        merged = self._stride
        for number in range(merged):
            own = phases.get(number)
            pairs = [] if own is None else list(zip(own.shifts, own.taps, strict=True))
            table += [
                (j * length + int(shift) + before, j * self._kernel + int(tap))
                for j in range(self._many) for shift, tap in pairs
            ]  # fmt: skip
            starts.append(len(table))
        return _Plan(before, 1, length, merged, self._pad, table_of(starts), table_of(table))

    def _correlate(
        self, plan: _Plan, x: Any, weights: Any, start: Any, y: Any, lines: tuple[int, int, int, int], relu: bool
    ) -> None:
        sources, width, results, out_width = lines
        rows = x.shape[0] * self._channels
        items = min(4 * self._threads, rows) if self._threads > 1 else 1
        made = 0 if plan.merged == 1 else _length(out_width // plan.merged + 1)
        size = sources * plan.phases * plan.length + made
        work = rows * self._many * self._kernel * -(-self._out_width // WIDTH)
        correlate_lines.run(
            self._threads, items, max(1, VECTOR_GRAIN * items // max(1, work)), x, weights, start, y,
            self._workspace.take("lines", items * size), size, rows, items, self._channels, width, sources, plan.before,
            plan.phases, plan.length, out_width, results, plan.merged, plan.pad, plan.starts, plan.taps,
            self._many * self._kernel, int(relu),
        )  # fmt: skip

    def forward(self, x: Any, weights: Any, bias: Any, y: Any, relu: bool = False, sums: Any = None) -> None:
        assert sums is None, "gives no sums"
        start = self._zeros if bias is None else bias
        lines = 1, self._width, self._many, self._out_width
        self._correlate(self._forward_plan, x, weights, start, y, lines, relu)

    def backward_data(self, dy: Any, weights: Any, dx: Any) -> None:
        lines = self._many, self._out_width, 1, self._width
        self._correlate(self._backward_plan, dy, weights, self._zeros, dx, lines, False)

    def backward_weights(self, x: Any, dy: Any, dweights: Any, accumulate: bool) -> None:
        plan, images = self._forward_plan, x.shape[0]
        items = min(4 * self._threads, self._channels) if self._threads > 1 else 1
        size = plan.phases * plan.length + self._many * self._kernel * WIDTH
        work = images * self._channels * self._many * self._kernel * -(-self._out_width // WIDTH)
        correlate_line_weights.run(
            self._threads, items, max(1, VECTOR_GRAIN * items // max(1, work)), x, dy, dweights,
            self._workspace.take("lines", items * size), size, items, images, self._channels, self._width, plan.before,
            plan.phases, plan.length, self._out_width, self._many, self._kernel, plan.taps, WIDTH, int(accumulate),
        )  # fmt: skip
