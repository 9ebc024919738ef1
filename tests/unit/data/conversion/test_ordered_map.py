from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from caffepy.data.workers import ordered_map


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
