"""Softmax, softmax loss and label ranks on the GPU: launches kernels/softmax.cu.

Maps a class axis to (outer, classes, inner) in memory. If the positions along the other axes are not in logical order
in memory, the kernels work on a C-ordered copy.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from caffepy.backend.cuda.compiler import MAX_BLOCKS, argument, defines, launch, library_kernel
from caffepy.backend.cuda.memory import CudaMemory, Scratch, add, copy, in_c_order, raw
from caffepy.backend.interface import SoftmaxPrimitives
from caffepy.backend.period import find_period
from caffepy.backend.types import Array, memory_axes

THREADS = 128
"""Threads per block; few, so that a small batch is spread over many multiprocessors."""

ONE_BLOCK = 1024
"""Maximum positions with few classes that one block computes, without waiting for other blocks."""

FEW_CLASSES = 32
"""Maximum classes for which one thread computes a position."""

MAX_ITEMS = 32
"""Classes that a lane keeps in registers."""


@dataclass(frozen=True)
class ClassLayout:
    """An array as (outer, classes, inner) in memory, with positions in logical order, and its launch parameters."""

    classes: int
    inner: int
    positions: int

    @property
    def small(self) -> bool:
        """Whether one block computes everything, one thread per position."""
        return self.positions <= ONE_BLOCK and self.classes <= FEW_CLASSES

    @property
    def rows(self) -> bool:
        """Whether a warp computes a position."""
        return self.inner == 1 and not self.small

    @property
    def blocks(self) -> int:
        """Number of blocks; the same on every device."""
        return 1 if self.small else max(1, min(-(-self.positions * (32 if self.rows else 1) // THREADS), MAX_BLOCKS))

    def launch(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Launch the kernel variant for the sizes."""
        kernel = _kernel(f"{name}_{'rows' if self.rows else 'columns'}", self._items() if self.rows else 0)
        threads = max(32, -(-self.positions // 32) * 32) if self.small else THREADS
        numbers = (np.int32(self.classes), np.int32(self.inner), np.uint32(self.positions))
        kernel((self.blocks,), (threads,), (*map(argument, arguments), *numbers))

    def _items(self) -> int:
        # Powers of two, so that few kernels are compiled for all numbers of classes.
        items = 1 << (-(-self.classes // 32) - 1).bit_length()
        return items if items <= MAX_ITEMS else 0


@cache
def _defines(name: str, items: int) -> str:
    """Return macros that select one of the eleven kernels; compiling all takes ten times as long."""
    return defines(ITEMS=items, **{f"WITH_{name}": 1})


def _kernel(name: str, items: int) -> Any:
    return library_kernel("softmax", name, _defines(name, items), ("reduce",))


def _layout(shape: tuple[int, ...], axis: int) -> ClassLayout | None:
    """Return the layout, or None if the positions are not in logical order in memory."""
    positions = [a for a in memory_axes(len(shape)) if a != axis and shape[a] != 1]
    period = find_period(shape, (shape[axis],), axis)
    if positions != sorted(positions) or period is None:
        return None
    return ClassLayout(shape[axis], period.inner, math.prod(shape) // max(shape[axis], 1))


def _arrays(arrays: tuple[Array, ...], axis: int, scratch: Scratch) -> tuple[tuple[Array, ...], ClassLayout]:
    """Return arrays of one shape in C order (themselves or copies) and their layout."""
    shape = tuple(arrays[0].shape)
    layout = _layout(shape, axis)
    if layout is not None:
        return tuple(map(raw, arrays)), layout
    inner = math.prod(shape[axis + 1 :])
    layout = ClassLayout(shape[axis], inner, math.prod(shape) // max(shape[axis], 1))
    return tuple(in_c_order(array, scratch, f"classes {i}") for i, array in enumerate(arrays)), layout


def _result(array: Array, axis: int, scratch: Scratch) -> Array:
    """Return the array that a kernel writes `array` to; `_deliver` copies it back."""
    if _layout(tuple(array.shape), axis) is not None or array.flags.c_contiguous:
        return array
    return scratch.get("classes result", array.size).reshape(array.shape)


def _deliver(result: Array, array: Array) -> None:
    if result is not array:
        copy(result, array)


def _ignored(ignore_label: int | None) -> tuple[int, int]:
    return (0, 0) if ignore_label is None else (1, ignore_label)


class CudaSoftmax(SoftmaxPrimitives, CudaMemory):
    """`SoftmaxPrimitives` of the GPU."""

    def softmax_forward(self, x: Array, y: Array, axis: int) -> None:
        (values,), layout = _arrays((x,), axis, self._scratch)
        result = _result(y, axis, self._scratch)
        layout.launch("softmax", (values, result))
        _deliver(result, y)

    def softmax_backward(self, y: Array, dy: Array, dx: Array, axis: int) -> None:
        arrays, layout = _arrays((y, dy), axis, self._scratch)
        result = _result(dx, axis, self._scratch)
        layout.launch("gradient", (*arrays, result))
        _deliver(result, dx)

    def softmax_loss_forward(
        self,
        x: Array,
        labels: Array,
        probabilities: Array,
        totals: Array,
        bad_label: Array,
        axis: int,
        ignore_label: int | None,
    ) -> None:
        (values,), layout = _arrays((x,), axis, self._scratch)
        result = _result(probabilities, axis, self._scratch)
        partial = self._scratch.get("partial sums", 2 * layout.blocks, "float64")
        outputs = (result, partial, self._scratch.tickets(1), totals, bad_label)
        layout.launch("loss", (values, in_c_order(labels, self._scratch, "labels"), *outputs, *_ignored(ignore_label)))
        _deliver(result, probabilities)

    def softmax_loss_backward(
        self,
        probabilities: Array,
        labels: Array,
        dx: Array,
        totals: Array | None,
        axis: int,
        ignore_label: int | None,
        scale: float,
    ) -> None:
        (values,), layout = _arrays((probabilities,), axis, self._scratch)
        result = _result(dx, axis, self._scratch)
        numbers = (*_ignored(ignore_label), float(scale), totals is not None, layout.classes, layout.inner, dx.size)
        arrays = (values, in_c_order(labels, self._scratch, "labels"), result, result if totals is None else totals)
        launch(_kernel("loss_gradient", 0), dx.size, (*arrays, *numbers))
        _deliver(result, dx)

    def smooth_loss_forward(
        self, probabilities: Array, labels: Array, totals: Array, axis: int, ignore_label: int | None, smoothing: float
    ) -> None:
        (values,), layout = _arrays((probabilities,), axis, self._scratch)
        partial = self._scratch.get("partial sums", 2 * layout.blocks, "float64")
        change = self._scratch.get("smoothing's change", 2)
        outputs = (partial, self._scratch.tickets(1), change)
        numbers = (*_ignored(ignore_label), float(smoothing))
        layout.launch("smooth", (values, in_c_order(labels, self._scratch, "labels"), *outputs, *numbers))
        add(change[:1], totals[:1])

    def smooth_loss_backward(
        self, labels: Array, dx: Array, totals: Array | None, axis: int, ignore_label: int | None, scale: float
    ) -> None:
        (result,), layout = _arrays((dx,), axis, self._scratch)
        numbers = (*_ignored(ignore_label), float(scale), totals is not None, layout.classes, layout.inner, dx.size)
        arrays = (in_c_order(labels, self._scratch, "labels"), result, result if totals is None else totals)
        launch(_kernel("smooth_gradient", 0), dx.size, (*arrays, *numbers))
        _deliver(result, dx)

    def label_ranks(
        self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, higher_wins: bool = False
    ) -> None:
        (values,), layout = _arrays((x,), axis, self._scratch)
        contiguous = ranks.flags.c_contiguous
        result = ranks if contiguous else self._scratch.get("ranks", ranks.size).reshape(ranks.shape)
        layout.launch("ranks", (values, in_c_order(labels, self._scratch, "labels"), result, bad_label, higher_wins))
        _deliver(result, ranks)
