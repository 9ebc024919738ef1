"""What the report says of speeds, and where the time of waits for data goes."""

from __future__ import annotations

from dataclasses import replace
from threading import Thread
from time import perf_counter

import pytest

from caffepy.logs.performance_report import (
    COPYING,
    DECODING,
    READING,
    STAGES,
    Performance,
    StageTimes,
    Waits,
    format_performance,
    format_report,
    format_waits,
)


def test_a_device_is_reported_as_nvidia_caffe_does() -> None:
    line = format_performance(Performance(batch=64, iterations=998, seconds=19.5, device="0", made=1000))
    assert line == "Solver performance on device 0: 51.18 * 64 = 3275 img/sec (1000 itr in 19.5 sec)"


def test_a_run_too_short_to_time_is_zero() -> None:
    assert format_performance(Performance(batch=64, made=2)).endswith("CPU: 0 * 64 = 0 img/sec (2 itr in 0 sec)")


def test_large_figures_have_no_exponent() -> None:
    assert "= 123457 img/sec" in format_performance(Performance(batch=123457, iterations=10, seconds=10.0))


def test_one_device_needs_no_totals() -> None:
    (line,) = format_report([[Performance(batch=2, iterations=10, seconds=5.0, made=12)]])
    assert line == "Solver performance on device CPU: 2 * 2 = 4 img/sec (12 itr in 5 sec)"


def test_ranks_and_devices_add_up() -> None:
    device = Performance(batch=10, iterations=20, seconds=2.0, device="0")
    lines = format_report([[device, device], [device, device]])
    assert [line.split("Solver")[0] for line in lines[:2]] == ["Node {0} root ", "Node {0}      "]
    assert lines[2] == "Node {0} multi-GPU performance: 200 img/sec"
    assert lines[5] == "Node {1} multi-GPU performance: 200 img/sec"
    assert lines[6] == "Overall performance: 400 img/sec"
    assert len(lines) == 7
    assert format_report([[device, device]])[-1] == "Overall multi-GPU performance: 200 img/sec"
    cpu = replace(device, device="CPU 1")
    assert format_report([[cpu, cpu]])[-1] == "Overall performance: 200 img/sec"


def test_communication_comes_behind_what_parsers_read() -> None:
    device = Performance(batch=10, iterations=20, seconds=2.0, device="0", communication=0.5, exposed=0.2, made=22)
    line = format_performance(device)
    plain = "Solver performance on device 0: 10 * 10 = 100 img/sec (22 itr in 2 sec)"
    assert line == f"{plain}, communication 0.5 sec, exposed 0.2 sec, scaling 0.900"
    assert format_performance(replace(device, communication=None, exposed=None)) == plain


def test_scaling_is_against_a_device_that_was_measured_alone() -> None:
    device = Performance(batch=10, iterations=20, seconds=2.0, device="0")
    lines = format_report([[device, device], [device, replace(device, seconds=4.0)]], 125.0)
    assert [line.rsplit(", ", 1)[1] for line in lines] == [
        *["scaling 0.800"] * 3,
        "scaling 0.800",
        "scaling 0.400",
        "scaling 0.600",
        "scaling 0.700",
    ]
    assert lines[-1].startswith("Overall performance: 350 img/sec, ")


def test_a_device_that_only_waited_has_no_scaling() -> None:
    waited = Performance(batch=10, iterations=20, seconds=2.0, communication=2.5, exposed=2.5)
    assert format_performance(waited).endswith(", communication 2.5 sec, exposed 2.5 sec")
    short = Performance(batch=10, communication=0.0, exposed=0.0)
    assert format_performance(short).endswith("(0 itr in 0 sec), communication 0 sec, exposed 0 sec")


def test_waits_for_data_of_all_devices_are_reported() -> None:
    device = Performance(batch=2, iterations=10, seconds=5.0, waits={"reading": 0.0, "decoding": 1.0})
    other = replace(device, waits={"reading": 1.0, "decoding": 1.0})
    lines = format_report([[device, other]])
    assert lines[-2] == "Waited for data 30 % of the time (decoding 20 %, reading 10 %)"
    assert "decoding" in lines[-1]
    assert "more cores" in lines[-1]


def test_short_waits_need_no_advice() -> None:
    waited = Performance(batch=2, iterations=10, seconds=5.0, waits={"reading": 0.1, "decoding": 0.0})
    assert format_report([[waited]])[-1] == "Waited for data 2 % of the time (reading 2 %)"
    assert format_report([[replace(waited, seconds=0.0)]])[-1].startswith("Solver performance"), "nothing was timed"


# -- stages of waits -------------------------------------------------------------------------------------


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
