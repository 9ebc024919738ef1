"""Elementwise formulas on the CPU: generates, compiles and runs their loops.

Arrays are flat in memory order. With Channel arguments the elements are seen as (outer, channels, inner). For channels
last and axis 1, inner is 1 and the loop over channels is vectorised.
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

from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.kernel import Entry, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.jit.vector import (
    exponential,
    hyperbolic_tangent,
    larger_of,
    logarithm_plus_one,
    select,
    smaller_of,
)
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.interface import ElementwisePrimitives
from caffepy.backend.types import CHANNELS_LAST, Array

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
    "floor": np.floor,  # math.floor returns an integer
    "isfinite": math.isfinite,
}


Same = tuple[int, ...]
"""For each output, the index of the aliased input, or -1."""


def _same(inputs: Sequence[Any], outputs: Sequence[Any]) -> Same:
    """Return which outputs alias inputs, so that the compiler can rule out shifted overlap and vectorise."""
    addresses = [address_of(x) if type(x) is np.ndarray else 0 for x in inputs]
    return tuple(addresses.index(at) if (at := address_of(output)) in addresses else -1 for output in outputs)


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
    """Items are the outer positions; channels are contiguous.

    With `by_sample`, `Channel` arguments have separate values for each sample of that many positions.
    """
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
    threads: int, expression: Expression, inputs: Sequence[Any], outputs: Sequence[Any], extents: tuple[int, int, int],
    samples: int = 1,
) -> None:  # fmt: skip
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
        return (
            math.prod(shape[:axis]), math.prod(shape[axis : axis + axes]), math.prod(shape[axis + axes :])
        )  # fmt: skip
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
    if expression not in _EACH:
        each = copy.copy(expression)
        each.kinds = [Kind.EACH if kind is Kind.CHANNEL else kind for kind in each.kinds]
        _EACH[expression] = each
    return _EACH[expression]
