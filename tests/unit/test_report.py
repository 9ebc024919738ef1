from __future__ import annotations

from caffepy.report import Performance, format_performance, format_report


def test_a_device_is_reported_as_nvidia_caffe_does() -> None:
    line = format_performance(Performance(batch=64, iterations=998, seconds=19.5, device="0"))
    assert line == "Solver performance on device 0: 51.18 * 64 = 3275 img/sec (998 itr in 19.5 sec)"


def test_a_run_too_short_to_time_is_zero() -> None:
    assert format_performance(Performance(batch=64)).endswith("CPU: 0 * 64 = 0 img/sec (0 itr in 0 sec)")


def test_large_figures_have_no_exponent() -> None:
    assert "= 123457 img/sec" in format_performance(Performance(batch=123457, iterations=10, seconds=10.0))


def test_one_device_needs_no_totals() -> None:
    (line,) = format_report([[Performance(batch=2, iterations=10, seconds=5.0)]])
    assert line == "Root Solver performance on device CPU: 2 * 2 = 4 img/sec (10 itr in 5 sec)"


def test_ranks_and_devices_add_up() -> None:
    device = Performance(batch=10, iterations=20, seconds=2.0, device="0")
    lines = format_report([[device, device], [device, device]])
    assert [line.split("Solver")[0] for line in lines[:2]] == ["Node {0} root ", "Node {0}      "]
    assert lines[2] == "Node {0} performance: 200 img/sec"
    assert lines[5] == "Node {1} performance: 200 img/sec"
    assert lines[6] == "Overall performance: 400 img/sec"
    assert len(lines) == 7
