"""Copies and sums between arrays of any dtype and any strides: launches kernels/copy.cu.

Owns the choice among a plain copy of memory, packs of neighbouring elements (casts, Concat, Slice) and tiles that turn
rows into columns (from channels last to C order and back), and the way from the host to the device.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cuda.compiler import C_TYPES, THREADS, defines, divider, library_kernel
from caffepy.backend.cuda.device import cupy
from caffepy.backend.cuda.indexing import Axis, collapse, widest
from caffepy.backend.cuda.memory import Scratch, is_dense
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Array

AXES = 4
"""Axes that a kernel walks along; arrays that have more go slice by slice."""

EACH = 4
"""Packs that a thread moves."""

TILE = 32
"""Rows and columns of a tile that is turned."""

MOST_PACKS = 2**31 - 1
FLOATS = ("f", "e", "H")
"""dtype characters of what can be rounded to."""


class Ends(NamedTuple):
    """What the choice of a kernel needs to know of source and destination."""

    shape: tuple[int, ...]
    strides: tuple[tuple[int, ...], tuple[int, ...]]
    dtypes: tuple[str, str]
    alignments: tuple[int, int]
    add: bool
    device: int


class Launch(NamedTuple):
    """A kernel ready to be launched for any arrays of the same `Ends`."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]


def copy(source: Array, destination: Array) -> None:
    """See `Backend.copy`."""
    if destination.size == 0:
        return
    same = source.dtype == destination.dtype and source.shape == destination.shape
    if same and is_dense(source) and is_dense(destination):
        stream = cupy.cuda.get_current_stream()
        destination.data.copy_from_device_async(source.data, source.nbytes, stream)
    elif destination.dtype.char in FLOATS and source.dtype.char in C_TYPES or same:
        _move(source, destination, add=False)
    else:
        cupy.copyto(destination, source, casting="unsafe")


def add(source: Array, destination: Array) -> None:
    """See `Backend.add`."""
    if destination.size:
        _move(source, destination, add=True)


def upload(host: Any, destination: Array, scratch: Scratch) -> None:
    """Copy a NumPy array to the device and there into the destination's memory order and dtype."""
    kind = np.dtype(np.float32) if destination.dtype.char in FLOATS else destination.dtype
    host = np.asarray(host, dtype=kind)
    assert tuple(host.shape) == tuple(destination.shape), (host.shape, destination.shape)
    if host.size == 0:
        return
    stream = cupy.cuda.get_current_stream()
    ordered = memory_order(host)
    if kind == destination.dtype and is_dense(destination) and ordered.flags.c_contiguous:
        destination.data.copy_from_host_async(ordered.ctypes.data, ordered.nbytes, stream)
        return
    contiguous = np.ascontiguousarray(host)
    staged = scratch.get("upload", host.size, kind.name).reshape(host.shape)
    staged.data.copy_from_host_async(contiguous.ctypes.data, contiguous.nbytes, stream)
    copy(staged, destination)


def in_c_order(array: Array, scratch: Scratch, purpose: str) -> Array:
    """The elements in logical order, C-contiguous: the array itself or a copy in scratch memory."""
    if array.flags.c_contiguous:
        return array
    result = scratch.get(purpose, array.size, array.dtype.name).reshape(array.shape)
    _move(array, result, add=False)
    return result


def _move(source: Array, destination: Array, add: bool) -> None:
    assert tuple(source.shape) == tuple(destination.shape), (source.shape, destination.shape)
    alignments = (math.gcd(int(source.data.ptr), 16), math.gcd(int(destination.data.ptr), 16))
    ends = Ends(
        tuple(source.shape), (source.strides, destination.strides), (source.dtype.char, destination.dtype.char),
        alignments, add, cupy.cuda.runtime.getDevice(),
    )  # fmt: skip
    plan = _plan(ends)
    if plan is not None:
        plan.kernel(plan.grid, plan.block, (source, destination, *plan.arguments))
        return
    axis = max(range(source.ndim), key=lambda a: abs(destination.strides[a]) * (source.shape[a] > 1))
    for i in range(source.shape[axis]):
        index = (slice(None),) * axis + (i,)
        _move(source[index], destination[index], add)


@lru_cache(maxsize=4096)
def _plan(ends: Ends) -> Launch | None:
    """The kernel for these arrays; None if they have more axes or elements than one launch takes."""
    items = [np.dtype(char).itemsize for char in ends.dtypes]
    steps = [tuple(s // item for s in strides) for strides, item in zip(ends.strides, items, strict=True)]
    axes = collapse(ends.shape, steps[0], steps[1])
    if len(axes) > AXES:
        return None
    if _turns(axes):
        return _plan_turn(ends, axes)
    width = _width(ends, axes, items)
    inner = Axis(axes[-1].size // width, axes[-1].source * width, axes[-1].destination * width)
    packs = math.prod(ends.shape) // width
    if packs > MOST_PACKS:
        return None
    kernel = _kernel("move", ends, width, len(axes))
    arguments = [argument for axis in _filled([inner, *axes[-2::-1]]) for argument in _axis_arguments(axis)]
    return Launch(kernel, (-(-packs // (THREADS * EACH)),), (THREADS,), (*arguments, np.uint32(packs)))


def _kernel(name: str, ends: Ends, width: int, dims: int) -> Any:
    source, target = (C_TYPES[char] for char in ends.dtypes)
    text = defines(SOURCE=source, STORED=target, WIDTH=width, DIMS=dims, ADD=int(ends.add))
    return library_kernel("copy", name, text)


def _axis_arguments(axis: Axis) -> tuple[Any, ...]:
    return np.uint32(axis.size), divider(axis.size), np.int64(axis.source), np.int64(axis.destination)


def _filled(axes: list[Axis]) -> list[Axis]:
    return axes + [Axis(1, 0, 0)] * (AXES - len(axes))


def _width(ends: Ends, axes: list[Axis], items: list[int]) -> int:
    """How many neighbours one thread can move at once."""
    inner = axes[-1]
    if (inner.source, inner.destination) != (1, 1):
        return 1
    numbers = [inner.size, *(step for axis in axes[:-1] for step in (axis.source, axis.destination))]
    width = widest(numbers, 16 // max(items))
    while any(alignment % (width * item) for alignment, item in zip(ends.alignments, items, strict=True)):
        width //= 2
    return width


def _turns(axes: list[Axis]) -> bool:
    """Whether neighbours in the source are far apart in the destination and the other way round."""
    rows = [axis for axis in axes if axis.source == 1]
    columns = axes[-1]
    wide = len(rows) == 1 and rows[0] is not columns and min(rows[0].size, columns.size) >= TILE // 2
    return wide and columns.destination == 1 and columns.size < TILE * 65535


def _plan_turn(ends: Ends, axes: list[Axis]) -> Launch:
    columns, rows = axes[-1], next(axis for axis in axes if axis.source == 1)
    outer = [axis for axis in axes if axis is not rows and axis is not columns]
    inner, last = [*outer[::-1], Axis(1, 0, 0), Axis(1, 0, 0)][:2]
    batches = inner.size * last.size
    grid = (-(-rows.size // TILE), -(-columns.size // TILE), min(batches, 65535))
    arguments = (
        np.uint32(rows.size), np.uint32(columns.size), np.int64(columns.source), np.int64(rows.destination),
        *_axis_arguments(inner), np.int64(last.source), np.int64(last.destination), np.uint32(batches),
    )  # fmt: skip
    return Launch(_kernel("turn", ends, 1, 1), grid, (TILE, TILE // EACH), arguments)
