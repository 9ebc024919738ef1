"""Kernel calls that are written down and made again together, by threads that take what others have not begun."""

from __future__ import annotations

import math
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.backend.cpu.jit.kernel import Floats, Int, kernel
from caffepy.backend.cpu.jit.recording import LONG, MAX_TRUSTED, TRIALS, TRUSTED, WARMING, Program, record, record_all

PASSES = WARMING + TRIALS
"""Of a trial on one thread or on all."""
FAST, SLOW = 2**-13, 2**-12
"""Seconds of a pass, whose sums are exact."""


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
def test_a_program_computes_each_item_of_each_call_once(sizes: list[tuple[int, int]]) -> None:
    arrays = [np.zeros(size, np.float32) for size, _ in sizes]

    def work() -> None:
        for array, (size, threads) in zip(arrays, sizes, strict=True):
            _add_one.run(threads, size, 1, array)

    program = Program([record(work)])
    for passes in range(2, 5):
        program.launch()
        assert all(np.array_equal(array, np.full(len(array), passes)) for array in arrays)


def test_a_call_reads_all_that_the_one_before_wrote() -> None:
    size, calls = 4096, 40
    arrays = [np.zeros(size, np.float32) for _ in range(calls + 1)]

    def work() -> None:
        _add_one.run(3, size, 1, arrays[0])
        for x, y in zip(arrays, arrays[1:], strict=False):
            y[...] = 0
            _add_neighbour.run(3, size, 1, x, y, size)

    program = Program([record(work)])
    for array in arrays[1:]:
        array[...] = 0
    for _ in range(50):
        arrays[0][...] = np.arange(size)
        for array in arrays[1:]:
            array[...] = 0
        program.launch()
        expected = np.arange(1, size + 1)
        np.testing.assert_array_equal(arrays[-1], expected if calls % 2 == 0 else expected[::-1])


def test_what_kernels_do_not_do_is_done_in_its_turn() -> None:
    backend, image = CpuBackend(2), np.zeros((1, 3, 4, 4), np.float32)
    y, z, total = (backend.zeros((1, 3, 4, 4)) for _ in range(3))
    turned = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32).T
    works = [
        lambda: backend.copy(image, y),
        lambda: backend.copy(*turned),  # NumPy's
        lambda: backend.copy(y, z),
        lambda: backend.add(z, total),
    ]
    calls = record_all(works)
    programs = [call.__self__ for call in calls if hasattr(call, "__self__")]
    assert [program.calls for program in programs] == [1, 2]
    assert len(calls) == 3
    assert calls[1] is works[1]
    image[...], turned[0][...] = 5, 7
    for call in calls:
        call()
    assert (z == 5).all()
    assert (total == 5).all()
    assert (turned[1] == 7).all()


def test_a_program_keeps_what_its_kernels_work_on() -> None:
    result = np.zeros(64, np.float32)

    def work() -> None:
        _add_neighbour.run(2, 64, 1, np.ones(64, np.float32), result, 64)

    program = Program([record(work)])
    program.launch()
    np.testing.assert_array_equal(result, 2)


def test_programs_of_several_python_threads_run_at_the_same_time() -> None:
    arrays = [np.zeros(1000, np.float32) for _ in range(3)]
    programs = [Program([record(lambda x=x: _add_one.run(2, 1000, 1, x))]) for x in arrays]  # type: ignore[misc]

    def repeat(program: Any) -> None:
        for _ in range(200):
            program.launch()

    threads = [threading.Thread(target=repeat, args=(program,), daemon=True) for program in programs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert all((array == 201).all() for array in arrays)


def test_neighbours_for_one_thread_are_one_step() -> None:
    arrays = [np.zeros(64, np.float32) for _ in range(6)]

    def work() -> None:
        for array, threads in zip(arrays, (1, 1, 2, 1, 2, 2), strict=True):
            _add_one.run(threads, 64, 1, array)

    program = Program([record(work)])
    assert (program.calls, program.steps) == (6, 5)
    for passes in range(2, 5):
        program.launch()
        assert all((array == passes).all() for array in arrays)


@pytest.mark.parametrize(("slow_on_one", "chosen"), [(True, False), (False, True)])
def test_the_faster_of_one_thread_and_all_is_chosen(
    slow_on_one: bool, chosen: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    array, ways, now, slow = np.zeros(64, np.float32), [], [0.0], [slow_on_one]
    run = Program._run

    def timed(program: Program, on_one: bool) -> None:
        ways.append(on_one)
        now[0] += SLOW if on_one == slow[0] else FAST
        run(program, on_one)

    monkeypatch.setattr(Program, "_run", timed)
    monkeypatch.setattr("caffepy.backend.cpu.jit.recording.time.perf_counter", lambda: now[0])
    program = Program([record(lambda: _add_one.run(2, 64, 1, array))])
    for _ in range(2 * PASSES + 3):
        program.launch()
    assert ways == [False] * PASSES + [True] * PASSES + [chosen] * 3
    assert (array == 2 * PASSES + 4).all()
    slow[0] = not slow_on_one  # the machine has other things to do now
    trusted = TRUSTED if chosen else 2 * TRUSTED  # all threads were the choice before the trial
    for _ in range(math.ceil((trusted * TRIALS * (FAST + SLOW) - 3 * FAST) / SLOW)):
        program.launch()
    ways.clear()
    for _ in range(2 * PASSES + 3):
        program.launch()
    assert ways == [False] * PASSES + [True] * PASSES + [not chosen] * 3


def test_passes_after_a_pause_do_not_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    """They find threads asleep and caches empty; all threads go first, and one thread would gain by that."""
    ways, now, since_pause = [], [0.0], [0]

    def run(_: Program, on_one: bool) -> None:
        ways.append(on_one)
        now[0] += (SLOW if on_one else FAST) + (1e-3 if since_pause[0] < WARMING else 0)
        since_pause[0] += 1

    monkeypatch.setattr(Program, "_run", run)
    monkeypatch.setattr("caffepy.backend.cpu.jit.recording.time.perf_counter", lambda: now[0])
    program = Program([record(lambda: _add_one.run(2, 64, 1, np.zeros(64, np.float32)))])
    for _ in range(2 * PASSES + 3):
        program.launch()
    assert ways == [False] * PASSES + [True] * PASSES + [False] * 3
    ways.clear()
    for _ in range(9):  # a choice holds over pauses, however long they are
        now[0], since_pause[0] = now[0] + 3600, 0
        program.launch()
    assert ways == [False] * 9


def test_a_long_program_is_not_tried_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    array, ways, now = np.zeros(64, np.float32), [], [0.0]

    def slow(_: Program, on_one: bool) -> None:
        ways.append(on_one)
        now[0] += 2 * LONG

    monkeypatch.setattr(Program, "_run", slow)
    monkeypatch.setattr("caffepy.backend.cpu.jit.recording.time.perf_counter", lambda: now[0])
    program = Program([record(lambda: _add_one.run(2, 64, 1, array))])
    for _ in range(2 * TRIALS):
        program.launch()
    assert ways == [False] * 2 * TRIALS


def test_a_program_of_some_milliseconds_is_not_tried_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chosen beside a busy program it would take twice the time for a second, as MobileNet did."""
    ways, now = [], [0.0]

    def slow(_: Program, on_one: bool) -> None:
        ways.append(on_one)
        now[0] += 6e-3

    monkeypatch.setattr(Program, "_run", slow)
    monkeypatch.setattr("caffepy.backend.cpu.jit.recording.time.perf_counter", lambda: now[0])
    program = Program([record(lambda: _add_one.run(2, 64, 1, np.zeros(64, np.float32)))])
    for _ in range(20 * TRIALS):
        program.launch()
    assert not any(ways)


def test_a_program_that_was_slow_once_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    ways, now, seconds = [], [0.0], [2**-7]

    def run(_: Program, on_one: bool) -> None:
        ways.append(on_one)
        now[0] += seconds[0]

    monkeypatch.setattr(Program, "_run", run)
    monkeypatch.setattr("caffepy.backend.cpu.jit.recording.time.perf_counter", lambda: now[0])
    program = Program([record(lambda: _add_one.run(2, 64, 1, np.zeros(64, np.float32)))])
    for _ in range(PASSES + MAX_TRUSTED * PASSES):
        program.launch()
    seconds[0] = LONG / 20
    ways.clear()
    for _ in range(2 * PASSES):
        program.launch()
    assert ways == [False] * PASSES + [True] * PASSES
