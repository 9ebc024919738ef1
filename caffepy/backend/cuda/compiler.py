"""Own CUDA kernels: reads the .cu files beside this module, compiles each once in a process, launches them.

Owns launch sizes. Kernels walk their elements with a grid stride, so any size is covered by any grid. CuPy compiles
them with NVRTC and keeps the machine code in its own cache folder.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from functools import cache
from importlib import resources
from typing import Any, NamedTuple

import numpy as np

from caffepy.backend.cuda.device import cupy
from caffepy.backend.layout import WIDE_LOAD
from caffepy.backend.types import Array
from caffepy.caches import cache_folder
from caffepy.errors import RunError

logger = logging.getLogger(__name__)

THREADS = 256
MULTIPROCESSORS = 132
"""Of an H200. Grids are sized for it on every GPU, so that the order of a sum depends on no device."""

RESIDENT_BLOCKS = 2 * MULTIPROCESSORS
"""Blocks that run at once where a multiprocessor has registers or shared memory for two of them."""

MAX_BLOCKS = 16 * MULTIPROCESSORS
"""Blocks that fill the largest GPU of today several times over; more would only add starts and ends."""

OPTIONS = ("--std=c++17",)
"""NVRTC's, beside those that CuPy gives it."""

_compiling = threading.RLock()


@cache
def kernel_text(name: str) -> str:
    """The text of kernels/<name>.cu."""
    return (resources.files("caffepy.backend.cuda") / "kernels" / f"{name}.cu").read_text(encoding="utf-8")


def device_number() -> int:
    """CUDA's number of the present device: plans depend on it."""
    return int(cupy.cuda.runtime.getDevice())


@cache
def _module(text: str) -> Any:
    return cupy.RawModule(code=text, options=OPTIONS)


class _Building:
    """Seconds in which kernels were built; CuPy does not tell whether it reads a kernel or compiles it."""

    seconds = 0.0


_COMPILES = 1.0
"""Seconds after which kernels are being compiled: CuPy reads one in a millisecond and compiles one in a hundred."""


@cache
def say_first_use() -> None:
    """Log, once in a process, what takes long when a net first runs on a machine, and that later starts do not."""
    folder = os.environ.get("CUPY_CACHE_DIR") or "~/.cupy/kernel_cache"
    logger.info(
        "Compiling CUDA kernels and tuning convolutions for the first time; for later starts CuPy keeps kernels in %s, "
        "and the choices are kept in %s", folder, cache_folder() or "no folder",
    )  # fmt: skip


@cache
def _function(text: str, name: str, device: int) -> Any:
    begin = time.monotonic()
    try:
        function = _module(text).get_function(name)
    except OSError as error:
        logger.info("CuPy cannot keep compiled CUDA kernels, so each start compiles them: %s", error)
        os.environ["CUPY_CACHE_IN_MEMORY"] = "1"
        function = _module(text).get_function(name)
    except cupy.cuda.compiler.CompileException as error:
        raise RunError(f"NVRTC refuses a CUDA kernel of caffepy's: {' '.join(str(error).split())}") from error
    _Building.seconds += time.monotonic() - begin
    if _Building.seconds > _COMPILES:
        say_first_use()
    return function


def compiled(text: str, name: str) -> Any:
    """A kernel of some CUDA text, compiled on first use; solver threads share what one of them compiled.

    Raises:
        RunError: it does not compile.
    """
    with _compiling:
        return _function(text, name, device_number())


@cache
def _library_text(file: str, before: str, parts: tuple[str, ...]) -> str:
    return before + "".join(map(kernel_text, ("common", *parts, file)))


TF32_PRODUCTS = ("tensor_cores",)
"""Parts of kernels that multiply TF32 numbers on tensor cores, for `library_kernel`."""


def library_kernel(file: str, name: str, defines: str = "", parts: tuple[str, ...] = ()) -> Any:
    """The kernel `name` of kernels/<file>.cu, which stands on other files and has C++ text put before it."""
    return compiled(_library_text(file, defines, parts), name)


def defines(**values: Any) -> str:
    """C++ text that defines macros, to be put before a kernel file."""
    return "".join(f"#define {name} {value}\n" for name, value in values.items())


def argument(value: Any) -> Any:
    """A kernel argument: arrays stay, whole numbers become 32-bit and others float, as all our kernels expect."""
    if isinstance(value, (bool, int)):
        return np.uint32(value) if value > 2**31 - 1 else np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    return value


class Launch(NamedTuple):
    """A kernel ready to be launched for any arrays of the same description, which it is planned for once."""

    kernel: Any
    grid: tuple[int, ...]
    block: tuple[int, ...]
    arguments: tuple[Any, ...]


def launch(kernel: Any, work_items: int, arguments: tuple[Any, ...], threads: int = THREADS) -> None:
    """Run a kernel with one thread a work item, up to a grid that fills the GPU."""
    if work_items == 0:
        return
    blocks = min(-(-work_items // threads), MAX_BLOCKS)
    kernel((blocks,), (threads,), tuple(map(argument, arguments)))


def launch_blocks(kernel: Any, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple[Any, ...]) -> None:
    """Run a kernel on exactly this grid."""
    kernel(grid, block, tuple(map(argument, arguments)))


C_TYPES = {"f": "float", "e": "float16", "H": "bfloat16", "i": "int", "B": "unsigned char", "d": "double"}
"""The type in kernels/common.cu of each dtype character; uint16 holds bfloat16."""


def c_type(array: Array) -> str:
    """What an array's elements are called in our kernels."""
    return C_TYPES[array.dtype.char]


@cache
def divider(number: int) -> Any:
    """The argument of type `Divider` (kernels/common.cu) that divides by a number from 1 to 2^31."""
    shift = 31 + (number - 1).bit_length()
    return np.uint64((shift << 32) | ((1 << shift) // number + 1))


def aligned(array: Array, size: int = WIDE_LOAD) -> bool:
    """Whether an array's first element lies at a multiple of `size` bytes, so that wide loads are allowed."""
    return int(array.data.ptr) % size == 0
