"""Loops around expressions for the CPU: generates, compiles and runs them.

Arrays arrive flat in memory order. Where an argument has one value for each channel, the elements are seen
as (outer, channels, inner): for channels last and axis 1 inner is 1 and the loop over the channels is the
vectorised one.
"""

from __future__ import annotations

import ast
import inspect
import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.functions import exponential, hyperbolic_tangent, logarithm_plus_one
from caffepy.backend.cpu.jit.kernel import Entry
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import larger_of, select, smaller_of
from caffepy.backend.elementwise import Expression, Kind

LANES = 64
"""Independent partial sums of a reduction, so that it can be vectorised and its order is fixed."""
UNROLLED = 8
"""Values that are added in float32 before they are added to a float64 sum."""
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
    "floor": np.floor,  # math's makes an integer of a float
    "isfinite": math.isfinite,
}


Same = tuple[int, ...]
"""For each output the number of the input that it is, or -1."""


def _same(inputs: Sequence[Any], outputs: Sequence[Any]) -> Same:
    """Which outputs are inputs. Told so, the compiler sees that they do not overlap with a shift, and vectorises."""
    addresses = [address_of(x) if type(x) is np.ndarray else 0 for x in inputs]
    return tuple(addresses.index(at) if (at := address_of(output)) in addresses else -1 for output in outputs)


def _unpack(expression: Expression, outputs: str, count: int, same: Same = ()) -> list[str]:
    """Lines that name the arguments. An output that is an input goes by the input's name (see `_same`)."""
    lines = []
    for i, (name, kind) in enumerate(zip(expression.parameters, expression.kinds, strict=True)):
        if kind is Kind.SCALAR:
            lines.append(f"{name} = float32(as_double(_a[{i}]))")
        else:
            lines.append(f"_p{i} = floats(_a[{i}])")
    first = len(expression.parameters)
    for j in range(count):
        own = f"{outputs}(_a[{first + j}])"
        lines.append(f"_o{j} = _p{same[j]}" if same and same[j] >= 0 else f"_o{j} = {own}")
    return lines


def _loads(expression: Expression, kind: Kind, index: str) -> list[str]:
    return [
        f"{name} = _p{i}[{index}]"
        for i, (name, k) in enumerate(zip(expression.parameters, expression.kinds, strict=True))
        if k is kind
    ]


def _indent(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def _entry(expression: Expression, variant: str, text: list[str], outputs: int, extra: int) -> Entry:
    fmt = "".join("d" if kind is Kind.SCALAR else "q" for kind in expression.kinds) + "q" * (outputs + extra)
    file = inspect.getfile(expression.function)
    return Entry(f"{expression.name}_{variant}", file, text, _FUNCTIONS, fmt)


def _values(count: int) -> list[str]:
    return [f"_v{j}" for j in range(count)]


def _formula(expression: Expression, index: str, channel: str, same: Same = ()) -> list[str]:
    names = _values(expression.output_count)
    loads = _loads(expression, Kind.EACH, index) + (_loads(expression, Kind.CHANNEL, channel) if channel else [])
    # In place, `a if c else x` would become a masked store of `a`, which is slow; a factor that the compiler does not
    # know to be one prevents that.
    loads += [f"{expression.parameters[i]} *= _one" for i in sorted(set(same)) if i >= 0]
    return loads + [_without_branches(line) for line in expression.python_lines(names)]


class _Select(ast.NodeTransformer):
    """`a if c else b` as a call, which computes both: a branch around a store keeps the loop from being vectorised.

    Likewise min and max, whose Python forms drop a NaN that is not the first.
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
        *_unpack(expression, "floats", count, same),
        f"_one = float32(_a[{len(expression.parameters) + count}])",
        "for _i in range(_begin, _end):",
        *_indent(_formula(expression, "_i", "", same) + stores, 1),
    ]
    return _entry(expression, "flat", text, count, 1)


@cache
def _apply_rows(expression: Expression, same: Same, by_sample: bool) -> Entry:
    """Items are the outer positions; the channels are next to each other.

    With `by_sample`, `Channel` arguments have values of their own for each sample, which is so many positions.
    """
    count = expression.output_count
    first = len(expression.parameters) + count
    sizes = ["_channels", "_positions"] if by_sample else ["_channels"]
    stores = [f"_o{j}[_row + _c] = _v{j}" for j in range(count)]
    text = [
        *_unpack(expression, "floats", count, same),
        *(f"{name} = _a[{first + i}]" for i, name in enumerate(sizes)),
        f"_one = float32(_a[{first + len(sizes)}])",
        "for _i in range(_begin, _end):",
        "    _row = _i * _channels",
        *(["    _own = _i // _positions * _channels"] if by_sample else []),
        "    for _c in range(_channels):",
        *_indent(_formula(expression, "_row + _c", "_own + _c" if by_sample else "_c", same) + stores, 2),
    ]
    return _entry(expression, "image_rows" if by_sample else "rows", text, count, 1 + len(sizes))


@cache
def _apply_planes(expression: Expression, same: Same) -> Entry:
    """Items are the (outer, channel) pairs; each channel's elements are next to each other."""
    count = expression.output_count
    first = len(expression.parameters) + count
    stores = [f"_o{j}[_row + _k] = _v{j}" for j in range(count)]
    text = [
        *_unpack(expression, "floats", count, same),
        f"_channels = _a[{first}]",
        f"_inner = _a[{first + 1}]",
        f"_one = float32(_a[{first + 2}])",
        "for _i in range(_begin, _end):",
        "    _c = _i % _channels",
        "    _row = _i * _inner",
        *_indent(_loads(expression, Kind.CHANNEL, "_c"), 1),
        "    for _k in range(_inner):",
        *_indent(_formula(expression, "_row + _k", "", same) + stores, 2),
    ]
    return _entry(expression, "planes", text, count, 3)


def apply_flat(threads: int, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
    """outputs = expression(inputs) over arrays of one size and order in memory, and numbers."""
    _apply_flat(expression, _same(inputs, outputs)).run(threads, outputs[0].size, GRAIN, *inputs, *outputs, 1)


def apply_channels(
    threads: int, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Any], extents: tuple[int, int, int],
    samples: int = 1,
) -> None:  # fmt: skip
    """The same where `Channel` arguments have extents[1] values for elements of (outer, channels, inner) = extents.

    With several samples they have so many for each of them, next to each other; inner is 1 then.
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


def _unrolled(expression: Expression, index: str, step: str, target: str, channel: str) -> list[str]:
    """Add UNROLLED values, `step` elements apart, to the sums at `target`: pairwise in float32, then in float64."""
    count = expression.output_count
    lines = []
    for i in range(UNROLLED):
        lines += _formula(expression, f"{index} + {i} * {step}", channel)
        lines += [f"_s{j}_{i} = _v{j}" for j in range(count)]
    for j in range(count):
        terms = [f"_s{j}_{i}" for i in range(UNROLLED)]
        while len(terms) > 1:
            terms = [f"({x} + {y})" for x, y in zip(terms[::2], terms[1::2], strict=True)]
        lines.append(f"_o{j}[{target}] += {terms[0]}")
    return lines


def _single(expression: Expression, index: str, target: str, channel: str) -> list[str]:
    adds = [f"_o{j}[{target}] += _v{j}" for j in range(expression.output_count)]
    return _formula(expression, index, channel) + adds


def _lanes(expression: Expression, start: str, stop: str, target: str, base: str) -> list[str]:
    """Sums over [start, stop) into LANES partial sums."""
    step = LANES * UNROLLED
    return [
        f"_whole = {start} + (({stop}) - ({start})) // {step} * {step}",
        f"for _row in range({start}, _whole, {step}):",
        f"    for _k in range({LANES}):",
        *_indent(_unrolled(expression, f"{base}_row + _k", str(LANES), f"{target} + _k", ""), 2),
        f"for _row in range(_whole, {stop}, {LANES}):",
        f"    for _k in range(min({LANES}, {stop} - _row)):",
        *_indent(_single(expression, f"{base}_row + _k", f"{target} + _k", ""), 2),
    ]


@cache
def _reduce_flat(expression: Expression) -> Entry:
    """Items are blocks of elements; each block has LANES partial sums for each output."""
    count = expression.output_count
    first = len(expression.parameters) + count
    text = [
        *_unpack(expression, "doubles", count),
        f"_size = _a[{first}]",
        f"_block = _a[{first + 1}]",
        "for _i in range(_begin, _end):",
        "    _start = _i * _block",
        "    _stop = min(_size, _start + _block)",
        *_indent(_lanes(expression, "_start", "_stop", f"_i * {LANES}", ""), 1),
    ]
    return _entry(expression, "sum", text, count, 2)


@cache
def _reduce_rows(expression: Expression) -> Entry:
    """Items are blocks of outer positions; each block has one partial sum for each channel and output."""
    count = expression.output_count
    first = len(expression.parameters) + count
    text = [
        *_unpack(expression, "doubles", count),
        f"_channels = _a[{first}]",
        f"_outer = _a[{first + 1}]",
        f"_block = _a[{first + 2}]",
        "for _i in range(_begin, _end):",
        "    _sum = _i * _channels",
        "    _start = _i * _block",
        "    _stop = min(_outer, _start + _block)",
        f"    _whole = _start + (_stop - _start) // {UNROLLED} * {UNROLLED}",
        f"    for _r in range(_start, _whole, {UNROLLED}):",
        "        _row = _r * _channels",
        "        for _c in range(_channels):",
        *_indent(_unrolled(expression, "_row + _c", "_channels", "_sum + _c", "_c"), 3),
        "    for _r in range(_whole, _stop):",
        "        _row = _r * _channels",
        "        for _c in range(_channels):",
        *_indent(_single(expression, "_row + _c", "_sum + _c", "_c"), 3),
    ]
    return _entry(expression, "row_sums", text, count, 3)


@cache
def _reduce_planes(expression: Expression) -> Entry:
    """Items are channels; each has LANES partial sums for each output."""
    count = expression.output_count
    first = len(expression.parameters) + count
    text = [
        *_unpack(expression, "doubles", count),
        f"_channels = _a[{first}]",
        f"_outer = _a[{first + 1}]",
        f"_inner = _a[{first + 2}]",
        "for _c in range(_begin, _end):",
        *_indent(_loads(expression, Kind.CHANNEL, "_c"), 1),
        "    for _r in range(_outer):",
        "        _plane = (_r * _channels + _c) * _inner",
        *_indent(_lanes(expression, "0", "_inner", f"_c * {LANES}", "_plane + "), 2),
    ]
    return _entry(expression, "plane_sums", text, count, 3)


def _blocks(items: int, size: int) -> tuple[int, int]:
    """Items in a block and number of blocks: a function of the shape alone, so that sums do not depend on threads."""
    block = max(-(-GRAIN // max(size, 1)), -(-items // 256))
    return block, -(-items // block)


def _sample_blocks(pixels: int, samples: int, channels: int) -> tuple[int, int]:
    """The same for blocks that do not reach from one sample into the next: so many equal parts of its pixels."""
    wanted = max(1, min(pixels * channels // GRAIN, 256 // samples))
    parts = max(part for part in range(1, wanted + 1) if pixels % part == 0)
    return pixels // parts, samples * parts


def reduce_flat(threads: int, expression: Expression, inputs: Sequence[Any], size: int) -> list[Any]:
    """Sums of expression(inputs) over arrays of `size` elements: one float64 for each output."""
    block, blocks = _blocks(size, 1)
    block = -(-block // LANES) * LANES
    partial = [np.zeros((blocks, LANES)) for _ in range(expression.output_count)]
    _reduce_flat(expression).run(threads, blocks, 2, *inputs, *partial, size, block)
    return [p.sum() for p in partial]


def reduce_channels(
    threads: int, expression: Expression, inputs: Sequence[Any], extents: tuple[int, int, int], samples: int = 1
) -> list[Any]:
    """Sums of expression(inputs) over outer and inner of extents = (outer, channels, inner): float64 (channels,).

    With several samples, whose inner is 1, each has sums of its own: (samples * channels,).
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
