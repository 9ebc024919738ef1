"""Softmax, its loss and label ranks: launches kernels/classes.cu.

Owns the map from a class axis to (outer, classes, inner) in memory. Where the places of the other axes do not lie in
their logical order, a C-ordered copy is worked on instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from caffepy.backend.base import Array
from caffepy.backend.cuda_device import cupy
from caffepy.backend.cuda_kernels import THREADS, launch, launch_blocks, library_kernel
from caffepy.backend.cuda_layout import find_period, memory_axes
from caffepy.backend.cuda_memory import Scratch, raw, reshaped

LOSS_BLOCKS = 64
"""Most blocks of the loss's first stage; fixed, so that the order of the sum depends on no device."""


@dataclass(frozen=True)
class Classes:
    """An array in memory as (outer, classes, inner), its places in logical order."""

    classes: int
    inner: int
    places: int

    def launch(self, name: str, arguments: tuple[Any, ...]) -> None:
        """Run the form of a kernel that fits: a warp a place if classes are neighbours, else a thread."""
        rows = self.inner == 1
        kernel = library_kernel("classes", f"{name}_{'rows' if rows else 'columns'}")
        launch(kernel, self.places * (32 if rows else 1), (*arguments, self.classes, self.inner, self.places))


def _classes(shape: tuple[int, ...], axis: int) -> Classes | None:
    """How the classes lie in memory; None if the places do not lie in their logical order."""
    places = [a for a in memory_axes(len(shape)) if a != axis and shape[a] != 1]
    period = find_period(shape, (shape[axis],), axis)
    if places != sorted(places) or period is None:
        return None
    return Classes(shape[axis], period.inner, math.prod(shape) // max(shape[axis], 1))


def _in_c_order(array: Array, axis: int) -> tuple[Array, Classes]:
    """A C-ordered copy as (outer, classes, inner), and its geometry."""
    inner = math.prod(array.shape[axis + 1 :])
    copy = cupy.ascontiguousarray(array).reshape(-1, array.shape[axis], inner)
    return copy, Classes(array.shape[axis], inner, array.size // max(array.shape[axis], 1))


def softmax_forward(x: Array, y: Array, axis: int) -> None:
    """See `Backend.softmax_forward`."""
    found = _classes(tuple(x.shape), axis)
    if found is not None:
        found.launch("softmax", (raw(x), raw(y)))
        return
    copy, geometry = _in_c_order(x, axis)
    geometry.launch("softmax", (copy, copy))
    cupy.copyto(y, copy.reshape(y.shape))


def softmax_backward(y: Array, dy: Array, dx: Array, axis: int) -> None:
    """See `Backend.softmax_backward`."""
    found = _classes(tuple(y.shape), axis)
    if found is not None:
        found.launch("gradient", (raw(y), raw(dy), raw(dx)))
        return
    values, geometry = _in_c_order(y, axis)
    gradient, _ = _in_c_order(dy, axis)
    geometry.launch("gradient", (values, gradient, gradient))
    cupy.copyto(dx, gradient.reshape(dx.shape))


def _ignored(ignore_label: int | None) -> tuple[int, int]:
    return (0, 0) if ignore_label is None else (1, ignore_label)


def loss_forward(
    x: Array, labels: Array, probabilities: Array, totals: Array, bad_label: Array, axis: int,
    ignore_label: int | None, scratch: Scratch,
) -> None:  # fmt: skip
    """See `Backend.softmax_loss_forward`."""
    softmax_forward(x, probabilities, axis)
    found = _classes(tuple(x.shape), axis)
    values, geometry = (raw(probabilities), found) if found else _in_c_order(probabilities, axis)
    blocks = max(1, min(LOSS_BLOCKS, -(-geometry.places // THREADS)))
    partial = scratch.get("partial sums", 2 * blocks, "float64")
    numbers = (geometry.classes, geometry.inner, *_ignored(ignore_label), geometry.places)
    arguments = (values, reshaped(labels, (-1,)), partial, bad_label, *numbers)
    launch_blocks(library_kernel("classes", "loss_partial"), (blocks,), (THREADS,), arguments)
    launch_blocks(library_kernel("classes", "loss_totals"), (1,), (THREADS,), (partial, blocks, totals))


def loss_backward(
    probabilities: Array, labels: Array, dx: Array, totals: Array, axis: int, ignore_label: int | None, scale: float,
    divide_by_valid: bool,
) -> None:  # fmt: skip
    """See `Backend.softmax_loss_backward`."""
    found = _classes(tuple(dx.shape), axis)
    values, geometry = (raw(probabilities), found) if found else _in_c_order(probabilities, axis)
    result = raw(dx) if found else values
    numbers = (geometry.classes, geometry.inner, *_ignored(ignore_label), float(scale), divide_by_valid, dx.size)
    kernel = library_kernel("classes", "loss_gradient")
    launch(kernel, dx.size, (values, reshaped(labels, (-1,)), result, totals, *numbers))
    if not found:
        cupy.copyto(dx, result.reshape(dx.shape))


def label_ranks(x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int) -> None:
    """See `Backend.label_ranks`."""
    found = _classes(tuple(x.shape), axis)
    values, geometry = (raw(x), found) if found else _in_c_order(x, axis)
    result = reshaped(ranks, (-1,))
    geometry.launch("ranks", (values, reshaped(labels, (-1,)), result, bad_label))
    if result.data.ptr != ranks.data.ptr:
        cupy.copyto(ranks, result.reshape(ranks.shape))
