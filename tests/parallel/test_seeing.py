"""What a run shows of itself: the trace of all devices, and communication in the report."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from subprocess_training import SubprocessTraining

REPORT = (
    r"(Node \{\d\} )?([Rr]oot |     )Solver performance on device (CPU( \d)?): [\d.]+ \* \d+ = [\d.]+ img/sec "
    r"\(\d+ itr in [\d.]+ sec\), communication ([\d.]+) sec, exposed ([\d.]+) sec(, scaling [\d.]+)?"
)


def traced(training: SubprocessTraining, *options: str, **settings: Any) -> tuple[list[dict[str, Any]], list[str]]:
    """A run's trace events and its log's messages."""
    outcome = training.train("--trace", "trace.json", *options, iterations=24, **settings)
    assert outcome.status == 0, outcome.log
    content = json.loads((training.folder / "trace.json").read_text())
    return content["traceEvents"], outcome.logged("] ")


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.mpi)], ids=["threads", "ranks"])
def test_a_trace_holds_every_device(training: SubprocessTraining, ranks: int) -> None:
    devices = ("--cpu", "--threads=1") if ranks else ("--cpu", "--cpu-solvers=2", "--threads=1")
    window, overlap = "--trace-iterations=20:22", "layer_wise_reduce: true"
    events, log = traced(training, window, devices=devices, ranks=ranks, solver_text=overlap)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    wanted = [r"rank 0 on .*: CPU", r"rank 1 on .*: CPU"] if ranks else [r"rank 0 on .*: CPU 0", r"rank 0 on .*: CPU 1"]
    assert all(re.fullmatch(pattern, name) for pattern, name in zip(wanted, names, strict=True)), names
    spans = [event for event in events if event["ph"] == "X"]
    for device in range(2):
        own = [span for span in spans if span["pid"] == device]
        assert {span["args"]["iteration"] for span in own} == {20, 21}
        assert {"forward", "backward", "exchange", "update", "waits"} <= {span["cat"] for span in own}
        assert {"conv", "ip2", "loss"} <= {span["name"] for span in own}
        buckets = [span for span in own if span["cat"].startswith("bucket ")]
        assert bool(buckets) == bool(ranks), "ranks exchange in buckets, threads at once"
        assert all(re.fullmatch(r"[\d.e-]+ MiB", span["name"]) for span in buckets)
    assert max(span["ts"] + span["dur"] for span in spans) < 60e6
    assert any(re.match(r"Wrote a trace of \d+ spans to trace.json", line) for line in log), log
    reports = [line for line in log if "Solver performance" in line]
    assert len(reports) == 2
    for line in reports:
        match = re.fullmatch(REPORT, line)
        assert match, line
        assert 0 < float(match[6]) <= float(match[5])
    (overall,) = (line for line in log if line.startswith("Overall"))
    assert re.fullmatch(r"Overall performance: [\d.]+ img/sec, scaling 0\.\d+", overall), overall


def test_scaling_is_against_the_rate_that_was_given(training: SubprocessTraining) -> None:
    outcome = training.train("--single-rate=1e9", iterations=5)
    (line,) = outcome.logged("Solver performance")
    assert re.search(r"sec\), scaling 0\.000$", line), line
