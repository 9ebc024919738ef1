"""Batch normalisation, ReLU gradient and local response normalisation on the CPU.

Channel arrays are flat and seen as rows of `period` elements, a multiple of both the channels and the vector width, so
that each column belongs to one channel. The array may end within a row, and its last vector may be partial. Arrays with
non-contiguous channels, such as those of three axes, use the reference implementation. The kernels' inner steps are
emitted as LLVM IR. Each kernel has variants (with a residual, a mask, several gradients), compiled at first use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import types

from caffepy.backend.cpu.jit.kernel import Doubles, Entry, Float, Floats, Int, device_function, kernel, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import ahead, emitted
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import NormalisationPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, BatchNormState, LrnWindow

LANES = 16
"""Elements per step; LLVM splits them into two vectors of eight without AVX-512."""

_VECTOR = ir.VectorType(ir.FloatType(), LANES)
_BITS = ir.VectorType(ir.IntType(1), LANES)
_INDICES = ir.VectorType(ir.IntType(32), LANES)
_WORD = ir.IntType(64)
# An intrinsic's name contains its pointer's type. LLVM 15 made pointers opaque.
_POINTER = "p0" if llvmlite.binding.llvm_version_info[0] >= 15 else f"p0v{LANES}f32"
# Permits a multiplication and an addition to become one instruction, but no other order of additions.
_CONTRACT = ("contract",)
_ZERO = ir.Constant(_VECTOR, [0.0] * LANES)


class Step:
    """Emits instructions on vectors at offsets of arrays.

    Args:
        builder: the function's IR builder.
        count: LLVM value, number of valid lanes; None: all.
    """

    def __init__(self, builder: Any, count: Any | None) -> None:
        self.builder = builder
        self._mask = None if count is None else self._first(count)

    def _first(self, count: Any) -> Any:
        # Inserting a number and shuffling is how LLVM IR writes a broadcast; the back end makes one instruction of it.
        narrow = self.builder.trunc(count, ir.IntType(32))
        empty = ir.Constant(_INDICES, ir.Undefined)
        one = self.builder.insert_element(empty, narrow, ir.Constant(ir.IntType(32), 0))
        counts = self.builder.shuffle_vector(one, empty, ir.Constant(_INDICES, [0] * LANES))
        return self.builder.icmp_signed("<", ir.Constant(_INDICES, list(range(LANES))), counts)

    def _at(self, pointer: Any, offset: Any, kind: Any = _VECTOR) -> Any:
        return self.builder.bitcast(self.builder.gep(pointer, [offset]), kind.as_pointer())

    def row(self, pointer: Any, offset: Any) -> Any:
        """Load the valid lanes of a row; other lanes are 0."""
        if self._mask is None:
            return self.whole(pointer, offset)
        # A masked load does not touch the invalid lanes, which may lie beyond the array's memory.
        kind = ir.FunctionType(_VECTOR, [_VECTOR.as_pointer(), ir.IntType(32), _BITS, _VECTOR])
        arguments = [self._at(pointer, offset), ir.Constant(ir.IntType(32), 4), self._mask, _ZERO]
        return self.builder.call(self._intrinsic("load", kind), arguments)

    def whole(self, pointer: Any, offset: Any) -> Any:
        """Load a whole vector."""
        return self.builder.load(self._at(pointer, offset), align=4)

    def store(self, value: Any, pointer: Any, offset: Any) -> None:
        """Store the valid lanes."""
        address = self._at(pointer, offset)
        if self._mask is None:
            self.builder.store(value, address, align=4)
            return
        kind = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), ir.IntType(32), _BITS])
        self.builder.call(self._intrinsic("store", kind), [value, address, ir.Constant(ir.IntType(32), 4), self._mask])

    def _intrinsic(self, name: str, kind: Any) -> Any:
        module = self.builder.module
        name = f"llvm.masked.{name}.v{LANES}f32.{_POINTER}"
        return module.globals.get(name) or ir.Function(module, kind, name)

    def keep(self, value: Any, pointer: Any, offset: Any) -> None:
        """Store a whole vector."""
        self.builder.store(value, self._at(pointer, offset), align=4)

    def bits(self, pointer: Any, offset: Any) -> Any:
        """Load one bit per lane from a mask, at an offset in bits."""
        word = self.builder.load(self._bits_at(pointer, offset), align=1)
        return self.builder.bitcast(word, _BITS)

    def store_bits(self, value: Any, pointer: Any, offset: Any) -> None:
        """Store one bit per lane, 0 for invalid lanes."""
        value = value if self._mask is None else self.builder.and_(value, self._mask)
        self.builder.store(self.builder.bitcast(value, ir.IntType(LANES)), self._bits_at(pointer, offset), align=1)

    def _bits_at(self, pointer: Any, offset: Any) -> Any:
        # Vectors begin at multiples of LANES, so their bits begin at a whole byte.
        bytes_ = self.builder.lshr(offset, ir.Constant(_WORD, 3))
        return self._at(pointer, bytes_, ir.IntType(LANES))

    def positive(self, value: Any) -> Any:
        return self.builder.fcmp_ordered(">", value, _ZERO)

    def rectified(self, value: Any) -> Any:
        """max(value, 0); NaN stays NaN."""
        return self.builder.select(self.builder.fcmp_ordered("<", value, _ZERO), _ZERO, value)

    def where(self, condition: Any, value: Any) -> Any:
        """Return the value, or 0 where the condition is false."""
        return self.builder.select(condition, value, _ZERO)

    def there(self, value: Any) -> Any:
        """Return the value, with 0 in invalid lanes."""
        return value if self._mask is None else self.where(self._mask, value)

    def plus(self, a: Any, b: Any) -> Any:
        return self.builder.fadd(a, b, flags=_CONTRACT)

    def minus(self, a: Any, b: Any) -> Any:
        return self.builder.fsub(a, b, flags=_CONTRACT)

    def times(self, a: Any, b: Any) -> Any:
        return self.builder.fmul(a, b, flags=_CONTRACT)

    def after(self, at: Any, rows: int, period: Any) -> Any:
        """Return the position `rows` rows further."""
        return self.builder.add(at, self.builder.mul(period, ir.Constant(_WORD, rows)))


Body = Callable[..., None]
"""A step's body: (step, position in the array, position in the row, period, pointer, pointer, ...)."""


def step_function(body: Body, pointers: Sequence[types.Type], partial: bool) -> Any:
    """Return a step that kernels call: (position in the array, position in the row, lanes, period, pointer, ...)."""

    def write(builder: Any, at: Any, column: Any, count: Any, period: Any, *rest: Any) -> None:
        body(Step(builder, count if partial else None), at, column, period, *rest)

    return emitted(["w"] * 4 + [*pointers], write)


Gate = Literal["none", "bits", "normal", "output"]
"""Source of a ReLU gradient's state: none, a mask, x before the ReLU, or y after it."""

ROWS = 4
"""Rows per step of a sum, which loads and stores its accumulators once per step."""
CHUNK = 32
"""Rows that are added in float32 before they are added to a float64 sum."""
SAMPLE = 8
"""Rows whose mean is the shift of the squares, so that a large mean does not cancel their digits."""
MAX_GRADIENTS = 4
"""Maximum gradients per pass."""

_POINTERS = {
    "floats": types.CPointer(types.float32),
    "doubles": types.CPointer(types.float64),
    "octets": types.CPointer(types.uint8),
}


def _entry(
    name: str, kinds: Sequence[str], numbers: Sequence[str], text: Sequence[str], scope: dict[str, Any]
) -> Entry:
    """Return a kernel of pointers `_p0`, `_p1`, ... followed by numbers."""
    lines = [f"_p{i} = {kind}(_a[{i}])" for i, kind in enumerate(kinds)]
    lines += [f"{number} = _a[{len(kinds) + i}]" for i, number in enumerate(numbers)]
    return Entry(name, __file__, [*lines, *text], scope, "q" * (len(kinds) + len(numbers)))


# -- element by element -----------------------------------------------------------------------------------------


def _each(name: str, kinds: Sequence[str], body: Body) -> Entry:
    """Return a kernel whose items are rows; the last row may be shorter."""
    pointers = [_POINTERS[kind] for kind in kinds]
    arguments = ", ".join(f"_p{i}" for i in range(len(kinds)))
    scope = {f"{name}_{part}": step_function(body, pointers, part == "part") for part in ("whole", "part")}
    text = [
        "for _i in range(_begin, _end):",
        "    _at = _i * _period",
        "    _count = min(_period, _size - _at)",
        f"    _whole = _count // {LANES} * {LANES}",
        f"    for _c in range(0, _whole, {LANES}):",
        f"        {name}_whole(_at + _c, _c, {LANES}, _period, {arguments})",
        "    if _whole < _count:",
        f"        {name}_part(_at + _whole, _whole, _count - _whole, _period, {arguments})",
    ]
    return _entry(name, kinds, ("_period", "_size"), text, scope)


def _normal(step: Step, x: Any, column: Any, mean: Any, factor: Any, bias: Any) -> Any:
    """Return (x - mean) * factor + bias."""
    centred = step.minus(x, step.whole(mean, column))
    return step.plus(step.times(centred, step.whole(factor, column)), step.whole(bias, column))


@cache
def forward_kernel(residual: bool, relu: bool, mask: bool) -> Entry:
    """y = (x - mean) * factor + bias (+ other), optionally rectified, and the mask.

    Parameters: x, mean, factor, bias, other, y, mask.
    """

    def body(
        step: Step,
        at: Any,
        column: Any,
        period: Any,
        x: Any,
        mean: Any,
        factor: Any,
        bias: Any,
        other: Any,
        y: Any,
        bits: Any,
    ) -> None:
        value = _normal(step, step.row(x, at), column, mean, factor, bias)
        if residual:
            value = step.plus(value, step.row(other, at))
        if mask:
            step.store_bits(step.positive(value), bits, at)
        step.store(step.rectified(value) if relu else value, y, at)

    return _each(f"normalise_{residual:d}{relu:d}{mask:d}", ["floats"] * 6 + ["octets"], body)


@cache
def gradient_kernel(relu: bool) -> Entry:
    """dx = (g - first - (x - mean) * second) * factor, with g gated if `relu`.

    Parameters: x, dy, mean, factor, bias, first, second, dx.
    """

    def body(
        step: Step,
        at: Any,
        column: Any,
        period: Any,
        x: Any,
        dy: Any,
        mean: Any,
        factor: Any,
        bias: Any,
        first: Any,
        second: Any,
        dx: Any,
    ) -> None:
        value, g = step.row(x, at), step.row(dy, at)
        # The sign is computed again: x is loaded anyway, and y or a mask would be one more array to read.
        if relu:
            g = step.where(step.positive(_normal(step, value, column, mean, factor, bias)), g)
        centred = step.minus(value, step.whole(mean, column))
        rest = step.minus(g, step.whole(first, column))
        rest = step.minus(rest, step.times(centred, step.whole(second, column)))
        step.store(step.times(rest, step.whole(factor, column)), dx, at)

    return _each(f"normalise_gradient_{relu:d}", ["floats"] * 8, body)


# -- sums -------------------------------------------------------------------------------------------------------


def _row_loops(name: str, arguments: str) -> list[str]:
    """Return lines that sum the rows [_row, _chunk)."""
    # Rows outside, columns inside: x is read once, in memory order, and the sums of a row stay in the cache.
    lines = [f"_many = _row + (_chunk - _row) // {ROWS} * {ROWS}"]
    for variant, start, stop, step in (("many", "_row", "_many", ROWS), ("one", "_many", "_chunk", 1)):
        lines += [
            f"for _r in range({start}, {stop}, {step}):",
            f"    for _c in range(0, _period, {LANES}):",
            f"        {name}_{variant}(_r * _period + _c, _c, {LANES}, _period, {arguments})",
        ]
    return lines


def _last_row(name: str, arguments: str) -> list[str]:
    """Return lines that sum the partial last row."""
    return [
        "_at = _rows * _period",
        "_count = _size - _at",
        f"for _c in range(0, _count - {LANES - 1}, {LANES}):",
        f"    {name}_one(_at + _c, _c, {LANES}, _period, {arguments})",
        f"_whole = _count // {LANES} * {LANES}",
        "if _whole < _count:",
        f"    {name}_part(_at + _whole, _whole, _count - _whole, _period, {arguments})",
    ]


def _indent(lines: Sequence[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _sums(name: str, kinds: Sequence[str], sums: int, make_body: Any, first: Sequence[str] = ()) -> Entry:
    """Return a kernel whose items are blocks of rows; each computes `sums` sums per column."""
    pointers = [_POINTERS[kind] for kind in kinds if kind != "doubles"]
    arguments = ", ".join(["_sum", *(f"_p{i}" for i in range(2, len(kinds)))])
    arguments = arguments.replace("_p2", "_shift") if first else arguments
    scope: dict[str, Any] = {"ahead": ahead}
    for variant, rows in (("many", ROWS), ("one", 1), ("part", 1)):
        scope[f"{name}_{variant}"] = step_function(make_body(rows), pointers, variant == "part")
    # Float32 sums have twice the lanes of float64 ones. They lose few digits over a chunk's rows; the chunks' sums are
    # added in float64.
    flush = [f"for _k in range(_base, _base + {sums} * _period):", "    _p1[_k] += _p0[_k]", "    _p0[_k] = 0"]
    text = [
        "for _i in range(_begin, _end):",
        f"    _base = _i * {sums} * _period",
        "    _sum = ahead(_p0, _base)",
        f"    for _k in range(_base, _base + {sums} * _period):",
        "        _p0[_k] = 0",
        "        _p1[_k] = 0",
        "    _row = _i * _block",
        "    _stop = min(_rows, _row + _block)",
        *_indent(first, 1),
        "    while _row < _stop:",
        f"        _chunk = min(_stop, _row + {CHUNK})",
        *_indent([*_row_loops(name, arguments), *flush], 2),
        "        _row = _chunk",
        "    if _stop == _rows:",
        *_indent([*_last_row(name, arguments), *flush], 2),
    ]
    return _entry(name, kinds, ("_period", "_size", "_rows", "_block"), text, scope)


def _add(step: Step, values: Sequence[Any], sums: Any, column: Any, index: int, period: Any) -> None:
    """Add values, one per row, to sum number `index` of a column."""
    # The rows are added one after another, so that steps of ROWS rows and of one row give the same bits.
    at = step.after(column, index, period)
    total = step.whole(sums, at)
    for value in values:
        total = step.plus(total, value)
    step.keep(total, sums, at)


_SAMPLE = [
    "_shift = ahead(_p2, _i * _period)",
    "for _c in range(_period):",
    "    _shift[_c] = 0",
    f"_sampled = min({SAMPLE}, _stop - _row)",
    "for _r in range(_row, _row + _sampled):",
    "    for _c in range(_period):",
    "        _shift[_c] += _p3[_r * _period + _c] / float32(_sampled)",
    # The block has no whole row: it is shifted by the partial row, for the columns that this has.
    "if _sampled == 0:",
    "    for _c in range(_size - _row * _period):",
    "        _shift[_c] = _p3[_row * _period + _c]",
]


@cache
def measure_kernel() -> Entry:
    """Sums of x - shift and of its square, and each block's and column's shift. Parameters: sums, totals, shift, x."""

    def make_body(rows: int) -> Body:
        def body(step: Step, at: Any, column: Any, period: Any, sums: Any, shift: Any, x: Any) -> None:
            around = step.whole(shift, column)
            values = [step.row(x, step.after(at, row, period)) for row in range(rows)]
            # An invalid lane is loaded as 0, and 0 - shift would count as an element.
            values = [step.there(step.minus(value, around)) for value in values]
            _add(step, values, sums, column, 0, period)
            _add(step, [step.times(value, value) for value in values], sums, column, 1, period)

        return body

    return _sums("normalise_measure", ["floats", "doubles", "floats", "floats"], 2, make_body, _SAMPLE)


@cache
def gradient_sums_kernel(sources: int, gate: Gate, total: bool, weighted: bool) -> Entry:
    """Sums of g, and if `weighted` of g * (x - mean); `total` receives g.

    Parameters: sums, totals, x (y if the gate is "output"), mask, MAX_GRADIENTS gradients, total, mean, factor, bias.
    """

    def gated(step: Step, at: Any, column: Any, g: Any, value: Any, bits: Any, normal: Sequence[Any]) -> Any:
        if gate == "bits":
            return step.where(step.bits(bits, at), g)
        if gate == "normal":
            return step.where(step.positive(_normal(step, value, column, *normal)), g)
        return step.where(step.positive(value), g) if gate == "output" else g

    def make_body(rows: int) -> Body:
        def body(step: Step, at: Any, column: Any, period: Any, sums: Any, x: Any, bits: Any, *rest: Any) -> None:
            dys, (out, *normal) = rest[:sources], rest[MAX_GRADIENTS:]
            gs, products = [], []
            for row in range(rows):
                here = step.after(at, row, period)
                g = step.row(dys[0], here)
                for dy in dys[1:]:
                    g = step.plus(g, step.row(dy, here))
                value = step.row(x, here) if weighted or gate == "output" else None
                g = gated(step, here, column, g, value, bits, normal)
                if total:
                    step.store(g, out, here)
                gs.append(g)
                if weighted:
                    products.append(step.times(g, step.minus(value, step.whole(normal[0], column))))
            _add(step, gs, sums, column, 0, period)
            if weighted:
                _add(step, products, sums, column, 1, period)

        return body

    name = f"gradient_sums_{sources}_{gate}_{total:d}{weighted:d}"
    kinds = ["floats", "doubles", "floats", "octets", *["floats"] * (MAX_GRADIENTS + 4)]
    return _sums(name, kinds, 1 + weighted, make_body)


CHANNELS = 64
"""Channels per item when joining blocks: a few cache lines."""


@kernel
def join_statistics(
    begin: Int,
    end: Int,
    totals: Doubles,
    shift: Floats,
    blocks: Int,
    period: Int,
    size: Int,
    block: Int,
    channels: Int,
    centre: Doubles,
    mean: Floats,
    variance: Floats,
) -> None:
    """Mean and variance of each channel, from sums of x - shift and of its square. Items are `CHANNELS` channels.

    totals: (blocks, 2, period), shift: (blocks, period). The last block includes the partial last row. Squares are
    around each block's mean, then corrected to the mean of all blocks (Chan et al., 1979).
    """
    rows, elements = size // period, size // channels
    for item in range(begin, end):
        first, stop = item * CHANNELS, min(channels, (item + 1) * CHANNELS)
        for c in range(first, stop):
            centre[c] = 0
            centre[channels + c] = 0
        # The first pass over the blocks yields the mean, the second the squares around it. Blocks are added in their
        # order, by one thread per channel, so the result does not depend on the thread count.
        for step in range(2):
            for b in range(blocks):
                inside = min(block, rows - b * block)
                left = size - rows * period if b == blocks - 1 else 0
                for at in range(0, period, channels):
                    whole, more = 2 * b * period + at, (2 * b + 1) * period + at
                    for c in range(first, stop):
                        # Columns up to the end of the partial last row have one element more than the others.
                        count = inside + (1.0 if at + c < left else 0.0)
                        own = totals[whole + c] / max(count, 1.0)
                        around = shift[b * period + at + c] + own
                        if step == 0:
                            centre[c] += count * around
                        else:
                            away = around - centre[c]
                            centre[channels + c] += count * away * away + totals[more + c] - totals[whole + c] * own
            if step == 0:
                for c in range(first, stop):
                    centre[c] /= elements
        for c in range(first, stop):
            mean[c] = centre[c]
            variance[c] = centre[channels + c] / elements


@kernel
def join_gradients(
    begin: Int,
    end: Int,
    totals: Doubles,
    blocks: Int,
    period: Int,
    channels: Int,
    joined: Doubles,
    inverse: Floats,
    of_scale: Floats,
    of_bias: Floats,
) -> None:
    """Sums of g * normal and of g for each channel. Items are `CHANNELS` channels.

    totals: sums of g and of g * (x - mean), (blocks, 2, period).
    """
    for item in range(begin, end):
        first, stop = item * CHANNELS, min(channels, (item + 1) * CHANNELS)
        for c in range(first, stop):
            joined[c] = 0
            joined[channels + c] = 0
        for b in range(blocks):
            for at in range(0, period, channels):
                whole, more = 2 * b * period + at, (2 * b + 1) * period + at
                for c in range(first, stop):
                    joined[c] += totals[whole + c]
                    joined[channels + c] += totals[more + c]
        for c in range(first, stop):
            of_scale[c] = joined[channels + c] * inverse[c]
            of_bias[c] = joined[c]


@kernel
def spread_forward(
    begin: Int,
    end: Int,
    mean: Floats,
    inverse: Floats,
    scale: Floats,
    bias: Floats,
    channels: Int,
    period: Int,
    columns: Floats,
) -> None:
    """Mean, factor and bias of each column of a row, (3, period). Items are repetitions of the channels."""
    for item in range(begin, end):
        at = item * channels
        for c in range(channels):
            columns[at + c] = mean[c]
            columns[period + at + c] = inverse[c] * scale[c]
            columns[2 * period + at + c] = bias[c]


@kernel
def spread_backward(
    begin: Int,
    end: Int,
    inverse: Floats,
    of_scale: Floats,
    of_bias: Floats,
    per_element: Float,
    channels: Int,
    period: Int,
    columns: Floats,
) -> None:
    """The means of g, and of g * normal / deviation, (2, period). Items are repetitions of the channels."""
    for item in range(begin, end):
        at = item * channels
        for c in range(channels):
            columns[at + c] = of_bias[c] * per_element
            columns[period + at + c] = of_scale[c] * inverse[c] * per_element


MIN_PERIOD = 256
"""Minimum elements of a row, if possible: enough for a full-speed loop."""
BLOCK = 65536
"""Minimum elements of a block of a sum."""
MAX_BLOCKS = 64
"""Maximum blocks of a sum."""


@dataclass(frozen=True)
class Rows:
    """A channel array as rows, whose length is a multiple of the channels and the vector width; the last may be
    partial.

    Args:
        channels: contiguous elements of a pixel.
        size: elements of the array.
        period: elements of a row.
    """

    channels: int
    size: int
    period: int

    @property
    def whole(self) -> int:
        """Number of complete rows."""
        return self.size // self.period

    @property
    def block(self) -> int:
        """Rows per block of a sum; depends only on the shape, so sums do not depend on the thread count."""
        return max(1, -(-BLOCK // self.period), -(-self.whole // MAX_BLOCKS))

    @property
    def blocks(self) -> int:
        return max(1, -(-self.whole // self.block))

    @property
    def grain(self) -> int:
        """Minimum rows for a second thread."""
        return -(-GRAIN // self.period)

    @property
    def joining_grain(self) -> int:
        """Minimum items of `join_statistics` and `join_gradients` for a second thread."""
        return max(1, GRAIN * self.channels // (self.blocks * self.period * CHANNELS))


def rows_of(array: Array) -> Rows | None:
    """Return the row layout of a matrix (N, C) or of images; None if kernels do not support the array."""
    if not (array.ndim == 2 or array.ndim in CHANNELS_LAST) or array.size == 0:
        return None
    channels = array.shape[1]
    pixels = LANES // math.gcd(channels, LANES)
    period = channels * pixels
    return Rows(channels, array.size, period * -(-MIN_PERIOD // period))


LRN_GRAIN = 4096
"""Minimum elements for a second thread."""


@device_function
def _power(scale: Any, beta: Any) -> Any:
    """scale^-beta; the common beta 0.75 by two square roots."""
    # `pow` is a call per element; square roots are vector instructions.
    if beta == 0.75:
        root = math.sqrt(scale)
        return 1 / (root * math.sqrt(root))
    return scale**-beta


@kernel
def lrn_pixels(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    scale: Floats,
    channels: Int,
    before: Int,
    after: Int,
    factor: Float,
    beta: Float,
    k: Float,
) -> None:
    """Items are pixels."""
    for item in range(begin, end):
        row = item * channels
        for c in range(channels):
            scale[row + c] = 0
        # Offsets outside, channels inside: the inner loop is contiguous and has no bounds to test, so it is vectorised.
        for offset in range(-before, after + 1):
            for c in range(max(0, -offset), min(channels, channels - offset)):
                value = x[row + c + offset]
                scale[row + c] += value * value
        for c in range(channels):
            total = k + factor * scale[row + c]
            scale[row + c] = total
            y[row + c] = x[row + c] * _power(total, beta)


@kernel
def lrn_pixels_gradient(
    begin: Int,
    end: Int,
    x: Floats,
    y: Floats,
    scale: Floats,
    dy: Floats,
    dx: Floats,
    channels: Int,
    before: Int,
    after: Int,
    factor: Float,
    beta: Float,
) -> None:
    """Items are pixels. The window of channels whose windows contain a channel is the mirrored window."""
    for item in range(begin, end):
        row = item * channels
        for c in range(channels):
            dx[row + c] = 0
        for offset in range(-after, before + 1):
            for c in range(max(0, -offset), min(channels, channels - offset)):
                other = row + c + offset
                dx[row + c] += dy[other] * y[other] / scale[other]
        for c in range(channels):
            at = row + c
            dx[at] = dy[at] * _power(scale[at], beta) - factor * x[at] * dx[at]


def _lrn_grain(x: Any) -> int:
    return max(1, LRN_GRAIN // max(1, int(x.shape[1])))


def _lrn_sides(size: int) -> tuple[int, int]:
    before = (size - 1) // 2
    return before, size - 1 - before


class CpuNormalisation(NormalisationPrimitives, CpuMemory):
    """`NormalisationPrimitives` of the CPU."""

    def batch_norm_measure(self, x: Array, n: BatchNormState) -> None:
        """Each block shifts its squares by the mean of its first rows."""
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_measure(x, n)
            return
        channels, take = rows.channels, self._workspace.take
        sums, totals = self._sum_arrays(rows, 2)
        shift, variance = take("shift", rows.blocks * rows.period), take("variance", channels)[:channels]
        self._run_sums(measure_kernel(), rows, sums, totals, shift, x)
        join_statistics.run(
            self.threads,
            -(-channels // CHANNELS),
            rows.joining_grain,
            totals,
            shift,
            rows.blocks,
            rows.period,
            rows.size,
            rows.block,
            channels,
            take("joined", 4 * channels),
            n.mean,
            variance,
        )
        self.batch_norm_finish(variance, rows.size // channels, n)

    def _sum_arrays(self, rows: Rows, sums: int) -> tuple[Array, Array]:
        """Return memory for block sums, (blocks, sums, period) of float32 and of float64; kernels zero it."""
        size = rows.blocks * sums * rows.period
        return self._workspace.take("sums", size), self._workspace.take("totals", 2 * size)

    def _run_sums(self, kernel: Any, rows: Rows, *arrays: Any) -> None:
        numbers = (rows.period, rows.size, rows.whole, rows.block)
        kernel.run(self.threads, rows.blocks, 1, *arrays, *numbers)

    def batch_norm_forward(
        self,
        x: Array,
        n: BatchNormState,
        y: Array,
        residual: Array | None = None,
        relu: bool = False,
        mask: Array | None = None,
    ) -> None:
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_forward(x, n, y, residual, relu, mask)
            return
        per_column = self._columns(rows, n)
        # A kernel needs an address for every parameter; the variant without a residual or a mask does not use it.
        other, bits = (y if array is None else array for array in (residual, mask))
        kernel = forward_kernel(residual is not None, relu, mask is not None)
        self._run_each(kernel, rows, x, *per_column, other, y, bits)

    def _columns(self, rows: Rows, n: BatchNormState) -> Sequence[Array]:
        """Return mean, factor and bias per column of a row."""
        period, count = rows.period, rows.period // rows.channels
        columns = self._workspace.take("columns", 3 * period)
        spread_forward.run(1, count, 1, n.mean, n.inverse, n.scale, n.bias, rows.channels, period, columns)
        return columns, columns[period:], columns[2 * period :]

    def _run_each(self, kernel: Any, rows: Rows, *arrays: Any) -> None:
        kernel.run(self.threads, -(-rows.size // rows.period), rows.grain, *arrays, rows.period, rows.size)

    def batch_norm_backward_sums(
        self,
        x: Array,
        dys: Sequence[Array],
        n: BatchNormState,
        sums: Sequence[Array],
        relu: bool = False,
        mask: Array | None = None,
        total: Array | None = None,
    ) -> None:
        rows = rows_of(x)
        if rows is None or len(dys) > MAX_GRADIENTS:
            super().batch_norm_backward_sums(x, dys, n, sums, relu, mask, total)
            return
        assert total is not None or len(dys) == 1, "several gradients need `total`"
        gate: Gate = "none" if not relu else "normal" if mask is None else "bits"
        # The total is the gradient itself: writing it would copy an array onto itself.
        if len(dys) == 1 and total is dys[0] and not relu:
            total = None
        totals = self._gradient_sums(rows, gate, x, mask, dys, total, self._columns(rows, n))
        channels = rows.channels
        join_gradients.run(
            self.threads,
            -(-channels // CHANNELS),
            rows.joining_grain,
            totals,
            rows.blocks,
            rows.period,
            channels,
            self._workspace.take("joined", 4 * channels),
            n.inverse,
            *sums,
        )

    def _gradient_sums(
        self,
        rows: Rows,
        gate: Gate,
        x: Array,
        mask: Array | None,
        dys: Sequence[Array],
        total: Array | None,
        per_column: Sequence[Any],
    ) -> Array:
        """Return the block sums as float64 (blocks, 1 or 2, period), in float32 workspace memory."""
        weighted = gate != "output"
        # Unused parameters get some address; the kernel's variant reads `len(dys)` gradients.
        sources = [*dys, *[dys[0]] * (MAX_GRADIENTS - len(dys))]
        kernel = gradient_sums_kernel(len(dys), gate, total is not None, weighted)
        partial, totals = self._sum_arrays(rows, 1 + weighted)
        bits, out = (x if array is None else array for array in (mask, total))
        self._run_sums(kernel, rows, partial, totals, x, bits, *sources, out, *per_column)
        return totals

    def batch_norm_backward_data(
        self, x: Array, dy: Array, n: BatchNormState, sums: Sequence[Array], dx: Array, relu: bool = False
    ) -> None:
        rows = rows_of(x)
        if rows is None:
            super().batch_norm_backward_data(x, dy, n, sums, dx, relu)
            return
        period, channels = rows.period, rows.channels
        columns = self._workspace.take("gradient columns", 2 * period)
        spread_backward.run(1, period // channels, 1, n.inverse, *sums, channels / rows.size, channels, period, columns)
        per_column = (*self._columns(rows, n), columns, columns[period:])
        self._run_each(gradient_kernel(relu), rows, x, dy, *per_column, dx)

    def relu_backward(self, y: Array, dy: Array, dx: Array, dbias: Array | None, accumulate: bool) -> None:
        rows = rows_of(y)
        if rows is None or dbias is None:
            super().relu_backward(y, dy, dx, dbias, accumulate)
            return
        note_host_work()  # NumPy adds the blocks' sums
        sums = self._gradient_sums(rows, "output", y, None, [dy], dx, (y, y, y))
        totals = sums[: 2 * rows.blocks * rows.period].view(np.float64)
        total = totals.reshape(-1, rows.channels).sum(axis=0)
        dbias[...] = dbias + total if accumulate else total

    def lrn_across_forward(self, x: Array, y: Array, scale: Array | None, window: LrnWindow) -> None:
        self._check_dense(x, y, scale)
        channels, w = x.shape[1], window
        pixels = x.size // max(1, channels)
        lrn_pixels.run(
            self.threads,
            pixels,
            _lrn_grain(x),
            x,
            y,
            scale,
            channels,
            *_lrn_sides(w.size),
            w.alpha / w.size,
            w.beta,
            w.k,
        )

    def lrn_across_backward(
        self, x: Array, y: Array | None, scale: Array | None, dy: Array, dx: Array, window: LrnWindow
    ) -> None:
        self._check_dense(x, y, scale, dy, dx)
        channels, w = x.shape[1], window
        pixels = x.size // max(1, channels)
        factor = 2 * w.alpha * w.beta / w.size
        lrn_pixels_gradient.run(
            self.threads, pixels, _lrn_grain(x), x, y, scale, dy, dx, channels, *_lrn_sides(w.size), factor, w.beta
        )
