from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from fake_nvml import FakeNvml, pci
from subprocess_training import find_mpirun, program_environment

from caffepy.cli import device_query as topology
from caffepy.cli.device_query import Gpu, describe_cpus, describe_gpus, describe_mpi, link_table, numa_node
from caffepy.cli.main import main
from caffepy.distributed.nvml import Nvml

GPUS = [Gpu(number, pci(number)) for number in range(3)]
SWITCH = "0000:C1:00.0"


def yes(first: int, second: int) -> bool:
    return True


def test_links_of_gpus_that_are_wired_to_each_other() -> None:
    links = {
        pci(0): [pci(1), pci(1), pci(2)],
        pci(1): [pci(0), pci(0), None],
        pci(2): [pci(0)],
    }
    nvml = Nvml(FakeNvml(links=links, levels={(pci(1), pci(2)): 50, (pci(2), pci(1)): 50}))
    table = link_table(GPUS, nvml, lambda a, b: {a, b} != {1, 2})
    assert table == [["-", "NV2", "NV1"], ["NV2", "-", "SYS!"], ["NV1", "SYS!", "-"]]


def test_links_through_switches_count_as_the_fewer_of_both() -> None:
    nvml = Nvml(FakeNvml(links={pci(0): [SWITCH] * 18, pci(1): [SWITCH] * 18, pci(2): [SWITCH] * 12}))
    assert link_table(GPUS, nvml, yes) == [["-", "NV18", "NV12"], ["NV18", "-", "NV12"], ["NV12", "NV12", "-"]]


def test_without_nvml_cuda_still_knows_who_reads_whose_memory() -> None:
    assert link_table(GPUS[:2], None, lambda a, b: a < b) == [["-", "?"], ["?!", "-"]]


def test_the_table_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topology, "numa_node", lambda bus_id: 1 if bus_id == pci(1) else None)
    monkeypatch.setattr(topology, "cores_near", lambda bus_id: (0, 1, 2, 8) if bus_id == pci(0) else ())
    nvml = Nvml(FakeNvml(levels={(pci(0), pci(1)): 10, (pci(1), pci(0)): 10}))
    assert list(describe_gpus(GPUS[:2], nvml, yes)) == [
        "GPU 0: PCI 0000:01:00.0, NUMA node unknown, near CPU cores 0-2,8",
        "GPU 1: PCI 0000:02:00.0, NUMA node 1, near CPU cores unknown",
        "          GPU 0   GPU 1",
        "GPU 0         -     PIX",
        "GPU 1       PIX       -",
        topology.LEGEND,
    ]
    assert len(list(describe_gpus(GPUS[:1], nvml, yes))) == 1


def test_numa_nodes(tmp_path: Path) -> None:
    for node, cores in (("0", "0-3"), ("10", "8-11"), ("2", "4-7")):
        folder = tmp_path / "devices/system/node" / f"node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cores}\n")
    *nodes, own = describe_cpus(tmp_path)
    assert nodes == ["NUMA node 0: CPU cores 0-3", "NUMA node 2: CPU cores 4-7", "NUMA node 10: CPU cores 8-11"]
    assert re.fullmatch(r"this process: CPU cores [\d,-]+, \d+ busy at a time", own)
    device = tmp_path / "bus/pci/devices/0000:1b:00.0"
    device.mkdir(parents=True)
    (device / "numa_node").write_text("1\n")
    assert numa_node("0000:1B:00.0", tmp_path) == 1
    (device / "numa_node").write_text("-1\n")
    assert numa_node("0000:1B:00.0", tmp_path) is None
    assert numa_node("0000:99:00.0", tmp_path) is None


def test_mpi_that_cannot_be_started_is_one_line(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho lost >&2; echo 'MPI is broken' >&2; exit 1\n")
    python.chmod(0o755)
    assert describe_mpi(str(python)) == "no MPI library: MPI is broken"
    python.write_text("#!/bin/sh\necho '1 MPICH Version:      4.2.0'\n")
    assert describe_mpi(str(python)) == ("MPICH Version: 4.2.0, MPI_THREAD_FUNNELED: the main thread makes all calls")
    assert "No such file" in describe_mpi(str(tmp_path / "absent"))


@pytest.mark.parametrize("ranks", [0, pytest.param(2, marks=pytest.mark.mpi)])
def test_the_command_works_without_gpus(ranks: int) -> None:
    launcher = [find_mpirun(), "-np", str(ranks)] if ranks else []
    command = [*launcher, sys.executable, "-m", "caffepy", "device_query", "--topology"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=program_environment({}))
    assert result.returncode == 0, result.stderr
    for pattern in (r"^Topology:$", r"^  this process: CPU cores ", r"^  MPI: .*(MPI_THREAD_|no MPI library)"):
        assert len(re.findall(pattern, result.stdout, re.MULTILINE)) == max(ranks, 1), result.stdout


def test_without_the_option_nothing_is_started(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device_query"]) == 0
    assert "Topology" not in capsys.readouterr().out
