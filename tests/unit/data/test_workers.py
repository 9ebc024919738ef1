from __future__ import annotations

import platform
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from caffepy.data.workers import Workers, ordered_map


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_every_item_is_done_once(threads):
    workers = Workers(threads)
    for count in (0, 1, 3, 100):
        done = []
        workers.run(done.append, range(count))
        assert sorted(done) == list(range(count))
    workers.close()


def test_items_are_shared():
    """Two items that wait for each other need two threads."""
    workers, meeting = Workers(2), threading.Barrier(2)
    workers.run(lambda _: meeting.wait(300), range(2))
    workers.close()


def test_the_first_error_is_raised_and_later_work_is_done():
    def fail(item):
        if item == 3:
            raise IndexError("three")

    workers = Workers(3)
    with pytest.raises(IndexError, match="three"):
        workers.run(fail, range(50))
    done = []
    workers.run(done.append, range(5))
    assert sorted(done) == list(range(5))
    workers.close()


def test_no_thread_starts_without_need_and_none_is_left():
    before = threading.active_count()
    workers = Workers(3)
    workers.run(lambda _: None, [1])
    assert threading.active_count() == before
    workers.run(lambda _: None, [1, 2, 3, 4])
    assert threading.active_count() == before + 2
    workers.close()
    workers.close()
    assert threading.active_count() == before


FAULTS = """
import resource
import numpy as np
from caffepy.data.workers import keep_freed_memory

def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(20):
        first, second = np.ones(1 << 22, np.uint8), np.ones(1 << 22, np.uint8)
        del first, second
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults()
print(faults())
keep_freed_memory()
faults()
print(faults())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="for glibc's malloc")
def test_kept_memory_brings_no_page_faults():
    result = subprocess.run([sys.executable, "-c", FAULTS], capture_output=True, text=True, check=True, timeout=60)
    before, after = map(int, result.stdout.split())
    assert before > 20 * 500
    assert after < 20


# -- results in order ------------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [1, 4])
def test_results_come_in_the_order_of_the_items(threads: int):
    def slow(item: int) -> int:
        time.sleep(0.002 if item % 5 == 0 else 0)
        return item * item

    assert list(ordered_map(slow, range(103), threads)) == [item * item for item in range(103)]


def test_no_item_is_taken_long_before_its_result():
    taken = []

    def items() -> Iterator[int]:
        for item in range(10_000):
            taken.append(item)
            yield item

    results = ordered_map(lambda item: item, items(), 2)
    for _ in range(100):
        next(results)
    assert len(taken) < 200
    results.close()


def test_an_error_comes_in_its_turn_and_ends_the_threads():
    def fail(item: int) -> int:
        if item == 9:
            raise ValueError("nine")
        return item

    found = []
    with pytest.raises(ValueError, match="nine"):
        for item in ordered_map(fail, range(1000), 3):
            found.append(item)
    assert found == list(range(8))  # the tasks before the one with the error
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("convert")]
