"""The GPUs of a training: background start and checks."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path

from caffepy.utils.files import load_library

_EXIT_SECONDS = 10.0
"""Seconds to wait for the driver at process exit: exiting while it starts may hang."""


def preload_cuda(devices: Iterable[int]) -> None:
    """Start CUDA's driver, the primary contexts of some devices and cuDNN's engines in a thread, without waiting.

    This takes a second and overlaps with imports; CuPy's own calls would hold the GIL. The engines are the libraries
    that cuDNN would load for its first convolution. Failures are ignored here and reported when the device is used.
    """

    def start() -> None:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        with suppress(OSError, AttributeError):
            driver = load_library("libcuda.so.1")
            if driver.cuInit(0) == 0:
                for device in devices:
                    if driver.cuDeviceGet(ctypes.byref(number), device) == 0:
                        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
        with suppress(ImportError, OSError):
            cudnn = find_spec("nvidia.cudnn")
            for folder in (cudnn and cudnn.submodule_search_locations) or ():
                for library in sorted(Path(folder).glob("lib/libcudnn_engines_*.so*")):
                    load_library(str(library))

    thread = threading.Thread(target=start, name="start CUDA", daemon=True)
    thread.start()
    atexit.register(thread.join, _EXIT_SECONDS)


def check_gpus(requested: list[int] | str) -> list[int]:
    """Return the indices of the requested GPUs; a string means all GPUs.

    Raises:
        MissingExtraError: CuPy is not installed.
        DeviceError: a GPU does not exist, there is none, or the NVIDIA driver is missing.
    """
    from caffepy.backend.cuda.device import check_device, device_count

    if isinstance(requested, str):
        check_device(0)
        return list(range(device_count()))
    for number in requested:
        check_device(number)
    return requested
