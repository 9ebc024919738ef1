"""Softmax, softmax loss and label ranks along one axis of arrays seen as (outer, classes, inner)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from caffepy.backend.cpu.jit.kernel import Doubles, Float, Floats, Int, Ints, Kernel, kernel, note_host_work
from caffepy.backend.cpu.jit.vector import exponential
from caffepy.backend.cpu.memory import CpuMemory
from caffepy.backend.interface import SoftmaxPrimitives
from caffepy.backend.types import Array, is_plain

GRAIN = 2048
"""Minimum elements for a second thread."""
SMALLEST = 1.1754943508222875e-38
"""FLT_MIN: Caffe's lower bound of a probability before its logarithm."""


@kernel
def forward_rows(begin: Int, end: Int, x: Floats, y: Floats, classes: Int) -> None:
    """Items are positions with contiguous classes. Four independent accumulators hide latency."""
    whole = classes // 4 * 4
    for item in range(begin, end):
        base = item * classes
        a = b = c = d = x[base]
        for i in range(base, base + whole, 4):
            a, b, c, d = max(a, x[i]), max(b, x[i + 1]), max(c, x[i + 2]), max(d, x[i + 3])
        for i in range(base + whole, base + classes):
            a = max(a, x[i])
        largest = max(max(a, b), max(c, d))
        for i in range(base, base + classes):
            y[i] = exponential(x[i] - largest)
        # These are float64: a sum over many classes keeps its digits.
        s, t, u, v = 0.0, 0.0, 0.0, 0.0
        for i in range(base, base + whole, 4):
            s, t, u, v = s + y[i], t + y[i + 1], u + y[i + 2], v + y[i + 3]
        for i in range(base + whole, base + classes):
            s += y[i]
        factor = 1.0 / ((s + t) + (u + v))
        for i in range(base, base + classes):
            y[i] = y[i] * factor


@kernel
def forward(begin: Int, end: Int, x: Floats, y: Floats, classes: Int, inner: Int) -> None:
    """Items are positions (outer, inner)."""
    for item in range(begin, end):
        base = (item // inner) * classes * inner + item % inner
        # The largest value is subtracted so that no exponential overflows; the quotient is the same.
        largest = x[base]
        for c in range(classes):
            largest = max(largest, x[base + c * inner])
        total = 0.0
        for c in range(classes):
            value = exponential(x[base + c * inner] - largest)
            y[base + c * inner] = value
            total += value
        for c in range(classes):
            y[base + c * inner] /= total


@kernel
def backward(begin: Int, end: Int, y: Floats, dy: Floats, dx: Floats, classes: Int, inner: Int) -> None:
    """Items are positions (outer, inner)."""
    for item in range(begin, end):
        base = (item // inner) * classes * inner + item % inner
        total = 0.0
        for c in range(classes):
            total += y[base + c * inner] * dy[base + c * inner]
        for c in range(classes):
            at = base + c * inner
            dx[at] = y[at] * (dy[at] - total)


@kernel
def loss(
    begin: Int,
    end: Int,
    probabilities: Floats,
    labels: Floats,
    losses: Doubles,
    counted: Ints,
    classes: Int,
    inner: Int,
    ignoring: Int,
    ignored: Int,
) -> None:
    """Items are positions. counted becomes 1, 0 (ignored) or -1 (label out of range)."""
    for item in range(begin, end):
        label = int(labels[item])
        losses[item] = 0
        if ignoring == 1 and label == ignored:
            counted[item] = 0
        elif label < 0 or label >= classes:
            counted[item] = -1
        else:
            counted[item] = 1
            at = (item // inner) * classes * inner + label * inner + item % inner
            losses[item] = -math.log(max(probabilities[at], SMALLEST))


@kernel
def loss_backward(
    begin: Int,
    end: Int,
    probabilities: Floats,
    labels: Floats,
    dx: Floats,
    classes: Int,
    inner: Int,
    ignoring: Int,
    ignored: Int,
    scale: Float,
) -> None:
    """Items are positions."""
    for item in range(begin, end):
        label = int(labels[item])
        base = (item // inner) * classes * inner + item % inner
        factor = scale
        if ignoring == 1 and label == ignored:
            factor = scale * 0
        for c in range(classes):
            dx[base + c * inner] = probabilities[base + c * inner] * factor
        if 0 <= label < classes:
            dx[base + label * inner] -= factor


@kernel
def smooth(
    begin: Int,
    end: Int,
    probabilities: Floats,
    labels: Floats,
    losses: Doubles,
    classes: Int,
    inner: Int,
    ignoring: Int,
    ignored: Int,
) -> None:
    """Items are positions: the mean loss of all classes minus the loss of the label's class, 0 if ignored."""
    for item in range(begin, end):
        label = int(labels[item])
        losses[item] = 0
        if (ignoring == 0 or label != ignored) and 0 <= label < classes:
            base = (item // inner) * classes * inner + item % inner
            total = 0.0
            for c in range(classes):
                total -= math.log(max(probabilities[base + c * inner], SMALLEST))
            losses[item] = total / classes + math.log(max(probabilities[base + label * inner], SMALLEST))


@kernel
def smooth_backward(
    begin: Int,
    end: Int,
    labels: Floats,
    dx: Floats,
    classes: Int,
    inner: Int,
    ignoring: Int,
    ignored: Int,
    scale: Float,
) -> None:
    """Items are positions."""
    for item in range(begin, end):
        label = int(labels[item])
        if (ignoring == 0 or label != ignored) and 0 <= label < classes:
            base = (item // inner) * classes * inner + item % inner
            for c in range(classes):
                dx[base + c * inner] -= scale / classes
            dx[base + label * inner] += scale


@kernel
def count_higher(
    begin: Int, end: Int, x: Floats, labels: Floats, out: Floats, classes: Int, inner: Int, higher_wins: Int
) -> None:
    """Items are positions; -1 if the label is out of range."""
    for item in range(begin, end):
        label = int(labels[item])
        base = (item // inner) * classes * inner + item % inner
        if label < 0 or label >= classes:
            out[item] = -1
        else:
            own = x[base + label * inner]
            count = 0
            for c in range(classes):
                value = x[base + c * inner]
                if value > own or (value == own and (c > label or (c < label and higher_wins == 0))):
                    count += 1
            out[item] = count


def _extents(shape: tuple[int, ...], axis: int) -> tuple[int, int, int] | None:
    """Return (outer, classes, inner) in memory order with positions in logical order; None if the orders differ."""
    if not is_plain(shape):
        if axis != 1:
            return None
        shape = (shape[0] * math.prod(shape[2:]), shape[1])
    return math.prod(shape[:axis]), shape[axis], math.prod(shape[axis + 1 :])


class _ClassView:
    """Arrays seen as (outer, classes, inner), copied to and from C order if the memory order differs."""

    def __init__(self, threads: int, axis: int, shape: tuple[int, ...]) -> None:
        self.threads = threads
        extents = _extents(shape, axis)
        self.plain = extents is None
        self.outer, self.classes, self.inner = extents or (
            math.prod(shape[:axis]),
            shape[axis],
            math.prod(shape[axis + 1 :]),
        )

    def of(self, array: Any) -> Any:
        """Return the array, or a C-ordered copy."""
        if not self.plain:
            return array
        note_host_work()
        return np.ascontiguousarray(array)

    def back(self, result: Any, array: Any) -> None:
        """Copy a result that `of` created for `array` back to it."""
        if self.plain:
            array[...] = result

    def run(self, entry: Kernel, *arguments: Any) -> None:
        """Run a kernel whose items are the positions."""
        entry.run(self.threads, self.outer * self.inner, GRAIN // self.classes, *arguments)


def _ignored(ignore_label: int | None) -> tuple[int, int]:
    return (0, 0) if ignore_label is None else (1, ignore_label)


def _note_bad(bad: Any, bad_label: Any) -> None:
    indices = np.flatnonzero(bad)
    if indices.size:
        bad_label[0] = indices[0]


class CpuSoftmax(SoftmaxPrimitives, CpuMemory):
    """`SoftmaxPrimitives` of the CPU."""

    def softmax_forward(self, x: Array, y: Array, axis: int) -> None:
        view = _ClassView(self.threads, axis, x.shape)
        result = view.of(y)
        if view.inner == 1:
            view.run(forward_rows, view.of(x), result, view.classes)
        else:
            view.run(forward, view.of(x), result, view.classes, view.inner)
        view.back(result, y)

    def softmax_backward(self, y: Array, dy: Array, dx: Array, axis: int) -> None:
        view = _ClassView(self.threads, axis, y.shape)
        result = view.of(dx)
        view.run(backward, view.of(y), view.of(dy), result, view.classes, view.inner)
        view.back(result, dx)

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
        self.softmax_forward(x, probabilities, axis)
        view = _ClassView(self.threads, axis, probabilities.shape)
        count = view.outer * view.inner
        # A loss per position, added afterwards: the sum's order does not depend on the threads.
        losses, counted = np.empty(count), np.empty(count, np.int32)
        labels = np.ascontiguousarray(labels)
        view.run(
            loss, view.of(probabilities), labels, losses, counted, view.classes, view.inner, *_ignored(ignore_label)
        )
        totals[0] = losses.sum()
        totals[1] = np.count_nonzero(counted > 0)
        _note_bad(counted < 0, bad_label)

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
        if totals is not None:
            scale = scale / max(float(totals[1]), 1.0)
        view = _ClassView(self.threads, axis, probabilities.shape)
        result = view.of(dx)
        labels = np.ascontiguousarray(labels)
        view.run(
            loss_backward,
            view.of(probabilities),
            labels,
            result,
            view.classes,
            view.inner,
            *_ignored(ignore_label),
            scale,
        )
        view.back(result, dx)

    def smooth_loss_forward(
        self, probabilities: Array, labels: Array, totals: Array, axis: int, ignore_label: int | None, smoothing: float
    ) -> None:
        view = _ClassView(self.threads, axis, probabilities.shape)
        losses = np.empty(view.outer * view.inner)
        labels = np.ascontiguousarray(labels)
        view.run(smooth, view.of(probabilities), labels, losses, view.classes, view.inner, *_ignored(ignore_label))
        totals[0] += smoothing * losses.sum()

    def smooth_loss_backward(
        self, labels: Array, dx: Array, totals: Array | None, axis: int, ignore_label: int | None, scale: float
    ) -> None:
        if totals is not None:
            scale = scale / max(float(totals[1]), 1.0)
        view = _ClassView(self.threads, axis, dx.shape)
        result = view.of(dx)
        labels = np.ascontiguousarray(labels)
        view.run(smooth_backward, labels, result, view.classes, view.inner, *_ignored(ignore_label), scale)
        view.back(result, dx)

    def label_ranks(
        self, x: Array, labels: Array, ranks: Array, bad_label: Array, axis: int, higher_wins: bool = False
    ) -> None:
        view = _ClassView(self.threads, axis, x.shape)
        result = np.empty(view.outer * view.inner, np.float32)
        view.run(
            count_higher, view.of(x), np.ascontiguousarray(labels), result, view.classes, view.inner, int(higher_wins)
        )
        ranks[...] = result.reshape(ranks.shape)
        _note_bad(result < 0, bad_label)
