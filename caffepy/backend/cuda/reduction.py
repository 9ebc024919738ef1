"""Reductions of formulas on the GPU for any dtype: kernel selection by geometry, and launches.

Distinguishes three kinds: columns (channels last, or the rows of a matrix), segments (the whole array, or contiguous
axes) and general (first transposed into segments). Also chooses the number of partial sums.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cuda.codegen import (
    Access,
    Variant,
    reduce_columns_text,
    reduce_segments_text,
)
from caffepy.backend.cuda.compiler import (
    MAX_BLOCKS,
    MULTIPROCESSORS,
    THREADS,
    c_type,
    compiled,
    defines,
    divider,
    kernel_text,
    library_kernel,
)
from caffepy.backend.cuda.copy import copy
from caffepy.backend.cuda.expression import (
    Argument,
    Call,
    FormulaLaunch,
    apply,
    count_argument,
    extras,
    index_type,
    make_call,
    pack_width,
)
from caffepy.backend.cuda.index_arithmetic import Period, find_period, widest
from caffepy.backend.cuda.memory import CudaMemory, Scratch, fill, flat, raw
from caffepy.backend.expression import Expression, Kind
from caffepy.backend.formulas import identity
from caffepy.backend.interface import ReductionPrimitives
from caffepy.backend.types import Array, memory_axes, view

SPLIT_BLOCKS = 4 * MULTIPROCESSORS
"""Target number of blocks of a reduction. Fixed, so that the summation order does not depend on the device."""

PACKS_EACH = 8
"""Minimum packs per thread before a reduction is split further."""

LOADS = 8
"""Packs that a thread loads before it adds; half as many for columns, which have one sum each."""

SEGMENT = 128
"""Bytes of a row per block: one memory transaction, so that few blocks share a result."""


class Plan(NamedTuple):
    """A planned reduction.

    Args:
        launch: its kernel.
        partial: number of partial sums; 0 if each result is computed by one block.
    """

    launch: FormulaLaunch
    partial: int


def reduce(
    formula: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int, accumulate: bool,
    scratch: Scratch,
) -> None:  # fmt: skip
    """outputs (+)= sums of formula(*inputs), see `Backend.reduce`."""
    if outputs[0].size == 0:
        return
    shape = _each_shape(formula, inputs)
    if math.prod(shape) == 0:
        for out in outputs if not accumulate else ():
            fill(out, 0)
        return
    plan = _plan(make_call(formula, inputs, outputs, axis), shape)
    if plan is None:
        _reduce_general(formula, inputs, outputs, axis, accumulate, scratch)
        return
    partial = scratch.get("partial sums", plan.partial, "float64")
    tickets = scratch.tickets(plan.launch.grid[0] if plan.partial else 1)
    plan.launch.run(inputs, outputs, partial, tickets, np.int32(accumulate))


def _each_shape(formula: Expression, inputs: Sequence[Any]) -> tuple[int, ...]:
    return next(tuple(v.shape) for v, k in zip(inputs, formula.kinds, strict=True) if k is Kind.EACH)


@lru_cache(maxsize=4096)
def _plan(call: Call, shape: tuple[int, ...]) -> Plan | None:
    """Return the plan of a reduction, or None if the outputs or a Channel argument have no period."""
    target = find_period(shape, call.outputs[0].shape, call.axis)
    periods = {name: period for name, period in call.periods(shape).items() if period is not None}
    if target is None or len(periods) < len(call.of_kind(Kind.CHANNEL)):
        return None
    call.check()
    if target.size == 1:
        target = Period(1, 1, math.prod(shape))
    by_columns = target.inner == 1 and target.size > 1
    aligned = all(p == target or p.size == 1 for p in periods.values())
    span = target.size if by_columns else target.inner
    width = pack_width(call, tuple(call.of_kind(Kind.EACH).values()), periods, span) if aligned else 1
    unroll = max(1, LOADS // len(call.of_kind(Kind.EACH)) // (2 if by_columns else 1))
    variant = Variant(
        call.each_types(), call.output_types(), width, unroll, index_type(math.prod(shape) // width),
        call.device_scalars(), tuple(_access(p, target, width, by_columns) for p in periods.values()),
    )  # fmt: skip
    return (_plan_columns if by_columns else _plan_segments)(call, variant, target, extras(call, periods, width))


def _access(period: Period, target: Period, width: int, by_columns: bool) -> Access:
    """Return how a thread indexes a Channel argument: by its result's number if both have the same period."""
    if period.size == 1:
        return Access(once=True)
    if period == target:
        return Access(wraps=True, packed=by_columns and width > 1, once=True)
    return Access(divides=period.inner != 1, wraps=period.outer > 1)


def _text(text: str) -> str:
    return kernel_text("common") + kernel_text("reduce") + text


def _plan_columns(call: Call, variant: Variant, target: Period, more: tuple[tuple[Any, ...], ...]) -> Plan:
    rows, packs = target.outer, target.size // variant.width
    item = min(s.item for s in call.of_kind(Kind.EACH).values())
    across = min(32, SEGMENT // (variant.width * item), 1 << (packs - 1).bit_length())
    grid = -(-packs // across)
    splits = max(1, min(SPLIT_BLOCKS // grid, -(-rows // (THREADS // across * PACKS_EACH))))
    each = -(-rows // splits)
    splits = -(-rows // each)
    kernel = compiled(_text(reduce_columns_text(call.expression, variant, across)), "reduce_")
    head = (np.uint32(rows), np.uint32(packs), np.uint32(each))
    launch = FormulaLaunch(kernel, (grid, splits), (THREADS,), head, more)
    return Plan(launch, len(call.outputs) * splits * target.size if splits > 1 else 0)


def _plan_segments(call: Call, variant: Variant, target: Period, more: tuple[tuple[Any, ...], ...]) -> Plan:
    inner, index = target.inner // variant.width, variant.index
    length = target.outer * inner
    threads = min(THREADS, max(32, 1 << (-(-length // variant.unroll) - 1).bit_length()))
    splits = max(1, min(SPLIT_BLOCKS // target.size, -(-length // (threads * PACKS_EACH))))
    each = -(-length // splits)
    splits = -(-length // each)
    kernel = compiled(_text(reduce_segments_text(call.expression, variant)), "reduce_")
    head = (
        count_argument(target.outer, index), count_argument(inner, index), divider(min(inner, 2**31)),
        count_argument(each, index),
    )  # fmt: skip
    launch = FormulaLaunch(kernel, (target.size, splits), (threads,), head, more)
    return Plan(launch, len(call.outputs) * splits * target.size if splits > 1 else 0)


def _reduce_general(
    formula: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int, accumulate: bool,
    scratch: Scratch,
) -> None:  # fmt: skip
    """Reduce rare geometries in three steps: apply the formula, transpose into segments, sum."""
    shape = _each_shape(formula, inputs)
    values = [view(scratch.get(f"values {k}", math.prod(shape)), shape) for k in range(len(outputs))]
    apply(formula, inputs, values, axis, scratch)
    for value, out in zip(values, outputs, strict=True):
        kept = [axis + a for a in memory_axes(out.ndim)]
        order = kept + [a for a in range(len(shape)) if a not in kept]
        moved = scratch.get("segments", value.size)
        copy(value.transpose(order), moved.reshape([shape[a] for a in order]))
        reduce(identity, (moved.reshape(out.size, -1),), (flat(out),), 0, accumulate, scratch)


def is_finite(array: Array, scratch: Scratch) -> bool:
    """Return whether every element is finite. Waits for the device."""
    flag = scratch.get("finite flag", 1, "int32")
    fill(flag, 0)
    width = widest([array.size, math.gcd(int(array.data.ptr), 16) // array.itemsize], 16 // array.itemsize)
    packs = array.size // width
    blocks = min(-(-max(packs, 1) // THREADS), MAX_BLOCKS)
    kernel = library_kernel("finite", "find_non_finite", defines(TYPE=c_type(array), WIDTH=width))
    if packs:
        kernel((blocks,), (THREADS,), (raw(array), np.uint64(packs), flag))
    return not int(flag.get()[0])


class CudaReduction(ReductionPrimitives, CudaMemory):
    """`ReductionPrimitives` of the GPU."""

    def reduce(
        self,
        expression: Expression,
        inputs: Sequence[Array | float],
        outputs: Sequence[Array],
        axis: int = 1,
        accumulate: bool = False,
    ) -> None:
        reduce(expression, inputs, outputs, axis, accumulate, self._scratch)

    def all_finite(self, array: Array) -> bool:
        with self._on_stream():
            return is_finite(array, self._scratch)
