"""An index of an LMDB file: offset and size of each record (format version 1, `mdb.c`).

The walk over the B+ tree's leaves validates everything it reads; liblmdb, which trusts its files, is not used. Page
headers and nodes are read through a descriptor into private memory, so they cannot change after validation.
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

from caffepy.backend.cpu.jit.deferred import Bytes, Int, Words, deferred_kernel, part, read_at
from caffepy.backend.types import host_address
from caffepy.errors import DataError
from caffepy.utils.files import open_regular
from caffepy.utils.process_fork import free_after_fork

if TYPE_CHECKING:
    from caffepy.backend.cpu.jit.compiler import MappedFile

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER = struct.Struct("<Q H H H H")
"""Page header: page number, padding, flags, end of the node offsets, start of the nodes."""
_META = struct.Struct("<II QQ 48s 48s QQ")
"""Meta page: magic, version, address, map size, free-list and main database records, last page, transaction."""
_DATABASE = struct.Struct("<I H H QQQQ Q")
"""Database record: padding (page size), flags, depth, branch, leaf and overflow pages, entries, root page."""
_META_PAGE = 8
_REVERSED, _DUPLICATES, _INTEGERS = 2, 4, 8
"""Database flags: reversed keys, several values per key, integer keys."""
_MAX_PAGES = 2**48
"""Branch nodes store page numbers in 48 bits; an empty tree has the root 2^64 - 1."""
MAX_LEVELS = 32
"""Maximum depth of liblmdb's cursors."""


@dataclass(frozen=True)
class Header:
    """The main database according to a meta page.

    Args:
        page_size: bytes per page.
        last_page: highest page number in use.
        transaction: transaction that wrote the meta page.
        flags: database flags.
        levels: depth of the tree.
        entries: number of records.
        root: page number of the root.
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
        """Expected file size. The file may be shorter if its last pages were freed in their own transaction."""
        return (self.last_page + 1) * self.page_size

    @property
    def ordered_as_bytes(self) -> bool:
        """Whether keys are sorted bytewise."""
        return not self.flags & (_REVERSED | _INTEGERS)


def read_header(descriptor: int, path: Path) -> Header:
    """Return the newer of the two meta pages of an open data file.

    Raises:
        DataError: the file is not an LMDB, is damaged, or is of a kind that holds no Datums.
    """
    size = os.fstat(descriptor).st_size
    first = _read_meta(descriptor, path, 0, 0)
    second = _read_meta(descriptor, path, first.page_size, 1)
    if second.page_size != first.page_size or abs(second.transaction - first.transaction) > 1:
        raise DataError(f"'{path}' is damaged: its two headers contradict each other; build it again")
    header = max(first, second, key=lambda header: header.transaction)
    if header.entries and not (header.root < _MAX_PAGES and 1 <= header.levels <= MAX_LEVELS):
        raise DataError(f"'{path}' is damaged: its header has {header.entries} records but no tree; build it again")
    if header.flags & _DUPLICATES:
        raise DataError(
            f"'{path}' holds several values per key (MDB_DUPSORT); Caffe's databases have one record per key"
        )
    if header.entries * 10 > size:
        raise (
            truncation_error(path, size, header)
            if size < header.needed
            else DataError(
                f"'{path}' is damaged: its header announces {header.entries} records in {size} bytes; build it again"
            )
        )
    return header


def truncation_error(path: Path, size: int, header: Header) -> DataError:
    """Return the error for a data file that is too short."""
    return DataError(
        f"'{path}' is truncated: it has {size} bytes, but its header requires {header.needed}; copy or build it again"
    )


def _read_meta(descriptor: int, path: Path, offset: int, number: int) -> Header:
    page = os.pread(descriptor, _HEADER.size + _META.size, offset)
    if len(page) < _HEADER.size + _META.size:
        raise _not_lmdb(path)
    magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(page, _HEADER.size)
    own_number, _, page_flags, _, _ = _HEADER.unpack_from(page)
    if magic != _MAGIC or not page_flags & _META_PAGE or own_number != number:
        raise _not_lmdb(path)
    if version != _VERSION:
        raise DataError(f"'{path}' has LMDB format {version}; only format {_VERSION} (liblmdb 0.9) is supported")
    page_size = _DATABASE.unpack(free)[0]
    if not 256 <= page_size <= 65536 or page_size & (page_size - 1):
        raise DataError(f"'{path}' is damaged: its header has a page size of {page_size} bytes; build it again")
    _, flags, levels, _, _, _, entries, root = _DATABASE.unpack(main)
    return Header(page_size, last_page, transaction, flags, levels, entries, root)


def _not_lmdb(path: Path) -> DataError:
    return DataError(f"'{path}' is not an LMDB data file (no magic number in its headers); was it copied completely?")


PAGE_HEADER = 16
"""Size of the header before an overflow page's data or a page's nodes."""
_NODE = struct.Struct("<I H H")
"""Node header: data size, flags, key size."""
_OVERFLOW = struct.Struct("<Q H H I")
"""Overflow page header: page number, padding, flags, number of pages."""
_OVERFLOW_PAGE = 4
_HEIGHT, _FOUND, _PAGES, _DAMAGE, _PAGE, _KEY_SIZE = 0, 1, 2, 3, 4, 5
"""Indices in a walk's state: stack height, records found, pages entered, damage code, page of the damage, size of the
last key."""
_DAMAGE_MESSAGES = (
    "",
    "page {page} has an unexpected page number or type",
    "records in page {page} overlap or exceed the page",
    "the keys in page {page} are not in order",
    "it has fewer records than its header says",
    "it has more records than its header says",
    "page {page} holds a subdatabase or several values per key",
    "page {page} cannot be read or lies outside the file",
)
_TOO_MANY_RECORDS = 5
_MAX_READAHEAD = 1024
"""Maximum number of records located ahead of the requested one."""
_MIN_READAHEAD = 64
"""Records located ahead at least; grows with the records located so far."""
_COMPILE_COST_RECORDS = 15_000
"""Records that Python locates while the walk is compiled, about 1 s."""
_NUMBA_IMPORT_RECORDS = 5000
"""Records that Python locates while numba is imported and loads cached machine code."""
_MAX_BYTES = 2**31 - 1
"""Maximum size of a record: protobuf's limit."""


@part
def word(file: Bytes, at: Int, size: Int) -> Int:
    """Return a little-endian number of `size` bytes."""
    value: Int = 0
    for i in range(size):
        value |= np.int64(file[at + i]) << (8 * i)
    return value


@part
def _check_nodes(buffer: Bytes, at: Int, page_size: Int, count: Int, upper: Int, kind: Int, marks: Bytes) -> Int:
    """Return 0 if the nodes fill a page from `upper` to its end without gap or overlap, else damage code 2."""
    # `marks` has a zero per byte of a page, and is all zeros again if the page is valid.
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
def _enter_page(
    descriptor: Int,
    pages: Int,
    page_size: Int,
    page: Int,
    buffer: Bytes,
    buffer_at: Int,
    at: Int,
    kind: Int,
    marks: Bytes,
) -> Int:
    """Read a page to `at` in the buffer and validate it; return its damage code, 0 for a valid page of this kind."""
    if page < 2 or page >= pages:
        return 7
    if read_at(descriptor, buffer_at + at, page_size, page * page_size) != page_size:
        return 7
    if word(buffer, at, 8) != page or word(buffer, at + 10, 2) != kind:
        return 1
    lower, upper = word(buffer, at + 12, 2), word(buffer, at + 14, 2)
    # The end of a 65536-byte page is stored as 0 in 16 bits.
    if upper == 0 and page_size == 65536:
        upper = page_size
    if lower < 16 or lower % 2 != 0 or lower > upper or upper > page_size:
        return 1
    return _check_nodes(buffer, at, page_size, (lower - 16) // 2, upper, kind, marks)


@part
def _is_after(buffer: Bytes, key: Int, size: Int, last: Bytes, last_size: Int) -> bool:
    """Return whether a key is bytewise greater than the last key."""
    for i in range(min(size, last_size)):
        if buffer[key + i] != last[i]:
            return buffer[key + i] > last[i]
    return size > last_size


@part
def _read_leaf_node(
    buffer: Bytes,
    first: Int,
    node: Int,
    page: Int,
    pages: Int,
    page_size: Int,
    last: Bytes,
    last_size: Int,
) -> tuple[Int, Int, Int, Int]:
    """Read a leaf node; return damage code, file offset of its data, data size and key size."""
    # Its key must be greater than `last` unless `last_size` is -1, and replaces `last`.
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
    begin: Int,
    end: Int,
    descriptor: Int,
    pages: Int,
    page_size: Int,
    levels: Int,
    root: Int,
    wanted: Int,
    backwards: Int,
    ordered: Int,
    state: Words,
    stack: Words,
    buffer: Bytes,
    buffer_at: Int,
    last: Bytes,
    marks: Bytes,
    nodes: Words,
    offsets: Words,
    sizes: Words,
) -> None:
    """Walk until `wanted` records are located."""
    # The stack holds page number and next node per level; the buffer holds these pages. `backwards` starts at the last
    # record and allows only `wanted` = 1.
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
            damage = _enter_page(descriptor, pages, page_size, page, buffer, buffer_at, at, kind, marks)
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
        damage, offset, size, key_size = _read_leaf_node(buffer, first, node, page, pages, page_size, last, last_size)
        if damage == 0:
            nodes[found], offsets[found], sizes[found], state[5] = page * page_size + node, offset, size, key_size
            found += 1
    state[0], state[1], state[3], state[4] = height, found, damage, page


class _TreeWalk:
    """A resumable walk over the records of a tree."""

    def __init__(self, descriptor: int, header: Header, pages: int, capacity: int, backwards: bool = False) -> None:
        self._settings = (descriptor, pages, header.page_size, header.levels, header.root)
        self._entries = header.entries
        self._ordered = (int(backwards), int(header.ordered_as_bytes))
        self._stack = np.zeros(2 * header.levels, np.int64)
        self._pages = np.zeros(header.levels * header.page_size, np.uint8)
        self._last_key, self._marks = (np.zeros(header.page_size, np.uint8) for _ in range(2))
        self.state = np.zeros(6, np.int64)
        self.nodes, self.offsets, self.sizes = (np.zeros(capacity, np.int64) for _ in range(3))

    def find(self, wanted: int) -> int:
        """Continue until `wanted` records are located or damage is found; return the number of located records."""
        if self.state[_FOUND] < wanted and not self.state[_DAMAGE]:
            tables = (self.state, self._stack)
            pages, record_tables = host_address(self._pages), (self.nodes, self.offsets, self.sizes)
            if _walk.should_compile(wanted - int(self.state[_FOUND]), _COMPILE_COST_RECORDS, _NUMBA_IMPORT_RECORDS):
                _walk.run(
                    1,
                    1,
                    1,
                    *self._settings,
                    wanted,
                    *self._ordered,
                    *tables,
                    self._pages,
                    pages,
                    self._last_key,
                    self._marks,
                    *record_tables,
                )
            else:
                _walk.interpret(
                    0,
                    1,
                    *self._settings,
                    wanted,
                    *self._ordered,
                    *tables,
                    self._pages.data,
                    pages,
                    self._last_key.data,
                    self._marks.data,
                    *record_tables,
                )
            if wanted == self._entries and not self._ordered[0] and self.state[_HEIGHT] and not self.state[_DAMAGE]:
                self.state[_DAMAGE], self.state[_FOUND] = _TOO_MANY_RECORDS, wanted - 1
        return int(self.state[_FOUND])


class LmdbIndex:
    """The records of an LMDB in key order, located on demand. Thread-safe.

    The file stays open while the index exists. Error messages of the methods follow the LMDB's name.

    Args:
        path: the data file.

    Raises:
        DataError: the file is not a valid LMDB of records.
        OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        with open_regular(path) as file:
            self.descriptor = os.dup(file.fileno())
            """Descriptor of the data file, for `os.pread`."""
        weakref.finalize(self, os.close, self.descriptor).atexit = False  # threads may still read at exit
        header = read_header(self.descriptor, path)
        self.entries = header.entries
        """Number of records according to the header."""
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
            self._walk = _TreeWalk(self.descriptor, header, self._file_pages, self.entries)
        except MemoryError as error:
            raise DataError(f"'{path}' has {self.entries} records, whose index does not fit into memory") from error
        if self._status[0] < header.needed and not self.find(self.entries):
            raise truncation_error(path, self._status[0], header)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """File offset of each record; valid for records that `find` has located."""
        return self._walk.offsets

    @property
    def sizes(self) -> NDArray[np.int64]:
        """Size of each record in bytes; valid as `offsets`."""
        return self._walk.sizes

    def mapped(self) -> NDArray[np.uint8] | None:
        """Return the memory-mapped file with its size at opening; None if it cannot be mapped.

        Data read from it is valid only if `check` passes afterwards.
        """
        from caffepy.backend.cpu.jit.compiler import MappedFile

        with self._lock:
            if self._mapped is None and self._mappable:
                try:
                    self._mapped = MappedFile(self.descriptor, self._status[0])
                except (OSError, ValueError):  # no mmap on this file system, no address space, or a truncated file
                    self._mappable = False
            return None if self._mapped is None else self._mapped.memory

    def check(self) -> None:
        """Check that the file has not changed since it was opened.

        Raises:
            DataError: the file was truncated or modified, or the disk cannot be read.
        """
        status = _status(self.descriptor)
        if status[0] < self._status[0]:
            raise DataError(
                f"was truncated during reading: it has {status[0]} of {self._status[0]} bytes; build it again"
            )
        if status != self._status:
            raise DataError("was modified during reading; start again, and write to a copy of it")
        if self._mapped is not None and self._mapped.pages_lost:
            raise DataError("could not be read temporarily: it was truncated and restored, or the disk is damaged")

    def find(self, count: int) -> bool:
        """Locate the first `count` records; return False if the tree is damaged or has fewer."""
        if count > self.entries:
            return False
        if self._walk.state[_FOUND] < count:
            with self._lock:
                self._walk.find(count)
        return bool(self._walk.state[_FOUND] >= count)

    @property
    def damage(self) -> str:
        """Description of the damage that ended the walk; empty if there is none."""
        state = self._walk.state
        return _DAMAGE_MESSAGES[state[_DAMAGE]].format(page=state[_PAGE])

    def _locate(self, number: int) -> tuple[int, int, int]:
        """Return node offset, data offset and size of a record."""
        if not self.find(number + 1):
            raise DataError(f"is damaged at record {self._walk.state[_FOUND]}: {self.damage}; build it again")
        if self._walk.state[_FOUND] == number + 1:  # sequential reading: locate more records ahead
            self.find(min(number + min(_MAX_READAHEAD, number + _MIN_READAHEAD), self.entries))
        walk = self._walk
        return int(walk.nodes[number]), int(walk.offsets[number]), int(walk.sizes[number])

    def record(self, number: int) -> bytes:
        """Return the bytes of a record.

        Raises:
            DataError: the file is damaged there or was modified.
        """
        _, offset, size = self._locate(number)
        return self._data(number, offset, size)

    def key(self, number: int) -> bytes:
        """Return the key of a record; raises as `record` does."""
        return self._key(number, self._locate(number)[0])

    def last(self) -> tuple[bytes, bytes]:
        """Return key and bytes of the last record without locating the others; raises as `record` does."""
        walk = _TreeWalk(self.descriptor, self._header, self._file_pages, 1, backwards=True)
        if not walk.find(1):
            damage = _DAMAGE_MESSAGES[walk.state[_DAMAGE]].format(page=walk.state[_PAGE])
            raise DataError(f"is damaged at its last record: {damage}; build it again")
        number = self.entries - 1
        return self._key(number, int(walk.nodes[0])), self._data(number, int(walk.offsets[0]), int(walk.sizes[0]))

    def _key(self, number: int, node: int) -> bytes:
        size = _NODE.unpack(self._bytes(number, node, _NODE.size))[2]
        return self._bytes(number, node + _NODE.size, size)

    def _data(self, number: int, offset: int, size: int) -> bytes:
        if size > _MAX_BYTES:
            raise DataError(f"has {size} bytes in record {number}, which exceeds protobuf's limit; build it again")
        if offset % self.page_size == PAGE_HEADER:  # a record on overflow pages; others follow a node header
            header = self._bytes(number, offset - PAGE_HEADER, PAGE_HEADER)
            page, _, flags, pages = _OVERFLOW.unpack(header)
            valid = page == offset // self.page_size and flags == _OVERFLOW_PAGE
            if not valid or pages * self.page_size < PAGE_HEADER + size:
                raise DataError(f"is damaged at record {number}: its overflow page has a wrong header; build it again")
        return self._bytes(number, offset, size)

    def _bytes(self, number: int, offset: int, size: int) -> bytes:
        try:
            data = os.pread(self.descriptor, size, offset)
        except OSError as error:
            raise DataError(f"cannot be read at record {number}: {error.strerror}; check the disk") from error
        self.check()
        if len(data) < size:
            raise DataError(f"ends within record {number}; build it again")
        return data


def _status(descriptor: int) -> tuple[int, int]:
    """Return size and modification time of a file."""
    status = os.fstat(descriptor)
    return status.st_size, status.st_mtime_ns


_open: weakref.WeakValueDictionary[tuple[int, ...], LmdbIndex] = weakref.WeakValueDictionary()
_open_lock = free_after_fork(threading.Lock())


def open_index(path: Path) -> LmdbIndex:
    """Return the index of a data file; all readers of the process share it.

    Raises:
        DataError: the file is not a valid LMDB of records.
        OSError: the file cannot be opened.
    """
    status = os.stat(path)
    key = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
    with _open_lock:
        index = _open.get(key)
        if index is None:
            index = _open[key] = LmdbIndex(path)
        return index
