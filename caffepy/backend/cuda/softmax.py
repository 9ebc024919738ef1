"""Softmax, its loss and label ranks: launches kernels/softmax.cu.

Owns the map from a class axis to (outer, classes, inner) in memory. Where the places of the other axes do not lie in
their logical order, a C-ordered copy is worked on instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import MAX_BLOCKS, argument, defines, launch, library_kernel
from caffepy.backend.cuda.copy import copy, in_c_order
from caffepy.backend.cuda.indexing import find_period
from caffepy.backend.cuda.memory import Scratch, raw
from caffepy.backend.layout import memory_axes
from caffepy.backend.types import Array

THREADS = 128
"""Threads of a block: few, so that a small batch is spread over many multiprocessors."""

ONE_BLOCK = 1024
"""Places of few classes up to which one block takes them all, so that no block waits for others."""

FEW_CLASSES = 32
"""Classes up to which one thread may take all of a place."""

MOST_ITEMS = 32
"""Classes that a lane keeps in registers."""


@dataclass(frozen=True)
class Classes:
    """An array in memory as (outer, classes, inner), its places in logical order."""

    classes: int
    inner: int
    places: int

    @property
    def small(self) -> bool:
        """Whether one block takes a thread a place."""
        return self.places <= ONE_BLOCK and self.classes <= FEW_CLASSES

    @property
    def rows(self) -> bool:
        """Whether a warp takes a place."""
        return self.inner == 1 and not self.small

    @property
    def blocks(self) -> int:
        """How many blocks are launched; the same on every device."""
        return 1 if self.small else max(1, min(-(-self.places * (32 if self.rows else 1) // THREADS), MAX_BLOCKS))

    def launch(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Run the form of a kernel that fits."""
        kernel = _kernel(f"{name}_{'rows' if self.rows else 'columns'}", self._items() if self.rows else 0)
        threads = max(32, -(-self.places // 32) * 32) if self.small else THREADS
        numbers = (np.int32(self.classes), np.int32(self.inner), np.uint32(self.places))
        kernel((self.blocks,), (threads,), (*map(argument, arguments), *numbers))

    def _items(self) -> int:
        items = 1 << (-(-self.classes // 32) - 1).bit_length()
        return items if items <= MOST_ITEMS else 0


@cache
def _defines(items: int) -> str:
    return defines(ITEMS=items)


def _kernel(name: str, items: int) -> Any:
    return library_kernel("softmax", name, _defines(items), ("reduce",))


def _classes(shape: tuple[int, ...], axis: int) -> Classes | None:
    """How the classes lie in memory; None if the places do not lie in their logical order."""
    places = [a for a in memory_axes(len(shape)) if a != axis and shape[a] != 1]
    period = find_period(shape, (shape[axis],), axis)
    if places != sorted(places) or period is None:
        return None
    return Classes(shape[axis], period.inner, math.prod(shape) // max(shape[axis], 1))


def _arrays(arrays: tuple[Array, ...], axis: int, scratch: Scratch) -> tuple[tuple[Array, ...], Classes]:
    """Arrays of one shape as the kernels take them, themselves or as C-ordered copies, and their geometry."""
    shape = tuple(arrays[0].shape)
    found = _classes(shape, axis)
    if found is not None:
        return tuple(map(raw, arrays)), found
    inner = math.prod(shape[axis + 1 :])
    geometry = Classes(shape[axis], inner, math.prod(shape) // max(shape[axis], 1))
    return tuple(in_c_order(array, scratch, f"classes {i}") for i, array in enumerate(arrays)), geometry


def _result(array: Array, axis: int, scratch: Scratch) -> Array:
    """Where a kernel writes what `array` shall hold; `_deliver` brings it there."""
    if _classes(tuple(array.shape), axis) is not None or array.flags.c_contiguous:
        return array
    return scratch.get("classes result", array.size).reshape(array.shape)


def _deliver(result: Array, array: Array) -> None:
    if result is not array:
        copy(result, array)


def softmax_forward(x: Array, y: Array, axis: int, scratch: Scratch) -> None:
    """See `Backend.softmax_forward`."""
    (values,), geometry = _arrays((x,), axis, scratch)
    result = _result(y, axis, scratch)
    geometry.launch("softmax", (values, result))
    _deliver(result, y)


def softmax_backward(y: Array, dy: Array, dx: Array, axis: int, scratch: Scratch) -> None:
    """See `Backend.softmax_backward`."""
    arrays, geometry = _arrays((y, dy), axis, scratch)
    result = _result(dx, axis, scratch)
    geometry.launch("gradient", (*arrays, result))
    _deliver(result, dx)


def _ignored(ignore_label: int | None) -> tuple[int, int]:
    return (0, 0) if ignore_label is None else (1, ignore_label)


def loss_forward(
    x: Array, labels: Array, probabilities: Array, totals: Array, bad_label: Array, axis: int,
    ignore_label: int | None, scratch: Scratch,
) -> None:  # fmt: skip
    """See `Backend.softmax_loss_forward`."""
    (values,), geometry = _arrays((x,), axis, scratch)
    result = _result(probabilities, axis, scratch)
    partial = scratch.get("partial sums", 2 * geometry.blocks, "float64")
    outputs = (result, partial, scratch.tickets(1), totals, bad_label)
    geometry.launch("loss", (values, in_c_order(labels, scratch, "labels"), *outputs, *_ignored(ignore_label)))
    _deliver(result, probabilities)


def loss_backward(
    probabilities: Array, labels: Array, dx: Array, totals: Array, axis: int, ignore_label: int | None, scale: float,
    divide_by_valid: bool, scratch: Scratch,
) -> None:  # fmt: skip
    """See `Backend.softmax_loss_backward`."""
    (values,), geometry = _arrays((probabilities,), axis, scratch)
    result = _result(dx, axis, scratch)
    numbers = (*_ignored(ignore_label), float(scale), divide_by_valid, geometry.classes, geometry.inner, dx.size)
    arrays = (values, in_c_order(labels, scratch, "labels"), result, totals)
    launch(_kernel("loss_gradient", 0), dx.size, (*arrays, *numbers))
    _deliver(result, dx)


def label_ranks(x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, scratch: Scratch) -> None:
    """See `Backend.label_ranks`."""
    (values,), geometry = _arrays((x,), axis, scratch)
    contiguous = ranks.flags.c_contiguous
    result = ranks if contiguous else scratch.get("ranks", ranks.size).reshape(ranks.shape)
    geometry.launch("ranks", (values, in_c_order(labels, scratch, "labels"), result, bad_label))
    _deliver(result, ranks)
