"""What the root shows of all ranks after training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from fake_world import FakeWorld

from caffepy.errors import ConfigError, RunError
from caffepy.logs.performance_report import Performance
from caffepy.training.run_summary import check_trace, gather_trace, report_performance

SPAN: dict[str, Any] = {"ph": "X", "pid": 0, "tid": 0, "name": "conv", "ts": 5.0, "dur": 1.0}


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records]


@pytest.mark.parametrize("rank", [0, 1])
def test_the_root_alone_reports_all_ranks(caplog: pytest.LogCaptureFixture, rank: int) -> None:
    with caplog.at_level(logging.INFO):
        report_performance(FakeWorld(2, rank), [Performance(64, 100, 10.0)], single_rate=800.0)
    lines = logged(caplog)
    assert len(lines) == (3 if rank == 0 else 0)
    if rank == 0:
        assert lines[1].startswith("Node {1} root Solver performance on device CPU: 10 * 64 = 640 img/sec")
        assert lines[2] == "Overall performance: 1280 img/sec, scaling 0.800"


def test_the_folder_of_a_trace_is_looked_for_on_the_root(tmp_path: Path) -> None:
    path = tmp_path / "absent" / "trace.json"
    with pytest.raises(ConfigError, match="absent/trace.json: there is no folder .*absent; make it first"):
        check_trace(path, 0)
    check_trace(path, 1)
    check_trace(tmp_path / "trace.json", 0)
    check_trace(None, 0)


def test_a_trace_that_cannot_be_written_is_refused_on_the_root(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be written: Is a directory; name a file"):
        check_trace(tmp_path, 0)
    check_trace(tmp_path, 1)


def test_the_root_writes_the_events_of_all_ranks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "trace.json"
    gather_trace(FakeWorld(2, 1), path, [[SPAN]])
    assert not path.exists()
    with caplog.at_level(logging.INFO):
        gather_trace(FakeWorld(2), path, [[SPAN], [SPAN]])
    assert len(json.loads(path.read_text())["traceEvents"]) == 4
    assert logged(caplog) == [f"Wrote a trace of 4 spans to {path}: open it in https://ui.perfetto.dev"]


def test_an_empty_trace_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    gather_trace(FakeWorld(), tmp_path / "trace.json", [[]])
    (message,) = logged(caplog)
    assert message.endswith("trace.json is empty: no iteration of --trace-iterations was trained")


def test_nothing_is_gathered_without_a_trace() -> None:
    world = FakeWorld(2, answer=lambda rank, value: pytest.fail("the ranks meet for nothing"))
    gather_trace(world, None, [[SPAN]])
