from __future__ import annotations

import re
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from subprocess_training import find_mpirun, program_environment

from caffepy.backend.cpu.backend import CpuBackend
from caffepy.cli import bench as command
from caffepy.cli.main import main
from caffepy.distributed import connect as factory
from caffepy.distributed.communicators.local import LocalCommunicator
from caffepy.distributed.processes.world import SingleProcess
from caffepy.errors import ConfigError, PeerError, RunError
from caffepy.scaling import benchmark
from caffepy.scaling.benchmark import AllReduceBenchmark, BenchmarkOptions, Timing
from caffepy.scaling.model import read_measurements

SMALL = BenchmarkOptions(None, 2, "local", (64, 4096), iterations=3, timeout=300.0)


def test_bandwidths_are_those_of_nccl_tests() -> None:
    timing = Timing(size=10**9, count=1, seconds=0.5, wrong=0, devices=4)
    assert timing.algorithm_bandwidth == 2e9
    assert timing.bus_bandwidth == 3e9


@pytest.mark.parametrize(
    ("text", "sizes"), [("4K,64k,1M", (4096, 65536, 2**20)), ("8", (8,)), ("2MiB,1GB", (2**21, 2**30))]
)
def test_sizes(text: str, sizes: tuple[int, ...]) -> None:
    assert command.size_list(text) == sizes


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"communicator": "nccl"}, 1, "--communicator nccl is for GPUs"),
        ({"devices": [0, 1]}, 1, "--communicator local is for arrays in host memory; say --cpu"),
        ({}, 2, "--communicator local connects threads of one process"),
        ({"communicator": "mpi"}, 1, "--communicator mpi connects processes: start several"),
        ({"communicator": "mpi", "dtype": "float16"}, 2, "float16 is not for --communicator mpi"),
        ({"solvers": 1}, 1, "an all-reduce needs several devices"),
        ({"devices": [0], "communicator": "nccl"}, 1, "an all-reduce needs several devices"),
    ],
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], ranks: int, message: str) -> None:
    values: dict[str, Any] = {"devices": None, "solvers": 2, "communicator": "local", "sizes": (64,), **changes}
    with pytest.raises(ConfigError, match=message):
        BenchmarkOptions(**values).check(ranks)


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize("threads", [2, 3])
def test_threads_are_measured(dtype: str, threads: int) -> None:
    timings: list[Timing] = []
    before = set(threading.enumerate())  # other tests leave threads that never end
    options = BenchmarkOptions(None, threads, "local", (4, 1000, 4096), iterations=3, dtype=dtype, timeout=300.0)
    AllReduceBenchmark(SingleProcess(), options, timings.append).run()
    width = np.dtype(dtype).itemsize
    assert [timing.count for timing in timings] == [max(1, 4 // width), 1000 // width, 4096 // width]
    assert all(timing.seconds > 0 and timing.wrong == 0 and timing.devices == threads for timing in timings)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("bench")]


class Broken(LocalCommunicator):
    """Adds a little to one element."""

    def all_reduce(self, array: Any, average: bool = True) -> None:
        super().all_reduce(array, average)
        if self.rank == 1:
            array[3] += 1


def test_wrong_results_are_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(factory, "LocalCommunicator", Broken)
    options = ["--cpu", "--cpu-solvers=2", "--sizes=64", "--iterations=2"]
    assert main(["bench", "allreduce", *options]) == RunError.exit_status
    output = capsys.readouterr()
    # The sum's element on the broken device, and the mean's on both, since it is averaged again and again.
    assert int(output.out.split()[-1]) == 3
    assert "elements were wrong: the connection between the devices, or a device, is broken" in output.err


class Failing(LocalCommunicator):
    """Fails, or hangs, on one device."""

    seconds = 0.0

    def all_reduce(self, array: Any, average: bool = True) -> None:
        if self.rank == 1 and array.size > 100:
            time.sleep(self.seconds)
            raise RunError("the cable was cut")
        super().all_reduce(array, average)


def test_a_device_that_fails_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "LocalCommunicator", Failing)
    begin = time.monotonic()
    with pytest.raises(RunError, match="the cable was cut"):
        AllReduceBenchmark(SingleProcess(), SMALL, lambda timing: None).run()
    assert time.monotonic() - begin < 300.0


def test_a_device_that_hangs_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(factory, "LocalCommunicator", Failing)
    monkeypatch.setattr(Failing, "seconds", 600.0)
    begin = time.monotonic()
    options = BenchmarkOptions(None, 2, "local", (64, 4096), iterations=3, timeout=1.0)
    with pytest.raises(PeerError, match=r"device CPU \d has waited \d+ s in an all-reduce of 4096 bytes"):
        AllReduceBenchmark(SingleProcess(), options, lambda timing: None).run()
    assert time.monotonic() - begin < 300.0


class Late(CpuBackend):
    """A device whose second all-reduce begins late."""

    def from_host(self, values: Any, array: Any) -> None:
        if array.size > 100 and threading.current_thread().name == "bench 1":
            time.sleep(600.0)
        super().from_host(values, array)


def test_a_device_that_is_late_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(benchmark, "create_backend", lambda *arguments: Late(1))
    begin = time.monotonic()
    options = BenchmarkOptions(None, 2, "local", (64, 4096), iterations=3, timeout=1.0)
    late = (
        r"device CPU 0 has waited \d+ s in an all-reduce of 4096 bytes .* for rank 0 on \S+, process \d+, device CPU 1,"
    )
    with pytest.raises(PeerError, match=late):
        AllReduceBenchmark(SingleProcess(), options, lambda timing: None).run()
    assert time.monotonic() - begin < 300.0


@pytest.mark.parametrize(
    ("ranks", "threads"), [(0, 2), pytest.param(2, 1, marks=pytest.mark.mpi), pytest.param(2, 2, marks=pytest.mark.mpi)]
)
def test_the_command(tmp_path: Path, ranks: int, threads: int) -> None:
    launcher = [find_mpirun(), "-np", str(ranks)] if ranks else []
    options = ["--cpu", f"--cpu-solvers={threads}", "--sizes=1K,64K,1M", "--iterations=3", "--timeout=300"]
    result = subprocess.run(
        [*launcher, sys.executable, "-m", "caffepy", "bench", "allreduce", *options],
        capture_output=True,
        text=True,
        timeout=300,
        env=program_environment({}),
    )
    assert result.returncode == 0, result.stderr
    title, head, *rows = result.stdout.splitlines()
    devices = max(ranks, 1) * threads
    assert title.startswith(f"# all-reduce over {devices} devices: {'mpi' if ranks else 'local'}, ")
    assert re.sub(r" {2,}", "|", head) == "#|size (B)|elements|dtype|time (us)|algbw (GB/s)|busbw (GB/s)|wrong"
    assert [int(row.split()[0]) for row in rows] == [1024, 65536, 2**20]
    assert [row.split()[-1] for row in rows] == ["0"] * 3
    (tmp_path / "saved").write_text(result.stdout)
    measured = read_measurements(tmp_path / "saved")
    assert measured.devices == devices
    assert [size for size, _ in measured.samples] == [1024, 65536, 2**20]


@pytest.mark.mpi
def test_mistakes_of_all_ranks_are_said_once() -> None:
    command = [find_mpirun(), "-np", "2", sys.executable, "-m", "caffepy", "bench", "allreduce", "--cpu"]
    result = subprocess.run(
        [*command, "--communicator=local"], capture_output=True, text=True, timeout=300, env=program_environment({})
    )
    assert result.returncode == 2
    assert result.stderr.count("caffepy: error: --communicator local connects threads of one process") == 1
