"""Formulas over arrays and sums of them: chooses the kernel for the arrays' geometry and launches it.

Owns which of three kinds a call is: flat (all arrays alike, four elements a thread where alignment allows), periodic
(Channel arguments found by one division and one remainder) or general (CuPy's broadcasting). The choice is remembered
for each combination of formula, shapes and alignment, so that a call costs little more than its launch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.base import Array
from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_kernels import THREADS, compiled, library_kernel
from caffepy.backend.cuda_layout import Period, find_period
from caffepy.backend.cuda_memory import Scratch, allocate, is_dense_layout, raw
from caffepy.backend.cuda_source import (
    Variant,
    apply_text,
    formula_text,
    reduce_columns_text,
    reduce_segments_text,
)
from caffepy.backend.expression import Expression, Kind

Argument = Any
"""An array or a number."""

SPLIT_BLOCKS = 1056
"""Blocks that the first stage of a reduction aims at; fixed, so that the order of a sum depends on no device."""

MOST_OUTPUTS = 4
"""Outputs that the second stage of a reduction takes."""

ROWS_EACH = 8
"""Fewest elements that a thread of a reduction adds up before its sum is worth splitting further."""


class Signature(NamedTuple):
    """What the choice of a kernel needs to know of an array."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    aligned: bool
    dtype: str


def _signature(value: Argument) -> Signature | None:
    """None for a number."""
    if not isinstance(value, cupy.ndarray):
        return None
    return Signature(value.shape, value.strides, value.data.ptr % 16 == 0, value.dtype.char)


class Call(NamedTuple):
    """A formula with the signatures of its arguments: the key under which plans are remembered."""

    expression: Expression
    inputs: tuple[Signature | None, ...]
    outputs: tuple[Signature | None, ...]
    axis: int
    device: int

    def of_kind(self, kind: Kind) -> dict[str, Signature]:
        """The array arguments of one kind, by name."""
        named = zip(self.expression.parameters, self.expression.kinds, self.inputs, strict=True)
        return {name: s for name, k, s in named if k is kind and s is not None}

    def periods(self, shape: tuple[int, ...]) -> dict[str, Period | None]:
        """Where each Channel argument is found from an element's index."""
        return {name: find_period(shape, s.shape, self.axis) for name, s in self.of_kind(Kind.CHANNEL).items()}

    def check(self) -> None:
        """Refuse slices and other types: the kernels walk through memory."""
        for s in (*self.inputs, *self.outputs):
            assert s is None or (s.dtype == "f" and is_dense_layout(s.shape, s.strides, 4)), (self.expression, s)

    def device_scalars(self) -> frozenset[str]:
        """Scalars that lie in device memory."""
        return frozenset(self.of_kind(Kind.SCALAR))


def _call(expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int) -> Call:
    device = cupy.cuda.runtime.getDevice()
    return Call(expression, tuple(map(_signature, inputs)), tuple(map(_signature, outputs)), axis, device)


@dataclass(frozen=True)
class Launch:
    """A kernel ready to be launched for any arrays of one `Call`.

    Args:
        kernel: the compiled kernel.
        grid: blocks.
        block: threads.
        head: arguments before the formula's.
        extras: arguments that follow each of the formula's.
        splits: partial sums of each result; 1 for everything but large reductions.
        size: results of each output of a reduction.
    """

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    head: tuple[Any, ...]
    extras: tuple[tuple[Any, ...], ...]
    splits: int = 1
    size: int = 1

    def arguments(self, inputs: Sequence[Argument], outputs: Sequence[Array]) -> list[Any]:
        """Kernel arguments up to the outputs."""
        arguments = [*self.head]
        for value, extra in zip(inputs, self.extras, strict=True):
            arguments.append(value if isinstance(value, cupy.ndarray) else np.float32(value))
            arguments += extra
        return arguments + [*outputs]


def apply(expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int) -> None:
    """outputs = expression(*inputs), see `Backend.apply`."""
    if outputs[0].size == 0:
        return
    plan = _plan_apply(_call(expression, inputs, outputs, axis))
    if plan is None:
        _apply_general(expression, inputs, outputs, axis)
    else:
        plan.kernel(plan.grid, plan.block, tuple(plan.arguments(inputs, outputs)))


@lru_cache(maxsize=4096)
def _plan_apply(call: Call) -> Launch | None:
    """The kernel of an elementwise call; None if a Channel argument has no period."""
    assert call.outputs[0] is not None
    shape = call.outputs[0].shape
    periods = call.periods(shape)
    if any(period is None for period in periods.values()):
        return None
    call.check()
    size = math.prod(shape)
    width = 4 if size % 4 == 0 and _widens(call, periods) else 1
    splat = frozenset(name for name, p in periods.items() if p and width == 4 and _is_splat(p))
    index = _index_type(size)
    variant = Variant(width, index, call.device_scalars(), splat)
    count = size // width
    extras = _extras(call, periods, width, splat)
    kernel = compiled(apply_text(call.expression, variant), "apply_")
    return Launch(kernel, (-(-count // THREADS),), (THREADS,), (_count(count, index),), extras)


def _index_type(size: int) -> str:
    return "unsigned int" if size < 2**31 else "unsigned long long"


def _count(value: int, index: str) -> Any:
    return np.uint32(value) if index == "unsigned int" else np.uint64(value)


def _is_splat(period: Period) -> bool:
    """Whether four neighbours see one element of the Channel argument."""
    return period.size == 1 or period.inner % 4 == 0


def _widens(call: Call, periods: dict[str, Period | None]) -> bool:
    """Whether all arrays can be taken four elements at once."""
    arrays = [*call.of_kind(Kind.EACH).values(), *call.outputs]
    channels = call.of_kind(Kind.CHANNEL)
    return all(s.aligned for s in arrays if s) and all(
        _is_splat(p) or (p.inner == 1 and p.size % 4 == 0 and channels[name].aligned)
        for name, p in periods.items()
        if p
    )


def _extras(
    call: Call, periods: dict[str, Period | None], width: int, splat: frozenset[str]
) -> tuple[tuple[Any, ...], ...]:
    """Divisor and modulus of each Channel argument, nothing for others."""
    extras: list[tuple[Any, ...]] = []
    for name in call.expression.parameters:
        period = periods.get(name)
        if period is None:
            extras.append(())
        elif width == 4 and name in splat:
            extras.append((np.uint32(max(period.inner // 4, 1)), np.uint32(period.size)))
        else:
            extras.append((np.uint32(period.inner), np.uint32(period.size // width)))
    return tuple(extras)


@cache
def _general_kernel(expression: Expression) -> Any:
    names = [f"a{i}" for i in range(len(expression.parameters))]
    results = [f"r{i}" for i in range(expression.output_count)]
    return cupy.ElementwiseKernel(
        ", ".join(f"float32 {name}" for name in names),
        ", ".join(f"float32 {name}" for name in results),
        f"formula_({', '.join(names + results)});",
        f"general_{expression.name}",
        preamble=formula_text(expression),
    )


def _apply_general(expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int) -> None:
    rank = outputs[0].ndim
    arguments = list(inputs)
    for i, kind in enumerate(expression.kinds):
        if kind is Kind.CHANNEL:
            shape = (1,) * axis + tuple(inputs[i].shape)
            arguments[i] = inputs[i].reshape(shape + (1,) * (rank - len(shape)))
        elif kind is Kind.SCALAR and not isinstance(inputs[i], cupy.ndarray):
            arguments[i] = np.float32(inputs[i])
    _general_kernel(expression)(*arguments, *outputs)


def reduce(
    expression: Expression,
    inputs: Sequence[Argument],
    outputs: Sequence[Array],
    axis: int,
    accumulate: bool,
    scratch: Scratch,
) -> None:
    """outputs (+)= sums of expression(*inputs), see `Backend.reduce`."""
    plan = _plan_reduce(_call(expression, inputs, outputs, axis))
    if plan is None:
        _reduce_general(expression, inputs, outputs, axis, accumulate)
        return
    partial = scratch.get("partial sums", len(outputs) * plan.splits * plan.size, "float64")
    add = np.int32(accumulate)
    plan.kernel(plan.grid, plan.block, (*plan.arguments(inputs, outputs), partial, add), shared_mem=THREADS * 8)
    if plan.splits > 1:
        _combine(partial, plan, outputs, add)


def _each_shape(expression: Expression, inputs: Sequence[Any]) -> tuple[int, ...]:
    return next(tuple(v.shape) for v, k in zip(inputs, expression.kinds, strict=True) if k is Kind.EACH)


@lru_cache(maxsize=4096)
def _plan_reduce(call: Call) -> Launch | None:
    """The kernel of a reduction's first stage; None if the outputs or a Channel argument have no period."""
    assert call.outputs[0] is not None
    assert len(call.outputs) <= MOST_OUTPUTS, f"{call.expression}: more than {MOST_OUTPUTS} sums at once"
    shape = _each_shape(call.expression, call.inputs)
    target = find_period(shape, call.outputs[0].shape, call.axis)
    periods = call.periods(shape)
    if target is None or None in periods.values() or math.prod(shape) == 0:
        return None
    call.check()
    if target.size == 1:
        target = Period(1, 1, math.prod(shape))
    fixed = frozenset(name for name, period in periods.items() if period == target)
    by_columns = target.inner == 1 and target.size > 1
    width = 4 if fixed == set(periods) and _reduces_wide(call, target, by_columns) else 1
    splat = frozenset() if by_columns else fixed
    variant = Variant(width, _index_type(math.prod(shape)), call.device_scalars(), splat, fixed)
    extras = _extras(call, periods, 1, frozenset())
    return (_plan_columns if by_columns else _plan_segments)(call, variant, target, extras)


def _reduces_wide(call: Call, target: Period, by_columns: bool) -> bool:
    """Whether a reduction may load four neighbours at once."""
    each = all(s.aligned for s in call.of_kind(Kind.EACH).values())
    if by_columns:
        return each and target.size % 4 == 0 and all(s.aligned for s in call.of_kind(Kind.CHANNEL).values())
    return each and target.outer == 1 and target.inner % 4 == 0


def _plan_columns(call: Call, variant: Variant, target: Period, extras: tuple[tuple[Any, ...], ...]) -> Launch:
    rows, columns = target.outer, target.size // variant.width
    across = min(32, 1 << (columns - 1).bit_length())
    down = THREADS // across
    column_blocks = -(-columns // across)
    splits = max(1, min(SPLIT_BLOCKS // column_blocks, -(-rows // (down * ROWS_EACH))))
    each = -(-rows // splits)
    splits = -(-rows // each)
    head = (np.uint32(rows), np.uint32(columns), np.uint32(each))
    kernel = compiled(reduce_columns_text(call.expression, variant), "reduce_")
    return Launch(kernel, (column_blocks, splits), (across, down), head, extras, splits, target.size)


def _plan_segments(call: Call, variant: Variant, target: Period, extras: tuple[tuple[Any, ...], ...]) -> Launch:
    inner = target.inner // variant.width
    length = target.outer * inner
    splits = max(1, min(SPLIT_BLOCKS // target.size, -(-length // (THREADS * ROWS_EACH))))
    each = -(-length // splits)
    splits = -(-length // each)
    index = variant.index
    head = (_count(target.outer, index), np.uint32(target.size), _count(inner, index), _count(each, index))
    kernel = compiled(reduce_segments_text(call.expression, variant), "reduce_")
    return Launch(kernel, (target.size, splits), (THREADS,), head, extras, splits, target.size)


def _combine(partial: Array, plan: Launch, outputs: Sequence[Array], accumulate: Any) -> None:
    """Second stage: add up the partial sums of up to four outputs."""
    last = outputs[-1]
    pointers = [*outputs, last, last, last][:MOST_OUTPUTS]
    grid = (-(-plan.size // (THREADS // 32)), len(outputs))
    arguments = (partial, np.int32(plan.splits), np.int32(plan.size), accumulate, *pointers)
    library_kernel("reduce", "combine")(grid, (THREADS,), arguments)


def _reduce_general(
    expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int, accumulate: bool
) -> None:
    """The same in three steps for rare geometries: values, sums in float64, conversion."""
    shape = _each_shape(expression, inputs)
    values = [allocate(shape) for _ in outputs]
    apply(expression, inputs, values, axis)
    for value, out in zip(values, outputs, strict=True):
        over = tuple(a for a in range(len(shape)) if not axis <= a < axis + out.ndim)
        total = cupy.sum(value, axis=over if out.ndim else None, dtype=np.float64).astype(np.float32)
        if accumulate:
            cupy.add(out, total.reshape(out.shape), out=out)
        else:
            cupy.copyto(out, total.reshape(out.shape))


def is_finite(array: Array, scratch: Scratch) -> bool:
    """Whether no element is NaN or infinite; waits for the device."""
    flag = scratch.get("finite flag", 1, "int32")
    flag.fill(0)
    blocks = min(-(-max(array.size, 1) // THREADS), SPLIT_BLOCKS)
    kernel = library_kernel("reduce", "find_non_finite")
    kernel((blocks,), (THREADS,), (raw(array), np.uint64(array.size), flag))
    return not int(flag.get()[0])
