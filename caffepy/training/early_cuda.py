"""CUDA's start in threads of its own, beside Python's imports: driver and contexts take half a second.

CuPy's calls that start them keep every other thread of the process waiting, and two devices' contexts come one after
the other; the driver's own calls do neither. What fails here is tried again, and reported, by those who need it.
"""

from __future__ import annotations

import atexit
import ctypes
import threading
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from typing import Any

from caffepy.files import load_library
from caffepy.training import early_libraries

_EXIT_SECONDS = 10.0
"""How long the process's end waits for each start that is under way: a driver must not be left in the middle of it."""


@cache
def begin_driver() -> threading.Thread:
    """Start the driver."""
    return _start("start CUDA", _driver)


@cache
def begin_context(device: int) -> threading.Thread:
    """Make a device's primary context, which lasts as long as the process."""
    begin_driver()
    return _start(f"start GPU {device}", lambda: _retain(device))


def begin(devices: Iterable[int] = ()) -> None:
    """Start the driver and some devices, and to read CUDA's libraries; returns at once."""
    begin_driver()
    early_libraries.begin()
    for device in devices:
        begin_context(device)


def _start(name: str, work: Any) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    atexit.register(thread.join, _EXIT_SECONDS)
    return thread


_starting = threading.Lock()


def _driver() -> Any:
    """The driver's library once it has started; None if there is none that works."""
    with suppress(OSError, AttributeError):
        library = load_library("libcuda.so.1")
        with _starting:
            if library.cuInit(0) == 0:
                return library
    return None


def _retain(device: int) -> None:
    library = _driver()
    if library is None:
        return
    number, context = ctypes.c_int(), ctypes.c_void_p()
    if library.cuDeviceGet(ctypes.byref(number), device) == 0:
        library.cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
