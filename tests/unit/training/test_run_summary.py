"""What the root shows of all ranks, and what lies between their devices."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_nvml import FakeNvml, pci
from fake_world import FakeWorld

from caffepy.distributed.nvml import Nvml
from caffepy.errors import ConfigError, RunError
from caffepy.logs.performance_report import Performance
from caffepy.training import run_summary as run_log
from caffepy.training.run_summary import (
    Device,
    check_trace,
    describe_devices,
    gather_trace,
    gpu_links,
    report_performance,
    transport,
)

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


# -- what is asked of the hardware -----------------------------------------------------------------------


@pytest.mark.parametrize(("gpus", "asked"), [(1, 0), (2, 1)])
def test_nvml_is_loaded_only_where_there_are_links(gpus: int, asked: int, monkeypatch: pytest.MonkeyPatch) -> None:
    opened = []

    @contextmanager
    def open_nvml() -> Iterator[None]:
        opened.append(True)
        yield None

    monkeypatch.setattr(run_log, "open_nvml", open_nvml)
    world: Any = SimpleNamespace(rank=0, local_rank=0, machines=["a"])
    devices = [Device(0, "host", "a", f"0000:0{number}:00.0", f"GPU {number}") for number in range(gpus)]
    run_log._own_links(world, devices)
    assert len(opened) == asked


# -- what lies between two devices -----------------------------------------------------------------------


def gpu(number: int, rank: int = 0, machine: str = "m") -> Device:
    return Device(rank, f"host{machine}", machine, pci(number), f"GPU {number}")


def test_links_between_gpus() -> None:
    links = {pci(0): [pci(3)], pci(3): [pci(0)], pci(1): [], pci(2): []}
    found = gpu_links([pci(number) for number in range(4)], Nvml(FakeNvml(links=links, readable=[(pci(0), pci(1))])))
    assert found[pci(0), pci(3)] == found[pci(3), pci(0)] == "NVLink"
    assert found[pci(0), pci(1)] == "PCIe"
    assert found[pci(0), pci(2)] == "shared memory"
    assert gpu_links([pci(0)], None) == {}


def test_gpus_of_a_switch() -> None:
    nvml = Nvml(FakeNvml(links={pci(0): ["0000:99:00.0"], pci(1): ["0000:99:00.0"]}))
    assert gpu_links([pci(0), pci(1)], nvml)[pci(0), pci(1)] == "NVLink"


def test_what_lies_between_two_devices() -> None:
    cpus = [Device(rank, "a", machine, None, "CPU") for rank, machine in ((0, "m"), (0, "m"), (1, "m"), (2, "n"))]
    assert transport(cpus[0], cpus[1], {}) == "memory of one process"
    assert transport(cpus[0], cpus[2], {}) == "shared memory"
    assert transport(cpus[0], cpus[3], {}) == transport(gpu(0), gpu(0, 1, "n"), {}) == "network"
    links = {"m": {(pci(0), pci(1)): "NVLink"}}
    assert transport(gpu(0), gpu(1), links) == "NVLink"
    assert transport(gpu(0), gpu(1), {}) == "PCIe or NVLink"


def test_lines() -> None:
    places = [gpu(0), gpu(1), gpu(0, 1, "n")]
    links = {"m": {(pci(0), pci(1)): "NVLink"}}
    assert list(describe_devices(places, links)) == [
        f"Device 0: rank 0 on hostm, GPU 0, PCI {pci(0)}",
        f"Device 1: rank 0 on hostm, GPU 1, PCI {pci(1)}",
        f"Device 2: rank 1 on hostn, GPU 0, PCI {pci(0)}",
        "Transport NVLink between devices 0 and 1",
        "Transport network between devices 0 and 2; 1 and 2",
    ]
    assert list(describe_devices(places[:2], links))[-1] == "Transport NVLink between devices of all pairs"
    assert len(list(describe_devices(places[:1], links))) == 1
