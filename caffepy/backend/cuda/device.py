"""Which GPUs there are: the only module that imports CuPy and cuDNN for the first time and explains what is missing.

Owns the translation of their errors into caffepy's.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from caffepy.errors import DeviceError, MissingExtraError, OutOfMemoryError
from caffepy.files import load_library

__all__ = [
    "EXTRA",
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

EXTRA = "cuda13"
PURPOSE = "to train on a GPU"
_NO_DRIVER = "this machine has no NVIDIA driver"


def _has_driver() -> bool:
    """Whether the NVIDIA driver's library is there."""
    try:
        load_library("libcuda.so.1")
    except (OSError, AttributeError):
        return False
    return True


try:
    import cupy
except ImportError as error:
    if _has_driver():
        raise MissingExtraError("CuPy", EXTRA, PURPOSE) from error
    raise DeviceError(
        f"{_NO_DRIVER}: train on the CPU with --cpu, or install the driver, and CuPy, which is not there either: "
        f"pip install 'caffepy[{EXTRA}]'"
    ) from error

GIBIBYTE = 2**30

AMPERE = 80
"""Compute capability, times ten, of the first GPUs whose tensor cores take TF32 and bfloat16."""


@dataclass(frozen=True)
class DeviceProperties:
    """What `caffepy device_query` prints of one GPU.

    Args:
        number: CUDA's number of the device in this process.
        name: the product's name.
        memory: bytes of device memory.
        compute_capability: e.g. ``9.0``.
        multiprocessors: how many streaming multiprocessors it has.
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
    """How many GPUs this process can use; 0 without a driver."""
    try:
        return int(cupy.cuda.runtime.getDeviceCount())
    except cupy.cuda.runtime.CUDARuntimeError:
        return 0


def device_names() -> list[str]:
    """The product names of all GPUs, in CUDA's order."""
    return [device_properties(number).name for number in range(device_count())]


def device_properties(number: int) -> DeviceProperties:
    """The properties of one GPU.

    Raises:
        DeviceError: there is no such GPU.
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
    """Bytes of a GPU that nobody uses, this process's own CUDA context being there.

    Raises:
        DeviceError: there is no such GPU.
    """
    check_device(number)
    with cupy.cuda.Device(number):
        return int(cupy.cuda.runtime.memGetInfo()[0])


def has_tensor_cores() -> bool:
    """Whether the tensor cores of the present GPU take all factors that own kernels give them: TF32 and both halves."""
    return int(cupy.cuda.Device().compute_capability) >= AMPERE


def _no_device_reason() -> str:
    """Why CUDA sees no GPU at all, in the driver's words."""
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        return str(error)
    return "no device is visible; see CUDA_VISIBLE_DEVICES"


def check_device(number: int) -> None:
    """Refuse a GPU that is not there.

    Raises:
        DeviceError: the message lists the GPUs of this machine, or says why there is none.
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
    """Let `import torch` fail within a `with` block, unless this process has it already.

    cuDNN's frontend imports PyTorch where it is installed, for its class `Graph` of `cudnn.wrapper`, which caffepy does
    not use; that takes three seconds. A program that imports PyTorch later loses that class alone, and nothing where it
    imports PyTorch before. An import of PyTorch that another thread begins in this tenth of a second fails.
    """
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
    """cuDNN's frontend, with the cuDNN library behind it.

    Raises:
        MissingExtraError: one of the two is not installed.
    """
    try:
        with _without_torch():
            import cudnn
    except ImportError as error:
        raise MissingExtraError("nvidia-cudnn-frontend", EXTRA, PURPOSE) from error
    try:
        cudnn.backend_version()
    except RuntimeError as error:
        raise MissingExtraError("the cuDNN library", EXTRA, PURPOSE) from error
    return cudnn


@contextmanager
def device_memory(what: str) -> Iterator[None]:
    """Translate CuPy's out-of-memory error within a `with` block.

    Args:
        what: what was being allocated, for the message.

    Raises:
        OutOfMemoryError: with the bytes asked for, those free and what to do.
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
