"""Memory-mapped files that survive the loss of pages, when a file is truncated or its disk fails.

Access to a lost page of a mapped file raises SIGBUS, which ends a process. The handler here maps a page of zeros
instead and counts it; the reader continues and later checks the count. It is machine code, because Python's handlers
run too late. Wayland compositors read their clients' memory in this way.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
import signal
import threading
import weakref
from functools import cache
from typing import Any

import numpy as np
from numba import types
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.cache import compile_c_function
from caffepy.backend.cpu.jit.intrinsics import kept_word, map_zeros, set_handler, words
from caffepy.forks import free_after_fork

_MAX_FILES = 1024
_COLUMNS = 3
"""Columns of a table row: first address, end address, pages lost."""
_PAGE = mmap.PAGESIZE
_ACTION_BYTES = 256
"""More than the size of `struct sigaction`, 152."""
_FLAGS_AT = 136
"""Offset of `sa_flags`, with glibc and musl on 64-bit machines; the handler's address and the mask precede it."""
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000

_table: NDArray[np.int64] = np.zeros((_MAX_FILES + 1, _COLUMNS), np.int64)
"""One row per file; the last row has the addresses of the previous and of the default action."""
_others = ctypes.create_string_buffer(2 * _ACTION_BYTES)
"""The previous action of SIGBUS, followed by the system's default, which ends the process."""
_lock = free_after_fork(threading.Lock())


def _handle(number, information, context):  # type: ignore[no-untyped-def]
    """SIGBUS's handler: the third word of `siginfo_t` is the address. Called with 0: store the table's address."""
    if number == 0:
        words(kept_word())[0] = information
        return
    table, address = words(words(kept_word())[0]), words(information)[2]
    for row in range(_MAX_FILES):
        if table[3 * row] <= address < table[3 * row + 1]:
            table[3 * row + 2] += 1
            if map_zeros(address // _PAGE * _PAGE, _PAGE) != -1:
                return
    # Not ours: retry the instruction under the previous action; if that returns here, because it calls ours, retry it
    # under the default action.
    set_handler(number, table[3 * _MAX_FILES])
    table[3 * _MAX_FILES] = table[3 * _MAX_FILES + 1]


class MappedFile:
    """A memory-mapped file. Pages that the file has lost read as zeros.

    Args:
        descriptor: the file.
        size: bytes to map, at least 1.

    Raises:
        OSError: mapping failed, too many files are mapped, or the system is not Linux.
        ValueError: the file is smaller.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        if platform.system() != "Linux":
            raise OSError("files are mapped on Linux only: the layout of sigaction is Linux's")
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
        begin = self.memory.ctypes.data
        with _lock:
            free = np.flatnonzero(_table[:_MAX_FILES, 1] == 0)
            if not free.size:
                raise OSError(f"{_MAX_FILES} files are mapped already")
            self._row = int(free[0])
            _table[self._row] = begin, begin + -(-size // _PAGE) * _PAGE, 0
            _install()
        weakref.finalize(self, _forget, self._row).atexit = False  # threads may still read at exit

    @property
    def pages_lost(self) -> int:
        """Number of pages read as zeros because the file lacked them or its disk failed."""
        return int(_table[self._row, 2])


def _forget(row: int) -> None:
    """Free a row. Takes no lock: the garbage collector may call this in a thread that holds it."""
    _table[row] = 0


@cache
def _handler() -> Any:
    """Return the compiled handler."""
    return compile_c_function(_handle, types.void(types.int32, types.int64, types.int64), {})


def _install() -> None:
    """Install the handler of SIGBUS, unless it is installed."""
    address = int(_handler().address)
    present, action = (ctypes.create_string_buffer(_ACTION_BYTES) for _ in range(2))
    libc = ctypes.CDLL(None, use_errno=True)
    libc.sigaction(int(signal.SIGBUS), None, present)
    if ctypes.c_int64.from_buffer(present).value == address:
        return
    ctypes.memmove(_others, present, _ACTION_BYTES)
    kind = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
    kind(address)(0, _table.ctypes.data, 0)
    _table[_MAX_FILES, :2] = ctypes.addressof(_others), ctypes.addressof(_others) + _ACTION_BYTES
    ctypes.c_int64.from_buffer(action).value = address
    ctypes.c_int32.from_buffer(action, _FLAGS_AT).value = _SA_SIGINFO | _SA_ONSTACK
    if libc.sigaction(int(signal.SIGBUS), action, None) != 0:
        raise OSError(ctypes.get_errno(), "the handler of SIGBUS cannot be installed")
