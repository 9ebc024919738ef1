"""Merges a fork's schema with caffepy's.

Fields, messages and values of enumerations are matched by name. The fork decides numbers and defaults, and the types of
its own fields. A field that only caffepy has keeps its number if the fork leaves it free.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeAlias

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)

if TYPE_CHECKING:
    from google.protobuf.internal.containers import RepeatedCompositeFieldContainer

FIRST_FREE_NUMBER = 100_000
"""From here on, fields and values of caffepy get numbers where the fork uses theirs."""

Holder: TypeAlias = FileDescriptorProto | DescriptorProto

_Field = FieldDescriptorProto
_KINDS = (
    {_Field.TYPE_DOUBLE, _Field.TYPE_FLOAT},
    {value for name, value in _Field.Type.items() if "INT" in name or "FIXED" in name},
    {_Field.TYPE_BOOL},
    {_Field.TYPE_STRING},
    {_Field.TYPE_BYTES},
)
"""Types whose values Python code reads alike."""


@dataclass
class Merged:
    """A merged schema.

    Args:
        file: its descriptor.
        fields: ``Message.field`` of each field that caffepy does not know, or knows with another type.
        values: ``Enum.VALUE`` of each value of caffepy's enumerations that caffepy does not know.
        single: ``Message.field`` of each field that the fork repeats and caffepy does not.
    """

    file: FileDescriptorProto
    fields: set[str] = field(default_factory=set)
    values: set[str] = field(default_factory=set)
    single: set[str] = field(default_factory=set)


def merge_schemas(fork: FileDescriptorProto, own: FileDescriptorProto) -> Merged:
    """Merge the schema of a fork, as `parse_schema` returns it, into a copy of caffepy's."""
    merged = Merged(FileDescriptorProto())
    merged.file.CopyFrom(own)
    theirs = FileDescriptorProto()
    theirs.CopyFrom(fork)
    _rename_old_layers(theirs)
    _separate_enums(theirs, theirs, merged.file, "")
    _merge_holder(merged.file, theirs, "", own.package, merged)
    _lift_old_fields(merged)
    return merged


def _rename_old_layers(fork: FileDescriptorProto) -> None:
    """Give the layers of Caffe's second format, whose type is an enumeration, the name that they have since 2014."""
    names = {message.name: message for message in fork.message_type}
    old = names.get("LayerParameter")
    if old is None or "V1LayerParameter" in names:
        return
    if not any(each.name == "type" and each.type == _Field.TYPE_ENUM for each in old.field):
        return
    old.name = "V1LayerParameter"
    for message in _messages(fork):
        for each in message.field:
            parts = each.type_name.split(".")
            if parts[1:2] == ["LayerParameter"]:
                each.type_name = ".".join(["", "V1LayerParameter", *parts[2:]])


def _separate_enums(fork: FileDescriptorProto, holder: Holder, own: Holder, scope: str) -> None:
    """Move each enumeration of the fork's own whose values have names of caffepy's into a message of its own.

    Values of enumerations are names of the scope that holds the enumeration.
    """
    known = {enum.name for enum in own.enum_type}
    values = {value.name for enum in own.enum_type for value in enum.value}
    names = {message.name: message for message in _inner(own)}
    for message in [message for message in _inner(holder) if message.name in names]:
        _separate_enums(fork, message, names[message.name], f"{scope}{message.name}.")
    for enum in list(holder.enum_type):
        if enum.name in known or values.isdisjoint(value.name for value in enum.value):
            continue
        wrapper = _inner(holder).add(name=f"{enum.name}Values")
        wrapper.enum_type.append(enum)
        old, new = f".{scope}{enum.name}", f".{scope}{wrapper.name}.{enum.name}"
        for message in _messages(fork):
            for each in message.field:
                if each.type_name == old:
                    each.type_name = new
        holder.enum_type.remove(enum)


def _lift_old_fields(merged: Merged) -> None:
    """Give LayerParameter the fields that only the fork's V1LayerParameter has, because V1 layers are upgraded."""
    messages = {message.name: message for message in merged.file.message_type}
    layer = messages["LayerParameter"]
    known, numbers = {each.name for each in layer.field}, {each.number for each in layer.field}
    for old in messages["V1LayerParameter"].field:
        if f"V1LayerParameter.{old.name}" in merged.fields and old.name not in known:
            added = layer.field.add()
            added.CopyFrom(old)
            added.number = _free_number(old.number, numbers)
            numbers.add(added.number)
            merged.fields.add(f"LayerParameter.{old.name}")


def _messages(holder: Holder) -> Iterator[DescriptorProto]:
    for message in _inner(holder):
        yield message
        yield from _messages(message)


def _inner(holder: Holder) -> RepeatedCompositeFieldContainer[DescriptorProto]:
    return holder.message_type if isinstance(holder, FileDescriptorProto) else holder.nested_type


def _merge_holder(own: Holder, fork: Holder, scope: str, package: str, merged: Merged) -> None:
    """Merge the enumerations and messages of a file or a message."""
    known = {enum.name: enum for enum in own.enum_type}
    kept = {enum.name for enum in own.enum_type} - {enum.name for enum in fork.enum_type}
    taken = {value.name for name in kept for value in known[name].value}
    for enum in fork.enum_type:
        if enum.name in known:
            _merge_enum(known[enum.name], enum, taken, f"{scope}{enum.name}", merged)
        else:
            own.enum_type.append(enum)
    messages = {message.name: message for message in _inner(own)}
    for message in _inner(fork):
        mine = messages.get(message.name)
        if mine is None:
            mine = _inner(own).add(name=message.name)
        _merge_holder(mine, message, f"{scope}{message.name}.", package, merged)
        _merge_fields(mine, message, f"{scope}{message.name}", package, merged)


def _merge_enum(
    own: EnumDescriptorProto, fork: EnumDescriptorProto, taken: set[str], name: str, merged: Merged
) -> None:
    """Make `own` the fork's values, without names that other enumerations have `taken`, then those of caffepy only."""
    known = {value.name: value.number for value in own.value}
    for value in [value for value in fork.value if value.name in taken and value.name not in known]:
        fork.value.remove(value)
    names = {value.name for value in fork.value}
    numbers = {value.number for value in fork.value}
    del own.value[:]
    own.value.extend(fork.value)
    own.options.CopyFrom(fork.options)
    merged.values.update(f"{name}.{value}" for value in names - set(known))
    for value, number in known.items():
        if value not in names:
            number = _free_number(number, numbers)
            numbers.add(number)
            own.value.add(name=value, number=number)


def _merge_fields(own: DescriptorProto, fork: DescriptorProto, name: str, package: str, merged: Merged) -> None:
    """Make `own` the fork's fields, then those that only caffepy has."""
    known = {each.name: each for each in own.field}
    fields = []
    for theirs in fork.field:
        if theirs.type_name:
            theirs.type_name = f".{package}{theirs.type_name}"
        mine = known.pop(theirs.name, None)
        if mine is None or not _reads_alike(mine, theirs):
            merged.fields.add(f"{name}.{theirs.name}")
        else:
            _adopt_label(theirs, mine, f"{name}.{theirs.name}", merged)
        fields.append(theirs)
    numbers = {each.number for each in fields}
    for mine in known.values():
        mine.number = _free_number(mine.number, numbers)
        numbers.add(mine.number)
        fields.append(mine)
    copies = DescriptorProto(field=fields)
    del own.field[:]
    own.field.extend(copies.field)


def _reads_alike(own: FieldDescriptorProto, fork: FieldDescriptorProto) -> bool:
    """Whether code that reads caffepy's field can read the fork's."""
    if own.type_name or fork.type_name:
        return own.type_name == fork.type_name
    return any(own.type in kind and fork.type in kind for kind in _KINDS)


def _adopt_label(fork: FieldDescriptorProto, own: FieldDescriptorProto, name: str, merged: Merged) -> None:
    """Give a field of both schemas caffepy's label: code reads either one value or a list."""
    if fork.label == _Field.LABEL_REPEATED and own.label != _Field.LABEL_REPEATED:
        merged.single.add(name)
        fork.options.ClearField("packed")
    if own.label == _Field.LABEL_REPEATED:
        fork.ClearField("default_value")
    fork.label = own.label


def _free_number(wanted: int, taken: set[int]) -> int:
    if wanted not in taken:
        return wanted
    return next(number for number in itertools.count(FIRST_FREE_NUMBER) if number not in taken)
