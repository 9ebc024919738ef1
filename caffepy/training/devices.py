"""The GPUs that a training asks for: their start in the background, and whether they are there."""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Iterable
from contextlib import suppress

from caffepy.files import load_library

_EXIT_SECONDS = 10.0
"""How long the process's end waits for CUDA: a process that ends while the driver starts may hang."""


def preload_cuda(devices: Iterable[int]) -> None:
    """Start CUDA's driver and the primary contexts of some devices in a thread; returns at once.

    This takes half a second, in which Python imports what training needs. CuPy's own calls would hold the interpreter's
    lock meanwhile. What fails here is tried again and reported where the device is used.
    """

    def start() -> None:
        number, context = ctypes.c_int(), ctypes.c_void_p()
        with suppress(OSError, AttributeError):
            driver = load_library("libcuda.so.1")
            if driver.cuInit(0) == 0:
                for device in devices:
                    if driver.cuDeviceGet(ctypes.byref(number), device) == 0:
                        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)

    thread = threading.Thread(target=start, name="start CUDA", daemon=True)
    thread.start()
    atexit.register(thread.join, _EXIT_SECONDS)


def check_gpus(requested: list[int] | str) -> list[int]:
    """The numbers of the GPUs that were asked for; a text means all that there are.

    Raises:
        MissingExtraError: CuPy is not installed.
        DeviceError: there is no such GPU, none at all, or no NVIDIA driver.
    """
    from caffepy.backend.cuda.device import check_device, device_count

    if isinstance(requested, str):
        check_device(0)
        return list(range(device_count()))
    for number in requested:
        check_device(number)
    return requested
