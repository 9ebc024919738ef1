"""Protobuf helpers: walk a message's fields, read and write the wire format, recognise binary files."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from google.protobuf.message import DecodeError, Message

from caffepy.formats.proto.caffe_pb2 import BlobProto, NetParameter, SolverState

Part = bytes | memoryview
"""Bytes of a file; a memoryview for arrays, which are not copied."""
VARINT, EIGHT_BYTES, DELIMITED, FOUR_BYTES = 0, 1, 2, 5
"""Wire types; Caffe's files have no groups."""
HDF5_MAGIC = b"\x89HDF\r\n\x1a\n"
LFS_MAGIC = b"version https://git-lfs"
_GZIP_MAGIC, _ZIP_MAGIC = b"\x1f\x8b", b"PK\x03\x04"
_FIXED = {EIGHT_BYTES: 8, FOUR_BYTES: 4}


class IndexableBytes(Protocol):
    """Bytes read by index: a memoryview, or a file that is not in memory."""

    def __getitem__(self, at: int, /) -> int: ...


class WireError(Exception):
    """The bytes are not valid fields, or are groups, which neither Caffe writes."""


class WireField(NamedTuple):
    """A field of a serialised message.

    Args:
        number: field number in the schema.
        kind: wire type.
        start: offset of the field.
        begin: offset of its content.
        end: end of its content.
    """

    number: int
    kind: int
    start: int
    begin: int
    end: int


class FieldValue(NamedTuple):
    """A field that is set.

    Args:
        message: the message that has the field.
        field: the field's descriptor.
        value: the value, or the container of a repeated field.
        path: path from the walked message: ``layer.convolution_param.pad``.
    """

    message: Message
    field: Any
    value: Any
    path: str


def schema_name(message: Any) -> str:
    """Return a message's name within the schema: ``ConvolutionParameter``, or ``Outer.Inner``."""
    return str(message.full_name).partition(".")[2]


def walk_fields(message: Message, prefix: str = "") -> Iterator[FieldValue]:
    """Yield the set fields of a message and its submessages, outer fields first. Blobs are not entered."""
    for field, value in message.ListFields():
        path = prefix + field.name
        yield FieldValue(message, field, value, path)
        if field.message_type is not None and field.message_type.name != "BlobProto":
            for part in [value] if isinstance(value, Message) else value:
                yield from walk_fields(part, f"{path}.")


def field_header(tag: bytes, length: int) -> bytes:
    """Return a tag followed by `length` as a varint."""
    result = bytearray(tag)
    while length > 127:
        result.append(length & 127 | 128)
        length >>= 7
    result.append(length)
    return bytes(result)


def encode_delimited(number: int, content: Sequence[Part]) -> list[Part]:
    """Return the parts of a length-delimited field."""
    return [field_header(field_header(b"", number << 3 | DELIMITED), sum(map(len, content))), *content]


def wire_fields(view: IndexableBytes, begin: int, end: int) -> Iterator[WireField]:
    """Yield the fields of the message in view[begin:end].

    Raises:
        WireError: the bytes are not valid fields.
    """
    at = begin
    while at < end:
        start = at
        tag, content = read_varint(view, at, end)
        kind = tag & 7
        if kind == VARINT:
            _, at = read_varint(view, content, end)
        elif kind == DELIMITED:
            size, content = read_varint(view, content, end)
            at = content + size
        elif kind in _FIXED:
            at = content + _FIXED[kind]
        else:
            raise WireError
        if at > end:
            raise WireError
        yield WireField(tag >> 3, kind, start, content, at)


def read_varint(view: IndexableBytes, at: int, end: int) -> tuple[int, int]:
    """Return a varint and its end."""
    number = 0
    for shift in range(0, 64, 7):
        if at >= end:
            break
        byte = view[at]
        number, at = number | (byte & 127) << shift, at + 1
        if byte < 128:
            return number, at
    raise WireError("unterminated varint")


def describe_content(data: bytes) -> str:
    """Describe the actual content of a rejected binary file and suggest a remedy."""
    if not data:
        return "it is empty, for example after an interrupted copy or on a full disk; use an older one"
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
    return "it is truncated or of another format; copy it again or use an older one"


def _parses(data: bytes, message: Message, field: str) -> bool:
    try:
        message.MergeFromString(data)
    except (DecodeError, RecursionError):
        return False
    return any(descriptor.name == field for descriptor, _ in message.ListFields())


def is_text(head: bytes) -> bool:
    """Return whether the beginning of a file is printable ASCII."""
    printable = sum(byte >= 32 or byte in b"\t\n\r" for byte in head)
    return bool(head) and b"\0" not in head and printable == len(head)
