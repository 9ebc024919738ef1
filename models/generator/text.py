"""A protobuf message as prototxt, in the layout of the files in models/."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

WIDTH = 120
INLINE_WIDTH = 100
INLINE = 4
"""Values of a message within a layer that still stand in one line."""


def net_text(net: Message, comment: str) -> str:
    """A net's prototxt: the comment, wrapped, the name, and a paragraph for all layers."""
    head = "".join(f"# {line}\n" for line in wrapped(comment))
    return f"{head}{body(net)}".replace("\nlayer {", "\n\nlayer {", 1)


def wrapped(comment: str) -> list[str]:
    return [line for part in comment.splitlines() for line in textwrap.wrap(part, WIDTH - 2)]


def body(message: Message, indent: str = "") -> str:
    return "".join(
        f"{indent}{line}\n" if isinstance(value, str) else _submessage(field, value, indent)
        for field, value in _values(message)
        for line in [f"{field.name}: {value}"]
    )


def _submessage(field: FieldDescriptor, value: Message, indent: str) -> str:
    parts = list(_values(value))
    if indent and len(parts) <= INLINE and all(isinstance(part, str) for _, part in parts):
        line = "".join(f" {part.name}: {text}" for part, text in parts)
        line = f"{indent}{field.name} {{{line} }}\n"
        if len(line) <= INLINE_WIDTH:
            return line
    return f"{indent}{field.name} {{\n{body(value, indent + '  ')}{indent}}}\n"


def _values(message: Message) -> Iterator[tuple[FieldDescriptor, str | Message]]:
    """Every field and single value, in the schema's order: a message, or the text of a scalar."""
    for field, found in message.ListFields():
        for value in found if field.is_repeated else [found]:
            yield field, value if isinstance(value, Message) else _scalar(field, value)


def _scalar(field: FieldDescriptor, value: Any) -> str:
    if field.enum_type is not None:
        return str(field.enum_type.values_by_number[value].name)
    if field.type == FieldDescriptor.TYPE_BOOL:
        return str(value).lower()
    if field.cpp_type == FieldDescriptor.CPPTYPE_FLOAT:
        return f"{value:.7g}"
    return json.dumps(value) if isinstance(value, str) else str(value)
