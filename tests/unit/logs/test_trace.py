from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from training import TINY, build_solver

from caffepy.backend.types import HostTimer
from caffepy.errors import RunError
from caffepy.logs.trace import NO_TRACE, Trace, write_trace

SOLVER = """
base_lr: 0.1 lr_policy: "fixed" max_iter: 8 snapshot_after_train: false test_iter: 3 test_interval: 2 iter_size: 2
"""


class FakeTimedEvent:
    """An event of a device whose clock runs at half the host's pace."""

    def __init__(self) -> None:
        self.time = time.perf_counter() / 2

    def seconds_since(self, earlier: FakeTimedEvent) -> float:
        return self.time - earlier.time


def spans(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [event for event in events if event["ph"] == "X"]


def rows(events: list[dict[str, Any]]) -> list[str]:
    return [event["args"]["name"] for event in events if event["name"] == "thread_name"]


def test_nobody_traces_by_default() -> None:
    NO_TRACE.begin(3)
    with NO_TRACE.span("forward"), NO_TRACE.paused():
        NO_TRACE.add("bucket 0", "all-reduce", 0.0, 1.0)
    NO_TRACE.watch_device(FakeTimedEvent, lambda: None)
    assert NO_TRACE.events(0, "GPU 0") == []
    assert not NO_TRACE.active


def test_spans_are_taken_within_the_window_only() -> None:
    trace = Trace(range(2, 4))
    for iteration in range(6):
        trace.begin(iteration)
        with trace.span("forward"):
            pass
        with trace.paused(), trace.span("forward", "captured"):
            pass
        trace.add("bucket 1", "all-reduce", 1.0, 2.5)
    found = trace.spans()
    assert [(span.row, span.name, span.iteration) for span in found] == [
        ("forward", "forward", 2),
        ("bucket 1", "all-reduce", 2),
        ("forward", "forward", 3),
        ("bucket 1", "all-reduce", 3),
    ]
    assert found[1].end - found[1].start == 1.5


def test_the_default_window_follows_the_first_iterations_of_this_run() -> None:
    trace = Trace()
    for iteration in range(1000, 1050):
        trace.begin(iteration)
        with trace.span("update"):
            pass
    assert [span.iteration for span in trace.spans()] == list(range(1005, 1015))


def test_a_device_that_works_behind_the_host_has_rows_of_its_own() -> None:
    trace = Trace(range(1))
    trace.watch_device(FakeTimedEvent, lambda: None)
    trace.begin(0)
    with trace.span("forward", "conv1"):
        time.sleep(0.01)
    host, device = trace.spans()
    assert (host.row, device.row, device.name) == ("forward", "device: forward", "conv1")
    assert device.end - device.start == pytest.approx((host.end - host.start) / 2, rel=0.2)
    assert rows(trace.events(0, "GPU 0")) == ["forward", "device: forward"]


def test_captured_work_has_the_times_of_each_replay() -> None:
    now = [0.0]
    device_timer = HostTimer(9, lambda: now[0])

    def work() -> None:
        with trace.span("forward", "conv1"):
            now[0] += 1
        assert trace.record_timed_event is not None
        first = trace.record_timed_event()
        now[0] += 0.5
        trace.add_device("bucket 1", "4 MiB", first, trace.record_timed_event())
        with trace.span("waits", "a barrier"):
            trace.add("bucket 2", "host", 0.0, 1.0)

    trace = Trace(range(4, 6))
    trace.begin(3)
    with trace.recording(device_timer, 9):
        work()
    assert not trace.active and trace.spans() == []
    for iteration in range(4, 6):
        trace.begin(iteration)
        now[0] += 10
        # What a device does in a replay: it takes the times again, and runs none of the host's code.
        for index, passed in enumerate((0, 1, 0, 0.5)):
            now[0] += passed
            device_timer.start(index)
        trace.replayed()
    found = trace.spans()
    assert [(span.row, span.name, span.iteration) for span in found] == [
        ("device: forward", "conv1", 4),
        ("device: bucket 1", "4 MiB", 4),
        ("device: forward", "conv1", 5),
        ("device: bucket 1", "4 MiB", 5),
    ]
    assert [span.end - span.start for span in found] == pytest.approx([1, 0.5, 1, 0.5])
    assert found[2].start - found[0].start == pytest.approx(11.5)


def test_more_spans_than_timestamps_are_a_mistake() -> None:
    trace = Trace()
    wanted = pytest.raises(AssertionError, match="more spans than its timer has timestamps for")
    with wanted, trace.recording(HostTimer(3), 3), trace.span("forward"):
        assert trace.record_timed_event is not None
        trace.record_timed_event()


def test_the_file_is_what_viewers_read(tmp_path: Path) -> None:
    devices = []
    for rank in range(2):
        trace = Trace(range(1))
        trace.begin(0)
        with trace.span("update"), trace.span("waits", "a barrier"):
            pass
        trace.add("bucket 0", "all-reduce", time.perf_counter(), time.perf_counter() + 0.5)
        devices.append(trace.events(rank, f"rank {rank}"))
    path = tmp_path / "trace.json"
    assert write_trace(path, devices) == 6
    content = json.loads(path.read_text())
    events = content["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {0: "rank 0", 1: "rank 1"}
    assert rows(events) == ["update", "waits", "bucket 0"] * 2
    assert min(event["ts"] for event in spans(events)) == 0
    assert max(event["ts"] for event in spans(events)) < 60e6
    assert all({"name", "ph", "ts", "dur", "pid", "tid"} <= event.keys() for event in spans(events))
    assert [e["dur"] for e in spans(events) if e["name"] == "all-reduce"] == pytest.approx([5e5, 5e5], rel=1e-3)


def test_a_trace_that_cannot_be_written_says_where(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"absent/trace\.json: cannot be written"):
        write_trace(tmp_path / "absent" / "trace.json", [])


def test_a_solver_traces_its_stages_and_each_layer() -> None:
    trace = Trace(range(3, 5))
    with build_solver(SOLVER, TINY, trace=trace) as solver:
        solver.solve()
    found = trace.spans()
    assert {span.iteration for span in found} == {3, 4}
    one = [(span.row, span.name) for span in found if span.iteration == 3]
    forward = [("forward", name) for name in ("data", "ip", "loss", "forward")]
    backward = [("backward", name) for name in ("loss", "ip", "backward")]
    exchange = [("exchange", "exchange"), ("update", "update")]
    assert one == (forward + backward) * 2 + exchange + [("test", "test")]
    whole = next(span for span in found if (span.row, span.name) == ("forward", "forward"))
    layers = [span for span in found if span.row == "forward" and span.name != "forward"][:3]
    assert all(whole.start <= layer.start <= layer.end <= whole.end for layer in layers)


def test_rows_stand_in_the_order_of_an_iteration() -> None:
    trace = Trace(range(1))
    trace.begin(0)
    for row in ("bucket 10", "waits", "bucket 9", "update", "forward", "feed"):
        trace.add(row, "", 0.0, 1.0)
    assert rows(trace.events(0, "")) == ["feed", "forward", "update", "waits", "bucket 9", "bucket 10"]
