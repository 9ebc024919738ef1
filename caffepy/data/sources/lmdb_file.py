"""The headers of an LMDB's data file (format version 1, `mdb.c`): which tree of pages holds the records.

What decides where something lies in a file is read through a descriptor, so that it cannot change after it was checked.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path

from caffepy.errors import DataError

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
