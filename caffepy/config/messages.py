"""Walking a protobuf message with all that is within it, and the wire format's heads of fields."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from google.protobuf.message import Message


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
