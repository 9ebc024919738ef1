"""Files in memory whose pages may go away: one that is cut off, or that its disk cannot read, does not end the process.

Touching a page that a mapped file has lost raises SIGBUS, which ends a process. The handler here, machine code because
Python's handlers run too late, puts a page of zeros in the lost one's place and notes it: what was reading goes on, and
asks afterwards whether what it has read counts. Wayland's servers read their clients' memory so.
"""

from __future__ import annotations

import ctypes
import mmap
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
"""Of a row of the table: a file's first address, the one behind its last, pages lost."""
_PAGE = mmap.PAGESIZE
_ACTION_BYTES = 256
"""More than a `struct sigaction` has, 152."""
_FLAGS_AT = 136
"""Of `sa_flags` in it, with glibc and musl on machines of 64 bits; before it are the handler's address and the mask."""
_SA_SIGINFO, _SA_ONSTACK = 4, 0x08000000

_table: NDArray[np.int64] = np.zeros((_MAX_FILES + 1, _COLUMNS), np.int64)
"""A row for each file; the last row has the addresses of the action that follows ours, and of the system's."""
_others = ctypes.create_string_buffer(2 * _ACTION_BYTES)
"""The action of SIGBUS before ours, and behind it the system's own, which ends the process."""
_lock = free_after_fork(threading.Lock())


def _handle(number, information, context):  # type: ignore[no-untyped-def]
    """SIGBUS's handler: a `siginfo_t` has the address in its third word. Called with 0: keep the table's address."""
    if number == 0:
        words(kept_word())[0] = information
        return
    table, address = words(words(kept_word())[0]), words(information)[2]
    for row in range(_MAX_FILES):
        if table[3 * row] <= address < table[3 * row + 1]:
            table[3 * row + 2] += 1
            if map_zeros(address // _PAGE * _PAGE, _PAGE) != -1:
                return
    # Not ours: the instruction is tried again under the action that was there before, and if that one comes back here,
    # because it had followed ours, under the system's.
    set_handler(number, table[3 * _MAX_FILES])
    table[3 * _MAX_FILES] = table[3 * _MAX_FILES + 1]


class MappedFile:
    """A file's bytes in memory. A page that the file has lost reads as zeros from then on.

    Args:
        descriptor: the file.
        size: bytes of it to map, at least 1.

    Raises:
        OSError: it cannot be mapped, or too many files are.
        ValueError: it has fewer bytes.
    """

    def __init__(self, descriptor: int, size: int) -> None:
        self.memory: NDArray[np.uint8] = np.frombuffer(mmap.mmap(descriptor, size, access=mmap.ACCESS_READ), np.uint8)
        begin = self.memory.ctypes.data
        with _lock:
            free = np.flatnonzero(_table[:_MAX_FILES, 1] == 0)
            if not free.size:
                raise OSError(f"{_MAX_FILES} files are mapped already")
            self._row = int(free[0])
            _table[self._row] = begin, begin + -(-size // _PAGE) * _PAGE, 0
            _install()
        weakref.finalize(self, _forget, self._row).atexit = False  # threads may still read then

    @property
    def pages_lost(self) -> int:
        """Pages that were read as zeros because the file did not have them, or its disk could not read them."""
        return int(_table[self._row, 2])


def _forget(row: int) -> None:
    """Free a row. Without the lock: the garbage collector may call this in a thread that holds it."""
    _table[row] = 0


@cache
def _handler() -> Any:
    """The compiled handler."""
    return compile_c_function(_handle, types.void(types.int32, types.int64, types.int64), {})


def _install() -> None:
    """Let the handler take SIGBUS, unless it does."""
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
