"""Reductions of formulas on the CPU: generates, compiles and runs their loops.

Array views are those of `expression.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cpu.expression import entry_of, extents_of, formula_lines, indented, loads_of, samples_of, unpacked
from caffepy.backend.cpu.jit.kernel import Entry, Int, Ints, kernel, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.interface import ReductionPrimitives
from caffepy.backend.types import Array, memory_order

LANES = 64
"""Independent partial sums of a reduction, for vectorisation in a fixed order."""
UNROLLED = 8
"""Values that are added in float32 before they are added to a float64 sum."""


def _unrolled(expression: Expression, index: str, step: str, target: str, channel: str) -> list[str]:
    """Add UNROLLED values, `step` elements apart, to the sums at `target`: pairwise in float32, then in float64."""
    count = expression.output_count
    lines = []
    for i in range(UNROLLED):
        lines += formula_lines(expression, f"{index} + {i} * {step}", channel)
        lines += [f"_s{j}_{i} = _v{j}" for j in range(count)]
    for j in range(count):
        terms = [f"_s{j}_{i}" for i in range(UNROLLED)]
        while len(terms) > 1:
            terms = [f"({x} + {y})" for x, y in zip(terms[::2], terms[1::2], strict=True)]
        lines.append(f"_o{j}[{target}] += {terms[0]}")
    return lines


def _single(expression: Expression, index: str, target: str, channel: str) -> list[str]:
    adds = [f"_o{j}[{target}] += _v{j}" for j in range(expression.output_count)]
    return formula_lines(expression, index, channel) + adds


def _lanes(expression: Expression, start: str, stop: str, target: str, base: str) -> list[str]:
    """Sum [start, stop) into LANES partial sums."""
    step = LANES * UNROLLED
    return [
        f"_whole = {start} + (({stop}) - ({start})) // {step} * {step}",
        f"for _row in range({start}, _whole, {step}):",
        f"    for _k in range({LANES}):",
        *indented(_unrolled(expression, f"{base}_row + _k", str(LANES), f"{target} + _k", ""), 2),
        f"for _row in range(_whole, {stop}, {LANES}):",
        f"    for _k in range(min({LANES}, {stop} - _row)):",
        *indented(_single(expression, f"{base}_row + _k", f"{target} + _k", ""), 2),
    ]


@cache
def _reduce_flat(expression: Expression) -> Entry:
    """Items are blocks of elements; each block has LANES partial sums per output."""
    text = [
        *unpacked(expression, "doubles", ["_size", "_block"]),
        "for _i in range(_begin, _end):",
        "    _start = _i * _block",
        "    _stop = min(_size, _start + _block)",
        *indented(_lanes(expression, "_start", "_stop", f"_i * {LANES}", ""), 1),
    ]
    return entry_of(expression, "sum", text, expression.output_count, 2)


@cache
def _reduce_rows(expression: Expression) -> Entry:
    """Items are blocks of outer positions; each block has one partial sum per channel and output."""
    text = [
        *unpacked(expression, "doubles", ["_channels", "_outer", "_block"]),
        "for _i in range(_begin, _end):",
        "    _sum = _i * _channels",
        "    _start = _i * _block",
        "    _stop = min(_outer, _start + _block)",
        f"    _whole = _start + (_stop - _start) // {UNROLLED} * {UNROLLED}",
        f"    for _r in range(_start, _whole, {UNROLLED}):",
        "        _row = _r * _channels",
        "        for _c in range(_channels):",
        *indented(_unrolled(expression, "_row + _c", "_channels", "_sum + _c", "_c"), 3),
        "    for _r in range(_whole, _stop):",
        "        _row = _r * _channels",
        "        for _c in range(_channels):",
        *indented(_single(expression, "_row + _c", "_sum + _c", "_c"), 3),
    ]
    return entry_of(expression, "row_sums", text, expression.output_count, 3)


@cache
def _reduce_planes(expression: Expression) -> Entry:
    """Items are channels; each has LANES partial sums per output."""
    text = [
        *unpacked(expression, "doubles", ["_channels", "_outer", "_inner"]),
        "for _c in range(_begin, _end):",
        *indented(loads_of(expression, Kind.CHANNEL, "_c"), 1),
        "    for _r in range(_outer):",
        "        _plane = (_r * _channels + _c) * _inner",
        *indented(_lanes(expression, "0", "_inner", f"_c * {LANES}", "_plane + "), 2),
    ]
    return entry_of(expression, "plane_sums", text, expression.output_count, 3)


def _blocks(items: int, size: int) -> tuple[int, int]:
    """Return the items per block and the blocks; they depend only on the shape, so sums do not depend on threads."""
    block = max(-(-GRAIN // max(size, 1)), -(-items // 256))
    return block, -(-items // block)


def _sample_blocks(pixels: int, samples: int, channels: int) -> tuple[int, int]:
    """As `_blocks`, with blocks that do not cross samples: equal parts of a sample's pixels."""
    wanted = max(1, min(pixels * channels // GRAIN, 256 // samples))
    parts = max(part for part in range(1, wanted + 1) if pixels % part == 0)
    return pixels // parts, samples * parts


def reduce_flat(threads: int, expression: Expression, inputs: Sequence[Any], size: int) -> list[Any]:
    """Return the sums of expression(inputs) over arrays of `size` elements: one float64 per output."""
    block, blocks = _blocks(size, 1)
    block = -(-block // LANES) * LANES
    partial = [np.zeros((blocks, LANES)) for _ in range(expression.output_count)]
    _reduce_flat(expression).run(threads, blocks, 2, *inputs, *partial, size, block)
    return [p.sum() for p in partial]


def reduce_channels(
    threads: int, expression: Expression, inputs: Sequence[Any], extents: tuple[int, int, int], samples: int = 1
) -> list[Any]:
    """Return the sums of expression(inputs) over outer and inner of extents = (outer, channels, inner): float64
    (channels,).

    With several samples, where inner is 1, return sums per sample: (samples * channels,).
    """
    outer, channels, inner = extents
    if 0 in extents:
        return [np.zeros(samples * channels) for _ in range(expression.output_count)]
    if inner == 1:
        block, blocks = (
            _blocks(outer, channels) if samples == 1 else _sample_blocks(outer // samples, samples, channels)
        )
        partial = [np.zeros((blocks, channels)) for _ in range(expression.output_count)]
        _reduce_rows(expression).run(
            threads, blocks, 1 if samples > 1 else 2, *inputs, *partial, channels, outer, block
        )
        return [p.reshape(samples, -1, channels).sum(axis=1).reshape(-1) for p in partial]
    partial = [np.zeros((channels, LANES)) for _ in range(expression.output_count)]
    grain = GRAIN // max(outer * inner, 1)
    _reduce_planes(expression).run(threads, channels, grain, *inputs, *partial, channels, outer, inner)
    return [p.sum(axis=1) for p in partial]


@kernel
def _count_not_finite(begin: Int, end: Int, bits: Ints, block: Int, size: Int, counts: Ints) -> None:
    """Items are blocks of elements. A float32 with all exponent bits set is infinite or NaN."""
    for item in range(begin, end):
        count = 0
        for i in range(item * block, min(size, (item + 1) * block)):
            count += 1 if (bits[i] & 0x7F800000) == 0x7F800000 else 0
        counts[item] = count


class CpuReduction(ReductionPrimitives, CpuMemory):
    """`ReductionPrimitives` of the CPU."""

    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Any],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        note_host_work()  # NumPy adds the blocks' sums
        kinds = expression.kinds
        inputs = [float(a) if k is Kind.SCALAR else a for a, k in zip(inputs, kinds, strict=True)]
        shape = next(a.shape for a, k in zip(inputs, kinds, strict=True) if k is Kind.EACH)
        kept = outputs[0].shape
        assert all(output.shape == kept for output in outputs)
        channels = [a for a, k in zip(inputs, expression.kinds, strict=True) if k is Kind.CHANNEL]
        axes = channels[0].ndim if channels else len(kept)
        extents = extents_of(shape, axis, axes)
        if extents is None:
            sums = self._reduce_general(expression, inputs, shape, axis, kept)
        else:
            self._check_dense(*(a for a, k in zip(inputs, expression.kinds, strict=True) if k is not Kind.SCALAR))
            if axes == 0:
                sums = reduce_flat(self.threads, expression, inputs, math.prod(shape))
            else:
                samples = samples_of(shape, axis, axes)
                if samples > 1 and channels:  # the sums' kernel supports one value per channel
                    sums = self._reduce_general(expression, inputs, shape, axis, kept)
                else:
                    sums = reduce_channels(self.threads, expression, inputs, extents, samples)
            if kept == ():
                sums = [s.sum() for s in sums]
        with np.errstate(over="ignore"):  # a sum beyond float32 becomes infinite, as on a GPU
            for total, output in zip(sums, outputs, strict=True):
                if accumulate:
                    total = total + self.flat(output).reshape(np.shape(total))
                self.flat(output)[...] = total

    def _reduce_general(
        self, expression: Expression, inputs: Sequence[Any], shape: tuple[int, ...], axis: int, kept: tuple[int, ...]
    ) -> list[Any]:
        """Sum over axes that are not adjacent in memory: apply the formula to a temporary array, then sum."""
        values = [self.zeros(shape) for _ in range(expression.output_count)]
        self.apply(expression, inputs, values, axis)
        summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + len(kept))
        return [self._in_memory_order(v.sum(axis=summed, dtype=np.float64)) for v in values]

    def _in_memory_order(self, array: Array) -> Array:
        return np.ascontiguousarray(memory_order(array)).reshape(-1)

    def all_finite(self, array: Array) -> bool:
        note_host_work()
        if not self._dense(array):
            return bool(np.isfinite(array).all())
        block = 1 << 16
        blocks = -(-array.size // block)
        counts = np.zeros(blocks, np.int32)
        _count_not_finite.run(self.threads, blocks, 2, array, block, array.size, counts)
        return not counts.any()
