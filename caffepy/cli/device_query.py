"""`caffepy device_query`: what this machine has for training, and what is missing."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from caffepy.cli.options import Parser
from caffepy.errors import CaffepyError, ConfigError, MissingExtraError
from caffepy.options.types import gpu_list

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
"""What a library is called, and the packages that bring it."""


def add_parser(subparsers: argparse._SubParsersAction[Parser]) -> None:
    """The command's options."""
    parser = subparsers.add_parser(
        "device_query",
        help="show GPUs, CPU, MPI and libraries",
        description="Print what this machine has for training; works without CUDA and MPI and says what is missing.",
    )
    parser.add_argument("--gpu", "--gpus", dest="gpus", type=gpu_list, metavar="LIST", help="only these GPUs")
    parser.add_argument(
        "--topology", action="store_true", help="also the links between GPUs, the CPU cores near them, NCCL and MPI"
    )


def run(args: argparse.Namespace) -> int:
    """Print the report to stdout.

    Raises:
        DeviceError, MissingExtraError: GPUs were named and are not there.
    """
    sections = {"GPU": _gpus(args.gpus), "CPU": _cpu(), "MPI": _mpi(), "Libraries": _libraries()}
    if args.topology:
        sections["Topology"] = _topology(args.gpus)
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
    """The layers that can be loaded; `omp` and `tbb` let several solver threads run kernels at once."""
    layers = []
    for layer, module in (("omp", "omppool"), ("tbb", "tbbpool"), ("workqueue", "workqueue")):
        try:
            importlib.import_module(f"numba.np.ufunc.{module}")
        except ImportError:
            continue
        layers.append(layer)
    return layers or ["none can be loaded"]


def _mpi() -> Iterator[str]:
    from caffepy.parallel.launch.mpirun import find_mpirun

    launcher = None
    try:
        launcher = find_mpirun()
        yield f"launcher: {launcher.path}, {launcher.kind} {launcher.version}"
    except MissingExtraError:
        yield "launcher: none found"
    except ConfigError as error:
        yield f"launcher: {error}"
    if launcher is None or _version(("mpi4py",)) is None:
        yield "for several processes: pip install 'caffepy[mpi]' brings mpi4py and mpirun; one process trains without"


def _topology(requested: list[int] | str | None) -> Iterator[str]:
    from caffepy.parallel.hardware.topology import describe_cpus, describe_mpi

    yield from _gpu_topology(requested)
    yield from describe_cpus()
    yield f"MPI: {describe_mpi()}"


def _gpu_topology(requested: list[int] | str | None) -> Iterator[str]:
    from caffepy.parallel.hardware.nvml import open_nvml
    from caffepy.parallel.hardware.topology import Gpu, describe_gpus
    from caffepy.training.devices import check_gpus

    try:
        numbers = check_gpus(requested or "all")
    except CaffepyError as error:
        yield f"no GPUs: {error}"
        return
    from caffepy.backend.cuda.device import device_properties
    from caffepy.parallel.hardware.nccl_info import nccl_version, peer_access

    with open_nvml() as nvml:
        gpus = [Gpu(number, device_properties(number).pci_bus_id) for number in numbers]
        yield from describe_gpus(gpus, nvml, peer_access)
        if nvml is None:
            yield "NVML cannot be loaded (it needs the driver and nvidia-ml-py): links between GPUs are not known"
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
