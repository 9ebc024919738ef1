"""Own CUDA kernels: read the .cu files beside this module, compile each once per process, launch them.

Defines launch sizes. Kernels use grid-stride loops, so any grid covers any size. CuPy compiles them with NVRTC and
caches the machine code in its own folder.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cuda.device import cupy
from caffepy.backend.types import WIDE_LOAD, Array
from caffepy.errors import RunError
from caffepy.utils.caches import cache_folder

logger = logging.getLogger(__name__)

THREADS = 256
MULTIPROCESSORS = 132
"""Multiprocessors of an H200. Grids are sized for it on every GPU, so that summation order is device-independent."""

RESIDENT_BLOCKS = 2 * MULTIPROCESSORS
"""Resident blocks if registers or shared memory allow two per multiprocessor."""

MAX_BLOCKS = 16 * MULTIPROCESSORS
"""Blocks that fill the largest current GPU several times over; more would only add launch overhead."""

MAX_GRID = 65535
"""Maximum blocks of a grid along its second axis, and along its third."""

OPTIONS = ("--std=c++17",)
"""NVRTC options in addition to CuPy's."""

_compiling: dict[str, threading.Lock] = {}
"""A lock for each text: NVRTC compiles several texts at the same time."""


@cache
def kernel_text(name: str) -> str:
    """Return the text of kernels/<name>.cu."""
    return (resources.files("caffepy.backend.cuda") / "kernels" / f"{name}.cu").read_text(encoding="utf-8")


def device_number() -> int:
    """Return the current CUDA device number, a key of cached plans."""
    return int(cupy.cuda.runtime.getDevice())


@cache
def _module(text: str) -> Any:
    return cupy.RawModule(code=text, options=OPTIONS)


class _BuildTime:
    """Total seconds of building kernels. CuPy does not report whether it loaded or compiled a kernel."""

    seconds = 0.0


_COMPILATION_SECONDS = 1.0
"""Seconds that indicate compilation: CuPy loads a kernel in about 1 ms and compiles one in about 100 ms."""


@cache
def log_first_use() -> None:
    """Log once per process that the first run on a machine compiles and tunes, and that later starts do not."""
    folder = os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"
    logger.info(
        "Compiling CUDA kernels and tuning convolutions for the first time; for later starts CuPy keeps kernels in %s, "
        "and the choices are kept in %s",
        folder,
        cache_folder() or "no folder",
    )


@cache
def _function(text: str, name: str, device: int) -> Any:
    begin = time.monotonic()
    try:
        function = _module(text).get_function(name)
    except OSError as error:
        logger.info("CuPy cannot keep compiled CUDA kernels, so each start compiles them: %s", error)
        # A full or read-only disk: CuPy raises while it stores the compiled kernel.
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        function = _module(text).get_function(name)
    except cupy.cuda.compiler.CompileException as error:
        raise RunError(f"NVRTC cannot compile a caffepy kernel: {' '.join(str(error).split())}") from error
    _BuildTime.seconds += time.monotonic() - begin
    if _BuildTime.seconds > _COMPILATION_SECONDS:
        log_first_use()
    return function


def compiled(text: str, name: str) -> Any:
    """Return a kernel of some CUDA text, compiled on first use and shared by all solver threads.

    Raises:
        RunError: compilation failed.
    """
    # functools.cache does not keep two threads from compiling the same text; a compilation takes 100 ms and more.
    with _compiling.setdefault(text, threading.Lock()):
        return _function(text, name, device_number())


def compile_side_by_side(works: Sequence[Callable[[], object]]) -> None:
    """Run works that compile kernels for the current device on all cores; a kernel that fails is left to its user."""
    device = device_number()

    def run(work: Callable[[], object]) -> None:
        with cupy.cuda.Device(device), suppress(RunError):
            work()

    if works:
        begin, cores = time.monotonic(), len(os.sched_getaffinity(0))
        with ThreadPoolExecutor(min(len(works), cores), "nvrtc") as threads:
            list(threads.map(run, works))
        seconds = time.monotonic() - begin
        if seconds > _COMPILATION_SECONDS:
            logger.info("Compiled %d CUDA kernels on %d cores in %.1f s", len(works), cores, seconds)


@cache
def _library_text(file: str, before: str, parts: tuple[str, ...]) -> str:
    return before + "".join(map(kernel_text, ("common", *parts, file)))


TF32_PRODUCTS = ("tensor_cores",)
"""Parts of kernels that multiply TF32 numbers on tensor cores, for `library_kernel`."""


def library_kernel(file: str, name: str, defines: str = "", parts: tuple[str, ...] = ()) -> Any:
    """Return the kernel `name` of kernels/<file>.cu, with `defines` and the files in `parts` prepended."""
    return compiled(_library_text(file, defines, parts), name)


def defines(**values: Any) -> str:
    """Return macro definitions to prepend to a kernel file."""
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def argument(value: Any) -> Any:
    """Convert a kernel argument: int to 32 bits, float to float32; arrays are unchanged."""
    if isinstance(value, (bool, int)):
        return np.uint32(value) if value > 2**31 - 1 else np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    return value


class Launch(NamedTuple):
    """A planned launch, reusable for all arrays with the same description."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]


def launch(kernel: Any, work_items: int, arguments: tuple[Any, ...], threads: int = THREADS) -> None:
    """Launch a kernel with one thread per work item, up to a grid that fills the GPU."""
    if work_items == 0:
        return
    # The grid's limit is the same on each GPU: where a kernel adds up, it also fixes the order.
    blocks = min(-(-work_items // threads), MAX_BLOCKS)
    kernel((blocks,), (threads,), tuple(map(argument, arguments)))


def launch_blocks(kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Launch a kernel on exactly this grid."""
    kernel(grid, block, tuple(map(argument, arguments)))


C_TYPES = {"f": "float", "e": "float16", "H": "bfloat16", "i": "int", "B": "unsigned char", "d": "double"}
"""Type name in kernels/common.cu by dtype character; uint16 holds bfloat16."""


def c_type(array: Array) -> str:
    """Return the type name of an array's elements in our kernels."""
    return C_TYPES[array.dtype.char]


@cache
def divider(number: int) -> Any:
    """Return the `Divider` argument (kernels/common.cu) for a divisor from 1 to 2^31."""
    # n * factor >> shift is n / number, rounded down, for n below 2^31: the factor exceeds 2^shift / number by at
    # most 2^(shift - 31) / number (Granlund and Montgomery, PLDI 1994).
    shift = 31 + (number - 1).bit_length()
    return np.uint64((shift << 32) | ((1 << shift) // number + 1))


def aligned(array: Array, size: int = WIDE_LOAD) -> bool:
    """Return whether an array is aligned to `size` bytes, as wide loads require."""
    return int(array.data.ptr) % size == 0
