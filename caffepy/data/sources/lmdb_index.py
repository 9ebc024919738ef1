"""The offsets of an LMDB's records in its file, for reading many of them without a call of LMDB for each.

Owns the walk over the B+ tree's leaves (format version 1, `mdb.c`), which validates everything that it reads.
"""

from __future__ import annotations

import mmap
import threading
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.kernel import Bytes, Int, Words, device_function, kernel
from caffepy.data.sources.lmdb_file import Tree, read_tree

_DEPTH = 32
"""More than any tree of LMDB has levels."""
_STACK, _FOUND, _PAGES, _DAMAGED = 0, 1, 2, 3
"""Indices in the state of a walk: the stack's height, records found, pages entered, whether the tree is damaged."""


@device_function
def _word(file: Bytes, at: Int, size: Int) -> Int:
    """A number of `size` bytes, the lowest first."""
    value = 0
    for i in range(size):
        value |= np.int64(file[at + i]) << (8 * i)
    return value


@device_function
def _is_page(file: Bytes, pages: Int, page_size: Int, page: Int, kinds: Int) -> bool:
    """Whether `page` is within the file, knows its own number and is of one of these kinds."""
    if page < 2 or page >= pages:
        return False
    begin = page * page_size
    return _word(file, begin, 8) == page and (_word(file, begin + 10, 2) & kinds) != 0


@kernel
def _walk(
    begin: Int, end: Int, file: Bytes, pages: Int, page_size: Int, wanted: Int, state: Words, stack: Words,
    offsets: Words, sizes: Words,
) -> None:  # fmt: skip
    """Walk until `wanted` records are found; the stack holds a page and its next node for each level."""
    height, found, entered = state[0], state[1], state[2]
    damaged = False
    while found < wanted and height > 0 and not damaged:
        first = stack[2 * height - 2] * page_size
        node_number = stack[2 * height - 1]
        flags, lower = _word(file, first + 10, 2), _word(file, first + 12, 2)
        if lower < 16 or lower > page_size:
            damaged = True
            break
        if node_number >= (lower - 16) // 2:
            height -= 1
            continue
        stack[2 * height - 1] = node_number + 1
        node = _word(file, first + 16 + 2 * node_number, 2)
        if node < lower or node + 8 > page_size:
            damaged = True
            break
        size, node_flags = _word(file, first + node, 4), _word(file, first + node + 4, 2)
        data = node + 8 + _word(file, first + node + 6, 2)
        if flags & 1:
            child = size | (node_flags << 32)
            entered += 1
            if height >= 32 or entered > pages or not _is_page(file, pages, page_size, child, 3):
                damaged = True
                break
            stack[2 * height] = child
            stack[2 * height + 1] = 0
            height += 1
            continue
        if node_flags == 1:
            if data + 8 > page_size:
                damaged = True
                break
            page = _word(file, first + data, 8)
            if not _is_page(file, pages, page_size, page, 4) or size > (pages - page) * page_size - 16:
                damaged = True
                break
            offsets[found] = page * page_size + 16
        else:
            if node_flags != 0 or data + size > page_size:
                damaged = True
                break
            offsets[found] = first + data
        sizes[found] = size
        found += 1
    state[0], state[1], state[2], state[3] = height, found, entered, int(damaged or found < wanted)


class LmdbIndex:
    """The offsets of an LMDB's records in the order of their keys, found on demand. Thread-safe.

    Args:
        file: the data file.
        tree: its main database.
    """

    def __init__(self, file: Path, tree: Tree) -> None:
        with file.open("rb") as opened:
            self.memory: NDArray[np.uint8] = np.frombuffer(
                mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ), np.uint8
            )
        self._page_size = tree.page_size
        self._pages = self.memory.size // tree.page_size
        self.offsets: NDArray[np.int64] = np.zeros(tree.entries, np.int64)
        """Offset of each record in the file, valid for those that `find` has found."""
        self.sizes: NDArray[np.int64] = np.zeros(tree.entries, np.int64)
        """Bytes of each record."""
        self._lock = threading.Lock()
        self._stack = np.zeros(2 * _DEPTH, np.int64)
        self._state = np.zeros(4, np.int64)
        if 2 <= tree.root < self._pages and self._is_root(tree.root):
            self._stack[0] = tree.root
            self._state[_STACK] = 1

    def _is_root(self, page: int) -> bool:
        head = self.memory[page * self._page_size :][:12].tobytes()
        return int.from_bytes(head[:8], "little") == page and head[10] & 3 in (1, 2)

    def find(self, count: int) -> bool:
        """Find the first `count` records; False if the tree is damaged."""
        if self._state[_FOUND] >= count:
            return True
        with self._lock:
            if self._state[_FOUND] < count and not self._state[_DAMAGED]:
                arguments: tuple[Any, ...] = (self._stack, self.offsets, self.sizes)
                _walk.run(1, 1, 1, self.memory, self._pages, self._page_size, count, self._state, *arguments)
            return bool(self._state[_FOUND] >= count)

    def record(self, number: int) -> memoryview | None:
        """The bytes of a record; None if `find` has not reached it."""
        if number >= self._state[_FOUND]:
            return None
        begin = int(self.offsets[number])
        return self.memory[begin : begin + int(self.sizes[number])].data


def open_index(file: Path, entries: int) -> LmdbIndex | None:
    """The index of a data file with `entries` records; None if its format is one that `LmdbIndex` does not walk."""
    try:
        tree = read_tree(file)
        if tree is None or tree.entries != entries or tree.entries * 10 > file.stat().st_size:
            return None
        return LmdbIndex(file, tree)
    except (OSError, ValueError):
        return None
