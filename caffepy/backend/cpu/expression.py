"""Formulas on the CPU, elementwise and reduced: generates, compiles and runs their loops.

Arrays are flat in memory order. With Channel arguments the elements are seen as (outer, channels, inner). For channels
last and axis 1, inner is 1 and the loop over channels is vectorised. Reductions take the same views.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Entry, Int, Ints, kernel, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import (
    exponential,
    hyperbolic_tangent,
    larger_of,
    logarithm_plus_one,
    round_down,
    select,
    smaller_of,
)
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.interface import ElementwisePrimitives, ReductionPrimitives
from caffepy.backend.types import CHANNELS_LAST, Array, host_address, memory_order

_FUNCTIONS = {
    "exp": exponential,
    "log": math.log,
    "log1p": logarithm_plus_one,
    "sqrt": math.sqrt,
    "tanh": hyperbolic_tangent,
    "fabs": math.fabs,
    "select": select,
    "larger_of": larger_of,
    "smaller_of": smaller_of,
    "floor": round_down,
    "isfinite": math.isfinite,
}


Same = tuple[int, ...]
"""For each output, the index of the aliased input, or -1."""


def _same(inputs: Sequence[Any], outputs: Sequence[Any]) -> Same:
    """Return which outputs alias inputs, so that the compiler can rule out shifted overlap and vectorise."""
    # Two names for one address may overlap in any way, as far as LLVM knows. One name for both says that they are the
    # same element by element.
    addresses = [host_address(x) if type(x) is np.ndarray else 0 for x in inputs]
    return tuple(addresses.index(at) if (at := host_address(output)) in addresses else -1 for output in outputs)


def unpacked(expression: Expression, outputs: str, sizes: Sequence[str], same: Same = ()) -> list[str]:
    """Return lines that unpack the arguments. An aliasing output uses the input's name (see `_same`).

    Args:
        expression: the formula.
        outputs: the function that makes an array of an output's address.
        sizes: variables of the numbers that follow the outputs.
        same: of each output, the input that it aliases.
    """
    lines = []
    for i, (name, kind) in enumerate(zip(expression.parameters, expression.kinds, strict=True)):
        if kind is Kind.SCALAR:
            lines.append(f"{name} = float32(as_double(_a[{i}]))")
        else:
            lines.append(f"_p{i} = floats(_a[{i}])")
    first = len(expression.parameters)
    for j in range(expression.output_count):
        own = f"{outputs}(_a[{first + j}])"
        lines.append(f"_o{j} = _p{same[j]}" if same and same[j] >= 0 else f"_o{j} = {own}")
    first += expression.output_count
    return lines + [f"{name} = _a[{first + i}]" for i, name in enumerate(sizes)]


def loads_of(expression: Expression, kind: Kind, index: str) -> list[str]:
    return [
        f"{name} = _p{i}[{index}]"
        for i, (name, k) in enumerate(zip(expression.parameters, expression.kinds, strict=True))
        if k is kind
    ]


def indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def entry_of(expression: Expression, variant: str, text: list[str], outputs: int, extra: int) -> Entry:
    fmt = "".join("d" if kind is Kind.SCALAR else "q" for kind in expression.kinds) + "q" * (outputs + extra)
    file = inspect.getfile(expression.function)
    return Entry(f"{expression.name}_{variant}", file, text, _FUNCTIONS, fmt)


def _values(count: int) -> list[str]:
    return [f"_v{j}" for j in range(count)]


def formula_lines(expression: Expression, index: str, channel: str, same: Same = ()) -> list[str]:
    names = _values(expression.output_count)
    loads = loads_of(expression, Kind.EACH, index) + (loads_of(expression, Kind.CHANNEL, channel) if channel else [])
    # In place, `a if c else x` would become a slow masked store of `a`. A factor of one that the compiler cannot fold
    # prevents that.
    loads += [f"{expression.parameters[i]} *= _one" for i in sorted(set(same)) if i >= 0]
    return loads + [_without_branches(line) for line in expression.python_lines(names)]


class _Select(ast.NodeTransformer):
    """Rewrites `a if c else b` as a call that evaluates both, because a branch around a store prevents vectorisation.

    Also rewrites min and max, whose Python versions drop a NaN that is not the first argument.
    """

    def visit_IfExp(self, node: ast.IfExp) -> ast.expr:
        self.generic_visit(node)
        return ast.Call(ast.Name("select"), [node.test, node.body, node.orelse], [])

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self.generic_visit(node)
        assert isinstance(node.func, ast.Name)
        name = {"max": "larger_of", "min": "smaller_of"}.get(node.func.id, node.func.id)
        return ast.Call(ast.Name(name), node.args, [])


def _without_branches(line: str) -> str:
    return ast.unparse(ast.fix_missing_locations(_Select().visit(ast.parse(line))))


@cache
def _apply_flat(expression: Expression, same: Same) -> Entry:
    count = expression.output_count
    stores = [f"_o{j}[_i] = _v{j}" for j in range(count)]
    text = [
        *unpacked(expression, "floats", [], same),
        f"_one = float32(_a[{len(expression.parameters) + count}])",
        "for _i in range(_begin, _end):",
        *indented(formula_lines(expression, "_i", "", same) + stores, 1),
    ]
    return entry_of(expression, "flat", text, count, 1)


@cache
def _apply_rows(expression: Expression, same: Same, by_sample: bool) -> Entry:
    """Items are the outer positions; channels are contiguous."""
    # With `by_sample`, `Channel` arguments have separate values for each sample of that many positions.
    count = expression.output_count
    sizes = ["_channels", "_positions"] if by_sample else ["_channels"]
    stores = [f"_o{j}[_row + _c] = _v{j}" for j in range(count)]
    text = [
        *unpacked(expression, "floats", sizes, same),
        f"_one = float32(_a[{len(expression.parameters) + count + len(sizes)}])",
        "for _i in range(_begin, _end):",
        "    _row = _i * _channels",
        *(["    _own = _i // _positions * _channels"] if by_sample else []),
        "    for _c in range(_channels):",
        *indented(formula_lines(expression, "_row + _c", "_own + _c" if by_sample else "_c", same) + stores, 2),
    ]
    return entry_of(expression, "image_rows" if by_sample else "rows", text, count, 1 + len(sizes))


@cache
def _apply_planes(expression: Expression, same: Same) -> Entry:
    """Items are the (outer, channel) pairs; each channel's elements are contiguous."""
    count = expression.output_count
    stores = [f"_o{j}[_row + _k] = _v{j}" for j in range(count)]
    text = [
        *unpacked(expression, "floats", ["_channels", "_inner"], same),
        f"_one = float32(_a[{len(expression.parameters) + count + 2}])",
        "for _i in range(_begin, _end):",
        "    _c = _i % _channels",
        "    _row = _i * _inner",
        *indented(loads_of(expression, Kind.CHANNEL, "_c"), 1),
        "    for _k in range(_inner):",
        *indented(formula_lines(expression, "_row + _k", "", same) + stores, 2),
    ]
    return entry_of(expression, "planes", text, count, 3)


def apply_flat(threads: int, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """outputs = expression(inputs) for numbers and arrays of one size and memory order."""
    _apply_flat(expression, _same(inputs, outputs)).run(threads, outputs[0].size, GRAIN, *inputs, *outputs, 1)


def apply_channels(
    threads: int,
    expression: Expression,
    inputs: Sequence[Any],
    outputs: Sequence[Any],
    extents: tuple[int, int, int],
    samples: int = 1,
) -> None:
    """As `apply_flat`, with `Channel` arguments of extents[1] values over elements (outer, channels, inner) = extents.

    With several samples, each has its own contiguous values; inner is then 1.
    """
    outer, channels, inner = extents
    if 0 in extents:
        return
    if inner == 1:
        rows = _apply_rows(expression, _same(inputs, outputs), samples > 1)
        sizes = (channels, outer // samples) if samples > 1 else (channels,)
        rows.run(threads, outer, GRAIN // channels, *inputs, *outputs, *sizes, 1)
    else:
        _apply_planes(expression, _same(inputs, outputs)).run(
            threads, outer * channels, GRAIN // inner, *inputs, *outputs, channels, inner, 1
        )


def extents_of(shape: tuple[int, ...], axis: int, axes: int) -> tuple[int, int, int] | None:
    """Return (outer, channels, inner) of the axes [axis, axis + axes) in memory order; None if not adjacent."""
    last = len(shape) in CHANNELS_LAST
    if axes == 0 or (axis == 0 and axes in (1, len(shape)) if last else axes not in CHANNELS_LAST):
        return (math.prod(shape[:axis]), math.prod(shape[axis : axis + axes]), math.prod(shape[axis + axes :]))
    if last and (axis, axes) in ((1, 1), (0, 2)):
        return shape[0] * math.prod(shape[2:]), shape[1], 1
    return None


def samples_of(shape: tuple[int, ...], axis: int, axes: int) -> int:
    """Return the number of samples with separate channel values, whose pixels lie between these axes in memory."""
    return shape[0] if len(shape) in CHANNELS_LAST and (axis, axes) == (0, 2) else 1


class CpuElementwise(ElementwisePrimitives, CpuMemory):
    """`ElementwisePrimitives` of the CPU."""

    def apply(self, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Array], axis: int = 1) -> None:
        shape = outputs[0].shape
        arguments: list[Any] = list(inputs)
        extents: tuple[int, int, int] | None = None
        samples = 1
        channels = [i for i, kind in enumerate(expression.kinds) if kind is Kind.CHANNEL]
        if channels:
            channel = arguments[channels[0]]
            extents = extents_of(shape, axis, channel.ndim)
            samples = samples_of(shape, axis, channel.ndim)
            for i in channels:
                assert arguments[i].shape == shape[axis : axis + arguments[i].ndim], (arguments[i].shape, shape, axis)
                if extents is None:
                    arguments[i] = self._spread(arguments[i], shape, axis)
        for i, (argument, kind) in enumerate(zip(arguments, expression.kinds, strict=True)):
            if kind is Kind.EACH:
                assert argument.shape == shape, (expression.name, argument.shape, shape)
            if kind is Kind.SCALAR:
                arguments[i] = float(argument)
            else:
                self._check_dense(argument)
        self._check_dense(*outputs)
        if channels and extents is None:
            expression = _all_each(expression)
        if extents is None:
            apply_flat(self.threads, expression, arguments, outputs)
        else:
            apply_channels(self.threads, expression, arguments, outputs, extents, samples)

    def _spread(self, channel: Array, shape: tuple[int, ...], axis: int) -> Array:
        """Return a `Channel` argument broadcast to the full shape."""
        note_host_work()
        full = self.zeros(shape)
        full[...] = channel.reshape(channel.shape + (1,) * (len(shape) - axis - channel.ndim))
        return full


_EACH: dict[Expression, Expression] = {}


def _all_each(expression: Expression) -> Expression:
    """Return the formula with its `Channel` arguments changed to `Each`."""
    # One copy per formula, because compiled kernels are kept by the formula object: a new copy would be compiled again.
    if expression not in _EACH:
        each = copy.copy(expression)
        each.kinds = [Kind.EACH if kind is Kind.CHANNEL else kind for kind in each.kinds]
        _EACH[expression] = each
    return _EACH[expression]


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
        # A tree: its additions do not wait for each other, and its rounding errors grow with its depth rather than its
        # length.
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
    # Equal parts: the blocks' sums can then be seen as (samples, parts, channels).
    parts = max(part for part in range(1, wanted + 1) if pixels % part == 0)
    return pixels // parts, samples * parts


def reduce_flat(threads: int, expression: Expression, inputs: Sequence[Any], size: int) -> list[Any]:
    """Return the sums of expression(inputs) over arrays of `size` elements: one float64 per output."""
    block, blocks = _blocks(size, 1)
    # Whole steps of LANES in all blocks but the last, so few elements go through the slow remainder.
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
