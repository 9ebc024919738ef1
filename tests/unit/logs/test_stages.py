"""Where the time of waits for data goes."""

from __future__ import annotations

from threading import Thread
from time import perf_counter

import pytest

from caffepy.logs.performance_report import COPYING, DECODING, READING, STAGES, StageTimes, Waits, format_waits


def test_seconds_of_several_threads_add_up() -> None:
    times = StageTimes()
    start = perf_counter() - 1.0

    def work() -> None:
        for _ in range(500):
            times.add(DECODING, start)

    threads = [Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert 2000 <= times.totals()[DECODING] < 2000 * (perf_counter() - start)
    assert times.totals() == times.totals()


def test_a_wait_is_divided_as_the_threads_spent_their_time() -> None:
    waits = Waits()
    waits.add(4.0, dict.fromkeys(STAGES, 0.0) | {READING: 1.0, DECODING: 3.0})
    assert waits.seconds == pytest.approx(dict.fromkeys(STAGES, 0.0) | {READING: 1.0, DECODING: 3.0})
    waits.add(2.0, dict.fromkeys(STAGES, 0.0) | {READING: 6.0, DECODING: 8.0})
    assert (waits.seconds[READING], waits.seconds[DECODING]) == pytest.approx((2.0, 4.0)), "5 seconds of each since"


def test_an_unmeasured_wait_counts_as_reading() -> None:
    waits = Waits()
    waits.add(4.0, {})
    waits.add(0.0, {})
    assert waits.seconds == dict.fromkeys(STAGES, 0.0) | {READING: 4.0}


def test_waits_are_shown_as_shares_the_largest_first() -> None:
    assert format_waits({READING: 0.2, DECODING: 1.0, COPYING: 0.001}, 10.0) == (
        "12 % of the time (decoding 10 %, reading 2 %)"
    )
    assert format_waits({READING: 0.0}, 10.0) == "0 % of the time"
    assert format_waits({READING: 1.0}, 0.0) == "0 % of the time"
