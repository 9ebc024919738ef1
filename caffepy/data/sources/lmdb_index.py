"""The records of an LMDB: where they lie in its file, and their bytes (format version 1, `mdb.c`).

The walk over the B+ tree's leaves validates everything that it reads; liblmdb, which trusts its files, is not asked.
What decides where something lies in a file is read through a descriptor, so that it cannot change after it was checked.
"""

from __future__ import annotations

import os
import struct
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from caffepy.backend.cpu.jit.address import address_of
from caffepy.backend.cpu.jit.deferred import Bytes, Int, Words, deferred_kernel, part, read_at
from caffepy.errors import DataError
from caffepy.files import open_regular
from caffepy.forks import free_after_fork

if TYPE_CHECKING:
    from caffepy.backend.cpu.jit.mapped_file import MappedFile

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER = struct.Struct("<Q H H H H")
"""Page number, padding, flags, end of the nodes' offsets, begin of the nodes."""
_META = struct.Struct("<II QQ 48s 48s QQ")
"""Magic, version, address, map size, the free list's and the main database's records, last page, transaction."""
_DATABASE = struct.Struct("<I H H QQQQ Q")
"""Padding (page size), flags, depth, branch, leaf and overflow pages, entries, root page."""
_META_PAGE = 8
_REVERSED, _DUPLICATES, _INTEGERS = 2, 4, 8
"""Flags of a database: how its keys are ordered, and whether a key may have several values."""
_MAX_PAGES = 2**48
"""Branches hold pages' numbers in 48 bits; a tree without a page has the root 2^64 - 1."""
MAX_LEVELS = 32
"""As many as liblmdb's cursors can descend."""


@dataclass(frozen=True)
class Header:
    """What a header says of the main database.

    Args:
        page_size: bytes of a page.
        last_page: the highest page that is in use.
        transaction: which one wrote it.
        flags: of the database.
        levels: of the tree.
        entries: records in it.
        root: the page at the top.
    """

    page_size: int
    last_page: int
    transaction: int
    flags: int
    levels: int
    entries: int
    root: int

    @property
    def needed(self) -> int:
        """Bytes that the file should have; the last pages lack if they were freed as soon as they were taken."""
        return (self.last_page + 1) * self.page_size

    @property
    def ordered_as_bytes(self) -> bool:
        """Whether the keys are in the order of their bytes."""
        return not self.flags & (_REVERSED | _INTEGERS)


def read_header(descriptor: int, path: Path) -> Header:
    """The newer one of the two headers of an open data file.

    Raises:
        DataError: it is no LMDB, is damaged, or is of a kind that holds no Datums.
    """
    size = os.fstat(descriptor).st_size
    first = _read(descriptor, path, 0, 0)
    second = _read(descriptor, path, first.page_size, 1)
    if second.page_size != first.page_size or abs(second.transaction - first.transaction) > 1:
        raise DataError(f"'{path}' is damaged: its two headers contradict each other; build it again")
    header = max(first, second, key=lambda header: header.transaction)
    if header.entries and not (header.root < _MAX_PAGES and 1 <= header.levels <= MAX_LEVELS):
        raise DataError(
            f"'{path}' is damaged: its header names {header.entries} records without a tree; build it again"
        )
    if header.flags & _DUPLICATES:
        raise DataError(f"'{path}' holds several values a key (MDB_DUPSORT); Caffe's sets have one record a key")
    if header.entries * 10 > size:
        raise (
            truncated(path, size, header)
            if size < header.needed
            else DataError(
                f"'{path}' is damaged: its header promises {header.entries} records in {size} bytes; build it again"
            )
        )
    return header


def truncated(path: Path, size: int, header: Header) -> DataError:
    """The error for a data file of `size` bytes that lacks pages in use."""
    return DataError(
        f"'{path}' is truncated: it has {size} bytes, its own header asks for {header.needed}; copy or build it again"
    )


def _read(descriptor: int, path: Path, offset: int, number: int) -> Header:
    page = os.pread(descriptor, _HEADER.size + _META.size, offset)
    if len(page) < _HEADER.size + _META.size:
        raise _not_lmdb(path)
    magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(page, _HEADER.size)
    own_number, _, page_flags, _, _ = _HEADER.unpack_from(page)
    if magic != _MAGIC or not page_flags & _META_PAGE or own_number != number:
        raise _not_lmdb(path)
    if version != _VERSION:
        raise DataError(f"'{path}' is LMDB's format {version}; only format {_VERSION} is read (liblmdb 0.9)")
    page_size = _DATABASE.unpack(free)[0]
    if not 256 <= page_size <= 65536 or page_size & (page_size - 1):
        raise DataError(f"'{path}' is damaged: its header says pages of {page_size} bytes; build it again")
    _, flags, levels, _, _, _, entries, root = _DATABASE.unpack(main)
    return Header(page_size, last_page, transaction, flags, levels, entries, root)


def _not_lmdb(path: Path) -> DataError:
    return DataError(f"'{path}' is not an LMDB data file (its headers lack LMDB's mark); was it copied completely?")


PAGE_HEADER = 16
"""Bytes before an overflow page's data, or a page's nodes."""
_NODE = struct.Struct("<I H H")
"""A node's header: bytes of its data, flags, bytes of its key."""
_OVERFLOW = struct.Struct("<Q H H I")
"""An overflow page's header: its number, padding, flags, pages."""
_OVERFLOW_PAGE = 4
_HEIGHT, _FOUND, _PAGES, _DAMAGE, _PAGE, _KEY_SIZE = 0, 1, 2, 3, 4, 5
"""Indices in the state of a walk: height of the stack, records found, pages entered, what is damaged, in which page,
and the size of the last key."""
_DAMAGES = (
    "",
    "page {page} is not the page that its place in the tree asks for",
    "records in page {page} lie outside of it or over each other",
    "the keys in page {page} are not in order",
    "it has fewer records than its header says",
    "it has more records than its header says",
    "page {page} holds a database or several values of a key, not a record",
    "page {page} cannot be read, or lies outside of the file",
)
_MORE = 5
_AHEAD = 1024
"""Records, at most, that are looked up with one that is asked for."""
_FIRST_AHEAD = 64
"""As many more than have been found already."""
_COMPILING = 15_000
"""Records that Python finds in the time that the walk takes to be compiled, about a second."""
_LOADING = 5000
"""And in the time that numba takes to be imported and to read the machine code from the cache."""
_MAX_BYTES = 2**31 - 1
"""Of a record: Protobuf's limit."""


@part
def word(file: Bytes, at: Int, size: Int) -> Int:
    """A number of `size` bytes, the lowest first."""
    value = 0
    for i in range(size):
        value |= np.int64(file[at + i]) << (8 * i)
    return value


@part
def _check_nodes(buffer: Bytes, at: Int, page_size: Int, count: Int, upper: Int, kind: Int, marks: Bytes) -> Int:
    """0 if the nodes of a page fill it from `upper` to its end, each once, as LMDB packs them; else 2.

    The marks are a zero for each byte of a page, and are so again if the page is whole.
    """
    for i in range(count):
        node = word(buffer, at + 16 + 2 * i, 2)
        if node < upper or node + 8 > page_size or marks[node] != 0:
            return 2
        marks[node] = 1
    node = upper
    for _ in range(count):
        if node + 8 > page_size or marks[node] == 0:
            return 2
        marks[node] = 0
        size = 8 + word(buffer, at + node + 6, 2)
        if kind == 2:
            size += 8 if word(buffer, at + node + 4, 2) == 1 else word(buffer, at + node, 4)
        node += size + size % 2
    return 0 if node == page_size else 2


@part
def _enter(
    descriptor: Int, pages: Int, page_size: Int, page: Int, buffer: Bytes, buffer_at: Int, at: Int, kind: Int,
    marks: Bytes,
) -> Int:  # fmt: skip
    """Read a page to `at` in the buffer; returns what is wrong with it, 0: it is a whole one of this kind."""
    if page < 2 or page >= pages:
        return 7
    if read_at(descriptor, buffer_at + at, page_size, page * page_size) != page_size:
        return 7
    if word(buffer, at, 8) != page or word(buffer, at + 10, 2) != kind:
        return 1
    lower, upper = word(buffer, at + 12, 2), word(buffer, at + 14, 2)
    # Of 65536 bytes a page's end is 0 in 16 bits.
    if upper == 0 and page_size == 65536:
        upper = page_size
    if lower < 16 or lower % 2 != 0 or lower > upper or upper > page_size:
        return 1
    return _check_nodes(buffer, at, page_size, (lower - 16) // 2, upper, kind, marks)


@part
def _is_after(buffer: Bytes, key: Int, size: Int, last: Bytes, last_size: Int) -> bool:
    """Whether a key comes after the last one in the order of their bytes."""
    for i in range(min(size, last_size)):
        if buffer[key + i] != last[i]:
            return buffer[key + i] > last[i]
    return size > last_size


@part
def _take(
    buffer: Bytes, first: Int, node: Int, page: Int, pages: Int, page_size: Int, last: Bytes, last_size: Int,
) -> tuple[Int, Int, Int, Int]:  # fmt: skip
    """A leaf's node: what is wrong with it, where its data begin in the file, their size, and its key's size.

    Its key becomes the last one, which it must come after unless `last_size` is -1.
    """
    size, flags = word(buffer, first + node, 4), word(buffer, first + node + 4, 2)
    key, key_size = first + node + 8, word(buffer, first + node + 6, 2)
    if flags > 1:
        return 6, 0, 0, 0
    if last_size >= 0 and not _is_after(buffer, key, key_size, last, last_size):
        return 3, 0, 0, 0
    for i in range(key_size):
        last[i] = buffer[key + i]
    offset = page * page_size + node + 8 + key_size
    if flags == 1:
        large = word(buffer, key + key_size, 8)
        if large < 2 or large >= pages or size > (pages - large) * page_size - 16:
            return 2, 0, 0, 0
        offset = large * page_size + 16
    return 0, offset, size, key_size


@deferred_kernel
def _walk(
    begin: Int, end: Int, descriptor: Int, pages: Int, page_size: Int, levels: Int, root: Int, wanted: Int,
    backwards: Int, ordered: Int, state: Words, stack: Words, buffer: Bytes, buffer_at: Int, last: Bytes, marks: Bytes,
    nodes: Words, offsets: Words, sizes: Words,
) -> None:  # fmt: skip
    """Walk until `wanted` records are found.

    The stack holds a page and its next node for each level, the buffer these pages. `backwards` begins with the last
    record; only one can be wanted then.
    """
    height, found, damage, page = state[0], state[1], 0, state[4]
    child = root if state[2] == 0 else -1
    while damage == 0:
        if child >= 0:
            page, child = child, -1
            state[2] += 1
            if height >= levels or state[2] > pages:
                damage = 7
                break
            at, kind = height * page_size, 2 if height == levels - 1 else 1
            damage = _enter(descriptor, pages, page_size, page, buffer, buffer_at, at, kind, marks)
            stack[2 * height] = page
            stack[2 * height + 1] = (word(buffer, at + 12, 2) - 16) // 2 - 1 if backwards != 0 else 0
            height += 1
            continue
        if height == 0:
            damage = 4 if found < wanted else 0
            break
        first = (height - 1) * page_size
        page, number = stack[2 * height - 2], stack[2 * height - 1]
        if number < 0 or number >= (word(buffer, first + 12, 2) - 16) // 2:
            height -= 1
            continue
        if found >= wanted:
            break
        stack[2 * height - 1] = number + 1
        node = word(buffer, first + 16 + 2 * number, 2)
        if height < levels:
            child = word(buffer, first + node, 4) | (word(buffer, first + node + 4, 2) << 32)
            continue
        last_size = state[5] if ordered != 0 and found > 0 else -1
        damage, offset, size, key_size = _take(buffer, first, node, page, pages, page_size, last, last_size)
        if damage == 0:
            nodes[found], offsets[found], sizes[found], state[5] = page * page_size + node, offset, size, key_size
            found += 1
    state[0], state[1], state[3], state[4] = height, found, damage, page


class _Walk:
    """A walk over the records of a tree, which goes on where it stopped."""

    def __init__(self, descriptor: int, header: Header, pages: int, most: int, backwards: bool = False) -> None:
        self._settings = (descriptor, pages, header.page_size, header.levels, header.root)
        self._entries = header.entries
        self._ordered = (int(backwards), int(header.ordered_as_bytes))
        self._stack = np.zeros(2 * header.levels, np.int64)
        self._pages = np.zeros(header.levels * header.page_size, np.uint8)
        self._last_key, self._marks = (np.zeros(header.page_size, np.uint8) for _ in range(2))
        self.state = np.zeros(6, np.int64)
        self.nodes, self.offsets, self.sizes = (np.zeros(most, np.int64) for _ in range(3))

    def find(self, wanted: int) -> int:
        """Go on until so many records are found or damage is; returns how many are."""
        if self.state[_FOUND] < wanted and not self.state[_DAMAGE]:
            tables = (self.state, self._stack)
            pages, found = address_of(self._pages), (self.nodes, self.offsets, self.sizes)
            if _walk.should_compile(wanted - int(self.state[_FOUND]), _COMPILING, _LOADING):
                _walk.run(
                    1, 1, 1, *self._settings, wanted, *self._ordered, *tables, self._pages, pages, self._last_key,
                    self._marks, *found,
                )  # fmt: skip
            else:
                _walk.interpret(
                    0, 1, *self._settings, wanted, *self._ordered, *tables, self._pages.data, pages,
                    self._last_key.data, self._marks.data, *found,
                )  # fmt: skip
            if wanted == self._entries and not self._ordered[0] and self.state[_HEIGHT] and not self.state[_DAMAGE]:
                self.state[_DAMAGE], self.state[_FOUND] = _MORE, wanted - 1
        return int(self.state[_FOUND])


class LmdbIndex:
    """The records of an LMDB in the order of their keys, found on demand. Thread-safe.

    The file stays open as long as the index lives. Messages of the methods' errors continue a sentence that begins with
    the LMDB's name.

    Args:
        path: the data file.

    Raises:
        DataError: it is no whole LMDB of records.
        OSError: it cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            self.descriptor = os.dup(file.fileno())
            """Of the data file, for reading at offsets."""
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still read then
        header = read_header(self.descriptor, path)
        self.entries = header.entries
        """How many records the LMDB says that it has."""
        self.page_size = header.page_size
        self._header = header
        self._status = _status(self.descriptor)
        self._lock = free_after_fork(threading.Lock())
        self._mapped: MappedFile | None = None
        self._mappable = True
        self._file_pages = min(self._status[0] // header.page_size, header.last_page + 1)
        if not self.entries:
            return
        try:
            self._walk = _Walk(self.descriptor, header, self._file_pages, self.entries)
        except MemoryError as error:
            raise DataError(f"'{path}' has {self.entries} records, too many for the memory") from error
        if self._status[0] < header.needed and not self.find(self.entries):
            raise truncated(path, self._status[0], header)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """Offset of each record in the file, valid for those that `find` has found."""
        return self._walk.offsets

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Bytes of each record, valid as `offsets`."""
        return self._walk.sizes

    def mapped(self) -> NDArray[np.uint8] | None:
        """The file in memory, of its size when it was opened; None where it cannot be mapped.

        What is read there counts only if `check` passes afterwards.
        """
        from caffepy.backend.cpu.jit.mapped_file import MappedFile

        with self._lock:
            if self._mapped is None and self._mappable:
                try:
                    self._mapped = MappedFile(self.descriptor, self._status[0])
                except (OSError, ValueError):  # a file system without maps; no address space; cut off, as `check` says
                    self._mappable = False
            return None if self._mapped is None else self._mapped.memory

    def check(self) -> None:
        """Refuse to read on if the file is not as it was when it was opened.

        Raises:
            DataError: it was cut off or written to, or its disk cannot read it.
        """
        status = _status(self.descriptor)
        if status[0] < self._status[0]:
            raise DataError(
                f"was cut off while it was read: it has {status[0]} of {self._status[0]} bytes; build it again"
            )
        if status != self._status:
            raise DataError("was changed while it was read; start again, and write to a copy of it")
        if self._mapped is not None and self._mapped.pages_lost:
            raise DataError("could not be read for a moment: it was cut off and grew again, or its disk is not whole")

    def find(self, count: int) -> bool:
        """Find the first `count` records; False if the tree is damaged or has not so many."""
        if count > self.entries:
            return False
        if self._walk.state[_FOUND] < count:
            with self._lock:
                self._walk.find(count)
        return bool(self._walk.state[_FOUND] >= count)

    @property
    def damage(self) -> str:
        """What ended the walk; empty: nothing yet."""
        state = self._walk.state
        return _DAMAGES[state[_DAMAGE]].format(page=state[_PAGE])

    def _locate(self, number: int) -> tuple[int, int, int]:
        """Node, offset and size of a record."""
        if not self.find(number + 1):
            raise DataError(f"is damaged at record {self._walk.state[_FOUND]}: {self.damage}; build it again")
        if self._walk.state[_FOUND] == number + 1:  # for those who read one after the other
            self.find(min(number + min(_AHEAD, number + _FIRST_AHEAD), self.entries))
        walk = self._walk
        return int(walk.nodes[number]), int(walk.offsets[number]), int(walk.sizes[number])

    def record(self, number: int) -> bytes:
        """The bytes of a record.

        Raises:
            DataError: the file is damaged there, or was changed.
        """
        _, offset, size = self._locate(number)
        return self._data(number, offset, size)

    def key(self, number: int) -> bytes:
        """The key of a record; raises as `record` does."""
        return self._key(number, self._locate(number)[0])

    def last(self) -> tuple[bytes, bytes]:
        """Key and bytes of the last record, found without the others; raises as `record` does."""
        walk = _Walk(self.descriptor, self._header, self._file_pages, 1, backwards=True)
        if not walk.find(1):
            damage = _DAMAGES[walk.state[_DAMAGE]].format(page=walk.state[_PAGE])
            raise DataError(f"is damaged at its last record: {damage}; build it again")
        number = self.entries - 1
        return self._key(number, int(walk.nodes[0])), self._data(number, int(walk.offsets[0]), int(walk.sizes[0]))

    def _key(self, number: int, node: int) -> bytes:
        size = _NODE.unpack(self._bytes(number, node, _NODE.size))[2]
        return self._bytes(number, node + _NODE.size, size)

    def _data(self, number: int, offset: int, size: int) -> bytes:
        if size > _MAX_BYTES:
            raise DataError(f"has {size} bytes in record {number}, more than a Datum may have; build it again")
        if offset % self.page_size == PAGE_HEADER:  # records beside others in a page begin behind a node's header
            header = self._bytes(number, offset - PAGE_HEADER, PAGE_HEADER)
            page, _, flags, pages = _OVERFLOW.unpack(header)
            owner = page == offset // self.page_size and flags == _OVERFLOW_PAGE
            if not owner or pages * self.page_size < PAGE_HEADER + size:
                raise DataError(f"is damaged at record {number}: its page has the header of another; build it again")
        return self._bytes(number, offset, size)

    def _bytes(self, number: int, offset: int, size: int) -> bytes:
        try:
            found = os.pread(self.descriptor, size, offset)
        except OSError as error:
            raise DataError(f"cannot be read at record {number}: {error.strerror}; is the disk whole?") from error
        self.check()
        if len(found) < size:
            raise DataError(f"ends within record {number}; build it again")
        return found


def _status(descriptor: int) -> tuple[int, int]:
    """What changes when a file is written to: size and time of the last change."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


_open: weakref.WeakValueDictionary[tuple[int, ...], LmdbIndex] = weakref.WeakValueDictionary()
_open_lock = free_after_fork(threading.Lock())


def open_index(path: Path) -> LmdbIndex:
    """The index of a data file, which all readers of the process share.

    Raises:
        DataError: it is no whole LMDB of records.
        OSError: it cannot be opened.
    """
    status = os.stat(path)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    with _open_lock:
        index = _open.get(key)
        if index is None:
            index = _open[key] = LmdbIndex(path)
        return index
