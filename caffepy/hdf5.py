"""A reader of HDF5 files in Python that is safe for untrusted files.

libhdf5 crashes, hangs or allocates gigabytes on some damaged files, and its caller cannot prevent this. This reader
checks every access against the file's length and limits the metadata that it reads to twice the file's length, so a
structure that refers to itself is an error after a time proportional to the file's size. Array sizes are compared
with the stored bytes before memory is allocated.

Supported: superblocks 0 to 3 with a user block; both versions of object headers and groups, soft links; integers, IEEE
floats of 2, 4 and 8 bytes, both byte orders, strings; compact, contiguous and chunked layout with all chunk indexes;
the filters deflate, shuffle and fletcher32. Refused by name: other types and filters, virtual datasets, external
storage and external links. Metadata checksums are not verified.

Specification: https://support.hdfgroup.org/documentation/hdf5/latest/_f_m_t3.html
"""

from __future__ import annotations

import math
import os
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray

from caffepy.errors import UserError
from caffepy.files import open_regular

_MAX_LINKS = 16
"""Maximum length of a chain of soft links, as in libhdf5."""
_MAX_AXES = 32
"""Maximum rank, as in libhdf5."""
_MAX_NAME = 200
"""Maximum characters of a path in messages."""
_MIN_SIZE_LIMIT = 1 << 26
"""Dataset size in bytes that is always allowed."""
_MAX_COMPRESSION_RATIO = 1032
"""Maximum compression ratio of deflate, the densest of the supported filters."""
_MIN_CHUNK_SIZE = 512
"""Minimum size that a chunk counts for in limits: its overhead in Python."""
_CONVERT_ELEMENTS = 1 << 22
"""Elements converted per step."""
_MIN_BUDGET = 1 << 16
"""Metadata bytes that are always allowed."""
_DAMAGE = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions that reading a damaged file raises."""

_Chunk = tuple[int, int, int]
"""A chunk's address, size, and mask of skipped filters."""

_MAGIC = b"\x89HDF\r\n\x1a\n"
_DATASPACE, _LINK_INFO, _DATATYPE, _OLD_FILL, _FILL, _LINK, _EXTERNAL, _LAYOUT = 1, 2, 3, 4, 5, 6, 7, 8
_FILTERS, _ATTRIBUTE, _CONTINUATION, _SYMBOL_TABLE, _ATTRIBUTE_INFO = 11, 12, 16, 17, 21
"""Message types of object headers."""
_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)
_DEFLATE, _SHUFFLE, _FLETCHER32 = 1, 2, 3
_FILTER_NAMES = {4: "szip", 5: "nbit", 6: "scaleoffset", 307: "bzip2", 32000: "lzf", 32001: "blosc", 32015: "zstd"}
_TYPE_NAMES = (
    "whole numbers", "floats", "times", "strings", "bit fields", "opaque data", "compounds", "references",
    "enumerations", "sequences", "arrays", "complex numbers",
)  # fmt: skip
_IEEE = {2: (10, 5, 10, 15), 4: (23, 8, 23, 127), 8: (52, 11, 52, 1023)}
"""Float formats by size: exponent position, exponent bits, mantissa bits, exponent bias."""


@contextmanager
def open_hdf5(path: Path, failure: type[UserError], name: str = "HDF5 file") -> Iterator[Group]:
    """Open an HDF5 file for reading; yield its root group.

    Args:
        path: the file.
        failure: the error type to raise.
        name: kind of file, for messages.

    Raises:
        failure: the file cannot be opened or read.
    """
    try:
        with open_regular(path) as stream:
            yield read_hdf5(stream)
    except _DAMAGE as error:
        raise failure(f"{name} '{path}' cannot be read: {_reason(error)}") from error


def read_hdf5(stream: BinaryIO) -> Group:
    """Return the root group of an open file.

    Raises:
        ValueError: the file is damaged or not an HDF5 file.
    """
    file = _File(stream)
    root = file.object(file.root, "/")
    if not isinstance(root, Group):
        raise ValueError("it has no root group; the file is damaged")
    return root


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, without KeyError's quotes."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error.args[0]) if error.args else ""
    return text.partition("\n")[0] or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def find_object(group: Group, name: str) -> Group | Dataset | None:
    """Return the group or dataset at a path below a group, or None. Soft links are followed.

    Raises:
        ValueError: the path has an external link or too many soft links, or the file is damaged.
    """
    return _find(group, name, [_MAX_LINKS])


def _find(group: Group, name: str, links: list[int]) -> Group | Dataset | None:
    item: Group | Dataset | None = group.file.object(group.file.root, "/") if name.startswith("/") else group
    for part in name.split("/"):
        if part in ("", "."):
            continue
        if not isinstance(item, Group) or part not in item.links:
            return None
        link = item.links[part]
        if link is None:
            raise ValueError(f"'{part}' is an external link, which would read another file; copy the data into one")
        if isinstance(link, str):
            links[0] -= 1
            if links[0] < 0:
                raise ValueError(f"'{name[:_MAX_NAME]}' needs more than {_MAX_LINKS} soft links")
            group.file.charge(len(link))
            item = _find(item, link, links)
        else:
            item = group.file.object(link, f"{item.name.rstrip('/')}/{part}"[:_MAX_NAME])
    return item


def check_dataset(dataset: Dataset, total: int = 0) -> int:
    """Check that a dataset is not far larger than its stored bytes. No values are read.

    Args:
        dataset: the dataset.
        total: sum of the sizes of previous datasets of the file: several names may share the same bytes.

    Returns:
        `total` plus the size of this dataset.

    Raises:
        ValueError: the dataset or the total is too large for the file, or the file is damaged.
    """
    length, ratio = dataset.file.length, _MAX_COMPRESSION_RATIO if dataset.layout == _CHUNKED else 1
    stored = min(dataset.stored_bytes, length)
    size = max(dataset.needed_bytes, len(dataset.chunks) * _MIN_CHUNK_SIZE)
    if size > max(_MIN_SIZE_LIMIT, stored * ratio) or total + size > _MIN_SIZE_LIMIT + length * ratio:
        raise _too_large(dataset, stored)
    return total + size


def _too_large(dataset: Dataset, stored: int) -> ValueError:
    return ValueError(
        f"'{dataset.name}' would take {dataset.needed_bytes} bytes, but the file has only {stored} of it; it is damaged"
    )


# -- bytes -----------------------------------------------------------------------------------------------


class _File:
    """A file's bytes from its superblock, and a cache of its objects.

    Args:
        stream: a seekable file.

    Raises:
        ValueError: the file is damaged or not an HDF5 file.
    """

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self.length = stream.seek(0, os.SEEK_END)
        self._budget = 2 * self.length + _MIN_BUDGET
        self._objects: dict[int, Group | Dataset | None] = {}
        self._base = self._find_superblock()
        self.length -= self._base
        self.offset_size = self.length_size = 8
        start = self.metadata(8, 8)
        version = start.number(1)
        if version > 3:
            raise ValueError(f"its superblock has the unknown version {version}")
        if version < 2:
            start.skip(4)
        self.offset_size, self.length_size = start.number(1), start.number(1)
        if not {self.offset_size, self.length_size} <= {2, 4, 8}:
            raise ValueError("its superblock is damaged")
        rest = self.metadata({0: 24, 1: 28}.get(version, 12), 6 * self.offset_size)
        base, _, end = rest.offset() or 0, rest.offset(), _defined(rest.offset())
        if self.length < end - base:
            raise ValueError(f"it is truncated: {self.length} of {end - base} bytes exist; copy it again")
        if version < 2:  # driver information block, and name of the root group
            rest.skip(2 * self.offset_size)
        self.root = _defined(rest.offset())

    def _find_superblock(self) -> int:
        """Return the superblock's offset: 0, or 512 times a power of two after a user block."""
        at = 0
        while at + len(_MAGIC) <= self.length:
            self._stream.seek(at)
            if self._stream.read(len(_MAGIC)) == _MAGIC:
                return at
            at = 2 * at or 512
        raise ValueError("it is not an HDF5 file (it has no HDF5 signature)")

    def charge(self, size: int) -> None:
        """Add metadata bytes to the budget.

        Raises:
            ValueError: the budget is exceeded: structures are cyclic or overlap.
        """
        self._budget -= size
        if self._budget < 0:
            raise ValueError("its structures refer to themselves or overlap; the file is damaged")

    def metadata(self, address: int, size: int) -> _Cursor:
        """Read metadata.

        Raises:
            ValueError: the range is outside the file, or the budget is exceeded.
        """
        self.charge(size)
        return _Cursor(self, self.read(address, size))

    def read(self, address: int, size: int) -> bytes:
        """Read bytes at an address.

        Raises:
            ValueError: they are not within the file.
        """
        self._seek(address, size)
        data = self._stream.read(size)
        if len(data) != size:
            raise ValueError("it has become shorter while it was read")
        return data

    def read_into(self, address: int, array: NDArray[Any]) -> None:
        """Read bytes at an address into a contiguous array.

        Raises:
            ValueError: they are not within the file.
        """
        view = memoryview(array.reshape(-1).view(np.uint8).data)
        self._seek(address, len(view))
        while len(view):
            count = self._stream.readinto(view)  # type: ignore[attr-defined]
            if not count:
                raise ValueError("it has become shorter while it was read")
            view = view[count:]

    def _seek(self, address: int, size: int) -> None:
        if address + size > self.length:
            raise ValueError(f"it ends before byte {self._base + address + size}; the file is damaged")
        self._stream.seek(self._base + address)

    def object(self, address: int, name: str) -> Group | Dataset | None:
        """Return the group or dataset whose header is at an address; None for other objects.

        Args:
            address: address of the object header.
            name: the object's path, for messages.
        """
        if address not in self._objects:
            header = _Header(self, address)
            item: Group | Dataset | None = None
            if header.has(_LAYOUT):
                item = Dataset(header, name)
            elif header.has(_SYMBOL_TABLE) or header.has(_LINK_INFO) or header.has(_LINK):
                item = Group(header, name)
            self._objects[address] = item
        return self._objects[address]


class _Cursor:
    """Sequential reader of bytes; reading beyond the end raises ValueError."""

    def __init__(self, file: _File, data: bytes) -> None:
        self.file = file
        self.data = data
        self.at = 0

    @property
    def remaining(self) -> int:
        """Number of remaining bytes."""
        return len(self.data) - self.at

    def take(self, size: int) -> bytes:
        """Return the next `size` bytes."""
        if size > self.remaining:
            raise ValueError("a structure ends early; the file is damaged")
        self.at += size
        return self.data[self.at - size : self.at]

    def skip(self, size: int) -> None:
        """Skip bytes."""
        self.take(size)

    def number(self, size: int) -> int:
        """Return an unsigned number."""
        return int.from_bytes(self.take(size), "little")

    def length(self) -> int:
        """Return a number of the file's length size."""
        return self.number(self.file.length_size)

    def offset(self) -> int | None:
        """Return an address, or None if it is undefined."""
        size = self.file.offset_size
        address = self.number(size)
        return None if address == (1 << 8 * size) - 1 else address

    def expect(self, signature: bytes) -> _Cursor:
        """Check and skip a 4-byte signature."""
        if self.take(4) != signature:
            raise ValueError(f"its structure '{signature.decode()}' is missing; the file is damaged")
        return self


def _defined(address: int | None) -> int:
    if address is None:
        raise ValueError("an address is not set; the file is damaged")
    return address


def _bytes_for(value: int) -> int:
    """Return the number of bytes that a value needs."""
    return (max(value, 1).bit_length() + 7) // 8


# -- objects ---------------------------------------------------------------------------------------------


class _Header:
    """The messages of an object header (version 1 or 2)."""

    def __init__(self, file: _File, address: int) -> None:
        self.file = file
        self.address = address
        self._messages: list[tuple[int, int, bytes]] = []
        start = file.metadata(address, 6)
        if start.data[:4] == b"OHDR":
            self._read_v2(start.data[5])
        elif start.data[0] == 1:
            start = file.metadata(address, 12)
            start.skip(8)
            self._read_blocks(address + 16, start.number(4), self._read_v1_block)
        else:
            raise ValueError("an object header is damaged")

    def _read_v2(self, flags: int) -> None:
        at = self.address + 6 + (16 if flags & 0x20 else 0) + (4 if flags & 0x10 else 0)
        width = 1 << (flags & 3)
        size = self.file.metadata(at, width).number(width)
        extra = 2 if flags & 4 else 0

        def read(block: _Cursor) -> Iterator[tuple[int, int, bytes]]:
            if block.data[:4] == b"OCHK":
                block.skip(4)
                block.data = block.data[:-4]
            while block.remaining >= 4 + extra:
                kind, length, flag = block.number(1), block.number(2), block.number(1)
                block.skip(extra)
                yield kind, flag, block.take(length)

        self._read_blocks(at + width, size, read)

    @staticmethod
    def _read_v1_block(block: _Cursor) -> Iterator[tuple[int, int, bytes]]:
        while block.remaining >= 8:
            kind, length, flag = block.number(2), block.number(2), block.number(1)
            block.skip(3)
            yield kind, flag, block.take(length)

    def _read_blocks(
        self, address: int, size: int, read: Callable[[_Cursor], Iterator[tuple[int, int, bytes]]]
    ) -> None:
        """Read the messages of a block and its continuation blocks."""
        blocks = [(address, size)]
        for start, length in blocks:
            for message in read(self.file.metadata(start, length)):
                if message[0] == _CONTINUATION:
                    cursor = _Cursor(self.file, message[2])
                    blocks.append((_defined(cursor.offset()), cursor.length()))
                    self.file.charge(8)  # also for an empty block
                else:
                    self._messages.append(message)

    def has(self, kind: int) -> bool:
        """Return whether there is a message of a type."""
        return any(message[0] == kind for message in self._messages)

    def all(self, kind: int) -> Iterator[_Cursor]:
        """Yield the messages of a type."""
        for message_kind, flags, data in self._messages:
            if message_kind == kind:
                yield self._shared(kind, data) if flags & 2 else _Cursor(self.file, data)

    def first(self, kind: int) -> _Cursor | None:
        """Return the first message of a type, or None."""
        return next(self.all(kind), None)

    def _shared(self, kind: int, data: bytes) -> _Cursor:
        """Return a message stored in another object's header, such as a committed datatype."""
        cursor = _Cursor(self.file, data)
        version, where = cursor.number(1), cursor.number(1)
        if version == 3 and where != 2:
            raise ValueError("it has shared object header messages, which are not read; copy it with h5repack")
        cursor.skip(6 if version == 1 else 0)
        other = _Header(self.file, _defined(cursor.offset()))
        for message_kind, flags, content in other._messages:
            if message_kind == kind and not flags & 2:
                return _Cursor(self.file, content)
        raise ValueError("a committed datatype is missing; the file is damaged")


@dataclass(frozen=True)
class _Type:
    """A datatype.

    Args:
        name: name for messages.
        size: bytes per element.
        dtype: NumPy dtype; None unless the type is a number or a fixed-size string.
        text: whether it is a variable-length string.
    """

    name: str
    size: int
    dtype: np.dtype[Any] | None = None
    text: bool = False


def _read_type(cursor: _Cursor) -> _Type:
    kind = cursor.number(1) & 15
    bits, size = cursor.number(3), cursor.number(4)
    name = _TYPE_NAMES[kind] if kind < len(_TYPE_NAMES) else "an unknown type"
    if not size:
        raise ValueError("a datatype has no bytes; the file is damaged")
    order = "<>"[bits & 1]
    if kind == 0 and size in (1, 2, 4, 8) and (cursor.number(2), cursor.number(2)) == (0, 8 * size):
        return _Type(name, size, np.dtype(f"{order}{'i' if bits & 8 else 'u'}{size}"))
    if kind == 1 and size in _IEEE and not bits & 64:
        exponent, exponent_bits, mantissa_bits, bias = _IEEE[size]
        layout = (cursor.number(2), cursor.number(2), *cursor.take(4), cursor.number(4), bits >> 8 & 255)
        if layout == (0, 8 * size, exponent, exponent_bits, 0, mantissa_bits, bias, 8 * size - 1):
            return _Type(name, size, np.dtype(f"{order}f{size}"))
    if kind == 3 and size < 1 << 31:
        return _Type(name, size, np.dtype(f"S{size}"))
    if kind == 9 and bits & 15 == 1:
        return _Type("strings of variable length", size, text=True)
    return _Type(f"{name} of {size} bytes" if kind < 2 else name, size)


def _read_space(cursor: _Cursor) -> tuple[tuple[int, ...] | None, tuple[int, ...]]:
    """Return the shape (None for a null dataspace) and the maximum shape."""
    version, rank, flags, kind = (cursor.number(1) for _ in range(4))
    if version not in (1, 2) or rank > _MAX_AXES:
        raise ValueError("a dataspace is damaged")
    if version == 1:
        cursor.skip(4)
    elif kind == 2:
        return None, ()
    shape = tuple(cursor.length() for _ in range(rank))
    return shape, tuple(cursor.length() for _ in range(rank)) if flags & 1 else shape


class Group:
    """A group with its links and attributes.

    Args:
        header: the object header.
        name: the group's path, for messages.
    """

    def __init__(self, header: _Header, name: str) -> None:
        self.file = header.file
        self.address = header.address
        self.name = name
        self._header = header

    @cached_property
    def links(self) -> dict[str, int | str | None]:
        """Links by name: an object's address, a soft link's path, or None for an external link."""
        links: dict[str, int | str | None] = dict(self._symbol_link(symbol) for symbol in self._symbols())
        for message in self._header.all(_LINK):
            links.update([self._read_link(message)])
        info = self._header.first(_LINK_INFO)
        if info is not None:
            info.skip(1)
            flags = info.number(1)
            info.skip(8 if flags & 1 else 0)
            heap, tree = info.offset(), info.offset()
            if heap is not None and tree is not None:
                objects = _FractalHeap(self.file, heap)
                for record in _btree_v2_records(self.file, tree, 5):
                    data = objects.get(record.data[4:])
                    if data is None:
                        raise ValueError(f"a link in '{self.name}' has too long a name")
                    links.update([self._read_link(_Cursor(self.file, data))])
        return links

    def _symbols(self) -> Iterator[tuple[bytes, _Cursor]]:
        """Yield the symbol table's name heap with each entry."""
        message = self._header.first(_SYMBOL_TABLE)
        if message is None:
            return
        tree, heap_address = _defined(message.offset()), _defined(message.offset())
        heap = self.file.metadata(heap_address, 8 + 2 * self.file.length_size + self.file.offset_size).expect(b"HEAP")
        heap.skip(4)
        size = heap.length()
        heap.skip(self.file.length_size)
        names = self.file.metadata(_defined(heap.offset()), size).data
        width = 2 * self.file.offset_size + 24
        for _, child in _btree_v1(self.file, tree, 0, self.file.length_size):
            count = self.file.metadata(child, 8).expect(b"SNOD").data[6:]
            entries = self.file.metadata(child + 8, int.from_bytes(count, "little") * width)
            while entries.remaining:
                yield names, _Cursor(self.file, entries.take(width))

    def _symbol_link(self, symbol: tuple[bytes, _Cursor]) -> tuple[str, int | str]:
        names, entry = symbol
        name, address, kind = entry.number(self.file.offset_size), entry.offset(), entry.number(4)
        entry.skip(4)
        target = self._heap_text(names, entry.number(4)) if kind == 2 else _defined(address)
        return self._heap_text(names, name), target

    def _heap_text(self, names: bytes, at: int) -> str:
        end = names.find(0, at)
        if end < 0:
            raise ValueError("a name is missing; the file is damaged")
        self.file.charge(end - at)
        return _decode(names[at:end])

    @staticmethod
    def _read_link(cursor: _Cursor) -> tuple[str, int | str | None]:
        cursor.skip(1)
        flags = cursor.number(1)
        kind = cursor.number(1) if flags & 8 else 0
        cursor.skip((8 if flags & 4 else 0) + (1 if flags & 16 else 0))
        name = _decode(cursor.take(cursor.number(1 << (flags & 3))))
        if kind == 0:
            return name, _defined(cursor.offset())
        return name, _decode(cursor.take(cursor.number(2))) if kind == 1 else None

    @cached_property
    def attributes(self) -> dict[str, int | None]:
        """Attributes by name: the value of an integer scalar, or None for other types."""
        attributes = dict(self._read_attribute(message) for message in self._header.all(_ATTRIBUTE))
        info = self._header.first(_ATTRIBUTE_INFO)
        if info is not None:
            info.skip(1)
            info.skip(2 if info.number(1) & 1 else 0)
            heap, tree = info.offset(), info.offset()
            if heap is not None and tree is not None:
                objects = _FractalHeap(self.file, heap)
                contents = (objects.get(record.data[:8]) for record in _btree_v2_records(self.file, tree, 8))
                attributes.update(
                    self._read_attribute(_Cursor(self.file, data)) for data in contents if data is not None
                )
        return attributes

    @staticmethod
    def _read_attribute(cursor: _Cursor) -> tuple[str, int | None]:
        version, flags = cursor.number(1), cursor.number(1)
        sizes = [cursor.number(2) for _ in range(3)]
        cursor.skip(1 if version == 3 else 0)
        parts = [cursor.take(-(-size // 8) * 8 if version == 1 else size) for size in sizes]
        name = _decode(parts[0].partition(b"\0")[0])
        if version > 1 and flags & 3:  # a committed type or dataspace
            return name, None
        kind = _read_type(_Cursor(cursor.file, parts[1])).dtype
        shape, _ = _read_space(_Cursor(cursor.file, parts[2]))
        if shape != () or kind is None or kind.kind not in "iu":
            return name, None
        return name, int(np.frombuffer(cursor.take(kind.itemsize), kind)[0])


def _decode(data: bytes) -> str:
    return data.decode(errors="surrogateescape")


class Dataset:
    """A dataset.

    Args:
        header: the object header.
        name: the dataset's path, for messages.

    Raises:
        ValueError: the dataset is damaged, virtual, or has external storage.
    """

    def __init__(self, header: _Header, name: str) -> None:
        self.file = header.file
        self.name = name
        self._header = header
        layout, space, kind = (header.first(message) for message in (_LAYOUT, _DATASPACE, _DATATYPE))
        if layout is None or space is None or kind is None:
            raise ValueError(f"'{name}' has no shape or type; the file is damaged")
        if header.has(_EXTERNAL):
            raise ValueError(f"'{name}' has external storage, which would read another file; copy the data into it")
        self._type = _read_type(kind)
        self._kind = self._type.name
        self.shape, self._max_shape = _read_space(space)
        """The shape; None for a null dataspace."""
        self.dtype = self._type.dtype
        """NumPy dtype; None unless the type is a number or a fixed-size string."""
        self.chunk_shape: tuple[int, ...] = ()
        """The shape of a chunk."""
        self._address: int | None = None
        self._compact = b""
        self._index = 0
        self._index_settings = layout
        self._edges_unfiltered = False
        self._read_layout(layout)

    @property
    def kind(self) -> str:
        """Name of the element type, for messages."""
        return str(self.dtype) if self.dtype is not None else self._kind

    @property
    def is_text(self) -> bool:
        """Whether the elements are variable-length strings."""
        return self._type.text

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape) if self.shape is not None else 0

    # -- layout

    def _read_layout(self, cursor: _Cursor) -> None:
        version = cursor.number(1)
        if not 1 <= version <= 5:
            raise ValueError(f"'{self.name}' has the unknown layout version {version}")
        if version < 3:
            rank, self.layout = cursor.number(1), cursor.number(1)
            cursor.skip(5)
            self._address = cursor.offset() if self.layout != _COMPACT else None
            chunk_shape = tuple(cursor.number(4) for _ in range(rank))
            if self.layout == _COMPACT:
                self._compact = cursor.take(cursor.number(4))
        else:
            self.layout, chunk_shape = cursor.number(1), ()
            if self.layout == _COMPACT:
                self._compact = cursor.take(cursor.number(2))
            elif self.layout == _CONTIGUOUS:
                self._address = cursor.offset()
            elif self.layout == _CHUNKED and version == 3:
                rank, self._address = cursor.number(1), cursor.offset()
                chunk_shape = tuple(cursor.number(4) for _ in range(rank))
            elif self.layout == _CHUNKED:
                chunk_shape = self._read_new_chunks(cursor)
        if self.layout == _VIRTUAL:
            raise ValueError(
                f"'{self.name}' is a virtual dataset, which would read other files; copy the data into one"
            )
        if self.layout > _VIRTUAL:
            raise ValueError(f"'{self.name}' has an unknown layout; the file is damaged")
        if self.layout == _CHUNKED:
            self.chunk_shape = chunk_shape[:-1]  # the last entry is the element size
            if (
                self.shape is None
                or len(self.chunk_shape) != len(self.shape)
                or not self.chunk_shape
                or not all(self.chunk_shape)
            ):
                raise ValueError(f"the chunks of '{self.name}' do not fit its shape; the file is damaged")

    def _read_new_chunks(self, cursor: _Cursor) -> tuple[int, ...]:
        flags, rank, width = cursor.number(1), cursor.number(1), cursor.number(1)
        chunk_shape = tuple(cursor.number(width) for _ in range(rank))
        self._edges_unfiltered = bool(flags & 1)
        self._index = cursor.number(1)
        if not 1 <= self._index <= 5:
            raise ValueError(f"'{self.name}' has an unknown chunk index; the file is damaged")
        filtered_size = 4 + self.file.length_size if flags & 2 else 0
        settings = {1: filtered_size, 2: 0, 3: 1, 4: 5, 5: 6}[self._index]
        self._index_settings = _Cursor(self.file, cursor.take(settings))
        self._address = cursor.offset()
        return chunk_shape

    @property
    def needed_bytes(self) -> int:
        """Bytes that reading needs: the values, or one chunk if that is larger."""
        return max(self.size, math.prod(self.chunk_shape) if self.chunk_shape else 0) * self._type.size

    @property
    def stored_bytes(self) -> int:
        """Size of the (compressed) values in the file."""
        if self.layout == _CHUNKED:
            return sum(size for _, size, _ in self.chunks.values())
        if self.layout == _COMPACT:
            return len(self._compact)
        return min(self.size * self._type.size, self.file.length - self._address) if self._address is not None else 0

    @property
    def _grid(self) -> tuple[int, ...]:
        """Number of chunks along each axis."""
        return tuple(-(-length // part) for length, part in zip(self.shape or (), self.chunk_shape, strict=True))

    @cached_property
    def chunks(self) -> dict[tuple[int, ...], _Chunk]:
        """Stored chunks by the index of their first element.

        Raises:
            ValueError: the index is damaged or has more chunks than the file can hold.
        """
        chunks: dict[tuple[int, ...], _Chunk] = {}
        if self.layout != _CHUNKED or self._address is None:
            return chunks
        if self.needed_bytes > max(_MIN_SIZE_LIMIT, self.file.length * _MAX_COMPRESSION_RATIO):
            raise _too_large(self, self.file.length)
        entries = self._tree_chunks() if self._index in (0, 5) else self._array_chunks()
        for start, entry in entries:
            axes = zip(start, self.shape or (), self.chunk_shape, strict=True)
            if start in chunks or not all(index < length and not index % step for index, length, step in axes):
                raise ValueError(f"'{self.name}' has a chunk at an invalid position; the file is damaged")
            chunks[start] = entry
        return chunks

    @property
    def _chunk_bytes(self) -> int:
        return math.prod(self.chunk_shape) * self._type.size

    def _tree_chunks(self) -> Iterator[tuple[tuple[int, ...], _Chunk]]:
        """Yield the chunks of a B-tree (version 1 or 2)."""
        rank, address = len(self.chunk_shape), _defined(self._address)
        if not self._index:
            for key, child in _btree_v1(self.file, address, 1, 16 + 8 * rank):
                size, mask, *offsets = struct.unpack(f"<II{rank}Q", key[: 8 + 8 * rank])
                yield tuple(offsets), (child, size, mask)
            return
        for record in _btree_v2_records(self.file, address, 11 if self._filters else 10):
            chunk = self._chunk_entry(record, record.remaining - 8 * rank)
            start = tuple(record.number(8) * part for part in self.chunk_shape)
            if chunk is not None:
                yield start, chunk

    def _array_chunks(self) -> Iterator[tuple[tuple[int, ...], _Chunk]]:
        """Yield the chunks of a single-chunk, implicit, fixed-array or extensible-array index."""
        address, settings, shape = _defined(self._address), self._index_settings, self._max_shape
        order = list(range(len(self.chunk_shape)))
        if self._index == 4:  # the unlimited axis varies slowest
            order.sort(key=lambda axis: shape[axis] != (1 << 8 * self.file.length_size) - 1)
        steps, step = [0] * len(order), 1
        for axis in reversed(order):
            steps[axis] = step
            step *= max(-(-shape[axis] // self.chunk_shape[axis]), 1)
        grid = self._grid
        count = 1 + sum((length - 1) * step for length, step in zip(grid, steps, strict=True)) if all(grid) else 0
        if self._index == 1:
            size, mask = (settings.length(), settings.number(4)) if settings.remaining else (self._chunk_bytes, 0)
            entries = {0: (address, size, mask)}
        elif self._index == 2:
            if self._chunk_bytes * count > self.file.length:
                raise _too_large(self, self.file.length)
            entries = {n: (address + n * self._chunk_bytes, self._chunk_bytes, 0) for n in range(count)}
        else:
            blocks = _fixed_array if self._index == 3 else _extensible_array
            entries = {}
            for first, width, block in blocks(self.file, address, count):
                for number in range(first, first + block.remaining // width):
                    chunk = self._chunk_entry(block, width)
                    if chunk is not None and number < count:
                        entries[number] = chunk
        for number, entry in entries.items():
            rest, start = number, [0] * len(order)
            for axis in order:
                start[axis], rest = rest // steps[axis] * self.chunk_shape[axis], rest % steps[axis]
            if all(at < length for at, length in zip(start, self.shape or (), strict=True)):
                yield tuple(start), entry

    def _chunk_entry(self, block: _Cursor, width: int) -> _Chunk | None:
        """Return a chunk from an index element: address and, with filters, size and mask of skipped filters."""
        extra = width - self.file.offset_size
        address, size, mask = block.offset(), self._chunk_bytes, 0
        if extra:
            if not 4 < extra <= 12:
                raise ValueError(f"the index of chunks of '{self.name}' is damaged")
            size, mask = block.number(extra - 4), block.number(4)
        return (address, size, mask) if address is not None else None

    # -- values

    @cached_property
    def _filters(self) -> list[int]:
        """Filter identifiers in the order of application."""
        cursor = self._header.first(_FILTERS)
        filters: list[int] = []
        if cursor is None:
            return filters
        version, count = cursor.number(1), cursor.number(1)
        cursor.skip(6 if version == 1 else 0)
        for _ in range(count):
            number = cursor.number(2)
            name = cursor.number(2) if version == 1 or number >= 256 else 0
            cursor.skip(2)
            values = cursor.number(2)
            cursor.skip(-(-name // 8) * 8 if version == 1 else name)
            cursor.skip(4 * (values + values % 2 if version == 1 else values))
            filters.append(number)
        return filters

    @cached_property
    def _fill(self) -> NDArray[Any]:
        """Fill value: the value of elements that are not stored."""
        dtype = np.dtype(self.dtype)
        value = b""
        cursor = self._header.first(_FILL)
        if cursor is not None:
            version = cursor.number(1)
            cursor.skip(0 if version == 3 else 2)
            flags = cursor.number(1)
            if flags & 0x20 if version == 3 else flags or version == 1:
                value = cursor.take(cursor.number(4))
        elif (cursor := self._header.first(_OLD_FILL)) is not None:
            value = cursor.take(cursor.number(4))
        return np.frombuffer(value, dtype, 1) if len(value) == dtype.itemsize else np.zeros(1, dtype)

    def read(self, dtype: DTypeLike | None = None, rows: int | None = None) -> NDArray[Any]:
        """Read the values.

        Args:
            dtype: dtype of the result; None: the stored type.
            rows: maximum number of rows of the first axis; None: all.

        Raises:
            ValueError: the file is damaged or truncated.
            TypeError: the values are neither numbers nor fixed-size strings.
            MemoryError: the values do not fit into memory.
        """
        check_dataset(self)
        if self.dtype is None or self.shape is None:
            raise TypeError(f"'{self.name}' holds {self._kind if self.shape is not None else 'nothing'}")
        shape = self.shape if rows is None else (min(rows, self.shape[0]), *self.shape[1:])
        kind = self.dtype if dtype is None else np.dtype(dtype)
        with np.errstate(all="ignore"):  # float64 values beyond float32 become infinite
            if self.layout == _CHUNKED:
                return self._read_chunks(shape, kind)
            if self.layout == _COMPACT:
                if len(self._compact) < self.size * self._type.size:
                    raise ValueError(f"'{self.name}' is shorter than its shape says; the file is damaged")
                return np.frombuffer(self._compact, self.dtype, math.prod(shape)).reshape(shape).astype(kind)
            if self._address is None:
                return np.full(shape, self._fill[0], kind)
            return self._read_contiguous(shape, kind, self._address)

    def _read_contiguous(self, shape: tuple[int, ...], kind: np.dtype[Any], address: int) -> NDArray[Any]:
        count = math.prod(shape)
        self.file.read(address + count * self._type.size, 0)  # checks that the end is within the file
        out = np.empty(shape, kind)
        if kind == self.dtype:
            self.file.read_into(address, out)
            return out
        flat, piece = out.reshape(-1), np.empty(min(count, _CONVERT_ELEMENTS), self.dtype)
        for first in range(0, count, _CONVERT_ELEMENTS):
            part = piece[: count - first]
            self.file.read_into(address + first * self._type.size, part)
            flat[first : first + len(part)] = part
        return out

    def _read_chunks(self, shape: tuple[int, ...], kind: np.dtype[Any]) -> NDArray[Any]:
        unknown = [number for number in self._filters if number not in (_DEFLATE, _SHUFFLE, _FLETCHER32)]
        if unknown:
            raise ValueError(
                f"'{self.name}' is compressed with the filter {_FILTER_NAMES.get(unknown[0], unknown[0])}, which is "
                "not supported; recompress it: h5repack -f GZIP=4 old.h5 new.h5"
            )
        complete = len(self.chunks) == math.prod(self._grid)
        out = np.empty(shape, kind) if complete else np.full(shape, self._fill[0], kind)
        for start, (address, size, mask) in self.chunks.items():
            ends = [min(at + part, end) for at, part, end in zip(start, self.chunk_shape, shape, strict=True)]
            if start[0] >= shape[0]:
                continue
            if self._edges_unfiltered and any(
                at + part > end for at, part, end in zip(start, self.chunk_shape, self.shape or (), strict=True)
            ):
                mask = -1
            values = np.frombuffer(self._undo_filters(self.file.read(address, size), mask), self.dtype)
            inner = tuple(slice(0, end - at) for at, end in zip(start, ends, strict=True))
            outer = tuple(slice(at, end) for at, end in zip(start, ends, strict=True))
            out[outer] = values.reshape(self.chunk_shape)[inner]
        return out

    def _undo_filters(self, data: bytes, mask: int) -> bytes:
        """Return a chunk's bytes with its filters undone.

        Raises:
            ValueError: the size or a checksum is wrong.
        """
        for index in reversed(range(len(self._filters))):
            if mask >> index & 1:
                continue
            if self._filters[index] == _DEFLATE:
                max_size = self._chunk_bytes + 4 * len(self._filters)  # each checksum has 4 bytes
                try:
                    data = zlib.decompressobj().decompress(data, max_size)
                except zlib.error as error:
                    raise ValueError(f"a chunk of '{self.name}' is damaged: {error}") from error
            elif self._filters[index] == _SHUFFLE:
                data = _unshuffle(data, self._type.size)
            else:
                if len(data) < 4 or _fletcher32(data[:-4]) != tuple(
                    word % 65535 for word in struct.unpack("<HH", data[-4:])
                ):
                    raise ValueError(f"a chunk of '{self.name}' is damaged: its checksum is wrong")
                data = data[:-4]
        if len(data) != self._chunk_bytes:
            raise ValueError(
                f"a chunk of '{self.name}' has {len(data)} bytes and not {self._chunk_bytes}; the file is damaged"
            )
        return data

    def text(self) -> bytes:
        """Return the value of a scalar variable-length string.

        Raises:
            ValueError: the file is damaged.
            TypeError: the dataset is not such a string.
        """
        if not self._type.text or self.shape != ():
            raise TypeError(f"'{self.name}' is not a string")
        if self.layout == _CONTIGUOUS and self._address is None:
            return b""
        size = 8 + self.file.offset_size
        data = self._compact if self.layout == _COMPACT else self.file.read(_defined(self._address), size)
        cursor = _Cursor(self.file, data)
        length, heap, heap_index = cursor.number(4), cursor.offset(), cursor.number(4)
        if not heap or not length:
            return b""
        start = self.file.metadata(heap, 8 + self.file.length_size).expect(b"GCOL")
        start.skip(4)
        head = start.remaining
        content = self.file.metadata(heap + 8 + head, max(start.length() - 8 - head, 0))
        while content.remaining > 8:
            index = content.number(2)
            content.skip(6)
            size = content.length()
            if index == heap_index:
                return content.take(min(size, length))
            content.skip(-(-size // 8) * 8)
        raise ValueError(f"the string '{self.name}' is missing; the file is damaged")


def _unshuffle(data: bytes, size: int) -> bytes:
    """Undo the shuffle filter: interleave the byte planes of elements."""
    count = len(data) // size
    if size == 1 or count < 2:
        return data
    columns = np.frombuffer(data, np.uint8, count * size).reshape(size, count)
    return bytes(columns.T.tobytes()) + data[count * size :]


def _fletcher32(data: bytes) -> tuple[int, int]:
    """Return the two Fletcher-32 sums modulo 65535 over big-endian 16-bit words."""
    words = np.frombuffer(data + b"\0" * (len(data) % 2), ">u2")
    first = second = 0
    for at in range(0, len(words), 1 << 16):
        part = words[at : at + (1 << 16)].astype(np.uint64)
        weights = np.arange(len(part), 0, -1, dtype=np.uint64)
        second = (second + first * len(part) + int((part * weights).sum())) % 65535
        first = (first + int(part.sum())) % 65535
    return first, second


# -- indexes ---------------------------------------------------------------------------------------------

_Element = tuple[int, int, _Cursor]
"""Elements of an index: number of the first, bytes per element, and their data."""


def _btree_v1(file: _File, address: int, kind: int, key_size: int) -> Iterator[tuple[bytes, int]]:
    """Yield keys and addresses in the leaves of a version 1 B-tree, in order.

    Args:
        file: the file.
        address: address of the root.
        kind: 0 for groups, 1 for chunks.
        key_size: bytes per key.
    """
    stack: list[tuple[int, int | None]] = [(address, None)]
    while stack:
        at, level = stack.pop()
        node = file.metadata(at, 8 + 2 * file.offset_size).expect(b"TREE")
        node_kind, depth, count = node.number(1), node.number(1), node.number(2)
        if node_kind != kind or level not in (None, depth):
            raise ValueError("a B-tree is damaged")
        entries = file.metadata(at + 8 + 2 * file.offset_size, count * (key_size + file.offset_size))
        children = [(entries.take(key_size), _defined(entries.offset())) for _ in range(count)]
        if depth:
            stack += ((child, depth - 1) for _, child in reversed(children))
        else:
            yield from children


def _btree_v2_records(file: _File, address: int, kind: int) -> Iterator[_Cursor]:
    """Yield the records of a version 2 B-tree, in undefined order.

    Args:
        file: the file.
        address: address of the header.
        kind: record type.
    """
    header = file.metadata(address, 16 + file.offset_size + 2).expect(b"BTHD")
    header.skip(1)
    record_kind, node_size, record_size, depth = (header.number(size) for size in (1, 4, 2, 2))
    header.skip(2)
    root, root_count = header.offset(), header.number(2)
    if record_kind != kind or not record_size or node_size <= 10 or depth > 64:
        raise ValueError("a B-tree is damaged")
    if root is None:
        return
    # widths of the fields: records in a child, and records in a child's subtree, by level
    max_records = total = (node_size - 10) // record_size
    width, below = _bytes_for(max_records), [0]
    for _ in range(depth):
        pointer = file.offset_size + width + below[-1]
        max_records = max(node_size - 10 - pointer, 0) // (record_size + pointer)
        total = (max_records + 1) * total + max_records
        below.append(_bytes_for(total))
    stack = [(root, root_count, depth)]
    while stack:
        at, count, level = stack.pop()
        pointer = file.offset_size + width + below[level - 1] if level else 0
        size = 6 + count * record_size + (count + 1) * pointer
        if size > node_size:
            raise ValueError("a B-tree is damaged")
        node = file.metadata(at, size).expect(b"BTIN" if level else b"BTLF")
        node.skip(2)
        for _ in range(count):
            yield _Cursor(file, node.take(record_size))
        for _ in range(count + 1 if level else 0):
            stack.append((_defined(node.offset()), node.number(width), level - 1))
            node.skip(below[level - 1])


class _FractalHeap:
    """A fractal heap: links and attributes of groups that have many."""

    def __init__(self, file: _File, address: int) -> None:
        self._file = file
        offset, length = file.offset_size, file.length_size
        header = file.metadata(address, 22 + 12 * length + 3 * offset).expect(b"FRHP")
        header.skip(1)
        self._id_size, filters = header.number(2), header.number(2)
        header.skip(1)
        largest = header.number(4)
        header.skip(10 * length + 2 * offset)
        self._width, self._start, self._largest_block = header.number(2), header.length(), header.length()
        bits = header.number(2)
        header.skip(2)
        self._root, self._rows = header.offset(), header.number(2)
        if filters or not self._width or not self._start or not self._largest_block or bits > 64:
            raise ValueError("a heap is damaged or filtered_size")
        self._offset_size = -(-bits // 8)
        self._length_size = min(_bytes_for(self._largest_block), _bytes_for(largest))
        self._blocks: dict[int, bytes] = {}

    def get(self, identity: bytes) -> bytes | None:
        """Return an object; None for huge objects, which are not in the heap's blocks."""
        cursor = _Cursor(self._file, identity)
        flags = cursor.number(1)
        kind = flags >> 4 & 3
        if kind == 2:
            long = self._id_size > 18
            return cursor.take(((flags & 15) << 8 | cursor.number(1) if long else flags & 15) + 1)
        if kind:
            return None
        at, length = cursor.number(self._offset_size), cursor.number(self._length_size)
        block, size = self._direct_block(at)
        if size < length:
            raise ValueError("a heap is damaged")
        return self._file.metadata(block, length).data

    def _direct_block(self, at: int) -> tuple[int, int]:
        """Return the address of a heap offset and the bytes from there to the end of its block."""
        address, rows = _defined(self._root), self._rows
        if not rows:
            return address + at, self._start - at
        while True:
            row = (at // (self._start * self._width)).bit_length()
            size = self._start << max(row - 1, 0)
            start = size * self._width if row else 0
            if row >= rows:
                raise ValueError("a heap is damaged")
            column, at = divmod(at - start, size)
            address = self._child(address, row * self._width + column)
            if size <= self._largest_block:
                return address + at, size - at
            smaller = (size // (self._start * self._width)).bit_length()
            if smaller >= rows:
                raise ValueError("a heap is damaged")
            rows = smaller

    def _child(self, address: int, number: int) -> int:
        """Return the address of entry `number` of an indirect block."""
        size = self._file.offset_size
        head = 5 + size + self._offset_size
        at = address + head + number * size
        if at not in self._blocks:
            self._file.metadata(address, 4).expect(b"FHIB")
            self._blocks[at] = self._file.metadata(at, size).data
        return _defined(_Cursor(self._file, self._blocks[at]).offset())


def _fixed_array(file: _File, address: int, count: int) -> Iterator[_Element]:
    """Yield the blocks of elements of a fixed array.

    Args:
        file: the file.
        address: address of the header.
        count: number of elements to read.
    """
    header = file.metadata(address, 8 + file.length_size + file.offset_size).expect(b"FAHD")
    header.skip(2)
    width, page_bits, capacity, block = header.number(1), header.number(1), header.length(), header.offset()
    if not width or count > capacity:
        raise ValueError("an index of chunks is damaged")
    if block is None:
        return
    file.metadata(block, 4).expect(b"FADB")
    at = block + 6 + file.offset_size
    page = 1 << min(page_bits, 64)
    if capacity <= page:
        yield 0, width, file.metadata(at, count * width)
        return
    pages = -(-capacity // page)
    bitmap = file.metadata(at, -(-pages // 8)).data
    yield from _pages(file, at + len(bitmap) + 4, (0, capacity, page), width, bitmap)


def _pages(file: _File, at: int, counts: tuple[int, int, int], width: int, bitmap: bytes) -> Iterator[_Element]:
    """Yield the used pages of elements of a block; a checksum follows each page.

    Args:
        file: the file.
        at: address of the first page.
        counts: number of the first element, elements per block, and elements per page.
        width: bytes per element.
        bitmap: one bit per page: whether it is used.
    """
    first, capacity, page = counts
    for number in range(-(-capacity // page)):
        size = min(page, capacity - number * page) * width
        if bitmap[number // 8] & 0x80 >> number % 8:
            yield first + number * page, width, file.metadata(at + number * (page * width + 4), size)


def _extensible_array(file: _File, address: int, count: int) -> Iterator[_Element]:
    """Yield the blocks of elements of an extensible array, as `_fixed_array`."""
    header = file.metadata(address, 12 + 6 * file.length_size + file.offset_size).expect(b"EAHD")
    header.skip(2)
    width, bits, in_index, min_elements, pointers, page_bits = (header.number(1) for _ in range(6))
    header.skip(6 * file.length_size)
    index = header.offset()
    powers = min_elements and pointers and not (min_elements & min_elements - 1 or pointers & pointers - 1)
    if not width or not powers or not 0 < bits <= 64:
        raise ValueError("an index of chunks is damaged")
    if index is None:
        return
    direct_levels, levels = 2 * (pointers.bit_length() - 1), 2 + bits - min_elements.bit_length()
    addresses = 2 * (pointers - 1) + max(levels - direct_levels, 0)
    file.metadata(index, 4).expect(b"EAIB")
    at = index + 6 + file.offset_size
    yield 0, width, file.metadata(at, in_index * width)
    blocks = file.metadata(at + in_index * width, addresses * file.offset_size)
    head = 6 + file.offset_size + -(-bits // 8)
    first, page = in_index, 1 << min(page_bits, 64)
    for level in range(levels):
        number, capacity = 1 << level // 2, min_elements << (level + 1) // 2
        if first >= count:
            return
        pages = capacity // page if capacity > page else 0
        table, bitmap = blocks, b""
        if level >= direct_levels:
            block = blocks.offset()
            if block is None:
                first += number * capacity
                continue
            file.metadata(block, 4).expect(b"EASB")
            table = file.metadata(block + head, number * (-(-pages // 8) + file.offset_size))
            bitmap = table.take(number * -(-pages // 8))
        elif pages:
            raise ValueError("an index of chunks is damaged")
        for child in range(number):
            block = table.offset()
            if block is not None and first < count:
                file.metadata(block, 4).expect(b"EADB")
                if pages:
                    used = bitmap[child * -(-pages // 8) :]
                    yield from _pages(file, block + head + 4, (first, capacity, page), width, used)
                else:
                    yield first, width, file.metadata(block + head, capacity * width)
            first += capacity
