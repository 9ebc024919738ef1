"""Formulas on the CPU, elementwise and reduced: generates, compiles and runs their loops.

Arrays are flat in memory order. With Channel arguments the elements are seen as rows: of the channels where these are
contiguous, else of the elements that share a value. Each argument has a value per row, per element of a row, or both.
Reductions take the same views, and the vectorised loop is over the elements of a row.
"""

from __future__ import annotations

import ast
import copy
import inspect
import math
from collections.abc import Callable, Sequence
from functools import cache, lru_cache
from typing import Any, NamedTuple

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
from caffepy.backend.period import Period, find_period
from caffepy.backend.types import Array, host_address, memory_order

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


def numbers_of(expression: Expression, kind: Kind) -> list[int]:
    """Return the positions of the arguments of that kind."""
    return [i for i, k in enumerate(expression.kinds) if k is kind]


class Access(NamedTuple):
    """How a Channel argument is indexed: by the row's number, by the element's place in the row, by both or by none.

    Args:
        by_row: use the row's number.
        divides: divide it by the neighbouring rows that share a value.
        wraps: take that modulo the number of values.
        by_place: each element of a row has its own value.
    """

    by_row: bool = False
    divides: bool = False
    wraps: bool = False
    by_place: bool = False


class Rows(NamedTuple):
    """An array in memory as rows of `length` elements, for Channel arguments.

    Args:
        number: of rows.
        length: elements of a row.
        accesses: of the Channel arguments.
        sizes: numbers for the variables of `size_names`.
    """

    number: int
    length: int
    accesses: tuple[Access, ...]
    sizes: tuple[int, ...]


def find_rows(size: int, periods: Sequence[Period | None], length: int) -> Rows | None:
    """Return an array as rows of `length` elements; None if a Channel argument with one of the periods does not fit."""
    accesses, sizes = [], [length]
    for p in periods:
        if p is None:
            return None
        if p.size == 1:
            shared, values, by_place = 1, 1, False
        elif p.inner == 1 and p.size == length:
            shared, values, by_place = p.outer, p.images, True
        elif p.inner % length == 0:
            shared, values, by_place = p.inner // length, p.size, False
        else:
            return None
        by_row, wraps = values > 1, shared * values * length < size
        accesses.append(Access(by_row, by_row and shared > 1, by_row and wraps, by_place))
        sizes += [shared, values]
    return Rows(size // length, length, tuple(accesses), tuple(sizes))


@lru_cache(maxsize=4096)
def rows_of(shape: tuple[int, ...], channels: tuple[tuple[int, ...], ...], axis: int) -> Rows | None:
    """Return an array as rows for Channel arguments of these shapes; None if no rows fit all of them."""
    size, periods = math.prod(shape), [find_period(shape, small, axis) for small in channels]
    several = [p for p in periods if p is not None and p.size > 1]
    length = next((p.size for p in several if p.inner == 1), min((p.inner for p in several), default=size))
    return find_rows(size, periods, length)


def size_names(expression: Expression) -> list[str]:
    """Return the variables of a row's length, and of the shared rows and the values of each Channel argument."""
    return ["_length"] + [f"_{what}{i}" for i in numbers_of(expression, Kind.CHANNEL) for what in ("rows", "size")]


def row_lines(expression: Expression, accesses: Sequence[Access], row: str, name: str = "") -> list[str]:
    """Return lines before the loop over the elements of a row: its values, or where they begin.

    Args:
        expression: the formula.
        accesses: of its Channel arguments.
        row: the row's number.
        name: suffix of the row's variables.
    """
    lines = []
    for i, access in zip(numbers_of(expression, Kind.CHANNEL), accesses, strict=True):
        at = row if access.by_row else "0"
        at += f" // _rows{i}" if access.divides else ""
        at += f" % _size{i}" if access.wraps else ""
        lines.append(f"_c{i}{name} = {at} * _length" if access.by_place else f"_c{i}{name} = _p{i}[{at}]")
    return lines


def element_lines(expression: Expression, accesses: Sequence[Access], place: str = "_c", name: str = "") -> list[str]:
    """Return lines that load the Channel arguments of an element by its place, after `row_lines` of that name."""
    lines = []
    for i, access in zip(numbers_of(expression, Kind.CHANNEL), accesses, strict=True):
        value = f"_p{i}[_c{i}{name} + {place}]" if access.by_place else f"_c{i}{name}"
        lines.append(f"{expression.parameters[i]} = {value}")
    return lines


def indented(lines: list[str], depth: int) -> list[str]:
    return ["    " * depth + line for line in lines]


def entry_of(expression: Expression, variant: str, text: list[str], outputs: int, extra: int) -> Entry:
    fmt = "".join("d" if kind is Kind.SCALAR else "q" for kind in expression.kinds) + "q" * (outputs + extra)
    file = inspect.getfile(expression.function)
    return Entry(f"{expression.name}_{variant}", file, text, _FUNCTIONS, fmt)


def _values(count: int) -> list[str]:
    return [f"_v{j}" for j in range(count)]


def formula_lines(expression: Expression, index: str, channels: Sequence[str] = (), same: Same = ()) -> list[str]:
    """Return lines that compute the formula at `index`; `channels` load its Channel arguments."""
    names = _values(expression.output_count)
    loads = [f"{expression.parameters[i]} = _p{i}[{index}]" for i in numbers_of(expression, Kind.EACH)]
    # In place, `a if c else x` would become a slow masked store of `a`. A factor of one that the compiler cannot fold
    # prevents that.
    ones = [f"{expression.parameters[i]} *= _one" for i in sorted(set(same)) if i >= 0]
    return [*loads, *channels, *ones, *map(_without_branches, expression.python_lines(names))]


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
    """Items are elements; Channel arguments have one value."""
    count = expression.output_count
    accesses = [Access()] * len(numbers_of(expression, Kind.CHANNEL))
    stores = [f"_o{j}[_i] = _v{j}" for j in range(count)]
    text = [
        *unpacked(expression, "floats", [], same),
        f"_one = float32(_a[{len(expression.parameters) + count}])",
        *row_lines(expression, accesses, ""),
        "for _i in range(_begin, _end):",
        *indented(formula_lines(expression, "_i", element_lines(expression, accesses), same) + stores, 1),
    ]
    return entry_of(expression, "flat", text, count, 1)


@cache
def _apply_rows(expression: Expression, same: Same, accesses: tuple[Access, ...]) -> Entry:
    """Items are rows."""
    count, sizes = expression.output_count, size_names(expression)
    stores = [f"_o{j}[_row + _c] = _v{j}" for j in range(count)]
    text = [
        *unpacked(expression, "floats", sizes, same),
        f"_one = float32(_a[{len(expression.parameters) + count + len(sizes)}])",
        "for _i in range(_begin, _end):",
        "    _row = _i * _length",
        *indented(row_lines(expression, accesses, "_i"), 1),
        "    for _c in range(_length):",
        *indented(formula_lines(expression, "_row + _c", element_lines(expression, accesses), same) + stores, 2),
    ]
    return entry_of(expression, "rows", text, count, 1 + len(sizes))


class CpuElementwise(ElementwisePrimitives, CpuMemory):
    """`ElementwisePrimitives` of the CPU."""

    def apply(self, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Array], axis: int = 1) -> None:
        shape = outputs[0].shape
        arguments: list[Any] = list(inputs)
        channels = numbers_of(expression, Kind.CHANNEL)
        for i in numbers_of(expression, Kind.EACH):
            assert arguments[i].shape == shape, (expression.name, arguments[i].shape, shape)
        for i in numbers_of(expression, Kind.SCALAR):
            arguments[i] = float(arguments[i])
        self._check_dense(*(a for a in arguments if type(a) is not float), *outputs)
        if outputs[0].size == 0:
            return
        if any(arguments[i].size != 1 for i in channels):
            rows = rows_of(shape, tuple(arguments[i].shape for i in channels), axis)
            if rows is not None:
                entry = _apply_rows(expression, _same(arguments, outputs), rows.accesses)
                entry.run(self.threads, rows.number, GRAIN // rows.length, *arguments, *outputs, *rows.sizes, 1)
                return
            for i in channels:
                arguments[i] = self._spread(arguments[i], shape, axis)
            expression = _all_each(expression)
        entry = _apply_flat(expression, _same(arguments, outputs))
        entry.run(self.threads, outputs[0].size, GRAIN, *arguments, *outputs, 1)

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


def _unrolled(
    expression: Expression, index: str, step: str, target: str, channels: Callable[[int], Sequence[str]]
) -> list[str]:
    """Add UNROLLED values, `step` elements apart, to the sums at `target`: pairwise in float32, then in float64.

    `channels` returns the lines that load the Channel arguments of a value.
    """
    count = expression.output_count
    lines = []
    for i in range(UNROLLED):
        lines += formula_lines(expression, f"{index} + {i} * {step}", channels(i))
        lines += [f"_s{j}_{i} = _v{j}" for j in range(count)]
    for j in range(count):
        terms = [f"_s{j}_{i}" for i in range(UNROLLED)]
        # A tree: its additions do not wait for each other, and its rounding errors grow with its depth rather than its
        # length.
        while len(terms) > 1:
            terms = [f"({x} + {y})" for x, y in zip(terms[::2], terms[1::2], strict=True)]
        lines.append(f"_o{j}[{target}] += {terms[0]}")
    return lines


def _single(expression: Expression, index: str, target: str, channels: Sequence[str]) -> list[str]:
    adds = [f"_o{j}[{target}] += _v{j}" for j in range(expression.output_count)]
    return formula_lines(expression, index, channels) + adds


def _lanes(
    expression: Expression, accesses: Sequence[Access], start: str, stop: str, target: str, base: str
) -> list[str]:
    """Sum [start, stop) of a row into LANES partial sums, after `row_lines`."""
    step = LANES * UNROLLED

    def channels(i: int) -> list[str]:
        return element_lines(expression, accesses, f"(_row + _k + {i * LANES})")

    return [
        f"_whole = {start} + (({stop}) - ({start})) // {step} * {step}",
        f"for _row in range({start}, _whole, {step}):",
        f"    for _k in range({LANES}):",
        *indented(_unrolled(expression, f"{base}_row + _k", str(LANES), f"{target} + _k", channels), 2),
        f"for _row in range(_whole, {stop}, {LANES}):",
        f"    for _k in range(min({LANES}, {stop} - _row)):",
        *indented(_single(expression, f"{base}_row + _k", f"{target} + _k", channels(0)), 2),
    ]


@cache
def _reduce_flat(expression: Expression) -> Entry:
    """Items are blocks of elements; each block has LANES partial sums per output. Channel arguments have one value."""
    accesses = [Access()] * len(numbers_of(expression, Kind.CHANNEL))
    text = [
        *unpacked(expression, "doubles", ["_size", "_block"]),
        *row_lines(expression, accesses, ""),
        "for _i in range(_begin, _end):",
        "    _start = _i * _block",
        "    _stop = min(_size, _start + _block)",
        *indented(_lanes(expression, accesses, "_start", "_stop", f"_i * {LANES}", ""), 1),
    ]
    return entry_of(expression, "sum", text, expression.output_count, 2)


@cache
def _reduce_columns(expression: Expression, accesses: tuple[Access, ...]) -> Entry:
    """Items are blocks of rows; each block has one partial sum per column and output."""
    sizes = size_names(expression)
    each = [line for i in range(UNROLLED) for line in row_lines(expression, accesses, f"(_r + {i})", f"_{i}")]

    def channels(i: int) -> list[str]:
        return element_lines(expression, accesses, "_c", f"_{i}")

    text = [
        *unpacked(expression, "doubles", [*sizes, "_outer", "_block"]),
        "for _i in range(_begin, _end):",
        "    _sum = _i * _length",
        "    _start = _i * _block",
        "    _stop = min(_outer, _start + _block)",
        f"    _whole = _start + (_stop - _start) // {UNROLLED} * {UNROLLED}",
        f"    for _r in range(_start, _whole, {UNROLLED}):",
        "        _row = _r * _length",
        *indented(each, 2),
        "        for _c in range(_length):",
        *indented(_unrolled(expression, "_row + _c", "_length", "_sum + _c", channels), 3),
        "    for _r in range(_whole, _stop):",
        "        _row = _r * _length",
        *indented(row_lines(expression, accesses, "_r", "_0"), 2),
        "        for _c in range(_length):",
        *indented(_single(expression, "_row + _c", "_sum + _c", channels(0)), 3),
    ]
    return entry_of(expression, "column_sums", text, expression.output_count, 2 + len(sizes))


@cache
def _reduce_rows(expression: Expression, accesses: tuple[Access, ...]) -> Entry:
    """Items are channels, of which each has several rows; each has LANES partial sums per output."""
    sizes = size_names(expression)
    text = [
        *unpacked(expression, "doubles", [*sizes, "_channels", "_outer"]),
        "for _i in range(_begin, _end):",
        "    for _o in range(_outer):",
        "        _at = _o * _channels + _i",
        "        _start = _at * _length",
        *indented(row_lines(expression, accesses, "_at"), 2),
        *indented(_lanes(expression, accesses, "0", "_length", f"_i * {LANES}", "_start + "), 2),
    ]
    return entry_of(expression, "row_sums", text, expression.output_count, 2 + len(sizes))


def _blocks(items: int, size: int) -> tuple[int, int]:
    """Return the items per block and the blocks; they depend only on the shape, so sums do not depend on threads."""
    block = max(-(-GRAIN // max(size, 1)), -(-items // 256))
    return block, -(-items // block)


def _image_blocks(target: Period) -> tuple[int, int]:
    """As `_blocks`, with blocks that do not cross images: equal parts of an image's pixels."""
    pixels, images = target.outer, target.images
    wanted = max(1, min(pixels * target.size // GRAIN, 256 // images))
    # Equal parts: the blocks' sums can then be seen as (images, parts, channels).
    parts = max(part for part in range(1, wanted + 1) if pixels % part == 0)
    return pixels // parts, images * parts


def reduce_flat(threads: int, expression: Expression, inputs: Sequence[Any], size: int) -> list[Any]:
    """Return the sums of expression(inputs) over arrays of `size` elements: one float64 per output."""
    block, blocks = _blocks(size, 1)
    # Whole steps of LANES in all blocks but the last, so few elements go through the slow remainder.
    block = -(-block // LANES) * LANES
    partial = [np.zeros((blocks, LANES)) for _ in range(expression.output_count)]
    _reduce_flat(expression).run(threads, blocks, 2, *inputs, *partial, size, block)
    return [p.sum() for p in partial]


class Sums(NamedTuple):
    """A reduction over rows: `target` is the period of its results."""

    target: Period
    rows: Rows


@lru_cache(maxsize=4096)
def sums_of(
    shape: tuple[int, ...], kept: tuple[int, ...], channels: tuple[tuple[int, ...], ...], axis: int
) -> Sums | None:
    """Return a reduction to the shape `kept` with Channel arguments of these shapes; None if no rows fit all.

    A sum of all elements is the sum of the results for each element of a Channel argument.
    """
    periods = [find_period(shape, small, axis) for small in channels]
    target = next(p for p in (find_period(shape, kept, axis), *periods) if p is None or p.size > 1)
    if target is None:
        return None
    rows = find_rows(math.prod(shape), periods, target.size if target.inner == 1 else target.inner)
    return None if rows is None else Sums(target, rows)


def reduce_sums(threads: int, expression: Expression, inputs: Sequence[Any], sums: Sums) -> list[Any]:
    """Return the sums of expression(inputs) for each element of the target: one float64 array per output."""
    (target, rows), count = sums, expression.output_count
    if target.inner == 1:
        images = target.images
        block, blocks = _blocks(rows.number, rows.length) if images == 1 else _image_blocks(target)
        partial = [np.zeros((blocks, rows.length)) for _ in range(count)]
        grain, more = 1 if images > 1 else 2, (*rows.sizes, rows.number, block)
        _reduce_columns(expression, rows.accesses).run(threads, blocks, grain, *inputs, *partial, *more)
        return [p.reshape(images, -1, rows.length).sum(axis=1).reshape(-1) for p in partial]
    partial = [np.zeros((target.size, LANES)) for _ in range(count)]
    grain, more = GRAIN // (target.outer * target.inner), (*rows.sizes, target.size, target.outer)
    _reduce_rows(expression, rows.accesses).run(threads, target.size, grain, *inputs, *partial, *more)
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
        channels = [inputs[i] for i in numbers_of(expression, Kind.CHANNEL)]
        if 0 in shape:
            sums = [np.zeros(output.size) for output in outputs]
        elif all(a.size == 1 for a in (outputs[0], *channels)):
            self._check_dense(*(a for a in inputs if type(a) is not float))
            sums = reduce_flat(self.threads, expression, inputs, math.prod(shape))
        elif (plan := sums_of(shape, kept, tuple(a.shape for a in channels), axis)) is not None:
            self._check_dense(*(a for a in inputs if type(a) is not float))
            sums = reduce_sums(self.threads, expression, inputs, plan)
        else:
            sums = self._reduce_general(expression, inputs, shape, axis, kept)
        if outputs[0].size == 1:
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
        summed = tuple(i for i in range(len(shape)) if not axis <= i < axis + len(kept) or kept[i - axis] == 1)
        return [self._in_memory_order(v.sum(axis=summed, dtype=np.float64).reshape(kept)) for v in values]

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
