"""Formulas over arrays and sums of them: chooses the kernel for the arrays' geometry and launches it.

Owns which of three kinds a call is: flat (all arrays alike, four elements a thread where alignment allows), periodic
(Channel arguments found by one division and one remainder) or general (CuPy's broadcasting).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.base import Array
from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_kernels import MAX_BLOCKS, THREADS, aligned, compiled, launch_blocks, library_kernel
from caffepy.backend.cuda_layout import Period, find_period
from caffepy.backend.cuda_memory import Scratch, allocate, flat
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


def apply(expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int) -> None:
    """outputs = expression(*inputs), see `Backend.apply`."""
    if outputs[0].size == 0:
        return
    periods = _periods(expression, inputs, tuple(outputs[0].shape), axis)
    if any(period is None for period in periods.values()):
        _apply_general(expression, inputs, outputs, axis)
        return
    size = outputs[0].size
    each = [a for a, kind in zip(inputs, expression.kinds, strict=True) if kind is Kind.EACH]
    width = 4 if size % 4 == 0 and all(map(aligned, [*each, *outputs])) else 1
    if width == 4 and not all(_widens(p, inputs, expression, name) for name, p in periods.items() if p):
        width = 1
    splat = frozenset(name for name, p in periods.items() if p and width == 4 and _is_splat(p))
    index = "unsigned int" if size < 2**31 else "unsigned long long"
    variant = Variant(width, index, _device_scalars(expression, inputs), splat)
    count = size // width
    arguments = [_count(count, index), *_arguments(expression, inputs, periods, variant), *map(flat, outputs)]
    blocks = min(-(-count // THREADS), MAX_BLOCKS)
    compiled(apply_text(expression, variant), "apply_")((blocks,), (THREADS,), tuple(arguments))


def _periods(
    expression: Expression, inputs: Sequence[Argument], shape: tuple[int, ...], axis: int
) -> dict[str, Period | None]:
    """Where each Channel argument is found from an element's index."""
    return {
        name: find_period(shape, tuple(value.shape), axis)
        for name, kind, value in zip(expression.parameters, expression.kinds, inputs, strict=True)
        if kind is Kind.CHANNEL
    }


def _is_splat(period: Period) -> bool:
    return period.size == 1 or period.inner % 4 == 0


def _widens(period: Period, inputs: Sequence[Argument], expression: Expression, name: str) -> bool:
    """Whether four neighbours see one element of the Channel argument, or four that can be loaded at once."""
    value = inputs[expression.parameters.index(name)]
    return _is_splat(period) or (period.inner == 1 and period.size % 4 == 0 and aligned(value))


def _device_scalars(expression: Expression, inputs: Sequence[Argument]) -> frozenset[str]:
    return frozenset(
        name
        for name, kind, value in zip(expression.parameters, expression.kinds, inputs, strict=True)
        if kind is Kind.SCALAR and isinstance(value, cupy.ndarray)
    )


def _count(value: int, index: str) -> Any:
    return np.uint32(value) if index == "unsigned int" else np.uint64(value)


def _arguments(
    expression: Expression, inputs: Sequence[Argument], periods: dict[str, Period | None], variant: Variant
) -> list[Any]:
    """Kernel arguments of the formula's inputs, in the order that `cuda_source` declares."""
    arguments: list[Any] = []
    for name, kind, value in zip(expression.parameters, expression.kinds, inputs, strict=True):
        if kind is Kind.SCALAR and name not in variant.device_scalars:
            arguments.append(np.float32(value))
            continue
        assert value.dtype == np.float32, f"{expression.name}: {name} is {value.dtype}"
        arguments.append(flat(value))
        if kind is Kind.CHANNEL:
            arguments += _divisor_and_modulus(periods[name], variant.width, name in variant.splat)
    return arguments


def _divisor_and_modulus(period: Period | None, width: int, splat: bool) -> list[Any]:
    assert period is not None
    if width == 4 and splat:
        return [np.uint32(max(period.inner // 4, 1)), np.uint32(period.size)]
    return [np.uint32(period.inner), np.uint32(period.size // width)]


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
    shape = next(tuple(v.shape) for v, k in zip(inputs, expression.kinds, strict=True) if k is Kind.EACH)
    target = find_period(shape, tuple(outputs[0].shape), axis)
    periods = _periods(expression, inputs, shape, axis)
    if target is None or any(period is None for period in periods.values()) or math.prod(shape) == 0:
        _reduce_general(expression, inputs, outputs, axis, accumulate, shape)
        return
    if target.size == 1:
        target = Period(1, 1, math.prod(shape))
    fixed = frozenset(name for name, period in periods.items() if period == target)
    index = "unsigned int" if math.prod(shape) < 2**31 else "unsigned long long"
    variant = Variant(1, index, _device_scalars(expression, inputs), frozenset(), fixed)
    arguments = _arguments(expression, inputs, periods, variant) + [flat(out) for out in outputs]
    stage = _reduce_columns if target.inner == 1 and target.size > 1 else _reduce_segments
    stage(expression, variant, target, arguments, outputs, accumulate, scratch)


def _reduce_columns(
    expression: Expression, variant: Variant, target: Period, arguments: list[Any], outputs: Sequence[Array],
    accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    rows, size = target.outer, target.size
    width = min(32, 1 << (size - 1).bit_length())
    height = THREADS // width
    column_blocks = -(-size // width)
    splits = max(1, min(SPLIT_BLOCKS // column_blocks, -(-rows // (height * 8))))
    each = -(-rows // splits)
    splits = -(-rows // each)
    partial = scratch.get("partial sums", len(outputs) * splits * size, "float64")
    head = [np.uint32(rows), np.uint32(size), np.uint32(each)]
    kernel = compiled(reduce_columns_text(expression, variant), "reduce_")
    tail = [partial, np.int32(accumulate)]
    kernel((column_blocks, splits), (width, height), (*head, *arguments, *tail), shared_mem=THREADS * 8)
    _combine(partial, splits, size, outputs, accumulate)


def _reduce_segments(
    expression: Expression, variant: Variant, target: Period, arguments: list[Any], outputs: Sequence[Array],
    accumulate: bool, scratch: Scratch,
) -> None:  # fmt: skip
    length = target.outer * target.inner
    splits = max(1, min(SPLIT_BLOCKS // target.size, -(-length // (THREADS * 8))))
    each = -(-length // splits)
    splits = -(-length // each)
    partial = scratch.get("partial sums", len(outputs) * splits * target.size, "float64")
    index = variant.index
    head = [_count(target.outer, index), np.uint32(target.size), _count(target.inner, index), _count(each, index)]
    kernel = compiled(reduce_segments_text(expression, variant), "reduce_")
    tail = [partial, np.int32(accumulate)]
    kernel((target.size, splits), (THREADS,), (*head, *arguments, *tail), shared_mem=THREADS * 8)
    _combine(partial, splits, target.size, outputs, accumulate)


def _combine(partial: Array, splits: int, size: int, outputs: Sequence[Array], accumulate: bool) -> None:
    if splits == 1:
        return
    kernel = library_kernel("reduce", "combine")
    for k, out in enumerate(outputs):
        part = partial[k * splits * size :]
        launch_blocks(kernel, (-(-size // 8),), (THREADS,), (part, splits, size, flat(out), accumulate))


def _reduce_general(
    expression: Expression, inputs: Sequence[Argument], outputs: Sequence[Array], axis: int, accumulate: bool,
    shape: tuple[int, ...],
) -> None:  # fmt: skip
    """The same in three steps for geometries that no net of this world has: values, sums in float64, conversion."""
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
    values = flat(array)
    blocks = min(-(-max(values.size, 1) // THREADS), MAX_BLOCKS)
    kernel = library_kernel("reduce", "find_non_finite")
    kernel((blocks,), (THREADS,), (values, np.uint64(values.size), flag))
    return not int(flag.get()[0])
