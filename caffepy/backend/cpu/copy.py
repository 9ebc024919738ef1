"""Fills and copies on the CPU; kernels for images that lie in memory in different orders, or are parts of others."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Floats, Int, Ints, kernel
from caffepy.backend.cpu.jit.kernel_graph import CURRENT, note_host_work
from caffepy.backend.cpu.jit.threads import GRAIN
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import CopyPrimitives
from caffepy.backend.layout import memory_order
from caffepy.backend.types import Array


@kernel
def copy_rows(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, source_n: Int, source_c: Int, source_h: Int, source_w: Int, target: Floats,
    target_n: Int, target_c: Int, target_h: Int, target_w: Int, channels: Int, height: Int, width: Int,
) -> None:  # fmt: skip
    """Items are rows (n, h); steps along the axes count elements."""
    for item in range(begin, end):
        n, h = item // height, item % height
        at, to = n * source_n + h * source_h, n * target_n + h * target_h
        if source_c == 1 and target_c == 1:
            for w in range(width):
                first, start = at + w * source_w, to + w * target_w
                for c in range(channels):
                    target[start + c] = source[first + c]
        else:
            for c in range(channels):
                first, start = at + c * source_c, to + c * target_c
                for w in range(width):
                    target[start + w * target_w] = source[first + w * source_w]


@kernel
def copy_lines(  # noqa: PLR0913 -- a kernel
    begin: Int, end: Int, source: Floats, source_step: Int, target: Floats, target_step: Int, length: Int, part: Int,
    parts: Int,
) -> None:  # fmt: skip
    """Items are (line, part of it); steps from one line to the next count elements."""
    for item in range(begin, end):
        line, first = item // parts, item % parts * part
        at, to = line * source_step + first, line * target_step + first
        for i in range(min(part, length - first)):
            target[to + i] = source[at + i]


@kernel
def copy_numbers(begin: Int, end: Int, source: Ints, target: Floats) -> None:
    """Items are elements."""
    for i in range(begin, end):
        target[i] = source[i]


def is_whole(array: Any, dtype: str) -> bool:
    """Whether kernels may read the array as one line of elements in memory order."""
    return type(array) is np.ndarray and array.dtype == dtype and bool(memory_order(array).flags.c_contiguous)


def are_whole_numbers(source: Any, target: Any) -> bool:
    """Whether `copy_whole_numbers` can copy them: int32 to float32, each in one piece and in the same order."""
    return source.shape == target.shape and is_whole(source, "int32") and is_whole(target, "float32")


def copy_whole_numbers(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, for what `are_whole_numbers` allows."""
    copy_numbers.run(threads, source.size, GRAIN, source, target)


def is_images(source: Any, target: Any) -> bool:
    """Whether `copy_images` can copy them: float32 (N, C, H, W) or (N, C, D, H, W) of one shape, apart in memory."""
    return are_plain(source, target) and source.ndim in (4, 5)


def are_plain(source: Any, target: Any) -> bool:
    """Whether both are float32 arrays of one shape that kernels may read and write, apart in memory."""
    return (
        type(source) is np.ndarray
        and source.shape == target.shape
        and source.dtype == target.dtype == np.float32
        and target.flags.writeable
        and source.flags.aligned
        and not np.may_share_memory(source, target)
    )


def copy_images(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, for what `is_images` allows; volumes one after the other, each as D images."""
    if source.ndim == 5:
        for volume, copied in zip(source, target, strict=True):
            copy_images(threads, volume.swapaxes(0, 1), copied.swapaxes(0, 1))
        return
    n, channels, height, width = source.shape
    steps, others = _steps(source), _steps(target)
    grain = max(1, GRAIN // max(1, channels * width))
    if steps[1] == others[1] == 1 and steps[3] == others[3] == channels:  # whole rows
        channels, width = channels * width, 1
    copy_rows.run(threads, n * height, grain, source, *steps, target, *others, channels, height, width)


def are_lines(source: Any, target: Any) -> bool:
    """Whether `copy_as_lines` can copy them: one is cut along an axis, the other likewise or whole."""
    if not (are_plain(source, target) and source.size):
        return False
    lines = _lines(source), _lines(target)
    if lines[0] is None or lines[1] is None:
        return False
    lengths = {lines[0][0], lines[1][0]}
    return len(lengths) == 1 or max(lengths) == source.size


def copy_as_lines(threads: int, source: Any, target: Any) -> None:
    """target[...] = source, for what `are_lines` allows."""
    (first, step), (second, other) = (_lines(array) or (0, 0) for array in (source, target))
    length = min(first, second)  # where they are not alike, the other is one line
    steps = (step if first == length else length, other if second == length else length)
    part = min(length, GRAIN)
    parts = -(-length // part)
    copy_lines.run(
        threads, source.size // length * parts, max(1, GRAIN // part), source, steps[0], target, steps[1], length, part,
        parts,
    )  # fmt: skip


def _lines(array: Any) -> tuple[int, int] | None:
    """(length, step): the array as equal lines of elements next to each other; None where it is none."""
    axes = [(size, stride // array.itemsize) for size, stride in zip(array.shape, array.strides, strict=True)]
    axes = [axis for axis in axes if axis[0] != 1]
    length = 1
    while axes and axes[-1][1] == length:
        length *= axes.pop()[0]
    if not axes:
        return length, length
    step = axes[-1][1]
    evenly = all(outer[1] == size * inner for outer, (size, inner) in pairwise(axes))
    return (length, step) if evenly else None


def _steps(images: Any) -> tuple[int, ...]:
    """Strides in elements; channels and columns that are the only ones count as next to each other."""
    n, c, h, w = (stride // images.itemsize for stride in images.strides)
    _, channels, _, width = images.shape
    return n, 1 if channels == 1 else c, h, channels if width == 1 else w


@kernel
def _add(begin: Int, end: Int, source: Floats, destination: Floats) -> None:
    for i in range(begin, end):
        destination[i] += source[i]


class CpuCopy(CopyPrimitives, CpuMemory):
    """`CopyPrimitives` of the CPU."""

    def fill(self, array: Array, value: float) -> None:
        note_host_work()
        array[...] = value

    def copy(self, source: Array, destination: Array) -> None:
        if is_images(source, destination):
            copy_images(self.threads, source, destination)
        elif CURRENT.calls is not None and are_lines(source, destination):  # else NumPy is as fast
            copy_as_lines(self.threads, source, destination)
        elif are_whole_numbers(source, destination):
            copy_whole_numbers(self.threads, source, destination)
        else:
            note_host_work()
            destination[...] = source

    def add(self, source: Array, destination: Array) -> None:
        if self._dense(source) and self._dense(destination) and source.dtype == np.float32:
            _add.run(self.threads, source.size, GRAIN, source, destination)
        else:
            note_host_work()
            destination += source

    def from_host(self, host: Any, destination: Array) -> None:
        assert np.shape(host) == destination.shape, (np.shape(host), destination.shape)
        self.copy(host, destination)

    def to_host(self, array: Array) -> Any:
        note_host_work()
        return np.array(array, order="C", copy=True)
