"""`caffepy device_query`: what this machine has for training, and what is missing."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from caffepy.cli.options import Parser, gpu_list
from caffepy.errors import CaffepyError

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


def run(args: argparse.Namespace) -> int:
    """Print the report to stdout.

    Raises:
        DeviceError, MissingExtraError: GPUs were named and are not there.
    """
    sections = {"GPU": _gpus(args.gpus), "CPU": _cpu(), "MPI": _mpi(), "Libraries": _libraries()}
    for title, lines in sections.items():
        print(f"{title}:")
        for line in lines:
            print(f"  {line}")
    return 0


def _gpus(requested: list[int] | str | None) -> Iterator[str]:
    from caffepy.cli.devices import check_gpus

    try:
        numbers = check_gpus(requested or "all")
    except CaffepyError as error:
        if requested is not None:
            raise
        yield f"none: {error}"
        return
    from caffepy.backend.cuda_device import device_properties

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
    search = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    launcher = shutil.which("mpirun", path=search) or shutil.which("mpiexec", path=search)
    yield f"launcher: {launcher or 'none found'}"
    if launcher is None or _version(("mpi4py",)) is None:
        yield "for several processes: pip install 'caffepy[mpi]' brings mpi4py and mpirun; one process trains without"


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
