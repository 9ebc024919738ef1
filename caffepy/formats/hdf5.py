"""Reads HDF5 files from strangers: pyfive reads the structures, this module limits them and reads the values.

libhdf5 crashes, hangs or allocates gigabytes on some damaged files, and its caller cannot prevent this. pyfive is
written in Python. It reads through an object that knows the file's length and ends after twice as many bytes, so a
structure that refers to itself is an error after a time proportional to the file's size. Names count as well: a few
bytes can name a long text many times. Array sizes are compared with the stored bytes before memory is allocated.

Refused by name: indexes of chunks and large groups of newer versions of the format, types other than numbers and
strings, filters other than deflate, shuffle and fletcher32, virtual datasets, external storage and external
links. Metadata checksums are not verified.
"""

from __future__ import annotations

import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import DTypeLike, NDArray
from pyfive import File
from pyfive.btree import BTreeV1Groups, BTreeV1RawDataChunks
from pyfive.core import UNDEFINED_ADDRESS, InvalidHDF5File
from pyfive.dataobjects import DataObjects
from pyfive.misc_low_level import GlobalHeap, Heap, SuperBlock, SymbolTable
from pyfive.p5t import P5IntegerType

from caffepy.errors import UserError
from caffepy.utils.files import open_regular

_MAX_LINKS = 16
"""Maximum length of a chain of soft links, as in libhdf5."""
_MAX_NAME = 200
"""Maximum characters of a path in messages."""
_MIN_SIZE_LIMIT = 1 << 26
"""Dataset size in bytes that is always allowed."""
_MAX_COMPRESSION_RATIO = 1032
"""Maximum compression ratio of deflate, the densest of the supported filters."""
_MIN_CHUNK_SIZE = 512
"""Minimum size that a chunk counts for in limits: its overhead in Python."""
_CONVERT_ELEMENTS = 1 << 17
"""Elements read and converted per step: they stay in the cache."""
_MIN_BUDGET = 1 << 16
"""Metadata bytes that are always allowed."""
_MAX_HEADER = 1 << 18
"""Maximum bytes of an object header: pyfive copies all of it for each of its parts."""
_MIN_MESSAGE_SIZE = 16
"""Minimum size that a message of a header counts for: its overhead in Python."""
_PARSE_ERRORS = (AssertionError, InvalidHDF5File, RuntimeError, struct.error)
"""Exceptions of pyfive that are not Python's for wrong values."""
_DAMAGE = (ArithmeticError, LookupError, MemoryError, OSError, RuntimeError, TypeError, ValueError)
"""Exceptions that reading a damaged file raises."""
_CONVERT = "which is not read; convert it: h5repack --low=0 --high=1 old.h5 new.h5"

_DATATYPE, _LINK, _EXTERNAL, _LAYOUT, _ATTRIBUTE = 3, 6, 7, 8, 12
_LINK_INFO, _SYMBOL_TABLE = 2, 17
"""Message types of object headers."""
_COMPACT, _CONTIGUOUS, _CHUNKED, _VIRTUAL = range(4)
_DEFLATE, _FILTERS = 1, (1, 2, 3)
_FILTER_NAMES = {4: "szip", 5: "nbit", 6: "scaleoffset", 307: "bzip2", 32000: "lzf", 32001: "blosc", 32015: "zstd"}
_TYPE_NAMES = (
    "whole numbers",
    "floats",
    "times",
    "strings",
    "bit fields",
    "opaque data",
    "compounds",
    "references",
    "enumerations",
    "sequences",
    "arrays",
    "complex numbers",
)
_TEXT = "strings of variable length"
_IEEE = {2: (10, 5, 0, 10, 15), 4: (23, 8, 0, 23, 127), 8: (52, 11, 0, 52, 1023)}
"""Float formats by size: place and bits of the exponent, place and bits of the mantissa, bias."""


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


def _reason(error: Exception) -> str:
    """Return the first line of an error's message, without KeyError's quotes."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    text = str(error.args[0]) if error.args else ""
    return text.partition("\n")[0] or ("out of memory" if isinstance(error, MemoryError) else type(error).__name__)


def read_hdf5(stream: BinaryIO) -> Group:
    """Return the root group of an open file.

    Raises:
        ValueError: the file is damaged or not an HDF5 file.
    """
    with _parsing():
        file = _File(stream, File._find_superblock_offset(stream))
        block = SuperBlock(file, 0)
        end, base = block._contents["end_of_file_address"], block._contents["base_address"]
        if file.length < end - base:
            raise ValueError(f"it is truncated: {file.length} of {end - base} bytes exist; copy it again")
        file.root_address = block.offset_to_dataobjects
    return file.root


@contextmanager
def _parsing() -> Iterator[None]:
    """Turn pyfive's exceptions into ValueError."""
    try:
        yield
    except _PARSE_ERRORS as error:
        reason = str(error) or "its signature is wrong"
        raise ValueError(f"a structure is damaged or of an unknown kind ({reason})") from error


def find_object(group: Group, name: str, depth: int = 0) -> Group | Dataset | None:
    """Return the group or dataset at a path below a group, or None.

    Args:
        group: the group.
        name: the path.
        depth: soft links that led here.

    Raises:
        ValueError: the path has too many soft links, or the file is damaged.
    """
    item: Group | Dataset | None = group.file.root if name.startswith("/") else group
    for part in name.split("/"):
        if part in ("", "."):
            continue
        if not isinstance(item, Group) or part not in item.links:
            return None
        link = item.links[part]
        if isinstance(link, str):
            if depth >= _MAX_LINKS:
                raise ValueError(f"'{name[:_MAX_NAME]}' needs more than {_MAX_LINKS} soft links")
            group.file.charge(len(link))
            item = find_object(item, link, depth + 1)
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


class _File:
    """A file's bytes from its superblock, as pyfive reads them. It has no descriptor: pyfive would open the path again.

    Args:
        stream: a seekable file.
        base: place of the superblock.
    """

    def __init__(self, stream: BinaryIO, base: int) -> None:
        self._stream, self._base, self._at = stream, base, 0
        self.length = stream.seek(0, os.SEEK_END) - base
        self._budget = 2 * self.length + _MIN_BUDGET
        self._header_budget: int | None = None
        self.root_address = 0

    def charge(self, size: int) -> None:
        """Add to the count of metadata bytes that were read."""
        self._budget -= size
        if self._header_budget is not None:
            self._header_budget -= size
        if self._budget < 0 or (self._header_budget or 0) < 0:
            raise ValueError("its structures refer to themselves or overlap; the file is damaged")

    def seek(self, address: int) -> None:
        """Go to an address."""
        self._at = address

    def read(self, size: int) -> bytes:
        """Read metadata."""
        self.charge(size)
        data = self.values(self._at, size)
        self._at += size
        return data

    def values(self, address: int, size: int) -> bytes:
        """Read bytes at an address."""
        if address + size > self.length:
            raise ValueError(f"it ends before byte {self._base + address + size}; the file is damaged")
        self._stream.seek(self._base + address)
        data = self._stream.read(size)
        if len(data) != size:
            raise ValueError("it has become shorter while it was read")
        return data

    @cached_property
    def root(self) -> Group:
        """The root group."""
        root = self.object(self.root_address, "/")
        if not isinstance(root, Group):
            raise ValueError("it has no root group; the file is damaged")
        return root

    def object(self, address: int, name: str) -> Group | Dataset | None:
        """Return the group or dataset whose header is at an address; None for other objects."""
        self._header_budget = _MAX_HEADER
        try:
            with _parsing():
                header = _Header(self, address)
                self._header_budget = None
                self.charge(_MIN_MESSAGE_SIZE * len(header.msgs))
                if header.find_msg_type(_LAYOUT):
                    return Dataset(self, header, name)
                kinds = (_SYMBOL_TABLE, _LINK_INFO, _LINK)
                return Group(self, header, name) if any(map(header.find_msg_type, kinds)) else None
        finally:
            self._header_budget = None


class _Header(DataObjects):  # type: ignore[misc]
    """An object header whose names count against the file's limit, and whose messages end where they say."""

    def contents(self, kind: int) -> list[bytes]:
        """Return the messages of a type."""
        found = self.find_msg_type(kind)
        if any(each["flags"] & 2 for each in found):
            raise ValueError("it has a named type, which is not read; write the data with a plain one")
        starts = [(each["offset_to_message"], each["size"]) for each in found]
        return [self.msg_data[at : at + size] for at, size in starts]

    def attributes(self) -> Iterator[tuple[str, Any]]:
        """Yield the attributes; those of an index are none of a snapshot's."""
        for data in self.contents(_ATTRIBUTE):
            with warnings.catch_warnings(action="ignore"):  # of unknown types
                yield self._parse_attribute_msg(data, 0)

    def _attr_value(self, ptype: Any, buf: bytes, count: int, offset: int) -> Any:
        """Return whole numbers alone: other types say how many values to make, and read them elsewhere."""
        return np.frombuffer(buf, ptype.dtype, 1, offset) if isinstance(ptype, P5IntegerType) else [None]

    def _iter_links_btree_v1(self, btree_address: int, heap_address: int) -> Iterator[tuple[str, int | str]]:
        heap = Heap(self.fh, heap_address)

        def text(offset: int) -> str:
            name = heap.get_object_name(offset)
            self.fh.charge(len(name))
            return _text(name)

        for address in BTreeV1Groups(self.fh, btree_address).symbol_table_addresses():
            for entry in SymbolTable(self.fh, address).entries:
                soft = entry["cache_type"] == 2
                target = text(*struct.unpack_from("<I", entry["scratch"])) if soft else entry["object_header_address"]
                yield text(entry["link_name_offset"]), target

    def _iter_links_btree_v2(self, *_: int) -> Iterator[tuple[str, int | str]]:
        raise ValueError(f"it has a group with an index of HDF5 1.8 or later, {_CONVERT}")

    def _get_link_from_link_msg(self, link_msg: Mapping[str, int]) -> tuple[str, int | str]:
        """Return a link's name and target; pyfive takes names for ASCII that h5py writes in UTF-8."""
        data = self.msg_data[link_msg["offset_to_message"] :][: link_msg["size"]]
        flags = data[1]
        kind = data[2] if flags & 8 else 0
        at = 2 + (flags >> 3 & 1) + (8 if flags & 4 else 0) + (flags >> 4 & 1)
        end = at + (1 << (flags & 3))
        size = int.from_bytes(data[at:end], "little")
        name, target = data[end : end + size], data[end + size :]
        if kind > 1:
            raise ValueError("it has an external link, which would read another file; copy the data into one")
        return _text(name), _text(target[2:]) if kind else int.from_bytes(target[:8], "little")


def _text(name: bytes) -> str:
    return name.decode(errors="surrogateescape")


class Group:
    """A group with its links and attributes.

    Args:
        file: the file.
        header: the object header.
        name: the group's path, for messages.
    """

    def __init__(self, file: _File, header: _Header, name: str) -> None:
        self.file, self.name, self._header = file, name, header
        self.address: int = header.offset

    @cached_property
    def links(self) -> dict[str, int | str]:
        """Links by name: an object's address, or a soft link's path."""
        with _parsing():
            return dict(self._header.iter_links())

    @cached_property
    def attributes(self) -> dict[str, int | None]:
        """Attributes by name: the value of an integer scalar, or None for other types."""
        with _parsing():
            found = dict(self._header.attributes())
        return {name: int(value) if isinstance(value, np.integer) else None for name, value in found.items()}


def _read_type(data: bytes) -> tuple[str, np.dtype[Any] | None]:
    """Return a type's name and dtype (None unless a number or fixed-size string). pyfive takes all floats for IEEE's.

    Raises:
        ValueError: the type is damaged.
    """
    kind, bits, size = data[0] & 15, int.from_bytes(data[1:4], "little"), int.from_bytes(data[4:8], "little")
    name, order = _TYPE_NAMES[kind] if kind < len(_TYPE_NAMES) else "an unknown type", "<>"[bits & 1]
    if not size:
        raise ValueError("a datatype has no bytes; the file is damaged")
    if kind == 0 and size in (1, 2, 4, 8) and struct.unpack_from("<HH", data, 8) == (0, 8 * size):
        return name, np.dtype(f"{order}{'i' if bits & 8 else 'u'}{size}")
    if kind == 1 and size in _IEEE and not bits & 64:
        layout = (*struct.unpack_from("<HHBBBBI", data, 8), bits >> 8 & 255)
        if layout == (0, 8 * size, *_IEEE[size], 8 * size - 1):
            return name, np.dtype(f"{order}f{size}")
    if kind == 3 and size < 1 << 31:
        return name, np.dtype(f"S{size}")
    if kind == 9 and bits & 15 == 1:
        return _TEXT, None
    return f"{name} of {size} bytes" if kind < 2 else name, None


class Dataset:
    """A dataset.

    Args:
        file: the file.
        header: the object header.
        name: the dataset's path, for messages.

    Raises:
        ValueError: the dataset is damaged, virtual, or has external storage or an index of chunks that is not read.
    """

    def __init__(self, file: _File, header: _Header, name: str) -> None:
        self.file, self.name, self._header = file, name, header
        (kind,), (layout, *_) = header.contents(_DATATYPE), header.contents(_LAYOUT)
        if header.find_msg_type(_EXTERNAL):
            raise ValueError(f"'{name}' has external storage, which would read another file; copy the data into it")
        if layout[0] > 3 and layout[1] == _VIRTUAL:
            raise ValueError(f"'{name}' is a virtual dataset, which would read other files; copy the data into one")
        if layout[0] > 3 and layout[1] == _CHUNKED:
            raise ValueError(f"'{name}' has an index of chunks of HDF5 1.10 or later, {_CONVERT}")
        self._kind, self.dtype = _read_type(kind)
        self._element_bytes = int.from_bytes(kind[4:8], "little")
        self.shape: tuple[int, ...] | None = header.shape
        """The shape; None for a null dataspace."""
        self._filters: list[dict[str, Any]] = header.filter_pipeline or []
        self.chunk_shape: tuple[int, ...] = header.chunks or ()
        """The shape of a chunk."""
        at, self.layout, place = header.get_id_storage_params()
        self._compact = layout[4:] if self.layout == _COMPACT else b""
        self._address: int = UNDEFINED_ADDRESS
        if self.layout == _CHUNKED:
            self._address = header._chunk_address
            if self.shape is None or len(self.chunk_shape) != len(self.shape) or not math.prod(self.chunk_shape):
                raise ValueError(f"the chunks of '{name}' do not fit its shape; the file is damaged")
        elif self.layout == _CONTIGUOUS:
            (self._address,) = struct.unpack_from("<Q", layout, place - at)

    @property
    def kind(self) -> str:
        """Name of the element type, for messages."""
        return str(self.dtype) if self.dtype is not None else self._kind

    @property
    def is_text(self) -> bool:
        """Whether it holds strings of variable length."""
        return self._kind == _TEXT

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape) if self.shape is not None else 0

    @property
    def needed_bytes(self) -> int:
        """Bytes that reading needs: the values, or one chunk if that is larger."""
        return max(self.size, math.prod(self.chunk_shape) if self.chunk_shape else 0) * self._element_bytes

    @property
    def stored_bytes(self) -> int:
        """Size of the (compressed) values in the file."""
        if self.layout == _CHUNKED:
            return sum(size for _, size, _ in self.chunks.values())
        if self._address == UNDEFINED_ADDRESS:
            return len(self._compact)
        return min(self.size * self._element_bytes, self.file.length - self._address)

    @cached_property
    def chunks(self) -> dict[tuple[int, ...], tuple[int, int, int]]:
        """Address, size and mask of skipped filters of stored chunks, by the index of their first element.

        Raises:
            ValueError: the index is damaged.
        """
        chunks: dict[tuple[int, ...], tuple[int, int, int]] = {}
        if self.layout != _CHUNKED or self._address == UNDEFINED_ADDRESS:
            return chunks
        if self.needed_bytes > max(_MIN_SIZE_LIMIT, self.file.length * _MAX_COMPRESSION_RATIO):
            raise _too_large(self, self.file.length)
        with _parsing():
            nodes = BTreeV1RawDataChunks(self.file, self._address, len(self.chunk_shape) + 1).all_nodes[0]
        for node in nodes:
            for key, address in zip(node["keys"], node["addresses"], strict=True):
                start = key["chunk_offset"][:-1]
                axes = zip(start, self.shape or (), self.chunk_shape, strict=True)
                if start in chunks or not all(index < length and not index % step for index, length, step in axes):
                    raise ValueError(f"'{self.name}' has a chunk at an invalid position; the file is damaged")
                chunks[start] = address, key["chunk_size"], key["filter_mask"]
        return chunks

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
        out = np.empty(self.shape if rows is None else (min(rows, self.shape[0]), *self.shape[1:]), dtype or self.dtype)
        with np.errstate(all="ignore"):  # float64 values beyond float32 become infinite
            if self.layout == _COMPACT:
                out[...] = np.frombuffer(self._compact, self.dtype, out.size).reshape(out.shape)
            elif self.layout == _CONTIGUOUS and self._address != UNDEFINED_ADDRESS:
                self._read_contiguous(out.reshape(-1), self.dtype)
            else:
                self._read_chunks(out, self.dtype, self.shape)
        return out

    def text(self) -> bytes:
        """Return the value of a scalar string of variable length.

        Raises:
            ValueError: the file is damaged.
        """
        if self.layout == _CONTIGUOUS and self._address == UNDEFINED_ADDRESS:
            return b""
        data = self._compact if self.layout == _COMPACT else self.file.values(self._address, 16)
        with _parsing():
            length, heap, index = struct.unpack_from("<IQI", data)
            return bytes(GlobalHeap(self.file, heap).objects[index][:length]) if heap and length else b""

    def _read_contiguous(self, out: NDArray[Any], kind: np.dtype[Any]) -> None:
        """Read values in steps: pyfive would hold them three times, and misplaces some of uneven shapes."""
        for first in range(0, out.size, _CONVERT_ELEMENTS):
            part = out[first : first + _CONVERT_ELEMENTS]
            data = self.file.values(self._address + first * kind.itemsize, part.size * kind.itemsize)
            part[...] = np.frombuffer(data, kind)

    def _read_chunks(self, out: NDArray[Any], kind: np.dtype[Any], shape: tuple[int, ...]) -> None:
        """Read the stored chunks; other elements have the fill value."""
        for each in self._filters:
            if (number := each["filter_id"]) not in _FILTERS:
                raise ValueError(
                    f"'{self.name}' is compressed with the filter {_FILTER_NAMES.get(number, number)}, which is not "
                    "supported; recompress it: h5repack -f GZIP=4 old.h5 new.h5"
                )
        if not self.chunks or len(self.chunks) < math.prod(map(math.ceil, np.divide(shape, self.chunk_shape))):
            with _parsing():
                out[...] = self._header.fillvalue or kind.type()
        for start, (address, size, mask) in self.chunks.items():
            if start[0] < len(out):
                values = np.frombuffer(self._undo_filters(self.file.values(address, size), mask), kind)
                part = out[tuple(slice(at, at + step) for at, step in zip(start, self.chunk_shape, strict=True))]
                part[...] = values.reshape(self.chunk_shape)[tuple(map(slice, part.shape))]

    def _undo_filters(self, data: bytes, mask: int) -> bytes:
        """Return a chunk's bytes with its filters undone."""
        size = math.prod(self.chunk_shape) * self._element_bytes
        for index, each in reversed(list(enumerate(self._filters))):
            if mask >> index & 1:
                continue
            try:
                if each["filter_id"] == _DEFLATE:  # pyfive has no limit; each checksum has 4 bytes
                    data = zlib.decompressobj().decompress(data, size + 4 * len(self._filters))
                else:
                    data = BTreeV1RawDataChunks._filter_chunk(data, 0, [each], self._element_bytes)
            except (ValueError, zlib.error) as error:
                raise ValueError(f"a chunk of '{self.name}' is damaged: {error}") from error
        if len(data) != size:
            raise ValueError(f"a chunk of '{self.name}' has {len(data)} bytes and not {size}; the file is damaged")
        return data
