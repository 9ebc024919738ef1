"""What connects the GPUs of this machine to each other and to its CPUs, and which MPI is there: for people to read."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from caffepy.parallel.hardware.affinity import cores_near, current_cores, format_cores, parse_cores, pci_folder
from caffepy.parallel.hardware.nvml import Nvml

LEGEND = (
    "NVn: n NVLinks; PIX, PXB: through one or several PCI switches; PHB: through the CPU's host bridge; NODE: between "
    "host bridges of a NUMA node; SYS: between NUMA nodes; !: no direct access to the other's memory"
)
_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
_ASK_MPI = """
import sys
sys.path[:0] = sys.argv[1:]
from caffepy.parallel.communicators.mpi import load_mpi
MPI = load_mpi()
print(MPI.Query_thread(), MPI.Get_library_version())
"""
_SECONDS = 30.0
"""How long an MPI library may take to start."""
_LAUNCHED = re.compile(r"(OMPI_COMM|OMPI_MCA|PMIX|PMI|PRTE|HYDI?|MPI_LOCAL|SLURM)\w*")
"""Variables by which a launcher's processes know each other."""


class Gpu(NamedTuple):
    """A GPU: CUDA's number, and its PCI address."""

    number: int
    bus_id: str


def describe_gpus(gpus: Sequence[Gpu], nvml: Nvml | None, peer: Callable[[int, int], bool]) -> Iterator[str]:
    """Lines: where each GPU is, and a table of the links between them.

    Args:
        gpus: which.
        nvml: the library, where there is one.
        peer: whether one GPU can read another's memory.
    """
    for gpu in gpus:
        near = cores_near(gpu.bus_id)
        node = numa_node(gpu.bus_id)
        where = f"NUMA node {node}" if node is not None else "NUMA node not known"
        yield f"GPU {gpu.number}: PCI {gpu.bus_id}, {where}, near CPU cores {format_cores(near) or 'not known'}"
    if len(gpus) > 1:
        names = [f"GPU {gpu.number}" for gpu in gpus]
        yield " " * 7 + "".join(f"{name:>8}" for name in names)
        for name, row in zip(names, link_table(gpus, nvml, peer), strict=True):
            yield f"{name:7}" + "".join(f"{cell:>8}" for cell in row)
        yield LEGEND


def link_table(gpus: Sequence[Gpu], nvml: Nvml | None, peer: Callable[[int, int], bool]) -> list[list[str]]:
    """What connects each GPU with each other one, see `LEGEND`; arguments as in `describe_gpus`."""
    counts = None if nvml is None else nvml.link_counts([gpu.bus_id for gpu in gpus])

    def cell(i: int, j: int) -> str:
        if i == j:
            return "-"
        path = ""
        if nvml is not None and counts is not None:
            path = f"NV{counts[i][j]}" if counts[i][j] else nvml.common_ancestor(gpus[i].bus_id, gpus[j].bus_id)
        return (path or "?") + ("" if peer(gpus[i].number, gpus[j].number) else "!")

    return [[cell(i, j) for j in range(len(gpus))] for i in range(len(gpus))]


def describe_cpus(system: Path = Path("/sys")) -> Iterator[str]:
    """Lines: the cores of each NUMA node, and those of this process."""
    for path in sorted(system.glob("devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        yield f"NUMA node {path.name[4:]}: CPU cores {format_cores(parse_cores((path / 'cpulist').read_text()))}"
    cores = current_cores()
    yield f"this process: CPU cores {format_cores(cores.numbers)}, {cores.count} busy at a time"


def numa_node(bus_id: str, system: Path = Path("/sys")) -> int | None:
    """The NUMA node that a PCI device belongs to; None where the machine does not say."""
    try:
        node = int((pci_folder(bus_id, system) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def describe_mpi(python: str = sys.executable) -> str:
    """The MPI library that mpi4py uses and how its threads may call it; it is asked in a process of its own."""
    environment = {name: value for name, value in os.environ.items() if not _LAUNCHED.fullmatch(name)}
    command = [python, "-c", _ASK_MPI, *filter(None, sys.path)]
    try:
        answer = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS, env=environment
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"no MPI library: {error}"
    found = re.match(r"([0-3]) (.*)", answer.stdout)
    if found is None:
        return f"no MPI library: {(answer.stderr.strip() or 'it said nothing').splitlines()[-1]}"
    name = " ".join(found[2].split(",")[0].split())
    threads = "every thread may call it" if found[1] == "3" else "the main thread calls it for all others"
    return f"{name}, {_LEVELS[int(found[1])]}: {threads}"
