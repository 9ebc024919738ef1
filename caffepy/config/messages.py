"""protobuf messages: walking their fields, reading and writing fields on the wire, telling binary files apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError, Message

from caffepy.proto.caffe_pb2 import BlobProto, NetParameter, SolverState

Part = bytes | memoryview
"""Bytes of a file; those of an array are not copied."""
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
"""Wire types; the two of groups are in no file of Caffe's."""
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
LFS_MAGIC = b"version https://git-lfs"
_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
_FIXED = {EIGHT_BYTES: 8, FOUR_BYTES: 4}


class Indexed(Protocol):
    """Bytes that are read one by one: a memoryview, or a file that is not in memory."""

    def __getitem__(self, at: int, /) -> int: ...


class WireError(Exception):
    """These bytes are no fields, or groups, which neither Caffe writes."""


class WireField(NamedTuple):
    """A field of a serialised message.

    Args:
        number: the schema's.
        kind: the wire type.
        start: where it begins.
        begin: where its content begins.
        end: where that ends.
    """

    number: int
    kind: int
    start: int
    begin: int
    end: int


class Found(NamedTuple):
    """A field that has a value.

    Args:
        message: whose field it is.
        field: its descriptor.
        value: one value, or the container of a repeated field's.
        path: from the message that is walked: ``layer.convolution_param.pad``.
    """

    message: Message
    field: Any
    value: Any
    path: str


def walk_fields(message: Message, prefix: str = "") -> Iterator[Found]:
    """The fields of a message and of those within it, outer ones first; blobs are not entered, for they may be huge."""
    for field, value in message.ListFields():
        path = prefix + field.name
        yield Found(message, field, value, path)
        if field.message_type is not None and field.message_type.name != "BlobProto":
            for part in [value] if isinstance(value, Message) else value:
                yield from walk_fields(part, f"{path}.")


def field_head(tag: bytes, length: int) -> bytes:
    """What precedes `length` bytes in protobuf's wire format."""
    result = bytearray(tag)
    while length > 127:
        result.append(length & 127 | 128)
        length >>= 7
    result.append(length)
    return bytes(result)


def delimited(number: int, content: Sequence[Part]) -> list[Part]:
    """A length-delimited field, its content in parts."""
    return [field_head(field_head(b"", number << 3 | DELIMITED), sum(map(len, content))), *content]


def wire_fields(view: Indexed, begin: int, end: int) -> Iterator[WireField]:
    """The fields of the message that lies in these bytes.

    Raises:
        WireError: the bytes are no fields.
    """
    at = begin
    while at < end:
        start = at
        tag, content = _varint(view, at, end)
        kind = tag & 7
        if kind == VARINT:
            _, at = _varint(view, content, end)
        elif kind == DELIMITED:
            size, content = _varint(view, content, end)
            at = content + size
        elif kind in _FIXED:
            at = content + _FIXED[kind]
        else:
            raise WireError
        if at > end:
            raise WireError
        yield WireField(tag >> 3, kind, start, content, at)


def _varint(view: Indexed, at: int, end: int) -> tuple[int, int]:
    """A number, and where it ends."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= end:
            break
        byte = view[at]
        number, at = number | (byte & 127) << shift, at + 1
        if byte < 128:
            return number, at
    raise WireError


def describe_content(data: bytes) -> str:
    """What the content of a binary file that was refused looks like instead, and what to do about it."""
    if not data:
        return "it is empty; an interrupted copy or a full disk leaves such files, take an older one"
    if data.startswith(HDF5_MAGIC):
        return "it is an HDF5 file"
    if data.startswith(LFS_MAGIC):
        return "it is a Git LFS pointer; fetch the file itself with 'git lfs pull'"
    if data.startswith(_GZIP_MAGIC):
        return "it is packed with gzip; unpack it first, with gunzip"
    if data.startswith(_ZIP_MAGIC):
        return "it is a zip archive; unpack it first, with unzip"
    if is_text(data[:4096]):
        beginning = data[:24].decode("utf-8", "replace").strip().partition("\n")[0]
        return f"it is text ('{beginning}'); give the binary file"
    if _parses(data, SolverState(), "iter"):
        return "it is a .solverstate; resume from it with --snapshot"
    if _parses(data, NetParameter(), "layer") or _parses(data, NetParameter(), "layers"):
        return "it is a .caffemodel; load it with --weights"
    if _parses(data, BlobProto(), "data"):
        return "it is a single blob, such as a mean image"
    return "it is truncated or of another format; copy it again or take an older one"


def _parses(data: bytes, message: Message, field: str) -> bool:
    try:
        message.MergeFromString(data)
    except (DecodeError, RecursionError):
        return False
    return any(descriptor.name == field for descriptor, _ in message.ListFields())


def is_text(head: bytes) -> bool:
    """Whether the beginning of a file is of printable ASCII characters."""
    printable = sum(byte >= 32 or byte in b"\t\n\r" for byte in head)
    return bool(head) and b"\0" not in head and printable == len(head)
