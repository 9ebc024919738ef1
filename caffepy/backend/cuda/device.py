"""GPU enumeration. This module is the first to import CuPy and cuDNN, and reports missing components.

Translates their errors into caffepy's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from caffepy.errors import DeviceError, OutOfMemoryError
from caffepy.utils.files import load_library
from caffepy.utils.installation import MissingExtraError, cuda_extra, install_command

__all__ = [
    "GIBIBYTE",
    "PURPOSE",
    "DeviceProperties",
    "check_device",
    "cupy",
    "device_count",
    "device_memory",
    "device_names",
    "device_properties",
    "free_memory",
    "has_tensor_cores",
    "import_cudnn",
]

PURPOSE = "to train on a GPU"
_NO_DRIVER = "this machine has no NVIDIA driver"


def _has_driver() -> bool:
    """Return whether the NVIDIA driver's library is installed."""
    try:
        load_library("libcuda.so.1")
    except (OSError, AttributeError):
        return False
    return True


try:
    import cupy
except ImportError as error:
    if _has_driver():
        raise MissingExtraError("CuPy", cuda_extra(), PURPOSE) from error
    raise DeviceError(
        f"{_NO_DRIVER}: train on the CPU with --cpu, or install the driver, and CuPy, which is not there either: "
        f"{install_command(cuda_extra())}"
    ) from error

GIBIBYTE = 2**30

AMPERE = 80
"""Ten times the compute capability from which on tensor cores support TF32 and bfloat16."""


@dataclass(frozen=True)
class DeviceProperties:
    """Properties of one GPU for `caffepy device_query`.

    Args:
        number: CUDA device number in this process.
        name: product name.
        memory: bytes of device memory.
        compute_capability: e.g. ``9.0``.
        multiprocessors: number of streaming multiprocessors.
        pci_bus_id: e.g. ``0000:1B:00.0``.
        driver_version: newest CUDA version that the driver supports, e.g. ``13.0``.
        runtime_version: version of the CUDA runtime that CuPy uses.
    """

    number: int
    name: str
    memory: int
    compute_capability: str
    multiprocessors: int
    pci_bus_id: str
    driver_version: str
    runtime_version: str


def _version(number: int) -> str:
    return f"{number // 1000}.{number % 1000 // 10}"


def device_count() -> int:
    """Return how many GPUs this process can use; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def device_names() -> list[str]:
    """Return the product names of all GPUs, in CUDA's order."""
    return [device_properties(number).name for number in range(device_count())]


def device_properties(number: int) -> DeviceProperties:
    """Return the properties of one GPU.

    Raises:
        DeviceError: the GPU does not exist.
    """
    check_device(number)
    runtime = cupy.cuda.runtime
    properties = runtime.getDeviceProperties(number)
    return DeviceProperties(
        number=number,
        name=properties["name"].decode(),
        memory=int(properties["totalGlobalMem"]),
        compute_capability=f"{properties['major']}.{properties['minor']}",
        multiprocessors=int(properties["multiProcessorCount"]),
        pci_bus_id=str(runtime.deviceGetPCIBusId(number)),
        driver_version=_version(runtime.driverGetVersion()),
        runtime_version=_version(runtime.runtimeGetVersion()),
    )


def free_memory(number: int) -> int:
    """Return the free bytes of a GPU after this process has created its CUDA context.

    Raises:
        DeviceError: the GPU does not exist.
    """
    check_device(number)
    with cupy.cuda.Device(number):
        return int(cupy.cuda.runtime.memGetInfo()[0])


def has_tensor_cores() -> bool:
    """Return whether the current GPU's tensor cores support TF32, float16 and bfloat16."""
    return int(cupy.cuda.Device().compute_capability) >= AMPERE


def _no_device_reason() -> str:
    """Return the driver's reason why CUDA finds no GPU."""
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return "no device is visible; see CUDA_VISIBLE_DEVICES"


def check_device(number: int) -> None:
    """Check that a GPU exists.

    Raises:
        DeviceError: the message lists this machine's GPUs, or states why there is none.
    """
    count = device_count()
    if 0 <= number < count:
        return
    if count == 0:
        absent = f"CUDA finds none here ({_no_device_reason()})" if _has_driver() else _NO_DRIVER
        advice = "train on the CPU with --cpu, or install the driver"
        raise DeviceError(f"GPU {number} was asked for, and {absent}: {advice}")
    known = ", ".join(map(str, range(count)))
    raise DeviceError(f"GPU {number} was asked for, this machine has {count} ({known}): name one of them with --gpu")


_importing = threading.Lock()


@contextmanager
def _without_torch() -> Iterator[None]:
    """Make `import torch` fail within a `with` block, unless PyTorch is already imported."""
    # cuDNN's frontend imports PyTorch if it is installed, for `cudnn.wrapper.Graph`, which caffepy does not use. That
    # import takes three seconds. A program that imports PyTorch later loses only this class; a program that imports
    # PyTorch earlier loses nothing. An import of PyTorch that another thread starts within the block (0.1 s) fails.
    with _importing:
        hidden = "torch" not in sys.modules and "cudnn" not in sys.modules
        if hidden:
            sys.modules["torch"] = None  # type: ignore[assignment]
        try:
            yield
        finally:
            if hidden and sys.modules.get("torch") is None:
                sys.modules.pop("torch", None)


def import_cudnn() -> Any:
    """Return cuDNN's frontend with the cuDNN library loaded.

    Raises:
        MissingExtraError: one of the two is not installed.
    """
    try:
        with _without_torch():
            import cudnn
    except ImportError as error:
        raise MissingExtraError("nvidia-cudnn-frontend", cuda_extra(), PURPOSE) from error
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        raise MissingExtraError("the cuDNN library", cuda_extra(), PURPOSE) from error
    return cudnn


@contextmanager
def device_memory(what: str) -> Iterator[None]:
    """Translate CuPy's out-of-memory error within a `with` block.

    Args:
        what: the object of the allocation, for the message.

    Raises:
        OutOfMemoryError: the message states the requested and the free bytes, and a remedy.
    """
    try:
        yield
    except cupy.cuda.memory.OutOfMemoryError as error:
        free, total = cupy.cuda.runtime.memGetInfo()
        device = cupy.cuda.runtime.getDevice()
        raise OutOfMemoryError(
            f"GPU {device} is out of memory for {what}: {error}; {free / GIBIBYTE:.1f} of "
            f"{total / GIBIBYTE:.1f} GiB are free",
            "use a smaller batch_size or another GPU",
            free + cupy.get_default_memory_pool().total_bytes(),
        ) from error
