"""The kernels of batch normalisation: which vectors each reads, computes and writes, and the loops around that.

Every kernel comes in variants (with a residual, a mask, several gradients ...), compiled when they are first used.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Literal

from numba import types

from caffepy.backend.cpu.jit.kernel import Entry
from caffepy.backend.cpu.jit.vector import ahead
from caffepy.backend.cpu.normalise.steps import LANES, Body, Step, step_function

Gate = Literal["none", "bits", "normal", "output"]
"""Where a ReLU's gradient sees that it was off: nowhere, in a mask, in x before it, in y behind it."""

ROWS = 4
"""Rows that a sum takes at a time: its numbers so far are read and written once for so many."""
CHUNK = 32
"""Rows that are added up in float32 before they are added to a float64 sum."""
SAMPLE = 8
"""Rows whose mean squares are taken around, so that a large mean does not swallow their digits."""
MAX_GRADIENTS = 4
"""Gradients that one pass adds up."""

_POINTERS = {
    "floats": types.CPointer(types.float32),
    "doubles": types.CPointer(types.float64),
    "octets": types.CPointer(types.uint8),
}


def _entry(
    name: str, kinds: Sequence[str], numbers: Sequence[str], text: Sequence[str], scope: dict[str, Any]
) -> Entry:
    """A kernel of pointers `_p0`, `_p1`, ... followed by numbers."""
    lines = [f"_p{i} = {kind}(_a[{i}])" for i, kind in enumerate(kinds)]
    lines += [f"{number} = _a[{len(kinds) + i}]" for i, number in enumerate(numbers)]
    return Entry(name, __file__, [*lines, *text], scope, "q" * (len(kinds) + len(numbers)))


# -- element by element -----------------------------------------------------------------------------------------


def _each(name: str, kinds: Sequence[str], body: Body) -> Entry:
    """Items are rows; the last one may be shorter."""
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
    """(x - mean) * factor + bias."""
    centred = step.minus(x, step.whole(mean, column))
    return step.plus(step.times(centred, step.whole(factor, column)), step.whole(bias, column))


@cache
def forward_kernel(residual: bool, relu: bool, mask: bool) -> Entry:
    """y = (x - mean) * factor + bias (+ other), or max(that, 0), and the mask.

    Of x, mean, factor, bias, other, y, mask.
    """

    def body(  # noqa: PLR0913 -- a kernel
        step: Step, at: Any, column: Any, period: Any,
        x: Any, mean: Any, factor: Any, bias: Any, other: Any, y: Any, bits: Any,
    ) -> None:  # fmt: skip
        value = _normal(step, step.row(x, at), column, mean, factor, bias)
        if residual:
            value = step.plus(value, step.row(other, at))
        if mask:
            step.store_bits(step.positive(value), bits, at)
        step.store(step.rectified(value) if relu else value, y, at)

    return _each(f"normalise_{residual:d}{relu:d}{mask:d}", ["floats"] * 6 + ["octets"], body)


@cache
def gradient_kernel(relu: bool) -> Entry:
    """dx = (g - first - (x - mean) * second) * factor, g as `relu` says.

    Of x, dy, mean, factor, bias, first, second, dx.
    """

    def body(  # noqa: PLR0913 -- a kernel
        step: Step, at: Any, column: Any, period: Any,
        x: Any, dy: Any, mean: Any, factor: Any, bias: Any, first: Any, second: Any, dx: Any,
    ) -> None:  # fmt: skip
        value, g = step.row(x, at), step.row(dy, at)
        if relu:
            g = step.where(step.positive(_normal(step, value, column, mean, factor, bias)), g)
        centred = step.minus(value, step.whole(mean, column))
        rest = step.minus(g, step.whole(first, column))
        rest = step.minus(rest, step.times(centred, step.whole(second, column)))
        step.store(step.times(rest, step.whole(factor, column)), dx, at)

    return _each(f"normalise_gradient_{relu:d}", ["floats"] * 8, body)


# -- sums -------------------------------------------------------------------------------------------------------


def _row_loops(name: str, arguments: str) -> list[str]:
    """Lines that add up the rows [_row, _chunk)."""
    lines = [f"_many = _row + (_chunk - _row) // {ROWS} * {ROWS}"]
    for variant, start, stop, step in (("many", "_row", "_many", ROWS), ("one", "_many", "_chunk", 1)):
        lines += [
            f"for _r in range({start}, {stop}, {step}):",
            f"    for _c in range(0, _period, {LANES}):",
            f"        {name}_{variant}(_r * _period + _c, _c, {LANES}, _period, {arguments})",
        ]
    return lines


def _last_row(name: str, arguments: str) -> list[str]:
    """Lines that add up what is left behind the last whole row."""
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
    """Items are blocks of rows; each adds up `sums` numbers for each column.

    Args:
        name: of the kernel.
        kinds: of its pointers, beginning with those of the sums: float32 and float64, (blocks, sums, period).
        sums: how many sums a column has.
        make_body: makes the step that takes so many rows.
        first: lines that are done before each block.
    """
    pointers = [_POINTERS[kind] for kind in kinds if kind != "doubles"]
    arguments = ", ".join(["_sum", *(f"_p{i}" for i in range(2, len(kinds)))])
    arguments = arguments.replace("_p2", "_shift") if first else arguments
    scope: dict[str, Any] = {"ahead": ahead}
    for variant, rows in (("many", ROWS), ("one", 1), ("part", 1)):
        scope[f"{name}_{variant}"] = step_function(make_body(rows), pointers, variant == "part")
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
    """Add values, one for each row, to sum number `index` of a column."""
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
    "if _sampled == 0:",
    "    for _c in range(_size - _row * _period):",
    "        _shift[_c] = _p3[_row * _period + _c]",
]


@cache
def measure_kernel() -> Entry:
    """Sums of x - shift and of its square, and the shift of each block and column. Of sums, totals, shift, x."""

    def make_body(rows: int) -> Body:
        def body(step: Step, at: Any, column: Any, period: Any, sums: Any, shift: Any, x: Any) -> None:
            around = step.whole(shift, column)
            values = [step.row(x, step.after(at, row, period)) for row in range(rows)]
            values = [step.there(step.minus(value, around)) for value in values]
            _add(step, values, sums, column, 0, period)
            _add(step, [step.times(value, value) for value in values], sums, column, 1, period)

        return body

    return _sums("normalise_measure", ["floats", "doubles", "floats", "floats"], 2, make_body, _SAMPLE)


@cache
def gradient_sums_kernel(sources: int, gate: Gate, total: bool, weighted: bool) -> Entry:
    """Sums of g, and if `weighted` of g * (x - mean) after it; `total` gets g.

    Of sums, totals, x (y where the gate is "output"), mask, MAX_GRADIENTS gradients, total, mean, factor, bias.
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
