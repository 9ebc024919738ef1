"""Cutting a list of steps into graphs, with a backend that records what it is asked to capture."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from caffepy.net.executor import GraphSegments, Segment


class Recorder:
    """Stands for a backend: a captured step is run when its graph is launched, and not before."""

    def __init__(self) -> None:
        self.graphs: list[list[str]] = []
        self.done: list[str] = []
        self.capturing: list[str] | None = None

    def capture(self, *works: Callable[[], None]) -> Any:
        self.capturing = []
        for work in works:
            work()
        names, self.capturing = self.capturing, None
        self.graphs.append(names)
        recorder = self

        class Graph:
            def launch(self) -> None:
                recorder.done.extend(f"{name}*" for name in names)

        return Graph()

    def segment(self, name: str, blocker: str | None = None) -> Segment:
        def run() -> None:
            (self.done if self.capturing is None else self.capturing).append(name)

        return Segment(name, run, blocker)


def test_segments_run_in_order_and_graphs_leave_out_what_cannot_be_captured(caplog: pytest.LogCaptureFixture) -> None:
    recorder = Recorder()
    segments = [
        recorder.segment("a"),
        recorder.segment("b"),
        recorder.segment("c", "it asks the user"),
        recorder.segment("d"),
    ]
    work = GraphSegments(recorder, segments)  # type: ignore[arg-type]
    work.run()
    assert recorder.done == ["a", "b", "c", "d"]
    assert not work.captured
    recorder.done.clear()
    with caplog.at_level(logging.DEBUG, "caffepy"):
        work.capture()
    assert work.captured
    assert recorder.graphs == [["a", "b"], ["d"]]
    assert recorder.done == []
    assert "c runs outside of the captured graphs: it asks the user" in [r.getMessage() for r in caplog.records]
    for _ in range(2):
        work.run()
    assert recorder.done == ["a*", "b*", "c", "d*"] * 2


def test_dropped_graphs_run_segment_by_segment() -> None:
    recorder = Recorder()
    work = GraphSegments(recorder, [recorder.segment("a")])  # type: ignore[arg-type]
    work.capture()
    work.drop()
    work.run()
    assert recorder.done == ["a"]
    assert not work.captured
