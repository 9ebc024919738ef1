"""Primitives in captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import backend_arrays as arrays
import backend_oracle as oracle
import numpy as np
import pytest
from backend_arrays import dirty, normal, stored
from primitive_checks.batch_norm import rounded_to_device, statistics
from primitive_checks.elementwise import mixed, two

from caffepy.backend import Backend, Geometry, LrnWindow, RandomStream
from caffepy.backend.types import DTYPES
from caffepy.layers.activation import tanh_gradient


def everything(backend: Backend) -> tuple[Callable[[], None], list[Any]]:
    """Work that calls the primitives in all the ways that need memory of their own, and what it writes."""
    shape = (6, 16, 8, 8)
    x, dy = (stored(backend, seed, shape, "float16")[0] for seed in (1, 2))
    rows, labels = stored(backend, 3, (4, 5, 6), "float32")[0], arrays.to_device(backend, np.ones((4, 6)))
    across, gain = arrays.to_device(backend, np.ones((6, 8, 8))), stored(backend, 4, (16, 8), "float32")[0]
    results = [arrays.dirty(backend, shape, "bfloat16") for _ in range(4)] + [arrays.dirty(backend, shape)]
    y, dx, wide, dropped, softmax = results
    pooled, mask = arrays.dirty(backend, (6, 16, 4, 4), "float16"), arrays.dirty(backend, (6, 16, 4, 4), "uint8")
    sums, by_position, total = arrays.dirty(backend, (16,)), arrays.dirty(backend, (16, 8)), arrays.dirty(backend, ())
    flat, probabilities, totals = backend.zeros((6 * 1024,)), backend.zeros((4, 5, 6)), backend.zeros((2,))
    bad, ranks = arrays.to_device(backend, [-1], "int32"), backend.zeros((6, 8, 8))
    counter, halves = arrays.to_device(backend, np.array([1, 2], np.uint64), "uint64"), backend.zeros(shape, "float16")
    window = Geometry((2, 2), (2, 2), (0, 0), (1, 1))

    def work() -> None:
        backend.fill(wide, 0)
        backend.apply(mixed, (x, dy, gain, 0.1), (y,))
        backend.reduce(two, (x, dy), (sums, sums))
        backend.reduce(two, (x, dy), (by_position, by_position))
        backend.reduce(two, (x, dy), (total, total))
        backend.copy(x, flat.reshape(shape))
        backend.copy(x[:, 2:10], wide[:, 4:12])
        backend.add(dy, wide)
        backend.pool_max_forward(x, pooled, mask, window)
        backend.pool_max_backward(pooled, mask, halves, window)
        backend.lrn_across_forward(x, halves, None, LrnWindow(5, 1e-2, 0.75))
        backend.lrn_across_backward(x, None, None, dy, halves, LrnWindow(5, 1e-2, 0.75))
        backend.dropout(halves, dropped, 0.5, RandomStream(1, 2), counter)
        backend.copy(halves, dx)
        backend.copy(halves, softmax)
        backend.softmax_forward(softmax, softmax, 2)
        backend.label_ranks(softmax, across, ranks, bad, 1)
        backend.softmax_loss_forward(rows, labels, probabilities, totals, bad, 1, None)
        backend.softmax_loss_backward(probabilities, labels, probabilities, totals, 1, None, 1.0)

    return work, [*results, pooled, mask, sums, by_position, total, flat, probabilities, totals, ranks, halves]


def test_everything_can_be_captured(backend: Any) -> None:
    """A second run neither allocates nor waits; a graph of it computes the same, also after others needed memory."""
    work, results = everything(backend)
    work()
    expected = [backend.to_host(array) for array in results]
    backend.stream.begin_capture()
    work()
    graph = backend.stream.end_capture()
    for array in results:
        backend.fill(array, 55)
    large = backend.zeros((300, 2000))
    backend.reduce(two, (large, large), (backend.zeros((2000,)), backend.zeros((2000,))))
    backend.softmax_forward(backend.zeros((7, 40, 30, 31)), backend.zeros((7, 40, 30, 31)), 2)
    for _ in range(2):
        graph.launch(backend.stream)
    for ours, array in zip(expected, results, strict=True):
        assert np.array_equal(ours, backend.to_host(array))


def test_a_captured_dropout_follows_its_counter(backend: Any) -> None:
    x, out = arrays.to_device(backend, np.ones((8, 64))), backend.zeros((8, 64))
    counter = arrays.to_device(backend, np.array([0, 0], np.uint64), "uint64")
    stream = RandomStream(3, 4)
    backend.dropout(x, out, 0.5, stream, counter)
    backend.stream.begin_capture()
    backend.dropout(x, out, 0.5, stream, counter)
    graph = backend.stream.end_capture()
    for count in [(1, 0), (1, 8), (2, 2**33)]:
        backend.from_host(np.array(count, np.uint64), counter)
        graph.launch(backend.stream)
        chances = oracle.random_uniform((8, 64), 3, 4, *count)
        assert np.array_equal(backend.to_host(out), np.where(chances >= 0.5, 2, 0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_captured_batch_norm_gives_the_same_bits_each_time(backend: Any, dtype: str) -> None:
    shape = (8, 64, 56, 56)
    x, _ = rounded_to_device(backend, normal(1, shape), dtype)
    dy, _ = rounded_to_device(backend, normal(2, shape), dtype)
    s = statistics(backend, 64)
    y, dx, dbias = dirty(backend, shape, dtype), dirty(backend, shape, dtype), dirty(backend, (64,))
    sums = dirty(backend, (64,)), dirty(backend, (64,))

    def work() -> None:
        backend.batch_norm_measure(x, s.device)
        backend.batch_norm_forward(x, s.device, y, relu=True)
        backend.batch_norm_backward_sums(x, [dy], s.device, sums, True)
        backend.batch_norm_backward_data(x, dy, s.device, sums, dx, True)
        backend.relu_backward(y, dy, dx, dbias, False)
        backend.activation_backward(tanh_gradient, y, dx, dx, dbias, True)

    def outcome() -> list[Any]:
        return [backend.to_host(a) for a in (s.device.mean, s.device.inverse, y, *sums, dx, dbias)]

    work()
    eager = outcome()
    graph = backend.capture(work)
    for _ in range(3):
        for array in (y, dx, dbias, *sums):
            backend.fill(array, 5)
        graph.launch()
        for once, again in zip(eager, outcome(), strict=True):
            assert np.array_equal(once, again)
