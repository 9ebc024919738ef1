"""Whether an LMDB's file is whole, found out without mapping it.

LMDB maps its file into memory, and touching a page that the file lacks ends the process with SIGBUS. Owns what has to
be known of LMDB's file format (version 1, `mdb.c`): two meta pages with the number of the last page, and trees.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from caffepy.errors import DataError

_MAGIC = 0xBEEFC0DE
_VERSION = 1
_HEADER = struct.Struct("<Q H H H H")
"""Page number, padding, flags, end of the nodes' places, begin of the nodes; the last two are an overflow's length."""
_META = struct.Struct("<II QQ 48s 48s QQ")
"""Magic, version, address, map size, the free list's and the main database's records, last page, transaction."""
_DATABASE = struct.Struct("<I H H QQQQ Q")
"""Padding (page size), flags, depth, branch, leaf and overflow pages, entries, root page."""
_NODE = struct.Struct("<H H H H")
"""Two halves of a size, or of a page number with the flags as its top; flags; size of the key."""
_BRANCH, _LEAF, _META_PAGE = 1, 2, 8
_BIG_DATA, _SUB_DATABASE = 1, 2
_DUPLICATES = 4
_NO_PAGE = 2**64 - 1


@dataclass(frozen=True)
class _Meta:
    page_size: int
    last_page: int
    transaction: int
    roots: tuple[int, int]
    version: int
    flags: int
    entries: int


@dataclass(frozen=True)
class Tree:
    """The main database of an LMDB.

    Args:
        page_size: bytes of a page.
        root: number of the page at the top.
        entries: how many records it says that it holds.
    """

    page_size: int
    root: int
    entries: int


def read_tree(path: Path) -> Tree | None:
    """The main database as the last transaction left it; None if it is not a plain map from keys to values."""
    with path.open("rb") as file:
        first = _read_meta(file, 0)
        second = None if first is None else _read_meta(file, first.page_size)
    metas = [meta for meta in (first, second) if meta is not None]
    if not metas:
        return None
    newest = max(metas, key=lambda meta: meta.transaction)
    if newest.version != _VERSION or newest.flags & _DUPLICATES or newest.roots[1] == _NO_PAGE:
        return None
    return Tree(newest.page_size, newest.roots[1], newest.entries)


def check_file(path: Path) -> None:
    """Refuse a data file that is not LMDB's, or that lacks pages which are in use.

    Raises:
        DataError: saying what is wrong.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        first = _read_meta(file, 0)
        if first is None:
            raise DataError(f"'{path}' is not an LMDB data file (no LMDB mark at its begin); was it copied completely?")
        second = _read_meta(file, first.page_size)
        newest = second if second is not None and second.transaction > first.transaction else first
        needed = (newest.last_page + 1) * newest.page_size
        # The last pages are never written if they were freed in the transaction that took them, so look twice.
        if size < needed and (second is None or not _is_closed(file, newest, size // newest.page_size)):
            raise DataError(
                f"'{path}' is truncated: it has {size} bytes, its own header asks for {needed}; copy or build it again"
            )


def _read_meta(file: BinaryIO, offset: int) -> _Meta | None:
    file.seek(offset)
    page = file.read(_HEADER.size + _META.size)
    if len(page) < _HEADER.size + _META.size:
        return None
    magic, version, _, _, free, main, last_page, transaction = _META.unpack_from(page, _HEADER.size)
    page_size = _DATABASE.unpack(free)[0]
    if magic != _MAGIC or not _HEADER.unpack_from(page)[2] & _META_PAGE or not 256 <= page_size <= 65536:
        return None
    _, flags, _, _, _, _, entries, root = _DATABASE.unpack(main)
    return _Meta(page_size, last_page, transaction, (_DATABASE.unpack(free)[-1], root), version, flags, entries)


def _is_closed(file: BinaryIO, meta: _Meta, pages: int) -> bool:
    """Whether all pages that can be reached from the roots are among the first `pages`."""
    waiting = [root for root in meta.roots if root != _NO_PAGE]
    seen: set[int] = set()
    while waiting:
        number = waiting.pop()
        if number >= pages:
            return False
        if number in seen:
            continue
        seen.add(number)
        file.seek(number * meta.page_size)
        page = file.read(meta.page_size)
        try:
            waiting.extend(_children(page))
        except struct.error:
            return False
    return True


def _children(page: bytes) -> Iterator[int]:
    """The pages that a page refers to; of an overflow, its last."""
    number, _, flags, lower, upper = _HEADER.unpack_from(page)
    if not flags & (_BRANCH | _LEAF):
        length = lower | upper << 16
        if length > 1:
            yield number + length - 1
        return
    for i in range((lower - _HEADER.size) // 2):
        place = struct.unpack_from("<H", page, _HEADER.size + 2 * i)[0]
        low, high, node_flags, key_size = _NODE.unpack_from(page, place)
        data = place + _NODE.size + key_size
        if flags & _BRANCH:
            yield low | high << 16 | node_flags << 32
        elif node_flags & _BIG_DATA:
            yield struct.unpack_from("<Q", page, data)[0]
        elif node_flags & _SUB_DATABASE and _DATABASE.unpack_from(page, data)[-1] != _NO_PAGE:
            yield _DATABASE.unpack_from(page, data)[-1]
