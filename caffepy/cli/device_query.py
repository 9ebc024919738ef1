"""`caffepy device_query`: devices and libraries of this machine, and missing components."""

from __future__ import annotations

import importlib
import os
import platform
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from caffepy.cli.options import Command
from caffepy.distributed.nvml import Nvml
from caffepy.distributed.placement import cores_near, current_cores, format_cores, parse_cores, pci_folder
from caffepy.errors import CaffepyError, ConfigError
from caffepy.utils.installation import MissingExtraError, install_command
from caffepy.utils.options import gpus_option, switch

_PACKAGES = (
    ("NumPy", ("numpy",)),
    ("numba", ("numba",)),
    ("protobuf", ("protobuf",)),
    ("CuPy", ("cupy-cuda13x", "cupy-cuda12x", "cupy")),
    ("NCCL", ("nvidia-nccl-cu13", "nvidia-nccl-cu12")),
    ("cuDNN", ("nvidia-cudnn-cu13", "nvidia-cudnn-cu12")),
    ("cuDNN frontend", ("nvidia-cudnn-frontend",)),
    ("mpi4py", ("mpi4py",)),
)
"""Library names, and the packages that provide them."""


@dataclass(kw_only=True)
class DeviceQueryCommand(Command):
    """Show GPUs, CPU, MPI and libraries.

    Print this machine's devices and libraries, and missing components; works without CUDA and MPI.
    """

    gpus: list[int] | str | None = gpus_option("only these GPUs")
    topology: bool = switch("also the links between GPUs, the CPU cores near them, NCCL and MPI")

    def run(self) -> int:
        """Print the report to stdout.

        Raises:
            DeviceError, MissingExtraError: named GPUs do not exist.
        """
        sections = {"GPU": _gpus(self.gpus), "CPU": _cpu(), "MPI": _mpi(), "Libraries": _libraries()}
        if self.topology:
            sections["Topology"] = _topology(self.gpus)
        for title, lines in sections.items():
            print(f"{title}:")
            for line in lines:
                print(f"  {line}")
        return 0


def _gpus(requested: list[int] | str | None) -> Iterator[str]:
    from caffepy.training.devices import check_gpus

    try:
        numbers = check_gpus(requested or "all")
    except CaffepyError as error:
        if requested is not None:
            raise
        yield f"none: {error}"
        return
    from caffepy.backend.cuda.device import device_properties

    for number in numbers:
        gpu = device_properties(number)
        yield (
            f"{gpu.number}: {gpu.name}, {gpu.memory / 2**30:.1f} GiB, capability {gpu.compute_capability}, "
            f"{gpu.multiprocessors} multiprocessors, PCI {gpu.pci_bus_id}"
        )
    yield f"driver for CUDA {gpu.driver_version}, runtime {gpu.runtime_version}"


def _cpu() -> Iterator[str]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    yield f"{_processor()}, {os.cpu_count()} CPUs, {usable} usable by this process"
    yield f"BLAS: {_blas()}"
    yield f"numba threading layers: {', '.join(_threading_layers())}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _blas() -> str:
    import numpy as np

    blas = np.show_config(mode="dicts").get("Build Dependencies", {}).get("blas", {})
    return f"{blas.get('name', 'unknown')} {blas.get('version', '')}".strip()


def _threading_layers() -> list[str]:
    """Return the threading layers that load; `omp` and `tbb` let several solver threads run kernels concurrently."""
    layers = []
    for layer, module in (("omp", "omppool"), ("tbb", "tbbpool"), ("workqueue", "workqueue")):
        try:
            importlib.import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        layers.append(layer)
    return layers or ["none can be loaded"]


def _mpi() -> Iterator[str]:
    from caffepy.distributed.launch.launchers import find_mpirun

    launcher = None
    try:
        launcher = find_mpirun()
        yield f"launcher: {launcher.path}, {launcher.kind} {launcher.version}"
    except MissingExtraError:
        yield "launcher: none found"
    except ConfigError as error:
        yield f"launcher: {error}"
    if launcher is None or _version(("mpi4py",)) is None:
        yield f"for several processes: {install_command('mpi')} brings mpirun; one process trains without"


def _topology(requested: list[int] | str | None) -> Iterator[str]:

    yield from _gpu_topology(requested)
    yield from describe_cpus()
    yield f"MPI: {describe_mpi()}"


def _gpu_topology(requested: list[int] | str | None) -> Iterator[str]:
    from caffepy.distributed.nvml import open_nvml
    from caffepy.training.devices import check_gpus

    try:
        numbers = check_gpus(requested or "all")
    except CaffepyError as error:
        yield f"no GPUs: {error}"
        return
    from caffepy.backend.cuda.device import device_properties
    from caffepy.distributed.nccl_info import nccl_version, peer_access

    with open_nvml() as nvml:
        gpus = [Gpu(number, device_properties(number).pci_bus_id) for number in numbers]
        yield from describe_gpus(gpus, nvml, peer_access)
        if nvml is None:
            yield "NVML cannot be loaded (it needs the driver and nvidia-ml-py): links between GPUs are unknown"
    yield f"NCCL {nccl_version() or 'is not installed'}"


def _libraries() -> Iterator[str]:
    for name, packages in _PACKAGES:
        yield f"{name}: {_version(packages) or 'not installed'}"


def _version(packages: tuple[str, ...]) -> str | None:
    for package in packages:
        try:
            return version(package)
        except PackageNotFoundError:
            continue
    return None


LEGEND = (
    "NVn: n NVLinks; PIX, PXB: through one or several PCI switches; PHB: through the CPU's host bridge; NODE: between "
    "host bridges of a NUMA node; SYS: between NUMA nodes; !: no direct access to the other's memory"
)
_LEVELS = ("MPI_THREAD_SINGLE", "MPI_THREAD_FUNNELED", "MPI_THREAD_SERIALIZED", "MPI_THREAD_MULTIPLE")
_ASK_MPI = """
import sys
sys.path[:0] = sys.argv[1:]
from caffepy.distributed.communicators.mpi import load_mpi
MPI = load_mpi()
print(MPI.Query_thread(), MPI.Get_library_version())
"""
_SECONDS = 30.0
"""Time limit in seconds for an MPI library to start."""
_LAUNCHED = re.compile(r"(OMPI_COMM|OMPI_MCA|PMIX|PMI|PRTE|HYDI?|MPI_LOCAL|SLURM)\w*")
"""Prefixes of environment variables that launchers set."""


class Gpu(NamedTuple):
    """A GPU's CUDA index and PCI address."""

    number: int
    bus_id: str


def describe_gpus(gpus: Sequence[Gpu], nvml: Nvml | None, peer: Callable[[int, int], bool]) -> Iterator[str]:
    """Yield lines with each GPU's location, and a table of the links between GPUs."""
    for gpu in gpus:
        near = cores_near(gpu.bus_id)
        node = numa_node(gpu.bus_id)
        where = f"NUMA node {node}" if node is not None else "NUMA node unknown"
        yield f"GPU {gpu.number}: PCI {gpu.bus_id}, {where}, near CPU cores {format_cores(near) or 'unknown'}"
    if len(gpus) > 1:
        names = [f"GPU {gpu.number}" for gpu in gpus]
        yield " " * 7 + "".join(f"{name:>8}" for name in names)
        for name, row in zip(names, link_table(gpus, nvml, peer), strict=True):
            yield f"{name:7}" + "".join(f"{cell:>8}" for cell in row)
        yield LEGEND


def link_table(gpus: Sequence[Gpu], nvml: Nvml | None, peer: Callable[[int, int], bool]) -> list[list[str]]:
    """Return the table of links between GPUs, see `LEGEND`. Arguments as in `describe_gpus`."""
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
    """Yield lines with the cores of each NUMA node and of this process."""
    for path in sorted(system.glob("devices/system/node/node[0-9]*"), key=lambda path: int(path.name[4:])):
        yield f"NUMA node {path.name[4:]}: CPU cores {format_cores(parse_cores((path / 'cpulist').read_text()))}"
    cores = current_cores()
    yield f"this process: CPU cores {format_cores(cores.numbers)}, {cores.count} busy at a time"


def numa_node(bus_id: str, system: Path = Path("/sys")) -> int | None:
    """Return the NUMA node of a PCI device; None if unknown."""
    try:
        node = int((pci_folder(bus_id, system) / "numa_node").read_text())
    except (OSError, ValueError):
        return None
    return node if node >= 0 else None


def describe_mpi(python: str = sys.executable) -> str:
    """Return the MPI library of mpi4py and its thread support, queried in a subprocess."""
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
        return f"no MPI library: {(answer.stderr.strip() or 'no message').splitlines()[-1]}"
    name = " ".join(found[2].split(",")[0].split())
    threads = "every thread may call it" if found[1] == "3" else "the main thread makes all calls"
    return f"{name}, {_LEVELS[int(found[1])]}: {threads}"
