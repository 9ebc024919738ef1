"""Kernel calls that are captured and made again together, by threads that take what others have not begun."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.jit.kernel import Floats, Int, KernelGraph, ThreadChoice, kernel

FAST, SLOW = 1e-4, 2e-4
"""Seconds of a pass."""


@kernel
def _add_one(begin: Int, end: Int, x: Floats) -> None:
    for i in range(begin, end):
        x[i] += 1


@kernel
def _add_neighbour(begin: Int, end: Int, x: Floats, y: Floats, size: Int) -> None:
    """y[i] += x[size - 1 - i]: what other threads have written in the call before."""
    for i in range(begin, end):
        y[i] += x[size - 1 - i]


@settings(max_examples=40, derandomize=True)
@given(sizes=st.lists(st.tuples(st.integers(1, 70), st.integers(1, 5)), min_size=1, max_size=6))
def test_a_launch_computes_each_item_of_each_call_once(sizes: list[tuple[int, int]]) -> None:
    arrays = [np.zeros(size, np.float32) for size, _ in sizes]

    def work() -> None:
        for array, (size, threads) in zip(arrays, sizes, strict=True):
            _add_one.run(threads, size, 1, array)

    graph = KernelGraph([work])
    assert (graph.kernel_calls, graph.host_works) == (len(sizes), 0)
    assert not any(array.any() for array in arrays), "capturing computes nothing"
    for passes in range(1, 4):
        graph.launch()
        assert all(np.array_equal(array, np.full(len(array), passes)) for array in arrays)


def test_a_call_reads_all_that_the_one_before_wrote() -> None:
    size, calls = 4096, 40
    arrays = [np.zeros(size, np.float32) for _ in range(calls + 1)]

    def work() -> None:
        _add_one.run(3, size, 1, arrays[0])
        for x, y in zip(arrays, arrays[1:], strict=False):
            _add_neighbour.run(3, size, 1, x, y, size)

    graph = KernelGraph([work])
    for _ in range(50):
        arrays[0][...] = np.arange(size)
        for array in arrays[1:]:
            array[...] = 0
        graph.launch()
        expected = np.arange(1, size + 1)
        np.testing.assert_array_equal(arrays[-1], expected if calls % 2 == 0 else expected[::-1])


def test_what_kernels_do_not_do_is_done_in_its_turn() -> None:
    backend, image = CpuBackend(2), np.full((1, 3, 4, 4), 5, np.float32)
    y, z, total = (backend.zeros((1, 3, 4, 4)) for _ in range(3))
    turned = np.full((2, 3), 7, np.float32), np.zeros((3, 2), np.float32).T
    graph = KernelGraph(
        [
            lambda: backend.copy(image, y),
            lambda: backend.copy(*turned),  # NumPy's
            lambda: backend.copy(y, z),
            lambda: backend.add(z, total),
        ]
    )
    assert (graph.kernel_calls, graph.host_works) == (3, 1)
    assert not turned[1].any(), "nothing is computed before the launch"
    for launches in (1, 2):
        graph.launch()
        assert (z == 5).all()
        assert (total == 5 * launches).all()
        assert (turned[1] == 7).all()


def test_work_that_is_half_the_hosts_is_called_as_a_whole() -> None:
    counts = np.zeros(64, np.float32)
    backend, sums = CpuBackend(2), np.zeros((2, 3), np.float32)

    def work() -> None:
        _add_one.run(2, 64, 1, counts)
        backend.fill(sums, 4)

    graph = KernelGraph([work])
    assert (graph.kernel_calls, graph.host_works) == (0, 1)
    graph.launch()
    assert (counts == 1).all()
    assert (sums == 4).all()


def test_an_error_of_the_work_ends_the_capture() -> None:
    array = np.zeros(64, np.float32)

    def work() -> None:
        raise KeyError("x")

    with pytest.raises(KeyError, match="x"):
        KernelGraph([work])
    _add_one.run(2, 64, 1, array)  # called, not captured
    assert (array == 1).all()


def test_a_graph_keeps_what_its_kernels_work_on() -> None:
    result = np.zeros(64, np.float32)

    def work() -> None:
        _add_neighbour.run(2, 64, 1, np.ones(64, np.float32), result, 64)

    graph = KernelGraph([work])
    graph.launch()
    np.testing.assert_array_equal(result, 1)


def test_graphs_of_several_python_threads_run_at_the_same_time() -> None:
    arrays = [np.zeros(1000, np.float32) for _ in range(3)]
    graphs = [KernelGraph([lambda x=x: _add_one.run(2, 1000, 1, x)]) for x in arrays]  # type: ignore[misc]

    def repeat(graph: Any) -> None:
        for _ in range(200):
            graph.launch()

    threads = [threading.Thread(target=repeat, args=(graph,), daemon=True) for graph in graphs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert all((array == 200).all() for array in arrays)


def test_calls_for_one_thread_and_for_several_follow_each_other() -> None:
    arrays = [np.zeros(64, np.float32) for _ in range(6)]

    def work() -> None:
        for array, threads in zip(arrays, (1, 1, 2, 1, 2, 2), strict=True):
            _add_one.run(threads, 64, 1, array)

    graph = KernelGraph([work])
    for passes in range(1, 60):  # on one thread and on all
        graph.launch()
        assert all((array == passes).all() for array in arrays)


def passes_on_one(choice: ThreadChoice, count: int, seconds: Callable[[bool], float]) -> float:
    """Which share of some passes runs on one thread, given how long each takes there and on all threads."""
    on_one = 0
    for _ in range(count):
        on_one += choice.on_one
        choice.record(seconds(choice.on_one))
    return on_one / count


@pytest.mark.parametrize("one_is_faster", [False, True])
def test_the_faster_of_one_thread_and_all_is_chosen(one_is_faster: bool) -> None:
    choice = ThreadChoice()

    def chosen(count: int, faster: bool) -> bool:
        share = passes_on_one(choice, count, lambda on_one: FAST if on_one == faster else SLOW)
        assert share < 0.2 or share > 0.8
        return share > 0.8

    passes_on_one(choice, 40, lambda on_one: FAST if on_one == one_is_faster else SLOW)
    assert chosen(60, one_is_faster) is one_is_faster
    # The machine has other things to do now.
    passes_on_one(choice, 3000, lambda on_one: SLOW if on_one == one_is_faster else FAST)
    assert chosen(60, not one_is_faster) is not one_is_faster


def test_passes_after_a_pause_do_not_choose() -> None:
    """They find threads asleep and caches empty; all threads go first, and one thread would gain by that."""
    choice, late = ThreadChoice(), [3]

    def seconds(on_one: bool) -> float:
        late[0] -= 1
        return (SLOW if on_one else FAST) + (1e-3 if late[0] >= 0 else 0)

    passes_on_one(choice, 40, seconds)
    assert passes_on_one(choice, 9, seconds) == 0


@pytest.mark.parametrize("seconds", [4e-3, 6e-3, 0.1])
def test_a_long_pass_is_not_tried_on_one_thread(seconds: float) -> None:
    """Chosen beside a busy program it would take twice the time for a second, as MobileNet did."""
    assert passes_on_one(ThreadChoice(), 200, lambda on_one: seconds) == 0


def test_a_program_that_was_slow_once_is_tried_again() -> None:
    choice = ThreadChoice()
    assert passes_on_one(choice, 100, lambda on_one: 8e-3) == 0
    assert passes_on_one(choice, 200_000, lambda on_one: FAST if on_one else SLOW) > 0.5
