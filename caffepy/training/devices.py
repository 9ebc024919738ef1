"""The GPUs of a training: background start and checks."""

from __future__ import annotations

import atexit
import ctypes
import os
import sysconfig
import threading
from collections.abc import Iterable
from contextlib import suppress
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
        with suppress(OSError):
            for library in _engines():
                load_library(str(library))

    thread = threading.Thread(target=start, name="start CUDA", daemon=True)
    thread.start()
    atexit.register(thread.join, _EXIT_SECONDS)


def _engines() -> list[Path]:
    """Return cuDNN's libraries of engines in this environment; none if cuDNN's frontend takes another cuDNN."""
    # The engines of one release beside another release's core make each convolution fail.
    linked = filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    if any(True for folder in linked for _ in Path(folder).glob("libcudnn.so*")):
        return []
    folder = Path(sysconfig.get_path("purelib"), "nvidia", "cudnn", "lib")
    return sorted(folder.glob("libcudnn_engines_*.so*"))


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
